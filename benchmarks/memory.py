"""Memory: the plan compared with a run on a CPU, and which recipes fit on which cards.

    python benchmarks/memory.py            # measure, then write the tables of docs/memory.md
    python benchmarks/memory.py --tables   # only write them

Each measurement is one complete step with random weights in a separate process. Its tensors, and
the peak resident memory of the process, are compared with `plan_memory`; a step of a tiny model
comes first, so that libraries do not count. The tables of cards are computed by the same function.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `sologrpo`, whether or not the project is installed

import torch  # noqa: E402
from _llama import SHAPES, build_config  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from sologrpo.config.arguments import RunArguments, SoloGRPOConfig  # noqa: E402
from sologrpo.config.parsing import parse_config  # noqa: E402
from sologrpo.model.memory import bytes_for_tensors, cpu_process, free_bytes  # noqa: E402
from sologrpo.plan.footprint import Footprint, footprint  # noqa: E402
from sologrpo.plan.memory_plan import MemoryPlan, memory_fix, plan_memory  # noqa: E402
from sologrpo.plan.preflight import build_policy  # noqa: E402
from sologrpo.startup import cpu_environment  # noqa: E402

RESULTS = ROOT / "benchmarks/results/memory.json"
GUIDE = ROOT / "docs/memory.md"
BEGIN, END = "<!-- memory:begin -->", "<!-- memory:end -->"
GIB = 2**30

# Sizes of the steps that are measured; activation checkpointing and number format of each.
PROMPTS, PROMPT_TOKENS, GENERATIONS, TOKENS = 2, 100, 8, 256
CASES = [
    ("25m", False, "float32"), ("135m", False, "float32"), ("135m", True, "float32"),
    ("360m", False, "float32"), ("360m", True, "float32"),
    ("25m", False, "bfloat16"), ("135m", False, "bfloat16"), ("135m", True, "bfloat16"),
]  # fmt: skip

CARDS = (16, 24, 40, 80)
CONTEXT_GIB = 1.0  # of a card: CUDA's context, kernels and what a desktop takes
ESTIMATED, NEVER_TRIED = "estimated", "never tried"
RECIPES = ("qwen2.5-1.5b", "llama3.1-8b", "llama3.1-8b-fast", "boxed-fewshot", "r1-zero-on-policy")
EIGHT_B = "llama3.1-8b"
# Eight long completions of a prompt, all in one training pass.
LONG_PROMPT, LONG_COMPLETION, LONG_GROUP = 512, 1024, 8
LONG_TOKENS = LONG_PROMPT - 1 + LONG_GROUP * LONG_COMPLETION
LONG = (
    "--num_generations", str(LONG_GROUP), "--per_device_train_batch_size", str(LONG_GROUP),
    "--gradient_accumulation_steps", "1", "--max_completion_length", str(LONG_COMPLETION),
    "--train_token_budget", str(LONG_TOKENS),
)  # fmt: skip
# From their config.json.
QWEN2_5_1_5B = Qwen2Config(
    vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
    num_attention_heads=12, num_key_value_heads=2, max_position_embeddings=32768,
    tie_word_embeddings=True,
)  # fmt: skip
QWEN3_8B = Qwen3Config(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
    tie_word_embeddings=False,
)  # fmt: skip


def config_of(model: str) -> PretrainedConfig:
    """Look up the architecture of a recipe's model by its name."""
    if "Qwen3-8B" in model:
        return QWEN3_8B
    return QWEN2_5_1_5B if "1.5B" in model else build_config("8b")


# -- measured on a CPU ---------------------------------------------------------------------------


def measure(shape: str, checkpointing: bool, dtype: str) -> dict[str, Any]:
    """Take one step in this process; return GiB planned and measured."""
    from _measure import resident_gib

    from sologrpo.console import quiet_libraries

    quiet_libraries()
    free = free_bytes(torch.device("cpu"))
    one_step("tiny", checkpointing, dtype)
    before = resident_gib("VmRSS")
    size, plan, tensors = one_step(shape, checkpointing, dtype)
    return {
        "shape": shape,
        "checkpointing": checkpointing,
        "dtype": dtype,
        "parameters": size.total,
        "weights": plan.weights / GIB,
        "adapter": plan.adapter / GIB,
        "sampling": (plan.merged + plan.cache) / GIB,
        "training": plan.training / GIB,
        "planned": plan.peak(free) / GIB,
        "tensors": tensors / GIB,
        "process": resident_gib("VmHWM") - before,
    }


def one_step(shape: str, checkpointing: bool, dtype: str) -> tuple[Footprint, MemoryPlan, int]:
    """Take one step; return sizes and plan of its run, and the peak bytes of its tensors."""
    from _live_memory import LiveMemory
    from _llama import build_prompts, build_tokenizer
    from _trainers import Workload, build, settings_for

    with tempfile.TemporaryDirectory() as folder:
        settings = settings_for(
            folder,
            Path(folder) / "output",
            num_generations=GENERATIONS,
            gradient_accumulation_steps=PROMPTS,
            max_completion_length=TOKENS,
            gradient_checkpointing=checkpointing,
            dtype=dtype,
            bf16=dtype == "bfloat16",
        )
        _, args, model_args = settings
        tokenizer = build_tokenizer(build_config(shape).vocab_size)
        # One prompt more than is trained on: TRL's sampler drops an incomplete batch.
        dataset = build_prompts(PROMPTS + 1, PROMPT_TOKENS, len(tokenizer))
        workload = Workload(settings, tokenizer, dataset, lambda: _random_model(shape, dtype))
        workload.invent = _full_length
        build_config(shape).save_pretrained(folder)
        size = footprint(build_policy(model_args), model_args)
        process = cpu_process(size.number_bytes, checkpointing)
        free = bytes_for_tensors(torch.device("cpu"), process)
        plan = plan_memory(size, args, [PROMPT_TOKENS], free, on_gpu=False)
        with LiveMemory() as memory:
            only = build(["solo"], workload)["solo"]
            only.samples = True
            only.train()
    return size, plan, memory.peak


def _random_model(shape: str, dtype: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        build_config(shape), dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )


def _full_length(prompts: list[list[int]]) -> list[list[int]]:
    """Build completions of maximum length, as the plan assumes."""
    return [[100] * TOKENS for _ in prompts]


def measure_all() -> None:
    """Run each case in a separate process; write each row as soon as it is measured."""
    rows = []
    for shape, checkpointing, dtype in CASES:
        command = [sys.executable, __file__, "--worker", shape, str(int(checkpointing)), dtype]
        done = subprocess.run(
            command, env=cpu_environment(os.environ), capture_output=True, text=True, check=False,
            cwd=ROOT,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{shape}: {done.stderr[-2000:]}")
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
        print({key: round(v, 3) if isinstance(v, float) else v for key, v in rows[-1].items()})
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def measured_table(rows: list[dict[str, Any]]) -> str:
    """Build the table of planned and measured memory."""
    lines = [
        "| Model | number format | checkpointing | weights | adapter | sampling | training | "
        "planned peak | tensors | planned / tensors | process |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        parts = (row[key] for key in ("weights", "adapter", "sampling", "training", "planned",
                                      "tensors"))  # fmt: skip
        lines.append(
            f"| {row['parameters'] / 1e6:.0f}M | {row['dtype']} | "
            f"{'yes' if row['checkpointing'] else 'no'} | "
            + " | ".join(f"{part:.2f}" for part in parts)
            + f" | {row['planned'] / row['tensors']:.2f} | {row['process']:.2f} |"
        )
    return "\n".join(lines)


# -- computed for cards --------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A shipped config, and the size of its policy."""

    run: RunArguments
    args: SoloGRPOConfig
    four_bit: bool
    size: Footprint

    @property
    def prompt_T(self) -> int:
        """Tokens of its longest prompt."""
        return self.run.max_prompt_tokens or 512

    def plan(self, free: int) -> tuple[MemoryPlan, str | None]:
        """Plan its memory on a GPU with this much free; return what to change, too."""
        plan = plan_memory(self.size, self.args, [self.prompt_T], free, on_gpu=True)
        return plan, memory_fix(plan, free, self.args, self.four_bit)


@cache
def recipe(name: str, *changes: str) -> Recipe:
    """Read a shipped config as a card would run it: in bf16, whatever this machine has."""
    arguments = ["--config", str(ROOT / f"configs/{name}.yaml"), "--dtype", "bfloat16", *changes]
    model = str(parse_config(arguments)[2].model_name_or_path)
    with tempfile.TemporaryDirectory() as folder:
        config_of(model).save_pretrained(folder)
        run, args, model_args = parse_config([*arguments, "--model_name_or_path", folder])
        size = footprint(build_policy(model_args), model_args)
    return Recipe(run, args, bool(model_args.load_in_4bit), size)


def free_on(card: int) -> int:
    """Return the bytes that a run can use on a card of this many GB."""
    return int((card - CONTEXT_GIB) * GIB)


def cards_table() -> str:
    """Build the table of cards: what a recipe takes as it is, otherwise what to change."""
    sizes = "".join(f" {card} GB |" for card in CARDS)
    lines = [
        f"| Recipe | weights, adapter |{sizes} basis |",
        "|---" * (3 + len(CARDS)) + "|",
    ]
    for name in RECIPES:
        shipped = recipe(name)
        cells = [_cell(shipped, free_on(card)) for card in CARDS]
        link = f"[{name}](../configs/{name}.yaml)"
        lines.append(_line(link, f"{_held(shipped.size) / GIB:.1f}", *cells, ESTIMATED))
    shipped = recipe(EIGHT_B)
    copy = 2 * shipped.size.total  # vLLM's, in bf16
    cells = [_cell(shipped, free_on(card), copy) for card in CARDS]
    both = f"{_held(shipped.size) / GIB:.1f} + {copy / GIB:.1f}"
    return "\n".join([*lines, _line(f"{EIGHT_B}, vLLM on the same GPU", both, *cells, NEVER_TRIED)])


def _held(size: Footprint) -> int:
    return size.weights_bytes + size.adapter_bytes


def _cell(shipped: Recipe, free: int, vllm: int = 0) -> str:
    """Describe a run on a card; vLLM keeps its weights and the cache all the time."""
    if vllm:
        vllm += shipped.plan(free)[0].cache
    plan, fix = shipped.plan(free - vllm)
    if fix is not None:
        return "no" if vllm else f"no: {fix}"
    if vllm:
        return f"{(vllm + plan.needed) / GIB:.1f}: {plan.trained_tokens:,}"
    merged, _ = plan.sampling(free)
    peak = f"{plan.peak(free) / GIB:.1f}: {plan.trained_tokens:,}"
    return f"{peak}, {'merged' if merged else 'unmerged'}"


def components_table() -> str:
    """Build the table of the components of an 8B model that trains on long completions."""
    shipped, free = recipe(EIGHT_B, *LONG), free_on(CARDS[0])
    size, (plan, _) = shipped.size, shipped.plan(free)
    tokens = f"{plan.trained_tokens:,} tokens"
    token_layer = size.trained_token_bytes / size.layers / 1024
    merged, kept = plan.sampling(free)
    assert not merged, "the table lists no merged copy"
    rows = [
        ("weights", "0.516 bytes per weight of the linear layers, 2 of embedding and LM head",
         plan.weights),
        ("adapter", f"{size.trainable:,} parameters at 16 bytes", plan.adapter),
        ("layer inputs", f"{size.layers} layers x {tokens} x {size.hidden_size:,} x 2 bytes",
         plan.activations),
        ("one layer", f"2 x {tokens} x {token_layer:.0f} KiB: activations, and their gradients",
         plan.layer),
        ("**training**", "the sum", plan.needed),
        ("keys and values", f"({LONG_PROMPT} + {LONG_GROUP} x {LONG_COMPLETION:,}) tokens x "
         f"{size.sampled_token_bytes // 1024} KiB; logits of {LONG_GROUP} rows", kept),
        ("**sampling**", "weights, adapter, keys and values", plan.held + kept),
    ]  # fmt: skip
    lines = ["| Component | computed as | GiB | basis |", "|---|---|---|---|"]
    lines += [_line(name, text, f"{value / GIB:.2f}", ESTIMATED) for name, text, value in rows]
    return "\n".join(lines)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def with_tables(text: str) -> str:
    """Put the tables between the marks in the guide."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    measured = measured_table(rows) if rows else "Not measured yet."
    tables = (
        f"### Measured on a CPU\n\n{measured}\n\n"
        f"### What fits on which card\n\n{cards_table()}\n\n"
        f"### 8B in NF4, by component\n\n{components_table()}"
    )
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def main() -> None:
    """Measure if requested, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", action="store_true", help="do not measure again")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        shape, checkpointing, dtype = args.worker
        print(json.dumps(measure(shape, checkpointing == "1", dtype)))
        return
    assert all(shape in SHAPES for shape, *_ in CASES)
    if not args.tables:
        measure_all()
    GUIDE.write_text(with_tables(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
