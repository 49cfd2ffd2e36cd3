"""Model card: what a model is, how it was trained and what it scores.

Every setting is taken from the run by name, so no path of this machine and no token can get in.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from rewards import name_of_spec
from sologrpo.base.environment import RunEnvironment, read_environment
from sologrpo.base.files import (
    BASELINE,
    EVALUATIONS,
    RECIPE_SETTINGS,
    RESULTS,
    REWARD_CURVE,
    RUN_CONFIG,
    inside,
    write_atomically,
)
from sologrpo.base.hub import is_hub_name
from sologrpo.base.schema import Schema, read_json
from sologrpo.config.evaluation import run_settings
from sologrpo.export.parity import Gap, describe
from sologrpo.scoring.comparison import pair_with_baselines
from sologrpo.scoring.records import Evaluated, read_evaluated
from sologrpo.scoring.table import paired_line, score_rows

TEMPLATE = Path(__file__).parent / "templates" / "model_card.md.j2"
# Written by `sologrpo model` next to a model that was not downloaded from the Hub.
SOURCE = "source.json"
# Settings that the card's text needs besides.
OTHERS = (
    "rewards", "reward_weights", "dataset_name", "dataset_train_split", "chat_template_kwargs"
)  # fmt: skip
# On the Hub, by kind of model.
_LIBRARIES = {"adapter": "peft", "gguf": "gguf"}
_RELATIONS = {"adapter": "adapter", "gguf": "quantized"}
Record = Mapping[str, Any]


class _Source(Schema):
    model: str


class RunFacts(NamedTuple):
    """Hold what a card says about its run; what a missing file would say is empty."""

    environment: RunEnvironment | None = None
    config: Record = MappingProxyType({})
    evaluations: Mapping[str, Evaluated] = MappingProxyType({})  # by label


def public_name(name: str, on_hub: str | None = None) -> str:
    """Return the name that others can find a model or data set by: no path of this machine.

    `OWNER/NAME` is a name on the Hub; `on_hub` is it, where the caller knows it.

    >>> public_name("openai/gsm8k")
    'openai/gsm8k'
    >>> public_name("/home/ana/models/mine")
    'mine'
    """
    if on_hub:
        return on_hub
    path = Path(name)
    if (path / SOURCE).is_file():
        return read_json(path / SOURCE, _Source).model
    return name if is_hub_name(name) and not path.exists() else path.resolve().name


def write_card(
    folder: Path,
    kind: str,
    name: str,
    run: Path | None,
    base_model: str,
    base_on_hub: str | None = None,
    gaps: Sequence[Gap] = (),
) -> None:
    """Write `README.md` into a folder, and copy the run's reward curve there.

    Args:
        kind: "adapter", "merged", "4bit" or "gguf".
        run: run directory; whatever is missing there is left out of the card.
        base_on_hub: Hub name of the base model, where `base_model` is a path.
    """
    environment, config, evaluations = read_run(run)
    if run is not None and (run / REWARD_CURVE).is_file():
        picture = inside(run, REWARD_CURVE).read_bytes()
        write_atomically(folder / REWARD_CURVE, picture)  # also where something else is there
    base = public_name(base_model, base_on_hub)
    pairs = pair_with_baselines(evaluations)
    card = ModelCard.from_template(
        _metadata(kind, name, base, config, evaluations),
        template_path=str(TEMPLATE),
        kind=kind,
        name=name,
        title=name.rpartition("/")[2],
        base=base,
        base_is_on_hub="/" in base,
        data=public_name(str(config["dataset_name"])) if "dataset_name" in config else None,
        config=config,
        evaluations=evaluations,
        score_rows=score_rows([results for _, results in evaluations.values()]),
        comparisons=[paired_line(pair) for pair in pairs if pair.numbers is not None],
        gaps=[*map(describe, gaps)],
        has_picture=(folder / REWARD_CURVE).is_file(),
        rewards=[name_of_spec(spec) for spec in config.get("rewards") or []],
        weights=config.get("reward_weights") or [],
        recipe=RECIPE_SETTINGS,
        environment=environment,
    )
    write_atomically(folder / "README.md", str(card))


def read_run(run: Path | None) -> RunFacts:
    """Read the facts of a run for its card."""
    if run is None:
        return RunFacts()
    is_known = (run / RUN_CONFIG).exists()
    config = run_settings(run, (*RECIPE_SETTINGS, *OTHERS)) if is_known else {}
    if environment := read_environment(run):
        config["dtype"] = environment.dtype  # what `auto` was on the machine of the run
    folders = (path.parent for path in run.glob(f"{EVALUATIONS}/*/{RESULTS}"))
    baselines_first = sorted(folders, key=lambda path: (not path.name.startswith(BASELINE), path))
    evaluations = {folder.name: read_evaluated(folder) for folder in baselines_first}
    return RunFacts(environment, config, evaluations)


def _metadata(
    kind: str, name: str, base: str, config: Record, evaluations: Mapping[str, Evaluated]
) -> ModelCardData:
    data = public_name(str(config.get("dataset_name", "")))
    results = [
        _eval_result(label, scores)
        for label, (_, scores) in evaluations.items()
        if scores.get("adapter") and scores.get("dataset")
    ]
    return ModelCardData(
        base_model=base if "/" in base else None,
        base_model_relation=_RELATIONS.get(kind, "finetune") if "/" in base else None,
        datasets=[data] if "/" in data else None,
        library_name=_LIBRARIES.get(kind, "transformers"),
        pipeline_tag="text-generation",
        tags=["grpo", "trl", "sologrpo", *(["lora"] if kind == "adapter" else [])],
        # The Hub shows a score only under a name.
        model_name=name.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )  # fmt: skip


def _eval_result(label: str, scores: Record) -> EvalResult:
    data = public_name(str(scores["dataset"]))
    return EvalResult(
        task_type="text-generation",
        task_name="word problems",
        dataset_type=data,
        dataset_name=data.rpartition("/")[2],
        dataset_split=scores.get("split"),
        metric_type="accuracy",
        metric_name=f"accuracy, strict, greedy, % ({label}: {scores.get('precision')}, "
        f"n = {scores.get('n')})",
        metric_value=round(100 * scores["accuracy"], 2),
    )
