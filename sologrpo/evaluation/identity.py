"""Identify an evaluation: everything that decides its completions, with hashes of the files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.config.evaluation import EvaluationSettings
from sologrpo.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from sologrpo.manifest import MODEL_FILES, hash_files
from sologrpo.model.loading import dtype_name
from sologrpo.scoring.records import Problem, hash_text

ADAPTER_FILES = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)


def describe_identity(
    tokenizer: PreTrainedTokenizerBase, settings: EvaluationSettings, problems: Sequence[Problem]
) -> dict[str, Any]:
    """Collect what decides the completions, and is known before the model is loaded.

    `--resume` compares it, and so does everything that compares two evaluations. The values are
    plain JSON. A local model is identified by its hash, one from the Hub by its revision. Paths are
    left out: a run that was moved is the same run.
    """
    folder = Path(str(settings.model.model_name_or_path))
    local = folder.is_dir()
    adapter, template = settings.adapter, tokenizer.chat_template
    samples = settings.num_samples > 0
    return {
        "model": folder.name if local else str(folder),
        "model_hash": hash_files(folder, MODEL_FILES) if local else None,
        "adapter_hash": None if adapter is None else hash_files(adapter, ADAPTER_FILES),
        "chat_template_hash": None if template is None else hash_text(str(template)),
        "precision": settings.precision,
        "trained_in_4bit": settings.trained_in_4bit,
        "engine": "transformers",
        "dataset": settings.data.dataset_name,
        "split": settings.data.dataset_test_split,
        "limit": settings.limit,
        "seed": settings.seed,
        "problems_hash": hash_text("".join(f"{p.question_hash} {p.gold}\n" for p in problems)),
        "prompts_hash": hash_text("".join(problem.prompt for problem in problems)),
        "prompt_format": settings.data.prompt_format,
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
