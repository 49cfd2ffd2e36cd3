"""Damage to what a shipped recipe saved: found, named, fallen back from; nothing whole is lost."""

import copy
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume_recipes import arguments
from transformers import get_scheduler

from scripts import exit_code, steps_of, train_without_report
from sologrpo.base.errors import InputError
from sologrpo.base.manifest import damage, write_manifest
from sologrpo.training import checkpoint as checkpoints
from sologrpo.training.checkpoint import incomplete_reason, last_complete_checkpoint
from sologrpo.training.run_directory import OpenedRun, open_run_directory
from tiny import write_rows

LAST, BEFORE = "checkpoint-4", "checkpoint-3"
Damage = Callable[[Path], object]
Opened = tuple[Any, ...]  # what train.py gives `open_run_directory`


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> tuple[Path, Opened]:
    """The quickstart's run of 4 steps, with all its checkpoints, and how it was opened."""
    run, opened, train = tmp_path_factory.mktemp("runs") / "run", [], train_without_report()

    def recording(*given: Any) -> OpenedRun:
        opened.append(given)
        return open_run_directory(*given)

    train.open_run_directory = recording  # type: ignore[attr-defined]
    assert exit_code(train, *arguments("quickstart", tiny_llama, run), "--save_total_limit", 9) == 0
    shutil.rmtree(run / "adapter")
    return run, opened[0]


@pytest.fixture
def run(saved: tuple[Path, Opened], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "run"))


@pytest.fixture
def reopen(saved: tuple[Path, Opened], run: Path) -> Callable[..., OpenedRun]:
    """Do what `train.py --resume` does before it loads the model."""

    def resume(**changed: Any) -> OpenedRun:
        ours, args, *others = saved[1]
        args = copy.copy(args)
        args.output_dir = str(run)
        ours = replace(ours, resume=True, **changed)
        return open_run_directory(ours, args, *others)

    return resume


# -- every damage to every file of a checkpoint --------------------------------------------------


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def swap(file: Path) -> None:
    shutil.copy(file.parent.with_name(BEFORE) / file.name, file)


def make_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES = [zero, cut_short, empty, flip_a_bit, swap, make_a_folder, Path.unlink]


@pytest.mark.parametrize("spoil", DAMAGES)
def test_every_damage_to_every_file_is_named_and_fallen_back_from(
    spoil: Damage, run: Path, reopen: Callable[..., OpenedRun], capfd: pytest.CaptureFixture[str]
) -> None:
    pristine = run.with_name("pristine")
    shutil.copytree(run / LAST, pristine)
    names = sorted(file.name for file in pristine.iterdir())
    assert {"optimizer.pt", "generation_state.pt", "manifest.json"} < set(names)
    for name in names:
        same_in_both = (pristine / name).read_bytes() == (run / BEFORE / name).read_bytes()
        if spoil is swap and same_in_both:
            continue
        spoil(run / LAST / name)
        opened = reopen()
        printed = capfd.readouterr().err
        assert opened.checkpoint == run / BEFORE
        (line,) = (line for line in printed.splitlines() if "is incomplete" in line)
        assert line.startswith(f"{run / LAST} is incomplete, ")
        assert "manifest.json" in line or name in line or (spoil is swap), line
        shutil.rmtree(run / f"partial-{LAST}")
        shutil.copytree(pristine, run / LAST)
        assert reopen().checkpoint == run / LAST


class Code:
    """A pickle of it would make a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("owned"),)


@pytest.mark.parametrize("content", [Code(), b"no pickle", b""])
@pytest.mark.parametrize(
    "name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "generation_state.pt"]
)
def test_a_forged_file_is_named_and_fallen_back_from(
    name: str, content: Any, run: Path, reopen: Callable[..., OpenedRun],
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(run)
    if isinstance(content, bytes):
        (run / LAST / name).write_bytes(content)
    else:
        torch.save(content, run / LAST / name)
    write_manifest(run / LAST)
    assert reopen().checkpoint == run / BEFORE
    assert f"{run / LAST} is incomplete, {name} is damaged: moved to" in capfd.readouterr().err
    assert not Path("owned").exists()


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_what_is_in_the_way_of_a_partial_checkpoint_is_removed_but_not_what_it_links_to(
    target: str, run: Path, reopen: Callable[..., OpenedRun]
) -> None:
    elsewhere = write_rows(run.with_name("elsewhere") / "rows.jsonl", [])
    aside = run / f"partial-{LAST}"
    aside.symlink_to(run.with_name(target))
    (run / LAST / "manifest.json").unlink()
    assert reopen().checkpoint == run / BEFORE
    assert not aside.is_symlink()
    assert (aside / "optimizer.pt").is_file()
    assert elsewhere.is_file()


def test_a_save_cut_off_at_any_point_is_incomplete(run: Path, tmp_path: Path) -> None:
    whole, manifest = run / LAST, run / LAST / "manifest.json"
    # The clock of a file system may give two files one time.
    written = sorted(whole.iterdir(), key=lambda file: (file.stat().st_mtime_ns, file == manifest))
    assert written[-1] == manifest
    partial = tmp_path / LAST
    partial.mkdir()
    for file in written:
        (partial / file.name).write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        assert incomplete_reason(partial) is not None
        shutil.copy(file, partial)
    assert incomplete_reason(partial) is None


def test_a_renamed_checkpoint_is_not_taken_for_another_step(run: Path) -> None:
    shutil.rmtree(run / LAST)
    (run / BEFORE).rename(run / LAST)
    assert incomplete_reason(run / LAST) == "its trainer_state.json is that of step 3"


def remove_generation_state(folder: Path) -> None:
    """As if another trainer had saved the checkpoint."""
    (folder / "generation_state.pt").unlink()
    write_manifest(folder)


def test_a_checkpoint_without_the_position_in_its_batch_is_passed_over(
    run: Path, reopen: Callable[..., OpenedRun], capfd: pytest.CaptureFixture[str]
) -> None:
    remove_generation_state(run / LAST)
    assert reopen().checkpoint == run / BEFORE
    assert f"{run / LAST} is incomplete, it has no generation_state.pt" in capfd.readouterr().err
    for folder in run.glob("checkpoint-*"):
        remove_generation_state(folder)
    with pytest.raises(InputError, match=r"cannot be used .* no generation_state.pt"):
        reopen()


# -- the other files of a run --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.yaml", "environment.json"])
@pytest.mark.parametrize(
    "spoil",
    [
        zero, empty, Path.unlink, make_a_folder,
        lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
        lambda file: file.write_text("- 1\n- 2\n"),
        lambda file: file.write_text("[" * 5000),
        lambda file: file.write_bytes(b"\xff\xfe\xff"),
    ],
)  # fmt: skip
def test_damage_to_the_record_of_a_run_is_one_line(
    spoil: Damage, name: str, run: Path, reopen: Callable[..., OpenedRun]
) -> None:
    spoil(run / name)
    with pytest.raises(InputError, match=r"^--resume: .*add --accept_changes") as refused:
        reopen()
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)
    if not (run / name).is_dir():
        opened = reopen(accept_changes=True)
        assert opened.checkpoint == run / LAST
        opened.describe()
        assert reopen().checkpoint == run / LAST


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "5", "{}", '{"step": "x"}', '{"step": null}', "\0" * 50, "[" * 9999]
)
def test_bad_lines_of_the_metrics_are_dropped(
    line: str, run: Path, reopen: Callable[..., OpenedRun]
) -> None:
    metrics = run / "metrics.jsonl"
    before = metrics.read_text()
    first, rest = before.split("\n", 1)
    metrics.write_bytes(f"{first}\n{line}\n{rest}".encode() + b'\xff{"step": 4, "lo')
    reopen()
    assert metrics.read_text() == before


def test_warnings_of_later_steps_are_removed(run: Path, reopen: Callable[..., OpenedRun]) -> None:
    last = int(LAST.removeprefix("checkpoint-"))
    lines = [f'{{"step": {step}, "topic": "x", "text": "y"}}\n' for step in (last, last + 1)]
    (run / "warnings.jsonl").write_text("".join(lines) + '{"step": 1')
    reopen()
    assert (run / "warnings.jsonl").read_text() == lines[0]


def test_damaged_completions_of_later_steps_are_removed(
    run: Path, reopen: Callable[..., OpenedRun]
) -> None:
    shutil.rmtree(run / LAST)
    names = {file.name for file in (run / "completions").iterdir()}
    zero(run / "completions/completions_00004.parquet")
    (run / "completions/completions_x.parquet").write_bytes(b"")
    reopen()
    left = {file.name for file in (run / "completions").iterdir()}
    assert left == names - {"completions_00004.parquet"} | {"completions_x.parquet"}


# -- rotation ------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for what stops a process between two writes."""


@pytest.mark.parametrize("trainer", ["solo", "stock"])
def test_older_checkpoints_are_deleted_only_after_the_manifest(
    trainer: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, written = tmp_path / "run", []

    def killed_at_the_third(folder: Path) -> None:
        if len(written) == 2:
            raise Killed
        write_manifest(folder)
        written.append(sorted(path.name for path in run.glob("checkpoint-*")))

    monkeypatch.setattr(checkpoints, "write_manifest", killed_at_the_third)
    recipe = arguments("quickstart", tiny_llama, run, "--save_total_limit", "1")
    more = ("--trainer", trainer,
            "--per_device_train_batch_size", "8", "--num_generations", "4")  # fmt: skip
    with pytest.raises(Killed):
        exit_code(train_without_report(), *recipe, *more)
    assert written == [["checkpoint-1"], ["checkpoint-1", "checkpoint-2"]]
    assert sorted(path.name for path in run.glob("c*-*")) == ["checkpoint-2", "checkpoint-3"]
    assert last_complete_checkpoint(run) == run / "checkpoint-2"
    monkeypatch.undo()
    assert exit_code(train_without_report(), *recipe, *more, "--resume") == 0
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-4"]
    assert steps_of(run) == [1, 2, 3, 4]
    assert damage(run / "adapter", ignored=["README.md"]) is None


# -- the learning rate of a resumed run ----------------------------------------------------------


def planned_rates(schedule: str, rate: float, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], rate)
    warmup = math.ceil(WARMUP * steps)
    planned = get_scheduler(schedule, optimizer, warmup, steps)
    return [rate * planned.lr_lambdas[0](step) for step in range(steps)]


WARMUP = 0.5  # of the steps


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant_with_warmup"])
def test_a_resumed_run_has_the_learning_rates_of_its_settings_from_the_first_step(
    schedule: str, config_file: Path, tmp_path: Path
) -> None:
    train = ["--config", config_file, "--resume", "--lr_scheduler_type", schedule]
    train += ["--warmup_steps", WARMUP, "--max_completion_length", 2]
    rates: list[float] = []
    for steps, rate in ((2, 0.01), (4, 0.01), (6, 0.02)):
        changed = ["--max_steps", steps, "--learning_rate", rate]
        assert exit_code(train_without_report(), *train, *changed) == 0
        rates += planned_rates(schedule, rate, steps)[len(rates) :]
        rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        assert [row["learning_rate"] for row in rows if "learning_rate" in row] == rates


def test_settings_that_a_checkpoint_would_override_are_refused(
    run: Path, saved: tuple[Path, Opened]
) -> None:
    args = copy.copy(saved[1][1])
    args.output_dir, args.weight_decay = str(run), 0.5
    with pytest.raises(InputError, match=r"the run was started with weight_decay 0\.0"):
        open_run_directory(replace(saved[1][0], resume=True), args, *saved[1][2:])


@pytest.mark.parametrize("name", ["metrics.jsonl", "warnings.jsonl"])
def test_a_log_that_is_a_named_pipe_is_refused(
    run: Path, reopen: Callable[..., OpenedRun], name: str
) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(InputError, match=f"{name} is not a file"):
        reopen()
