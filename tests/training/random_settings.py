"""Random settings of the trainer on random small models: the gradients of stock TRL and of ours."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer

from architectures import build
from fixed_rollouts import captured_gradients, config
from sologrpo.training.trainer import SoloGRPOTrainer
from tiny import build_tokenizer

BOUND = 1e-4  # of the norm of all gradients of a step
FAMILIES = (
    "llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mistral", "granite", "olmo2",
    "smollm3", "phi3", "gpt_neox", "gpt2", "lfm2", "afmoe", "qwen3_moe", "deepseek_v3", "diffllama",
)  # fmt: skip
SOLO_ONLY = ("train_token_budget", "share_prompts")


@dataclass(frozen=True)
class Drawn:
    """Hold a model, and the settings and rewards of a run on it, drawn by a seed."""

    family: str
    attention: str
    is_tied: bool
    settings: dict[str, Any]
    rewards: dict[str, list[float | None]]


def draw(seed: int) -> Drawn:
    """Draw settings; each family comes once in as many seeds as there are families."""
    r = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    G, groups, accumulation = r.choice([2, 3, 4]), r.choice([2, 4]), r.choice([1, 1, 2])
    loss_type = r.choice(["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"])
    beta = r.choice([0.0, 0.0, 0.02, 0.2])
    settings: dict[str, Any] = {
        "num_generations": G,
        "gradient_accumulation_steps": accumulation,
        "per_device_train_batch_size": G * groups // 2,
        "steps_per_generation": accumulation * r.choice([1, 1, 2]),
        "num_iterations": r.choice([1, 1, 2]),
        "max_steps": r.choice([1, 2]),
        "loss_type": loss_type,
        "beta": beta,
        "scale_rewards": r.choice(["group", "batch", "none"]),
        "epsilon": r.choice([0.2, 0.05]),
        "epsilon_high": 2.0 if loss_type == "cispo" else r.choice([None, 0.28]),
        "temperature": r.choice([1.0, 0.7, 1.3]),
        "mask_truncated_completions": r.random() < 0.3,
        "importance_sampling_level": (
            "sequence" if loss_type == "luspo" or r.random() < 0.3 else "token"
        ),
        "use_bias_correction_kl": bool(beta) and r.random() < 0.4,
        "multi_objective_aggregation": r.choice(
            ["sum_then_normalize", "sum_then_normalize", "normalize_then_sum"]
        ),
        "pad_to_multiple_of": r.choice([None, None, 8]),
        "gradient_checkpointing": r.random() < 0.3,
        "max_grad_norm": r.choice([0.0, 0.05]),
        "router_aux_loss_coef": r.choice([None, 0.0]),
        "learning_rate": 0.01 if loss_type == "vespo" else 0.05,
    }
    if loss_type in ("grpo", "dapo", "dr_grpo", "bnpo") and r.random() < 0.3:
        settings["delta"] = r.choice([1.5, 4.0])
    if r.random() < 0.2:
        settings["off_policy_mask_threshold"] = r.choice([0.02, 0.1])
    if r.random() < 0.1:
        settings["entropy_coef"] = 0.01
    if r.random() < 0.1:
        settings["top_entropy_quantile"] = 0.5
    if r.random() < 0.5:
        settings["train_token_budget"] = r.choice([60, 200, 600])
    if r.random() < 0.3:
        settings["share_prompts"] = False
    eager = family == "gemma2" or r.random() < 0.15
    size = settings["per_device_train_batch_size"] * settings["steps_per_generation"]
    n_rewards, unsure = r.choice([1, 1, 2]), r.random() < 0.2
    if n_rewards == 2:
        settings["reward_weights"] = [1.0, 0.5]
    rewards = {}
    for name in ("first", "second")[:n_rewards]:
        values: list[float | None] = [r.choice([0.0, 0.5, 1.0]) for _ in range(size)]
        values[: G * (size // G // 2)] = [1.0] * (G * (size // G // 2))  # groups without a signal
        values[-1] = None if unsure else values[-1]
        rewards[name] = values
    return Drawn(family, "eager" if eager else "sdpa", r.random() < 0.5, settings, rewards)


def gap_to_stock(drawn: Drawn, folder: Path) -> float:
    """Return the largest difference of a step's gradients, relative to stock TRL's."""
    tokenizer = build_tokenizer()
    model = build(
        drawn.family, drawn.attention, vocab_size=len(tokenizer), max_position_embeddings=512,
        n_positions=512, tie_word_embeddings=drawn.is_tied, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    path = folder / "model"
    model.save_pretrained(str(path))
    tokenizer.save_pretrained(str(path))
    stock_settings = {k: v for k, v in drawn.settings.items() if k not in SOLO_ONLY}
    stock, solo = (
        captured_gradients(trainer, path, config(folder, **settings), drawn.rewards)
        for trainer, settings in ((GRPOTrainer, stock_settings), (SoloGRPOTrainer, drawn.settings))
    )
    assert len(stock) == len(solo)
    return max(_gap(one, other) for one, other in zip(stock, solo, strict=True))


def _gap(stock: dict[str, torch.Tensor], solo: dict[str, torch.Tensor]) -> float:
    assert stock.keys() == solo.keys()
    differences = torch.stack([(stock[name] - solo[name]).norm() for name in stock])
    norm = torch.stack([gradient.norm() for gradient in stock.values()]).norm()
    return float(differences.norm() / norm) if norm else float(differences.norm())
