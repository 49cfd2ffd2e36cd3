"""Two processes, each with half of the rows, do what one process does with all of them."""

import json
from pathlib import Path

import pytest

from sologrpo.base.files import METRICS
from sologrpo.training.packed_loss import MicroBatchLog, metrics_of_one_batch
from two_processes import CASES, Seen, assert_trained_as_one, launch, sample_and_validate


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which both processes ran."""
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def both(tiny_llama: Path, output: Path) -> Seen:
    """Run two processes, which average their gradients with DDP."""
    return launch(tiny_llama, output, "--multi_gpu")


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(
    name: str, both: Seen, tiny_llama: Path, tmp_path: Path
) -> None:
    assert_trained_as_one(name, both, tiny_llama, tmp_path)


def test_processes_draw_different_completions(both: Seen) -> None:
    completions = both[0]["sampled"]["completions"]
    assert completions == both[1]["sampled"]["completions"]  # gathered from both
    here, there = completions[:8], completions[8:]
    assert len(there) == 8
    assert not any(a == b for a, b in zip(here, there, strict=True))


def test_validation_is_that_of_one_process_and_logged_once(
    both: Seen, output: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    first, second = (seen["sampled"]["validation"] for seen in both)
    assert first == second == sample_and_validate(tiny_llama, tmp_path)["validation"]
    assert first["eval_n"] == 5
    lines = [json.loads(line) for line in (output / METRICS).read_text().splitlines()]
    assert [line["eval_n"] for line in lines if "eval_n" in line] == [5]
    assert sum("reward" in line for line in lines) == 1


def test_a_loss_that_is_nan_in_one_process_stops_both(both: Seen) -> None:
    first, second = (seen["stopped"] for seen in both)
    assert first == second
    assert "step 1 is not a finite number" in first


def test_processes_take_the_number_format_of_the_first(both: Seen) -> None:
    chosen = "bfloat16", {"float32": 100, "bfloat16": 400}
    assert [seen["format"] for seen in both] == [chosen, chosen]


def test_metrics_of_masked_micro_batches_do_not_count() -> None:
    nan = float("nan")
    masked = MicroBatchLog(
        1, 0, 9, {"ratio/mean": nan, "ratio/min": nan, "clip_ratio/high_max": nan}
    )
    known = MicroBatchLog(
        1, 5, 9, {"ratio/mean": 1.5, "ratio/min": 0.5, "clip_ratio/high_max": 0.2}
    )
    assert metrics_of_one_batch([masked, known, masked]) == known.metrics
    assert metrics_of_one_batch([masked])["ratio/min"] != 0.0
    assert metrics_of_one_batch([]) == {}
