"""In place of `GRPOTrainer`, with TRL's own `GRPOConfig` and rows that are not ours.

The table goes through the settings that TRL's tests of its trainer cover. Random weights learn
nothing in a step or two; what counts is that each setting trains, and which parts are TRL's.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    CLIPImageProcessor,
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer

from fixed_rollouts import problems
from sologrpo import SoloGRPOConfig, SoloGRPOTrainer
from sologrpo.model.loading import load_tokenizer
from tiny import SIZES, VOCABULARY

QUESTIONS = ["Add 2 and 3.", "What is 7?", "Count to 9.", "Is 4 even?", "Say 8.", "Halve 6."]
TRAINING, SAMPLING, EVALUATION = "the training pass", "sampling", "evaluation"
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
TOOLS_TEMPLATE = Path(trl.__file__).parent / "chat_templates/qwen3.jinja"


# -- rewards, rows and models of other people ---------------------------------------------------


def alternate(completions: list[Any], **kwargs: Any) -> list[float]:
    """Give every group a signal."""
    return [float(i % 2) for i in range(len(completions))]


def unsure(completions: list[Any], **kwargs: Any) -> list[None]:
    return [None] * len(completions)


async def slow(completions: list[Any], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return alternate(completions)


def by_column(completions: list[Any], length: list[int], **kwargs: Any) -> list[float]:
    return [float(i % 2) * n for i, n in enumerate(length)]


def maker(function: Callable[[], Any]) -> Callable[[], Any]:
    """Mark a function that makes an argument."""
    MAKERS.append(function)
    return function


MAKERS: list[Callable[[], Any]] = []


@maker
def plain_rows() -> Dataset:
    return Dataset.from_dict({"prompt": QUESTIONS, "length": [len(q) for q in QUESTIONS]})


@maker
def chat_rows() -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": q}] for q in QUESTIONS]})


@maker
def stream() -> IterableDataset:
    return plain_rows().to_iterable_dataset()


@maker
def stream_without_names() -> IterableDataset:
    return IterableDataset.from_generator(lambda: ({"prompt": q} for q in QUESTIONS))


def random_model(model_class: type, config: Any) -> Any:
    torch.manual_seed(0)
    return model_class(config)


@maker
def experts() -> Any:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return random_model(Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **sizes, head_dim=16))


@maker
def learned_positions() -> Any:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=256)
    return random_model(GPT2LMHeadModel, config)


@maker
def sliding_window() -> Any:
    return random_model(MistralForCausalLM, MistralConfig(**SIZES, sliding_window=8))


@maker
def reward_model() -> Any:
    return random_model(Qwen2ForSequenceClassification, Qwen2Config(**SIZES, num_labels=1))


@maker
def adapted() -> Any:
    return get_peft_model(random_model(LlamaForCausalLM, LlamaConfig(**SIZES)), LORA)


# -- the settings -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Settings of `GRPOConfig`, arguments of the trainer, and the parts that are left to TRL."""

    settings: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    in_trl: tuple[str, ...] = ()
    moves: bool = True


def settings(*in_trl: str, **values: Any) -> Case:
    return Case(settings=values, in_trl=in_trl)


def arguments(*in_trl: str, **values: Any) -> Case:
    return Case(arguments=values, in_trl=in_trl)


CASES: dict[str, Case] = {
    "defaults": Case(),
    **{f"loss-{name}": settings(loss_type=name, gradient_accumulation_steps=2)
       for name in ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")},
    "loss-bnpo": settings(TRAINING, loss_type="bnpo", gradient_accumulation_steps=2),
    **{f"scale-{scale}": settings(scale_rewards=scale)
       for scale in (True, False, "group", "batch", "none")},
    "sequence-level": settings(
        importance_sampling_level="sequence", num_iterations=2, max_steps=2, loss_type="grpo"
    ),
    "iterations": settings(num_iterations=2, max_steps=2),
    "group-of-two-batches": settings(
        per_device_train_batch_size=2, num_generations=4, gradient_accumulation_steps=2
    ),
    "steps-of-a-generation": settings(steps_per_generation=2, max_steps=2),
    "unaligned-steps": settings(
        TRAINING, steps_per_generation=2, gradient_accumulation_steps=3, max_steps=2
    ),
    "kl": settings(beta=0.1),
    "kl-corrected": settings(beta=0.1, use_bias_correction_kl=True),
    "reference-synced": settings(beta=0.1, sync_ref_model=True, ref_model_sync_steps=1),
    "epsilon-high": settings(epsilon_high=0.5, num_iterations=2, max_steps=2),
    "delta": settings(delta=2.0),
    "entropy-filter": settings(TRAINING, top_entropy_quantile=0.5),
    "entropy-bonus": settings(TRAINING, entropy_coef=0.01),
    "off-policy-mask": settings(off_policy_mask_threshold=0.5),
    "head-in-fp32": settings(cast_lm_head_to_fp32=True),
    "checkpointing": settings(gradient_checkpointing=True),
    "two-aggregated": Case(
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"reward_funcs": [alternate, by_column]},
    ),
    "truncated-masked": Case({"mask_truncated_completions": True, "max_completion_length": 40}),
    "top-p-k-min": settings(top_p=0.9, top_k=10, min_p=0.01),
    "repetition-penalty": settings(SAMPLING, repetition_penalty=1.1),
    "beams": settings(SAMPLING, generation_kwargs={"num_beams": 2, "length_penalty": -0.1}),
    "no-repeats": settings(SAMPLING, generation_kwargs={"no_repeat_ngram_size": 2}),
    "workers": settings(dataloader_num_workers=1),
    "padded-to-a-multiple": settings(pad_to_multiple_of=8),
    "completions-logged": settings(log_completions=True, num_completions_to_print=1),
    "in-order": settings(shuffle_dataset=False),
    "template-settings": Case(
        {"chat_template_kwargs": {"enable_thinking": False}}, {"train_dataset": chat_rows}
    ),
    "chat": arguments(train_dataset=chat_rows),
    "stream": arguments(train_dataset=stream),
    "stream-without-names": arguments(train_dataset=stream_without_names),
    "reward-model": arguments(reward_funcs=reward_model, reward_processing_classes="tokenizer"),
    "reward-model-and-function": arguments(
        reward_funcs=[alternate, reward_model], reward_processing_classes=[None, "tokenizer"]
    ),
    "two-weighted": Case(
        {"reward_weights": [0.7, 0.3]}, {"reward_funcs": [alternate, by_column]}
    ),
    "one-unsure": arguments(reward_funcs=[alternate, unsure]),
    "all-unsure": Case(arguments={"reward_funcs": unsure}, moves=False),
    "async-reward": arguments(reward_funcs=[slow, alternate]),
    "column": arguments(reward_funcs=by_column),
    "lora": arguments(peft_config=LORA),
    "lora-on-the-embedding": arguments(
        peft_config=LoraConfig(r=4, target_modules=["embed_tokens"], task_type="CAUSAL_LM")
    ),
    "lora-kl": Case({"beta": 0.1}, {"peft_config": LORA}),
    "lora-checkpointing": Case({"gradient_checkpointing": True}, {"peft_config": LORA}),
    "own-adapter": arguments(model=adapted),
    "own-adapter-kl": Case({"beta": 0.1}, {"model": adapted}),
    "prompt-tuning": arguments(
        TRAINING, SAMPLING,
        peft_config=PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    ),
    "experts": arguments(TRAINING, model=experts),
    "experts-without-aux-loss": Case({"router_aux_loss_coef": 0.0}, {"model": experts}),
    "learned-positions": arguments(TRAINING, model=learned_positions),
    "sliding-window": arguments(SAMPLING, model=sliding_window),
}  # fmt: skip


def config(output: Path, **values: Any) -> GRPOConfig:
    defaults: dict[str, Any] = {
        "output_dir": str(output),
        "learning_rate": 0.01,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 6,
        "max_steps": 1,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return GRPOConfig(**defaults | values)


def build(
    path: Path, args: Any, trainer_class: type = SoloGRPOTrainer, **given: Any
) -> SoloGRPOTrainer:
    tokenizer = load_tokenizer(str(path))

    def made(value: Any) -> Any:
        if isinstance(value, list):
            return [made(item) for item in value]
        return tokenizer if value == "tokenizer" else value() if value in MAKERS else value

    defaults = {
        "model": str(path), "reward_funcs": alternate, "train_dataset": plain_rows,
        "processing_class": tokenizer,
    }  # fmt: skip
    trainer: SoloGRPOTrainer = trainer_class(
        args=args, **{name: made(value) for name, value in (defaults | given).items()}
    )
    return trainer


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", CASES)
def test_settings(
    name: str, tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    trainer = build(tiny_llama, config(tmp_path, **case.settings), **case.arguments)
    before = weights(trainer.model)
    trainer.train()
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
    assert set(trainer.as_in_trl) == set(case.in_trl)
    for part, reason in trainer.as_in_trl.items():  # however many steps there are
        assert caplog.text.count(f"{part} runs as in TRL: {reason}") == 1
    moved = [n for n, p in weights(trainer.model).items() if not torch.equal(p, before[n])]
    assert bool(moved) == case.moves


def test_the_loss_of_experts_is_that_of_trl(tiny_llama: Path, tmp_path: Path) -> None:
    args = config(tmp_path, logging_steps=1)
    logs = []
    for trainer_class in (GRPOTrainer, SoloGRPOTrainer):
        trainer = build(tiny_llama, args, trainer_class, model=experts)
        ids = [[20, 30 + i, 40] for i in range(4)]
        trainer._generate_single_turn = lambda *_, ids=ids, **__: (ids, None)
        trainer.train()
        logs.append(trainer.state.log_history[0])
    for name in ("loss", "aux_loss", "grad_norm"):
        assert logs[1][name] == pytest.approx(logs[0][name], rel=1e-5)
    assert logs[1]["aux_loss"] > 0


# -- several turns ------------------------------------------------------------------------------


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: One number.
        b: The other number.
    """
    return a * b


async def multiply_later(a: int, b: int) -> int:
    return a * b


multiply_later.__doc__ = multiply.__doc__


class Counter:
    """An environment that counts."""

    def reset(self, **kwargs: Any) -> str:
        self.count = 0
        return "Count."

    def increment(self, step: int) -> int:
        """
        Add to the count.

        Args:
            step: How much to add.
        """
        self.count += step
        return self.count


def call(name: str, **values: Any) -> str:
    given = ", ".join(f'"{key}": {value}' for key, value in values.items())
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{{given}}}}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize(
    ("given", "calls", "failures"),
    [
        ({"tools": [multiply]}, [call("multiply", a=3, b=4), call("multiply", a=3, c=4)], 0.5),
        ({"tools": [multiply_later]}, [call("multiply_later", a=3, b=4)], 0.0),
        ({"environment_factory": Counter}, [call("increment", step=2)], 0.0),
        ({"environment_factory": Counter, "train_dataset": None}, [call("increment", step=2)], 0.0),
    ],
    ids=["tool", "async-tool", "environment", "environment-without-rows"],
)  # fmt: skip
def test_tools(
    given: dict[str, Any], calls: list[str], failures: float, tiny_llama: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(tiny_llama))
    tokenizer.chat_template = TOOLS_TEMPLATE.read_text(encoding="utf-8")
    args = config(tmp_path, max_completion_length=200)
    trainer = build(
        tiny_llama, args, **{"train_dataset": chat_rows, "processing_class": tokenizer, **given}
    )

    def generate(input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        first = input_ids.size(0) == 4  # later only the rows that called a tool
        texts = calls + ["I do not know.<|im_end|>"] * 4 if first else ["Done.<|im_end|>"] * 4
        texts = texts[: input_ids.size(0)]
        done = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        return torch.cat([input_ids, done["input_ids"]], dim=1)

    trainer.model.generate = generate
    before = weights(trainer.model)
    trainer.train()
    logs = trainer.state.log_history[-1]
    assert logs["tools/call_frequency"] == pytest.approx(len(calls) / 4)
    assert logs["tools/failure_frequency"] == pytest.approx(failures)
    assert set(trainer.as_in_trl) == {TRAINING, SAMPLING}
    assert any(not torch.equal(p, before[n]) for n, p in weights(trainer.model).items())


def test_a_rollout_function(tiny_llama: Path, tmp_path: Path) -> None:
    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        rows = [[20 + i, 30] for i in range(len(prompts))]
        log_probs = [[-1.0, -1.0]] * len(rows)
        return {"prompt_ids": [[5, 6]] * len(rows), "completion_ids": rows, "logprobs": log_probs}

    trainer = build(tiny_llama, config(tmp_path), rollout_func=rollout)
    before = weights(trainer.model)
    trainer.train()
    assert TRAINING in trainer.as_in_trl
    assert any(not torch.equal(p, before[n]) for n, p in weights(trainer.model).items())


# -- images -------------------------------------------------------------------------------------

IMAGE_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{{ part['text'] or '<image>' }}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}"
)


def test_images(tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_llama))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    side = {"height": 28, "width": 28}
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=side), tokenizer,
        patch_size=14, vision_feature_select_strategy="default", chat_template=IMAGE_TEMPLATE,
        num_additional_image_tokens=1,
    )  # fmt: skip
    text = LlamaConfig(**SIZES | {"vocab_size": len(tokenizer)}, bos_token_id=None)
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        image_size=28, patch_size=14,
    )  # fmt: skip
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    model_config = LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=image_id
    )  # fmt: skip
    model = random_model(LlavaForConditionalGeneration, model_config)
    images = [Image.new("RGB", (28, 28), (40 * i, 0, 0)) for i in range(len(QUESTIONS))]
    trainer = build(
        tiny_llama, config(tmp_path), model=model, processing_class=processor,
        train_dataset=Dataset.from_dict({**chat_rows().to_dict(), "image": images}),
    )  # fmt: skip
    before = weights(trainer.model)
    trainer.train()
    assert set(trainer.as_in_trl) == {TRAINING, SAMPLING}
    assert any(not torch.equal(p, before[n]) for n, p in weights(trainer.model).items())


# -- evaluation ---------------------------------------------------------------------------------

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
EVALUATIONS: dict[str, tuple[Callable[[], Any], dict[str, Any], set[str]]] = {
    "rows": (plain_rows, {}, {"eval_reward"}),
    "chat": (chat_rows, {}, {"eval_reward"}),
    "stream": (stream, {}, {"eval_reward"}),
    "dictionary": (
        lambda: {"a": plain_rows(), "b": chat_rows()}, {}, {"eval_a_runtime", "eval_b_runtime"},
    ),
    "streams": (lambda: {"a": stream()}, {}, {"eval_a_runtime"}),
    "ours-among-others": (
        lambda: {"a": plain_rows(), "ours": problems(2)}, {},
        {"eval_a_runtime", "eval_ours_accuracy"},
    ),
    "one-completion": (plain_rows, {"num_generations_eval": 1}, {"eval_reward"}),
    "at-the-start": (plain_rows, {"eval_on_start": True, "loss_type": "grpo"}, {"eval_reward"}),
    "off-policy": (plain_rows, {"num_iterations": 2}, {"eval_reward"}),
}  # fmt: skip


@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluation(
    name: str, tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, values, expected = EVALUATIONS[name]
    args = config(tmp_path, logging_steps=1, **EVALUATED, **values)
    trainer = build(tiny_llama, args, eval_dataset=make())
    trainer.train()
    evaluations = [row for row in trainer.state.log_history if expected <= set(row)]
    merged = {key for row in trainer.state.log_history for key in row}
    assert evaluations or expected <= merged
    assert ("eval_reward" in expected) <= all(0 <= row["eval_reward"] <= 1 for row in evaluations)
    if "eval_on_start" in values:
        assert [row["step"] for row in evaluations] == [0, 1]
    assert caplog.text.count(f"{EVALUATION} runs as in TRL") == 1
    training = next(row for row in trainer.state.log_history if "loss" in row)
    assert training["reward"] == 0.5  # not mixed with those of the evaluation


def test_evaluation_on_other_rows_than_those_of_the_run(tiny_llama: Path, tmp_path: Path) -> None:
    trainer = build(tiny_llama, config(tmp_path, **EVALUATED), eval_dataset=problems(2))
    assert trainer.evaluate()["eval_n"] == 2
    foreign = trainer.evaluate(plain_rows(), metric_key_prefix="test")
    assert foreign["test_runtime"] > 0
    assert "test_n" not in foreign


def test_what_trl_evaluates_is_what_stock_trl_logs(tiny_llama: Path, tmp_path: Path) -> None:
    names = []
    for trainer_class in (GRPOTrainer, SoloGRPOTrainer):
        trainer = build(tiny_llama, config(tmp_path), trainer_class)
        trainer.evaluate(plain_rows())
        names.append(set(trainer.state.log_history[-1]))
    assert names[0] == names[1]


# -- the constructor ----------------------------------------------------------------------------


def test_arguments_by_position_and_defaults(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = config(tmp_path, gradient_accumulation_steps=2)
    trainer = SoloGRPOTrainer(str(tiny_llama), alternate, args, plain_rows(), chat_rows())
    assert trainer.eval_dataset.column_names == ["prompt"]
    assert trainer.processing_class.name_or_path == str(tiny_llama)
    assert isinstance(trainer.args, SoloGRPOConfig)
    assert type(args) is GRPOConfig
    assert args.gradient_accumulation_steps == 2  # the caller's settings are left alone
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(str(tiny_llama))
    trainer = SoloGRPOTrainer(model, alternate, train_dataset=plain_rows())
    assert trainer.args.output_dir == f"{tiny_llama.name}-GRPO"


def test_the_model_card_is_that_of_trl(tiny_llama: Path, tmp_path: Path) -> None:
    args = config(tmp_path, save_strategy="steps", save_steps=1)
    build(tiny_llama, args, peft_config=LORA).train()
    assert "GRPO" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_resuming_from_a_checkpoint_of_stock_trl(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = {"save_strategy": "steps", "save_steps": 1}
    build(tiny_llama, config(tmp_path, **args), GRPOTrainer, peft_config=LORA).train()
    trainer = build(tiny_llama, config(tmp_path, max_steps=2, **args), peft_config=LORA)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2
    assert "not written by SoloGRPOTrainer" in caplog.text
