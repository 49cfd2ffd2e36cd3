"""`evaluate.py` as users call it: precisions, prompt formats, samples, `--resume`."""

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from trl import ModelConfig

from scripts import Printed, last_line, load_script, printed_by
from server import Server
from sologrpo.base.errors import InputError
from sologrpo.config.arguments import PRECISIONS
from sologrpo.config.evaluation import parse_evaluation
from sologrpo.data.dataset import prompt_format_of
from sologrpo.evaluation import precisions
from sologrpo.evaluation.answer import answer
from sologrpo.model import fitting
from sologrpo.model.loading import load_base_model
from tiny import rows, write_rows

NEW_TOKENS = 12
Run = Callable[..., Printed]


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    # Slow, and not tested here.
    monkeypatch.setattr("sologrpo.report.write_report", lambda run, folder: folder / "report.html")
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


@pytest.mark.parametrize("run", ["run_4bit", "run_plain"])
def test_merging_into_the_weights_that_were_trained_on_changes_no_answer(
    evaluate: Run, request: pytest.FixtureRequest, run: str
) -> None:
    folder = request.getfixturevalue(run)
    for precision in ([], ["--precision", "adapter"]):
        printed = evaluate("--run", folder, "--baseline", "false", *precision)
        assert printed.code == 0, printed
    assert folders(folder) == ["trained", "trained-adapter"]
    merged, unmerged = (completions(folder, label) for label in folders(folder))
    assert unmerged == merged
    assert len(set(merged)) > 3  # answers that could differ


@pytest.mark.parametrize("precision", PRECISIONS)
def test_baseline_has_the_precision_of_the_trained_model(
    evaluate: Run, run_4bit: Path, precision: str
) -> None:
    printed = evaluate("--run", run_4bit, "--precision", precision, "--limit", "3")
    assert printed.code == 0, printed
    suffix = "-limit3" + ("" if precision == "merged" else f"-{precision}")
    baseline, trained = (
        read(run_4bit / "eval" / f"{label}{suffix}" / "results.json")
        for label in ("baseline", "trained")
    )
    assert baseline["settings"]["precision"] == trained["settings"]["precision"] == precision
    assert trained["precision"].startswith(baseline["precision"])
    assert trained["baseline"] == f"baseline{suffix}"
    for results in (baseline, trained):
        assert bool(results["settings"]["quantisation"]) is (precision == "adapter")
        assert results["settings"]["dtype"] == "float32"


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
    assert line.startswith("precision adapter, as trained, instead of merged: ")
    assert "do not fit into 0 MiB" in line
    folders = sorted(path.name for path in (run_4bit / "eval").iterdir())
    assert folders == ["baseline-limit3-adapter", "trained-limit3-adapter"]
    baseline, trained = (read(run_4bit / "eval" / name / "results.json") for name in folders)
    assert baseline["settings"]["precision"] == trained["settings"]["precision"] == "adapter"
    assert trained["precision"] == "NF4, computed in float32, adapter not merged"
    assert trained["baseline"] == "baseline-limit3-adapter"
    answers = completions(run_4bit, "trained-limit3-adapter")
    # Asked for, it is the same evaluation, and nothing is said.
    caplog.clear()
    asked = evaluate("--run", run_4bit, "--limit", "3", "--precision", "adapter")
    assert asked.code == 0, asked
    assert warnings_in(caplog) == []
    assert completions(run_4bit, "trained-limit3-adapter") == answers


@pytest.mark.usefixtures("small_card")
@pytest.mark.parametrize(
    ("run", "flags", "advice"),
    [
        ("run_4bit", ["--precision", "merged"], "use --precision adapter"),
        ("run_plain", [], "use a smaller model, or a machine with more memory"),
        ("run_plain", ["--precision", "adapter"], "or a machine with more memory"),
    ],
)
def test_a_precision_that_does_not_fit_is_refused_before_loading(
    evaluate: Run, request: pytest.FixtureRequest, run: str, flags: list[str], advice: str
) -> None:
    folder = request.getfixturevalue(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precisions, "load_base_model", lambda *args: pytest.fail("it was loaded"))
        refused = evaluate("--run", folder, *flags)
    assert refused.code == 2, refused
    assert last_line(refused).startswith("error: precision ")
    assert last_line(refused).endswith(advice)
    assert "Traceback" not in refused


@pytest.mark.usefixtures("small_card")
def test_labels_name_a_precision_chosen_for_lack_of_memory_too(run_4bit: Path) -> None:
    flags = ["--run", str(run_4bit), "--prompt_formats", "xml,boxed"]
    settings = precisions.fit_precision(parse_evaluation(flags))
    labels = ["baseline-adapter", "baseline-boxed-adapter", "trained-adapter"]
    assert [planned.label for planned in settings.plan()] == [*labels, "trained-boxed-adapter"]
    assert settings.table_suffix == "-adapter"
    mine = precisions.fit_precision(parse_evaluation([*flags, "--label", "mine"]))
    assert [planned.label for planned in mine.plan()][2:] == ["mine-adapter", "mine-adapter-boxed"]
    assert mine.table_suffix == "-mine-adapter"


@pytest.mark.parametrize("part", ["dequantize", "merge_adapter"])
def test_memory_that_runs_out_while_loading_is_one_line(
    evaluate: Run, run_4bit: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fill(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 224 MiB")

    monkeypatch.setattr(precisions, part, fill)
    ended = evaluate("--run", run_4bit, "--limit", "3")
    assert ended.code == 2
    assert last_line(ended) == "error: out of memory: use --precision adapter"
    assert "Traceback" not in ended
    # The baseline is not lost if the merge was too much.
    assert (run_4bit / "eval/baseline-limit3/results.json").exists() == (part == "merge_adapter")


# -- prompt formats ------------------------------------------------------------------------------

FORMATS = ("--prompt_formats", "xml,boxed,r1_zero,lm_eval")
BASELINES = ["baseline", "baseline-boxed", "baseline-lm_eval", "baseline-r1_zero"]
TRAINED = [label.replace("baseline", "trained") for label in BASELINES]


def folders(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "eval").iterdir() if path.is_dir())


def prompts(run: Path, label: str) -> list[str]:
    lines = (run / "eval" / label / "records.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def configure(run: Path, **settings: Any) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    (run / "config.yaml").write_text(yaml.safe_dump(config | settings), encoding="utf-8")


def test_both_models_answer_under_every_prompt(
    evaluate: Run, run_plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = {"question": "What is 1 + 1?", "thinking": "1 + 1 = 2", "answer": "2"}
    configure(run_plain, system_prompt="Be brief.", worked_examples=[example])
    done: list[list[str]] = []
    stops: list[list[str]] = []

    def add(*args: Any) -> Any:
        done.append([path.parent.name for path in run_plain.glob("eval/*/results.json")])
        return precisions.add_adapter(*args)

    def keep(*args: Any) -> Any:
        stops.append(args[2].stop_strings)
        return answer(*args)

    monkeypatch.setattr("sologrpo.evaluation.evaluate.add_adapter", add)
    monkeypatch.setattr("sologrpo.evaluation.evaluate.answer", keep)
    printed = evaluate("--run", run_plain, *FORMATS)
    assert printed.code == 0, printed
    assert folders(run_plain) == BASELINES + TRAINED
    assert [sorted(names) for names in done] == [BASELINES]  # merged once, after all of them
    assert [bool(strings) for strings in stops] == [
        False,
        False,
        True,
        False,
    ] * 2  # plain text is stopped

    # The run's system prompt and example belong to its own prompt; the others are as shipped.
    for label in ("baseline", "trained"):
        assert all("Be brief." in prompt for prompt in prompts(run_plain, label))
        assert all("What is 1 + 1?" in prompt for prompt in prompts(run_plain, label))
        for prompt in prompts(run_plain, f"{label}-boxed"):
            assert prompt.count("boxed{}") == 2  # of its worked example, and of the question
            assert "Be brief." not in prompt
            assert "What is 1 + 1?" not in prompt
        for prompt in prompts(run_plain, f"{label}-r1_zero"):
            assert prompt.startswith("A conversation between User and Assistant.")
            assert prompt.endswith("<think>")
        for prompt in prompts(run_plain, f"{label}-lm_eval"):
            assert prompt.count("Question: ") == 5  # all four training rows, and its own
            assert prompt.count("\n#### ") == 4
            assert "Be brief." not in prompt
            assert "What is 1 + 1?" not in prompt

    table = read(run_plain / "eval" / "prompt_formats.json")
    assert (table["n"], table["split"]) == (8, "test")
    rows = table["prompt_formats"]
    roles = {"xml": "trained", "boxed": "unseen", "r1_zero": "unseen", "lm_eval": "harness's"}
    assert {name: row["role"] for name, row in rows.items()} == roles
    assert list(rows) == list(roles)
    for name, row in rows.items():
        before, after = (
            read(run_plain / "eval" / row[key] / "results.json") for key in ("baseline", "label")
        )
        assert after["settings"]["prompt_format"] == before["settings"]["prompt_format"] == name
        assert after["baseline"] == row["baseline"]
        assert row["delta"] == after["accuracy"] - before["accuracy"]
        assert row["truncated_rate"] == after["truncated_rate"]
        assert row["baseline_truncated_rate"] == before["truncated_rate"]
        assert name in printed.stdout
    assert "8 test problems, greedy; base model -> trained model" in printed.stdout
    assert table["verdict"] in " ".join(printed.stdout.split())


def test_formats_are_resumed_after_a_kill_between_them(
    evaluate: Run, server: Server, run_plain: Path, data: Path, tmp_path: Path
) -> None:
    write_rows(data / "many.jsonl", rows(64))
    arguments = ("--run", run_plain, "--prompt_formats", "xml,boxed", "--dataset_test_split",
                 "many", "--output_dir")  # fmt: skip
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    finished = killed / "eval/baseline-many/results.json"
    deadline = time.monotonic() + 200
    with server.running_command("evaluate", *arguments, killed, cwd=tmp_path) as it:
        while not finished.exists():
            assert not it.has_ended()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        it.send_signal(signal.SIGKILL)
    assert list(killed.glob("eval/*/results.json")) == [finished]
    before = read(finished)
    resumed = evaluate(*arguments, killed, "--resume")
    assert resumed.code == 0, resumed
    assert read(finished)["seconds"] == before["seconds"]  # taken over, not generated again
    assert evaluate(*arguments, whole).code == 0
    assert len(folders(whole)) == 4
    for label in folders(whole):
        first, second = (out / "eval" / label / "records.jsonl" for out in (killed, whole))
        assert first.read_bytes() == second.read_bytes()
    tables = [read(out / "eval/prompt_formats-many.json") for out in (killed, whole)]
    assert tables[0] == tables[1]


def test_formats_of_a_base_model_without_a_chat_template(
    evaluate: Run, tiny_llama: Path, data: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_llama, base)
    (base / "chat_template.jinja").unlink()
    run = make_run(tmp_path / "run", base, data, load_in_4bit=False)
    configure(run, prompt_format="boxed")
    refused = evaluate("--run", run, "--prompt_formats", "boxed", "xml")
    assert refused.code == 2
    assert "has no chat template: use prompt_format" in last_line(refused)
    assert not (run / "eval").exists()
    printed = evaluate("--run", run, "--prompt_formats", "r1_zero,boxed,lm_eval")
    assert printed.code == 0, printed
    others = ["-lm_eval", "-r1_zero"]
    labels = ["baseline", "trained"]
    assert folders(run) == sorted(name + other for name in labels for other in ["", *others])
    for label in ("trained", "trained-lm_eval"):
        assert all(prompt.endswith("Answer:") for prompt in prompts(run, label))
        assert all("im_start" not in prompt for prompt in prompts(run, label))
    table = read(run / "eval/prompt_formats.json")["prompt_formats"]
    assert {name: row["role"] for name, row in table.items()} == {
        "boxed": "trained", "r1_zero": "unseen", "lm_eval": "harness's"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "labels"),
    [
        ([], ["trained", "baseline"]),
        (["--prompt_format", "boxed"], ["trained-boxed", "baseline-boxed"]),
        (["--dataset_test_split", "b[:9]"], ["trained-b-9-", "baseline-b-9-"]),
        (["--dataset_name", "some/where"], ["trained-where", "baseline-where"]),
        (["--limit", "3"], ["trained-limit3", "baseline-limit3"]),
        (["--max_completion_length", "12"], ["trained", "baseline"]),
        (
            ["--max_completion_length", "99", "--num_samples", "4", "--prompt_format", "boxed"],
            ["trained-length99-samples4-boxed", "baseline-length99-samples4-boxed"],
        ),
        (
            # A name that ends in .json is a table's.
            ["--dataset_test_split", "b", "--dataset_name", "my/problems.json"],
            ["trained-problems-b", "baseline-problems-b"],
        ),
        (["--label", "mine", "--prompt_format", "boxed"], ["mine", "baseline-boxed"]),
        (
            ["--precision", "adapter", "--prompt_format", "boxed", "--dataset_test_split", "b"],
            ["trained-b-boxed-adapter", "baseline-b-boxed-adapter"],
        ),
    ],
)
def test_labels_name_what_is_not_the_runs_own(
    run_4bit: Path, flags: list[str], labels: list[str]
) -> None:
    settings = parse_evaluation(["--run", str(run_4bit), *flags])
    baseline, trained = settings.plan()
    assert [trained.label, baseline.label] == labels
    assert (trained.baseline, trained.adapter) == (baseline.label, run_4bit / "adapter")
    assert baseline.adapter is None


def test_several_trained_formats(run_plain: Path) -> None:
    example = {"question": "What is 1 + 1?", "thinking": "1 + 1 = 2", "answer": "2"}
    configure(
        run_plain, prompt_formats=["xml", "boxed"], system_prompt="Hm.", worked_examples=[example]
    )
    formats = "xml,boxed,r1_zero"
    settings = parse_evaluation(["--run", str(run_plain), "--prompt_formats", formats])
    assert settings.prompt_formats == ["xml", "boxed", "r1_zero"]
    assert settings.trained_formats == ["xml", "boxed"]
    shown = {name: prompt_format_of(settings.data_in(name)) for name in settings.prompt_formats}
    assert {name: len(f.worked_examples) for name, f in shown.items()} == {
        "xml": 1, "boxed": 1, "r1_zero": 0
    }  # fmt: skip
    assert [name for name, f in shown.items() if f.system_prompt == "Hm."] == ["xml"]
    with pytest.raises(InputError, match="name xml or boxed, and at least one other"):
        parse_evaluation(["--run", str(run_plain), "--prompt_formats", "xml,boxed"])


# -- samples, resume ---------------------------------------------------------------------------


def test_samples_do_not_change_the_greedy_answers(evaluate: Run, run_plain: Path) -> None:
    greedy = evaluate("--run", run_plain)
    assert greedy.code == 0, greedy
    alone = completions(run_plain, "trained")
    printed = evaluate("--run", run_plain, "--num_samples", "4", "--temperature", "0.7")
    assert printed.code == 0, printed
    assert completions(run_plain, "trained-samples4") == alone
    results = read(run_plain / "eval/trained-samples4/results.json")
    assert set(results["sampled"]["scores"]) == {"pass@1", "pass@2", "pass@4"}
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
    log, deadline = folder / "records.jsonl", time.monotonic() + 200
    with server.running_command("evaluate", *arguments, tmp_path / "killed", cwd=tmp_path) as it:
        while not log.exists() or log.read_bytes().count(b"\n") < 2:
            assert not it.has_ended()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        it.send_signal(signal.SIGSTOP)
        before = log.read_bytes()
        for more in ([], ["--max_completion_length", "2"]):  # another one at the same time
            refused = evaluate(*arguments, tmp_path / "killed", *more)
            assert refused.code == 2
            assert "model is in use: another process writes an evaluation there" in refused
        assert log.read_bytes() == before
        it.send_signal(signal.SIGKILL)
    assert (folder / "unfinished.json").exists(), "it ended before it could be killed"
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
    assert sorted(p.name for p in folder.glob("[!.]*")) == ["records.jsonl", "results.json"]


# -- what is there already -----------------------------------------------------------------------


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("[!.]*") if path.is_file()}


@pytest.mark.parametrize("flags", [["--limit", "3"], ["--max_completion_length", "2"]])
def test_another_evaluation_replaces_nothing(
    evaluate: Run, run_plain: Path, flags: list[str]
) -> None:
    assert evaluate("--run", run_plain).code == 0
    before = contents(run_plain)
    assert evaluate("--run", run_plain, *flags).code == 0
    assert len(folders(run_plain)) == 4
    assert before.items() <= contents(run_plain).items()


def test_a_label_is_kept_for_one_evaluation(
    evaluate: Run, run_plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = ("--run", run_plain, "--label", "mine", "--baseline", "false")
    assert evaluate(*mine).code == 0
    other = tmp_path / "other"
    shutil.copytree(run_plain / "adapter", other)
    weights = (other / "adapter_model.safetensors").read_bytes()
    (other / "adapter_model.safetensors").write_bytes(weights[:-4] + bytes(4))
    before = contents(run_plain)
    with monkeypatch.context() as patch:
        patch.setattr(precisions, "load_base_model", lambda *args: pytest.fail("it was loaded"))
        for flags, says in (
            (["--limit", "3"], "with limit None, not 3: "),
            (["--max_completion_length", "2"], "with max_completion_length 12, not 2: "),
            (["--num_samples", "2"], "with num_samples 0, not 2, temperature None, not 1.0, "),
            (["--adapter", str(other)], "with adapter_hash '"),
        ):
            refused = evaluate(*mine, *flags)
            assert refused.code == 2, flags
            assert f"{run_plain / 'eval/mine'} holds another evaluation, {says}" in refused
            assert last_line(refused).endswith("give another --output_dir, or remove that folder")
            assert contents(run_plain) == before
    # The very same one, and one of the adapter that was trained further, may be repeated.
    assert evaluate(*mine, "--seed", "1").code == 0
    shutil.rmtree(run_plain / "adapter")
    other.rename(run_plain / "adapter")
    assert evaluate(*mine).code == 0
    assert contents(run_plain)[run_plain / "eval/mine/results.json"] not in before.values()


@pytest.mark.parametrize("blocked", ["", "eval", "eval/trained"])
def test_a_place_that_cannot_be_written_is_found_before_loading(
    evaluate: Run, run_plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    (tmp_path / "out" / blocked).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "out" / blocked).write_text("a file")
    monkeypatch.setattr(precisions, "load_base_model", lambda *args: pytest.fail("it was loaded"))
    refused = evaluate("--run", run_plain, "--output_dir", tmp_path / "out")
    assert refused.code == 2
    assert f"cannot write to {tmp_path / 'out'}" in last_line(refused)


def test_an_evaluation_elsewhere_writes_nothing_into_the_run(
    run_plain: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, out = contents(run_plain), tmp_path / "out"
    printed = printed_by(load_script("evaluate"), capfd, "--run", run_plain, "--output_dir", out)
    assert printed.code == 0, printed
    assert contents(run_plain) == before
    assert f"report    {out}/report.html" in printed.stdout
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "same problems, paired" in page  # of the evaluations there
