"""Every recipe family learns: on a toy task its own settings raise the reward.

The settings of the shipped recipes decide (loss, advantages, clipping, passes over a batch, KL,
sampling); only model, data, sizes, schedule and rewards are replaced. A model of random weights
cannot solve problems, but it can learn to write digits.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from trl import get_peft_config

from rewards import load_rewards
from rewards.completions import texts_of
from sologrpo.config.parsing import parse_config
from sologrpo.data.dataset import load_train_and_validation
from sologrpo.model.loading import load_base_model, load_tokenizer
from sologrpo.training.packing import Batch
from sologrpo.training.trainer import SoloGRPOTrainer
from tiny import ROOT

# The mean reward of a family must rise by so much; with a wrong sign of the advantages it does not.
MARGIN = 0.2
TOY = {
    "load_in_4bit": "false",
    "dtype": "float32",
    "bf16": "false",
    "num_generations": "8",
    "per_device_train_batch_size": "32",
    "gradient_accumulation_steps": "1",
    "max_completion_length": "10",
    "learning_rate": "0.005",
    "lr_scheduler_type": "constant",
    "warmup_steps": "0",
    "eval_strategy": "no",
    "num_validation_examples": "0",
    "save_strategy": "no",
    "log_completions": "false",
    "max_train_examples": "12",
}
DIGITS, ENOUGH_DIGITS = "test_learning:digit_share", "test_learning:enough_digits"


@dataclass(frozen=True)
class Family:
    """A recipe, how the toy run differs from `TOY`, and its number of generation batches."""

    recipe: str
    rewards: tuple[str, ...] = (DIGITS,)
    settings: tuple[tuple[str, str], ...] = ()
    batches: int = 14
    updates: int = 1  # optimizer steps on each generation batch


MINI_BATCHES = (
    ("per_device_train_batch_size", "8"),
    ("generation_batch_size", "32"),
    ("learning_rate", "0.01"),
)
FAMILIES = {
    "xml": Family("llama3.1-8b"),
    "xml-fast": Family("llama3.1-8b-fast", batches=10, updates=4),
    "r1-zero-on-policy": Family("r1-zero-on-policy"),
    "r1-zero-off-policy": Family(
        "r1-zero-off-policy", (DIGITS,), MINI_BATCHES, batches=14, updates=8
    ),
    "dr-grpo": Family("dr-grpo"),
    "boxed": Family("boxed-fewshot", (ENOUGH_DIGITS,)),
    "xml-gated": Family(
        "llama3.1-8b", (ENOUGH_DIGITS, DIGITS), (("outcome_reward", "enough_digits"),)
    ),
}


def digit_share(completions: list[Any], **kwargs: Any) -> list[float]:
    texts = texts_of(completions)
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts]


def enough_digits(completions: list[Any], **kwargs: Any) -> list[float]:
    """Right or wrong, as an answer is: some groups are all right or all wrong."""
    return [float(share > 0.1) for share in digit_share(completions)]


class WrongSign(SoloGRPOTrainer):
    """Trains on the negative advantages."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        batch = super()._generate_and_score_completions(inputs)
        batch["advantages"] = -batch["advantages"]
        return batch


def gain(
    trainer_class: type[SoloGRPOTrainer],
    family: Family,
    model: Path,
    data: Path,
    output: Path,
    seed: int = 0,
) -> float:
    """Mean of the first reward over the last two generation batches, less that of the first."""
    places = {"model_name_or_path": model, "dataset_name": data, "output_dir": output}
    steps = family.batches * family.updates
    settings = TOY | dict(family.settings) | places | {"max_steps": steps, "seed": seed}
    argv = ["--config", str(ROOT / "configs" / f"{family.recipe}.yaml")]
    argv += [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    run, args, model_args = parse_config([*argv, "--rewards", *family.rewards])
    tokenizer = load_tokenizer(str(model), False)
    rows, _ = load_train_and_validation(run, tokenizer, args.seed)
    torch.manual_seed(seed)
    trainer = trainer_class(
        model=load_base_model(model_args, False),
        reward_funcs=load_rewards(run.rewards, rows.column_names),
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    name = f"rewards/{trainer.reward_func_names[0]}/mean"
    rewards = [row[name] for row in trainer.state.log_history if name in row]
    assert len(rewards) == family.batches
    return mean(rewards[-2:]) - rewards[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_family_learns(name: str, tiny_llama: Path, tiny_data: Path, tmp_path: Path) -> None:
    assert gain(SoloGRPOTrainer, FAMILIES[name], tiny_llama, tiny_data, tmp_path) > MARGIN


# One of each reward: the margin is that of all families.
@pytest.mark.parametrize("name", ["xml", "boxed", "xml-gated"])
def test_wrong_sign_of_the_advantages_misses_the_margin(
    name: str, tiny_llama: Path, tiny_data: Path, tmp_path: Path
) -> None:
    assert gain(WrongSign, FAMILIES[name], tiny_llama, tiny_data, tmp_path) < MARGIN / 2
