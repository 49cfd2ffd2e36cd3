"""Evaluating a model: its records and results, and `--resume` after a crash."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.base.errors import InputError
from sologrpo.base.files import RECORDS, UNFINISHED
from sologrpo.base.manifest import MODEL_FILES, hash_files
from sologrpo.config.arguments import RunArguments
from sologrpo.config.evaluation import EvaluationSettings, parse_evaluation
from sologrpo.data.dataset import build_prompts, prompt_token_ids, render_prompt
from sologrpo.evaluation.answer import (
    VALIDATION_SCORES,
    evaluate_greedily,
    generate_records,
)
from sologrpo.evaluation.evaluate import Task, evaluate
from sologrpo.evaluation.identity import ADAPTER_FILES
from sologrpo.model.loading import load_tokenizer
from sologrpo.sampling import generation
from sologrpo.sampling.generation import (
    generate_greedily,
    generate_in_batches,
    sampling_config,
)
from sologrpo.sampling.stopping import StopStrings
from sologrpo.scoring.records import Evaluated, RecordLog, read_records
from sologrpo.scoring.summary import summarise
from tiny import rows

NEW_TOKENS = 12
SAMPLED = ("--num_samples", "3", "--temperature", "0.8")


def prompts(count: int) -> Dataset:
    return build_prompts(Dataset.from_list(rows(count)), RunArguments())


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(str(tiny_llama))


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(tiny_llama))


def parse(model: Path, output: Path, *more: str) -> EvaluationSettings:
    return parse_evaluation(
        ["--model", str(model), "--dataset_name", "some/where", "--output_dir", str(output),
         "--seed", "7", "--max_completion_length", str(NEW_TOKENS), "--label", "model", *more]
    )  # fmt: skip


# -- records and scores --------------------------------------------------------------------------


def test_records_follow_the_rows_and_the_completions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    problems = prompts(6)
    records = generate_records(model, tokenizer, problems, max_new_tokens=20)
    ids = prompt_token_ids(problems["prompt"], tokenizer)
    completions = generate_greedily(model, tokenizer, ids, 20)
    assert [r.question for r in records] == problems["question"][:]
    assert [r.gold for r in records] == problems["answer"][:]
    assert [r.index for r in records] == list(range(6))
    assert [r.prompt for r in records] == [render_prompt(p, tokenizer) for p in problems["prompt"]]
    assert [(r.completion, r.completion_tokens, r.stop_reason) for r in records] == [
        (c.text, c.token_count, c.stop_reason) for c in completions
    ]
    assert len({r.completion for r in records}) > 3
    assert len({r.question_hash for r in records}) == 6

    summary = summarise(records)
    scores = evaluate_greedily(model, tokenizer, problems, 20)
    kinds = {name: scores.pop(f"accuracy/{name}") for name in ("add", "subtract")}
    assert kinds == {name: group["accuracy"] for name, group in summary["by_kind"].items()}
    assert scores == {name: summary[name] for name in VALIDATION_SCORES}


def task(
    settings: EvaluationSettings, problems: Dataset, tokenizer: PreTrainedTokenizerBase
) -> Task:
    """The evaluation of the trained model, or of the only one."""
    return Task.of(settings, settings.plan()[-1], problems, tokenizer)


def test_written_results(
    tmp_path: Path, tiny_llama: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    problems = prompts(4)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}", encoding="utf-8")
    settings = parse(tiny_llama, tmp_path, "--adapter", str(adapter))
    before = [
        record.model_copy(update={"correct": record.index == 0})
        for record in generate_records(model, tokenizer, problems, NEW_TOKENS)
    ]
    baseline = Evaluated(before, {"label": "before"})
    records, returned = evaluate(model, tokenizer, task(settings, problems, tokenizer), baseline)
    folder = tmp_path / "eval" / "model"
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results == json.loads(json.dumps(returned))
    assert read_records(folder / "records.jsonl") == records
    assert results["n"] == len(records) == 4
    assert results["baseline_accuracy"] == 0.25
    assert results["baseline"] == "before"
    table = [results[k] for k in ("both_right", "newly_right", "newly_wrong", "both_wrong")]
    assert sum(table) == 4
    assert results["delta"] == results["accuracy"] - 0.25
    assert results["model"] == str(tiny_llama)
    assert results["adapter"] == str(adapter)
    assert results["seed"] == 7
    assert results["precision"] == "unquantised, float32, adapter merged"
    assert results["seconds"] > 0
    tokens = sum(r.completion_tokens for r in records)
    assert results["tokens_per_second"] == pytest.approx(tokens / results["seconds"], rel=0.05)
    assert results["versions"]["torch"] == torch.__version__
    identity = results["settings"]
    assert identity["model_hash"] == hash_files(tiny_llama, MODEL_FILES)
    assert identity["adapter_hash"] == hash_files(adapter, ADAPTER_FILES)
    assert identity["quantisation"] is None
    assert str(tmp_path) not in json.dumps(identity)  # a run that was moved is the same run


# -- resuming ------------------------------------------------------------------------------------


class Killed(BaseException):
    """Like the signal that ends a process, not caught by any code of the project."""


def kill_after(monkeypatch: pytest.MonkeyPatch, batches: int, incomplete_line: bool) -> None:
    append, left = RecordLog.append, [batches]

    def append_or_die(self: RecordLog, *args: Any) -> None:
        if left[0] == 0:
            if incomplete_line:
                with (self._folder / RECORDS).open("a", encoding="utf-8") as file:
                    file.write('{"index": 5, "completion": "hal')
            raise Killed
        left[0] -= 1
        append(self, *args)

    monkeypatch.setattr(RecordLog, "append", append_or_die)


@pytest.fixture
def batches_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_small_batches(*args: Any, **kwargs: Any) -> Any:
        return generation.generate_in_batches(*args, **kwargs | {"token_budget": 4})

    def count_rows(prompts: list[list[int]], *_: Any) -> list[int]:
        return list(range(1, len(prompts) + 1))

    monkeypatch.setattr("sologrpo.evaluation.answer.generate_in_batches", in_small_batches)
    monkeypatch.setattr(generation, "_tokens_of_batches", count_rows)


@pytest.mark.usefixtures("batches_of_four")
@pytest.mark.parametrize(
    ("batches", "incomplete_line"), [(0, False), (0, True), (1, False), (1, True)]
)
def test_a_resumed_evaluation_equals_an_uninterrupted_one(
    tmp_path: Path,
    tiny_llama: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    batches: int,
    incomplete_line: bool,
) -> None:
    problems = prompts(6)

    def run(output: Path, *more: str) -> Evaluated:
        settings = parse(tiny_llama, output, *SAMPLED, *more)
        return evaluate(model, tokenizer, task(settings, problems, tokenizer))

    uninterrupted = run(tmp_path / "uninterrupted").records
    assert len({s.completion for r in uninterrupted for s in r.samples}) > 6  # really sampled
    with monkeypatch.context() as killer:
        kill_after(killer, batches, incomplete_line)
        with pytest.raises(Killed):
            run(tmp_path / "killed")
    folder = tmp_path / "killed" / "eval" / "model"
    assert sorted(path.name for path in folder.iterdir()) == [RECORDS, UNFINISHED]
    done = (folder / RECORDS).read_bytes().count(b"\n")
    assert done == 4 * batches

    generated: list[int] = []
    generate_batch = generation.generate_batch
    monkeypatch.setattr(
        generation, "generate_batch",
        lambda *args: (generated.append(len(args[2])), generate_batch(*args))[1],
    )  # fmt: skip
    assert run(tmp_path / "killed", "--resume").records == uninterrupted
    assert sum(generated) == (6 - done) * (1 + 3)  # nothing is generated twice
    assert not (folder / UNFINISHED).exists()


def test_resuming_a_finished_evaluation_generates_nothing(
    tmp_path: Path,
    tiny_llama: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problems = prompts(4)
    parsed = parse(tiny_llama, tmp_path, *SAMPLED)  # once: it sets the date that prompts show

    def run(**changes: Any) -> Evaluated:
        settings = replace(parsed, **changes)
        return evaluate(model, tokenizer, task(settings, problems, tokenizer))

    first = run()
    monkeypatch.setattr(generation, "generate_batch", None)
    assert run(resume=True) == first
    path = tmp_path / "eval" / "model" / RECORDS
    judged = path.read_bytes()
    path.write_bytes(judged.replace(b'"correct": false', b'"correct": true'))
    assert run(resume=True) == first  # the judge has the last word
    assert path.read_bytes() == judged
    with pytest.raises(InputError, match=r"--resume: .* top_p 1\.0, not 0\.5"):
        run(resume=True, top_p=0.5)
    with pytest.raises(InputError, match=r"holds another evaluation, with top_p 1\.0, not 0\.5"):
        run(top_p=0.5)


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), InputError, "lower --max_completion_length"),
        (RuntimeError("shapes do not fit"), RuntimeError, "shapes do not fit"),
    ],
)
def test_a_crash_is_not_a_wrong_answer(
    tmp_path: Path,
    tiny_llama: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    raised: type[Exception],
    message: str,
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(generation, "generate_batch", fail)
    settings, problems = parse(tiny_llama, tmp_path), prompts(2)
    with pytest.raises(raised, match=message):
        evaluate(model, tokenizer, task(settings, problems, tokenizer))
    assert not list(tmp_path.rglob("results.json"))


# -- sampling ------------------------------------------------------------------------------------


def test_samples_depend_on_the_seed_alone(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    ids = prompt_token_ids(prompts(4)["prompt"], tokenizer)

    def sample(seed: int, temperature: float = 1.0, top_p: float = 1.0) -> list[str]:
        torch.rand(seed + 1)  # other random numbers are drawn before
        config = sampling_config(model, tokenizer, NEW_TOKENS, temperature, top_p)
        stops = StopStrings(tokenizer, [])
        batches = generate_in_batches(model, tokenizer, ids, config, stops, seed=seed)
        pairs = [pair for batch in batches for pair in batch]
        return [completion.text for _, completion in sorted(pairs, key=lambda pair: pair[0])]

    assert sample(0) == sample(0)
    assert sample(0) != sample(1)
    greedy = [c.text for c in generate_greedily(model, tokenizer, ids, NEW_TOKENS)]
    assert sample(0) != greedy
    assert sample(0, temperature=1e-4) == greedy
    assert sample(0, top_p=1e-6) == greedy
