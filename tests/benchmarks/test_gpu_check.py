"""`make gpu-check`, rehearsed on a CPU: every part, and what happens when one fails."""

import doctest
import json
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import _gpu_parts as parts  # noqa: E402
import _measure as measure  # noqa: E402
import gpu_check  # noqa: E402
from _llama import build_config, random_model, step_bytes  # noqa: E402
from bitsandbytes.nn import Linear4bit  # noqa: E402

from sologrpo.model.loading import load_base_model  # noqa: E402
from sologrpo.sampling.decoding import generate_fast  # noqa: E402

PARTS = gpu_check.list_parts(rehearse=True)


@pytest.fixture
def check(tmp_path):
    report = measure.Report(tmp_path / "rows.json", {}, time_budget=200.0)
    return parts.Check(report, parts.REHEARSAL, tmp_path)


def rows_of(check, part):
    parts.PARTS[part](check)
    rows = json.loads(check.report.path.read_text())["rows"]
    assert not [row["error"] for row in rows if "error" in row]
    return rows


# --- the parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("four_bit", [False, True])
def test_weights_that_are_drawn_are_those_that_would_be_loaded(check, four_bit):
    workload = check.workload("tiny", load_in_4bit=four_bit)
    model_args = workload.settings[2]
    drawn = workload.load_model()
    plain = random_model(
        build_config("tiny"), check.workload("tiny", load_in_4bit=False).settings[2]
    )
    plain.save_pretrained(check.folder / "tiny")
    loaded = load_base_model(model_args)
    assert sum(isinstance(module, Linear4bit) for module in drawn.modules()) == 14 * four_bit
    assert getattr(drawn, "is_loaded_in_4bit", False) is four_bit
    assert step_bytes(drawn) == step_bytes(loaded)
    for (name, a), (_, b) in zip(drawn.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dtype == b.dtype, name
    deviations = [p.float().std() for name, p in plain.named_parameters() if "norm" not in name]
    assert all(0.019 < deviation < 0.021 for deviation in deviations)


def test_memory_of_a_step_next_to_the_plan(check):
    rows = rows_of(check, "memory")
    assert [(row["shape"], row["weights"]) for row in rows] == [("tiny", "bf16"), ("tiny", "NF4")]
    for row in rows:
        assert 0.0 < row["peak_allocated_gib"] < 0.1
        assert 0.5 < row["planned_to_allocated"] < 2.0


def test_sampling_next_to_the_bandwidth(check):
    copied, load, adapter, merged, _, bf16 = rows_of(check, "sampling")
    assert copied["copied_gb_per_s"] > 0.1
    assert (load["weights"], adapter["weights"]) == ("NF4", "NF4 + adapter")
    for row in (adapter, merged, bf16):
        assert row["rows"] == 8
        assert row["tokens_per_s"] > 0
        assert row["share_of_bound"] == pytest.approx(row["bound_ms"] / row["step_ms"], rel=0.1)
    # Layers in 4 bits are a quarter of those in 16, and the LM head stays as it is.
    assert adapter["bound_ms"] < merged["bound_ms"] == pytest.approx(bf16["bound_ms"], rel=0.01)


def test_steps_of_both_trainers_by_phase(check):
    stock, solo = rows_of(check, "step")
    assert (solo["trainer"], stock["trainer"]) == ("solo", "stock")
    assert solo["engine"] in ("adapter", "merged")
    for row in (solo, stock):
        assert {"sampling", "forward", "backward", "optimizer"} <= row["phases"].keys()
        seconds = {name: phase["seconds"] for name, phase in row["phases"].items()}
        assert seconds["sampling"] == pytest.approx(row["sampling_s"], rel=0.2, abs=0.05)
        assert sum(seconds.values()) == pytest.approx(row["step_s"], rel=0.2, abs=0.05)
        assert row["first_step_s"] > 0
        assert row["sampled_tokens_per_s"] > 0
    # Packed: the micro-batches of a step are one forward pass of ours.
    assert solo["phases"]["forward"]["calls"] < stock["phases"]["forward"]["calls"] == 8
    # The first step of ours compares the sampling engines; the second is the one that counts.
    assert solo["step_s"] < solo["first_step_s"]


def test_there_is_no_second_step_without_time(check, monkeypatch):
    monkeypatch.setattr(check.report, "time_left", lambda: 0.0)
    row = {}
    parts.measure_steps(check, "solo", row)
    assert row["step_s"] == row["first_step_s"]


def test_a_failure_of_vllm_stays_in_its_row(check):
    parts.vllm(check)
    (row,) = json.loads(check.report.path.read_text())["rows"]
    assert row["trainer"] == "stock + vLLM"
    assert "vLLM" in row["error"]
    assert (check.folder / "tiny/model.safetensors").exists()
    assert (check.folder / "tiny/tokenizer.json").exists()


def test_parity_fails_if_our_gradient_is_too_far_off():
    good = {"stock_to_solo_fp32": 0.001, "stock_to_fp32": 0.01, "solo_to_fp32": 0.015}
    parts.check_gaps(good, 0.01)
    for bad in ({"stock_to_solo_fp32": 0.02}, {"stock_to_solo_fp32": float("nan")}):
        with pytest.raises(RuntimeError, match=r"differ by more than 0\.01"):
            parts.check_gaps(good | bad, 0.01)
    with pytest.raises(RuntimeError, match=r"more than 2\.0 times as far off"):
        parts.check_gaps(good | {"solo_to_fp32": 0.021}, 0.01)


GRAPH = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    "loop", [parts.without_graphs, pytest.param(parts.nullcontext, marks=GRAPH)]
)
def test_the_loop_decodes_like_generate(check, loop):
    settings = check.workload("tiny", load_in_4bit=False, dtype="float32", bf16=False).settings
    model = random_model(build_config("tiny"), settings[2]).eval()
    request = parts.make_request(model, rows=8, prompt_T=20, new_tokens=12)
    request.config.do_sample, request.config.temperature, request.config.top_p = False, None, None
    with loop():
        ours = generate_fast(model, request).completion_ids
    theirs = model.generate(
        request.input_ids, attention_mask=request.attention_mask, generation_config=request.config
    )
    assert torch.equal(ours, theirs[:, 20:])
    assert len(ours.unique()) > 8


# --- all of them ----------------------------------------------------------------------------------


def command(code):
    return [sys.executable, "-c", code]


WRITE = "import json, sys, time; open(sys.argv[1], 'w').write(json.dumps({})); time.sleep({})"
GOOD = {"machine": {"device": "X"}, "rows": [{"part": "good", "weights": "NF4", "step_ms": 3.25}]}
SLOW = {"rows": [{"part": "slow", "weights": "bf16"}]}


def test_a_part_that_fails_or_takes_too_long_leaves_the_rest(tmp_path, capsys):
    out = tmp_path / "out/check.json"
    rows = gpu_check.check(
        {
            "broken": gpu_check.Part(30, command(f"open({str(Path.home() / 'no/file')!r})")),
            "slow": gpu_check.Part(3, command(WRITE.format(SLOW, 60))),
            "good": gpu_check.Part(30, command(WRITE.format(GOOD, 0))),
            "doctor": gpu_check.Part(30, command("print('torch ok'); exit(1)"), prints=True),
        },
        out,
        rehearsal=True,
    )
    data = json.loads(out.read_text())
    assert data["rows"] == rows
    assert (data["rehearsal"], data["machine"]) == (True, {"device": "X"})
    assert data["code"] == measure.code_version()
    broken, slow, late, good, printed, status = rows
    assert broken["error"].startswith("exit status 1: ")
    assert "FileNotFoundError" in broken["error"]
    assert (slow["weights"], late["error"]) == ("bf16", "ended after its limit of 3 s")
    assert good["step_ms"] == 3.25
    assert (printed["result"], status["error"]) == ("torch ok", "exit status 1")
    shown = capsys.readouterr().out
    assert re.search(r"^good +NF4 +step_ms 3.25$", shown, re.MULTILINE)
    assert re.search(r"^doctor +torch ok$", shown, re.MULTILINE)
    assert re.search(r"^slow +error ended after its limit of 3 s$", shown, re.MULTILINE)
    assert "device X" in shown
    assert str(Path.home()) not in out.read_text()
    assert str(Path.home()) in out.with_suffix(".log").read_text()  # which is not for posting


@pytest.mark.parametrize("seconds", [0, 60])
def test_what_a_part_has_started_ends_with_it(tmp_path, seconds):
    code = (
        "import subprocess, sys, time; child = subprocess.Popen(['sleep', '60']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); time.sleep({seconds})"
    )
    start = time.perf_counter()
    gpu_check.run_part("x", gpu_check.Part(3, command(code)), tmp_path / "log")
    assert time.perf_counter() - start < 20
    with suppress(psutil.NoSuchProcess):  # or, where nobody waits for it, a zombie
        child = psutil.Process(int((tmp_path / "pid").read_text()))
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.perf_counter() - start < 20
            time.sleep(0.01)


def test_the_rehearsal_from_the_command_line(tmp_path):
    out = tmp_path / "check.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_check.py", "--rehearse", "--out", str(out),
         "--parts", "doctor parity tests vllm"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    data = json.loads(out.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    by_part = {name: [row for row in data["rows"] if row["part"] == name] for name in PARTS}
    assert any(row["result"].startswith("torch ") for row in by_part["doctor"])
    bf16, nf4 = by_part["parity"]
    assert (bf16["weights"], nf4["weights"]) == ("bf16", "NF4")
    assert bf16["stock_to_solo_fp32"] < 1e-4
    assert 1e-4 < nf4["stock_to_solo_fp32"] < parts.MAX_GAP[True]
    for row in (bf16, nf4):
        assert 1e-4 < row["solo_to_fp32"] < 0.05
        assert f"solo_to_fp32 {row['solo_to_fp32']:.4g}" in done.stdout
    assert "deselected" in by_part["tests"][-1]["result"]
    if "skipped" in by_part["vllm"][0]:
        assert "skipped vllm is not installed" in done.stdout
    assert data["versions"]["torch"] == torch.__version__
    assert {"date", "machine", "commit", "code", "rehearsal"} <= data.keys()
    for place in (ROOT, tmp_path, Path.home()):
        assert str(place) not in out.read_text()


def test_the_limits_add_up_to_ten_minutes():
    real = gpu_check.list_parts(rehearse=False)
    limits = sum(part.limit for name, part in real.items() if name != "vllm")
    assert limits == 570 <= 600
    assert f"{limits} seconds" in (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    assert {name for name, part in real.items() if not part.prints} == parts.PARTS.keys()


def test_without_a_card_one_line_names_the_rehearsal(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"no CUDA device.*--rehearse") as ended:
        gpu_check.main([])
    assert "\n" not in ended.value.code


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--rehearse", "--parts", "speed"])
    assert "no part speed; there are: doctor, parity" in capsys.readouterr().err


def test_make_passes_the_parts_on():
    shown = subprocess.check_output(
        ["make", "-n", "-o", ".venv/.ready", "gpu-check", "PARTS=doctor step"], cwd=ROOT, text=True
    )
    assert 'benchmarks/gpu_check.py --parts "doctor step"' in shown


def test_docstring_examples():
    tested = doctest.testmod(gpu_check)
    assert tested.attempted
    assert not tested.failed
