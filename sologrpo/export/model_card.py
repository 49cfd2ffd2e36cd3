"""Model card: what a model is, how it was made and how well it does, for the Hub and for people.

Everything comes from the run directory, by name: no setting is copied whole, so no path of this
machine and no token can get into a card.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from rewards import name_of_spec
from sologrpo.export.parity import Gap
from sologrpo.files import (
    ENVIRONMENT,
    EVALUATIONS,
    METRICS,
    RESULTS,
    REWARD_CURVE,
    RUN_CONFIG,
    write_atomically,
)

TEMPLATE = Path(__file__).parent / "templates" / "model_card.md.j2"
# Written by `make model` beside a model that came from another place than the Hub.
SOURCE = "source.json"
# Settings that decide the result; all are numbers or plain words.
RECIPE = (
    "prompt_format", "max_completion_length", "temperature", "top_p", "num_generations",
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations", "max_steps",
    "num_train_epochs", "learning_rate", "lr_scheduler_type", "warmup_steps", "beta", "epsilon",
    "loss_type", "scale_rewards", "outcome_reward", "lora_r", "lora_alpha", "lora_dropout",
    "use_rslora", "use_dora", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant",
    "dtype", "seed",
)  # fmt: skip
SCORES = (
    ("accuracy", "accuracy, strict"),
    ("accuracy_lenient", "accuracy, lenient (last number)"),
    ("format_rate", "format as asked"),
    ("truncated_rate", "cut off"),
)
# Ranks that vLLM's --max-lora-rank takes (vllm/config/lora.py).
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

Record = Mapping[str, Any]


def public_name(name: str, on_hub: str | None = None) -> str:
    """What others can find a model or data set by: its Hub name, or its name without a path.

    Args:
        name: Hub name, or path of a folder or file.
        on_hub: the Hub name, where the caller knows it.

    >>> public_name("openai/gsm8k")
    'openai/gsm8k'
    >>> public_name("/home/ana/models/mine")
    'mine'
    """
    if on_hub:
        return on_hub
    path = Path(name)
    if (path / SOURCE).is_file():
        source = json.loads((path / SOURCE).read_text(encoding="utf-8"))
        return str(source["model"])
    return path.resolve().name if path.exists() or not is_hub_name(name) else name


def is_hub_name(name: str) -> bool:
    """Whether it has the form `OWNER/NAME`.

    >>> is_hub_name("openai/gsm8k"), is_hub_name("../gsm8k")
    (True, False)
    """
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None


def write_card(
    folder: Path,
    what: str,
    name: str,
    run: Path | None,
    base_model: str,
    base_on_hub: str | None = None,
    gaps: Sequence[Gap] = (),
) -> None:
    """Write `README.md` into a folder, and the run's reward curve beside it.

    Args:
        folder: the model.
        what: "adapter", "merged" or "4bit".
        name: `NAME` or `USER/NAME` on the Hub, or any other name.
        run: run directory; what is missing there is left out of the card.
        base_model: name or path of the base model.
        base_on_hub: its Hub name, where `base_model` is a path.
        gaps: the saved models' distances from the trained one.
    """
    config = _read(run, RUN_CONFIG)
    evaluations = _evaluations(run)
    has_picture = run is not None and (run / REWARD_CURVE).is_file()
    if run is not None and has_picture:
        shutil.copy(run / REWARD_CURVE, folder / REWARD_CURVE)
    base = public_name(base_model, base_on_hub)
    card = ModelCard.from_template(
        _metadata(what, name, base, config, evaluations),
        template_path=str(TEMPLATE),
        what=what,
        name=name,
        title=name.rpartition("/")[2],
        base=base,
        base_is_on_hub=is_hub_name(base),
        data=public_name(str(config["dataset_name"])) if "dataset_name" in config else None,
        split=config.get("dataset_train_split"),
        rewards=_rewards(config),
        recipe=[(key, config[key]) for key in RECIPE if config.get(key) is not None],
        config=config,
        environment=_read(run, ENVIRONMENT),
        training=_training(run),
        has_picture=has_picture,
        evaluations=evaluations,
        scores=SCORES,
        gaps=gaps,
        vllm_rank=_vllm_rank(config),
    )
    write_atomically(folder / "README.md", str(card))


def _metadata(
    what: str, name: str, base: str, config: Record, evaluations: Sequence[tuple[str, Record]]
) -> ModelCardData:
    data = public_name(str(config.get("dataset_name", "")))
    results = [
        result
        for label, scores in evaluations
        if scores.get("adapter") and (result := _eval_result(label, scores)) is not None
    ]
    return ModelCardData(
        base_model=base if is_hub_name(base) else None,
        base_model_relation=None if not is_hub_name(base)
        else "adapter" if what == "adapter" else "finetune",
        datasets=[data] if is_hub_name(data) else None,
        library_name="peft" if what == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=["grpo", "trl", "sologrpo", *(["lora"] if what == "adapter" else [])],
        # The Hub shows a score only under a name.
        model_name=name.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )  # fmt: skip


def _eval_result(label: str, scores: Record) -> EvalResult | None:
    data = public_name(str(scores.get("dataset", "")))
    if "accuracy" not in scores or not data:
        return None
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


def _vllm_rank(config: Record) -> int | None:
    """The `--max-lora-rank` that the adapter needs; None if vLLM cannot take it."""
    rank = config.get("lora_r")
    if rank is None or config.get("use_dora"):
        return None
    return next((limit for limit in VLLM_RANKS if limit >= rank), None)


def _rewards(config: Record) -> list[tuple[str, float]]:
    specs = config.get("rewards") or []
    weights = config.get("reward_weights") or [1.0] * len(specs)
    return [(name_of_spec(spec), weight) for spec, weight in zip(specs, weights, strict=True)]


def _training(run: Path | None) -> Record:
    """Steps made, and the mean reward of the first and the last of them."""
    path = None if run is None else run / METRICS
    if path is None or not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if row.get("reward") is not None]
    if not steps:
        return {}
    return {"steps": steps[-1]["step"], "first": steps[0]["reward"], "last": steps[-1]["reward"]}


def _evaluations(run: Path | None) -> list[tuple[str, Record]]:
    """Label and results of each evaluation of the run, baselines first."""
    if run is None:
        return []
    found = [
        (path.parent.name, _read(path.parent, RESULTS))
        for path in run.glob(f"{EVALUATIONS}/*/{RESULTS}")
    ]
    return sorted(found, key=lambda item: (bool(item[1].get("adapter")), item[0]))


def _read(folder: Path | None, name: str) -> dict[str, Any]:
    """A JSON or YAML file of the run; empty if it is not there."""
    path = None if folder is None else folder / name
    if path is None or not path.is_file():
        return {}
    content = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    return content if isinstance(content, dict) else {}
