"""The report of a made-up run, of unfinished ones, and of model output that attacks the page."""

import json
import os
import random
import re
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sologrpo.report import (
    as_text,
    draw_reward_curve,
    main,
    moving_average,
    read_metrics,
    series,
    write_report,
)

ATTACK = "</pre></details><script>document.title='owned'</script><img src=x onerror=alert(1)>"
STEPS = 40
PROBLEMS = 60


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def metric_row(step: int, rng: random.Random) -> dict[str, Any]:
    """A logged step of a run that learns the format first and the answers slowly."""
    form = min(1.0, 0.2 + step / 15) + rng.gauss(0, 0.04)
    answer = 0.5 + step / STEPS + rng.gauss(0, 0.15)
    return {
        "step": step,
        "reward": form + answer,
        "reward_std": 0.6 - step / 100,
        "rewards/strict_format/mean": form,
        "rewards/answer_correctness/mean": answer,
        "frac_reward_zero_std": min(1.0, max(0.0, 0.1 + step / 60 + rng.gauss(0, 0.05))),
        "completions/mean_length": 220 - step + rng.gauss(0, 8),
        "completions/clipped_ratio": max(0.0, 0.25 - step / 100),
        "entropy": 0.9 / (1 + step / 20),
        "kl": step / 4000 if step > 3 else None,
        "loss": rng.gauss(0, 0.02),
        "grad_norm": abs(rng.gauss(0.4, 0.1)),
        "learning_rate": 1e-5 * (1 - step / STEPS),
        "step_time": 31 + rng.gauss(0, 2),
        "time/sampling": 19 + rng.gauss(0, 1),
        "time/forward and backward": 11 + rng.gauss(0, 1),
        "time/rewards": 0.3,
    }


def metric_rows() -> list[dict[str, Any]]:
    rng = random.Random(0)
    rows = []
    for step in range(1, STEPS + 1):
        rows.append(metric_row(step, rng))
        if step % 10 == 0:
            accuracy = 0.31 + step / 200
            validation = {"eval_accuracy": accuracy, "eval_format_rate": 0.9}
            rows.append({"step": step, **validation})
    return rows


def write_completions(folder: Path, step: int) -> None:
    """A log as TRL writes it: chat lists for prompt and completion, a column a reward."""
    folder.mkdir(exist_ok=True)
    texts = [f"<thinking>\n2 + {i} at {step}\n</thinking>\n" for i in range(10)]
    table = {
        "step": [step] * 10,
        "prompt": [[{"role": "system", "content": "Answer."}, {"role": "user", "content": "2?"}]]
        * 10,
        "completion": [[{"role": "assistant", "content": text}] for text in texts],
        "strict_format": [float(i % 2) for i in range(10)],
        "answer_correctness": [None, *[2.0 * (i % 3 == 0) for i in range(1, 10)]],
        "advantage": [(-1.0) ** i if i < 8 else 0.004 for i in range(10)],
    }
    pd.DataFrame(table).to_parquet(folder / f"completions_{step:05d}.parquet")


def eval_record(index: int, correct: bool, completion: str) -> dict[str, Any]:
    return {
        "index": index,
        "question": f"Mina has {index} boxes of 6 pens and gives away 2 pens. How many are left?",
        "gold": f"#### {6 * index - 2}",
        "completion": completion,
        "extracted": str(6 * index - 2) if correct else None,
        "correct": correct,
        "lenient_correct": correct or index % 5 == 0,
        "format_ok": correct,
        "truncated": index % 11 == 0,
        "completion_tokens": 60 + index,
    }


def write_eval(run_dir: Path, label: str, right: list[bool], **extra: Any) -> None:
    results = {
        "n": len(right),
        "accuracy": sum(right) / len(right),
        "accuracy_ci95": [sum(right) / len(right) - 0.12, sum(right) / len(right) + 0.12],
        "accuracy_lenient": 0.55,
        "format_rate": 0.7,
        "truncated_rate": 0.05,
        "trailing_text_rate": 0.0,
        "mean_completion_tokens": 123.4,
        "model": "HuggingFaceTB/SmolLM2-135M",
        "precision": "bf16",
        "by_kind": {"add": {"n": 30, "accuracy": 0.5}, "share": {"n": 30, "accuracy": 0.2}},
        **extra,
    }
    folder = run_dir / "eval" / label
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    write_lines(
        folder / "records.jsonl",
        [eval_record(i, ok, f"<answer>\n{i}\n</answer>") for i, ok in enumerate(right)],
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run with every file of the layout."""
    root = tmp_path / "quickstart"
    root.mkdir()
    config = "model_name_or_path: HuggingFaceTB/SmolLM2-135M\nlearning_rate: 1.0e-05\n"
    config += "hub_token: hf_secret\nlora_target_modules: [q_proj, v_proj]\n"
    (root / "config.yaml").write_text(config)
    environment = {"python": "3.11.2", "packages": {"trl": "1.16.0"}, "device": "cpu"}
    (root / "environment.json").write_text(json.dumps(environment))
    write_lines(root / "metrics.jsonl", metric_rows())
    for step in range(1, STEPS + 1, 3):
        write_completions(root / "completions", step)
    before = [i % 3 == 0 for i in range(PROBLEMS)]
    after = [(i % 3 == 0 and i % 9 != 0) or i % 2 == 0 for i in range(PROBLEMS)]
    write_eval(root, "baseline", before, adapter=None)
    write_eval(root, "trained", after, adapter="adapter")
    return root


class Page(HTMLParser):
    """Start tags with attributes, and all text, of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.tags)


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_full_report(run_dir: Path) -> None:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    page = Page(path)
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
    ):
        assert expected in page.text, expected
    assert page.count("svg") == 11  # reward, and each of the panels but the clip fraction
    assert "missing" not in {attrs.get("class") for _, attrs in page.tags}
    assert "hf_secret" not in page.text


def test_full_report_numbers_agree_with_the_records(run_dir: Path) -> None:
    page = Page(write_report(run_dir))
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
    text = Page(write_report(tmp_path)).text
    assert "Accuracy fell by 50.0 points (95 % interval -60.0 to -40.0 points)." in text
    assert "< 0.0001" in text


def test_no_clear_difference_is_said(tmp_path: Path) -> None:
    write_eval(tmp_path, "baseline", [True, False, True])
    write_eval(tmp_path, "trained", [True, True, False])
    assert "No clear difference" in Page(write_report(tmp_path)).text


def test_different_problems_are_not_compared(tmp_path: Path) -> None:
    write_eval(tmp_path, "baseline", [True, False, True])
    write_eval(tmp_path, "trained", [True, True])
    assert "No paired comparison yet" in Page(write_report(tmp_path)).text


def test_no_interval_without_a_reading(tmp_path: Path) -> None:
    """Fields that are missing or of the wrong type leave a gap, never a made-up number."""
    folder = tmp_path / "eval" / "trained"
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(
        '{"n": 0, "accuracy": null, "by_kind": {"add": 3, "mul": {"n": 5, "accuracy": 50.0}}}'
    )
    assert "n/a" in Page(write_report(tmp_path)).text


def test_empty_run(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path))
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
    assert Page(write_report(tmp_path)).count("svg") > 5


def test_torn_last_line(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write('{"step": 41, "note": "é'.encode()[:-1])
    assert len(read_metrics(run_dir / "metrics.jsonl")) == STEPS + 4
    lines = STEPS + 5
    note = f"metrics.jsonl: line {lines} is torn and was skipped"
    assert note in Page(write_report(run_dir)).text


def test_torn_files_are_named(run_dir: Path) -> None:
    (run_dir / "environment.json").write_text('{"python": ')
    (run_dir / "config.yaml").write_text("a: [1, 2")
    (run_dir / "completions" / "completions_00099.parquet").write_bytes(b"PAR1 half")
    (run_dir / "eval" / "trained" / "results.json").write_text("[]")
    (run_dir / "eval" / "baseline" / "records.jsonl").write_text("3\n")
    text = Page(write_report(run_dir)).text
    for name in (
        "environment.json could not be read",
        "config.yaml could not be read",
        "completions/completions_00099.parquet could not be read",
        "results.json could not be read",
        "eval/baseline/records.jsonl: line 1 is torn",
    ):
        assert name in text


def attack_everywhere(run_dir: Path) -> None:
    """Hostile text in every field that a model, a data set or a user can fill."""
    rows = [
        {"step": s, "reward": s, f"rewards/{ATTACK}/mean": s, "rewards/$x_/mean": 1} for s in (1, 2)
    ]
    write_lines(run_dir / "metrics.jsonl", [*rows, {"step": 2, f"time/{ATTACK}": 1.0}])
    (run_dir / "config.yaml").write_text(json.dumps({ATTACK: ATTACK, "model_name_or_path": ATTACK}))
    (run_dir / "environment.json").write_text(json.dumps({ATTACK: {ATTACK: [ATTACK]}}))
    table = {"step": [1], "prompt": [ATTACK], "completion": [ATTACK], ATTACK: [ATTACK]}
    (run_dir / "completions").mkdir()
    pd.DataFrame(table).to_parquet(run_dir / "completions" / "completions_00001.parquet")
    hostile = {"model": ATTACK, "precision": ATTACK, "by_kind": {ATTACK: {"n": 2, "accuracy": 0.5}}}
    for label, right in (("baseline", [True, False]), ("trained", [False, True])):
        write_eval(run_dir, label, right, **hostile)
        records = [eval_record(i, ok, ATTACK) for i, ok in enumerate(right)]
        hurt = [{**r, "question": ATTACK, "gold": ATTACK, "extracted": ATTACK} for r in records]
        write_lines(run_dir / "eval" / label / "records.jsonl", hurt)


def test_model_output_never_becomes_markup(tmp_path: Path) -> None:
    attack_everywhere(tmp_path)
    page = Page(write_report(tmp_path))
    assert ATTACK in page.text
    assert page.count("script") == 1
    assert page.count("img") == 0
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]


def test_nothing_is_loaded_from_elsewhere(run_dir: Path) -> None:
    page = Page(write_report(run_dir))
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
        elif not self_closing and name != "meta":
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


def test_samples_are_spread_and_shown_once(run_dir: Path) -> None:
    page = Page(write_report(run_dir))
    steps = re.findall(r"step (\d+)\s", page.text[page.text.index("Training completions") :])
    assert list(dict.fromkeys(steps)) == ["40", "19", "1"]
    assert [steps.count(step) for step in ("40", "19", "1")] == [8, 8, 8]


def test_rewards_logged_again_are_not_shown_again(tmp_path: Path) -> None:
    for step in (1, 2):
        write_completions(tmp_path / "completions", 1)
        first = tmp_path / "completions" / "completions_00001.parquet"
        os.replace(first, tmp_path / "completions" / f"completions_0000{step}_.parquet")
    page = Page(write_report(tmp_path))
    assert len(re.findall(r"step 1\s", page.text)) == 10 - 2


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


def test_imports_are_light() -> None:
    code = "import sys, sologrpo.report; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert not {b"torch", b"transformers", b"trl", b"matplotlib.pyplot"} & set(loaded.split())
