"""Parse the command line of an evaluation, and fill it from the run's config.

A run may come from someone else: its config names a model and data to read, and nothing in it makes
code run or names a place to write. Trust comes from the command line alone.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArg
from trl import ModelConfig

from sologrpo.base.environment import fix_prompt_date, read_environment
from sologrpo.base.errors import InputError
from sologrpo.base.files import ADAPTER, BASELINE, RUN_CONFIG, check_name
from sologrpo.base.schema import read_yaml
from sologrpo.config.arguments import MERGED, PRECISIONS, RunArguments, SoloGRPOConfig
from sologrpo.config.checks import check_settings
from sologrpo.config.parsing import RENAMED, CheckedParser
from sologrpo.prompts import PROMPT_FORMATS

# What config.yaml of a run decides of its evaluation and export.
OF_MODEL = (
    "model_name_or_path", "model_revision", "dtype", "attn_implementation", "load_in_4bit",
    "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage",
)  # fmt: skip
OF_DATA = (
    "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split",
    "max_train_examples", "num_validation_examples", "max_prompt_tokens", "prompt_format",
    "prompt_formats", "system_prompt", "worked_examples",
)  # fmt: skip
OF_TRAINING = ("max_completion_length", "seed", "chat_template_kwargs")


@dataclass
class ModelArguments:
    """Hold the options that name a model, its data and its prompt; the run's config has others."""

    run: str | None = HfArg(default=None, help="Run directory")
    model: str | None = HfArg(default=None, help="Base model, or a merged one")
    adapter: str | None = HfArg(default=None, help="Adapter folder")
    dataset_name: str | None = HfArg(default=None, help="As in training")
    dataset_config: str | None = HfArg(default=None, help="As in training")
    prompt_format: str | None = HfArg(
        default=None, metadata={"choices": sorted(PROMPT_FORMATS)}, help="As in training"
    )
    max_completion_length: int | None = HfArg(
        default=None, help="In tokens (default: the run's, or 512)"
    )
    seed: int = HfArg(default=0, help="Seed for choosing problems and for sampling")
    output_dir: str | None = HfArg(
        default=None, help="Folder for the results (default: the run directory)"
    )
    trust_remote_code: bool = HfArg(
        default=False, help="Run code of the model's repository; never taken from the run's config"
    )
    traceback: bool = HfArg(default=False, help="Show tracebacks of bad input")


@dataclass
class EvaluationArguments(ModelArguments):
    """Hold the options of `sologrpo evaluate`."""

    label: str | None = HfArg(
        default=None, help="Name of the result under eval/ (default: trained, or the model's name)"
    )
    baseline: bool = HfArg(default=True, help="Evaluate the base model first, for comparison")
    precision: str | None = HfArg(
        default=None,
        metadata={"choices": list(PRECISIONS)},
        help="Weights to evaluate (default: merged): "
        + "; ".join(f"{name}: {description}" for name, description in PRECISIONS.items()),
    )
    num_samples: int = HfArg(
        default=0, help="Also sample this many completions per problem, for pass@k"
    )
    temperature: float = HfArg(default=1.0, help="Temperature of those completions")
    top_p: float = HfArg(default=1.0, help="Nucleus of those completions")
    resume: bool = HfArg(default=False, help="Resume an interrupted evaluation")
    dataset_test_split: str | None = HfArg(default=None, help="As in training")
    prompt_formats: list[str] | None = HfArg(
        default=None,
        help="Ask the same problems with each of these prompts, the trained one among them, and "
        f"compare the gains: {','.join(PROMPT_FORMATS)}",
    )
    limit: int | None = HfArg(
        default=None, help="Evaluate only this many problems, chosen by the seed"
    )


@dataclass(frozen=True)
class PlannedEvaluation:
    """One model that answers with one prompt.

    Attributes:
        label: of the result under eval/.
        adapter: None for the base model alone.
        baseline: label of the result to compare with.
    """

    label: str
    adapter: Path | None
    data: RunArguments
    baseline: str | None


@dataclass(frozen=True)
class EvaluationSettings:
    """Hold the settings of an evaluation, all resolved.

    Attributes:
        name: `trained`, or the name of a model; labels begin with it.
        variant: ends the labels: what is evaluated differs from the run's own data or prompt.
        given_label: replaces the label of the trained model.
        data: of the run, with what the command line replaces.
        training_seed: None without a run.
    """

    run: Path | None
    output_dir: Path
    name: str
    variant: str
    given_label: str | None
    baseline: bool
    adapter: Path | None
    model: ModelConfig
    precision: str
    is_precision_given: bool
    data: RunArguments
    prompt_formats: list[str]
    trained_formats: list[str]
    max_completion_length: int
    limit: int | None
    seed: int
    num_samples: int
    temperature: float
    top_p: float
    resume: bool
    trust_remote_code: bool
    chat_template_kwargs: dict[str, Any]
    training_seed: int | None

    @property
    def trained_in_4bit(self) -> bool:
        """The adapter was trained on NF4 weights."""
        return bool(self.model.load_in_4bit)

    @property
    def suffix(self) -> str:
        """Keep results apart: other precisions are other models, and other prompts are harder."""
        return self.variant + _label_suffix(self.precision)

    @property
    def table_suffix(self) -> str:
        """Name the table of several prompts as the labels of its evaluations."""
        return f"-{self.given_label}" if self.given_label else self.suffix

    def plan(self) -> list[PlannedEvaluation]:
        """Decide on every evaluation of the command, those of the base model first."""
        before, after = [], []
        for prompt_format in self.prompt_formats:
            data = self.data_in(prompt_format)
            other = "" if data is self.data else f"-{prompt_format}"
            suffix = f"{self.variant}{other}{_label_suffix(self.precision)}"
            label = self.given_label + other if self.given_label else self.name + suffix
            baseline = BASELINE + suffix if self.adapter is not None and self.baseline else None
            if baseline is not None:
                before.append(PlannedEvaluation(baseline, None, data, None))
            after.append(PlannedEvaluation(label, self.adapter, data, baseline))
        return before + after

    def data_in(self, prompt_format: str) -> RunArguments:
        """Return the data with another prompt format.

        The run's system prompt belongs to its own prompt, and its worked examples to those of its
        training. Another prompt is as shipped.
        """
        if prompt_format == self.data.prompt_format:
            return self.data
        data = replace(self.data, prompt_format=prompt_format, system_prompt=None)
        is_trained = prompt_format in self.trained_formats
        return data if is_trained else replace(data, worked_examples=None)


def _label_suffix(precision: str) -> str:
    return "" if precision == MERGED else f"-{precision}"


def parse_evaluation(argv: Sequence[str]) -> EvaluationSettings:
    """Parse the command line of an evaluation, and fill it from the run's config."""
    (args,) = CheckedParser(EvaluationArguments, renamed=RENAMED).parse(argv)
    _check_evaluation(args)
    return fill_from_run(args)


def fill_from_run(args: EvaluationArguments) -> EvaluationSettings:
    """Resolve the options of a command line with the config of the run that they name.

    Raises:
        InputError: without a run and a model, or for a damaged config.
    """
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
    fix_prompt_date(Path(args.run) if args.run else None)
    own = RunArguments(**{name: saved[name] for name in OF_DATA if name in saved})
    names = ("dataset_name", "dataset_config", "dataset_test_split")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    data = replace(own, **given)
    others = [getattr(data, name) for name in names if getattr(data, name) != getattr(own, name)]
    length = saved.get("max_completion_length") or 512
    sizes = {
        "limit": args.limit,
        "length": args.max_completion_length if args.max_completion_length != length else None,
        "samples": args.num_samples,
    }
    others += [f"{name}{size}" for name, size in sizes.items() if size]
    trained_formats = own.prompt_formats or [own.prompt_format]
    formats = _check_formats(args, own.prompt_format, trained_formats)
    settings = EvaluationSettings(
        run=Path(args.run) if args.run else None,
        output_dir=Path(args.output_dir or args.run or "runs/evaluation"),
        name="trained" if adapter else _as_label(str(model.model_name_or_path)),
        variant="".join(f"-{_as_label(name.removesuffix('.json'))}" for name in others),
        given_label=args.label,
        baseline=args.baseline,
        adapter=Path(adapter) if adapter else None,
        model=model,
        precision=args.precision or MERGED,
        is_precision_given=bool(args.precision),
        data=data,
        prompt_formats=formats,
        trained_formats=trained_formats,
        max_completion_length=args.max_completion_length or length,
        limit=args.limit,
        seed=args.seed,
        num_samples=args.num_samples,
        temperature=args.temperature,
        top_p=args.top_p,
        resume=args.resume,
        trust_remote_code=args.trust_remote_code,
        chat_template_kwargs=saved.get("chat_template_kwargs") or {},
        training_seed=saved.get("seed"),
    )
    if args.prompt_format in (None, own.prompt_format):
        return settings
    variant = f"{settings.variant}-{args.prompt_format}"
    return replace(settings, data=settings.data_in(args.prompt_format), variant=variant)


def run_settings(directory: Path, names: Iterable[str]) -> dict[str, Any]:
    """Read settings of a run, checked like a recipe; those that its config lacks are left out."""
    saved = read_yaml(directory / RUN_CONFIG, dict[str, Any])
    taken = {name: saved[name] for name in names if name in saved}
    classes = (RunArguments, SoloGRPOConfig, ModelConfig)
    return check_settings(taken, directory / RUN_CONFIG, *classes)


def _read_run(directory: Path, trusted: bool) -> dict[str, Any]:
    checked = run_settings(directory, (*OF_MODEL, *OF_DATA, *OF_TRAINING))
    kernel = checked.get("attn_implementation") or ""
    if "/" in kernel and not trusted:  # transformers would run it
        raise InputError(
            f"{directory / RUN_CONFIG}: attn_implementation {kernel!r} is code from the Hub: add "
            "--trust_remote_code if you trust it"
        )
    return checked


def _as_label(model: str) -> str:
    """Turn the name or path of a model or data set, or the name of a split, into a label.

    >>> _as_label("HuggingFaceTB/SmolLM2-135M"), _as_label("../my model/")
    ('SmolLM2-135M', 'my-model')
    """
    name = re.sub(r"[^A-Za-z0-9_.+-]+", "-", Path(model).resolve().name)
    return name.lstrip(".+-")[:60] or "model"


def _check_formats(args: EvaluationArguments, own: str, trained: Sequence[str]) -> list[str]:
    """Return the prompt formats to ask with; refuse those that cannot show if the gain travels."""
    if args.prompt_formats is None:
        return [args.prompt_format or own]
    names = args.prompt_formats
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--prompt_formats: {name} is named twice: name each once")
    if not args.run or not args.baseline:
        raise InputError(
            "--prompt_formats compares a run with its base model: give --run runs/NAME, and leave "
            "--baseline false out"
        )
    if args.prompt_format:
        raise InputError("--prompt_formats does not work with --prompt_format: leave one out")
    if len(set(names) & set(trained)) in (0, len(names)):
        raise InputError(
            "--prompt_formats compares the gain under the prompt that was trained with others: "
            f"name {' or '.join(trained)}, and at least one other"
        )
    return names


def _check_evaluation(args: EvaluationArguments) -> None:
    if args.label is not None:
        label = check_name(args.label, "--label").lower()
        if label.startswith(BASELINE) or label.endswith(".json"):  # tables are files in eval/
            raise InputError(f"--label {args.label} is reserved: give another name")
    if not args.num_samples and (args.temperature, args.top_p) != (1.0, 1.0):
        raise InputError("temperature and top_p are for num_samples: add --num_samples 8")
