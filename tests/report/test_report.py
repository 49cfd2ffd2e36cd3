"""The report of a made-up run, of unfinished runs, and of model output that attacks the page."""

import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from made_up_run import (
    ATTACK,
    PROBLEMS,
    attack_everywhere,
    eval_record,
    metric_row,
    metric_rows,
    write_eval,
    write_lines,
    write_run,
)
from sologrpo.report import write_report
from sologrpo.report.command import main
from sologrpo.report.metrics import smoothed
from sologrpo.report.reading import read_run
from sologrpo.report.reward_curve import draw_reward_curve
from sologrpo.report.values import line, shorten, spread


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with its report, for tests that only read."""
    path = write_run(tmp_path_factory.mktemp("runs") / "quickstart")
    write_report(path)
    return path


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """A copy of a run directory, for tests that change it."""
    path = tmp_path / "quickstart"
    shutil.copytree(finished, path, ignore=shutil.ignore_patterns("report.html", "*.png"))
    return path


class Page(HTMLParser):
    """Start tags with attributes, and all text, of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def with_attribute(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.tags if name in attrs]


def assert_inert(page: Page) -> None:
    """Check that the hostile text of a run is in the page, and is text."""
    assert page.text.count(ATTACK) > 5
    scripts = [attrs.get("type") for tag, attrs in page.tags if tag == "script"]
    assert scripts == ["application/gzip", None]
    assert not [attrs for tag, attrs in page.tags if tag == "img"]
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]


def page_at(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def section(path: Path, name: str) -> str:
    """Text of one section of the page, with single spaces."""
    source = path.read_text(encoding="utf-8")
    start = source.index(f'<section id="{name}">')
    part = source[start : source.index("</section>", start)]
    return " ".join(Page(part.replace("<", " <")).text.split())


def figures_of(path: Path) -> dict[str, Any]:
    """Plotly figures of the page by title."""
    charts = page_at(path).with_attribute("data-figure")
    return {str(c["aria-label"]): json.loads(c["data-figure"] or "") for c in charts}


def legend_of(figure: Any) -> list[str]:
    return [trace.get("name", "") for trace in figure["data"] if trace.get("showlegend", True)]


def entries_of(path: Path) -> list[dict[str, str | None]]:
    """The completions in the page."""
    return page_at(path).with_attribute("data-signal")


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def add_config(run_dir: Path, lines: str) -> None:
    with (run_dir / "config.yaml").open("a") as file:
        file.write(lines)


# --- a finished run --------------------------------------------------------------------------


def test_full_report(finished: Path) -> None:
    page = page_at(finished / "report.html")
    for expected in (
        "quickstart", "HuggingFaceTB/SmolLM2-135M", "newly right", "newly wrong", "share",
        "33.3%",  # baseline: 20 of 60
        "sampling", "packages.trl", "step 40", "latest step first", "answer_correctness", "read_as",
    ):  # fmt: skip
        assert expected in page.text, expected
    figures = figures_of(finished / "report.html")
    assert len(figures) == 13  # the accuracies, and the panels whose metrics this run logs
    assert figures["Accuracy on the test problems"]["data"][0]["x"] == [20 / 60, 37 / 60]
    assert "missing" not in {attrs.get("class") for _, attrs in page.tags}
    assert "hf_secret" not in page.text


def test_numbers_agree_with_the_records(finished: Path) -> None:
    before = [i % 3 == 0 for i in range(PROBLEMS)]
    after = [(i % 3 == 0 and i % 9 != 0) or i % 2 == 0 for i in range(PROBLEMS)]
    changes = Counter(a - b for b, a in zip(before, after, strict=True))
    delta = 100 * (changes[1] - changes[-1]) / PROBLEMS
    text = " ".join(page_at(finished / "report.html").text.split())
    assert f"newly right {changes[1]}, newly wrong {changes[-1]}," in text
    assert f"Accuracy rose by {delta:.1f} points" in text


def test_nothing_is_loaded_from_elsewhere(finished: Path) -> None:
    page = page_at(finished / "report.html")
    source = (finished / "report.html").read_text(encoding="utf-8")
    assert len(source) < 5_000_000
    assert "http://" not in source
    assert "https://" not in source
    assert "@import" not in source
    assert not {"link", "iframe", "object", "embed"} & {tag for tag, _ in page.tags}
    for _, attrs in page.tags:
        for name in ("src", "href", "xlink:href"):
            assert (attrs.get(name) or "#").startswith("#")
    assert "url(" not in source
    (policy,) = page.with_attribute("http-equiv")
    assert str(policy["content"]).startswith("default-src 'none'; ")


def test_page_is_well_formed(finished: Path) -> None:
    """Every element is closed, in order."""
    source = (finished / "report.html").read_text(encoding="utf-8")
    assert source.startswith("<!doctype html>")
    source = re.sub(r"<(style|script)[^>]*>.*?</\1>", "", source, flags=re.DOTALL)
    tags = re.findall(r"<(/?)([a-z][a-z0-9]*)[^>]*?(/?)>", source, flags=re.IGNORECASE)
    stack: list[str] = []
    for closing, name, self_closing in tags:
        if closing:
            assert stack.pop() == name
        elif not self_closing and name not in {"meta", "input"}:
            stack.append(name)
    assert stack == []


def test_report_is_deterministic_and_leaves_no_other_file(run_dir: Path) -> None:
    names = ("report.html", "reward_curve.png")
    first = {path.name for path in run_dir.iterdir()}
    write_report(run_dir)
    once = [(run_dir / name).read_bytes() for name in names]
    write_report(run_dir)
    assert once == [(run_dir / name).read_bytes() for name in names]
    assert {path.name for path in run_dir.iterdir()} - first == {*names}


def test_a_failed_write_keeps_the_old_report(run_dir: Path, monkeypatch: Any) -> None:
    before = write_report(run_dir).read_bytes()

    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_report(run_dir)
    assert (run_dir / "report.html").read_bytes() == before
    assert not list(run_dir.glob(".*.tmp"))


# --- charts ----------------------------------------------------------------------------------


def test_charts_carry_their_numbers(finished: Path) -> None:
    """The pointer reads what was logged, not the averages that are drawn."""
    reward = figures_of(finished / "report.html")["Reward"]
    rewards = ["answer_correctness (weight 1)", "strict_format (weight 1)"]
    assert legend_of(reward) == ["reward", *rewards, "validation accuracy"]
    curves = {trace["name"]: trace for trace in reward["data"] if trace.get("customdata")}
    logged = {row["step"]: row["reward"] for row in metric_rows() if "reward" in row}
    curve = curves["reward"]
    read = dict(zip(curve["x"], curve["customdata"], strict=True))
    assert read == pytest.approx(logged, rel=1e-3)
    validation = curves["validation accuracy"]
    assert validation["x"] == [10, 20, 30, 40]
    assert validation["y"] == validation["customdata"] == [0.36, 0.41, 0.46, 0.51]
    assert validation["hovertemplate"].endswith("%}")
    assert validation["yaxis"] == "y2"
    assert validation["error_y"]["array"][0] == pytest.approx(0.068, abs=1e-3)  # Wilson, of 200
    assert validation["error_y"]["arrayminus"][0] == pytest.approx(0.063, abs=1e-3)


def test_metrics_that_are_zero_at_every_step_are_named_and_not_drawn(run_dir: Path) -> None:
    rows = [{**row, "clip_ratio/region_mean": 0.0} for row in metric_rows()]
    write_lines(run_dir / "metrics.jsonl", rows)
    path = write_report(run_dir)
    assert "Zero at every step, so not drawn: Clipped tokens." in section(path, "curves")
    assert "Clipped tokens" not in figures_of(path)


def test_rewards_are_named_with_their_weights(run_dir: Path) -> None:
    config = (run_dir / "config.yaml").read_text()
    spec = '{"my.module:answer_correctness": {a: 1}}'
    (run_dir / "config.yaml").write_text(config.replace("answer_correctness", spec))
    add_config(run_dir, "reward_weights: [0.2, 1]\n")
    legend = legend_of(figures_of(write_report(run_dir))["Reward"])
    assert legend[1:3] == ["answer_correctness (weight 1)", "strict_format (weight 0.2)"]


def test_first_step_only(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [metric_row(1, random.Random(0))])
    figures = figures_of(write_report(tmp_path))
    assert len(figures) > 5
    assert all("markers" in trace["mode"] for f in figures.values() for trace in f["data"])


def test_reward_curve_png(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    write_lines(tmp_path / "metrics.jsonl", metric_rows())
    path.write_bytes(draw_reward_curve(read_run(tmp_path).metrics, "$weird_ title"))
    assert png_size(path) == (1800, 1000)
    assert 20_000 < path.stat().st_size < 600_000


def test_a_step_that_was_trained_again_counts_once(tmp_path: Path) -> None:
    logged = [(2, 1.0), (3, 9.0), (3, 2.0), (1, 0), (4, None)]
    write_lines(tmp_path / "metrics.jsonl", [{"step": s, "reward": r} for s, r in logged])
    assert read_run(tmp_path).metrics["reward"] == [(1, 0.0), (2, 1.0), (3, 2.0)]


def test_lines_are_means_of_the_steps_before(tmp_path: Path) -> None:
    points = list(enumerate([1.0, 2.0, 3.0, 10.0], start=1))
    assert smoothed("reward", points) == [(1, 1), (2, 1.5), (3, 2.5), (4, 6.5)]
    assert smoothed("eval_accuracy", points) == points
    assert smoothed("reward", []) == []


# --- evaluations -----------------------------------------------------------------------------

SAMPLED = {"num_samples": 4, "scores": {"pass@1": 0.375, "pass@4": 0.5}, "truncated_rate": 0.0,
           "scores_ci95": {"pass@1": [0.3, 0.5], "pass@4": [0.4, 0.6]}}  # fmt: skip
RATES = {
    "integer_rate": 0.81,
    "no_answer_rate": 0.07,
    "completion_tokens": {"all": {"mean": 99.6, "p50": 87.4, "p95": 211.0}, "right": None},
    "sampled": SAMPLED,
    "tokens_per_second": 1234.5,
}
Y, N = True, False


@pytest.mark.parametrize(
    ("baseline", "results", "expected"),
    [
        ([Y, N, Y], {}, ["No clear difference"]),
        (None, {"n": "two"}, ["trained/results.json: n: 'two'; expected a valid integer"]),
        (
            None,
            RATES,
            ["No paired comparison yet", "integer answer 81.0%", "no answer 7.0%",
             "pass@1, sampled 37.5% 95 % interval 30.0% to 50.0%",
             "tokens: mean / p50 / p95 100 / 87 / 211", "tokens per second 1,234.5",
             "Test problems, trained: wrong 1, right 2."],
        ),
    ],
)  # fmt: skip
def test_evaluations_are_shown_and_compared(
    tmp_path: Path, baseline: list[bool] | None, results: dict[str, Any], expected: list[str]
) -> None:
    if baseline:
        write_eval(tmp_path, "baseline", baseline)
    write_eval(tmp_path, "trained", [Y, Y, N], **results)
    source = write_report(tmp_path).read_text(encoding="utf-8")
    text = " ".join(Page(source.replace("<", " <")).text.split())
    for part in expected:
        assert part in text, part


def write_formats(run_dir: Path, name: str, **rows: tuple[str, str, str]) -> None:
    """Write a table of formats: a role, label and baseline each; its figures are never read."""
    table = {
        prompt: {"role": role, "label": label, "baseline": baseline, "delta": 0.99}
        for prompt, (role, label, baseline) in rows.items()
    }
    (run_dir / "eval" / name).write_text(json.dumps({"prompt_formats": table, "verdict": "stale"}))


def test_the_gain_under_other_prompts_is_computed_from_the_records(tmp_path: Path) -> None:
    n = 40
    for suffix, split in (("", "test"), ("-test_unseen", "test_unseen")):
        for asked, after in (("xml", [True] * n), ("boxed", [i > 2 for i in range(n)])):
            labels = [
                f"{m}{suffix}{'-boxed' * (asked == 'boxed')}" for m in ("baseline", "trained")
            ]
            facts = {"prompt_format": asked, "split": split, "truncated_rate": 0.0}
            facts["settings"] = {"prompt_format": asked, "split": split}
            write_eval(tmp_path, labels[0], [i > 30 for i in range(n)], **facts)
            write_eval(tmp_path, labels[1], after, **facts)
        rows = {"boxed": ("unseen", f"trained{suffix}-boxed", f"baseline{suffix}-boxed")}
        rows["xml"] = ("trained", f"trained{suffix}", f"baseline{suffix}")
        write_formats(tmp_path, f"prompt_formats{suffix}.json", **rows)
    (tmp_path / "eval" / "prompt_formats-bad.json").write_text("{}")
    (tmp_path / "eval" / "prompt_formats-none.json").write_text('{"prompt_formats": {}}')
    write_formats(tmp_path, "prompt_formats-gone.json", xml=("trained", "gone", "baseline"))
    write_formats(
        tmp_path, "prompt_formats-mixed.json", xml=("trained", "trained", "baseline-boxed")
    )
    page = write_report(tmp_path)
    text = section(page, "scores")
    assert text.count("Under other prompts 40 problems") == 2
    assert text.index("split test, prompt_formats.json") < text.index("split test_unseen,")
    assert text.count("The gain travels: it shows under xml, boxed.") == 2
    assert "xml trained 22.5% → 100.0% +77.5" in text
    assert "boxed unseen 22.5% → 92.5% +70.0" in text
    assert "trained-boxed" not in text[: text.index("Under other prompts")]
    notes = Page(page.read_text("utf-8")).text
    for note in (
        "prompt_formats-bad.json: prompt_formats: missing",
        "prompt_formats-none.json: prompt_formats: {}; expected",
        "prompt_formats-gone.json needs the evaluation 'gone': evaluate again with --",
        "trained is not compared with baseline-boxed: prompt_format 'xml' here, 'boxed' there: ",
    ):
        assert note in notes, note


def compared(run_dir: Path) -> dict[str, str]:
    """The points of each trained model on the page, or why it is not compared."""
    text = section(write_report(run_dir), "scores")
    found = re.findall(r"(trained\S*|mine) ([+-][\d.]+) [+-][\d.]+ to ", text)
    return dict(found) | dict(re.findall(r"(\S+) is not compared with (.*? there)", text))


def test_models_are_compared_where_the_settings_are_equal(tmp_path: Path) -> None:
    boxed = {"settings": {"prompt_format": "boxed", "prompts_hash": "0000"}}
    longer = {"settings": {"max_completion_length": 16}}
    for label, right, more in (
        ("baseline", [N, N, Y], {}), ("trained", [Y, Y, Y], {}), ("trained-long", [Y] * 3, longer),
        ("baseline-boxed", [Y, Y, Y], boxed), ("mine", [N, Y, Y], boxed),
    ):  # fmt: skip
        write_eval(tmp_path, label, right, **more)
    assert compared(tmp_path) == {
        "trained": "+66.7", "mine": "-33.3",
        "trained-long": "baseline: max_completion_length 16 here, 48 there",
    }  # fmt: skip
    charts = page_at(tmp_path / "report.html").with_attribute("data-figure")
    labels = [json.loads(c["data-figure"] or "")["layout"]["yaxis"]["ticktext"] for c in charts]
    assert labels == [["baseline", "trained"], ["baseline-boxed", "mine"], ["trained-long"]]


def test_a_gain_that_only_a_longer_limit_made_is_not_shown(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "eval")
    write_eval(run_dir, "baseline", [N] * 8, settings={"max_completion_length": 2})
    write_eval(run_dir, "trained", [Y] * 8, settings={"max_completion_length": 16})
    path = write_report(run_dir)
    text = " ".join(page_at(path).text.split())
    assert "trained is not compared with baseline: max_completion_length 16 here, 2 there" in text
    assert "Accuracy rose" not in text
    assert "against baseline" not in text
    assert "test accuracy100.0% (trained)" in text.replace("test accuracy ", "test accuracy")


def test_figures_are_those_of_the_records(run_dir: Path) -> None:
    results = run_dir / "eval" / "trained" / "results.json"
    stated = {"baseline": "baseline", "baseline_accuracy": 0.01, "delta": -0.5, "mcnemar_p": 1e-9,
              "delta_ci95": [-0.6, -0.4], "both_right": 1, "newly_right": 0, "newly_wrong": 1,
              "both_wrong": 0}  # fmt: skip
    results.write_text(json.dumps(json.loads(results.read_text()) | stated))
    assert compared(run_dir) == {"trained": "+28.3"}
    assert "mcnemar_p" not in page_at(run_dir / "report.html").text
    path = run_dir / "eval" / "baseline" / "records.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [{**row, "correct": False} for row in rows])
    assert compared(run_dir) == {}
    text = page_at(run_dir / "report.html").text
    assert "eval/baseline is damaged: results.json says" in text
    assert "records.jsonl 0.0% of 60: evaluate again" in text
    write_lines(path, rows[:3])
    assert compared(run_dir) == {}


@pytest.mark.parametrize("label", ["baseline", "trained"])
def test_a_changed_side_never_leaves_two_figures(run_dir: Path, label: str) -> None:
    """A report shows what the records say, or that the files do not belong together."""
    results = run_dir / "eval" / "trained" / "results.json"
    stated = {"baseline": "baseline", "baseline_accuracy": 0.01, "delta": -0.5, "mcnemar_p": 1e-9,
              "delta_ci95": [-0.6, -0.4], "both_right": 1, "newly_right": 0, "newly_wrong": 1,
              "both_wrong": 0}  # fmt: skip
    results.write_text(json.dumps(json.loads(results.read_text()) | stated))
    assert compared(run_dir) == {"trained": "+28.3"}  # of the records
    assert "mcnemar_p" not in page_at(run_dir / "report.html").text
    folder = run_dir / "eval" / label
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    write_lines(folder / "records.jsonl", [{**row, "correct": False} for row in rows])
    assert compared(run_dir) == {}
    text = page_at(run_dir / "report.html").text
    assert f"eval/{label} is damaged: results.json says" in text
    assert "records.jsonl 0.0% of 60: evaluate again" in text
    assert "-60.0" not in text
    write_lines(folder / "records.jsonl", rows[:3])
    assert compared(run_dir) == {}


# --- completions -----------------------------------------------------------------------------


def test_completions_are_shown_by_group_best_first(finished: Path) -> None:
    text = section(finished / "report.html", "completions")
    assert text.startswith("Training completions ")
    group = text[text.index("step 40 ") :].split("step 40 ")[1]
    assert group.startswith("What is 40 + 0?")
    advantages = [float(found) for found in re.findall(r"advantage (\S+)", group)]
    assert advantages == [1.0] * 4 + [-1.0] * 4
    assert "read_as five" in group
    assert group.count(" is not the gold answer 40") == 6  # in its own place only
    assert "right 2.00 <thinking> 40 + 3 </thinking> 3 is the gold answer" in group
    assert "answer_correctness/reason" not in group
    assert "[system] Answer. [user] What is 40 + 0?" in group


WEIGHTED = {"right": 14 * 2, "wrong": 14 * 13, "not judged": 14}  # a score of 1 is right
BY_FORMAT = {"right": 14 * 12, "wrong": 14 * 4}


@pytest.mark.parametrize(
    ("config", "verdicts", "rewards"),
    [
        ("reward_weights: [0.2, 1.0]\n", WEIGHTED, {"0", "0.2", "1", "1.2"}),
        ("outcome_reward: strict_format\n", BY_FORMAT, {"0", "1", "2"}),
    ],
)
def test_the_outcome_reward_judges_completions(
    run_dir: Path, config: str, verdicts: dict[str, int], rewards: set[str]
) -> None:
    add_config(run_dir, config)
    entries = entries_of(write_report(run_dir))
    assert Counter(entry["data-verdict"] for entry in entries) == verdicts
    assert {entry.get("data-reward") for entry in entries} == rewards


def write_parquet(run_dir: Path, columns: dict[str, list[Any]], step: int = 1) -> None:
    path = run_dir / "completions" / f"completions_{step:05d}.parquet"
    path.parent.mkdir(exist_ok=True)
    pd.DataFrame({**columns, "advantage": 0.0}).to_parquet(path)


def test_a_batch_that_is_logged_again_is_shown_once_with_all_its_completions(
    tmp_path: Path,
) -> None:
    """A collapsed policy writes the same text eight times."""
    for step in (1, 2):
        group = {"step": [step] * 8, "prompt": ["2?"] * 8, "completion": ["2"] * 8}
        write_parquet(tmp_path, group, step)
    assert len(entries_of(write_report(tmp_path))) == 8


def test_the_question_of_a_text_prompt_is_the_part_that_differs(tmp_path: Path) -> None:
    frame = "A conversation. User: {} Assistant: <think>"
    prompts = [frame.format(question) for question in ("Ann has 2 pens.", "Amy has 3 cups.")]
    write_parquet(tmp_path, {"step": [1] * 2, "prompt": prompts, "completion": ["a", "b"]})
    text = section(write_report(tmp_path), "completions")
    assert "Ann has 2 pens. " in text.split("step 1")[1].split("A conversation")[0]
    assert "Amy has 3 cups. " in text.split("step 1")[2].split("A conversation")[0]


def test_a_long_run_is_cut_and_says_so(tmp_path: Path) -> None:
    """300 steps of 32 completions of 2,000 characters: 19 MB in the logs."""
    for step in range(1, 301):
        columns = {
            "step": [step] * 32,
            "prompt": [f"{step} {i // 8}" for i in range(32)],
            "completion": [f"{step} is a number and so on " * 80] * 32,
        }
        write_parquet(tmp_path, columns, step)
    records = [eval_record(i, i % 2 == 0, "so on " * 300) for i in range(1_319)]
    for label in ("baseline", "trained"):
        write_eval(tmp_path, label, [record["correct"] for record in records])
        write_lines(tmp_path / "eval" / label / "records.jsonl", records)
    path = write_report(tmp_path)
    assert path.stat().st_size < 4_000_000
    said = re.search(
        r"Here are (\d+) of the 9,600 logged completions, from (\d+) of 300 logged steps",
        section(path, "completions"),
    )
    assert said is not None
    entries = entries_of(path)
    assert int(said[1]) == len(entries)
    assert int(said[2]) >= 30
    assert entries[0]["data-step"] == "300"
    assert entries[-1]["data-step"] == "1"
    assert re.search(r"\d+ of the 1,319 are here; all are in", section(path, "problems"))


def test_the_latest_warning_of_each_topic_is_shown(finished: Path) -> None:
    text = page_at(finished / "report.html").text
    assert "warning at step 36 no group had a signal for 5 steps" in " ".join(text.split())
    assert text.count("no group had a signal") == 1


# --- missing, damaged and hostile files ------------------------------------------------------


def test_empty_run(tmp_path: Path) -> None:
    page = page_at(write_report(tmp_path))
    for expected in (
        "No evaluation yet", "No steps logged yet", "logged no times", "Nothing to compare yet",
        "No completions logged yet", "No config.yaml", "No environment.json",
    ):  # fmt: skip
        assert expected in page.text
    assert png_size(tmp_path / "reward_curve.png")[0] == 1800


def test_the_report_of_an_unfinished_run(run_dir: Path) -> None:
    """The trainer is writing a row of metrics and a file of completions."""
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 41, "rew')
    (run_dir / "completions" / "completions_00099.parquet").write_bytes(b"PAR1 half")
    (run_dir / "completions" / "completions_00100.parquet").write_bytes(b"")
    path = write_report(run_dir)
    text = page_at(path).text
    assert "metrics.jsonl" not in text
    assert "completions_00099.parquet could not be read" in text
    assert "completions_00100.parquet could not be read" in text
    assert figures_of(path)["Reward"]["data"][-1]["x"][-1] == 40


def test_damaged_files_are_named(run_dir: Path) -> None:
    (run_dir / "environment.json").write_text('{"python": ')
    (run_dir / "config.yaml").write_text("")
    (run_dir / "warnings.jsonl").write_text('{"text": "x"}\n')
    pages = run_dir / "completions" / "completions_00040.parquet"
    content = pages.read_bytes()
    pages.write_bytes(content[:4] + b"\xff" * 1000 + content[1004:])  # the footer is intact
    (run_dir / "completions" / "completions_00037.parquet").unlink()
    write_parquet(run_dir, {"prompt": ["a"]}, 37)
    (run_dir / "eval" / "trained" / "results.json").write_text("[" * 100_000)
    records = '3\n{"index": [1], "question": {}}\n'
    (run_dir / "eval" / "baseline" / "records.jsonl").write_text(records)
    path = write_report(run_dir)
    for note in (
        "environment.json is not valid JSON",
        "warnings.jsonl, line 1: step: missing",
        "config.yaml is empty",
        "completions_00040.parquet could not be read",
        "completions_00037.parquet: 0.step: missing",
        "trained/results.json",
        "baseline/records.jsonl, line 1: 3; expected",
    ):
        assert note in page_at(path).text
    assert "Reward" in figures_of(path)


@pytest.mark.parametrize("row", ["3", '{"reward": 1}', '{"step": 1, "kl": "x"}', '{"step": 1e999}'])
def test_damaged_metrics_are_named(tmp_path: Path, row: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{row}\n')
    assert "metrics.jsonl, line 2: " in page_at(write_report(tmp_path)).text


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    for label in ("baseline", "trained"):
        write_eval(tmp_path, label, [True])
        write_lines(tmp_path / "eval" / label / "records.jsonl", [eval_record(1, True, "\ud83d")])
    assert write_report(tmp_path).is_file()


def test_model_output_never_becomes_markup(tmp_path: Path) -> None:
    attack_everywhere(tmp_path)
    path = write_report(tmp_path)
    assert_inert(page_at(path))
    for figure in figures_of(path).values():  # Plotly reads tags and links in labels
        labels = [*legend_of(figure), *figure["layout"]["yaxis"].get("ticktext", [])]
        assert not [label for label in labels if "<" in label]


# --- command line and values -----------------------------------------------------------------


def test_command_line(run_dir: Path, capsys: Any) -> None:
    page = run_dir.parent / "elsewhere.html"
    main([str(run_dir), "--output", str(page)])
    assert capsys.readouterr().out.strip() == str(page)
    assert not (run_dir / "report.html").exists()
    main([str(run_dir)])
    assert capsys.readouterr().out.strip() == str(run_dir / "report.html")
    assert (run_dir / "report.html").read_bytes() == page.read_bytes()
    for mistake, expected in (
        ([str(run_dir / "nowhere")], "is not a run directory"),
        ([str(run_dir), str(run_dir)], "unrecognized arguments"),
        ([str(run_dir), "--output", str(run_dir)], "cannot use"),
        ([str(run_dir), "--output", "."], "cannot use"),
        ([str(run_dir), "--output", f"{page}/x"], "cannot use"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(mistake)
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert expected in error
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "sologrpo report" in capsys.readouterr().out


def test_imports_are_light() -> None:
    code = "import sys, sologrpo.report.command; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert not {b"torch", b"transformers", b"trl", b"matplotlib.pyplot"} & set(loaded.split())


def test_long_texts_are_cut() -> None:
    assert shorten("x" * 30_000).endswith("[… 10,000 more characters]")
    assert line("two\n lines", 9) == "two lines"
    assert line("two\n lines", 8) == "two lin…"


@pytest.mark.parametrize(
    ("count", "chosen"), [(9, [1, 2, 3, 4, 5]), (3, [1, 3, 5]), (2, [1, 5]), (1, [1])]
)
def test_items_are_evenly_spread(count: int, chosen: list[int]) -> None:
    assert spread([1, 2, 3, 4, 5], count) == chosen
    assert spread([], count) == []
