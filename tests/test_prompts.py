"""Prompts: what the model sees, to the letter."""

import re
from pathlib import Path

import pytest
import yaml

from sologrpo.config import RunArguments
from sologrpo.data import build_prompts, load_rows, render_prompt
from sologrpo.errors import InputError
from sologrpo.model import load_tokenizer
from sologrpo.prompts import PROMPT_FORMATS, WorkedExample, load_worked_examples
from tiny import rows, write_rows

EXAMPLE = {"question": "What is 6 * 4?", "thinking": "6 * 4 = 24", "answer": "24"}

GOLDEN_XML = """\
<|im_start|>system
Solve the problem step by step. Respond in exactly this format, with no text outside of the tags:
<thinking>
your reasoning
</thinking>
<answer>
the final number
</answer><|im_end|>
<|im_start|>user
What is 6 * 4?<|im_end|>
<|im_start|>assistant
<thinking>
6 * 4 = 24
</thinking>
<answer>
24
</answer><|im_end|>
<|im_start|>user
What is 7 + 5?<|im_end|>
<|im_start|>assistant
"""


def test_xml_prompt_is_the_golden_text(tiny_llama: Path) -> None:
    prompt = PROMPT_FORMATS["xml"].messages(" What is 7 + 5?\n", [WorkedExample(**EXAMPLE)])
    assert render_prompt(prompt, load_tokenizer(str(tiny_llama))) == GOLDEN_XML


def test_own_system_prompt_replaces_the_formats() -> None:
    messages = PROMPT_FORMATS["xml"].messages("2 + 2?", system_prompt="Be brief.")
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert [message["role"] for message in messages] == ["system", "user"]


@pytest.mark.parametrize("name", sorted(PROMPT_FORMATS))
def test_instruction_and_completion_use_the_same_tags(name: str) -> None:
    prompt_format = PROMPT_FORMATS[name]
    tags = re.findall(r"</?\w+>", prompt_format.completion)
    assert tags
    assert re.findall(r"</?\w+>", prompt_format.system_prompt) == tags


@pytest.mark.parametrize("name", sorted(PROMPT_FORMATS))
def test_worked_example_is_judged_right_in_its_own_format(name: str) -> None:
    from rewards.grading import is_correct

    text = PROMPT_FORMATS[name].render_example(WorkedExample(**EXAMPLE))
    assert is_correct(text, "#### 24", name)
    assert not is_correct(text, "#### 25", name)


def test_xml_worked_example_earns_the_strict_format() -> None:
    from rewards.format import has_strict_format

    assert has_strict_format(PROMPT_FORMATS["xml"].render_example(WorkedExample(**EXAMPLE)))


def test_gold_never_enters_the_prompt(tmp_path: Path, tiny_llama: Path) -> None:
    secret = "918273645"
    problems = [row | {"answer": f"it is {secret}\n#### {secret}"} for row in rows(4)]
    file = write_rows(tmp_path / "train.jsonl", problems)
    built = build_prompts(load_rows(str(file), "train"), RunArguments(worked_examples=[EXAMPLE]))
    tokenizer = load_tokenizer(str(tiny_llama))
    for row in built:
        text = render_prompt(row["prompt"], tokenizer)
        assert row["question"] in text
        assert secret not in text
        assert "####" not in text


def test_worked_examples_from_list_and_file_agree(tmp_path: Path) -> None:
    file = tmp_path / "examples.yaml"
    file.write_text(yaml.safe_dump([EXAMPLE]), encoding="utf-8")
    expected = [WorkedExample(**EXAMPLE)]
    assert load_worked_examples([EXAMPLE]) == expected
    assert load_worked_examples([str(file)]) == expected
    assert load_worked_examples(str(file)) == expected
    assert load_worked_examples(None) == []


def test_numbers_in_a_worked_example_become_text() -> None:
    (example,) = load_worked_examples([EXAMPLE | {"answer": 24}])
    assert example.answer == "24"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (["nowhere.yaml"], "no file nowhere.yaml"),
        ([EXAMPLE, {"question": "2 + 2?", "answer": "4"}], "worked example 2"),
        ([EXAMPLE | {"anwser": "24"}], "question, thinking, answer"),
    ],
)
def test_bad_worked_examples(spec: list[object], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        load_worked_examples(spec)


def test_tokenizer_without_chat_template(tiny_llama: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_llama))
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template: use the instruct version"):
        render_prompt([{"role": "user", "content": "2 + 2?"}], tokenizer)
