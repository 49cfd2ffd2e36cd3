"""The plan names the kernels that the trainer then uses."""

from pathlib import Path

import pytest
import torch
from trl import GRPOTrainer

from fixed_rollouts import problems
from sologrpo.config.parsing import parse_config
from sologrpo.console import Terminal
from sologrpo.model.loading import load_base_model, load_tokenizer
from sologrpo.plan import kernels
from sologrpo.plan.preflight import build_policy
from sologrpo.training.run import build_trainer
from sologrpo.training.trainer import SoloGRPOTrainer

SHARED = "PyTorch's attention along the tree of prompts, if its trial agrees; "
LOOP = "sdpa for prompts, then products with their shared cache"


def described(config_file: Path, *arguments: str) -> kernels.Kernels:
    run, args, model_args = parse_config(["--config", str(config_file), *arguments])
    policy = build_policy(model_args)
    return kernels.describe_kernels(run, args, model_args, problems(), policy)


def trainer_of(config_file: Path, *arguments: str) -> GRPOTrainer:
    settings = parse_config(["--config", str(config_file), *arguments])
    settings[1].reward_weights = None
    model, path = load_base_model(settings[2]), str(settings[2].model_name_or_path)
    rewards = [lambda completions, **_: [0.0] * len(completions)]
    datasets = problems(), None
    return build_trainer(settings, model, rewards, datasets, load_tokenizer(path), Terminal())


@pytest.mark.parametrize(
    ("arguments", "training", "sampling"),
    [
        ([], SHARED, LOOP),
        (["--share_prompts", "false"], "sdpa attention, prompts not shared (share_prompts", LOOP),
        (
            ["--attn_implementation", "eager"],
            "eager attention, prompts not shared (eager attention follows no tree)",
            LOOP,
        ),
        (["--loss_type", "bnpo"], "as in TRL (loss_type bnpo", LOOP),
        (["--trainer", "stock"], "as in TRL (trainer: stock): sdpa", "as in TRL (trainer: stock)"),
        (["--repetition_penalty", "1.1"], SHARED, "as in TRL (the model or generation_kwargs"),
    ],
)
def test_the_trainer_does_what_the_plan_names(
    arguments: list[str], training: str, sampling: str, config_file: Path
) -> None:
    planned = described(config_file, *arguments)
    assert training in planned.training
    assert sampling in planned.sampling
    trainer = trainer_of(config_file, *arguments)
    is_ours = isinstance(trainer, SoloGRPOTrainer)
    assert planned.packs == ("as in TRL" not in planned.training)
    assert planned.packs == (is_ours and trainer.is_packed)
    if planned.packs:
        assert planned.shares_prompts == trainer._scorer._shares_prompts == (training == SHARED)
    if is_ours:
        trainer._generate_single_turn([[5, 6, 7]] * 4, None, {}, 4)
        assert ("as in TRL" in planned.sampling) == ("sampling" in trainer.as_in_trl)


def test_kernels_of_a_gpu(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "one_device", lambda: "cuda:0")
    monkeypatch.setattr(kernels, "_use_triton", lambda device: device == torch.device("cuda:0"))
    planned = described(config_file, "--load_in_4bit", "true")
    training = planned.training
    assert training.startswith("FlexAttention along the tree of prompts, if its trial agrees")
    assert "; TRL's log-probs in Triton, in tiles of 32,768 tokens" in training
    assert "; NF4 products of bitsandbytes 0." in training
    assert planned.sampling == f"{LOOP}, in CUDA graphs"


@pytest.mark.parametrize("is_set", [False, True])
def test_liger_is_named_where_it_is_installed(
    is_set: bool, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Liger" not in described(config_file).training
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    monkeypatch.setattr(kernels.metadata, "version", lambda name: "0.9")
    training = described(config_file, "--use_liger_kernel", str(is_set)).training
    if is_set:
        assert training.startswith("as in TRL (Liger replaces layers of the model)")
        assert training.endswith("; layers of Liger 0.9")
    else:
        assert training.startswith(SHARED)
        assert training.endswith("; Liger is installed, and not used")
