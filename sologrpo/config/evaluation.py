"""Parse the command line of an evaluation, and fill it from the run's config.

A run may come from someone else: its config names a model and data to read, and nothing in it makes
code run or names a place to write. Trust comes from the command line alone.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArg
from trl import ModelConfig

from sologrpo.config.arguments import (
    EVALUATION_ENGINES,
    MERGED,
    MERGED_DEQUANTISED,
    PRECISIONS,
    UNMERGED,
    UNMERGED_NF4,
    RunArguments,
    SoloGRPOConfig,
)
from sologrpo.config.checks import check_settings
from sologrpo.config.export import ORIGINAL, ExportArguments, check_export_arguments
from sologrpo.config.parsing import RENAMED, CheckedParser
from sologrpo.environment import read_environment
from sologrpo.errors import InputError
from sologrpo.files import ADAPTER, PRECISION_TABLE, RUN_CONFIG, check_name
from sologrpo.prompts import PROMPT_FORMATS
from sologrpo.schema import read_yaml

# What config.yaml of a run decides of its evaluation and export.
OF_MODEL = (
    "model_name_or_path", "model_revision", "dtype", "attn_implementation", "load_in_4bit",
    "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage",
)  # fmt: skip
OF_DATA = (
    "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split",
    "max_train_examples", "num_validation_examples", "max_prompt_tokens", "prompt_format",
    "system_prompt", "worked_examples",
)  # fmt: skip
OF_TRAINING = ("max_completion_length", "seed")
BASELINE = "baseline"


@dataclass
class EvaluationArguments:
    """Hold the options of `sologrpo evaluate`; the run's config provides the others."""

    run: str | None = HfArg(default=None, help="Run directory")
    model: str | None = HfArg(default=None, help="Base model, or a merged one")
    adapter: str | None = HfArg(default=None, help="Adapter folder")
    label: str | None = HfArg(
        default=None, help="Name of the result under eval/ (default: trained, or the model's name)"
    )
    baseline: bool = HfArg(default=True, help="Evaluate the base model first, for comparison")
    precision: str | None = HfArg(
        default=None,
        metadata={"choices": list(PRECISIONS)},
        help="Weights to evaluate: "
        + "; ".join(f"{name}: {description}" for name, description in PRECISIONS.items()),
    )
    compare_precisions: bool = HfArg(
        default=False, help="Evaluate the adapter in every precision, and compare"
    )
    engine: str = HfArg(
        default="transformers",
        metadata={"choices": list(EVALUATION_ENGINES)},
        help="Engine that generates: our loop on transformers, or vLLM if it is installed",
    )
    num_samples: int = HfArg(
        default=0, help="Also sample this many completions per problem, for pass@k and maj@k"
    )
    temperature: float = HfArg(default=1.0, help="Temperature of those completions")
    top_p: float = HfArg(default=1.0, help="Nucleus of those completions")
    resume: bool = HfArg(default=False, help="Resume an interrupted evaluation")
    regrade: str | None = HfArg(
        default=None, help="Judge the completions of this records.jsonl again, without a model"
    )
    write: bool = HfArg(default=False, help="With regrade: write the new verdicts to the files")
    dataset_name: str | None = HfArg(default=None, help="As in training")
    dataset_config: str | None = HfArg(default=None, help="As in training")
    dataset_test_split: str | None = HfArg(default=None, help="As in training")
    prompt_format: str | None = HfArg(
        default=None, metadata={"choices": sorted(PROMPT_FORMATS)}, help="As in training"
    )
    max_completion_length: int | None = HfArg(
        default=None, help="In tokens (default: the run's, or 512)"
    )
    limit: int | None = HfArg(
        default=None, help="Evaluate only this many problems, chosen by the seed"
    )
    seed: int = HfArg(default=0, help="Seed for choosing problems and for sampling")
    output_dir: str | None = HfArg(
        default=None, help="Folder for eval/<label>/ (default: the run directory)"
    )
    trust_remote_code: bool = HfArg(
        default=False, help="Run code of the model's repository; never taken from the run's config"
    )
    traceback: bool = HfArg(default=False, help="Show tracebacks of bad input")


@dataclass
class EvaluationSettings:
    """Hold the settings of an evaluation, all resolved; `training_seed` is None without a run."""

    run: Path | None
    output_dir: Path
    label: str
    baseline_label: str
    baseline: bool
    adapter: Path | None
    model: ModelConfig
    trained_in_4bit: bool
    precision: str
    is_precision_given: bool
    compare_precisions: bool
    data: RunArguments
    max_completion_length: int
    limit: int | None
    seed: int
    engine: str
    num_samples: int
    temperature: float
    top_p: float
    resume: bool
    trust_remote_code: bool
    training_seed: int | None
    export: ExportArguments

    @property
    def trained_precision(self) -> str:
        """The precision in which the adapter was trained."""
        return UNMERGED_NF4 if self.trained_in_4bit else UNMERGED

    def label_of(self, precision: str) -> str:
        """Return the default label of the trained model in a precision."""
        return "trained" + _label_suffix(precision, self.trained_in_4bit)

    def in_precision(self, precision: str) -> "EvaluationSettings":
        """Replace the default precision by another one, which the labels then name."""
        suffix = _label_suffix(precision, self.trained_in_4bit)
        label, baseline = self.label + suffix, self.baseline_label + suffix
        return replace(self, precision=precision, label=label, baseline_label=baseline)


def _usual_precision(trained_in_4bit: bool) -> str:
    """Return the merge into the weights that were trained on."""
    return MERGED_DEQUANTISED if trained_in_4bit else MERGED


def _label_suffix(precision: str, trained_in_4bit: bool) -> str:
    """Keep results of other precisions apart: each precision is a different model."""
    return "" if precision == _usual_precision(trained_in_4bit) else f"-{precision}"


def parse_evaluation(argv: Sequence[str]) -> EvaluationSettings:
    """Parse the command line of an evaluation or export, and fill it from the run's config.

    With `--merge_into original`, the precision to evaluate is the same merge by default.

    Args:
        argv: without the command's name.

    Raises:
        InputError: for an unknown or contradictory option, or without a run and a model.
    """
    args, export = CheckedParser(EvaluationArguments, ExportArguments, renamed=RENAMED).parse(argv)
    check_export_arguments(export)
    if not args.run and not args.model:
        raise InputError("give --run runs/NAME, or --model NAME [--adapter FOLDER]")
    saved = _read_run(Path(args.run), args.trust_remote_code) if args.run else {}
    adapter = args.adapter or (str(Path(args.run) / ADAPTER) if args.run else None)
    model = ModelConfig(**{name: saved[name] for name in OF_MODEL if name in saved})
    model.model_name_or_path = args.model or model.model_name_or_path
    model.trust_remote_code = args.trust_remote_code
    # As it was trained, whatever `auto` would be on this machine.
    environment = read_environment(Path(args.run)) if args.run else None
    model.dtype = environment.dtype if environment else model.dtype or "auto"
    trained_in_4bit = bool(model.load_in_4bit)
    data = RunArguments(**{name: saved[name] for name in OF_DATA if name in saved})
    for name in ("dataset_name", "dataset_config", "dataset_test_split", "prompt_format"):
        if getattr(args, name) is not None:
            setattr(data, name, getattr(args, name))
    _check_evaluation(args, adapter)
    precision = args.precision or (
        MERGED if export.merge_into == ORIGINAL else _usual_precision(trained_in_4bit)
    )
    suffix = _label_suffix(precision, trained_in_4bit)
    default_label = "trained" if adapter else _as_label(str(model.model_name_or_path))
    return EvaluationSettings(
        run=Path(args.run) if args.run else None,
        output_dir=Path(args.output_dir or args.run or "runs/evaluation"),
        label=args.label or default_label + suffix,
        baseline_label=BASELINE + suffix,
        baseline=args.baseline,
        adapter=Path(adapter) if adapter else None,
        model=model,
        trained_in_4bit=trained_in_4bit,
        precision=precision,
        is_precision_given=bool(args.precision) or export.merge_into == ORIGINAL,
        compare_precisions=args.compare_precisions,
        data=data,
        max_completion_length=args.max_completion_length
        or saved.get("max_completion_length")
        or 512,
        limit=args.limit,
        seed=args.seed,
        engine=args.engine,
        num_samples=args.num_samples,
        temperature=args.temperature,
        top_p=args.top_p,
        resume=args.resume,
        trust_remote_code=args.trust_remote_code,
        training_seed=saved.get("seed"),
        export=export,
    )


def run_settings(directory: Path, names: Iterable[str]) -> dict[str, Any]:
    """Read settings of a run, checked like a recipe; those that its config lacks are left out.

    Raises:
        InputError: if there is no run, or a setting deviates.
    """
    saved = read_yaml(directory / RUN_CONFIG, dict[str, Any])
    taken = {name: saved[name] for name in names if name in saved}
    classes = (RunArguments, SoloGRPOConfig, ModelConfig)
    return check_settings(taken, directory / RUN_CONFIG, *classes)


def _read_run(directory: Path, trusted: bool) -> dict[str, Any]:
    """Read what the config of a run decides."""
    checked = run_settings(directory, (*OF_MODEL, *OF_DATA, *OF_TRAINING))
    kernel = checked.get("attn_implementation") or ""
    if "/" in kernel and not trusted:  # transformers would run it
        raise InputError(
            f"{directory / RUN_CONFIG}: attn_implementation {kernel!r} is code from the Hub: add "
            "--trust_remote_code if you trust it"
        )
    return checked


def _as_label(model: str) -> str:
    """Turn the name or path of a model into a label.

    >>> _as_label("HuggingFaceTB/SmolLM2-135M"), _as_label("../my model/")
    ('SmolLM2-135M', 'my-model')
    """
    name = re.sub(r"[^A-Za-z0-9_.+-]+", "-", Path(model).resolve().name)
    return name.lstrip(".+-")[:60] or "model"


def _check_evaluation(args: EvaluationArguments, adapter: str | None) -> None:
    """Refuse options that cannot work, or that would be ignored."""
    if args.label is not None:
        label = check_name(args.label, "--label").lower()
        if label.startswith(BASELINE) or label == PRECISION_TABLE:
            raise InputError(f"--label {args.label} is reserved: give another name")
    if not args.num_samples and (args.temperature, args.top_p) != (1.0, 1.0):
        raise InputError("temperature and top_p are for num_samples: add --num_samples 8")
    if args.write:
        raise InputError("--write belongs to --regrade FILE")
    if args.compare_precisions and not adapter:
        raise InputError(
            "--compare_precisions compares the precisions of an adapter: add --adapter"
        )
    if args.compare_precisions and (args.precision or args.label):
        raise InputError(
            "--compare_precisions evaluates all precisions, each with its own label: leave "
            "--precision and --label out"
        )
    if args.engine == "vllm" and find_spec("vllm") is None:
        raise InputError(
            "engine vllm: vLLM is not installed; pip install 'sologrpo[vllm]', or use engine "
            "transformers"
        )
