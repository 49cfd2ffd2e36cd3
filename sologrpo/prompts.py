"""Prompt formats: how a question becomes what the model sees.

A format is one `PromptFormat` in `PROMPT_FORMATS`. The gold answer never enters a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sologrpo.errors import InputError

Message = dict[str, str]


@dataclass(frozen=True)
class WorkedExample:
    """A solved problem shown before the question, in the format the model shall use."""

    question: str
    thinking: str
    answer: str


@dataclass(frozen=True)
class PromptFormat:
    """How to ask, and what a completion looks like.

    Attributes:
        name: the value of `prompt_format` in a config; also what the judge in
            `rewards.grading` goes by.
        system_prompt: the instruction. Its tags are those of `completion`.
        completion: a well-formed completion, with the fields `{thinking}` and `{answer}`.
    """

    name: str
    system_prompt: str
    completion: str

    def messages(
        self,
        question: str,
        worked_examples: Sequence[WorkedExample] = (),
        system_prompt: str | None = None,
    ) -> list[Message]:
        """Build the chat prompt: system, each worked example as one exchange, then the question."""
        messages = [{"role": "system", "content": system_prompt or self.system_prompt}]
        for example in worked_examples:
            messages.append({"role": "user", "content": example.question})
            messages.append({"role": "assistant", "content": self.render_example(example)})
        messages.append({"role": "user", "content": question.strip()})
        return messages

    def render_example(self, example: WorkedExample) -> str:
        """Write a worked example as the completion that would earn every reward."""
        return self.completion.format(thinking=example.thinking, answer=example.answer)


XML = PromptFormat(
    name="xml",
    system_prompt=(
        "Solve the problem step by step. Respond in exactly this format, with no text outside "
        "of the tags:\n"
        "<thinking>\nyour reasoning\n</thinking>\n<answer>\nthe final number\n</answer>"
    ),
    completion="<thinking>\n{thinking}\n</thinking>\n<answer>\n{answer}\n</answer>",
)

PROMPT_FORMATS: dict[str, PromptFormat] = {format.name: format for format in (XML,)}


def load_worked_examples(spec: Sequence[Any] | str | None) -> list[WorkedExample]:
    """Read worked examples from the config's list, or from the YAML file that it names.

    Raises:
        InputError: if the file is missing or an example lacks a field.
    """
    if not spec:
        return []
    if isinstance(spec, str) or isinstance(spec[0], str):
        path = Path(spec if isinstance(spec, str) else spec[0])
        if not path.is_file():
            raise InputError(f"worked_examples: no file {path}")
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [_worked_example(i, fields) for i, fields in enumerate(spec or [], start=1)]


def _worked_example(number: int, fields: Any) -> WorkedExample:
    wanted = ("question", "thinking", "answer")
    if not isinstance(fields, dict) or sorted(fields) != sorted(wanted):
        raise InputError(f"worked example {number} must have exactly: {', '.join(wanted)}")
    return WorkedExample(**{name: str(fields[name]).strip() for name in wanted})
