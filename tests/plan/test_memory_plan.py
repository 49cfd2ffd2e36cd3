"""The planned memory of a run agrees with what its passes keep."""

from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from torch.autograd.graph import saved_tensors_hooks
from trl import get_peft_config

from sologrpo.config.arguments import SoloGRPOConfig
from sologrpo.config.parsing import parse_config
from sologrpo.model.loading import keep_trainable_in_fp32, load_base_model
from sologrpo.plan.footprint import Footprint, footprint
from sologrpo.plan.memory_plan import MemoryPlan, memory_fix, plan_memory
from sologrpo.plan.preflight import build_policy

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = ["--config", str(ROOT / "configs/quickstart.yaml"), "--dtype", "float32"]
GIB = 2**30
SIZE = Footprint(
    total=8_000_000_000, trainable=20_000_000, weights_bytes=6 * GIB, adapter_bytes=GIB // 3,
    checkpoint_bytes=GIB // 4, merged_bytes=14 * GIB, sampled_token_bytes=131_072,
    trained_token_bytes=7_000_000, layers=32, hidden_size=4096, number_bytes=2,
    vocabulary=128_256, context=131_072,
)  # fmt: skip


def settings(*arguments: str) -> SoloGRPOConfig:
    return parse_config([*ARGUMENTS, *arguments])[1]


def planned(*arguments: str, free: int = 80 * GIB) -> MemoryPlan:
    return plan_memory(SIZE, settings(*arguments), [100, 300], free, on_gpu=True)


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_activations_are_those_of_a_real_pass(request: pytest.FixtureRequest, family: str) -> None:
    folder = request.getfixturevalue(f"tiny_{family}")
    _, _, model_args = parse_config([*ARGUMENTS, "--model_name_or_path", str(folder)])
    size = footprint(build_policy(model_args), model_args)
    policy = get_peft_model(load_base_model(model_args), get_peft_config(model_args))
    keep_trainable_in_fp32(policy)
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    B, T = 4, 16
    ids = torch.randint(0, 100, (B, T))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.get_base_model().base_model(input_ids=ids, use_cache=False)
    assert size.trained_token_bytes * B * T == pytest.approx(sum(kept.values()), rel=0.1)


def test_parts_grow_with_what_they_depend_on() -> None:
    base = planned()
    longer = planned("--max_completion_length", "480")
    assert longer.cache > base.cache
    assert longer.activations >= base.activations
    smaller = planned("--train_token_budget", "1200")
    assert smaller.trained_tokens <= 1200 < base.trained_tokens
    assert smaller.activations < base.activations
    assert smaller.logits < base.logits
    lean = planned("--gradient_checkpointing", "true")
    assert lean.activations < base.activations / 5
    # A row is never cut, however small the budget.
    smallest = planned("--train_token_budget", "1")
    assert smallest.trained_tokens == 299 + settings().max_completion_length


def test_sampling_takes_what_is_left() -> None:
    plan = planned("--gradient_checkpointing", "true")
    assert plan.peak(80 * GIB) == plan.held + plan.merged + plan.cache
    assert plan.peak(16 * GIB) < 16 * GIB  # without the merged copy
    assert plan.peak(16 * GIB) >= plan.needed


@pytest.mark.parametrize(
    ("arguments", "free", "four_bit", "says"),
    [
        (["--gradient_checkpointing", "true"], 16, True, None),
        ([], 8, True, "gradient_checkpointing: true"),
        ([], 6, True, "use a smaller model"),
        ([], 6, False, "load_in_4bit: true"),
        (["--gradient_checkpointing", "true", "--train_token_budget", "65536",
          "--max_completion_length", "1024"], 16, True, "leave out train_token_budget"),
        (["--gradient_checkpointing", "true", "--max_completion_length", "30000"], 16, True,
         "max_completion_length"),
    ],
)  # fmt: skip
def test_memory_fix(arguments: list[str], free: int, four_bit: bool, says: str | None) -> None:
    args = settings(*arguments)
    plan = plan_memory(SIZE, args, [300], free * GIB, on_gpu=True)
    fix = memory_fix(plan, free * GIB, args, four_bit)
    assert (fix is None) == (says is None)
    assert (says or "") in (fix or "")


def test_a_pass_is_made_to_fit() -> None:
    long = ("--gradient_checkpointing", "true", "--max_completion_length", "1024")
    plans = {free: planned(*long, free=free * GIB) for free in (9, 12, 80)}
    assert plans[9].trained_tokens < plans[12].trained_tokens < plans[80].trained_tokens
    for free, plan in plans.items():
        assert memory_fix(plan, free * GIB, settings(*long), four_bit=True) is None
