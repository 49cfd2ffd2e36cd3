"""List the rewards, or score one completion with each of them: `sologrpo rewards`.

Three ways to call it, here by the name that needs no more than this folder::

    python -m rewards
    python -m rewards score --gold 42 "<answer>42</answer>"
    python -m rewards score --gold 42 --prompt_format boxed < completion.txt

`sologrpo rewards check` tries the rewards of a recipe before a run.
"""

import argparse
import asyncio
import inspect
import math
import sys
from pathlib import Path
from typing import NoReturn

from rewards import (
    PROMPT_FORMATS,
    REWARDS,
    Reward,
    RewardError,
    hacking_signs,
    judge,
    lenient_is_correct,
    load_rewards,
)
from rewards.errors import one_line
from rewards.logs import log_nothing

COLUMNS = ("question", "answer", "prompt_format")  # of every data set


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors are one line on stderr and exit code 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command != "score":
        list_rewards()
        return
    failed: Exception | None = None
    try:
        completion = _completion(options)
        rewards = load_rewards(options.reward or [*REWARDS], COLUMNS, options.reward_timeout, 1)
        score(completion, _gold(options.gold), options.prompt_format, rewards)
    except (ValueError, RewardError) as error:
        failed = error
    if isinstance(failed, RewardError):  # outside of `except`: the exit has no other cause
        print(failed.own_traceback(), file=sys.stderr, end="")
        parser.exit(1, f"error: {failed}\n")
    if failed is not None:
        parser.error(str(failed))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="sologrpo rewards",
        description="List the rewards, or score a completion.",
        epilog="`sologrpo rewards check --config NAME` checks the rewards before a run.",
    )
    commands = parser.add_subparsers(dest="command", parser_class=_Parser)
    commands.add_parser("list", help="list the rewards (the default)")
    command = commands.add_parser("score", help="score one completion with every reward")
    command.add_argument("completion", nargs="?", help="the text; read from stdin if left out")
    command.add_argument("--gold", required=True, help='"42" or a whole GSM8K answer')
    command.add_argument("--prompt_format", choices=PROMPT_FORMATS, default="xml")
    command.add_argument("--file", help="read the completion from this file")
    command.add_argument(
        "--reward", action="append", help="only this one, or my_module:my_reward; repeatable"
    )
    command.add_argument(
        "--reward_timeout", type=seconds, default=30.0, metavar="SECONDS",
        help="time for a reward of your own; 0 for no limit (default: %(default)g)",
    )  # fmt: skip
    return parser


def list_rewards() -> None:
    """Print every name with the first line of its docstring."""
    width = max(map(len, REWARDS))
    for name, reward in REWARDS.items():
        print(f"{name:{width}}  {_first_line(reward)}")


def score(completion: str, gold: str, prompt_format: str, rewards: list[Reward]) -> None:
    """Print the score of each reward, the extracted answer and the reason of the verdict.

    Args:
        completion: the text.
        gold: the answer, as in GSM8K.
        prompt_format: of the completion.
        rewards: as loaded.

    Raises:
        RewardError: a reward of the user failed.
    """
    verdict = judge(completion, gold, prompt_format)
    scores = {
        reward.__name__: _score(reward, completion, gold, prompt_format) for reward in rewards
    }
    width = max(map(len, ["signs of hacking", *scores]))
    for name, scored in scores.items():
        print(f"{name:{width}}  {scored}")
    print(f"{'extracted answer':{width}}  {verdict.extracted}")
    print(f"{'verdict':{width}}  {'right' if verdict.correct else 'wrong'}: {verdict.reason}")
    lenient = "right" if lenient_is_correct(completion, gold) else "wrong"
    print(f"{'last number':{width}}  {lenient} (for reports only)")
    shown = [name for name, shows in hacking_signs(completion, prompt_format).items() if shows]
    print(f"{'signs of hacking':{width}}  {', '.join(shown) or 'none'}")


def _score(reward: Reward, completion: str, gold: str, prompt_format: str) -> str:
    if reward.takes_token_ids:  # type: ignore[attr-defined]
        return "needs token ids, which only a training run has"
    row = {"question": "", "answer": gold, "prompt_format": prompt_format}
    scores = reward(
        prompts=[""], completions=[completion], **{name: [row[name]] for name in COLUMNS},
        trainer_state=None, log_extra=log_nothing, log_metric=log_nothing,
    )  # fmt: skip
    if inspect.iscoroutine(scores):
        scores = asyncio.run(scores)
    return "cannot judge (None)" if scores[0] is None else f"{scores[0]:+g}"


def seconds(text: str) -> float:
    """Parse a limit."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError
    return number


def _completion(options: argparse.Namespace) -> str:
    if options.completion is not None and options.file is not None:
        raise ValueError("give the completion or --file, not both")
    if options.completion is not None:
        return str(options.completion)
    if options.file is not None:
        try:
            return Path(options.file).read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {options.file!r}: {one_line(error)}") from None
    if sys.stdin.isatty():
        raise ValueError("no completion: type it as an argument, pipe it in, or use --file")
    return sys.stdin.buffer.read().decode("utf-8", errors="replace")


def _gold(text: str) -> str:
    return text if "####" in text else f"#### {text}"


def _first_line(reward: Reward) -> str:
    return (inspect.getdoc(reward) or "").partition("\n")[0]


if __name__ == "__main__":
    main()
