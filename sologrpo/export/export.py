"""Export a run: merge the adapter into the weights, save, compare with the trained model, push.

Everything is saved on disk before it is pushed. A second call with the same adapter and flags
reuses what it finds there.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Trainer
from transformers.trainer import TRAINING_ARGS_NAME

from sologrpo.base.console import Terminal, gibibytes, print_line, quiet_libraries
from sologrpo.base.errors import InputError, one_line_errors
from sologrpo.base.files import ADAPTER, inside, make_folder
from sologrpo.base.manifest import MANIFEST, write_manifest
from sologrpo.config.evaluation import EvaluationSettings
from sologrpo.config.export import DEQUANTISED, ORIGINAL, ExportArguments, parse_export
from sologrpo.data.dataset import load_train_and_validation, stop_strings
from sologrpo.export import gguf
from sologrpo.export.folders import (
    begin_folder,
    copy_adapter,
    fingerprint,
    finish_folder,
    finished_gap,
)
from sologrpo.export.hub import HubError, check_repository_name, open_repository, push_folder
from sologrpo.export.model_card import read_run, write_card
from sologrpo.export.parity import PROBLEMS, Gap, ParityCheck, describe, parity_failure
from sologrpo.model.fitting import DoesNotFitError, explaining_out_of_memory, unquantised_bytes
from sologrpo.model.loading import load_base_model, load_tokenizer
from sologrpo.model.memory import free_bytes, release_unused
from sologrpo.model.merging import check_adapter, dequantize, merge_adapter, save_4bit, save_merged


def save_adapter(trainer: Trainer, adapter: Path) -> None:
    """Save the trained adapter and the tokenizer; call it in every process, for sharded weights.

    The manifest comes last. `training_args.bin` is left out: it is a pickle with paths and settings
    of this machine, which nothing that loads an adapter reads.
    """
    if trainer.is_world_process_zero():
        (adapter / MANIFEST).unlink(missing_ok=True)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(adapter))
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        (adapter / TRAINING_ARGS_NAME).unlink(missing_ok=True)
        write_manifest(adapter)


@dataclass(frozen=True)
class Export:
    """An export whose input was checked.

    Attributes:
        made_from: describes everything that each model depends on.
        folders: of the models to be saved, in the order of making.
        finished: gaps of the models that an earlier call saved and measured.
        problems: on which models are compared; None if all are finished.
        repository: `USER/NAME` to push to; None if nothing is pushed.
    """

    settings: EvaluationSettings
    arguments: ExportArguments
    adapter: Path
    made_from: dict[str, dict[str, Any]]
    folders: dict[str, Path]
    finished: dict[str, Gap]
    problems: Dataset | None = None
    repository: str | None = None


def begin_export(settings: EvaluationSettings, arguments: ExportArguments) -> Export:
    """Find out before any work is done what would make the export, or its push, fail."""
    if settings.adapter is None:
        raise InputError("there is no adapter to export: give --run runs/NAME, or --adapter FOLDER")
    check_adapter(settings.adapter, settings.model.model_name_or_path)
    for name in filter(None, (arguments.push_to_hub, arguments.base_model)):
        check_repository_name(name)
    folders = _model_folders(arguments, inside(settings.output_dir, "export"))
    made_from = dict.fromkeys(folders, fingerprint(settings, arguments))
    if "gguf" in folders:
        made_from["gguf"] = made_from["gguf"] | {"gguf": arguments.gguf}
    found = {kind: finished_gap(folder, made_from[kind]) for kind, folder in folders.items()}
    finished = {kind: gap for kind, gap in found.items() if gap is not None}
    missing = [folder for kind, folder in folders.items() if kind not in finished]
    read_run(settings.run)  # for the card: damaged files are found before a model is made
    problems = _load_problems(settings) if missing else None
    if "merged" in folders.keys() - finished.keys():
        _check_main_memory(settings)
    for folder in missing:
        make_folder(folder.absolute().parent)
    repository = None
    if arguments.push_to_hub and not arguments.dry_run:
        repository = open_repository(arguments.push_to_hub, arguments.private)
    return Export(
        settings, arguments, settings.adapter, made_from, folders, finished, problems, repository
    )


def _model_folders(arguments: ExportArguments, default: Path) -> dict[str, Path]:
    """Choose the folder of each model to be saved; without a flag for it, one in `default`."""
    folders = {}
    if arguments.save_4bit or arguments.pushed == "4bit":
        folders["4bit"] = Path(arguments.save_4bit or default / "4bit")
    if arguments.gguf:
        folders["gguf"] = Path(arguments.save_gguf or default / f"gguf-{arguments.gguf}")
    if arguments.save_merged or arguments.pushed == "merged" or folders:
        folders = {"merged": Path(arguments.save_merged or default / "merged"), **folders}
    return folders


def _check_main_memory(settings: EvaluationSettings) -> None:
    """Refuse a merge that main memory has no room for: the system would kill the process."""
    needed = unquantised_bytes(settings.model, settings.trust_remote_code)
    free = free_bytes(torch.device("cpu"))
    if needed > free:
        raise DoesNotFitError(
            f"merging takes {gibibytes(needed)} of main memory, and {gibibytes(free)} are free: "
            "close other programs, or share the adapter alone, which needs no merge"
        )


def _load_problems(settings: EvaluationSettings) -> Dataset:
    """Load problems of training: held-out ones if there are any, but none of the test split."""
    tokenizer = load_tokenizer(
        str(settings.model.model_name_or_path),
        settings.trust_remote_code,
        settings.chat_template_kwargs,
    )
    # The seed of the training decides which rows were held out.
    seed = settings.training_seed
    train, validation = load_train_and_validation(
        settings.data, tokenizer, settings.seed if seed is None else seed
    )
    rows = train if validation is None else validation
    return rows.select(range(min(PROBLEMS, len(rows))))


def export_and_push(export: Export, console: Console) -> None:
    """Save the models, compare them with the trained model, write their cards, push.

    Saved models stay after an `InputError`, and the same command reuses them.
    """
    arguments, folders = export.arguments, dict(export.folders)
    with explaining_out_of_memory(
        "close other programs and run the same command again, which reuses finished models"
    ):
        made = _make_models(export, console)
    gaps = [made[kind] for kind in export.folders]
    if arguments.pushed == "adapter":
        target = inside(export.settings.output_dir, "export", ADAPTER)
        folders["adapter"] = copy_adapter(export.adapter, target, arguments.base_model)
    for kind, folder in folders.items():
        write_card(
            folder,
            kind=kind,
            name=export.repository or arguments.push_to_hub or folder.name,
            run=export.settings.run,
            base_model=str(export.settings.model.model_name_or_path),
            base_on_hub=arguments.base_model,
            gaps=[] if kind == "adapter" else gaps,
        )
        print_line(console, f"{kind:8}  {folder}")
    for gap in gaps:
        print_line(console, describe(gap))
    if arguments.pushed is not None:
        _push(export, folders[arguments.pushed], made.get(arguments.pushed), console)


def _push(export: Export, folder: Path, gap: Gap | None, console: Console) -> None:
    arguments = export.arguments
    failure = None if gap is None else parity_failure(gap, arguments.max_kl)
    if failure and not arguments.push_despite_gap:
        raise InputError(
            f"not pushed: {folder} is not the model that was trained: {failure}; push the "
            "adapter (--what adapter), or add --push_despite_gap"
        )
    if export.repository is None:
        print_line(console, f"would push {folder}")
        return
    message = f"Upload {arguments.what} made by SoloGRPO"
    try:
        url = push_folder(folder, export.repository, message, ignore=[MANIFEST])
    except HubError as error:
        raise HubError(f"{error}; {folder} is complete: run the same command again") from error
    print_line(console, f"pushed    {url}")


# -- models ----------------------------------------------------------------------------------------


def _make_models(export: Export, console: Console) -> dict[str, Gap]:
    made = dict(export.finished)
    if export.problems is not None:
        check = ParityCheck(export.settings, export.problems, console)
        make = {"merged": _make_merged, "4bit": _make_4bit, "gguf": _make_gguf}
        for kind in export.folders:
            if kind not in made:
                made[kind] = make[kind](export, check)
    return made


def _make_merged(export: Export, check: ParityCheck) -> Gap:
    made_from, kind = export.made_from["merged"], _merge_kind(export)
    folder = begin_folder(export.folders["merged"], made_from)
    _merge_to_disk(export, kind, folder)
    release_unused()
    name = kind if export.settings.trained_in_4bit else "merged"
    return finish_folder(folder, made_from, check.measure(name, folder))


def _merge_kind(export: Export) -> str:
    return export.arguments.merge_into if export.settings.trained_in_4bit else ORIGINAL


def _merge_to_disk(export: Export, kind: str, folder: Path) -> None:
    settings = replace(export.settings.model, load_in_4bit=kind == DEQUANTISED)
    # Summed in main memory, where a model that fits on the GPU only in 4 bits has room. NF4
    # weights come from the GPU, as in training.
    device = None if kind == DEQUANTISED else "cpu"
    base = load_base_model(settings, export.settings.trust_remote_code, device)
    model = merge_adapter(dequantize(base.to("cpu")), export.adapter)
    dtype = model.dtype
    if export.settings.trained_in_4bit and dtype == torch.float32:
        dtype = torch.bfloat16  # a 4-bit run's merge is saved in half precision
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    save_merged(model, _tokenizer_to_save(export), folder)


def _tokenizer_to_save(export: Export) -> PreTrainedTokenizerBase:
    """Load the base model's tokenizer unchanged, except for a missing pad token."""
    name = str(export.settings.model.model_name_or_path)
    trust = export.settings.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = load_tokenizer(name, trust).pad_token
    return tokenizer


def _make_4bit(export: Export, check: ParityCheck) -> Gap:
    made_from = export.made_from["4bit"]
    folder = begin_folder(export.folders["4bit"], made_from)
    save_4bit(export.folders["merged"], folder, export.settings.trust_remote_code)
    release_unused()
    return finish_folder(folder, made_from, check.measure("4bit", folder))


def _make_gguf(export: Export, check: ParityCheck) -> Gap:
    kind, made_from = str(export.arguments.gguf), export.made_from["gguf"]
    folder, merged = begin_folder(export.folders["gguf"], made_from), export.folders["merged"]
    file = folder / f"model-{kind}.gguf"
    gguf.convert(merged, file, kind, export.settings.trust_remote_code)
    gap, template = check.measure_gguf(f"gguf {kind}", file)
    stops = [
        *gguf.end_tokens(merged, _tokenizer_to_save(export)),
        *stop_strings(export.problems),
    ]
    gguf.write_modelfile(file, template, stops, export.settings.max_completion_length)
    return finish_folder(folder, made_from, gap)


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run the stages of an export, by default with the flags of the process."""
    quiet_libraries()
    export = begin_export(*parse_export(sys.argv[1:] if argv is None else argv))
    export_and_push(export, Terminal())


if __name__ == "__main__":
    main()
