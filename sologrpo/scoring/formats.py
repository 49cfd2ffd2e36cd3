"""Compare the gain under the prompt that was trained with that under others."""

from collections.abc import Mapping, Sequence
from typing import Any

from sologrpo.base.errors import InputError
from sologrpo.scoring.comparison import differing, pair_with_baselines
from sologrpo.scoring.records import Evaluated

TRAINED, UNSEEN, HARNESS = "trained", "unseen", "harness's"
ROLES = (TRAINED, UNSEEN, HARNESS)  # of a prompt, in the order of the table
HARNESS_FORMAT = "lm_eval"
# Rates that explain a difference, before and after.
RATES = ("accuracy_lenient", "format_rate", "truncated_rate")

OF_PROMPT = {"prompt_format", "prompts_hash"}  # settings in which the rows may differ
MANY_CUT_OFF = 0.1  # of the answers: a gain can then be a gain in brevity
SIGNIFICANT = 0.05  # exact McNemar p; the interval is approximate, and the two can disagree
RULE = (
    "A gain shows where the whole 95 % interval of the strict difference lies above 0 and "
    f"p is below {SIGNIFICANT}."
)

Row = Mapping[str, Any]


def compare_formats(evaluated: Mapping[str, Evaluated], trained: Sequence[str]) -> dict[str, Any]:
    """Compare the trained model with its baseline under each prompt, on the same problems.

    `evaluated` has both under each prompt; `trained` lists the prompt formats of the training.
    """
    rows = {}
    for pair in (pairs := pair_with_baselines(evaluated)):
        if pair.numbers is None:
            raise InputError(pair.apart())
        before, after = evaluated[pair.baseline].results, evaluated[pair.label].results
        first = evaluated[pairs[0].label].results["settings"]
        if others := differing(first, after["settings"]).keys() - OF_PROMPT:
            raise InputError(f"{pairs[0].label} and {pair.label} have another {min(others)}")
        name = after["prompt_format"]
        rows[name] = {
            "role": _role(name, trained),
            "label": pair.label,
            "baseline": pair.baseline,
            **pair.numbers,
            **{f"baseline_{rate}": before[rate] for rate in RATES},
            **{rate: after[rate] for rate in RATES},
        }
    ordered = dict(sorted(rows.items(), key=lambda item: ROLES.index(item[1]["role"])))
    _, results = next(iter(evaluated.values()))
    return {
        "verdict": verdict(ordered),
        "n": results["n"],
        "split": results["split"],
        "max_completion_length": results["max_completion_length"],
        "prompt_formats": ordered,
    }


def _role(name: str, trained: Sequence[str]) -> str:
    if name in trained:
        return TRAINED
    return HARNESS if name == HARNESS_FORMAT else UNSEEN


def verdict(rows: Mapping[str, Row]) -> str:
    """State in plain words whether the gain travels to prompts that were not trained.

    >>> rates = {"truncated_rate": 0.0, "baseline_truncated_rate": 0.0}
    >>> xml = {"role": "trained", "delta_ci95": (0.2, 0.4), "mcnemar_p": 1e-9, **rates}
    >>> boxed = {"role": "unseen", "delta_ci95": (-0.1, 0.1), "mcnemar_p": 1.0, **rates}
    >>> verdict({"xml": xml, "boxed": boxed}).partition(". ")[0]
    'The gain is in the trained prompt alone: it shows under xml, not under boxed'
    """
    trained = [name for name, row in rows.items() if row["role"] == TRAINED]
    changed = {name: row for name, row in rows.items() if row["mcnemar_p"] < SIGNIFICANT}
    gained = [name for name, row in changed.items() if row["delta_ci95"][0] > 0]
    fell = [name for name, row in changed.items() if row["delta_ci95"][1] < 0]
    others = [name for name in rows if name not in gained]
    shown = f"it shows under {_names(gained)}"
    if not set(trained) & set(gained):
        text = f"No gain under the trained prompt, {_names(trained)}"
        text += f"; one shows under {_names(gained)}." if gained else ", nor under any other."
    elif set(gained) <= set(trained):
        text = f"The gain is in the trained prompt alone: {shown}, not under {_names(others)}."
    elif others:
        text = f"The gain travels in part: {shown}, not under {_names(others)}."
    else:
        text = f"The gain travels: {shown}."
    if fell:
        text += f" Accuracy fell under {_names(fell)}."
    if cut := [name for name, row in rows.items() if _cut_off(row) > MANY_CUT_OFF]:
        text += f" Over {MANY_CUT_OFF:.0%} of the answers were cut off under {_names(cut)}: "
        text += "raise --max_completion_length before you trust that."
    return f"{text} {RULE}"


def _cut_off(row: Row) -> float:
    return max(float(row[rate]) for rate in ("baseline_truncated_rate", "truncated_rate"))


def _names(names: Sequence[str]) -> str:
    return ", ".join(names)
