"""Check and record what a reward logs. It is logged once the reward has returned sound scores."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from rewards.errors import RewardError, one_line

# Names that the trainer logs itself (docs/metrics.md).
RESERVED_METRICS = {
    *("loss", "grad_norm", "learning_rate", "epoch", "step", "progress"),
    *("reward", "reward_std", "reward_min", "reward_max", "frac_reward_zero_std"),
    *("num_tokens", "num_input_tokens_seen", "resampled_groups", "trained_completions"),
    *("step_time", "total_flos"),
    *("kl", "entropy", "policy_loss", "entropy_coef", "aux_loss", "cispo_clip_ratio"),
}
RESERVED_PREFIXES = (
    *("rewards/", "advantage_share/", "degenerate/", "completions/", "hacking/", "tools/"),
    *("clip_ratio/", "ratio/", "sampling/", "vespo/", "time/", "memory/", "tokens_per_second/"),
    *("eval_", "eval/", "train_", "train/"),
)
# Columns of the completions file, to which every reward adds its name (TRL 1.16.0,
# grpo_trainer.py:3343-3350).
RESERVED_COLUMNS = {"step", "prompt", "completion", "advantage", "image"}


class Logs:
    """Record what one call of a reward logs.

    Args:
        reward: its name.
        count: number of completions.
    """

    def __init__(self, reward: str, count: int) -> None:
        self._reward = reward
        self._count = count
        self.metrics: list[tuple[str, float]] = []
        self.columns: dict[str, list[Any]] = {}

    def passed_with(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments with the functions that record, where they have TRL's."""
        functions = {"log_metric": self.log_metric, "log_extra": self.log_extra}
        return {name: functions.get(name, value) for name, value in arguments.items()}

    def log_metric(self, name: str, value: float) -> None:
        """Record a number.

        Raises:
            RewardError: the name is reserved, or the value is not a finite number.
        """
        self._check_name("log_metric", name)
        if name in RESERVED_METRICS or name.startswith(RESERVED_PREFIXES):
            raise self._error("log_metric", name, "the trainer logs this name: choose another")
        try:
            number = float(value) if hasattr(type(value), "__float__") else math.nan
        except Exception:  # the value's own code
            number = math.nan
        if not math.isfinite(number):
            raise self._error("log_metric", name, f"{_shown(value)} is not a finite number")
        self.metrics.append((name, number))

    def log_extra(self, column: str, values: Any) -> None:
        """Record a column of the completions file.

        Raises:
            RewardError: the name is reserved, or the values are not one string or number per
                completion.
        """
        self._check_name("log_extra", column)
        if column in RESERVED_COLUMNS or column in self.columns:
            raise self._error("log_extra", column, "the file has this column: choose another name")
        listed = [_plain(value) for value in values] if isinstance(values, list | tuple) else []
        if len(listed) != self._count:
            problem = f"expected a list of {self._count} values, one per completion"
            raise self._error("log_extra", column, problem)
        kinds = {_kind(value) for value in listed if value is not None}
        if None in kinds or len(kinds) > 1:
            problem = "log only strings, only numbers or only booleans, and None"
            raise self._error("log_extra", column, problem)
        self.columns[column] = listed

    def replay(self, arguments: Mapping[str, Any]) -> None:
        """Log with the functions that TRL passed."""
        for name, value in self.metrics:
            arguments["log_metric"](name, value)
        for column, values in self.columns.items():
            arguments["log_extra"](column, values)

    def _check_name(self, function: str, name: Any) -> None:
        if not isinstance(name, str) or not name or not name.isprintable():
            raise self._error(function, name, "the name must be a printable string")

    def _error(self, function: str, name: Any, problem: str) -> RewardError:
        return RewardError(f"reward {self._reward!r}: {function}({_shown(name)}): {problem}")


def log_nothing(name: str, value: Any) -> None:
    """Take the place of TRL's loggers where nothing is logged."""


def _kind(value: Any) -> str | None:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number" if abs(value) < 2**63 or isinstance(value, float) else None
    return "string" if isinstance(value, str) else None


def _plain(value: Any) -> Any:
    if isinstance(value, str):  # lone surrogates fit into no file
        return value.encode("utf-8", "replace").decode()
    # Scalars of numpy and torch become numbers.
    return value.item() if getattr(value, "shape", None) == () else value


def _shown(value: Any) -> str:
    return one_line(reprlib.repr(value))
