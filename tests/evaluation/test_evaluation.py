"""Evaluation: what is counted, out of what, what is written, and going on after an interruption."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.config.arguments import RunArguments
from sologrpo.config.evaluation import EvaluationSettings, parse_evaluation
from sologrpo.data.dataset import build_prompts, prompt_token_ids, render_prompt
from sologrpo.errors import InputError
from sologrpo.evaluation import completion_log, generators
from sologrpo.evaluation.completion_log import CompletionLog, Done, check_same_settings
from sologrpo.evaluation.evaluate import (
    LOG,
    VALIDATION_SCORES,
    compare_precisions,
    complete_all,
    describe_problems,
    evaluate,
    evaluate_greedily,
    generate_records,
    grade,
    stop_reason,
)
from sologrpo.evaluation.fingerprints import MODEL_FILES, WHOLE_BYTES, hash_folder
from sologrpo.evaluation.generators import Generator, Sampling
from sologrpo.model.loading import load_tokenizer
from sologrpo.sampling import generation
from sologrpo.sampling.generation import Completion, generate_greedily
from sologrpo.scoring.records import (
    Answer,
    Problem,
    Record,
    accuracy_by_kind,
    hash_text,
    judge_again,
    judge_answer,
    make_record,
    powers_of_two,
    read_records,
    summarise,
    write_records,
)
from tiny import rows

RIGHT = "<thinking>\n5 + 7 = 12\n</thinking>\n<answer>\n12\n</answer>"
WRONG = "<thinking>\n5 + 7 = 13\n</thinking>\n<answer>\n13\n</answer>"
LOOSE = "5 + 7 = 12"  # no tags: right for the lenient judge only
CHATTY = "<answer>12</answer> I hope this helps!"
WORDY = "<answer>twelve shells</answer>"
PROBLEM = Problem(0, hash_text("5 + 7?"), "5 + 7?", "#### 12", "xml", "<user>5 + 7?", "add")


def answer(text: str, tokens: int = 9, stop: str = "end_token", asked: str = "xml") -> Answer:
    return judge_answer(text, tokens, stop, "#### 12", asked)


def record(text: str, tokens: int = 9, stop: str = "end_token", kind: str | None = "add") -> Record:
    return make_record(replace(PROBLEM, kind=kind), answer(text, tokens, stop))


# -- one answer ----------------------------------------------------------------------------------


def test_answer_keeps_what_was_judged() -> None:
    assert answer(WRONG, 17, "length") == Answer(
        completion=WRONG,
        completion_tokens=17,
        stop_reason="length",
        truncated=True,
        extracted="13",
        correct=False,
        lenient_correct=False,
        format_ok=True,
        trailing_text=False,
        integer_answer=True,
    )


@pytest.mark.parametrize(
    ("text", "asked", "integer"),
    [
        (RIGHT, "xml", True),
        (WORDY, "xml", False),
        (LOOSE, "xml", False),
        (r"so \boxed{12}", "boxed", True),
        (r"so \boxed{3} and \boxed{1,200}", "boxed", True),
        (r"so \boxed{12.5}", "boxed", False),
        ("so 12", "boxed", False),
        ("5 + 7 </think> <answer> 12 </answer>", "r1_zero", True),
        ("5 + 7 </think> <answer> 12 shells </answer>", "r1_zero", False),
    ],
)
def test_integer_answer_of_every_format(text: str, asked: str, integer: bool) -> None:
    assert answer(text, asked=asked).integer_answer is integer


@pytest.mark.parametrize(
    ("completion", "stops", "reason"),
    [
        (Completion("a </answer>", 4, truncated=False), ["</answer>"], "stop_string"),
        (Completion("a", 4, truncated=False), ["</answer>"], "end_token"),
        (Completion("a", 4, truncated=False), [], "end_token"),
        (Completion("a", 4, truncated=True), ["</answer>"], "length"),
    ],
)
def test_stop_reason(completion: Completion, stops: list[str], reason: str) -> None:
    assert stop_reason(completion, stops) == reason


# -- counting ------------------------------------------------------------------------------------


def test_summary_counts_shares_of_all_records() -> None:
    records = [
        record(RIGHT, 10), record(RIGHT, 20), record(WRONG, 30), record(LOOSE, 5),
        record(CHATTY, 15, "length"),
    ]  # fmt: skip
    summary = summarise(records)
    # Wilson's intervals of 3 and of 4 in 5.
    assert summary.pop("accuracy_ci95") == pytest.approx((0.2307, 0.8824), abs=1e-4)
    assert summary.pop("accuracy_lenient_ci95") == pytest.approx((0.3755, 0.9638), abs=1e-4)
    assert summary == {
        "n": 5,
        "accuracy": 3 / 5,
        "accuracy_lenient": 4 / 5,
        "format_rate": 3 / 5,
        "truncated_rate": 1 / 5,
        "trailing_text_rate": 1 / 5,
        "integer_rate": 4 / 5,
        "no_answer_rate": 1 / 5,
        "mean_completion_tokens": 16,
        "completion_tokens": {
            "all": {"mean": 16, "p50": 15, "p95": 28},
            "right": {"mean": 15, "p50": 15, "p95": 19.5},
            "wrong": {"mean": 17.5, "p50": 17.5, "p95": 28.75},
        },
        "by_kind": {"add": {"n": 5, "accuracy": 3 / 5}},
    }


def test_lengths_of_nothing_are_none() -> None:
    assert summarise([record(RIGHT)])["completion_tokens"]["wrong"] is None


def test_kinds_are_counted_apart() -> None:
    records = [
        record(RIGHT, kind="add"), record(WRONG, kind="add"), record(RIGHT, kind="divide"),
        record(RIGHT, kind=None),
    ]  # fmt: skip
    assert accuracy_by_kind(records) == {
        "add": {"n": 2, "accuracy": 0.5},
        "divide": {"n": 1, "accuracy": 1.0},
    }
    assert accuracy_by_kind([record(RIGHT, kind=None)]) == {}


def test_sampled_answers_are_counted_by_problem() -> None:
    texts = [[RIGHT, RIGHT, WRONG, LOOSE], [WRONG, RIGHT, LOOSE, LOOSE], [WRONG] * 4]
    records = [make_record(PROBLEM, answer(LOOSE), map(answer, four)) for four in texts]
    summary = summarise(records)
    assert summary["accuracy"] == 0  # greedy, whatever was sampled
    sampled = summary["sampled"]
    assert sampled["num_samples"] == 4
    assert sampled["scores"] == pytest.approx(
        {
            "pass@1": (2 + 1 + 0) / 12,
            "pass@2": (5 / 6 + 3 / 6 + 0) / 3,
            "pass@4": 2 / 3,
            # 2 votes against 1; a tie of 1 and 1; all for the wrong one.
            "maj@4": (1 + 0.5 + 0) / 3,
        }
    )
    for name, (low, high) in sampled["scores_ci95"].items():
        assert 0 <= low < sampled["scores"][name] < high <= 1
    assert "sampled" not in summarise([record(RIGHT)])


@pytest.mark.parametrize(
    ("limit", "powers"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4]), (8, [1, 2, 4, 8])]
)
def test_powers_of_two(limit: int, powers: list[int]) -> None:
    assert powers_of_two(limit) == powers


# -- files ---------------------------------------------------------------------------------------


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    written = [
        make_record(PROBLEM, answer(RIGHT), [answer(WRONG), answer("line\u2028break \ud83d")]),
        record(LOOSE, kind=None),
    ]
    write_records(tmp_path / "records.jsonl", written)
    lines = (tmp_path / "records.jsonl").read_text(encoding="utf-8")
    assert lines.count(PROBLEM.prompt) == 2  # once a problem, however many samples
    read = read_records(tmp_path / "records.jsonl")
    assert read[1:] == written[1:]
    assert read[0].samples[0] == written[0].samples[0]
    assert read[0].samples[1].completion == "line\u2028break ?"  # half a pair is no text


OLD = {
    "index": 0, "question": "5 + 7?", "gold": "#### 12", "completion": RIGHT, "extracted": "99",
    "correct": False, "lenient_correct": True, "format_ok": True, "trailing_text": False,
    "truncated": False, "completion_tokens": 9, "kind": None,
}  # fmt: skip


def test_old_records_can_be_judged_again(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(OLD) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"line 1 names no prompt_format: give --prompt_format"):
        read_records(path)
    (tmp_path / "results.json").write_text('{"prompt_format": "xml"}', encoding="utf-8")
    (old,) = read_records(path)
    assert (old.correct, old.extracted) == (False, "99")
    new = judge_again(old)
    assert (new.correct, new.extracted) == (True, "12")
    assert new.question_hash == hash_text("5 + 7?")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no records"),
        ("{", "line 1 is no record"),
        ("[]", "line 1 is no record"),
        ('{"question": "5 + 7?"}', "line 1 is no record"),
        (json.dumps(OLD | {"gold": "12"}), "no record"),
        (json.dumps(OLD | {"prompt_format": "yaml"}), "unknown prompt_format 'yaml'"),
        (json.dumps(OLD) + "\n" + json.dumps(OLD)[:50], "line 2 is no record"),
    ],
)
def test_what_is_no_record(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=says) as caught:
        list(map(judge_again, read_records(path, "xml")))
    assert "\n" not in str(caught.value)


def test_judging_again_loads_no_torch() -> None:
    code = "import sys, evaluate; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert not {b"torch", b"transformers", b"trl", b"numpy", b"datasets"} & set(loaded.split())


# -- the log -------------------------------------------------------------------------------------

BATCHES = [
    [Done(1, 0, "a\nb", 3, "length"), Done(0, 0, "c", 1, "end_token")],
    [Done(0, 1, "\ud83d", 2, "length")],
]


def begin(path: Path, resume: bool = False, **settings: Any) -> CompletionLog:
    return CompletionLog(path, {"seed": 0, "limit": 4} | settings, resume)


def written_log(path: Path) -> CompletionLog:
    log = begin(path)
    for batch in BATCHES:
        log.append(batch, 1.5)
    return log


def test_log_comes_back(tmp_path: Path) -> None:
    written = written_log(tmp_path / "log")
    assert written.done == {(d.problem, d.number): d for batch in BATCHES for d in batch}
    again = begin(tmp_path / "log", resume=True)
    assert (again.done, again.seconds) == (written.done, 3.0)
    again.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", range(1, 50))
def test_a_half_written_batch_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "log"
    written_log(path)
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    assert cut < last
    path.write_bytes(whole[:-cut])
    again = begin(path, resume=True)
    assert list(again.done) == [(1, 0), (0, 0)]
    again.append(BATCHES[1], 1.5)
    assert path.read_bytes() == whole  # nothing of the torn line is left


def test_a_log_without_a_whole_first_line_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"settings": {"se', encoding="utf-8")
    assert begin(tmp_path / "log", resume=True).done == {}


def test_without_resume_a_log_begins_anew(tmp_path: Path) -> None:
    written_log(tmp_path / "log")
    assert begin(tmp_path / "log").done == {}
    assert begin(tmp_path / "log", resume=True).done == {}


def test_other_settings_are_refused(tmp_path: Path) -> None:
    written_log(tmp_path / "log")
    before = (tmp_path / "log").read_bytes()
    with pytest.raises(InputError, match=r"limit 4, not 8.*leave --resume out") as caught:
        begin(tmp_path / "log", resume=True, limit=8)
    assert "seed" not in str(caught.value)
    assert (tmp_path / "log").read_bytes() == before
    with pytest.raises(InputError, match=r"top_p None, not 1\.0"):
        check_same_settings({}, {"top_p": 1.0})


# -- fingerprints --------------------------------------------------------------------------------


def test_fingerprint_reads_small_files_whole(tmp_path: Path) -> None:
    def fingerprint(weights: bytes, config: bytes = b"{}") -> str:
        (tmp_path / "model.safetensors").write_bytes(weights)
        (tmp_path / "config.json").write_bytes(config)
        (tmp_path / "README.md").write_bytes(weights[::-1])
        return hash_folder(tmp_path, MODEL_FILES)

    first = fingerprint(b"abc")
    assert first.startswith("sha256:")
    assert first == fingerprint(b"abc")
    assert len({first, fingerprint(b"abd"), fingerprint(b"ab"), fingerprint(b"abc", b"{ }")}) == 4


def test_fingerprint_of_a_large_file_sees_another_training(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    size = WHOLE_BYTES + 12345

    def fingerprint(offset: int | None, length: int = 1) -> str:
        with path.open("wb") as file:
            file.truncate(size)  # sparse: takes no room
            if offset is not None:
                file.seek(offset)
                file.write(b"\1" * length)
        return hash_folder(tmp_path, MODEL_FILES)

    untouched = fingerprint(None)
    assert untouched.startswith("sampled-sha256:")
    assert fingerprint(0) != untouched
    assert fingerprint(size - 1) != untouched
    # Any stretch longer than the gap between two blocks is seen: one layer of a model, say.
    assert fingerprint(size // 3, length=size // 60) != untouched
    assert fingerprint(100_000) == untouched  # what the docstring says is not noticed


# -- with a model --------------------------------------------------------------------------------


def prompts(count: int) -> Dataset:
    return build_prompts(Dataset.from_list(rows(count)), RunArguments())


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(str(tiny_llama))


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(tiny_llama))


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
    assert [(r.completion, r.completion_tokens, r.truncated) for r in records] == [
        (c.text, c.token_count, c.truncated) for c in completions
    ]
    assert len({r.completion for r in records}) > 3
    assert len({r.question_hash for r in records}) == 6


def test_validation_scores_are_the_numbers_of_the_summary(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    problems = prompts(6)
    summary = summarise(generate_records(model, tokenizer, problems, 20))
    scores = evaluate_greedily(model, tokenizer, problems, 20)
    kinds = {name: scores.pop(f"accuracy/{name}") for name in ("add", "subtract")}
    assert kinds == {name: group["accuracy"] for name, group in summary["by_kind"].items()}
    assert scores == {name: summary[name] for name in VALIDATION_SCORES}


def parse(model: Path, output: Path, *more: str) -> EvaluationSettings:
    return parse_evaluation(
        ["--model", str(model), "--dataset_name", "some/where", "--output_dir", str(output),
         "--seed", "7", "--max_completion_length", "12", *more]
    )  # fmt: skip


SAMPLED = ("--num_samples", "3", "--temperature", "0.8")


def small_batches(monkeypatch: pytest.MonkeyPatch, rows_of_batch: int = 4) -> None:
    """Batches of a few rows, so that an evaluation has several."""

    def in_small_batches(*args: Any, **kwargs: Any) -> Any:
        width = max(map(len, args[2])) + 12
        return generation.generate_in_batches(
            *args, **kwargs | {"token_budget": rows_of_batch * width}
        )

    monkeypatch.setattr("sologrpo.evaluation.generators.generate_in_batches", in_small_batches)


class Killed(BaseException):
    """What no code of ours catches, like the signal that ends a process."""


def kill_after(monkeypatch: pytest.MonkeyPatch, batches: int, torn: bool) -> None:
    append, left = CompletionLog.append, [batches]

    def append_or_die(self: CompletionLog, *args: Any) -> None:
        if left[0] == 0:
            if torn:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write('{"seconds": 0.1, "done": [[5, 0, "hal')
            raise Killed
        left[0] -= 1
        append(self, *args)

    monkeypatch.setattr(CompletionLog, "append", append_or_die)


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("batches", [0, 1, 2, 4])
def test_an_interrupted_evaluation_ends_like_one_that_was_not(
    tmp_path: Path,
    tiny_llama: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    batches: int,
    torn: bool,
) -> None:
    problems = prompts(6)
    small_batches(monkeypatch)

    def run(output: Path, *more: str) -> tuple[list[Record], dict[str, Any]]:
        settings = parse(tiny_llama, output, *SAMPLED, *more)
        return evaluate(model, tokenizer, problems, settings, "model")

    whole, _ = run(tmp_path / "whole")
    assert len({s.completion for r in whole for s in r.samples}) > 6  # sampled, not copied
    with monkeypatch.context() as killer:
        kill_after(killer, batches, torn)
        with pytest.raises(Killed):
            run(tmp_path / "cut")
    folder = tmp_path / "cut" / "eval" / "model"
    assert [path.name for path in folder.iterdir()] == [LOG]

    lines = completion_log._whole_lines(folder / LOG)[1:]
    assert len(lines) == batches
    done = sum(len(json.loads(line)["done"]) for line in lines)
    again: list[int] = []
    generate_batch = generation._generate_batch
    monkeypatch.setattr(
        generation, "_generate_batch",
        lambda *args: (again.append(len(args[2])), generate_batch(*args))[1],
    )  # fmt: skip
    run(tmp_path / "cut", "--resume")
    records = "eval/model/records.jsonl"
    assert (tmp_path / "cut" / records).read_bytes() == (tmp_path / "whole" / records).read_bytes()
    assert sum(again) == 6 + 6 * 3 - done  # no completion is made twice
    assert not (folder / LOG).exists()


def test_resuming_what_is_finished_generates_nothing(
    tmp_path: Path,
    tiny_llama: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problems = prompts(4)
    settings = parse(tiny_llama, tmp_path, *SAMPLED)
    first = evaluate(model, tokenizer, problems, settings, "model")
    monkeypatch.setattr(generation, "_generate_batch", None)
    resumed = replace(settings, resume=True)
    assert evaluate(model, tokenizer, problems, resumed, "model") == first
    with pytest.raises(InputError, match=r"top_p 1\.0, not 0\.5"):
        evaluate(model, tokenizer, problems, replace(resumed, top_p=0.5), "model")


def test_sampling_depends_on_the_seed_alone(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    ids = prompt_token_ids(prompts(4)["prompt"], tokenizer)

    def sample(seed: int, **how: float) -> list[str]:
        torch.rand(seed + 1)  # whatever was drawn before
        generator = Generator(model, tokenizer, 12, seed=seed)
        pairs = [pair for batch in generator.complete(ids, Sampling(**how)) for pair in batch]
        return [completion.text for _, completion in sorted(pairs, key=lambda pair: pair[0])]

    assert sample(0) == sample(0)
    assert sample(0) != sample(1)
    greedy = [c.text for c in generate_greedily(model, tokenizer, ids, 12)]
    assert sample(0) != greedy
    assert sample(0, temperature=1e-4) == greedy
    assert sample(0, top_p=1e-6) == greedy


def test_written_results(
    tmp_path: Path, tiny_llama: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    problems = prompts(4)
    settings = parse(tiny_llama, tmp_path)
    before = [record(text) for text in (RIGHT, WRONG, WRONG, WRONG)]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}", encoding="utf-8")
    records, returned = evaluate(model, tokenizer, problems, settings, "trained", adapter, before)
    folder = tmp_path / "eval" / "trained"
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results == json.loads(json.dumps(returned))
    assert read_records(folder / "records.jsonl") == records
    assert results["n"] == len(records) == 4
    assert results["baseline_accuracy"] == 0.25
    assert results["baseline"] == "baseline"
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
    assert identity["model_hash"] == hash_folder(tiny_llama, MODEL_FILES)
    assert identity["adapter_hash"].startswith("sha256:")
    assert identity["quantisation"] is None
    assert str(tmp_path) not in json.dumps(identity)  # a run that was moved is the same run


def test_out_of_memory_is_tried_smaller_and_drops_nothing(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = prompts(7)
    whole = generate_records(model, tokenizer, problems, 12)
    generate_batch, sizes = generation._generate_batch, []

    def at_most_two(*args: Any) -> list[Completion]:
        sizes.append(len(args[2]))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate_batch(*args)

    monkeypatch.setattr(generation, "_generate_batch", at_most_two)
    assert generate_records(model, tokenizer, problems, 12) == whole
    assert max(sizes) == 7
    assert sizes[-3:] == sorted(sizes[-3:], reverse=True)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), InputError),
        (RuntimeError("shapes do not fit"), RuntimeError),
    ],
)
def test_a_prompt_that_cannot_be_completed_is_no_wrong_answer(
    tmp_path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    raised: type[Exception],
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(generation, "_generate_batch", fail)
    ids = prompt_token_ids(prompts(2)["prompt"], tokenizer)
    log = CompletionLog(tmp_path / "log", {}, resume=False)
    with pytest.raises(raised) as caught:
        complete_all(Generator(model, tokenizer, 12), ids, log)
    if raised is InputError:
        assert "max_completion_length" in str(caught.value)


def test_a_missing_completion_is_never_left_out() -> None:
    problems = [replace(PROBLEM, index=i) for i in range(2)]
    with pytest.raises(KeyError):
        grade(problems, {(0, 0): Done(0, 0, RIGHT, 3, "end_token")})


def test_problems_are_described_in_every_format(tokenizer: PreTrainedTokenizerBase) -> None:
    plain = build_prompts(Dataset.from_list(rows(2)), RunArguments(prompt_format="r1_zero"))
    (first, _) = describe_problems(plain, tokenizer)
    assert first.prompt.endswith("<think>")
    assert first.prompt_format == "r1_zero"
    assert first.kind == "add"


class StandInVllm:
    """vLLM's interface as far as it is used, over transformers; it keeps what it was given."""

    def __init__(self) -> None:
        self.params: list[dict[str, Any]] = []
        self.loaded: list[dict[str, Any]] = []

    def SamplingParams(self, **settings: Any) -> dict[str, Any]:
        self.params.append(settings)
        return settings

    def LLM(self, model: str, dtype: str, **settings: Any) -> "StandInVllm":
        self.policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.loaded.append({"dtype": dtype, **settings})
        return self

    def generate(
        self, requests: list[dict[str, Any]], params: list[dict[str, Any]], use_tqdm: bool
    ) -> list[Any]:
        done = []
        for request, settings in zip(requests, params, strict=True):
            ids = torch.tensor([request["prompt_token_ids"]])
            torch.manual_seed(settings["seed"])
            drawn = {"do_sample": True, "temperature": settings["temperature"]}
            output = self.policy.generate(
                ids, max_new_tokens=settings["max_tokens"], pad_token_id=0,
                eos_token_id=settings["stop_token_ids"],
                **(drawn if settings["temperature"] else {"do_sample": False}),
            )  # fmt: skip
            tokens = tuple(output[0, ids.size(1) :].tolist())
            done.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)]))
        return done


def test_vllm_gives_the_same_records(
    tmp_path: Path, tiny_llama: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    stand_in = StandInVllm()
    monkeypatch.setitem(sys.modules, "vllm", stand_in)  # type: ignore[misc]
    monkeypatch.setattr("sologrpo.config.evaluation.find_spec", lambda name: name)
    monkeypatch.setattr(generators, "PROMPTS_AT_ONCE", 4)
    written = []
    for engine in ("transformers", "vllm"):
        settings = parse(tiny_llama, tmp_path / engine, "--engine", engine, "--num_samples", "2")
        written.append(evaluate(model, tokenizer, prompts(6), settings, "model")[0])
    greedy = [[replace(record, samples=()) for record in records] for records in written]
    assert greedy[0] == greedy[1]
    assert [params["temperature"] for params in stand_in.params] == [0.0] * 6 + [1.0] * 12
    assert stand_in.loaded[0]["dtype"] == "float32"
    drawn = [params["seed"] for params in stand_in.params[6:]]
    assert len(set(drawn)) == len(drawn)


def test_precisions_are_compared_with_the_trained_one() -> None:
    def evaluated(*texts: str) -> tuple[list[Record], dict[str, Any]]:
        records = [record(text) for text in texts]
        return records, summarise(records) | {"label": "x", "precision": "in words"}

    table = compare_precisions(
        {
            "merged": evaluated(RIGHT, WRONG, WRONG + " ", RIGHT),
            "nf4_adapter": evaluated(RIGHT, WRONG, WRONG, WRONG),
        },
        "nf4_adapter",
    )
    assert table["merged"]["differing_rate"] == 0.5
    assert table["merged"]["delta"] == 0.25
    assert (table["merged"]["newly_right"], table["merged"]["newly_wrong"]) == (1, 0)
    assert (table["nf4_adapter"]["differing_rate"], table["nf4_adapter"]["delta"]) == (0, 0)
