"""The planned memory of a run agrees with what its passes keep."""

from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig
from trl import get_peft_config

from sologrpo.config.arguments import SoloGRPOConfig
from sologrpo.config.parsing import parse_config
from sologrpo.model.loading import keep_trainable_in_fp32, load_base_model, skip_undone_casts
from sologrpo.model.memory import activation_bytes
from sologrpo.plan.footprint import Footprint, footprint
from sologrpo.plan.memory_plan import MemoryPlan, memory_fix, plan_memory
from sologrpo.plan.preflight import build_policy
from tiny import with_adapter

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


@pytest.mark.parametrize(
    ("dtype", "dropout", "rows", "row_T"),
    # In bf16, autocast keeps copies of the adapter's weights too: few among many tokens.
    [("float32", 0.0, 4, 16), ("float32", 0.1, 4, 16), ("bfloat16", 0.0, 16, 64)],
)
@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_activations_are_those_of_a_real_pass(
    request: pytest.FixtureRequest, family: str, dtype: str, dropout: float, rows: int, row_T: int
) -> None:
    folder = request.getfixturevalue(f"tiny_{family}")
    _, _, model_args = parse_config([
        *ARGUMENTS, "--model_name_or_path", str(folder), "--dtype", dtype,
        "--lora_dropout", str(dropout),
    ])  # fmt: skip
    size = footprint(build_policy(model_args), model_args)
    policy = get_peft_model(load_base_model(model_args), get_peft_config(model_args))
    keep_trainable_in_fp32(policy)
    skip_undone_casts(policy)
    policy.train()
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, 100, (rows, row_T))
    half = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")
    with half, saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.get_base_model().base_model(input_ids=ids, use_cache=False)
    assert size.trained_token_bytes * rows * row_T == pytest.approx(sum(kept.values()), rel=0.1)
    with half:  # as before a run, on the loaded model
        assert activation_bytes(policy) == pytest.approx(size.trained_token_bytes, rel=0.1)


def test_counting_activations_draws_no_random_numbers(tiny_llama: Path) -> None:
    policy = with_adapter(tiny_llama, lora_dropout=0.1).train()
    before = torch.get_rng_state()
    assert activation_bytes(policy) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in policy.modules())


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


def test_a_pass_as_in_trl_is_a_padded_micro_batch() -> None:
    """The quickstart with an entropy bonus was planned at 2.9 GiB, and was killed at 20."""
    args = settings("--per_device_train_batch_size", "16", "--gradient_accumulation_steps", "4")
    plan = plan_memory(SIZE, args, [100, 300], 80 * GIB, packed=False, on_gpu=True)
    assert (plan.trained_tokens, plan.step_tokens) == (16 * 348, 64 * 348)
    fix = memory_fix(plan, plan.needed - 1, args, four_bit=True)
    assert "lower per_device_train_batch_size" in (fix or "")
    # TRL's LM head sees prompts and padding there too, in its own tiles and several copies.
    on_cpu = plan_memory(SIZE, args, [100, 300], 80 * GIB, packed=False, on_gpu=False)
    assert on_cpu.logits > 7 * plan.logits


def test_a_pass_is_made_to_fit() -> None:
    long = ("--gradient_checkpointing", "true", "--max_completion_length", "1024")
    plans = {free: planned(*long, free=free * GIB) for free in (9, 12, 80)}
    assert plans[9].trained_tokens < plans[12].trained_tokens < plans[80].trained_tokens
    for free, plan in plans.items():
        assert memory_fix(plan, free * GIB, settings(*long), four_bit=True) is None


def test_the_8b_model_in_four_bits_on_16_gb(tmp_path: Path) -> None:
    """Eight completions of 1,024 tokens after a prompt of 512, all in one training pass."""
    layers, hidden, inner, kv, vocabulary, rank = 32, 4096, 14336, 1024, 128256, 8
    AutoConfig.for_model(
        "llama", vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    tokens = 511 + 8 * 1024  # a completion begins with its own copy of the last prompt token
    _, args, model_args = parse_config([
        "--config", str(ROOT / "configs/llama3.1-8b.yaml"), "--model_name_or_path", str(tmp_path),
        "--dtype", "bfloat16", "--num_generations", "8", "--per_device_train_batch_size", "8",
        "--gradient_accumulation_steps", "1", "--max_completion_length", "1024",
        "--train_token_budget", str(tokens),
    ])  # fmt: skip
    assert args.gradient_checkpointing
    assert model_args.lora_dropout
    size = footprint(build_policy(model_args), model_args)
    free = 15 * GIB  # CUDA's context and kernels take the rest
    plan = plan_memory(size, args, [512], free, on_gpu=True)

    linear = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner)
    others = 2 * vocabulary * hidden + (2 * layers + 1) * hidden  # embedding, LM head, norms
    nf4 = 0.5 + (1 + 4 / 256) / 64  # half a byte a weight, and the scales of the blocks
    assert plan.weights == pytest.approx(linear * nf4 + others * 2, rel=1e-6)
    sides = 2 * (hidden + hidden) + 2 * (hidden + kv) + 3 * (hidden + inner)
    assert plan.adapter == 16 * layers * rank * sides  # weight, gradient, two moments, all in fp32

    assert plan.trained_tokens == tokens
    assert plan.activations == layers * tokens * hidden * 2  # the input of each layer, in bf16
    inputs = 6 * hidden + inner  # of the seven LoRA layers
    activations = (
        2 * 4 * hidden  # of the norms, in fp32
        + 2 * (hidden + 2 * kv + hidden)  # query, key, value and output of attention
        + 2 * 3 * inner  # gate, its activation, up
        + 2 * 2 * inputs  # dropout's masks and outputs
        + 2 * 7 * rank  # between the factors of the adapter
    )
    assert plan.layer == pytest.approx(2 * tokens * activations, rel=0.03)  # with the gradients
    assert plan.logits == 4096 * 32768 * 2  # one tile
    token = layers * 2 * kv * 2  # keys and values, in bf16
    assert plan.cache == (512 + 8 * 1024) * token + 8 * vocabulary * 32

    parts = (plan.weights, plan.adapter, plan.activations, plan.layer)
    assert plan.needed == sum(parts) < free
    assert plan.sampling(free) == (0, plan.cache)  # a merged copy does not fit
    assert plan.peak(free) == plan.needed
