"""The report of a made-up run, of unfinished ones, and of model output that attacks the page."""

import json
import os
import random
import re
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
    STEPS,
    attack_everywhere,
    eval_record,
    metric_row,
    metric_rows,
    write_completions,
    write_eval,
    write_lines,
    write_run,
)
from sologrpo.errors import InputError
from sologrpo.report.charts import draw_reward_curve, moving_average, series
from sologrpo.report.reading import as_text, fair_shares, read_metrics
from sologrpo.report.report import main, write_comparison, write_report


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "quickstart")


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

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.tags)


def page_at(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def section(path: Path, name: str) -> str:
    """Text of one section of the page, with single spaces."""
    source = path.read_text(encoding="utf-8")
    start = source.index(f'<section id="{name}">')
    part = source[start : source.index("</section>", start)]
    return " ".join(Page(part.replace("<", " <")).text.split())


def charts_of(path: Path) -> list[dict[str, str | None]]:
    return [attrs for tag, attrs in page_at(path).tags if tag == "figure"]


def completion_entries(path: Path) -> list[dict[str, str | None]]:
    return [attrs for _, attrs in page_at(path).tags if "data-signal" in attrs]


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_full_report(run_dir: Path) -> None:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    page = page_at(path)
    for expected in (
        "quickstart",
        "HuggingFaceTB/SmolLM2-135M",
        "33.3 %",  # baseline: 20 of 60
        "newly right",
        "newly wrong",
        "share",
        "sampling",
        "packages.trl",
        "Groups without signal",
        "step 40",
        "latest step first",
        "answer_correctness",
        "read_as",
    ):
        assert expected in page.text, expected
    assert page.count("svg") == 12  # the panels whose metrics this run logs
    assert "missing" not in {attrs.get("class") for _, attrs in page.tags}
    assert "hf_secret" not in page.text


def test_full_report_numbers_agree_with_the_records(run_dir: Path) -> None:
    page = page_at(write_report(run_dir))
    before = [i % 3 == 0 for i in range(PROBLEMS)]
    after = [(i % 3 == 0 and i % 9 != 0) or i % 2 == 0 for i in range(PROBLEMS)]
    newly_right = sum(a and not b for b, a in zip(before, after, strict=True))
    newly_wrong = sum(b and not a for b, a in zip(before, after, strict=True))
    delta = 100 * (newly_right - newly_wrong) / PROBLEMS
    text = " ".join(page.text.split())
    assert f"newly right {newly_right}, newly wrong {newly_wrong}," in text
    assert f"Accuracy rose by {delta:.1f} points" in text


def test_stated_comparison_wins_and_needs_no_baseline_folder(tmp_path: Path) -> None:
    stated = {"baseline_accuracy": 0.25, "delta": -0.5, "delta_ci95": [-0.6, -0.4]}
    write_eval(tmp_path, "trained", [True, False], **stated, mcnemar_p=1e-9)
    text = page_at(write_report(tmp_path)).text
    assert "Accuracy fell by 50.0 points (95 % interval -60.0 to -40.0 points)." in text
    assert "< 0.0001" in text


def test_no_clear_difference_is_said(tmp_path: Path) -> None:
    write_eval(tmp_path, "baseline", [True, False, True])
    write_eval(tmp_path, "trained", [True, True, False])
    assert "No clear difference" in page_at(write_report(tmp_path)).text


def test_different_problems_are_not_compared(tmp_path: Path) -> None:
    write_eval(tmp_path, "baseline", [True, False, True])
    write_eval(tmp_path, "trained", [True, True])
    assert "No paired comparison yet" in page_at(write_report(tmp_path)).text


def test_no_interval_without_a_reading(tmp_path: Path) -> None:
    """Fields that are missing or of the wrong type leave a gap, never a made-up number."""
    folder = tmp_path / "eval" / "trained"
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(
        '{"n": 0, "accuracy": null, "by_kind": {"add": 3, "mul": {"n": 5, "accuracy": 50.0}}}'
    )
    assert "n/a" in page_at(write_report(tmp_path)).text


def test_empty_run(tmp_path: Path) -> None:
    page = page_at(write_report(tmp_path))
    for expected in (
        "No evaluation yet",
        "No steps logged yet",
        "logged no times",
        "Nothing to compare yet",
        "No completions logged yet",
        "No config.yaml",
        "No environment.json",
    ):
        assert expected in page.text
    assert png_size(tmp_path / "reward_curve.png")[0] == 1800


def test_first_step_only(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [metric_row(1, random.Random(0))])
    assert page_at(write_report(tmp_path)).count("svg") > 5


def test_torn_last_line(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write('{"step": 41, "note": "é'.encode()[:-1])
    assert len(read_metrics(run_dir / "metrics.jsonl")) == STEPS + 4
    lines = STEPS + 5
    note = f"metrics.jsonl: line {lines} is torn and was skipped"
    assert note in page_at(write_report(run_dir)).text


def test_torn_files_are_named(run_dir: Path) -> None:
    (run_dir / "environment.json").write_text('{"python": ')
    (run_dir / "config.yaml").write_text("a: [1, 2")
    (run_dir / "completions" / "completions_00099.parquet").write_bytes(b"PAR1 half")
    (run_dir / "eval" / "trained" / "results.json").write_text("[]")
    (run_dir / "eval" / "baseline" / "records.jsonl").write_text("3\n")
    text = page_at(write_report(run_dir)).text
    for name in (
        "environment.json could not be read",
        "config.yaml could not be read",
        "completions/completions_00099.parquet could not be read",
        "results.json could not be read",
        "eval/baseline/records.jsonl: line 1 is torn",
    ):
        assert name in text


def test_model_output_never_becomes_markup(tmp_path: Path) -> None:
    attack_everywhere(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    for path in (write_report(tmp_path), write_comparison([tmp_path, other])):
        page = page_at(path)
        assert ATTACK in page.text
        assert page.count("script") == 1
        assert page.count("img") == 0
        assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]


def test_nothing_is_loaded_from_elsewhere(run_dir: Path) -> None:
    page = page_at(write_report(run_dir))
    source = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "http://" not in source
    assert "https://" not in source
    assert "@import" not in source
    assert not {"link", "iframe", "object", "embed"} & {tag for tag, _ in page.tags}
    for _, attrs in page.tags:
        for name in ("src", "href", "xlink:href"):
            assert (attrs.get(name) or "#").startswith("#")
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", source))
    policy = [attrs["content"] for tag, attrs in page.tags if "http-equiv" in attrs]
    assert policy[0] is not None
    assert policy[0].startswith("default-src 'none'; ")


def test_page_is_well_formed(run_dir: Path) -> None:
    """Every element is closed, and in order."""
    source = write_report(run_dir).read_text(encoding="utf-8")
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


def test_half_a_surrogate_pair_is_survived(tmp_path: Path) -> None:
    for label in ("baseline", "trained"):
        write_eval(tmp_path, label, [True])
        write_lines(tmp_path / "eval" / label / "records.jsonl", [eval_record(1, True, "\ud83d")])
    assert write_report(tmp_path).is_file()


def test_report_is_deterministic_and_leaves_no_other_file(run_dir: Path) -> None:
    first = {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    write_report(run_dir)
    once = (run_dir / "report.html").read_bytes(), (run_dir / "reward_curve.png").read_bytes()
    write_report(run_dir)
    again = (run_dir / "report.html").read_bytes(), (run_dir / "reward_curve.png").read_bytes()
    assert once == again
    written = {path.name for path in run_dir.iterdir() if path.is_file()} - first.keys()
    assert written == {"report.html", "reward_curve.png"}


def test_a_failed_write_keeps_the_old_report(run_dir: Path, monkeypatch: Any) -> None:
    before = write_report(run_dir).read_bytes()

    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_report(run_dir)
    assert (run_dir / "report.html").read_bytes() == before
    assert not list(run_dir.glob(".*.tmp"))


def test_completions_are_shown_by_group_best_first(run_dir: Path) -> None:
    text = section(write_report(run_dir), "completions")
    assert text.startswith("Training completions ")
    group = text[text.index("step 40 ") :].split("step 40 ")[1]
    assert group.startswith("What is 40 + 0?")
    advantages = [float(found) for found in re.findall(r"advantage (\S+)", group)]
    assert advantages == [1.0] * 4 + [-1.0] * 4
    assert "read_as five" in group


def test_completions_are_judged_by_the_reward_for_the_answer(run_dir: Path) -> None:
    """1 of the outcome reward is right, nothing is not judged; the sum heeds the weights."""
    config = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(config + "reward_weights: [0.2, 1.0]\n")
    entries = completion_entries(write_report(run_dir))
    assert len(entries) == 14 * 16
    verdicts = Counter(entry["data-verdict"] for entry in entries)
    assert verdicts == {"right": 14 * 2, "wrong": 14 * 13, "not judged": 14}
    rewards = {(e["data-verdict"], e.get("data-reward")) for e in entries}
    assert rewards == {
        ("right", "1"), ("right", "1.2"), ("wrong", "0"), ("wrong", "0.2"), ("not judged", "0"),
    }  # fmt: skip


def test_the_configured_outcome_reward_judges(run_dir: Path) -> None:
    config = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(config + "outcome_reward: strict_format\n")
    entries = completion_entries(write_report(run_dir))
    assert Counter(e["data-verdict"] for e in entries) == {"right": 14 * 12, "wrong": 14 * 4}


def test_a_batch_that_was_logged_again_is_not_shown_again(tmp_path: Path) -> None:
    for step in (1, 2):
        write_completions(tmp_path / "completions", 1)
        first = tmp_path / "completions" / "completions_00001.parquet"
        os.replace(first, tmp_path / "completions" / f"completions_0000{step}_.parquet")
    assert len(completion_entries(write_report(tmp_path))) == 16


def test_equal_completions_of_a_group_are_all_shown(tmp_path: Path) -> None:
    """Eight times the same text is what a collapsed policy looks like."""
    folder = tmp_path / "completions"
    folder.mkdir()
    table = {"step": [1] * 8, "prompt": ["2?"] * 8, "completion": ["2"] * 8, "length": [0.0] * 8}
    pd.DataFrame(table).to_parquet(folder / "completions_00001.parquet")
    assert len(completion_entries(write_report(tmp_path))) == 8


def test_the_question_of_a_text_prompt_is_what_differs(tmp_path: Path) -> None:
    folder = tmp_path / "completions"
    folder.mkdir()
    frame = "A conversation. User: {} Assistant: <think>"
    prompts = [frame.format(question) for question in ("Ann has 2 pens.", "Amy has 3 cups.")]
    pd.DataFrame({"step": [1] * 2, "prompt": prompts, "completion": ["a", "b"]}).to_parquet(
        folder / "completions_00001.parquet"
    )
    text = section(write_report(tmp_path), "completions")
    assert "Ann has 2 pens. " in text.split("step 1")[1].split("A conversation")[0]
    assert "Amy has 3 cups. " in text.split("step 1")[2].split("A conversation")[0]


def test_a_long_run_is_cut_and_says_so(tmp_path: Path) -> None:
    """300 steps of 32 completions of 2,000 characters: 19 MB in the logs."""
    for step in range(1, 301):
        words = f"{step} is a number and so on " * 80
        rows = [
            {"step": step, "prompt": f"{step} {i // 8}", "completion": words, "judge": float(i % 2)}
            for i in range(32)
        ]
        (tmp_path / "completions").mkdir(exist_ok=True)
        path = tmp_path / "completions" / f"completions_{step:05d}.parquet"
        pd.DataFrame(rows).to_parquet(path)
    records = [{**eval_record(i, i % 2 == 0, "so on " * 300)} for i in range(1_319)]
    for label in ("baseline", "trained"):
        write_eval(tmp_path, label, [True])
        write_lines(tmp_path / "eval" / label / "records.jsonl", records)
    path = write_report(tmp_path)
    assert path.stat().st_size < 2_500_000
    said = re.search(
        r"Here are (\d+) of the 9,600 logged completions, from (\d+) of 300 logged steps",
        section(path, "completions"),
    )
    assert said is not None
    assert int(said[1]) == len(completion_entries(path))
    assert int(said[2]) >= 30
    steps = [int(entry["data-step"] or 0) for entry in completion_entries(path)]
    assert steps[0] == 300
    assert steps[-1] == 1
    assert re.search(r"\d+ of the 1,319 are here; all are in", section(path, "problems"))


def test_fair_shares() -> None:
    assert fair_shares([], 10) == []
    assert fair_shares([1, 2], 10) == [1, 2]
    assert fair_shares([100, 1, 100], 11) == [5, 1, 5]
    assert fair_shares([5, 5], 0) == [0, 0]


def test_what_is_zero_at_every_step_is_named_and_not_drawn(run_dir: Path) -> None:
    rows = [{**row, "clip_ratio/region_mean": 0.0} for row in metric_rows()]
    write_lines(run_dir / "metrics.jsonl", rows)
    path = write_report(run_dir)
    assert "Zero at every step, so not drawn: Clipped tokens." in section(path, "curves")
    assert page_at(path).count("svg") == 12


def test_charts_carry_their_numbers(run_dir: Path) -> None:
    """What is read out under the pointer is what was logged, not what was averaged."""
    charts = {chart["aria-label"]: chart for chart in charts_of(write_report(run_dir))}
    data = json.loads(charts["Reward over training steps"]["data-chart"] or "")
    lines = {line["label"]: line for line in data["lines"]}
    assert [*lines] == ["reward", "answer_correctness", "strict_format", "validation accuracy"]
    logged = dict(series(metric_rows(), "reward"))
    assert dict(lines["reward"]["points"]) == pytest.approx(logged, rel=1e-3)
    assert lines["validation accuracy"]["points"] == [
        [10, 0.36],
        [20, 0.41],
        [30, 0.46],
        [40, 0.51],
    ]
    assert lines["validation accuracy"]["percent"]


def test_rewards_are_named_with_their_weights(run_dir: Path) -> None:
    rewards = 'rewards: [strict_format, {"my.module:answer_correctness": {a: 1}}]\n'
    config = (run_dir / "config.yaml").read_text() + rewards + "reward_weights: [0.2, 1]\n"
    (run_dir / "config.yaml").write_text(config)
    text = section(write_report(run_dir), "curves")
    assert "strict_format (weight 0.2)" in text
    assert "answer_correctness (weight 1)" in text


def test_newer_fields_of_an_evaluation_are_shown(tmp_path: Path) -> None:
    tokens = {"all": {"mean": 1, "p50": 87.4, "p95": 211.0}, "right": None}
    sampled = {"num_samples": 4, "scores": {"pass@1": 0.375, "maj@4": 0.5}}
    write_eval(
        tmp_path, "trained", [True, False], integer_rate=0.81, no_answer_rate=0.07,
        completion_tokens=tokens, sampled=sampled, tokens_per_second=1234.5,
    )  # fmt: skip
    text = section(write_report(tmp_path), "scores")
    for expected in (
        "integer answer 81.0 %",
        "no answer found 7.0 %",
        "pass@1, sampled 37.5 %",
        "maj@4, sampled 50.0 %",
        "tokens, median / 95th percentile 87 / 211",
        "tokens a second 1,234.5",
    ):
        assert expected in text
    assert "of right answers" not in text


def test_one_evaluation_alone_can_be_browsed(tmp_path: Path) -> None:
    write_eval(tmp_path, "trained", [True, False, False])
    text = section(write_report(tmp_path), "problems")
    assert "Test problems, trained: wrong 2, right 1." in text


def test_precisions_are_compared(tmp_path: Path) -> None:
    table = {
        "nf4_adapter": {"accuracy": 0.5, "accuracy_ci95": [0.4, 0.6], "differing_rate": 0.0},
        "merged": {"accuracy": 0.48, "delta": -0.02, "delta_ci95": [-0.05, 0.01],
                   "differing_rate": 0.125},
    }  # fmt: skip
    write_eval(tmp_path, "trained", [True, False])
    content = {"trained": "nf4_adapter", "precisions": table}
    (tmp_path / "eval" / "precisions.json").write_text(json.dumps(content))
    text = section(write_report(tmp_path), "scores")
    assert "nf4_adapter trained 50.0 % 40.0 to 60.0 0.0 %" in text
    assert "merged 48.0 % -2.0 -5.0 to 1.0 12.5 %" in text


def second_run(root: Path) -> Path:
    """Another learning rate, other answers to the same problems, no KL."""
    write_run(root)
    config = (root / "config.yaml").read_text().replace("1.0e-05", "5.0e-06")
    (root / "config.yaml").write_text(config + "hub_token: hf_other\n")
    rows = [{key: row[key] for key in row if key != "kl"} for row in metric_rows()]
    write_lines(root / "metrics.jsonl", rows)
    right = [i % 2 == 1 for i in range(PROBLEMS)]
    records = [eval_record(i, ok, "") for i, ok in enumerate(right)]
    write_lines(root / "eval" / "trained" / "records.jsonl", records)
    return root


def test_comparison(run_dir: Path) -> None:
    path = write_comparison([run_dir, second_run(run_dir.parent / "slower")])
    assert path == run_dir.parent / "comparison.html"
    config = section(path, "config")
    assert re.search(r"quickstart slower learning_rate 1e-05 5e-06 \d+ other values", config)
    assert "No difference in 3 values." in config
    assert "slower against quickstart" in section(path, "overview")
    charts = {chart["aria-label"]: chart for chart in charts_of(path)}
    kl = "KL from the reference model (nats a token)"
    kl = "KL from the reference model (nats a token)"
    for title, runs in (("Reward", ["quickstart", "slower"]), (kl, ["quickstart"])):
        data = json.loads(charts[f"{title} over training steps"]["data-chart"] or "")
        assert [line["label"] for line in data["lines"]] == runs
    assert "hf_" not in path.read_text(encoding="utf-8")


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / folder / "quickstart") for folder in ("a", "b")]
    page = page_at(write_comparison(runs, tmp_path / "both.html"))
    assert "a/quickstart · b/quickstart" in page.text


def test_a_run_cannot_be_compared_with_itself(run_dir: Path) -> None:
    with pytest.raises(InputError, match="named twice"):
        write_comparison([run_dir, run_dir.parent / "." / run_dir.name])


def test_comparison_of_empty_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    page = page_at(write_comparison([tmp_path / "a", tmp_path / "b"]))
    for expected in (
        "No run was evaluated",
        "No steps logged yet",
        "No difference in 0 values",
    ):
        assert expected in page.text


def test_reward_curve_png(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    draw_reward_curve(metric_rows(), path, "$weird_ title")
    assert png_size(path) == (1800, 1400)
    assert 20_000 < path.stat().st_size < 600_000


def test_series_keeps_the_redone_step_and_drops_what_is_no_number() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 2, "reward": 1.0},
        {"step": 3, "reward": 9.0},
        {"step": 3, "reward": 2.0},
        {"step": 1, "reward": 0},
        {"step": 4, "reward": float("nan")},
        {"step": 5, "reward": None},
        {"step": 6, "reward": True},
        {"reward": 7.0},
    ]
    assert series(rows, "reward") == [(1, 0.0), (2, 1.0), (3, 2.0)]


def test_moving_average_looks_back_only() -> None:
    assert moving_average([1, 2, 3, 10], 2) == [1, 1.5, 2.5, 6.5]
    assert moving_average([], 3) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        ([], ""),
        ([{"role": "assistant", "content": "one"}], "one"),
        (
            [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
            "[system]\na\n\n[user]\nb",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "part"}]}], "part"),
        ([{"role": "assistant", "content": None}], ""),
    ],
)
def test_as_text(value: Any, text: str) -> None:
    assert as_text(value) == text


def test_a_runaway_completion_is_cut() -> None:
    assert as_text("x" * 30_000).endswith("[… 10,000 more characters]")


def test_command_line(run_dir: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["report", str(run_dir)])
    main()
    assert capsys.readouterr().out.strip() == str(run_dir / "report.html")
    monkeypatch.setattr(sys, "argv", ["report", str(run_dir / "nowhere")])
    with pytest.raises(SystemExit):
        main()
    assert "is not a run directory" in capsys.readouterr().err


def test_command_line_with_several_runs(run_dir: Path, capsys: Any, monkeypatch: Any) -> None:
    other = second_run(run_dir.parent / "slower")
    page = run_dir.parent / "both.html"
    monkeypatch.setattr(sys, "argv", ["report", str(run_dir), str(other), "--output", str(page)])
    main()
    assert capsys.readouterr().out.strip() == str(page)
    assert page.is_file()
    monkeypatch.setattr(sys, "argv", ["report", str(run_dir), "--output", str(page)])
    with pytest.raises(SystemExit):
        main()
    assert "--output is for several run directories" in capsys.readouterr().err


def test_imports_are_light() -> None:
    code = "import sys, sologrpo.report.report; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert not {b"torch", b"transformers", b"trl", b"matplotlib.pyplot"} & set(loaded.split())
