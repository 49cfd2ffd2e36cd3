"""Every prompt of a run is rendered with the run's `chat_template_kwargs`."""

import shutil
import sys
from pathlib import Path

import pytest
import yaml

from scripts import exit_code, load_script, train_without_report
from sologrpo.chat import main as chat
from sologrpo.export.export import main as export
from tiny import CHAT_TEMPLATE, tiny_config

ONLY_WITH_IT = (
    "{%- if enable_thinking is not defined or enable_thinking %}"
    "{{ raise_exception('rendered without the variable') }}{%- endif %}"
)


def test_prompts_of_training_validation_evaluation_chat_and_export_see_the_variable(
    tiny_llama: Path,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(tiny_llama, model)
    (model / "chat_template.jinja").write_text(ONLY_WITH_IT + CHAT_TEMPLATE)
    validated = {"eval_strategy": "steps", "eval_steps": 1, "num_validation_examples": 1}
    config = tiny_config(model, tiny_data, run) | validated | {"max_steps": 1}
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(config))
    monkeypatch.setattr("sologrpo.report.write_report", Path)
    train, evaluate = train_without_report(), load_script("evaluate")

    assert exit_code(train, "--config", file) == 2
    assert "rendered without the variable" in capsys.readouterr().err
    thinking = ["--chat_template_kwargs", '{"enable_thinking": false}']
    assert exit_code(train, "--config", file, *thinking) == 0
    assert exit_code(evaluate, "--run", run, "--limit", 1, "--max_completion_length", 2) == 0
    question = tmp_path / "question"
    question.write_text("2 + 2?\n")
    with question.open() as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        chat(["--run", str(run), "--max_completion_length", "2"])
    export(["--run", str(run), "--save_merged", str(tmp_path / "merged"), "--parity_problems", "1"])
    assert "rendered without the variable" not in capsys.readouterr().err
