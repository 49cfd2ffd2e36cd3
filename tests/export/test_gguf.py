"""GGUF without llama.cpp: the prompt of the training as a template of Ollama's."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sologrpo.base.errors import InputError
from sologrpo.export.gguf import PromptTemplate, write_modelfile
from sologrpo.model.loading import load_tokenizer

MESSAGES = [
    {"role": "system", "content": 'Say {{ "x" }}, or """.'},
    {"role": "user", "content": "What is 7 + 5?"},
]
ROW = {"prompt": MESSAGES, "question": " What is 7 + 5?\n"}


def test_template_surrounds_the_question(tiny_llama: Path) -> None:
    template = PromptTemplate.of(ROW, load_tokenizer(str(tiny_llama)), adds_opening=False)
    assert template.before.endswith("<|im_end|>\n<|im_start|>user\n")
    assert template.after == "<|im_end|>\n<|im_start|>assistant\n"
    assert template.text(" 1 + 1?") == f"{template.before}1 + 1?{template.after}"


def test_opening_that_llama_adds_itself_is_left_out(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama, bos_token="<|im_start|>")
    kept, left_out = (PromptTemplate.of(ROW, tokenizer, adds) for adds in (False, True))
    assert kept.before == "<|im_start|>" + left_out.before


def test_chat_template_that_changes_the_question_is_refused(tiny_llama: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_llama))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    with pytest.raises(InputError, match="changes the question"):
        PromptTemplate.of(ROW, tokenizer, adds_opening=False)


def test_modelfile(tmp_path: Path) -> None:
    template = PromptTemplate('Say {{ "x" }}, or """.\n', '\nAnswer: "')
    write_modelfile(tmp_path / "model-f16.gguf", template, ["<|im_end|>", "\n\n"], 48)
    quote = r'{{ "\"" }}'
    assert (tmp_path / "Modelfile").read_text() == (
        "# ollama create NAME -f Modelfile\n"
        "FROM ./model-f16.gguf\n"
        'TEMPLATE """Say {{ "{{" }} "x" }}, or ' + quote * 2 + '".\n'
        "{{ .Prompt }}\n"
        f'Answer: {quote}"""\n'
        "PARAMETER temperature 0\n"
        "PARAMETER repeat_penalty 1\n"
        "PARAMETER num_predict 48\n"
        'PARAMETER stop "<|im_end|>"\n'
        'PARAMETER stop "\n\n"\n'
    )
