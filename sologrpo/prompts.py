"""Prompt formats: from a question to the prompt that the model sees.

A format is one `PromptFormat` in `PROMPT_FORMATS`. Its prompts are chat messages, which the
tokenizer's chat template renders, or plain text, or either. The gold answer never enters a prompt.

The judge and the rewards read from a format how it marks an answer. Their processes import this
module, so it imports only the standard library.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

Message = dict[str, str]
Prompt = list[Message] | str

# What an answer follows: an answer element, a box, or the mark of an answer line.
OPEN, BOX, MARK = "<answer>", "\\boxed", "####"
CLOSE = "</answer>"


@dataclass(frozen=True)
class WorkedExample:
    """A solved problem shown before the question, in the format that the model should use.

    In YAML, `answer: 34` is a number.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "str_strip_whitespace": True,
        "strict": False,
        "coerce_numbers_to_str": True,
    }

    question: str
    thinking: str
    answer: str


@dataclass(frozen=True)
class PlainText:
    """The plain-text form of a format: no chat template, no roles.

    Attributes:
        turn: a question up to where the model continues, with the field `{question}`. It does not
            end in a space: in most vocabularies the space belongs to the word that follows.
        stop_strings: what ends a completion, besides the end-of-text token, which base models often
            fail to write. The string stays in the completion, so that a reward can see it.
    """

    turn: str
    stop_strings: tuple[str, ...]


@dataclass(frozen=True)
class PromptFormat:
    """A prompt, and the format of a completion.

    Attributes:
        name: the value of `prompt_format` in a config, and in the judge (`rewards.grading`).
        completion: a well-formed completion, with the fields `{thinking}` and `{answer}`. If the
            prompt opens the reasoning, it starts inside.
        rewards: the rewards of a run whose config names none. `completion` earns the most of each.
        system_prompt: the system message of a chat, the first paragraph of plain text; empty for
            none. Its tags are those of `completion`.
        prefix: put before every question, including those of worked examples; `suffix` likewise.
        num_drawn_examples: if above 0, this many training rows are drawn for each problem and
            shown as its worked examples.
        chat: use chat messages if the model has a chat template.
        plain_text: the form without a chat template; None if the format needs one.
    """

    name: str
    completion: str
    rewards: tuple[str, ...]
    system_prompt: str = ""
    prefix: str = ""
    suffix: str = ""
    worked_examples: tuple[WorkedExample, ...] = ()
    num_drawn_examples: int = 0
    chat: bool = True
    plain_text: PlainText | None = None

    @property
    def mark(self) -> str:
        """Name what an answer follows in a completion: `OPEN`, `BOX` or `MARK`."""
        return next(mark for mark in (OPEN, BOX, MARK) if mark in self.completion)

    @property
    def opens_reasoning(self) -> bool:
        """Tell whether the prompt ends in `<think>`, so that a completion begins with reasoning."""
        return "</think>" in self.completion and "<think>" not in self.completion

    def messages(self, question: str) -> list[Message]:
        """Build the chat prompt: system, each worked example as one exchange, then the question.

        >>> [message["role"] for message in PROMPT_FORMATS["boxed"].messages("What is 7 + 5?")]
        ['user', 'assistant', 'user']
        """
        system = {"role": "system", "content": self.system_prompt}
        messages = [system] if self.system_prompt else []
        for example in self.worked_examples:
            messages.append({"role": "user", "content": self.ask(example.question)})
            messages.append({"role": "assistant", "content": self.render_example(example)})
        messages.append({"role": "user", "content": self.ask(question.strip())})
        return messages

    def text(self, question: str) -> str:
        """Build the plain-text prompt: instruction, worked examples, question, as paragraphs.

        >>> from dataclasses import replace
        >>> brief = replace(PROMPT_FORMATS["r1_zero"], system_prompt="Think first.")
        >>> print(brief.text("What is 7 + 5?"))
        Think first.
        <BLANKLINE>
        User: What is 7 + 5?
        Assistant: <think>
        """
        if self.plain_text is None:
            raise ValueError(f"prompt format {self.name} has no plain-text form")
        turn = self.plain_text.turn
        paragraphs = [self.system_prompt]
        for example in self.worked_examples:
            asked = turn.format(question=self.ask(example.question))
            paragraphs.append(f"{asked} {self.render_example(example)}")
        paragraphs.append(turn.format(question=self.ask(question.strip())))
        return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)

    def ask(self, question: str) -> str:
        """Write a question as the prompt asks it."""
        return self.prefix + question + self.suffix

    def render_example(self, example: WorkedExample) -> str:
        """Render a worked example as the completion that would earn every reward."""
        return self.completion.format(thinking=example.thinking, answer=example.answer)


XML = PromptFormat(
    name="xml",
    system_prompt=(
        "Solve the problem step by step. Respond in exactly this format, with no text outside "
        "of the tags:\n"
        "<thinking>\nyour reasoning\n</thinking>\n<answer>\nthe final number\n</answer>"
    ),
    completion="<thinking>\n{thinking}\n</thinking>\n<answer>\n{answer}\n</answer>",
    rewards=("strict_format", "trailing_text", "integer_answer", "answer_correctness"),
)

# DeepSeek-R1-Zero's prompt in the wording of the GRPO recipes after CS336. Always plain text: it is
# made for base models, and a chat template would put a turn before "<think>".
R1_ZERO = PromptFormat(
    name="r1_zero",
    system_prompt=(
        "A conversation between User and Assistant. The User asks a question, and the Assistant "
        "solves it. The Assistant first thinks about the reasoning process in the mind and then "
        "provides the User with the answer. The reasoning process is enclosed within <think> "
        "</think> and answer is enclosed within <answer> </answer> tags, respectively."
    ),
    completion="{thinking} </think> <answer> {answer} </answer>",
    rewards=("gsm8k_weighted",),
    chat=False,
    plain_text=PlainText(
        turn="User: {question}\nAssistant: <think>",
        stop_strings=("</answer>", "\n\n\n"),
    ),
)

# A base model learns from the worked example what a box is and that the answer ends with it. Then
# it continues with another question, so in plain text a completion stops at the next "Question:".
BOXED = PromptFormat(
    name="boxed",
    suffix=" Provide a numerical answer without units, written inside \\boxed{}.",
    completion="{thinking}\nThe answer is \\boxed{{{answer}}}.",
    rewards=("answer_correctness",),
    worked_examples=(
        WorkedExample(
            question="A ticket costs 7 euros and a drink costs 3 euros. How many euros do 4 "
            "tickets and 2 drinks cost?",
            thinking="The tickets cost 4 * 7 = 28 euros and the drinks cost 2 * 3 = 6 euros. "
            "Together that is 28 + 6 = 34 euros.",
            answer="34",
        ),
    ),
    plain_text=PlainText(
        turn="Question: {question}\nAnswer:",
        stop_strings=("\nQuestion:", "\n\n\n"),
    ),
)

# The gsm8k task of lm-evaluation-harness (0.4.13), which published scores come from. Nothing tells
# the model what to write but the examples.
LM_EVAL = PromptFormat(
    name="lm_eval",
    prefix="Question: ",
    suffix="\nAnswer:",
    completion="{thinking}\n#### {answer}",
    rewards=("strict_format", "answer_correctness"),
    num_drawn_examples=5,
    plain_text=PlainText(turn="{question}", stop_strings=("Question:", "</s>", "<|im_end|>")),
)

PROMPT_FORMATS: dict[str, PromptFormat] = {
    prompt_format.name: prompt_format for prompt_format in (XML, R1_ZERO, BOXED, LM_EVAL)
}
