"""Check the rewards of a run with its data and its tokenizer: `sologrpo rewards check`."""

import sys
from collections.abc import Sequence

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rewards import load_rewards
from rewards.check import Bench, Report, check_rewards, counted
from sologrpo.base.console import quiet_libraries
from sologrpo.base.errors import one_line_errors
from sologrpo.base.text import escaped
from sologrpo.config.parsing import parse_config
from sologrpo.data.dataset import build_prompts, load_rows, prompt_format_of


@one_line_errors
def main(argv: Sequence[str]) -> None:
    """Print the check of a run's rewards; exit with 1 if a check failed."""
    quiet_libraries()
    report = check_run(argv)
    print(escaped(report.text()))
    sys.exit(1 if report.failures else 0)


def check_run(argv: Sequence[str]) -> Report:
    """Check the rewards of a run, whose command line is that of `sologrpo train`.

    Raises:
        InputError: for bad input, as in training.
        RewardSpecError: for bad input in `rewards`.
    """
    run, args, model_args = parse_config(argv)
    tokenizer = _local_tokenizer(model_args.model_name_or_path, args.trust_remote_code)
    rows = load_rows(run.dataset_name, run.dataset_train_split, run.dataset_config)
    rows = build_prompts(rows, run, tokenizer)
    rewards = load_rewards(run.rewards, rows.column_names, run.reward_timeout, run.reward_workers)
    weights = args.reward_weights or [1.0] * len(rewards)
    bench = Bench(
        rows.to_dict(),
        prompt_format_of(run),
        args.generation_batch_size,
        args.max_completion_length,
        tokenizer,
    )
    title = (
        f"{counted(len(rewards), 'reward')}, prompt format {run.prompt_format}, "
        f"{len(rows):,} rows of {run.dataset_name} ({run.dataset_train_split})"
    )
    return check_rewards(title, rewards, weights, bench)


def _local_tokenizer(model: str, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """Load the run's tokenizer, or return None if it would have to be downloaded."""
    try:
        return AutoTokenizer.from_pretrained(
            model, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError):
        return None
