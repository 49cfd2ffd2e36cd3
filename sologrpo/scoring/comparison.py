"""Compare a trained model with its baseline problem by problem, or explain why not."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from sologrpo.base.files import BASELINE
from sologrpo.base.schema import shown
from sologrpo.scoring.records import Evaluated, hash_text
from sologrpo.scoring.statistics import compare_paired

Settings = Mapping[str, Any]
Differences = dict[str, tuple[Any, Any]]
ADAPTER_HASH = "adapter_hash"


def compare_settings(here: Settings, there: Settings) -> Differences:
    """Find the settings that keep two evaluations from being compared; empty if none does.

    The adapter is what a comparison is about, so it may differ. The base model alone is the same
    model in the precisions `merged` and `adapter`. The seed chooses the problems of a `limit`, and
    samples.

    >>> compare_settings({"limit": 3, "adapter_hash": "9f86"}, {"limit": 20})
    {'limit': (3, 20)}
    """
    both = (dict(here), dict(there))
    if None in [settings.pop(ADAPTER_HASH, None) for settings in both]:
        for settings in both:
            if settings.get("precision") == "adapter":
                settings["precision"] = "merged"
    if not any(settings.get(name) for settings in both for name in ("limit", "num_samples")):
        for settings in both:
            settings.pop("seed", None)
    return differing(*both)


def differing(here: Settings, there: Settings) -> Differences:
    """Return both values of each setting that differs, by name."""
    return {
        name: (here.get(name), there.get(name))
        for name in {**here, **there}
        if here.get(name) != there.get(name)
    }


def without_hashes(found: Differences) -> Differences:
    """Leave out the hashes, unless nothing else differs: a setting explains them."""
    return {name: both for name, both in found.items() if not name.endswith("_hash")} or found


def differences(here: Evaluated, there: Evaluated) -> Differences:
    """Find what keeps two evaluations from being compared: settings, or else their questions."""
    asked = (hash_text("".join(r.question_hash for r in e.records)) for e in (here, there))
    return compare_settings(here.results["settings"], there.results["settings"]) or differing(
        *({"questions": value} for value in asked)
    )


class Pair(NamedTuple):
    """A trained model and its baseline, with paired numbers unless their settings `differ`."""

    label: str
    baseline: str
    numbers: dict[str, Any] | None
    differ: Differences

    def apart(self) -> str:
        """Explain in one line why the two are not compared."""
        both = without_hashes(self.differ).items()
        found = ", ".join(f"{name} {shown(a)} here, {shown(b)} there" for name, (a, b) in both)
        return f"{self.label} is not compared with {self.baseline}: {found}"


def pair_with_baselines(evaluated: Mapping[str, Evaluated]) -> list[Pair]:
    """Pair each trained model with the baseline that differs least, compared if nothing differs."""
    baselines = [label for label in evaluated if label.startswith(BASELINE)]
    pairs = []
    for label, after in evaluated.items():
        if label in baselines or not baselines:
            continue
        found = {name: differences(after, evaluated[name]) for name in baselines}
        baseline = min(found, key=lambda name: len(found[name]))
        differ = found[baseline]
        numbers = None if differ else compare(evaluated[baseline], after)
        pairs.append(Pair(label, baseline, numbers, differ))
    return pairs


def compare(before: Evaluated, after: Evaluated) -> dict[str, Any]:
    """Compare two models on the same problems, from their records: numbers of `results.json`."""
    verdicts = ([record.correct for record in e.records] for e in (before, after))
    return compare_paired(*verdicts).model_dump()
