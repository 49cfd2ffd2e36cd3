"""Export: merge a LoRA adapter into the weights, save, compare with what was trained, push.

    python -m sologrpo.export.export --run runs/x --save_merged out/x
    python -m sologrpo.export.export --run runs/x --push_to_hub NAME --what merged --dry_run

Everything is made on disk first, under a name that says that it is not finished, and moved to its
place when it is whole. A second call with the same adapter and flags finds it there and goes on.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Trainer
from transformers.trainer import TRAINING_ARGS_NAME

from sologrpo.config.evaluation import EvaluationSettings, parse_evaluation
from sologrpo.config.export import (
    DEQUANTISED,
    ORIGINAL,
    ExportArguments,
    take_export_arguments,
)
from sologrpo.console import print_line, quiet_libraries
from sologrpo.data.dataset import load_train_and_validation, stop_strings
from sologrpo.device import prepare_cpu
from sologrpo.errors import InputError, one_line_errors
from sologrpo.export.hub import HubError, check_repository_name, open_repository, push_folder
from sologrpo.export.model_card import public_name, write_card
from sologrpo.export.parity import (
    Gap,
    Problem,
    Reference,
    Trained,
    load_gap,
    why_not_the_trained_model,
)
from sologrpo.files import (
    ADAPTER,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    EVALUATIONS,
    RESULTS,
    REWARD_CURVE,
    write_atomically,
)
from sologrpo.model.loading import load_base_model, load_tokenizer
from sologrpo.model.merging import check_adapter, dequantised, merge_adapter, save_4bit, save_merged

REQUANTISED = "4bit"
MARKER = ".export.json"  # what a folder was made from; stays here when the rest is pushed
# All that an adapter folder needs. What else may lie there (training_args.bin, say) stays here.
ADAPTER_FILES = (
    ADAPTER_CONFIG, ADAPTER_WEIGHTS, "README.md", REWARD_CURVE,
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.*", "merges.txt",
)  # fmt: skip


# -- the adapter of a run --------------------------------------------------------------------------


def save_adapter(trainer: Trainer, adapter: Path) -> None:
    """Save the trained adapter and the tokenizer; in every process, as sharded ones must.

    `training_args.bin`, a pickle full of paths and settings of this machine, is left out: nothing
    that loads an adapter reads it, and config.yaml of the run says the same in plain text.
    """
    trainer.save_model(str(adapter))
    if trainer.is_world_process_zero():
        (adapter / TRAINING_ARGS_NAME).unlink(missing_ok=True)


# -- what is to be made, and where -----------------------------------------------------------------


@dataclass(frozen=True)
class Export:
    """An export that was checked and can begin.

    Attributes:
        settings: of the evaluation of the run: model, adapter, data.
        arguments: the flags.
        adapter: of the run.
        repository: `USER/NAME` to push to; None if nothing is pushed.
    """

    settings: EvaluationSettings
    arguments: ExportArguments
    adapter: Path
    repository: str | None = None

    @property
    def pushes(self) -> str | None:
        """What is pushed, or would be without `--dry_run`."""
        return self.arguments.what if self.arguments.push_to_hub else None

    @property
    def merged(self) -> Path | None:
        """Where the merged model goes; None if nobody needs it."""
        if self.arguments.save_merged:
            return Path(self.arguments.save_merged)
        needed = self.arguments.save_4bit or self.pushes in ("merged", "4bit")
        return self._default("merged") if needed else None

    @property
    def four_bit(self) -> Path | None:
        """Where the 4-bit model goes; None if nobody needs it."""
        if self.arguments.save_4bit:
            return Path(self.arguments.save_4bit)
        return self._default("4bit") if self.pushes == "4bit" else None

    @property
    def models(self) -> dict[str, Path]:
        """The folders of all models to be made, in the order of making."""
        folders = {"merged": self.merged, "4bit": self.four_bit}
        return {what: folder for what, folder in folders.items() if folder is not None}

    def _default(self, what: str) -> Path:
        return self.settings.output_dir / "export" / what


def begin_export(arguments: ExportArguments, settings: EvaluationSettings) -> Export | None:
    """Check all that can be wrong before any work is done; None if there is nothing to export.

    Raises:
        InputError: if there is no adapter, if a folder is in use, if there are no problems to
            compare models on, or if the Hub would not take the push.
    """
    if not (arguments.save_merged or arguments.save_4bit or arguments.push_to_hub):
        return None
    if settings.adapter is None:
        raise InputError("there is no adapter to export: give --run runs/NAME, or --adapter FOLDER")
    check_adapter(settings.adapter, settings.model.model_name_or_path)
    if arguments.push_to_hub:
        check_repository_name(arguments.push_to_hub)
    export = Export(settings, arguments, settings.adapter)
    if None in _finished(export).values():
        _reference(export).close()  # fails now if it cannot be made
    if arguments.push_to_hub and not arguments.dry_run:
        repository = open_repository(arguments.push_to_hub, arguments.private)
        export = replace(export, repository=repository)
    return export


def export_and_push(export: Export, console: Console) -> None:
    """Make what was asked for, compare it with the trained model, write its card, push it.

    Raises:
        InputError: if a saved model is too far from the trained one to be pushed, or the push
            fails. What was made stays, and the same command goes on from it.
    """
    folders = export.models
    gaps = _make_models(export)
    if gaps:
        _print_gaps(console, gaps)
        _note_in_results(export, gaps)
    if export.pushes == "adapter":
        folders["adapter"] = _copy_adapter(export)
    for what, folder in folders.items():
        _write_card(export, what, folder, [] if what == "adapter" else gaps)
        print_line(console, f"{what:8}  {folder}")
    if export.pushes is not None:
        _push(export, folders[export.pushes], gaps, console)


def _write_card(export: Export, what: str, folder: Path, gaps: list[Gap]) -> None:
    name = export.repository or export.arguments.push_to_hub or folder.name
    write_card(
        folder,
        what=what,
        name=name,
        run=export.settings.run,
        base_model=str(export.settings.model.model_name_or_path),
        base_on_hub=export.arguments.base_model,
        gaps=gaps,
    )


def _push(export: Export, folder: Path, gaps: list[Gap], console: Console) -> None:
    pushed = {"merged": _merge_of(gaps), "4bit": REQUANTISED}.get(export.arguments.what)
    reasons = [
        reason
        for gap in gaps
        if gap.name == pushed
        and (reason := why_not_the_trained_model(gap, export.arguments.max_kl)) is not None
    ]
    if reasons and not export.arguments.push_despite_gap:
        raise InputError(
            f"not pushed: {folder} is not the model that was trained: {reasons[0]}; push the "
            "adapter (--what adapter), or add --push_despite_gap"
        )
    if export.repository is None:
        print_line(console, f"would push {folder}")
        return
    message = f"Upload {export.arguments.what} made by SoloGRPO"
    try:
        address = push_folder(folder, export.repository, message, leave_out=[MARKER])
    except HubError as error:
        raise HubError(f"{error}; {folder} is whole: the same command goes on from it") from error
    print_line(console, f"pushed    {address}")


def _merge_of(gaps: list[Gap]) -> str | None:
    """The merge that was kept: the closest of those measured."""
    merges = [gap for gap in gaps if gap.name != REQUANTISED]
    return min(merges, key=lambda gap: gap.kl).name if merges else None


# -- making models ---------------------------------------------------------------------------------


def _make_models(export: Export) -> list[Gap]:
    """Make and measure the models that are asked for and not there already; the gaps of all."""
    finished = _finished(export)
    if None in finished.values():
        with _reference(export) as reference:
            if finished["merged"] is None:
                finished["merged"] = _make_merged(export, reference)
            if "4bit" in finished and finished["4bit"] is None:
                finished["4bit"] = [_make_4bit(export, reference)]
    return [gap for gaps in finished.values() for gap in gaps or ()]


def _make_merged(export: Export, reference: Reference) -> list[Gap]:
    """Save each merge that is asked for beside the target, and keep the closest."""
    target = export.models["merged"]
    merges, gaps = {}, []
    for kind in _kinds(export):
        merges[kind] = _unfinished(target, kind)
        _merge_to_disk(export, kind, merges[kind])
        gaps.append(reference.gap(kind, merges[kind]))
    kept = _merge_of(gaps)
    for kind, folder in merges.items():
        if kind == kept:
            _finish(folder, target, _fingerprint(export), gaps)
        else:
            shutil.rmtree(folder)
    return gaps


def _kinds(export: Export) -> list[str]:
    if not export.settings.trained_in_4bit:
        return [ORIGINAL]
    asked = export.arguments.merge_into
    return [DEQUANTISED, ORIGINAL] if asked == "closer" else [asked]


def _merge_to_disk(export: Export, kind: str, folder: Path) -> None:
    settings = replace(export.settings.model, load_in_4bit=kind == DEQUANTISED)
    base = load_base_model(settings, export.settings.trust_remote_code)
    # Summed in main memory, where a model that only fits onto the card in 4 bits has room.
    model = merge_adapter(dequantised(base.to("cpu")), export.adapter)
    dtype = _dtype_to_save(export, model.dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    save_merged(model, _tokenizer_to_save(export), folder)


def _dtype_to_save(export: Export, dtype: torch.dtype) -> torch.dtype:
    """A four-bit run's merge in half precision; any other in the dtype of the run."""
    return torch.bfloat16 if export.settings.trained_in_4bit and dtype == torch.float32 else dtype


def _tokenizer_to_save(export: Export) -> PreTrainedTokenizerBase:
    """The base model's own tokenizer, untouched; only a missing pad token is filled in."""
    name = str(export.settings.model.model_name_or_path)
    trust = export.settings.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = load_tokenizer(name, trust).pad_token
    return tokenizer


def _make_4bit(export: Export, reference: Reference) -> Gap:
    target = export.models["4bit"]
    folder = _unfinished(target, REQUANTISED)
    save_4bit(export.models["merged"], folder, export.settings.trust_remote_code)
    gap = reference.gap(REQUANTISED, folder)
    _finish(folder, target, _fingerprint(export), [gap])
    return gap


def _reference(export: Export) -> Reference:
    """What was trained, asked problems of the training split: the test split stays unread.

    Rows that were held out of the training are taken where there are any.
    """
    settings = export.settings
    model = settings.model
    tokenizer = load_tokenizer(str(model.model_name_or_path), settings.trust_remote_code)
    train, validation = load_train_and_validation(settings.data, tokenizer, settings.seed)
    rows = train if validation is None else validation
    rows = rows.select(range(min(export.arguments.parity_problems, len(rows))))
    trained = Trained(
        model=model,
        adapter=export.adapter,
        trust_remote_code=settings.trust_remote_code,
        max_new_tokens=settings.max_completion_length,
        stop_strings=stop_strings(rows),
    )
    problems = [Problem(row["prompt"], row["answer"], row["prompt_format"]) for row in rows]
    return Reference(trained, problems)


# -- folders that are whole or not there -----------------------------------------------------------


def _fingerprint(export: Export) -> dict[str, Any]:
    """What a saved model depends on: two exports with the same one are the same."""
    weights = export.adapter / ADAPTER_WEIGHTS
    if not weights.is_file():
        raise InputError(f"{export.adapter} holds no weights: it has no {weights.name}")
    model = export.settings.model
    return {
        "adapter_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "base_model": public_name(str(model.model_name_or_path)),
        "base_revision": model.model_revision,
        "dtype": str(model.dtype),
        "trained_in_4bit": export.settings.trained_in_4bit,
        "merge_into": export.arguments.merge_into,
        "parity_problems": export.arguments.parity_problems,
    }


def _finished(export: Export) -> dict[str, list[Gap] | None]:
    """Each model's gaps, if an earlier call has made it from the same; None if it is to be made.

    Raises:
        InputError: if a folder is in use for something else.
    """
    if not export.models:
        return {}
    made_from = _fingerprint(export)  # reads the adapter
    return {what: _gaps_of(folder, made_from) for what, folder in export.models.items()}


def _gaps_of(folder: Path, made_from: dict[str, Any]) -> list[Gap] | None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: give a folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    if not (folder / MARKER).is_file():
        raise InputError(f"{folder} is not empty: give another folder, or empty it")
    marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    if marker["made_from"] != made_from:
        raise InputError(
            f"{folder} holds an export of another adapter or with other flags: remove it, or give "
            "another folder"
        )
    return [load_gap(gap) for gap in marker["gaps"]]


def _unfinished(target: Path, kind: str) -> Path:
    """A fresh folder beside the target, on the same disk."""
    folder = target.with_name(f".{target.name}.{kind}.unfinished")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"cannot write to {target.parent}: {error.strerror}") from error
    return folder


def _finish(folder: Path, target: Path, made_from: dict[str, Any], gaps: list[Gap]) -> None:
    marker = {"made_from": made_from, "gaps": [asdict(gap) for gap in gaps]}
    write_atomically(folder / MARKER, json.dumps(marker, indent=2))
    if target.is_dir():
        target.rmdir()  # empty, or it would be in use
    os.replace(folder, target)


def _copy_adapter(export: Export) -> Path:
    """The adapter as it is pushed: without what belongs to this machine."""
    target = export.settings.output_dir / "export" / ADAPTER
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for pattern in ADAPTER_FILES:
        for file in sorted(export.adapter.glob(pattern)):
            shutil.copy(file, target)
    config = check_adapter(target, None)
    base = str(config["base_model_name_or_path"])
    config["base_model_name_or_path"] = public_name(base, export.arguments.base_model)
    write_atomically(target / "adapter_config.json", json.dumps(config, indent=2))
    return target


# -- telling ---------------------------------------------------------------------------------------

_ROWS: tuple[tuple[str, Callable[[Gap], str]], ...] = (
    ("KL(trained || saved), nats a token", lambda gap: f"{gap.kl:.2g}"),
    ("  what training changed, same measure", lambda gap: f"{gap.training_kl:.2g}"),
    ("log-prob gap, mean", lambda gap: f"{gap.mean_logprob_gap:.2g}"),
    ("log-prob gap, largest", lambda gap: f"{gap.max_logprob_gap:.2g}"),
    ("same likeliest token", lambda gap: f"{gap.top1_agreement:.1%}"),
    ("same greedy answer", lambda gap: f"{gap.greedy_agreement:.1%}"),
    ("accuracy", lambda gap: f"{gap.accuracy:.1%}"),
    (
        "  minus the trained model's, 95 % interval",
        lambda gap: f"{gap.delta:+.1%} ({gap.delta_ci95[0]:+.1%} to {gap.delta_ci95[1]:+.1%})",
    ),
)


def _print_gaps(console: Console, gaps: list[Gap]) -> None:
    """One column a saved model."""
    first = gaps[0]
    kept = _merge_of(gaps)
    table = Table(
        title=f"saved models against the trained one, {first.problems} training problems, "
        f"{first.tokens} tokens"
    )
    table.add_column("")
    for gap in gaps:
        table.add_column(gap.name + (" (kept)" if gap.name == kept else ""), justify="right")
    for title, cell in _ROWS:
        table.add_row(title, *(cell(gap) for gap in gaps))
    console.print(table)


def _note_in_results(export: Export, gaps: list[Gap]) -> None:
    """Add the comparison to the trained model's results, if it was evaluated."""
    path = export.settings.output_dir / EVALUATIONS / export.settings.label / RESULTS
    if not path.is_file():
        return
    results = json.loads(path.read_text(encoding="utf-8"))
    results["merge_parity"] = {"kept": _merge_of(gaps), "gaps": [asdict(gap) for gap in gaps]}
    write_atomically(path, json.dumps(results, indent=2))


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Export without evaluating."""
    quiet_libraries()
    prepare_cpu()
    arguments, rest = take_export_arguments(sys.argv[1:] if argv is None else argv)
    export = begin_export(arguments, parse_evaluation(rest, arguments.merge_into))
    if export is None:
        raise InputError(
            "nothing to do: give --save_merged FOLDER, --save_4bit FOLDER or --push_to_hub NAME"
        )
    export_and_push(export, Console())


if __name__ == "__main__":
    main()
