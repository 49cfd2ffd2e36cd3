"""List the rewards, or score one completion with each of them: `sologrpo rewards`."""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import NoReturn

from rewards import (
    PROMPT_FORMATS,
    REWARDS,
    Reward,
    hacking_signs,
    judge,
    lenient_is_correct,
    load_rewards,
    parse_gold,
)

COLUMNS = ("question", "answer", "prompt_format")  # of every data set


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command != "score":
        list_rewards()
        return
    if options.completion is None and sys.stdin.isatty():
        parser.error("no completion: type it as an argument, or pipe it in")
    if options.completion is None:
        options.completion = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    rewards = load_rewards(options.reward or [*REWARDS], COLUMNS, options.reward_timeout, 1)
    score(options.completion, options.gold, options.prompt_format, rewards)


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
    command.add_argument("--gold", type=gold, required=True, help='"42" or a whole GSM8K answer')
    command.add_argument("--prompt_format", choices=PROMPT_FORMATS, default="xml")
    command.add_argument(
        "--reward", action="append", help="only this one, or my_module:my_reward; repeatable"
    )
    command.add_argument(
        "--reward_timeout", type=seconds, default=30.0, metavar="SECONDS",
        help="time for a reward of your own; 0 for no limit (default: %(default)g)",
    )  # fmt: skip
    return parser


def gold(text: str) -> str:
    """Parse a gold answer, with or without the solution before it."""
    answer = text if "####" in text else f"#### {text}"
    try:
        parse_gold(answer)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return answer


def seconds(text: str) -> float:
    """Parse a limit."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError
    return number


def list_rewards() -> None:
    """Print every name with the first line of its docstring."""
    width = max(map(len, REWARDS))
    for name, reward in REWARDS.items():
        print(f"{name:{width}}  {str(reward.__doc__).splitlines()[0]}")


def score(completion: str, gold: str, prompt_format: str, rewards: list[Reward]) -> None:
    """Print the score of each reward, the extracted answer and the reason of the verdict."""
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
    if reward.takes_token_ids:
        return "needs token ids, which only a training run has"
    columns = {"question": [""], "answer": [gold], "prompt_format": [prompt_format]}
    (scored,) = reward.score(prompts=[""], completions=[completion], **columns)
    return "cannot judge (None)" if scored is None else f"{scored:+g}"
