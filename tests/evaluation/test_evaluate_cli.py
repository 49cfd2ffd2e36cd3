"""`evaluate.py` as users call it: precisions, samples, `--resume` and `--regrade`."""

import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from trl import ModelConfig

from scripts import Printed, last_line, load_script, printed_by
from server import Server
from sologrpo.config.arguments import PRECISIONS
from sologrpo.config.evaluation import parse_evaluation
from sologrpo.evaluation import precisions
from sologrpo.model import fitting
from sologrpo.model.fitting import DoesNotFitError
from sologrpo.model.loading import load_base_model
from tiny import rows, write_rows

NEW_TOKENS = 12
Run = Callable[..., Printed]


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    # Slow, and not tested here.
    monkeypatch.setattr("sologrpo.report.write_report", lambda run: run / "report.html")
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: printed_by(load_script("evaluate"), capfd, *arguments)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "shells"
    write_rows(folder / "train.jsonl", rows(4))
    write_rows(folder / "test.jsonl", rows(8, offset=12))
    return folder


def make_run(folder: Path, model: Path, data: Path, load_in_4bit: bool) -> Path:
    """A run directory as `train.py` leaves it, with an adapter that changes every layer."""
    settings = {
        "model_name_or_path": str(model), "dataset_name": str(data), "load_in_4bit": load_in_4bit,
        "use_bnb_nested_quant": True, "dtype": "float32", "max_completion_length": NEW_TOKENS,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    base = load_base_model(ModelConfig(str(model), dtype="float32"))
    torch.manual_seed(1)
    config = LoraConfig(
        r=8, lora_alpha=1, target_modules="all-linear", init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    get_peft_model(base, config).save_pretrained(str(folder / "adapter"))
    return folder


@pytest.fixture
def run_4bit(tmp_path: Path, tiny_llama: Path, data: Path) -> Path:
    return make_run(tmp_path / "run", tiny_llama, data, load_in_4bit=True)


@pytest.fixture
def run_plain(tmp_path: Path, tiny_llama: Path, data: Path) -> Path:
    return make_run(tmp_path / "run", tiny_llama, data, load_in_4bit=False)


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def completions(run: Path, label: str) -> list[str]:
    lines = (run / "eval" / label / "records.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["completion"] for line in lines]


# -- precisions ----------------------------------------------------------------------------------


def test_every_precision_of_a_4bit_run(evaluate: Run, run_4bit: Path) -> None:
    printed = evaluate("--run", run_4bit, "--compare_precisions")
    assert printed.code == 0, printed
    comparison = read(run_4bit / "eval" / "precisions.json")
    table = comparison["precisions"]
    assert comparison["trained"] == "nf4_adapter"
    assert list(table) == list(PRECISIONS)
    assert table["nf4_adapter"]["differing_rate"] == 0
    # Merging into the weights that were trained on changes no answer.
    assert table["merged_dequantised"]["differing_rate"] == 0
    assert table["merged"]["differing_rate"] > 0
    assert table["merged_requantised"]["differing_rate"] > 0
    labels = {name: row["label"] for name, row in table.items()}
    assert labels["merged_dequantised"] == "trained"
    assert labels["merged"] == "trained-merged"
    assert len(set(completions(run_4bit, "trained"))) > 3  # answers that could differ
    # The same weights, merged or not.
    assert completions(run_4bit, labels["merged"]) == completions(run_4bit, labels["adapter"])
    for name, row in table.items():
        results = read(run_4bit / "eval" / row["label"] / "results.json")
        assert results["settings"]["precision"] == name
        assert row["accuracy"] == results["accuracy"]
        assert name in printed.stdout
    described = {name: row["precision"] for name, row in table.items()}
    assert described == {
        "merged": "unquantised, float32, adapter merged",
        "merged_dequantised": "NF4 dequantised, float32, adapter merged",
        "adapter": "unquantised, float32, adapter not merged",
        "nf4_adapter": "NF4, computed in float32, adapter not merged",
        "merged_requantised":
            "NF4, computed in float32 (NF4 dequantised, adapter merged, then NF4 again)",
    }  # fmt: skip


@pytest.mark.parametrize("precision", PRECISIONS)
def test_baseline_has_the_precision_of_the_trained_model(
    evaluate: Run, run_4bit: Path, precision: str
) -> None:
    printed = evaluate("--run", run_4bit, "--precision", precision, "--limit", "3")
    assert printed.code == 0, printed
    suffix = "" if precision == "merged_dequantised" else f"-{precision}"
    baseline, trained = (
        read(run_4bit / "eval" / f"{label}{suffix}" / "results.json")
        for label in ("baseline", "trained")
    )
    assert baseline["settings"]["precision"] == trained["settings"]["precision"] == precision
    assert trained["precision"].startswith(baseline["precision"])
    assert trained["baseline"] == f"baseline{suffix}"
    quantised = precision in ("nf4_adapter", "merged_requantised")
    for results in (baseline, trained):
        assert bool(results["settings"]["quantisation"]) is quantised
        assert results["settings"]["dtype"] == "float32"


def test_a_16bit_run_was_trained_on_the_unquantised_weights(evaluate: Run, run_plain: Path) -> None:
    printed = evaluate("--run", run_plain, "--compare_precisions")
    assert printed.code == 0, printed
    comparison = read(run_plain / "eval" / "precisions.json")
    assert comparison["trained"] == "adapter"
    assert comparison["precisions"]["merged"]["differing_rate"] == 0
    assert comparison["precisions"]["nf4_adapter"]["differing_rate"] > 0
    assert comparison["precisions"]["merged"]["label"] == "trained"


# -- precisions that do not fit ------------------------------------------------------------------


@pytest.fixture
def small_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with room for the tiny model in four bits, and not for its unquantised weights."""

    def refuse(*args: Any) -> None:
        raise AssertionError("unquantised weights on a device without room for them")

    monkeypatch.setattr(fitting, "free_bytes", lambda device: 2**18)
    monkeypatch.setattr(precisions, "dequantize", refuse)
    monkeypatch.setattr(precisions, "merge_adapter", refuse)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("sologrpo.evaluation")]


@pytest.mark.usefixtures("small_card")
def test_a_4bit_run_that_fits_in_4_bits_only_is_evaluated_as_it_was_trained(
    evaluate: Run, run_4bit: Path, caplog: pytest.LogCaptureFixture
) -> None:
    printed = evaluate("--run", run_4bit, "--limit", "3")
    assert printed.code == 0, printed
    (line,) = warnings_in(caplog)
    assert line.startswith("precision nf4_adapter, as trained, instead of merged_dequantised: ")
    assert "do not fit into 0 MiB" in line
    folders = sorted(path.name for path in (run_4bit / "eval").iterdir())
    assert folders == ["baseline-nf4_adapter", "trained-nf4_adapter"]
    baseline, trained = (read(run_4bit / "eval" / name / "results.json") for name in folders)
    assert baseline["settings"]["precision"] == trained["settings"]["precision"] == "nf4_adapter"
    assert trained["precision"] == "NF4, computed in float32, adapter not merged"
    assert trained["baseline"] == "baseline-nf4_adapter"
    answers = completions(run_4bit, "trained-nf4_adapter")
    # Asked for, it is the same evaluation, and nothing is said.
    caplog.clear()
    asked = evaluate("--run", run_4bit, "--limit", "3", "--precision", "nf4_adapter")
    assert asked.code == 0, asked
    assert warnings_in(caplog) == []
    assert completions(run_4bit, "trained-nf4_adapter") == answers


@pytest.mark.usefixtures("small_card")
@pytest.mark.parametrize(
    ("run", "flags", "says"),
    [
        ("run_4bit", ["--precision", "merged_dequantised"], "precision merged_dequantised: "),
        ("run_4bit", ["--precision", "adapter"], "precision adapter: "),
        ("run_4bit", ["--merge_into", "original"], "precision merged: "),
        ("run_plain", [], "precision merged: "),
        ("run_plain", ["--compare_precisions"], "precision adapter: "),
    ],
)
def test_a_precision_that_does_not_fit_is_refused_before_loading(
    evaluate: Run, request: pytest.FixtureRequest, run: str, flags: list[str], says: str
) -> None:
    folder = request.getfixturevalue(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precisions, "load_base_model", lambda *args: pytest.fail("it was loaded"))
        refused = evaluate("--run", folder, *flags)
    assert refused.code == 2, refused
    assert last_line(refused).startswith(f"error: {says}")
    assert last_line(refused).endswith("use --precision nf4_adapter")
    assert "Traceback" not in refused


@pytest.mark.usefixtures("small_card")
def test_vllm_is_refused_where_only_4_bits_fit(run_4bit: Path) -> None:
    settings = parse_evaluation(["--run", str(run_4bit)])
    for precision in ("merged_dequantised", "nf4_adapter"):
        with pytest.raises(DoesNotFitError, match="use --precision nf4_adapter --engine transf"):
            precisions.fit_precision(replace(settings, engine="vllm", precision=precision))


def test_a_label_of_the_user_names_the_other_precision_too(run_4bit: Path) -> None:
    settings = parse_evaluation(["--run", str(run_4bit), "--label", "mine"])
    assert settings.in_precision("nf4_adapter").label == "mine-nf4_adapter"


@pytest.mark.usefixtures("small_card")
def test_a_comparison_leaves_out_what_does_not_fit(
    evaluate: Run, run_4bit: Path, caplog: pytest.LogCaptureFixture
) -> None:
    printed = evaluate("--run", run_4bit, "--compare_precisions", "--limit", "3")
    assert printed.code == 0, printed
    assert list(read(run_4bit / "eval/precisions.json")["precisions"]) == ["nf4_adapter"]
    left_out = [line.split(": ")[1] for line in warnings_in(caplog)]
    assert left_out == [f"precision {name}" for name in PRECISIONS if name != "nf4_adapter"]


@pytest.mark.parametrize("part", ["dequantize", "merge_adapter"])
def test_memory_that_runs_out_while_loading_is_one_line(
    evaluate: Run, run_4bit: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fill(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 224 MiB")

    monkeypatch.setattr(precisions, part, fill)
    ended = evaluate("--run", run_4bit, "--limit", "3")
    assert ended.code == 2
    assert last_line(ended) == "error: out of memory: use --precision nf4_adapter"
    assert "Traceback" not in ended
    # The baseline is not lost if the merge was too much.
    assert (run_4bit / "eval/baseline/results.json").exists() == (part == "merge_adapter")


# -- samples, resume, regrade ------------------------------------------------------------------


def test_samples_do_not_change_the_greedy_answers(evaluate: Run, run_plain: Path) -> None:
    greedy = evaluate("--run", run_plain)
    assert greedy.code == 0, greedy
    alone = completions(run_plain, "trained")
    printed = evaluate("--run", run_plain, "--num_samples", "4", "--temperature", "0.7")
    assert printed.code == 0, printed
    assert completions(run_plain, "trained") == alone
    results = read(run_plain / "eval/trained/results.json")
    assert set(results["sampled"]["scores"]) == {"pass@1", "pass@2", "pass@4", "maj@4"}
    assert results["settings"]["temperature"] == 0.7
    for name in results["sampled"]["scores"]:
        assert name in printed.stdout
    for part in ("both right", "newly right", "newly wrong", "both wrong", "tokens per second"):
        assert part in printed.stdout


def test_a_killed_evaluation_is_resumed(
    evaluate: Run, server: Server, tmp_path: Path, tiny_llama: Path
) -> None:
    # 160 problems of 64 tokens are three batches, a few seconds of work.
    data = tmp_path / "many"
    write_rows(data / "test.jsonl", rows(160))
    arguments = ("--model", tiny_llama, "--dataset_name", data, "--max_completion_length", "64",
                 "--label", "model", "--resume", "--output_dir")  # fmt: skip
    folder = tmp_path / "killed" / "eval" / "model"
    log, deadline = folder / "completions.partial.jsonl", time.monotonic() + 200
    with server.running_command("evaluate", *arguments, tmp_path / "killed", cwd=tmp_path) as it:
        while not log.exists() or log.read_bytes().count(b"\n") < 2:
            assert not it.has_ended()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        it.send_signal(signal.SIGKILL)
    kept = log.read_bytes().count(b'", "') if log.exists() else None
    assert kept, "the evaluation ended before it could be killed"
    refused = evaluate(*arguments, tmp_path / "killed", "--seed", "1")
    assert refused.code == 2
    assert "seed 0, not 1" in refused
    resumed = evaluate(*arguments, tmp_path / "killed")
    assert resumed.code == 0, resumed
    assert evaluate(*arguments, tmp_path / "uninterrupted").code == 0
    first, second = (
        (tmp_path / name / "eval/model/records.jsonl").read_bytes()
        for name in ("killed", "uninterrupted")
    )
    assert first == second
    assert [path.name for path in sorted(folder.iterdir())] == ["records.jsonl", "results.json"]


def test_regrade(evaluate: Run, run_plain: Path) -> None:
    assert evaluate("--run", run_plain, "--num_samples", "2").code == 0
    folder = run_plain / "eval/trained"
    records = [json.loads(line) for line in (folder / "records.jsonl").open(encoding="utf-8")]
    untouched = (folder / "records.jsonl").read_bytes()
    same = evaluate("--regrade", folder / "records.jsonl")
    assert same.code == 0, same
    assert "24 completions judged again, 0 verdicts changed" in same.stdout

    # As if an older judge had accepted two wrong answers, one of them sampled.
    records[3] |= {"correct": True, "extracted": "63"}
    records[5]["samples"][1] |= {"correct": True, "extracted": "1"}
    altered = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "records.jsonl").write_text(altered, encoding="utf-8")
    printed = evaluate("--regrade", folder / "records.jsonl")
    assert "2 verdicts changed: 0 newly right, 2 newly wrong" in printed.stdout
    assert "[3] correct True -> False, extracted 63 -> None" in printed.stdout
    assert (folder / "records.jsonl").read_text(encoding="utf-8") == altered

    before = read(folder / "results.json")
    stale = before | {"accuracy": 0.5, "newly_right": 4, "delta": 0.5}
    (folder / "results.json").write_text(json.dumps(stale), encoding="utf-8")
    assert evaluate("--regrade", folder / "records.jsonl", "--write").code == 0
    assert (folder / "records.jsonl").read_bytes() == untouched
    assert read(folder / "results.json") == before
