"""The command line of `evaluate.py`, filled from the run's own config."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trl import ModelConfig

from sologrpo.command_line import Parser
from sologrpo.config.arguments import (
    EVALUATION_ENGINES,
    MERGED,
    MERGED_DEQUANTISED,
    PRECISIONS,
    UNMERGED,
    UNMERGED_NF4,
    RunArguments,
)
from sologrpo.config.export import ORIGINAL, ExportArguments, check_export_arguments
from sologrpo.config.parsing import RENAMED, load_run_config, recorded_dtype
from sologrpo.errors import InputError
from sologrpo.files import ADAPTER
from sologrpo.prompts import PROMPT_FORMATS


@dataclass
class EvaluationArguments:
    """The command line of `evaluate.py`. What is not given comes from the run's own config."""

    run: str | None = field(default=None, metadata={"help": "Run directory of train.py"})
    model: str | None = field(default=None, metadata={"help": "Base model, or a merged folder"})
    adapter: str | None = field(default=None, metadata={"help": "Adapter folder"})
    label: str | None = field(
        default=None, metadata={"help": "Name of the result under eval/ (trained, or the model's)"}
    )
    baseline: bool = field(
        default=True, metadata={"help": "Evaluate the base model first, for comparison"}
    )
    precision: str | None = field(
        default=None,
        metadata={
            "help": "Weights to evaluate: "
            + "; ".join(f"{name}: {description}" for name, description in PRECISIONS.items()),
            "choices": list(PRECISIONS),
        },
    )
    compare_precisions: bool = field(
        default=False, metadata={"help": "Evaluate the adapter in every precision, and compare"}
    )
    engine: str = field(
        default="transformers",
        metadata={"help": "What generates: our loop on transformers, or vLLM where it is "
                  "installed", "choices": list(EVALUATION_ENGINES)},
    )  # fmt: skip
    num_samples: int = field(
        default=0,
        metadata={"help": "Also draw so many completions a problem, for pass@k and maj@k"},
    )
    temperature: float = field(default=1.0, metadata={"help": "Of those completions"})
    top_p: float = field(default=1.0, metadata={"help": "Of those completions"})
    resume: bool = field(
        default=False, metadata={"help": "Go on with an evaluation that was interrupted"}
    )
    regrade: str | None = field(
        default=None,
        metadata={"help": "Judge the completions of this records.jsonl again, without a model"},
    )
    write: bool = field(
        default=False, metadata={"help": "With regrade: put the new verdicts into the files"}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "As in train.py"})
    dataset_config: str | None = field(default=None, metadata={"help": "As in train.py"})
    dataset_test_split: str | None = field(default=None, metadata={"help": "As in train.py"})
    prompt_format: str | None = field(
        default=None, metadata={"help": "As in train.py", "choices": sorted(PROMPT_FORMATS)}
    )
    max_completion_length: int | None = field(default=None, metadata={"help": "In tokens"})
    limit: int | None = field(
        default=None, metadata={"help": "Evaluate so many problems only, chosen by the seed"}
    )
    seed: int = field(
        default=0, metadata={"help": "Seed of the choice of problems, and of sampling"}
    )
    output_dir: str | None = field(
        default=None, metadata={"help": "Where eval/<label>/ goes (default: the run directory)"}
    )
    traceback: bool = field(default=False, metadata={"help": "Show tracebacks of bad input"})


@dataclass
class EvaluationSettings:
    """What `evaluate.py` will do, with every value resolved."""

    run: Path | None
    output_dir: Path
    label: str
    baseline_label: str
    baseline: bool
    adapter: Path | None
    model: ModelConfig
    trained_in_4bit: bool
    precision: str
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
    export: ExportArguments

    @property
    def trained_precision(self) -> str:
        """The form in which the adapter was trained."""
        return UNMERGED_NF4 if self.trained_in_4bit else UNMERGED

    def label_of(self, precision: str) -> str:
        """The default label of the trained model in this precision."""
        return "trained" + _label_suffix(precision, self.trained_in_4bit)


def _usual_precision(trained_in_4bit: bool) -> str:
    """The merge into what was trained on."""
    return MERGED_DEQUANTISED if trained_in_4bit else MERGED


def _label_suffix(precision: str, trained_in_4bit: bool) -> str:
    """Another form of the weights is another model: its results stand beside, not over."""
    return "" if precision == _usual_precision(trained_in_4bit) else f"-{precision}"


def parse_evaluation(argv: Sequence[str]) -> EvaluationSettings:
    """Parse the command line of `evaluate.py` and fill it from the run's resolved config.

    Args:
        argv: without the flags of an export.
        merge_into: what the export merges into; `original` is then also what is evaluated, if
            `--precision` does not say otherwise.

    Raises:
        InputError: for an unknown key, or if there is neither a run nor a model.
    """
    args, export = Parser(EvaluationArguments, ExportArguments, renamed=RENAMED).parse(argv)
    check_export_arguments(export)
    if not args.run and not args.model:
        raise InputError("give --run runs/NAME, or --model NAME [--adapter FOLDER]")
    saved = load_run_config(Path(args.run)) if args.run else {}
    adapter = args.adapter or (str(Path(args.run) / ADAPTER) if args.run else None)
    model = ModelConfig(**_fields_of(ModelConfig, saved))
    model.model_name_or_path = args.model or saved.get("model_name_or_path")
    # As it was trained, whatever `auto` would be on this machine.
    model.dtype = (recorded_dtype(Path(args.run)) if args.run else None) or model.dtype or "auto"
    trained_in_4bit = bool(saved.get("load_in_4bit", False))
    data = RunArguments(**_fields_of(RunArguments, saved))
    for name in ("dataset_name", "dataset_config", "dataset_test_split", "prompt_format"):
        if getattr(args, name) is not None:
            setattr(data, name, getattr(args, name))
    _check_evaluation(args, adapter)
    precision = args.precision or (
        MERGED if export.merge_into == ORIGINAL else _usual_precision(trained_in_4bit)
    )
    suffix = _label_suffix(precision, trained_in_4bit)
    default_label = "trained" if adapter else Path(str(model.model_name_or_path)).name
    return EvaluationSettings(
        run=Path(args.run) if args.run else None,
        output_dir=Path(args.output_dir or args.run or "runs/evaluation"),
        label=args.label or default_label + suffix,
        baseline_label="baseline" + suffix,
        baseline=args.baseline,
        adapter=Path(adapter) if adapter else None,
        model=model,
        trained_in_4bit=trained_in_4bit,
        precision=precision,
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
        trust_remote_code=bool(saved.get("trust_remote_code", False)),
        export=export,
    )


def _check_evaluation(args: EvaluationArguments, adapter: str | None) -> None:
    """Refuse what cannot work, or would silently mean something else."""
    if args.num_samples < 0:
        raise InputError(f"num_samples {args.num_samples}: give 1 or more, or leave it out")
    if args.temperature <= 0:
        raise InputError(
            f"temperature {args.temperature}: give more than 0; the greedy answer is always there"
        )
    if not 0 < args.top_p <= 1:
        raise InputError(f"top_p {args.top_p}: give more than 0 and at most 1")
    if args.max_completion_length is not None and args.max_completion_length < 1:
        raise InputError(f"max_completion_length {args.max_completion_length}: give at least 1")
    if not args.num_samples and (args.temperature, args.top_p) != (1.0, 1.0):
        raise InputError("temperature and top_p are for num_samples: add --num_samples 8")
    if args.write:
        raise InputError("--write belongs to --regrade FILE")
    if args.compare_precisions and not adapter:
        raise InputError("--compare_precisions compares the forms of an adapter: add --adapter")
    if args.compare_precisions and (args.precision or args.label):
        raise InputError(
            "--compare_precisions goes through all precisions under their own labels: leave "
            "--precision and --label out"
        )
    if args.engine == "vllm" and (
        args.compare_precisions or args.precision not in (None, MERGED, MERGED_DEQUANTISED)
    ):
        raise InputError(
            "engine vllm needs merged weights: use precision merged or merged_dequantised, or "
            "engine transformers"
        )
    if args.engine == "vllm" and find_spec("vllm") is None:
        raise InputError(
            "engine vllm: vLLM is not installed; pip install 'sologrpo[vllm]', or use engine "
            "transformers"
        )


def _fields_of(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    return {name: value for name, value in values.items() if name in names}
