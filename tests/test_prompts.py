"""Prompts: what the model sees, to the letter."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rewards import is_correct, load_rewards
from sologrpo.base.errors import InputError
from sologrpo.config.arguments import RunArguments
from sologrpo.config.parsing import parse_config
from sologrpo.data.dataset import (
    build_prompts,
    load_rows,
    load_worked_examples,
    prompt_format_of,
    render_prompt,
)
from sologrpo.model.loading import load_tokenizer
from sologrpo.prompts import (
    PROMPT_FORMATS,
    PlainText,
    Prompt,
    PromptFormat,
    WorkedExample,
)
from tiny import rows, write_rows

EXAMPLE = {"question": "What is 6 * 4?", "thinking": "6 * 4 = 24", "answer": "24"}
FORMATS = sorted(PROMPT_FORMATS)
GOLDEN = Path(__file__).parent / "golden" / "prompts"
MARKS = re.compile(r"</?\w+>|\\boxed")
# The most that a completion can earn; `completion` in `PROMPT_FORMATS` promises it.
MAXIMUM = {
    "strict_format": 1.0,
    "trailing_text": 0.0,
    "integer_answer": 1.0,
    "answer_correctness": 1.0,
    "gsm8k_weighted": 1.0,
}

Build = Callable[..., Prompt]


def write_examples(folder: Path) -> Path:
    file = folder / "examples.yaml"
    file.write_text(yaml.safe_dump([EXAMPLE]), encoding="utf-8")
    return file


def forms(prompt_format: PromptFormat) -> dict[str, Build]:
    """Every way in which a format can ask."""

    def builder(form: str) -> Build:
        def build(question: str, examples: Any = None, system_prompt: str | None = None) -> Prompt:
            given = {"worked_examples": examples, "system_prompt": system_prompt}
            own = {name: value for name, value in given.items() if value is not None}
            prompt: Prompt = getattr(replace(prompt_format, **own), form)(question)
            return prompt

        return build

    made = {"chat": builder("messages")} if prompt_format.chat else {}
    return made | ({"plain text": builder("text")} if prompt_format.plain_text else {})


def golden_text(prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase) -> str:
    """All prompts of a format, each under a line that says which it is."""
    examples = prompt_format.worked_examples or (WorkedExample(**EXAMPLE),)
    sections = []
    for form, build in forms(prompt_format).items():
        for title, shown in (("no worked example", ()), ("a worked example", examples)):
            text = render_prompt(build(" What is 7 + 5?\n", shown), tokenizer)
            sections.append(f"=== {form}, {title} ===\n{text}\n")
    return "".join(sections)


def plain_forms() -> list[tuple[PromptFormat, PlainText]]:
    return [(f, f.plain_text) for f in PROMPT_FORMATS.values() if f.plain_text is not None]


# --- what each format asks ----------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_are_the_golden_text(name: str, tiny_llama: Path) -> None:
    rendered = golden_text(PROMPT_FORMATS[name], load_tokenizer(str(tiny_llama)))
    assert rendered == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_every_format_has_one_golden_file() -> None:
    assert sorted(path.stem for path in GOLDEN.iterdir()) == FORMATS
    assert [prompt_format.name for prompt_format in PROMPT_FORMATS.values()] == [*PROMPT_FORMATS]


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name in FORMATS for form in forms(PROMPT_FORMATS[name])]
)
def test_instruction_and_completion_use_the_same_tags(name: str, form: str) -> None:
    prompt_format = PROMPT_FORMATS[name]
    plain_text = prompt_format.plain_text if form == "plain text" else None
    opened = plain_text.turn if plain_text else ""
    marks = MARKS.findall(opened + prompt_format.completion)
    assert marks or prompt_format.num_drawn_examples  # which show it
    assert MARKS.findall(prompt_format.system_prompt + prompt_format.suffix) == marks


@pytest.mark.parametrize("name", FORMATS)
def test_own_system_prompt_replaces_the_formats(name: str) -> None:
    prompt_format = PROMPT_FORMATS[name]
    for form, build in forms(prompt_format).items():
        replaced, without = build("2 + 2?", (), "Be brief."), build("2 + 2?", (), "")
        if form == "chat":
            assert replaced == [{"role": "system", "content": "Be brief."}, *without]
            assert [message["role"] for message in without] == ["user"]  # type: ignore[index]
        else:
            assert replaced == f"Be brief.\n\n{without}"
        own = build("2 + 2?", ())
        assert own == build("2 + 2?", (), prompt_format.system_prompt)


@pytest.mark.parametrize("name", FORMATS)
def test_own_worked_examples_replace_the_formats(name: str) -> None:
    prompt_format = PROMPT_FORMATS[name]
    for build in forms(prompt_format).values():
        assert build("2 + 2?") == build("2 + 2?", prompt_format.worked_examples)
        replaced = str(build("2 + 2?", [WorkedExample(**EXAMPLE)]))
        assert EXAMPLE["question"] in replaced
        for example in prompt_format.worked_examples:
            assert example.question not in replaced


@pytest.mark.parametrize("name", FORMATS)
def test_braces_are_text(name: str) -> None:
    question = r"What is \frac{6}{3} of {x}?"
    example = WorkedExample(question=question, thinking="{thinking} {0}", answer="{2}")
    for build in forms(PROMPT_FORMATS[name]).values():
        prompt = build(question, [example])
        text = prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)
        assert text.count(question) == 2
        assert "{thinking} {0}" in text
        assert "{2}" in text


def test_format_that_knows_only_chat() -> None:
    with pytest.raises(ValueError, match="xml has no plain-text form"):
        PROMPT_FORMATS["xml"].text("2 + 2?")


# --- what each format promises about completions ------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_worked_example_earns_the_most_of_the_formats_rewards(name: str) -> None:
    prompt_format = PROMPT_FORMATS[name]
    for example in (WorkedExample(**EXAMPLE), *prompt_format.worked_examples):
        text = prompt_format.render_example(example)
        for completion in (text, [{"role": "assistant", "content": text}]):
            scores = {
                reward.__name__: reward(
                    completions=[completion],
                    answer=[f"#### {example.answer}"],
                    prompt_format=[name],
                )
                for reward in load_rewards(prompt_format.rewards)
            }
            assert scores == {reward: [MAXIMUM[reward]] for reward in prompt_format.rewards}


@pytest.mark.parametrize("name", FORMATS)
def test_worked_example_is_judged_by_its_answer(name: str) -> None:
    text = PROMPT_FORMATS[name].render_example(WorkedExample(**EXAMPLE))
    assert is_correct(text, "#### 24", name)
    assert not is_correct(text, "#### 25", name)


@pytest.mark.parametrize(
    ("prompt_format", "plain_text"), plain_forms(), ids=lambda value: getattr(value, "name", "")
)
def test_stop_strings_cut_no_completion_short_and_leave_it_right(
    prompt_format: PromptFormat, plain_text: PlainText
) -> None:
    text = prompt_format.render_example(WorkedExample(**EXAMPLE))
    for stop in plain_text.stop_strings:
        assert stop not in text.removesuffix(stop)
        assert is_correct(text.removesuffix(stop) + stop, "#### 24", prompt_format.name)


@pytest.mark.parametrize(
    ("prompt_format", "plain_text"), plain_forms(), ids=lambda value: getattr(value, "name", "")
)
def test_base_model_that_copies_the_worked_example_is_stopped(
    prompt_format: PromptFormat, plain_text: PlainText
) -> None:
    """It continues with the next turn, which must not be taken for its answer."""
    example = WorkedExample(**EXAMPLE)
    prompt = forms(prompt_format)["plain text"]("What is 7 + 5?", [example])
    after_instruction = prompt[prompt.index(example.thinking) :]
    ends = [after_instruction.find(stop) for stop in plain_text.stop_strings]
    end = min(end for end in ends if end >= 0)
    assert end < after_instruction.index("What is 7 + 5?")


# --- the rewards of a config --------------------------------------------------------------------

MODEL = ["--model_name_or_path", "any", "--output_dir", "runs/any"]


def test_rewards_are_those_of_the_config_or_of_its_format() -> None:
    for name in FORMATS:
        run, _, _ = parse_config([*MODEL, "--prompt_format", name])
        assert run.rewards == list(PROMPT_FORMATS[name].rewards)
        run, _, _ = parse_config([*MODEL, "--prompt_format", name, "--rewards", "trailing_text"])
        assert run.rewards == ["trailing_text"]


# --- the gold -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_gold_never_enters_the_prompt(name: str, tmp_path: Path, tiny_llama: Path) -> None:
    secret = "918273645"
    problems = [row | {"answer": f"it is {secret}\n#### {secret}"} for row in rows(4)]
    file = write_rows(tmp_path / "train.jsonl", problems)
    run = RunArguments(prompt_format=name, worked_examples=[EXAMPLE])  # type: ignore[list-item]
    tokenizer = load_tokenizer(str(tiny_llama))
    for row in build_prompts(load_rows(str(file), "train"), run, tokenizer):
        text = render_prompt(row["prompt"], tokenizer)
        assert row["question"] in text
        assert secret not in text
        assert text.count("####") == PROMPT_FORMATS[name].completion.count("####")  # the example's


# --- worked examples that are drawn -------------------------------------------------------------


def solved(count: int) -> list[dict[str, str]]:
    return [
        {
            "question": f"Add {i} and {i}.",
            "answer": f"{i} + {i} = <<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}",
        }
        for i in range(count)
    ]


def test_lm_eval_asks_as_the_harness_does(tmp_path: Path) -> None:
    """Its gsm8k task: five rows, "Question: {question}\\nAnswer:", a space, the raw answer."""
    file = write_rows(tmp_path / "train.jsonl", solved(6))
    data = load_rows(str(file), "train")
    run = RunArguments(dataset_name=str(file))
    chat = build_prompts(data, run, None, ["lm_eval"])[2]["prompt"]
    others = [row for row in solved(6) if row["question"] != "Add 2 and 2."]
    asked = {f"Question: {row['question']}\nAnswer:": row["answer"] for row in others}
    contents = [message["content"] for message in chat[:-1]]
    assert dict(zip(contents[::2], contents[1::2], strict=True)) == asked
    assert chat[-1] == {"role": "user", "content": "Question: Add 2 and 2.\nAnswer:"}
    shown = replace(PROMPT_FORMATS["lm_eval"], worked_examples=(WorkedExample(**EXAMPLE),))
    assert shown.text("2 + 2?") == (
        "Question: What is 6 * 4?\nAnswer: 6 * 4 = 24\n#### 24\n\nQuestion: 2 + 2?\nAnswer:"
    )


def test_drawn_examples_differ_by_problem_and_are_the_same_every_time(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "train.jsonl", solved(30))
    data = load_rows(str(file), "train")
    run = RunArguments(dataset_name=str(file), prompt_format="lm_eval")
    prompts = build_prompts(data, run)["prompt"]
    assert prompts == build_prompts(data, run)["prompt"]
    drawn = {tuple(message["content"] for message in prompt[1:-1:2]) for prompt in prompts}
    assert len(drawn) > 25
    for row, prompt in zip(data, prompts, strict=True):
        assert sum(row["question"] in message["content"] for message in prompt) == 1


def test_fewer_rows_than_drawn_examples(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "train.jsonl", solved(2))
    prompts = build_prompts(
        load_rows(str(file), "train"), RunArguments(dataset_name=str(file)), None, ["lm_eval"]
    )
    assert [len(prompt) for prompt in prompts["prompt"]] == [3, 3]


def test_a_runs_examples_replace_drawn_ones_only_in_its_own_format(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "train.jsonl", solved(9))
    spec: Any = {"dataset_name": str(file), "worked_examples": [EXAMPLE]}
    trained = prompt_format_of(RunArguments(prompt_format="lm_eval", **spec))
    assert (len(trained.worked_examples), trained.num_drawn_examples) == (1, 0)
    other = prompt_format_of(RunArguments(prompt_format="xml", **spec), "lm_eval")
    assert (len(other.worked_examples), other.num_drawn_examples) == (0, 5)


# --- several formats in one run -----------------------------------------------------------------


def test_formats_take_turns(tmp_path: Path, tiny_llama: Path) -> None:
    run = RunArguments(prompt_formats=["xml", "boxed", "boxed"], worked_examples=[EXAMPLE])  # type: ignore[list-item]
    data = build_prompts(
        Dataset.from_list(rows(6)), run, load_tokenizer(str(tiny_llama)), run.prompt_formats or ()
    )
    assert data["prompt_format"] == ["xml", "boxed", "boxed"] * 2
    for name, row in zip(data["prompt_format"], data, strict=True):
        example = PROMPT_FORMATS[name].render_example(WorkedExample(**EXAMPLE))
        assert example in render_prompt(row["prompt"], load_tokenizer(str(tiny_llama)))


def test_a_system_prompt_describes_only_the_runs_own_format() -> None:
    run = RunArguments(prompt_format="xml", prompt_formats=["xml", "boxed"], system_prompt="Hm.")
    assert prompt_format_of(run, "xml").system_prompt == "Hm."
    assert prompt_format_of(run, "boxed").system_prompt == ""


def test_formats_that_end_in_different_ways_cannot_share_a_batch(tiny_llama: Path) -> None:
    run = RunArguments(prompt_formats=["xml", "r1_zero"])
    with pytest.raises(InputError, match="xml and r1_zero cannot share a batch"):
        build_prompts(
            Dataset.from_list(rows(2)),
            run,
            load_tokenizer(str(tiny_llama)),
            run.prompt_formats or (),
        )


def test_rewards_of_several_formats() -> None:
    run, _, _ = parse_config([*MODEL, "--prompt_formats", "xml", "boxed"])
    assert run.rewards == ["strict_format", "answer_correctness"]
    with pytest.raises(InputError, match="'trailing_text' knows one prompt format only"):
        parse_config([*MODEL, "--prompt_formats", "xml", "boxed", "--rewards", "trailing_text"])
    with pytest.raises(InputError, match=r"prompt_formats.*'xlm'"):
        parse_config([*MODEL, "--prompt_formats", "xlm"])


# --- worked examples from a config --------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_worked_examples_of_a_config_are_shown_in_the_format(
    name: str, tmp_path: Path, tiny_llama: Path
) -> None:
    file = write_examples(tmp_path)
    tokenizer = load_tokenizer(str(tiny_llama))
    completion = PROMPT_FORMATS[name].render_example(WorkedExample(**EXAMPLE))
    for spec in ([EXAMPLE], [str(file)]):
        run = RunArguments(prompt_format=name, worked_examples=spec)  # type: ignore[arg-type]
        built = build_prompts(Dataset.from_list(rows(1)), run, tokenizer)
        text = render_prompt(built[0]["prompt"], tokenizer)
        assert text.count(EXAMPLE["question"]) == 1
        assert text.count(completion) == 1


def test_worked_examples_from_list_and_file_agree(tmp_path: Path) -> None:
    file = write_examples(tmp_path)
    for spec in ([EXAMPLE], [EXAMPLE | {"answer": 24}], [str(file)], str(file)):
        assert load_worked_examples(spec) == [WorkedExample(**EXAMPLE)]
    assert load_worked_examples(None) == []


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (["nowhere.yaml"], "no file nowhere.yaml"),
        (["Question: what is 2 + 2?"], "no file Question: what is 2 + 2?"),
        (["a.yaml", "b.yaml"], "worked_examples: 0: 'a.yaml'; expected key: value pairs"),
        ([EXAMPLE, {"question": "2 + 2?", "answer": "4"}], "worked_examples: 1.thinking: missing"),
        ([EXAMPLE | {"anwser": "24"}], "0.anwser: unknown key: give a list of {question, thinking"),
        ([EXAMPLE | {"answer": True}], "0.answer: True; expected a valid string"),
        (EXAMPLE, "expected a valid list"),
        (5, "worked_examples: 5; expected a valid list"),
    ],
)
def test_bad_worked_examples(spec: list[object], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        load_worked_examples(spec)
