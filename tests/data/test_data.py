"""Data: every source gives the same rows, and what is wrong is named by file and row."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tokenizers import pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer

from digits import digit_share
from sologrpo.base.errors import InputError
from sologrpo.config.arguments import RunArguments
from sologrpo.data.dataset import (
    RESERVED,
    build_prompts,
    load_rows,
    load_test_prompts,
    load_train_and_validation,
    prompt_lengths,
    prompt_token_ids,
    render_prompt,
    stop_strings,
)
from sologrpo.model.loading import load_tokenizer
from sologrpo.prompts import PROMPT_FORMATS, Prompt
from tiny import build_model, build_tokenizer, rows, write_rows


def run_on(path: Path, **settings: object) -> RunArguments:
    return RunArguments(dataset_name=str(path), **settings)


def test_every_source_gives_the_same_rows(tmp_path: Path) -> None:
    problems = rows(6)
    jsonl = write_rows(tmp_path / "folder" / "train.jsonl", problems)
    parquet = tmp_path / "rows.parquet"
    Dataset.from_list(problems).to_parquet(str(parquet))
    sharded = tmp_path / "hub"
    sharded.mkdir()
    for i in range(2):
        shard = Dataset.from_list(problems[3 * i : 3 * i + 3])
        shard.to_parquet(str(sharded / f"train-0000{i}-of-00002.parquet"))
    for source in (jsonl.parent, jsonl, parquet, sharded):
        assert load_rows(str(source), "train").to_list() == problems


def test_folder_gives_the_split_asked_for(tiny_data: Path) -> None:
    train, test = load_rows(str(tiny_data), "train"), load_rows(str(tiny_data), "test")
    assert train["question"] == [row["question"] for row in rows(12)]
    assert test["question"] == [row["question"] for row in rows(6, offset=12)]


ADVICE = 'write {"question": …, "answer": "… #### 42"}: docs/configuration.md, Data'
BAD_FILES = [  # name, content, and what the message says
    ("a.jsonl", [{"answer": "12"}], "a.jsonl (train), row 3: answer: gold answer has no '####'"),
    ("a.jsonl", [{"answer": "12"}], ADVICE),
    ("a.jsonl", [{"answer": "#### twelve"}], "row 3: answer: gold answer must be an integer, not"),
    ("a.jsonl", [{"answer": "#### 1.5"}], "row 3: answer: gold answer must be an integer, not"),
    ("a.jsonl", [{"answer": None}], "row 3: answer: None; expected a valid string"),
    ("a.jsonl", [{"question": None}], "row 3: question: None; expected a valid string"),
    ("a.jsonl", [{"kind": ["add", "share"]}], "row 3: kind: ['add', 'share']; expected"),
    ("a.jsonl", [{"kind": 3}], "row 3: kind: 3; expected a valid string"),
    *(("a.jsonl", [{name: "x"}], f"name of column '{name}'") for name in RESERVED),
    ("a.jsonl", '{"problem": "2 + 2?", "answer": "#### 4"}', f"row 1: question: missing: {ADVICE}"),
    (
        "a.jsonl",
        '{"question": "a", "question": "b"}',
        "line 1 is not valid JSON: the key 'question'",
    ),
    ("a.jsonl", "null", f"a.jsonl, line 1: None; expected key: value pairs: {ADVICE}"),
    ("a.json", "[[1]]", f"a.json: 0: [1]; expected key: value pairs: {ADVICE}"),
    ("a.jsonl", [{"id": 1}, {"id": "b"}], "a.jsonl: column 'id': "),
    ("a.jsonl", '{"question": "\\ud800", "answer": "#### 4"}', "a.jsonl: column 'question': "),
    ("rows.csv", "question,answer", "rows.csv: expected one of .jsonl, .json, .parquet"),
    ("a.jsonl", "{ not json", "a.jsonl, line 1"),
    ("a.jsonl", "", "a.jsonl is empty"),
    ("a.json", "[]", "a.json (train) has no rows"),
    ("a.parquet", "PAR1 no table", "cannot read"),
]


@pytest.mark.parametrize(("name", "content", "says"), BAD_FILES)
def test_bad_file_is_named_with_its_row(
    name: str, content: str | list[dict[str, Any]], says: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    if isinstance(content, str):
        file.write_text(content + "\n", encoding="utf-8")
    else:  # rows of which the last two are bad
        write_rows(file, [*rows(2), rows(3)[2] | content[0], rows(1)[0] | content[-1]])
    with pytest.raises(InputError, match=re.escape(says)):
        load_rows(str(file), "train")


@pytest.mark.parametrize("position", [0, 4, 40, 2000, -400, -8])
def test_a_damaged_table_is_refused(tmp_path: Path, position: int) -> None:
    path = tmp_path / "train.parquet"
    Dataset.from_list(rows(400)).to_parquet(str(path))
    content = bytearray(path.read_bytes())
    for i in range(position % len(content), len(content))[:300]:
        content[i] = 0
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"train\.parquet"):
        load_rows(str(tmp_path), "train")


@pytest.mark.parametrize("name", ["a[b]", "kind=3", "x::y", "~root"])
def test_a_folder_of_any_name_is_read(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    Dataset.from_list(rows(3)).to_parquet("table")
    Path("table").rename(f"{name}/train-00000-of-00001.parquet")
    assert load_rows(name, "train").to_list() == rows(3)


@pytest.mark.parametrize("split", ["../train", "/etc/passwd", "*", "", "a\0b", "t" * 300])
def test_a_split_is_a_name(tiny_data: Path, split: str) -> None:
    with pytest.raises(InputError, match="split"):
        load_rows(str(tiny_data), split)


@pytest.mark.parametrize("name", ["data/mine/train", "../no/such", "/no/such", "a b"])
def test_a_name_that_the_hub_cannot_have_is_refused_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sologrpo.data.dataset.load_dataset", pytest.fail)
    with pytest.raises(InputError, match=r"there is no .* and a name on the Hub is USER/NAME"):
        load_rows(name, "train")


def test_folder_without_the_split(tiny_data: Path) -> None:
    with pytest.raises(InputError, match=r"has no dev\.jsonl or dev\.parquet"):
        load_rows(str(tiny_data), "dev")


def test_unknown_name_without_a_hub_says_what_would_work() -> None:
    with pytest.raises(InputError, match=r"nobody/nothing.*train\.jsonl works without a hub"):
        load_rows("nobody/nothing", "train")


def test_validation_is_held_out_and_seeded(tiny_llama: Path, tiny_data: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_llama))
    run = run_on(tiny_data, num_validation_examples=4)
    train, validation = load_train_and_validation(run, tokenizer, seed=1)
    assert validation is not None
    assert len(validation) == 4
    assert not set(train["question"]) & set(validation["question"])
    everything = {row["question"] for row in rows(12)}
    assert set(train["question"]) | set(validation["question"]) == everything

    again, same = load_train_and_validation(run, tokenizer, seed=1)
    assert same is not None
    assert same["question"] == validation["question"]
    assert again["question"] == train["question"]
    _, other = load_train_and_validation(run, tokenizer, seed=2)
    assert other is not None
    assert other["question"] != validation["question"]

    run.max_train_examples = 3  # fewer training rows do not change the validation rows
    fewer, same = load_train_and_validation(run, tokenizer, seed=1)
    assert same is not None
    assert same["question"] == validation["question"]
    assert fewer["question"] == train["question"][:3]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_validation_examples": 12}, "num_validation_examples 12 leaves nothing of the 12"),
        ({"max_prompt_tokens": 1}, "all prompts are longer than max_prompt_tokens 1"),
    ],
)
def test_settings_that_leave_no_rows(
    settings: dict[str, int], says: str, tiny_llama: Path, tiny_data: Path
) -> None:
    with pytest.raises(InputError, match=says):
        load_train_and_validation(
            run_on(tiny_data, **settings), load_tokenizer(str(tiny_llama)), seed=0
        )


def test_long_prompts_are_left_out_and_reported(
    tmp_path: Path, tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(str(tiny_llama))
    problems = rows(4)
    problems[1]["question"] += " Think hard." * 50
    file = write_rows(tmp_path / "train.jsonl", problems)
    whole, _ = load_train_and_validation(run_on(file), tokenizer, seed=0)
    lengths = sorted(prompt_lengths(whole, tokenizer))
    with caplog.at_level(logging.WARNING, logger="sologrpo"):
        kept, _ = load_train_and_validation(
            run_on(file, max_prompt_tokens=lengths[-2]), tokenizer, seed=0
        )
    assert sorted(kept["question"]) == sorted(p["question"] for p in problems if p != problems[1])
    assert max(prompt_lengths(kept, tokenizer)) == lengths[-2]
    assert (
        f"left out 1 of 4 rows: prompt longer than max_prompt_tokens {lengths[-2]}" in caplog.text
    )
    assert f"longest: {lengths[-1]}" in caplog.text


def test_limit_of_test_problems_is_a_seeded_choice(tiny_data: Path) -> None:
    run = run_on(tiny_data)
    everything = load_test_prompts(run)["question"]
    chosen = load_test_prompts(run, limit=3, seed=5)["question"]
    assert len(set(chosen)) == 3
    assert set(chosen) < set(everything)
    assert load_test_prompts(run, limit=3, seed=5)["question"] == chosen
    assert load_test_prompts(run, limit=100)["question"] == everything
    assert any(load_test_prompts(run, limit=3, seed=s)["question"] != chosen for s in range(3))


# --- prompts as the model is fed them -----------------------------------------------------------


def base_tokenizer(around_text: str = "$A") -> PreTrainedTokenizerBase:
    """No chat template; `around_text` says which special tokens every text gets."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    special = [t for t in tokenizer.all_special_tokens if t in around_text]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=around_text,
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in special],
    )
    return tokenizer


def llama_3_tokenizer() -> PreTrainedTokenizerBase:
    """Puts a token before every text."""
    return base_tokenizer("<|endoftext|> $A")


def llama_2_tokenizer() -> PreTrainedTokenizerBase:
    """Marks the first word of a text too, but not where a special token is written before it."""
    tokenizer = llama_3_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="Ġ", prepend_scheme="first"
    )
    return tokenizer


TOKENIZERS = {
    "chat": build_tokenizer,
    "base": base_tokenizer,
    "llama 3": llama_3_tokenizer,
    "llama 2": llama_2_tokenizer,
}
ASKED = [
    (tokenizer, prompt_format.name)
    for tokenizer in TOKENIZERS
    for prompt_format in PROMPT_FORMATS.values()
    if tokenizer == "chat" or prompt_format.plain_text
]


def prompts_of(name: str, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    run = RunArguments(prompt_format=name, dataset_name="quickstart")
    return list(build_prompts(Dataset.from_list(rows(3)), run, tokenizer)["prompt"])


def trl_token_ids(
    prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> list[list[int]]:
    """The token ids that TRL itself makes in training."""
    trainer = GRPOTrainer(
        model=build_model("llama", tokenizer),
        reward_funcs=digit_share,
        args=GRPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to="none"),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )
    ids: list[list[int]] = trainer._tokenize_prompts(prompts)[0]
    return ids


@pytest.mark.parametrize(("tokenizer_name", "prompt_format"), ASKED)
def test_token_ids_are_those_of_trl(
    tokenizer_name: str, prompt_format: str, tmp_path: Path
) -> None:
    tokenizer = TOKENIZERS[tokenizer_name]()
    prompts = prompts_of(prompt_format, tokenizer)
    ids = prompt_token_ids(prompts, tokenizer)
    assert ids == trl_token_ids(prompts, tokenizer, tmp_path)
    lengths = prompt_lengths(Dataset.from_dict({"prompt": prompts}), tokenizer)
    assert lengths == [len(row) for row in ids]


# Not with the tokens of Llama 2: a text with its opening token written out is another one there.
@pytest.mark.parametrize(
    ("tokenizer_name", "prompt_format"), [case for case in ASKED if case[0] != "llama 2"]
)
def test_rendered_prompt_has_the_same_tokens(tokenizer_name: str, prompt_format: str) -> None:
    tokenizer = TOKENIZERS[tokenizer_name]()
    prompts = prompts_of(prompt_format, tokenizer)
    texts = [render_prompt(prompt, tokenizer) for prompt in prompts]
    again = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert again == prompt_token_ids(prompts, tokenizer)


def test_tokenizer_that_ends_every_text_is_refused() -> None:
    with pytest.raises(InputError, match=r"ends every text with <\|im_end\|>.*add_eos_token"):
        prompt_token_ids(["2 + 2?"], base_tokenizer("$A <|im_end|>"))


@pytest.mark.parametrize(
    ("prompt_format", "tokenizer_name", "chat"),
    [
        ("xml", "chat", True),
        ("r1_zero", "chat", False),
        ("r1_zero", "base", False),
        ("boxed", "chat", True),
        ("boxed", "base", False),
    ],
)
def test_chat_template_decides_how_a_format_asks(
    prompt_format: str, tokenizer_name: str, chat: bool
) -> None:
    run = RunArguments(prompt_format=prompt_format)
    built = build_prompts(Dataset.from_list(rows(1)), run, TOKENIZERS[tokenizer_name]())
    assert isinstance(built[0]["prompt"], list if chat else str)
    plain_text = PROMPT_FORMATS[prompt_format].plain_text
    expected = [] if chat or plain_text is None else list(plain_text.stop_strings)
    assert stop_strings(built) == expected
    assert bool(expected) is not chat


def test_empty_list_asks_for_no_worked_example() -> None:
    run = RunArguments(prompt_format="boxed", worked_examples=[])
    built = build_prompts(Dataset.from_list(rows(1)), run)
    assert [message["role"] for message in built[0]["prompt"]] == ["user"]


def test_prompts_from_elsewhere_have_no_stop_strings() -> None:
    assert stop_strings(Dataset.from_list([{"prompt": "2 + 2 ="}])) == []


def test_training_and_test_rows_are_asked_alike(tiny_data: Path) -> None:
    tokenizer, run = base_tokenizer(), run_on(tiny_data, prompt_format="boxed")
    train, _ = load_train_and_validation(run, tokenizer, seed=0)
    test = load_test_prompts(run, tokenizer=tokenizer)
    for row in (train[0], test[0]):
        text = PROMPT_FORMATS["boxed"].text(row["question"])
        assert row["prompt"] == text
        assert row["prompt_format"] == "boxed"


def test_format_that_needs_a_chat_template(tiny_data: Path) -> None:
    says = (
        r"no chat template: use prompt_format r1_zero or boxed or lm_eval, or the instruct version"
    )
    run = run_on(tiny_data, prompt_format="xml")
    with pytest.raises(InputError, match=says):
        load_train_and_validation(run, base_tokenizer(), seed=0)


def test_an_empty_chat_template_is_refused(tiny_data: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{# nothing #}"
    prompts = load_test_prompts(run_on(tiny_data), tokenizer=tokenizer)["prompt"]
    with pytest.raises(InputError, match="makes an empty prompt"):
        prompt_token_ids(prompts, tokenizer)
