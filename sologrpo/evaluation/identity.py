"""Identify an evaluation by everything that decides its completions, and keep it from another's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.base.errors import InputError
from sologrpo.base.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, RESULTS
from sologrpo.base.manifest import MODEL_FILES, hash_files
from sologrpo.base.schema import shown
from sologrpo.config.evaluation import EvaluationSettings, PlannedEvaluation
from sologrpo.model.loading import dtype_name
from sologrpo.scoring.comparison import (
    ADAPTER_HASH,
    Differences,
    compare_settings,
    differing,
    without_hashes,
)
from sologrpo.scoring.records import Problem, hash_text, read_results, read_unfinished

ADAPTER_FILES = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)


def describe_identity(
    tokenizer: PreTrainedTokenizerBase,
    settings: EvaluationSettings,
    planned: PlannedEvaluation,
    problems: Sequence[Problem],
) -> dict[str, Any]:
    """Collect what decides the completions, and is known before the model is loaded, as plain JSON.

    A local model is identified by its hash, one from the Hub by its revision. Paths are left out: a
    run that was moved is the same run.
    """
    folder = Path(str(settings.model.model_name_or_path))
    local = folder.is_dir()
    adapter, template = planned.adapter, tokenizer.chat_template
    samples = settings.num_samples > 0
    return {
        "model": folder.name if local else str(folder),
        "model_hash": hash_files(folder, MODEL_FILES) if local else None,
        "adapter_hash": None if adapter is None else hash_files(adapter, ADAPTER_FILES),
        "chat_template_hash": None if template is None else hash_text(str(template)),
        "precision": settings.precision,
        "trained_in_4bit": settings.trained_in_4bit,
        "engine": "transformers",
        "dataset": planned.data.dataset_name,
        "split": planned.data.dataset_test_split,
        "limit": settings.limit,
        "seed": settings.seed,
        "problems_hash": hash_text("".join(f"{p.question_hash} {p.gold}\n" for p in problems)),
        "prompts_hash": hash_text("".join(problem.prompt for problem in problems)),
        "prompt_format": planned.data.prompt_format,
        "max_completion_length": settings.max_completion_length,
        "num_samples": settings.num_samples,
        "temperature": settings.temperature if samples else None,
        "top_p": settings.top_p if samples else None,
    }


def describe_loaded(model: PreTrainedModel) -> dict[str, Any]:
    """Collect what decides the completions, and is known once the model is loaded."""
    return {
        "model_revision": getattr(model.config, "_commit_hash", None),
        "dtype": dtype_name(model.dtype),
        "quantisation": _plain(getattr(model.config, "quantization_config", None)),
    }


def _plain(config: Any) -> dict[str, Any] | None:
    """Keep the JSON values of a quantisation config."""
    if config is None:
        return None
    values = config if isinstance(config, dict) else config.to_dict()
    kinds = (str, int, float, bool)
    return {k: v for k, v in values.items() if isinstance(v, kinds) and not k.startswith("_")}


def check_place(
    folder: Path, identity: Mapping[str, Any], adapter: Path | None, resume: bool
) -> None:
    """Refuse to continue, or to replace, another evaluation than this one.

    One may be replaced that this one can be compared with, of the same adapter or of one that was
    in the same place: it was trained further.
    """
    unfinished = read_unfinished(folder) if resume else None
    results = read_results(folder / RESULTS)
    if unfinished is not None:
        before = unfinished.settings
        _check_same_settings({key: before.get(key) for key in identity}, identity)
    elif results:
        before = {key: results["settings"].get(key) for key in identity}
        changed = compare_settings(before, identity)
        places = {place and Path(place).resolve() for place in (results["adapter"], adapter)}
        if len(places) > 1 and before[ADAPTER_HASH] != identity[ADAPTER_HASH]:
            changed[ADAPTER_HASH] = (before[ADAPTER_HASH], identity[ADAPTER_HASH])
        if changed:
            raise InputError(
                f"{folder} holds another evaluation, with {_listed(changed)}: give another "
                "--output_dir, or remove that folder"
            )


def _check_same_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if changed := differing(before, now):
        raise InputError(
            f"--resume: the evaluation was started with {_listed(changed)}: use the same settings "
            "or another --label, or leave out --resume to start again"
        )


def _listed(changed: Differences) -> str:
    both = without_hashes(changed).items()
    return ", ".join(f"{key} {shown(was)}, not {shown(now)}" for key, (was, now) in both)
