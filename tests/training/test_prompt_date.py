"""A chat template that shows the date shows that of the run's start, whenever it is rendered."""

import json
import shutil
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from test_resume import adapter_of, assert_equal_weights
from transformers.utils import chat_template_utils

from scripts import exit_code, load_script, train_without_report
from sologrpo.base.environment import fix_prompt_date
from sologrpo.export.export import main as export
from sologrpo.model.loading import load_tokenizer
from tiny import CHAT_TEMPLATE, tiny_config

# As Llama-3.2, SmolLM3 and gpt-oss write it; microseconds, so that no two renderings are alike.
KINDS = {
    "Llama-3.2": '{%- if not date_string is defined %}{%- set date_string = strftime_now("%f") %}'
    "{%- endif %}{{ date_string }}",
    "SmolLM3": '{%- set today = strftime_now("%f") -%}{{ today }}',
    "gpt-oss": '{% macro build() %}{{ "Date: " + strftime_now("%f") }}{% endmacro %}{{ build() }}',
}
TEMPLATE = "\n".join(KINDS.values()) + CHAT_TEMPLATE


@pytest.mark.parametrize("kind", KINDS)
def test_a_fixed_date_is_the_only_one_a_template_sees(
    kind: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", datetime)  # of all tests, put back here
    tokenizer = load_tokenizer(str(tiny_llama))

    def shown() -> str:
        question = [{"role": "user", "content": "?"}]
        text = tokenizer.apply_chat_template(question, chat_template=KINDS[kind], tokenize=False)
        return str(text)[-6:]

    assert (before := shown()) != shown()
    fix_prompt_date(None)
    assert shown() == shown() != before


def test_a_run_shows_one_date_in_training_evaluation_and_export(
    tiny_llama: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", datetime)
    model, run, whole = (tmp_path / name for name in ("model", "run", "whole"))
    shutil.copytree(tiny_llama, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    config = tiny_config(model, tiny_data, run) | {"save_steps": 1}
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(config))
    train, evaluate = train_without_report(), load_script("evaluate")
    monkeypatch.setattr("sologrpo.report.write_report", Path)

    assert exit_code(train, "--config", file, "--max_steps", 1) == 0
    date = json.loads((run / "environment.json").read_text())["prompt_date"]
    whole.mkdir()
    shutil.copy(run / "environment.json", whole)
    assert exit_code(train, "--config", file, "--resume", "--output_dir", whole) == 0
    assert exit_code(train, "--config", file, "--resume") == 0
    assert_equal_weights(adapter_of(run / "adapter"), adapter_of(whole / "adapter"))

    hashes = set()
    for label in "ab":
        limits = ["--limit", 1, "--max_completion_length", 2, "--baseline", "false"]
        assert exit_code(evaluate, "--run", run, "--label", label, *limits) == 0
        results = json.loads((run / "eval" / label / "results.json").read_text())
        assert results["prompt_date"] == date
        hashes.add(results["settings"]["prompts_hash"])
    assert len(hashes) == 1
    merged = str(tmp_path / "merged")
    export(["--run", str(run), "--save_merged", merged])
    for folder in (merged, run / "adapter"):
        assert Path(folder, "chat_template.jinja").read_text() == TEMPLATE
