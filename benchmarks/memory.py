"""Memory: the plan compared with a run on a CPU, and which recipes fit on which cards.

    python benchmarks/memory.py            # measure, then write the tables of docs/memory.md
    python benchmarks/memory.py --tables   # only write them

Each measurement is one complete step with random weights in a separate process. Its tensors, and
the peak resident memory of the process, are compared with `plan_memory`; a step of a tiny model
comes first, so that libraries do not count. The table of cards is computed by the same function.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
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

from sologrpo.config.parsing import parse_config  # noqa: E402
from sologrpo.model.memory import bytes_for_tensors, free_bytes  # noqa: E402
from sologrpo.plan.footprint import Footprint, footprint  # noqa: E402
from sologrpo.plan.memory_plan import MemoryPlan, memory_fix, plan_memory  # noqa: E402
from sologrpo.plan.preflight import build_policy  # noqa: E402
from sologrpo.startup import cpu_environment  # noqa: E402

RESULTS = ROOT / "benchmarks/results/memory.json"
GUIDE = ROOT / "docs/memory.md"
BEGIN, END = "<!-- memory:begin -->", "<!-- memory:end -->"
GIB = 2**30

# Sizes of the steps that are measured, and activation checkpointing.
PROMPTS, PROMPT_TOKENS, GENERATIONS, TOKENS = 2, 100, 8, 256
CASES = [("25m", False), ("135m", False), ("135m", True), ("360m", False), ("360m", True)]

CARDS = (16, 24, 40, 80)
CONTEXT_GIB = 1.0  # of a card: CUDA's context, kernels and what a desktop takes
RECIPES = ("qwen2.5-1.5b", "llama3.1-8b", "llama3.1-8b-fast", "boxed-fewshot", "r1-zero-on-policy")
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


def measure(shape: str, checkpointing: bool) -> dict[str, Any]:
    """Take one step in this process; return GiB planned and measured."""
    from _measure import resident_gib

    from sologrpo.console import quiet_libraries

    quiet_libraries()
    free = free_bytes(torch.device("cpu"))
    one_step("tiny", checkpointing)
    before = resident_gib("VmRSS")
    size, plan, tensors = one_step(shape, checkpointing)
    return {
        "shape": shape,
        "checkpointing": checkpointing,
        "parameters": size.total,
        "weights": plan.weights / GIB,
        "adapter": plan.adapter / GIB,
        "sampling": (plan.merged + plan.cache) / GIB,
        "training": plan.training / GIB,
        "planned": plan.peak(free) / GIB,
        "tensors": tensors / GIB,
        "process": resident_gib("VmHWM") - before,
    }


def one_step(shape: str, checkpointing: bool) -> tuple[Footprint, MemoryPlan, int]:
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
        )
        _, args, model_args = settings
        tokenizer = build_tokenizer(build_config(shape).vocab_size)
        # One prompt more than is trained on: TRL's sampler drops an incomplete batch.
        dataset = build_prompts(PROMPTS + 1, PROMPT_TOKENS, len(tokenizer))
        workload = Workload(settings, tokenizer, dataset, lambda: _random_model(shape))
        workload.invent = _full_length
        build_config(shape).save_pretrained(folder)
        size = footprint(build_policy(model_args), model_args)
        free = bytes_for_tensors(torch.device("cpu"))
        plan = plan_memory(size, args, [PROMPT_TOKENS], free, on_gpu=False)
        with LiveMemory() as memory:
            only = build(["solo"], workload)["solo"]
            only.samples = True
            only.train()
    return size, plan, memory.peak


def _random_model(shape: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        build_config(shape), dtype=torch.float32, attn_implementation="sdpa"
    )


def _full_length(prompts: list[list[int]]) -> list[list[int]]:
    """Build completions of maximum length, as the plan assumes."""
    return [[100] * TOKENS for _ in prompts]


def measure_all() -> None:
    """Run each case in a separate process; write each row as soon as it is measured."""
    rows = []
    for shape, checkpointing in CASES:
        command = [sys.executable, __file__, "--worker", shape, str(int(checkpointing))]
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
        "| Model, fp32 | checkpointing | weights | adapter | sampling | training | planned peak | "
        "tensors | planned / tensors | process |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        parts = (row[key] for key in ("weights", "adapter", "sampling", "training", "planned",
                                      "tensors"))  # fmt: skip
        lines.append(
            f"| {row['parameters'] / 1e6:.0f}M | {'yes' if row['checkpointing'] else 'no'} | "
            + " | ".join(f"{part:.2f}" for part in parts)
            + f" | {row['planned'] / row['tensors']:.2f} | {row['process']:.2f} |"
        )
    return "\n".join(lines)


def cards_table() -> str:
    """Build the table of cards: yes if a recipe fits as it is, otherwise what to change."""
    head = "".join(f" {card} GB |" for card in CARDS)
    lines = [
        f"| Recipe | weights | adapter | sampling, at most |{head}",
        "|---" * (4 + len(CARDS)) + "|",
    ]
    for recipe in RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            path = str(ROOT / f"configs/{recipe}.yaml")
            # As on a card: bf16, not what this machine has.
            arguments = ["--config", path, "--dtype", "bfloat16"]
            model = str(parse_config(arguments)[2].model_name_or_path)
            config_of(model).save_pretrained(folder)
            run, args, model_args = parse_config([*arguments, "--model_name_or_path", folder])
            size = footprint(build_policy(model_args), model_args)
        lengths, fits = [run.max_prompt_tokens or 512], []
        for card in CARDS:
            free = int((card - CONTEXT_GIB) * GIB)
            plan = plan_memory(size, args, lengths, free, on_gpu=True)
            fix = memory_fix(plan, free, args, bool(model_args.load_in_4bit))
            fits.append(fix or f"yes: {plan.training / GIB:.1f} for {plan.trained_tokens:,} tokens")
        parts = (plan.weights, plan.adapter, plan.merged + plan.cache)
        cells = [f"[{recipe}](../configs/{recipe}.yaml)", *(f"{p / GIB:.1f}" for p in parts), *fits]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_tables() -> None:
    """Write both tables between the marks in the guide."""
    text = GUIDE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    measured = measured_table(rows) if rows else "Not measured yet."
    tables = f"### Measured, on a CPU\n\n{measured}\n\n### Computed, for cards\n\n{cards_table()}"
    GUIDE.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Measure if requested, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", action="store_true", help="do not measure again")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(args.worker[0], args.worker[1] == "1")))
        return
    assert all(shape in SHAPES for shape, _ in CASES)
    if not args.tables:
        measure_all()
    write_tables()


if __name__ == "__main__":
    main()
