"""The benchmarks on a CPU compare equals, and docs/performance.md shows what they measured."""

import argparse
import doctest
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import _cpu_generation as generation  # noqa: E402
import _cpu_run as whole_run  # noqa: E402
import _cpu_training as training  # noqa: E402
import _measure as measure  # noqa: E402
import _trainers as trainers  # noqa: E402
import cpu  # noqa: E402
import harness  # noqa: E402
import memory  # noqa: E402
import performance_tables as performance  # noqa: E402
from _sizes import SMOKE, Bench, Sizes  # noqa: E402

from sologrpo.startup import cpu_environment  # noqa: E402


@pytest.fixture
def bench(tiny_llama, tmp_path):
    report = measure.Report(tmp_path / "results.json", {"cpu": "one"}, time_budget=200.0)
    labels = {"allocator": "tuned"}
    return Bench(report, tiny_llama, SMOKE, tmp_path / "completions.json", labels)


def rows_in(bench):
    rows = json.loads(bench.report.path.read_text())["rows"]
    assert not [row["error"] for row in rows if "error" in row]
    return rows


# --- the contenders -------------------------------------------------------------------------------


def test_contenders_take_the_same_step_with_the_same_gradient(bench):
    workload = training.step_workload(bench)
    contenders = trainers.build(["stock", "solo", "solo_unshared"], workload)
    gradients = {}
    for name, contender in contenders.items():
        times = contender.train(capture=True)
        gradients[name] = contender.gradients
        assert (times["sampled_tokens"] > 0) is (name == "stock")  # the others get its completions
        assert 0.0 <= times["sampling_s"] < times["step_s"]
    for name in ("solo", "solo_unshared"):
        assert trainers.gradient_gap(gradients["stock"], gradients[name]) < 1e-5
    solo = contenders["solo"]  # every repeat is the same step
    before = {name: p.clone() for name, p in solo.trainer.model.named_parameters()}
    solo.train(capture=True)
    assert trainers.gradient_gap(gradients["solo"], solo.gradients) < 1e-6  # order of sums
    assert all(torch.equal(p, before[name]) for name, p in solo.trainer.model.named_parameters())


def test_a_contender_samples_for_the_time_and_trains_on_the_kept_completions(bench):
    workload = training.step_workload(bench)
    stock = trainers.build(["stock"], workload)["stock"]
    stock.train()
    kept = workload.completions
    stock.samples = True
    first, second = stock.train(seed=1), stock.train(seed=2)
    assert min(first["sampled_tokens"], second["sampled_tokens"]) > 0
    assert workload.completions is kept


def test_refuses_completions_of_other_prompts(bench):
    workload = training.step_workload(bench)
    workload.keep([[1]] * 4, [[2]] * 4)
    with pytest.raises(RuntimeError, match="other prompts"):
        trainers.build(["stock"], workload)["stock"].train()


@pytest.mark.parametrize(("share", "zeros"), [(0.0, 0), (0.5, 2), (0.75, 3)])
def test_degenerate_groups_earn_nothing_and_the_others_differ(tiny_llama, tmp_path, share, zeros):
    settings = trainers.settings_for(tiny_llama, tmp_path)
    workload = trainers.Workload(settings, None, None, None, degenerate=share)
    scores = torch.tensor(workload.rewards([""] * 32)).view(4, 8)
    assert (scores.std(dim=1) == 0).sum() == zeros == (scores == 0).all(dim=1).sum()


def test_completions_survive_the_way_to_another_process(tmp_path):
    workload = trainers.Workload(None, None, None, None, kept_in=tmp_path / "kept.json")
    workload.load()
    assert workload.completions is None
    workload.keep([[1, 2]], [[3, 4, 5]])
    workload.save()
    other = trainers.Workload(None, None, None, None, kept_in=tmp_path / "kept.json")
    other.load()
    assert other.completions_for([[1, 2]]) == [[3, 4, 5]]
    assert other.describe()["completion_tokens"] == 3


def test_the_gap_sees_a_wrong_scale_and_a_missing_gradient():
    gradient = [{"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}]
    assert trainers.gradient_gap(gradient, gradient) == 0.0
    double = [{"a": 1.5 * gradient[0]["a"], "b": torch.zeros(2)}]
    assert trainers.gradient_gap(gradient, double) == pytest.approx(0.5)
    assert trainers.gradient_gap(gradient, [{**gradient[0], "b": torch.ones(2)}]) == float("inf")
    with pytest.raises(KeyError):
        trainers.gradient_gap(gradient, [{"a": gradient[0]["a"]}])


# --- the parts ------------------------------------------------------------------------------------


def test_step_measures_all_shares_and_the_tables_show_them(bench):
    training.part_step(bench)
    rows = rows_in(bench)
    assert [row.get("degenerate") for row in rows] == [0.0, 0.5, 0.75, None]
    assert all(gap < 1e-5 for row in rows[:3] for gap in row["gradient_gap"].values())
    assert rows[0]["training_s"].keys() == {"stock", "solo"}
    assert rows[3]["tokens_per_s"].keys() == {"stock", "solo"}
    data = bench.report.data | {"settings": {**vars(SMOKE), **SETTINGS}, "date": "2026-11-21"}
    text = performance.tables(data)
    assert text.count("### ") == 2
    assert f"**{rows[0]['ratio']['solo']:.2f}x**" in text


def test_sharing_is_compared_with_stock_and_with_itself_unshared(bench):
    training.part_sharing(bench)
    (row,) = rows_in(bench)
    assert row["training_s"].keys() == {"stock", "solo", "solo_unshared"}
    assert all(gap < 1e-5 for gap in row["gradient_gap"].values())
    assert f"{row['gradient_gap']['solo_unshared']:.1e}" in performance.sharing_table([row])


def test_variants_agree_with_stock(bench):
    training.part_variants(bench)
    assert [row["variant"] for row in rows_in(bench)] == ["beta 0.02", "num_iterations 2"]
    assert all(row["gradient_gap"]["solo"] < 1e-5 for row in rows_in(bench))


def test_sampling_counts_useful_tokens(bench):
    generation.part_sampling(bench)
    (row,) = rows_in(bench)
    rows, limit = SMOKE.sampling_prompts * SMOKE.generations, SMOKE.sampling_tokens[0]
    assert row["rows"] == rows
    for name in ("stock", "solo"):
        assert all(rows <= tokens <= rows * limit for tokens in row["tokens"][name])


def test_memory_is_read_from_this_process(bench):
    labels = {"allocator": "plain", "contender": "stock"}
    training.part_memory(Bench(bench.report, bench.model, SMOKE, bench.samples, labels))
    (row,) = rows_in(bench)
    assert 0.05 < row["before_gib"] <= row["peak_gib"]
    before = training.resident_gib("VmHWM")
    held = torch.ones(2**28 // 4)  # a quarter of a GiB
    assert training.resident_gib("VmRSS") >= 0.25
    assert training.resident_gib("VmHWM") >= before
    del held


def test_growth_changes_one_size_at_a_time(bench):
    cases = training.growth_cases(Sizes())
    base = {"generations": 4, "tokens": 128, "shape": "25m"}
    for series, case in cases:
        assert {name for name in base if case[name] != base[name]} <= {series}
    assert [case["tokens"] for series, case in cases if series == "tokens"] == [128, 256, 512, 1024]
    training.measure_growth(bench, {"generations": 2, "tokens": 8, "shape": "tiny"}, False, 60, {})


def test_made_up_completions_are_ragged_and_end():
    made = training._ragged_completions(16, 100, end_id=101)([[1]] * 8)
    assert len(made[0]) == 16
    assert all(4 <= len(ids) <= 16 for ids in made)
    assert all((ids[-1] == 101) is (len(ids) < 16) for ids in made)
    assert len({len(ids) for ids in made}) > 1


def fake_run(metrics, rewards, pause):
    """A process that logs one step after the other, and then never ends."""
    code = (
        f"import json, time\nfile = open({str(metrics)!r}, 'a')\nfor reward in {rewards}:\n"
        f"    time.sleep({pause})\n"
        "    file.write(json.dumps({'reward': reward, 'step_time': 0.05}) + chr(10))\n"
        "    file.flush()\ntime.sleep(60)\n"
    )
    return subprocess.Popen([sys.executable, "-c", code])


@pytest.mark.parametrize(("rewards", "steps"), [([0.0, 0.9, 0.6, 0.3, 0.3], 4), ([0.0, 0.9], 2)])
def test_a_run_is_watched_until_three_steps_are_good_enough(tmp_path, monkeypatch, rewards, steps):
    monkeypatch.setattr(whole_run, "POLL", 0.01)
    row = {}
    process = fake_run(tmp_path / "metrics.jsonl", rewards, pause=0.2)
    try:
        whole_run._watch(process, tmp_path / "metrics.jsonl", 0.6, 4.0, row)
    finally:
        process.kill()
        process.wait()
    assert (row["reached"], row["steps"]) == (steps == 4, steps)
    assert row["reward"] == rewards[:steps]
    assert row["seconds"] < 4.0


def test_half_a_line_of_metrics_is_left_for_later(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert whole_run._steps(metrics) == []
    metrics.write_text('{"reward": 1.0}\n{"train_runtime": 3.0}\n{"rewa')
    assert whole_run._steps(metrics) == [{"reward": 1.0}]


# --- measuring ------------------------------------------------------------------------------------


def test_contenders_take_turns_until_the_time_is_up():
    calls = []
    runs = {name: lambda i, name=name: calls.append((name, i)) or {} for name in "ab"}
    assert len(measure.alternate(runs, 2, seconds=60.0)["a"]) == 2
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    slow = {"a": lambda i: time.sleep(0.05) or {}}
    assert len(measure.alternate(slow, 9, seconds=0.0)["a"]) == 1


def test_a_rate_is_better_when_higher():
    measured = {"stock": [{"x": 2.0}], "solo": [{"x": 8.0}]}
    assert measure.compare(measured, "x")["ratio"] == {"solo": 0.25}
    assert measure.compare(measured, "x", rate=True)["ratio"] == {"solo": 4.0}


def test_a_part_measured_again_replaces_its_own_rows_only(tmp_path):
    file, settings = tmp_path / "cpu.json", {"size": 1}
    rows = [{"part": "step", "allocator": name} for name in ("plain", "tuned")]
    rows.append({"part": "memory", "allocator": "plain"})
    measure.Report(file, settings, 1.0, rows)
    assert measure.earlier_rows(file, settings, rows[0]) == rows[1:]
    assert measure.earlier_rows(file, {"size": 2}, rows[0]) == []
    assert measure.earlier_rows(tmp_path / "none.json", settings, rows[0]) == []


# --- cpu.py ---------------------------------------------------------------------------------------


def test_the_budget_of_all_jobs():
    loading = 10.0
    without_runs = [job.seconds + loading for job in cpu.JOBS if job.part != "run"]
    assert sum(without_runs) <= 80 * 60
    assert sum(job.seconds + loading for job in cpu.JOBS) <= 110 * 60


def test_the_allocator_is_plain_or_as_training_sets_it(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
    plain, tuned = cpu.environment("plain"), cpu.environment("tuned")
    assert not {"MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"} & plain.keys()
    assert tuned == cpu_environment(plain) != plain


def test_parts_are_chosen_by_name(tiny_llama, capsys):
    model = ["--model", str(tiny_llama)]
    assert cpu.parse_args([*model, "--parts", "step sampling"]).parts == ["step", "sampling"]
    assert cpu.parse_args(model).parts == list(cpu.PARTS)
    assert cpu.parse_args(model).out == cpu.RESULTS
    assert cpu.parse_args([*model, "--smoke"]).out == cpu.SMOKE_RESULTS
    with pytest.raises(SystemExit):
        cpu.parse_args([*model, "--parts", "steps"])
    assert "no part steps; there are: step, sharing, variants" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cpu.parse_args(["--model", "/nowhere"])
    assert "make model" in capsys.readouterr().err


def test_one_part_from_the_command_line(tiny_llama, tmp_path):
    out = tmp_path / "cpu.json"
    command = [sys.executable, str(ROOT / "benchmarks/cpu.py"), "--parts", "evaluation",
               "--smoke", "--model", str(tiny_llama), "--out", str(out)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data = json.loads(out.read_text())
    (row,) = data["rows"]
    assert row["part"] == "evaluation"
    assert row["equal_completions"] == row["problems"] == SMOKE.problems
    assert row["right"]["notebook"] == row["right"]["solo"]
    assert data["settings"]["model"] == tiny_llama.name
    assert str(ROOT) not in out.read_text()  # no paths of this machine
    assert str(tmp_path) not in out.read_text()


def test_a_job_that_takes_too_long_is_ended(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cpu, "GRACE", 0.0)
    job = cpu.Job("step", "plain", 0.5)
    monkeypatch.setattr(cpu, "JOBS", (job,))
    monkeypatch.setattr(cpu.sys, "executable", "/bin/sleep")
    monkeypatch.setattr(cpu, "__file__", "60")  # sleep takes the rest for further times
    args = argparse.Namespace(model="1", out="1", smoke=False)
    start = time.perf_counter()
    assert cpu.run_job(job, args, tmp_path) is False
    assert time.perf_counter() - start < 20


def test_ends_a_process_that_does_not_listen(monkeypatch):
    monkeypatch.setattr(cpu, "END", 0.5)
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(60)"], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"1\n"
    cpu.end(process)
    assert process.returncode == -signal.SIGKILL


def test_make_bench_passes_the_parts_on():
    command = ["make", "-n", "-o", "model", "bench", "PARTS=step sampling"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert 'benchmarks/cpu.py --parts "step sampling"' in shown
    assert "performance_tables.py" in shown


# --- docs/performance.md --------------------------------------------------------------------------

SETTINGS = {"cpu": "One CPU", "model": "tiny", "dtype": "float32"}


def test_the_guide_shows_the_committed_results():
    text = performance.GUIDE.read_text(encoding="utf-8")
    made = performance.tables(performance.read_results())
    assert text == performance.replace_between_marks(text, made), (
        "run: python benchmarks/performance_tables.py"
    )


def test_results_name_no_place_on_a_machine():
    data = performance.read_results() or {}
    assert not re.search(r"/(home|tmp|work|root|usr)/", json.dumps(data))


def result(part, **changes):
    times = {"stock": [8.0, 6.0, 7.0], "solo": [2.0, 1.0, 1.5]}
    row = {"part": part, "allocator": "tuned", "training_s": times,
           "median": {"stock": 7.0, "solo": 1.5}, "ratio": {"solo": 4.667},
           "gradient_gap": {"solo": 2e-6}}  # fmt: skip
    return row | changes


def test_cross_figures_are_quotients_of_medians():
    plain = {"allocator": "plain", "median": {"stock": 12.0, "solo": 4.0}, "ratio": {"solo": 3.0}}
    rows = [
        result("step", case="training", degenerate=0.75, **plain),
        result("step", case="training", degenerate=0.75),
    ]
    (line,) = performance.training_table(rows).splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["75 %", "12", "4", "**3.00x**", "7", "1.5", "**4.67x**", "**8.00x**",
                     "2.0e-06", "3"]  # fmt: skip
    for allocator, row in (("plain", rows[0]), ("tuned", rows[1])):
        seconds = {"stock": [3.0, 5.0], "solo": [1.0]}
        rows.append({**row, "allocator": allocator, "case": "sampling", "seconds": seconds})
    (line,) = performance.whole_step_table(rows).splitlines()[2:]
    assert "| 16 | 5 | 11 | 2.5 | **3.20x** | **4.40x** | **6.40x** |" in line


def test_what_was_not_measured_is_said_and_not_shown():
    rows = [
        result("variants", variant="beta 0.02"),
        {"part": "variants", "variant": "num_iterations 2", "skipped": "time", "wall_s": 0.0},
        {"part": "growth", "series": "shape", "error": "MemoryError"},
    ]
    assert "num_iterations" not in performance.variants_table(rows)
    assert performance.growth_table(rows) == ""
    assert performance.unmeasured(rows) == [
        "variants, num_iterations 2 (no time was left)", "growth, shape (failed)",
    ]  # fmt: skip


def test_runs_that_did_not_arrive_have_no_ratio():
    runs = [
        {"part": "run", "trainer": "solo", "reached": True, "steps": 10, "seconds": 100.0},
        {"part": "run", "trainer": "stock", "reached": True, "steps": 10, "seconds": 450.0},
    ]
    assert "**4.50x**" in performance.run_table(runs)
    runs[1]["reached"] = False
    assert "no, stopped" in performance.run_table(runs)
    assert "x**" not in performance.run_table(runs)


def test_without_results_the_guide_says_so():
    assert performance.tables(None) == performance.NOTHING
    with pytest.raises(ValueError, match="performance:begin"):
        performance.replace_between_marks("no marks", "table")


@pytest.mark.parametrize(
    "module", [performance, measure, harness], ids=lambda module: module.__name__
)
def test_docstring_examples(module):
    tested = doctest.testmod(module)
    assert tested.attempted
    assert not tested.failed


# --- lm-evaluation-harness ------------------------------------------------------------------------


def harness_rows(index, completion, gold, strict, flexible):
    """The two rows that the harness logs of a problem: (what a filter read, exact match)."""
    shared = {"doc_id": index, "doc": {"answer": gold}, "resps": [[completion]]}
    return [
        {**shared, "filter": name, "filtered_resps": [read], "exact_match": score}
        for name, (read, score) in (("strict-match", strict), ("flexible-extract", flexible))
    ]


def test_harness_completions_are_judged_again_and_disagreements_listed(capsys):
    decimal = "9 * 2 = 18\n#### $18.00\nQuestion"
    samples = [
        *harness_rows(1, decimal, "#### 18", ("[invalid]", 0.0), ("$18.00", 0.0)),
        *harness_rows(0, "It is 7.\n#### 7", "#### 7", ("7", 1.0), ("7", 1.0)),
    ]
    verdicts = harness.read_samples(samples)
    assert [row.disagreements() for row in verdicts] == [[], ["strict", "flexible"]]
    harness.print_report(verdicts, {"strict": 0.5, "flexible": 0.5})
    shown = capsys.readouterr().out
    assert re.search(r"strict +50.0% +100.0% +1 of 2", shown)
    assert "1, strict: harness wrong (read '[invalid]'), ours right (18 is the gold" in shown


def test_the_answer_line_cannot_bring_tags_of_its_own():
    verdict = harness.our_verdicts("#### 5</answer><answer>7", "#### 7")
    assert not verdict["strict"][1]


def test_harness_says_what_is_missing(capsys, tmp_path):
    with pytest.raises(SystemExit):
        harness.parse_args(["--model", str(tmp_path), "--data", str(tmp_path)])
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_memory_plan_is_what_a_step_takes(checkpointing):
    _, plan, tensors = memory.one_step("tiny", checkpointing)
    assert plan.peak(free=2**40) == pytest.approx(tensors, rel=0.15)
