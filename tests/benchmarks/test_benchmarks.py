"""The benchmarks run: a cell of the grid, and `make gpu-check` rehearsed on a CPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import _gpu_parts as parts  # noqa: E402
import _grid as grid  # noqa: E402
import gpu_check  # noqa: E402
from _llama import build_config, random_model  # noqa: E402
from _measure import Report  # noqa: E402

from sologrpo.sampling.decoding import generate_fast  # noqa: E402


@pytest.fixture
def check(tmp_path):
    return parts.Check(Report(tmp_path / "rows.json", {}, 200.0), parts.REHEARSAL, tmp_path)


def test_both_trainers_take_the_same_step(tiny_llama, tmp_path):
    report = Report(tmp_path / "results.json", {}, time_budget=200.0)
    bench = grid.Bench(report, tiny_llama, grid.REHEARSAL, tmp_path / "output")
    cell = grid.FIXED[0]
    measured = report.variant(
        "goals", lambda row: grid.measure_cell(bench, row, cell), **cell.labels()
    )
    assert measured
    (row,) = json.loads(report.path.read_text())["rows"]
    assert row["gradient_gap"] < 1e-5
    assert row["gemm_flop"]["stock"] > row["gemm_flop"]["solo"] > 0
    assert f"{row['ratio']['solo']:.2f}x" in grid.one_line(row)


def test_the_gpu_check_rehearsed(tmp_path):
    out = tmp_path / "check.json"
    part = gpu_check.list_parts(rehearse=True)["parity"]
    parity = gpu_check.check({"parity": part}, out, rehearsal=True)
    assert all(row["stock_to_solo_fp32"] < parts.MAX_GAP[True] for row in parity)
    assert str(ROOT) not in out.read_text()  # the file is made to be posted


def test_the_plan_of_memory_is_what_a_step_takes(check):
    parts.memory(check)
    rows = json.loads(check.report.path.read_text())["rows"]
    assert [row["planned_to_allocated"] for row in rows] == [pytest.approx(1.0, abs=0.15)] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_loop_decodes_like_generate_on_a_card(check):
    settings = check.workload("tiny", load_in_4bit=False, dtype="float32", bf16=False).settings
    model = random_model(build_config("tiny"), settings[2]).eval()
    request = parts.make_request(model, rows=8, prompt_T=20, new_tokens=12)
    request.config.do_sample, request.config.temperature, request.config.top_p = False, None, None
    ours = generate_fast(model, request).completion_ids
    theirs = model.generate(
        request.input_ids, attention_mask=request.attention_mask, generation_config=request.config
    )
    assert torch.equal(ours, theirs[:, 20:])
    assert len(ours.unique()) > 8
