"""The trainer: TRL's gradient with less work, greedy validation, and what it relies on in TRL."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from digits import digit_share
from fixed_rollouts import (
    MIXED,
    CapturedGradients,
    G,
    config,
    fixed_reward,
    make_trainer,
    problems,
    relative_gap,
    trained_on,
)
from sologrpo.config.arguments import RunArguments
from sologrpo.config.schedule import optimizer_steps
from sologrpo.data.dataset import build_prompts, has_few_kinds, prompt_token_ids
from sologrpo.evaluation import answer
from sologrpo.evaluation.answer import generate_records
from sologrpo.model.loading import load_tokenizer
from sologrpo.sampling.generation import generate_greedily
from sologrpo.training.trainer import SoloGRPOTrainer
from tiny import rows

# -- outcome gating, signs of hacking ----------------------------------------------------

# Groups: one right answer; none; all right; none judged.
OUTCOME = [0.0, 1.0, 0.0, 0.0] + [0.0] * G + [1.0] * G + [None] * G
SIDE = [1.0, 0.5, 0.0, 0.5] * 4
GATED = [0.5 * s for s in SIDE[:4]] + [0.0] * G + [0.5 * s for s in SIDE[:4]] + [0.0] * G


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_side_rewards_count_only_with_the_outcome(
    scale_rewards: str, tiny_llama: Path, tmp_path: Path
) -> None:
    args = config(
        tmp_path, reward_weights=[0.5, 1.0], outcome_reward="outcome", scale_rewards=scale_rewards,
    )  # fmt: skip
    rewards = {"side": SIDE, "outcome": OUTCOME}
    gradients, logs = trained_on(SoloGRPOTrainer, tiny_llama, args, rewards)
    summed = [side + (out or 0.0) for side, out in zip(GATED, OUTCOME, strict=True)]
    plain = config(tmp_path, scale_rewards=scale_rewards)
    expected, plain_logs = trained_on(SoloGRPOTrainer, tiny_llama, plain, summed)
    assert relative_gap(expected[0], gradients[0]) < 1e-6
    # The scores stay visible as they were given; `reward` is what is trained on.
    assert logs["rewards/side/mean"] == pytest.approx(0.5)
    assert logs["rewards/outcome/mean"] == pytest.approx(5 / 12)
    assert logs["reward"] == pytest.approx(plain_logs["reward"])
    assert logs["frac_reward_zero_std"] == 0.5

    ungated = config(tmp_path, reward_weights=[0.5, 1.0], scale_rewards=scale_rewards)
    (other,), _ = trained_on(SoloGRPOTrainer, tiny_llama, ungated, rewards)
    assert relative_gap(gradients[0], other) > 0.01


def test_epsilon_of_the_advantages(tiny_llama: Path, tmp_path: Path) -> None:
    close = [0.0, 2e-4, 0.0, 0.0] * 4  # a deviation of 1e-4, as large as TRL's epsilon
    (stock,), _ = trained_on(SoloGRPOTrainer, tiny_llama, config(tmp_path), close)
    args = config(tmp_path, advantage_eps=0.0)
    (exact,), _ = trained_on(SoloGRPOTrainer, tiny_llama, args, close)
    assert relative_gap({name: 2 * gradient for name, gradient in stock.items()}, exact) < 1e-4


def test_signs_of_hacking_are_logged(tiny_llama: Path, tmp_path: Path) -> None:
    texts = ["<answer>1</answer><answer>2</answer>", "9 <answer>18</answer> bye", "9", "8"] * 4
    trainer = make_trainer(
        SoloGRPOTrainer, tiny_llama, config(tmp_path), fixed_reward("reward", MIXED)
    )
    ids = trainer.processing_class(texts)["input_ids"]
    trainer._generate_single_turn = lambda *args, **kwargs: (ids, None)
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["hacking/answer_stuffing"] == 0.25
    assert logs["hacking/trailing_text"] == 0.25
    assert logs["hacking/empty_reasoning"] == 0.25
    assert logs["hacking/tags_in_reasoning"] == logs["hacking/template_echo"] == 0.0


def test_completions_without_any_score_do_not_count(tiny_llama: Path, tmp_path: Path) -> None:
    # The scored ones of each group are equal: no signal, in TRL's own arithmetic too.
    rewards = {"reward": [1.0, 1.0, 1.0, None] * 4}
    gradients, logs = trained_on(SoloGRPOTrainer, tiny_llama, config(tmp_path), rewards)
    assert logs["frac_reward_zero_std"] == 1.0
    assert not any(torch.count_nonzero(gradient) for gradient in gradients[0].values())


def test_degenerate_groups_by_outcome(tiny_llama: Path, tmp_path: Path) -> None:
    # All right and equal; all wrong and equal; all wrong, told apart by the side reward; mixed.
    rewards = {
        "answer_correctness": [1.0] * G + [0.0] * G + [0.0] * G + [1.0, 0.0, 0.0, 0.0],
        "side": [0.5] * 2 * G + [0.5, 0.0, 0.0, 0.0] + [0.5] * G,
    }
    _, logs = trained_on(SoloGRPOTrainer, tiny_llama, config(tmp_path), rewards)
    assert logs["degenerate/all_right"] == logs["degenerate/all_wrong"] == 0.25
    assert logs["frac_reward_zero_std"] == 0.5


def right_additions(completions: list[Any], kind: list[str], **kwargs: Any) -> list[float | None]:
    """Half of the problems are subtractions (`tiny.rows`), and never right."""
    scores = {"add": [1.0, 1.0, 0.0, None], "subtract": [0.0] * G}
    return [scores[name][i % G] for i, name in enumerate(kind)]


@pytest.mark.parametrize("outcome", ["right_additions", None])
def test_accuracy_by_kind(outcome: str | None, tiny_llama: Path, tmp_path: Path) -> None:
    args = config(tmp_path, logging_steps=1, outcome_reward=outcome)
    trainer = make_trainer(
        SoloGRPOTrainer, tiny_llama, args, right_additions, train_dataset=problems(4)
    )
    trainer.train()
    logs = trainer.state.log_history[0]
    found = {name: value for name, value in logs.items() if name.startswith("accuracy/")}
    judged = {"accuracy/add": pytest.approx(2 / 3), "accuracy/subtract": 0.0}
    assert found == (judged if outcome else {})


def test_kinds_that_are_too_many_or_no_text_are_not_logged() -> None:
    def has_few(kinds: list[Any]) -> bool:
        return has_few_kinds(Dataset.from_dict({"kind": kinds}))

    texts = [str(number) for number in range(20)]
    assert has_few([*texts, *texts, None])
    assert not has_few([*texts, "one more"])
    assert not has_few([1, 2])
    assert not has_few_kinds(Dataset.from_dict({"question": ["?"]}))
    assert not has_few_kinds(Dataset.from_dict({"kind": ["a"]}).to_iterable_dataset())


# -- sampling -----------------------------------------------------------------------------------


class SeenCompletions:
    """A reward that is constant, so that nothing is trained, and keeps what it was asked about."""

    __name__ = "seen_completions"

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, list[int]]] = []

    def __call__(
        self,
        completions: list[Any],
        question: list[str],
        completion_ids: list[list[int]],
        **kwargs: Any,
    ) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        self.rows += zip(question, texts, completion_ids, strict=True)
        return [1.0] * len(texts)


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen"])
def test_rollouts_at_zero_temperature_are_the_greedy_completions(
    family: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seen = SeenCompletions()
    args = config(tmp_path, max_completion_length=24, temperature=1e-4)
    trainer = make_trainer(SoloGRPOTrainer, request.getfixturevalue(family), args, seen)
    dataset, tokenizer = problems(), trainer.processing_class
    prompts = prompt_token_ids(dataset["prompt"], tokenizer)
    completions = generate_greedily(trainer.model, tokenizer, prompts, 24)
    greedy = dict(zip(dataset["question"], completions, strict=True))
    trainer.train()
    assert len(seen.rows) == len(MIXED)
    assert len({text for _, text, _ in seen.rows}) == len(MIXED) // G
    for question, text, ids in seen.rows:
        assert text == greedy[question].text
        assert len(ids) == greedy[question].token_count


def test_rollouts_follow_temperature_and_top_k(tiny_llama: Path, tmp_path: Path) -> None:
    count, k, temperature = 1024, 5, 0.5
    seen = SeenCompletions()
    args = config(
        tmp_path, max_completion_length=1, temperature=temperature, top_k=k,
        num_generations=count, per_device_train_batch_size=count,
    )  # fmt: skip
    trainer = make_trainer(SoloGRPOTrainer, tiny_llama, args, seen)
    trainer.train()
    dataset = problems()
    prompt = dataset[list(dataset["question"]).index(seen.rows[0][0])]["prompt"]
    ids = trainer.processing_class.apply_chat_template(
        prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        logits = trainer.model(**ids.to(trainer.model.device)).logits[0, -1]
    top = logits.topk(k)
    expected = (top.values / temperature).softmax(-1)
    drawn = [ids[0] for _, _, ids in seen.rows]
    assert set(drawn) <= set(top.indices.tolist())
    # Four standard deviations of a share of 1,024 draws are at most 0.0625.
    for token, probability in zip(top.indices.tolist(), expected.tolist(), strict=True):
        assert drawn.count(token) / count == pytest.approx(probability, abs=0.0625)


# -- rows of a batch -----------------------------------------------------------------------------


def test_batch_of_masked_completions_only(tiny_llama: Path, tmp_path: Path) -> None:
    # Every completion is cut off and masked: nothing to learn, and nothing to stumble over.
    # A row of 12 tokens is cut off; an end token that never comes makes all of them such.
    settings = {"mask_truncated_completions": True, "max_completion_length": 12}
    captured = CapturedGradients()
    trainer = make_trainer(
        SoloGRPOTrainer, tiny_llama, config(tmp_path, **settings),
        lambda completions, **_: MIXED, callbacks=[captured],
    )  # fmt: skip
    trainer._generate_single_turn = lambda ids, *args, **kwargs: ([[100] * 12] * len(ids), None)
    trainer.train()
    (gradients,) = captured.steps
    assert not any(torch.count_nonzero(gradient) for gradient in gradients.values())


# -- stop strings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("mask_truncated", [True, False])
def test_rollouts_end_at_stop_strings(
    fast: bool,
    mask_truncated: bool,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stops = ("0", "5")  # random weights write these sooner than tags
    monkeypatch.setattr("sologrpo.training.trainer.stop_strings", lambda dataset: list(stops))
    if not fast:
        monkeypatch.setattr("sologrpo.training.rollout.can_generate_fast", lambda *args: False)
    texts: list[str] = []
    ids: list[list[int]] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        texts.extend(completions)
        ids.extend(completion_ids)
        return MIXED

    args = config(tmp_path, max_completion_length=16, mask_truncated_completions=mask_truncated)
    questions = Dataset.from_list(rows(8))
    plain = build_prompts(questions, RunArguments(prompt_format="r1_zero"))
    trainer = make_trainer(SoloGRPOTrainer, tiny_llama, args, reward, train_dataset=plain)
    batches: list[dict[str, Any]] = []
    original = trainer._prepare_inputs
    trainer._prepare_inputs = lambda inputs: batches.append(original(inputs)) or batches[-1]
    trainer.train()
    tokenizer, logs = trainer.processing_class, trainer.state.log_history[0]
    stopped = [text.endswith(stops) for text in texts]
    ended = [row[-1] == tokenizer.eos_token_id for row in ids]
    assert sum(stopped) >= 3
    for text, row, at_stop, at_end in zip(texts, ids, stopped, ended, strict=True):
        assert not any(stop in text[:-1] for stop in stops)  # nothing follows a stop string
        # No padding follows: nothing is trained on that was not sampled.
        assert not at_stop or trainer._rollout.stops.length(row) == len(row)
        assert len(row) == 16 or at_stop or at_end
        assert tokenizer.decode(row, skip_special_tokens=True).startswith(text)
    done = [at_stop or at_end for at_stop, at_end in zip(stopped, ended, strict=True)]
    assert logs["completions/clipped_ratio"] == pytest.approx(1 - sum(done) / len(done))
    lengths = [len(row) for row, whole in zip(ids, done, strict=True) if whole]
    assert logs["completions/mean_terminated_length"] == pytest.approx(sum(lengths) / len(lengths))
    # Rows that were stopped are trained on, rows that were cut off are not, when asked.
    (batch,) = batches
    trained = sum(
        len(row) for row, whole in zip(ids, done, strict=True) if whole or not mask_truncated
    )
    assert batch["completion_mask"].sum() == batch["num_items_in_batch"] == trained


def test_validation_ends_at_stop_strings(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(tiny_llama))
    tokenizer = load_tokenizer(str(tiny_llama))
    monkeypatch.setattr(answer, "stop_strings", lambda dataset: [])
    whole = [record.completion for record in generate_records(model, tokenizer, problems(), 16)]
    stop = max(whole, key=len)[4:6]
    monkeypatch.setattr(answer, "stop_strings", lambda dataset: [stop])
    for record, text in zip(generate_records(model, tokenizer, problems(), 16), whole, strict=True):
        before, found, _ = text.partition(stop)
        assert record.completion == before + found
        assert not (found and record.truncated)


# -- validation ---------------------------------------------------------------------------------


@pytest.fixture
def validating(tiny_llama: Path, tmp_path: Path) -> Any:
    """A trainer whose validation problems have as gold the last number of the greedy answer."""
    args = config(tmp_path, max_completion_length=16, temperature=1.0)
    trainer = make_trainer(SoloGRPOTrainer, tiny_llama, args, digit_share)
    tokenizer = trainer.processing_class
    dataset = problems(6)
    prompts = prompt_token_ids(dataset["prompt"], tokenizer)
    texts = [c.text for c in generate_greedily(trainer.model, tokenizer, prompts, 16)]
    trainer.eval_dataset = dataset.map(lambda row, i: {"answer": last_number(texts[i])}, True)
    return trainer


def last_number(text: str) -> str:
    from rewards.grading import lenient_is_correct

    suffixes = (text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1))
    numbers = {suffix for suffix in suffixes if suffix.isascii() and suffix.isdigit()}
    right = (f"#### {n}" for n in numbers if lenient_is_correct(text, f"#### {n}"))
    return next(right, "#### 31415926")


def test_validation_is_greedy_and_repeatable(validating: Any) -> None:
    torch.manual_seed(1)
    first = validating.evaluate()
    torch.manual_seed(2)
    second = validating.evaluate()
    assert first["eval_accuracy_lenient"] >= 0.5  # sampling would not hit these numbers
    assert first == second
    assert first["eval_n"] == 6


def test_validation_leaves_training_metrics_alone(validating: Any) -> None:
    validating.model.train()
    validating._metrics["train"]["reward"].append(0.5)
    validating.evaluate()
    assert validating._metrics["train"]["reward"] == [0.5]
    logged = validating.state.log_history[-1]
    assert "eval_accuracy" in logged
    assert not any("reward" in name for name in logged)


def test_validation_during_training_does_not_change_it(tiny_llama: Path, tmp_path: Path) -> None:
    def weights(**settings: Any) -> list[torch.Tensor]:
        args = config(tmp_path, max_steps=3, learning_rate=1e-3, **settings)
        trainer = make_trainer(
            SoloGRPOTrainer, tiny_llama, args, digit_share, eval_dataset=problems(2)
        )
        trainer.train()
        return [p.detach() for p in trainer.model.parameters() if p.requires_grad]

    plain = weights()
    validated = weights(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    assert all(torch.equal(a, b) for a, b in zip(plain, validated, strict=True))


# -- the plan -------------------------------------------------------------------------------------

PLANS = [
    {"num_train_epochs": 1},
    {"num_train_epochs": 3},
    {"num_train_epochs": 2, "num_iterations": 2},
    {"num_train_epochs": 2.5, "steps_per_generation": 2},
    {"num_train_epochs": 2, "gradient_accumulation_steps": 3},
]


@pytest.mark.parametrize(
    ("trainer_class", "settings"),
    [*((SoloGRPOTrainer, plan) for plan in PLANS), (GRPOTrainer, PLANS[3])],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_plan_names_the_steps_that_are_made(
    tiny_llama: Path, tmp_path: Path, trainer_class: type, settings: dict[str, Any]
) -> None:
    # 8 prompts; a generation batch of 3 (or 6, or 9) prompts leaves some over in each epoch.
    sizes = {"per_device_train_batch_size": 12, "max_steps": -1, "max_completion_length": 1}
    if "gradient_accumulation_steps" in settings:
        sizes["per_device_train_batch_size"] = 4
    args = config(tmp_path, **sizes, **settings)
    planned = optimizer_steps(args, 8)
    trainer = make_trainer(trainer_class, tiny_llama, args, digit_share)
    trainer.train()
    assert trainer.state.global_step == planned
