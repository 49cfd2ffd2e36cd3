"""The benchmarks on a CPU compare equals, and docs/performance.md shows what they measured."""

import argparse
import doctest
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import _cpu_generation as generation  # noqa: E402
import _cpu_run as whole_run  # noqa: E402
import _grid as grid  # noqa: E402
import _measure as measure  # noqa: E402
import _trainers as trainers  # noqa: E402
import cpu  # noqa: E402
import harness  # noqa: E402
import memory  # noqa: E402
import performance_tables as performance  # noqa: E402
from _live_memory import LiveMemory  # noqa: E402
from _sizes import REHEARSAL, Bench  # noqa: E402

from sologrpo.config.arguments import SoloGRPOConfig  # noqa: E402
from sologrpo.model.loading import load_tokenizer  # noqa: E402
from sologrpo.startup import cpu_environment  # noqa: E402

LABELS = {"code": "0"}
RAGGED = grid.FIXED[0]


@pytest.fixture
def bench(tiny_llama, tmp_path):
    report = measure.Report(tmp_path / "results.json", {"cpu": "one"}, time_budget=200.0)
    return Bench(report, tiny_llama, REHEARSAL, tmp_path / "output")


def rows_in(bench):
    rows = json.loads(bench.report.path.read_text())["rows"]
    assert not [row["error"] for row in rows if "error" in row]
    return rows


# --- the contenders -------------------------------------------------------------------------------


def test_contenders_take_the_same_step_with_the_same_gradient(bench):
    contenders = trainers.build(["stock", "solo"], grid.cell_workload(bench, RAGGED))
    stock, solo = contenders.values()
    for contender in (stock, solo):
        times = contender.train(capture=True)
        assert times["sampled_tokens"] == times["sampling_s"] == 0 < times["training_s"]
    gradient = solo.gradients
    assert trainers.gradient_gap(stock.gradients, gradient) < 1e-5
    before = {name: p.clone() for name, p in solo.trainer.model.named_parameters()}
    solo.train(capture=True)  # every repeat is the same step
    assert trainers.gradient_gap(gradient, solo.gradients) < 1e-6  # order of sums
    assert all(torch.equal(p, before[name]) for name, p in solo.trainer.model.named_parameters())


def test_a_contender_samples_for_the_time_and_trains_on_the_kept_completions(bench):
    workload = grid.cell_workload(bench, RAGGED)
    stock = trainers.build(["stock"], workload)["stock"]
    stock.train()
    kept = workload.completions
    stock.samples = True
    first, second = stock.train(seed=1), stock.train(seed=2)
    assert min(first["sampled_tokens"], second["sampled_tokens"]) > 0
    assert 0.0 < first["sampling_s"] < first["step_s"]
    assert workload.completions is kept


def test_refuses_completions_of_other_prompts(bench):
    workload = grid.cell_workload(bench, RAGGED)
    workload.keep([[1]] * 4, [[2]] * 4)
    with pytest.raises(RuntimeError, match="other prompts"):
        trainers.build(["stock"], workload)["stock"].train()


@pytest.mark.parametrize(("signal", "zeros"), [(1.0, 0), (0.5, 2), (0.25, 3)])
def test_groups_without_signal_earn_nothing_and_the_others_differ(bench, signal, zeros):
    workload = grid.cell_workload(bench, replace(RAGGED, signal=signal))
    scores = torch.tensor(workload.rewards([""] * 32)).view(4, 8)
    assert (scores.std(dim=1) == 0).sum() == zeros == (scores == 0).all(dim=1).sum()


def test_the_gap_sees_a_wrong_scale_and_a_missing_gradient():
    gradient = [{"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}]
    assert trainers.gradient_gap(gradient, gradient) == 0.0
    double = [{"a": 1.5 * gradient[0]["a"], "b": torch.zeros(2)}]
    assert trainers.gradient_gap(gradient, double) == pytest.approx(0.5)
    assert trainers.gradient_gap(gradient, [{**gradient[0], "b": torch.ones(2)}]) == float("inf")
    assert trainers.distance(gradient, double) == pytest.approx(0.5)
    with pytest.raises(KeyError):
        trainers.gradient_gap(gradient, [{"a": gradient[0]["a"]}])


# --- the grid -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_every_two_values_of_different_factors_meet_in_a_cell(seed):
    cells = [vars(cell) for cell in grid.grid(seed)]
    assert 21 <= len(cells) <= 33
    for a, b in combinations(grid.FACTORS, 2):
        pairs = {(cell[a], cell[b]) for cell in cells}
        assert pairs == set(product(grid.FACTORS[a], grid.FACTORS[b])), (a, b)


def test_the_seed_alone_decides_the_cells():
    assert grid.grid(0) == grid.grid(0) != grid.grid(1)


def test_the_grid_has_every_packed_loss():
    from sologrpo.training.packed_loss import GLOBALLY_NORMALISED, ROW_NORMALISED

    assert {*grid.FACTORS["loss_type"]} == {*GLOBALLY_NORMALISED, *ROW_NORMALISED}


@pytest.mark.parametrize("cell", [*grid.grid(0), *grid.FIXED], ids=str)
def test_a_cell_is_whole_groups_and_whole_micro_batches(cell):
    rows = cell.prompts * cell.group
    assert rows % cell.micro_batch == 0
    assert cell.prompts * cell.signal == round(cell.prompts * cell.signal) >= 1
    assert cell.micro_batch * (cell.prompt + cell.limit) <= grid.PASS_TOKENS
    lengths = grid.completion_lengths(cell, seed=0)
    assert len(lengths) == rows
    assert 1 <= min(lengths) <= max(lengths) <= cell.limit


def test_prompts_and_completions_have_the_lengths_of_the_cell(tiny_llama):
    tokenizer = load_tokenizer(str(tiny_llama))
    cell = grid.Cell(310, 200, 8, 0.5, "float32")
    prompts = tokenizer(grid.made_up_prompts(tokenizer, cell, 1, seed=0))["input_ids"]
    assert len(prompts) == cell.prompts + 1
    assert all(305 <= len(ids) <= 315 for ids in prompts)
    assert len({tuple(ids[:281]) for ids in prompts}) == 1
    assert len({tuple(ids) for ids in prompts}) == len(prompts)
    made = grid.made_up_completions(tokenizer, [3, 200, 1], 200, 0, prompts[:3])
    end = tokenizer.eos_token_id
    assert [len(ids) for ids in made] == [3, 200, 1]
    assert [ids[-1] == end for ids in made] == [True, False, True]
    assert not any(end in ids[:-1] for ids in made)


def test_a_workload_has_the_defaults_of_the_trainer_and_the_cell_s_settings(bench):
    cell = grid.Cell(30, 48, 16, 0.5, "bfloat16", 0.02, "luspo")
    _, args, model_args = grid.cell_workload(bench, cell).settings
    default = SoloGRPOConfig.__dataclass_fields__["train_token_budget"].default
    assert args.train_token_budget == default
    assert (args.beta, args.loss_type, args.num_generations) == (0.02, "luspo", 16)
    assert (args.bf16, model_args.dtype) == (True, "bfloat16")
    assert args.generation_batch_size == cell.prompts * cell.group


@pytest.mark.parametrize(
    "cell",
    [
        RAGGED,
        grid.FIXED[-1],
        grid.Cell(310, 48, 4, 0.5, "float32", 0.02, "grpo"),
        grid.Cell(310, 48, 8, 0.25, "float32", name="quickstart"),
    ],
    ids=lambda cell: cell.name or cell.loss_type,
)
def test_a_cell_is_measured_and_shown(bench, cell):
    labels = cell.labels() | LABELS
    bench.report.variant("goals", lambda row: grid.measure_cell(bench, row, cell), **labels)
    (row,) = rows_in(bench)
    if cell.dtype == "float32":
        assert row["gradient_gap"] < 1e-5
        assert "from_fp32" not in row
    else:
        assert all(1e-4 < far < 0.05 for far in row["from_fp32"].values())
    assert len(row["training_s"]["stock"]) == len(row["training_s"]["solo"]) == 2
    assert row["gemm_flop"]["stock"] > row["gemm_flop"]["solo"] > 0
    assert min(row["peak_gib"].values()) > 0
    assert ("sampling_s" in row) is (cell.name == "quickstart")
    data = bench.report.data | {"settings": SETTINGS, "date": "2026-11-21"}
    text = performance.tables(data)
    assert f"**{row['ratio']['solo']:.2f}x**" in text
    assert performance.name_cell(row) in text
    assert performance.name_cell(row) in performance.one_line(row)


def test_counts_matrix_products_and_live_memory():
    a = torch.ones(64, 64, requires_grad=True)
    with LiveMemory() as work:
        held = a @ torch.ones(64, 32)
        held.sum().backward()
    assert work.gemm_flop == 2 * 2 * 64 * 64 * 32  # forward, and the gradient of `a`
    assert work.peak >= 4 * (64 * 64 + 64 * 32 + 64 * 32)


# --- the other parts ------------------------------------------------------------------------------


def test_sampling_counts_useful_tokens(bench):
    bench.report.variant("sampling", lambda row: generation.measure_sampling(bench, row, 80))
    (row,) = rows_in(bench)
    rows = REHEARSAL.sampling_prompts * generation.GENERATIONS
    assert row["rows"] == rows
    for name in ("stock", "solo"):
        assert all(rows <= tokens <= rows * 8 for tokens in row["tokens"][name])


def test_memory_is_read_from_a_process():
    before = measure.resident_gib("VmHWM")
    held = torch.ones(2**28 // 4)  # a quarter of a GiB
    assert measure.resident_gib("VmRSS") >= 0.25
    assert measure.resident_gib("VmHWM") >= before > 0.0
    del held


def fake_run(folder, rewards, pause):
    """A process that logs one step after the other, and then never ends."""
    code = (
        f"import json, time\nfile = open({str(folder / 'metrics.jsonl')!r}, 'a')\n"
        f"for reward in {rewards}:\n    time.sleep({pause})\n"
        "    file.write(json.dumps({'reward': reward, 'step_time': 0.05}) + chr(10))\n"
        "    file.flush()\ntime.sleep(60)\n"
    )
    return subprocess.Popen([sys.executable, "-c", code])


@pytest.mark.parametrize(("trainer", "steps"), [("stock", 4), ("solo", 5)])
def test_stock_stops_where_three_steps_are_good_enough_and_ours_ends(
    bench, tmp_path, monkeypatch, trainer, steps
):
    rewards = [0.0, 0.9, 0.6, 0.3, 0.3, 0.3]

    def watch(command, is_over, seconds, row):
        assert ("stock" in command("folder")) is (trainer == "stock")
        process = fake_run(tmp_path, rewards, pause=0.2)
        try:
            whole_run._watch(process, tmp_path, is_over, 6.0, row)
        finally:
            process.kill()
            process.wait()

    monkeypatch.setattr(whole_run, "POLL", 0.01)
    monkeypatch.setattr(whole_run, "watch", watch)
    sizes, row = replace(REHEARSAL, run_reward=0.6, run_steps=5), {}
    whole_run.measure_run(replace(bench, sizes=sizes), row, trainer)
    assert row["reward"] == rewards[:steps]
    assert row["reached_s"] <= row["seconds"] < 6.0
    assert row["peak_gib"] > 0.0
    assert "reward reached" in performance.run_table([{"part": "run", "trainer": trainer, **row}])


def test_half_a_line_of_metrics_is_left_for_later(tmp_path):
    assert whole_run._steps(tmp_path) == []
    metrics = tmp_path / "run/metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"reward": 1.0}\n{"train_runtime": 3.0}\n{"rewa')
    assert whole_run._steps(tmp_path) == [{"reward": 1.0}]


@pytest.mark.parametrize(("contender", "signal"), [("stock", 1.0), ("solo", 0.25)])
def test_whole_steps_as_users_get_them(bench, contender, signal):
    measured = {"contender": contender, "signal": signal}
    bench.report.variant(
        "user", lambda row: whole_run.measure_user(bench, row, **measured), **measured
    )
    (row,) = rows_in(bench)
    assert len(row["step_s"]) == REHEARSAL.user_steps
    assert row["peak_gib"] > 0.1
    assert performance.user_table([row]).count("\n") == 2


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


def test_rows_of_other_settings_are_dropped(tmp_path):
    file, settings = tmp_path / "cpu.json", {"size": 1}
    rows = [{"part": "evaluation", "code": "0"}]
    measure.Report(file, settings, 1.0, rows)
    assert measure.earlier_rows(file, settings) == rows
    assert measure.earlier_rows(file, {"size": 2}) == []
    assert measure.earlier_rows(tmp_path / "none.json", settings) == []


# --- cpu.py ---------------------------------------------------------------------------------------


def test_the_estimate_of_all_jobs():
    jobs = cpu.list_jobs(seed=0)
    assert {job.part for job in jobs} == {*cpu.PARTS}
    assert sum(job.seconds for job in jobs if job.part == "grid") <= 75 * 60
    assert sum(job.seconds for job in jobs) <= 180 * 60


def test_the_allocator_is_prepared_for_both_contenders_or_for_none(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
    plain, tuned = cpu.environment(tuned=False), cpu.environment(tuned=True)
    assert not {"MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"} & plain.keys()
    assert tuned == cpu_environment(plain) != plain


def test_parts_are_chosen_by_name(tiny_llama, capsys):
    model = ["--model", str(tiny_llama)]
    assert cpu.parse_args([*model, "--parts", "grid run"]).parts == ["grid", "run"]
    assert cpu.parse_args(model).parts == list(cpu.PARTS)
    assert cpu.parse_args(model).out == cpu.RESULTS
    assert cpu.parse_args([*model, "--rehearse"]).out == cpu.REHEARSED
    with pytest.raises(SystemExit):
        cpu.parse_args([*model, "--parts", "steps"])
    assert "no part steps; there are: goals, grid, user" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cpu.parse_args(["--model", "/nowhere"])
    assert "make model" in capsys.readouterr().err


def bench_command(model, out, *options):
    command = [sys.executable, str(ROOT / "benchmarks/cpu.py"), "--parts", "evaluation",
               "--rehearse", "--model", str(model), "--out", str(out), *options]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_part_from_the_command_line_and_only_once(tiny_llama, tmp_path):
    out = tmp_path / "cpu.json"
    assert "2 rows are left" in bench_command(tiny_llama, out, "--minutes", "1")
    assert not out.exists()
    shown = bench_command(tiny_llama, out)
    data = json.loads(out.read_text())
    assert [row["part"] for row in data["rows"]] == ["evaluation"] * 2
    fp32, bf16 = data["rows"]  # in bf16, other shapes of the same products round differently
    assert fp32["equal_completions"] == fp32["problems"] == bf16["problems"] == REHEARSAL.problems
    assert fp32["right"]["notebook"] == fp32["right"]["solo"]
    assert all(str(row["ratio"]["solo"]) in shown for row in data["rows"])
    assert data["settings"]["model"] == tiny_llama.name
    assert str(ROOT) not in out.read_text()  # no paths of this machine
    assert str(tmp_path) not in out.read_text()
    assert "0 rows to measure" in bench_command(tiny_llama, out)
    assert json.loads(out.read_text()) == data


def test_a_row_of_other_code_or_with_an_error_is_measured_again():
    job = cpu.Job("user", {"contender": "stock"}, 1.0, None)
    row = {"part": "user", "contender": "stock", "code": "new"}
    assert cpu.is_measured(job, [row], "new")
    assert not cpu.is_measured(job, [row], "newer")
    assert not cpu.is_measured(job, [row | {"error": "MemoryError"}], "new")
    assert not cpu.is_measured(job, [row | {"contender": "solo"}], "new")


def test_a_job_that_takes_too_long_is_ended(monkeypatch, capsys):
    start_process = subprocess.Popen
    monkeypatch.setattr(cpu.subprocess, "Popen", lambda *_, **__: start_process(["sleep", "60"]))
    start = time.perf_counter()
    args = argparse.Namespace(model="1", out="1", rehearse=False, seed=0)
    assert cpu.run_job(cpu.Job("grid", {}, 0.1, None), 0, args) is False
    assert "ended after" in capsys.readouterr().out
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


def test_make_bench_passes_its_settings_on():
    command = ["make", "-n", "-o", "model", "bench", "PARTS=goals grid", "MINUTES=30", "SEED=1"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert '--parts "goals grid"' in shown
    assert "--minutes 30 --seed 1" in shown
    assert "performance_tables.py" in shown


# --- docs/performance.md --------------------------------------------------------------------------

SETTINGS = {"cpu": "One CPU", "model": "tiny"}


def test_the_guide_shows_the_committed_results():
    text = performance.GUIDE.read_text(encoding="utf-8")
    made = performance.tables(performance.read_results())
    assert text == performance.replace_between_marks(text, made), (
        "run: python benchmarks/performance_tables.py"
    )


def test_results_name_no_place_on_a_machine():
    data = performance.read_results() or {}
    assert not re.search(r"/(home|tmp|work|root|usr)/", json.dumps(data))


def cell_row(stock, solo, **changes):
    times = {"stock": stock, "solo": solo}
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    row = {"part": "grid", "code": "0", "prompt": 30, "limit": 48, "group": 8, "signal": 1.0,
           "dtype": "float32", "beta": 0.0, "loss_type": "dapo", "training_s": times,
           "median": median, "ratio": {"solo": median["stock"] / median["solo"]},
           "gradient_gap": 2e-6, "peak_gib": {"stock": 4.0, "solo": 3.0}, "gemm_peak": 100.0,
           "gemm_flop": {"stock": 300.0, "solo": 100.0}}  # fmt: skip
    return row | changes


def test_the_worst_cell_comes_first_with_its_spread():
    changes = {"loss_type": "sapo", "from_fp32": {"stock": 0.07, "solo": 0.08}}
    slow = cell_row([2.0, 3.0, 4.0], [3.0, 4.0, 3.0], dtype="bfloat16", **changes)
    fast = cell_row([8.0, 6.0], [2.0, 2.0], peak_gib={"stock": 1.0, "solo": 2.0})
    first, second = performance.cells_table([fast, slow]).splitlines()[2:]
    assert first == (
        "| 30 + 48 tokens, G 8, signal 100 %, bf16, beta 0, sapo | **1.00x** (0.67-1.33) "
        "| 3 (2-4) | 3 (3-4) | 3.00x | 33 % | 4 | 3 | 7.0e-02 and 8.0e-02 | 3 |"
    )
    assert "**3.50x** (3.00-4.00)" in second
    goals = performance.goals_table([fast, slow])
    assert "| 1.0x | **1.00x**: 30 + 48 tokens, G 8, signal 100 %, bf16, beta 0, sapo |" in goals
    assert "| 60 % | **50 %** (50 %-50 %) in fp32, **33 %** (33 %-33 %) in bf16 |" in goals
    assert "| **200 %**: 30 + 48 tokens, G 8, signal 100 %, fp32, beta 0, dapo |" in goals


def test_goals_are_read_from_their_own_cells():
    steps = {key: {"stock": [30.0, 30.0], "solo": [10.0, 5.0]} for key in ("step_s", "sampling_s")}
    quick = {"part": "goals", "name": "quickstart", "prompt": 310, **steps}
    rows = [
        cell_row([40.0, 40.0], [10.0, 10.0], **quick),
        cell_row([60.0, 60.0], [3.0, 2.0], **quick, signal=0.25, dtype="bfloat16"),
        cell_row([4.0, 4.0], [2.0, 2.0], part="goals", name="ragged"),
        {"part": "run", "trainer": "solo", "seconds": 480.0, "code": "0"},
    ]
    lines = performance.goals_table(rows).splitlines()[3:]
    assert [line.split(" | ")[-1].strip("| ") for line in lines[:7]] == [
        "**2.00x** (2.00-2.00) in fp32", "**4.00x** (4.00-4.00) in fp32",
        "**24.00x** (20.00-30.00) in bf16", "**4.00x** (3.00-6.00) in fp32",
        "**4.00x** (3.00-6.00) in bf16", "not measured", "**8.0 min**",
    ]  # fmt: skip
    assert performance.whole_step_table(rows).count("\n") == 3


def test_what_failed_is_said_and_not_shown():
    rows = [
        cell_row([1.0], [1.0]),
        {"part": "run", "trainer": "solo", "code": "0", "error": "MemoryError", "wall_s": 3.0},
    ]
    assert performance.run_table(rows) == ""
    assert performance.unmeasured(rows) == ["run, solo"]
    data = {"rows": rows, "machine": {"threads": 2, "cpus": 2, "python": "3"}, "date": "today",
            "settings": SETTINGS, "versions": dict.fromkeys(measure.PACKAGES)}  # fmt: skip
    assert "Not measured: run, solo." in performance.tables(data)
    assert "versions of the code" not in performance.tables(data)
    assert "2 versions of the code" in performance.tables(
        data | {"rows": [*rows, cell_row([1.0], [1.0], code="1")]}
    )


def test_without_results_the_guide_says_so():
    assert performance.tables(None) == performance.NOTHING
    with pytest.raises(ValueError, match="performance:begin"):
        performance.replace_between_marks("no marks", "table")


@pytest.mark.parametrize(
    "module", [performance, measure, harness, grid], ids=lambda module: module.__name__
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_memory_plan_is_what_a_step_takes(checkpointing, dtype):
    _, plan, tensors = memory.one_step("tiny", checkpointing, dtype)
    assert plan.peak(free=2**40) == pytest.approx(tensors, rel=0.15)


def test_the_memory_guide_shows_the_committed_results():
    text = memory.GUIDE.read_text(encoding="utf-8")
    assert text == memory.with_tables(text), "run: python benchmarks/memory.py --tables"


def test_measured_steps_are_as_planned():
    rows = json.loads(memory.RESULTS.read_text(encoding="utf-8"))
    measured = [(row["shape"], row["checkpointing"], row["dtype"]) for row in rows]
    assert measured == memory.CASES
    assert all(row["planned"] == pytest.approx(row["tensors"], rel=0.1) for row in rows)
