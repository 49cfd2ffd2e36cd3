"""Check and record what a reward logs. It is logged once the reward has returned sound scores."""

import math
from collections.abc import Mapping
from typing import Any

# Names that the trainer logs itself (docs/metrics.md).
RESERVED_METRICS = {
    *("loss", "grad_norm", "learning_rate", "epoch", "step", "progress"),
    *("reward", "reward_std", "reward_min", "reward_max", "frac_reward_zero_std"),
    *("num_tokens", "num_input_tokens_seen", "trained_completions"),
    *("step_time", "total_flos"),
    *("kl", "entropy", "policy_loss", "entropy_coef", "aux_loss", "cispo_clip_ratio"),
}
RESERVED_PREFIXES = (
    *("rewards/", "degenerate/", "completions/", "hacking/", "tools/"),
    *("clip_ratio/", "ratio/", "sampling/", "vespo/", "time/", "memory/", "tokens_per_second/"),
    *("tokens/", "accuracy/"),
    *("eval_", "eval/", "train_", "train/"),
)
# Columns of the completions file, to which every reward adds its name (TRL 1.16.0,
# grpo_trainer.py:3343-3350).
RESERVED_COLUMNS = {"step", "prompt", "completion", "advantage", "image"}
KINDS = ({str}, {bool}, {int, float})  # types that fit into one column
INT64 = range(-(2**63), 2**63)


class Logs:
    """Record what one call of a reward logs.

    Args:
        count: number of completions.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.metrics: list[tuple[str, float]] = []
        self.columns: dict[str, list[Any]] = {}

    def functions(self) -> dict[str, Any]:
        """Return the functions that a reward is given instead of TRL's."""
        return {"log_metric": self.log_metric, "log_extra": self.log_extra}

    def log_metric(self, name: str, value: float) -> None:
        """Record a number.

        Raises:
            ValueError: the name is reserved, or the value is not finite.
            TypeError: the value is not a number.
        """
        _check_name(name)
        if name in RESERVED_METRICS or name.startswith(RESERVED_PREFIXES):
            raise ValueError(f"the trainer logs {name!r} itself: choose another name")
        if not math.isfinite(value):
            raise ValueError(f"log_metric({name!r}): {value} is not a finite number")
        self.metrics.append((name, float(value)))

    def log_extra(self, column: str, values: Any) -> None:
        """Record a column of the completions file.

        Raises:
            ValueError: the name is reserved, or the values are not one string or number per
                completion.
        """
        _check_name(column)
        if column in RESERVED_COLUMNS or column in self.columns:
            raise ValueError(f"the file has a column {column!r}: choose another name")
        listed = [_plain(value) for value in values] if isinstance(values, list | tuple) else []
        if len(listed) != self._count:
            problem = f"expected a list of {self._count} values, one per completion"
            raise ValueError(f"log_extra({column!r}): {problem}")
        types = {type(value) for value in listed if value is not None}
        fits = all(value in INT64 for value in listed if type(value) is int)
        if not fits or not any(types <= kind for kind in KINDS):
            problem = "log only strings, only numbers or only booleans, and None"
            raise ValueError(f"log_extra({column!r}): {problem}")
        self.columns[column] = listed

    def replay(self, arguments: Mapping[str, Any]) -> None:
        """Log with the functions that TRL passes; outside of training, nothing is logged."""
        if "log_metric" in arguments:
            for name, value in self.metrics:
                arguments["log_metric"](name, value)
            for column, values in self.columns.items():
                arguments["log_extra"](column, values)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError(f"the name must be a printable string, not {name!r}")


def _plain(value: Any) -> Any:
    if isinstance(value, str):  # lone surrogates fit into no file
        return value.encode("utf-8", "replace").decode()
    # Scalars of numpy and torch become numbers.
    return value.item() if getattr(value, "shape", None) == () else value
