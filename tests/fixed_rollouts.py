"""Training on fixed completions and rewards, by stock TRL or by our trainer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOTrainer

from sologrpo.config.arguments import RunArguments, SoloGRPOConfig
from sologrpo.data.dataset import build_prompts
from sologrpo.model.loading import load_tokenizer
from sologrpo.training.trainer import SoloGRPOTrainer
from tiny import rows

G = 4  # completions of one prompt
# Rewards of four groups. Constant groups are sums of equal powers of two, whose mean is exact, so
# that TRL too gives them an advantage of exactly zero.
MIXED = [0.0, 1.0, 0.5, 1.0] + [1.0] * G + [0.25, 0.0, 0.0, 1.0] + [0.0] * G
CONSTANT = [0.5] * 4 * G
Gradients = dict[str, torch.Tensor]


@dataclass
class CapturedGradients(TrainerCallback):  # type: ignore[misc]
    """The gradient of every optimizer step; None where a parameter has none."""

    steps: list[dict[str, torch.Tensor | None]] = field(default_factory=list)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: torch.nn.Module, **kwargs: Any
    ) -> None:
        self.steps.append(
            {
                name: None if p.grad is None else p.grad.detach().clone()
                for name, p in model.named_parameters()
                if p.requires_grad
            }
        )


def config(output: Path, **settings: Any) -> SoloGRPOConfig:
    defaults: dict[str, Any] = {
        "output_dir": str(output),
        "per_device_train_batch_size": len(MIXED),
        "num_generations": G,
        "max_completion_length": 12,
        "max_steps": 1,
        "max_grad_norm": 0.0,  # no clipping: it would hide a wrong scale
        "gradient_checkpointing": False,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return SoloGRPOConfig(**defaults | settings)


def problems(count: int = 8) -> Dataset:
    longer = [
        row | {"question": row["question"] + " Why?" * (i * 3 % 7)}
        for i, row in enumerate(rows(count))
    ]
    return build_prompts(Dataset.from_list(longer), RunArguments(system_prompt="Solve it."))


def make_trainer(
    trainer_class: type,
    model_path: Path,
    args: SoloGRPOConfig,
    reward: Any,
    **kwargs: Any,
) -> Any:
    """A trainer whose adapter already does something: both of its factors are random."""
    torch.manual_seed(0)
    lora = LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return trainer_class(
        model=AutoModelForCausalLM.from_pretrained(str(model_path), dtype=torch.float32),
        reward_funcs=reward,
        args=args,
        train_dataset=kwargs.pop("train_dataset", None) or problems(),
        processing_class=load_tokenizer(str(model_path)),
        peft_config=lora,
        **kwargs,
    )


@cache
def completion_ids(count: int, end_id: int) -> list[list[int]]:
    """Ragged completions of 1 to 12 tokens; the shorter ones end, those of 12 are cut off."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 13, (count,), generator=generator).tolist()
    lengths[:2] = [1, 12]
    made = [torch.randint(20, 500, (n,), generator=generator).tolist() for n in lengths]
    return [ids if len(ids) == 12 else [*ids[:-1], end_id] for ids in made]


def captured_gradients(
    trainer_class: type,
    model_path: Path,
    args: SoloGRPOConfig,
    rewards: Sequence[float] | dict[str, Sequence[float | None]],
) -> list[Gradients]:
    """Train on fixed completions and rewards; the gradient of every optimizer step."""
    return trained_on(trainer_class, model_path, args, rewards)[0]


def trained_on(
    trainer_class: type,
    model_path: Path,
    args: SoloGRPOConfig,
    rewards: Sequence[float] | dict[str, Sequence[float | None]],
) -> tuple[list[Gradients], dict[str, float]]:
    """The gradients, and what the last step logged; `rewards` are one or several by name."""
    captured = CapturedGradients()
    scores = rewards if isinstance(rewards, dict) else {"reward": rewards}
    trainer = make_trainer(
        trainer_class,
        model_path,
        args,
        [fixed_reward(name, values) for name, values in scores.items()],
        callbacks=[captured],
    )
    end_id = trainer.processing_class.eos_token_id
    trainer._generate_single_turn = lambda prompt_ids, *args, **kwargs: (
        completion_ids(len(prompt_ids), end_id),
        None,
    )
    # Plain descent: Adam would turn a gradient that is wrong by a factor into the same step.
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    trainer.optimizer = torch.optim.SGD(parameters, lr=args.learning_rate)
    trainer.train()
    # Without `logging_steps` all metrics are in the summary that ends a run.
    history = trainer.state.log_history
    steps = [logs for logs in history if "train_runtime" not in logs]
    return captured.steps, (steps or history)[-1]


def fixed_reward(name: str, scores: Sequence[float | None]) -> Callable[..., list[float | None]]:
    def reward(completions: list[Any], **kwargs: Any) -> list[float | None]:
        return list(scores[: len(completions)])

    reward.__name__ = name
    return reward


def stock_and_solo(
    path: Path, output: Path, rewards: Sequence[float], **settings: Any
) -> tuple[list[Gradients], list[Gradients]]:
    solo_only = {
        name: settings.pop(name)
        for name in ("train_token_budget", "share_prompts")
        if name in settings
    }
    stock = captured_gradients(GRPOTrainer, path, config(output, **settings), rewards)
    solo_args = config(output, **settings, **solo_only)
    return stock, captured_gradients(SoloGRPOTrainer, path, solo_args, rewards)


def relative_gap(a: Gradients, b: Gradients) -> float:
    """The largest over the parameters of |a - b| / |a|."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / a[name].norm()) for name in a)
