"""One GRPO step of a Llama-3.1-8B-shaped model, part by part, on one GPU.

1. step: a whole optimizer step of TRL's GRPOTrainer and of ours: time and memory by phase.
2. sampling: new tokens per second of every way to generate, and the memory-bandwidth bound.
3. training: forward and backward of one batch, by micro-batch and activation checkpointing.

Weights are random, so completions have full length: the worst case. `--shape tiny` runs on CPU.
"""

import argparse
import shutil
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import bitsandbytes as bnb
import torch
from _llama import (
    SHAPES,
    build_config,
    build_prompts,
    build_tokenizer,
    kv_bytes,
    linear_parameters,
    load,
    lora_config,
    save_random_checkpoint,
    step_bytes,
)
from _measure import (
    PhaseClock,
    Report,
    Row,
    allocated_gib,
    free_memory,
    measure_ceilings,
    peak_gib,
    print_table,
    reset_peaks,
    timed,
)
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StaticCache,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0}
TRAINING = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "num_generations": 4,
    "beta": 0.02,
    "temperature": 0.7,
    "top_p": 0.9,
    "learning_rate": 2e-4,
    "bf16": True,
}
ROWS = 32  # completions of one optimizer step: 8 x 4
COMPILE_SECONDS = 75.0  # a first torch.compile of 32 layers is not worth starting with less left


@dataclass
class Bench:
    """The context of every part: where to measure, what, and where to write it."""

    args: argparse.Namespace
    report: Report
    device: torch.device
    checkpoint: Path
    tokenizer: PreTrainedTokenizerBase

    def prompts(self, rows: int) -> Tensor:
        """Return random prompts without padding, all different."""
        shape = (rows, self.args.prompt_tokens)
        return torch.randint(0, len(self.tokenizer) - 16, shape, device=self.device)

    def load(self, row: Row, nf4: bool) -> PreTrainedModel:
        """Load the checkpoint and note time and memory."""
        reset_peaks()
        row["load_s"], model = timed(lambda: load(self.checkpoint, self.device, nf4))
        row |= {"allocated_gib": allocated_gib(), **peak_gib()}
        return model


# --- Part 1: a whole optimizer step ---------------------------------------------------------------


def varying_reward(completions: list[Any], **_: Any) -> list[float]:
    """Score a completion by its checksum: cheap, fixed, and different within a group."""
    return [zlib.crc32(completion[0]["content"].encode()) % 997 / 997 for completion in completions]


class StepRecorder(TrainerCallback):
    """Turns the phases of every optimizer step into a row."""

    def __init__(self, clock: PhaseClock) -> None:
        self.clock = clock
        self.steps: list[dict[str, Any]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock when setting up is over."""
        self.clock.restart()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Start the clock of the update, after gradient clipping."""
        self.clock.enter("optimizer")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Stop the clock after the update."""
        self.clock.leave()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Close the step."""
        self.steps.append(self.clock.take())


def measure_phases(trainer: GRPOTrainer) -> StepRecorder:
    """Time the trainer's methods from outside."""
    clock = PhaseClock()
    clock.wrap(trainer, "_generate_and_score_completions", "scoring")
    clock.wrap(trainer, "_generate_single_turn", "generation")
    clock.wrap(trainer, "compute_loss", "forward")
    clock.wrap(
        trainer,
        "_get_per_token_logps_and_entropies",
        lambda: "forward" if torch.is_grad_enabled() else "reference_log_probs",
    )
    clock.wrap(trainer.accelerator, "backward", "backward")
    recorder = StepRecorder(clock)
    trainer.add_callback(recorder)
    return recorder


def make_trainer(bench: Bench, name: str, row: Row) -> GRPOTrainer:
    """Load the policy and pass it to the trainer called `name`."""
    trainer_class, config_class = GRPOTrainer, GRPOConfig
    if name == "solo":
        from sologrpo.config.arguments import SoloGRPOConfig
        from sologrpo.training.trainer import SoloGRPOTrainer

        trainer_class, config_class = SoloGRPOTrainer, SoloGRPOConfig
    args = bench.args
    model = bench.load(row, nf4=True)
    config = config_class(
        output_dir=str(bench.checkpoint.parent / f"run-{name}"),
        **TRAINING,
        max_completion_length=args.completion_tokens,
        max_steps=args.steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=bench.device.type == "cpu",
    )
    trainer = trainer_class(
        model=model,
        reward_funcs=varying_reward,
        args=config,
        train_dataset=build_prompts(64, args.prompt_tokens, len(bench.tokenizer)),
        processing_class=bench.tokenizer,
        peft_config=lora_config(),
    )
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    row["trainable_parameters"] = sum(p.numel() for p in parameters)
    row["trainable_dtype"] = sorted({str(p.dtype) for p in parameters})
    return trainer


def run_steps(trainer: GRPOTrainer, row: Row) -> None:
    """Train, and store one entry for every optimizer step."""
    recorder = measure_phases(trainer)
    try:
        trainer.train()
    finally:
        recorder.clock.unwrap()
        lengths = [log.get("completions/mean_length") for log in trainer.state.log_history]
        row["steps"] = [
            {
                "step": i + 1,
                "seconds": round(sum(phase["seconds"] for phase in phases.values()), 3),
                "completion_tokens": lengths[i] if i < len(lengths) else None,
                "phases": phases,
            }
            for i, phases in enumerate(recorder.steps)
        ]
        row["checkpointing"] = is_checkpointing(trainer.model)


def part_step(bench: Bench) -> GRPOTrainer | None:
    """Run every requested trainer in turn; return the last, for part 3."""
    trainer: GRPOTrainer | None = None
    for name in bench.args.trainer.split(","):
        trainer = None  # two policies at once would blur the peaks
        free_memory()
        made: list[GRPOTrainer] = []
        bench.report.variant(
            "load",
            lambda row, name=name, made=made: made.append(make_trainer(bench, name, row)),
            needs=20,
            trainer=name,
        )
        if made:
            trainer = made.pop()
            bench.report.variant("step", partial(run_steps, trainer), 20, trainer=name)
    return trainer


# --- Part 3: forward and backward -----------------------------------------------------------------


def is_checkpointing(model: PeftModel) -> bool:
    """Check whether any layer recomputes its activations in the backward pass."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def switch_checkpointing(model: PeftModel, on: bool) -> None:
    """Turn activation checkpointing on or off, by either of transformers' names for it."""
    base = model.get_base_model()
    prefix = "activation" if hasattr(base, "activation_checkpointing_enable") else "gradient"
    getattr(base, f"{prefix}_checkpointing_{'enable' if on else 'disable'}")()
    assert is_checkpointing(model) == on


def forward_backward(trainer: GRPOTrainer, ids: Tensor, keep: int, advantages: Tensor) -> None:
    """Policy gradient of one micro-batch, by the trainer's own scoring."""
    log_probs, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, torch.ones_like(ids), keep, compute_entropy=True
    )
    ratio = torch.exp(log_probs - log_probs.detach())
    trainer.accelerator.backward(-(ratio * advantages[:, None]).sum() / (ROWS * keep))


def measure_training(
    bench: Bench, trainer: GRPOTrainer, batch: int, checkpointing: bool, row: Row
) -> None:
    """Time all rows in micro-batches of `batch`."""
    args = bench.args
    length = args.prompt_tokens + args.completion_tokens
    ids = torch.randint(0, len(bench.tokenizer) - 16, (ROWS, length), device=bench.device)
    advantages = torch.randn(ROWS, device=bench.device)
    switch_checkpointing(trainer.model, checkpointing)
    trainer.model.train()

    def pass_over(rows: int) -> None:
        for start in range(0, rows, batch):
            part = slice(start, start + batch)
            forward_backward(trainer, ids[part], args.completion_tokens, advantages[part])

    try:
        pass_over(batch)  # warm-up
        trainer.model.zero_grad()
        reset_peaks()
        row["allocated_before_gib"] = allocated_gib()
        seconds, _ = timed(lambda: pass_over(ROWS))
    finally:
        trainer.model.zero_grad()
        row |= peak_gib()
    # Frozen weights have no gradient: one pass forward, one back to the activations.
    # Recomputing under checkpointing is left out, so that the two settings compare.
    flop = 4 * linear_parameters(trainer.model.config) * ROWS * length
    row |= {
        "seconds": round(seconds, 4),
        "tokens_per_s": round(ROWS * length / seconds, 1),
        "useful_tflop_per_s": round(flop / seconds / 1e12, 1),
    }


def part_training(bench: Bench, trainer: GRPOTrainer | None) -> None:
    """Measure all micro-batch sizes, with and without activation checkpointing."""
    if trainer is None:
        made: list[GRPOTrainer] = []
        bench.report.variant(
            "load",
            lambda row: made.append(make_trainer(bench, "stock", row)),
            needs=20,
            trainer="stock",
        )
        if not made:
            return
        trainer = made.pop()
    for checkpointing in (True, False):
        for batch in bench.args.micro_batches:
            bench.report.variant(
                "training",
                partial(measure_training, bench, trainer, batch, checkpointing),
                needs=10,
                trainer=type(trainer).__name__,
                micro_batch=batch,
                checkpointing=checkpointing,
            )


# --- Part 2: sampling -----------------------------------------------------------------------------


def generation_config(bench: Bench, new_tokens: int, **more: Any) -> GenerationConfig:
    """Settings that sample exactly `new_tokens` tokens."""
    return GenerationConfig(
        **SAMPLING,
        max_new_tokens=new_tokens,
        **{
            "min_new_tokens": new_tokens,
            "pad_token_id": bench.tokenizer.pad_token_id,
            "eos_token_id": bench.tokenizer.eos_token_id,
            "disable_compile": True,
            **more,
        },
    )


class Generate:
    """`model.generate` as TRL calls it."""

    splits_prefill = True
    short_warm_up = True
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, bench: Bench, model: torch.nn.Module) -> None:
        self.bench, self.model = bench, model

    @torch.no_grad()
    def __call__(self, prompts: Tensor, new_tokens: int) -> int:
        """Return the number of tokens sampled."""
        config = generation_config(self.bench, new_tokens, **self.settings)
        self.model.eval()
        output = self.model.generate(
            input_ids=prompts, attention_mask=torch.ones_like(prompts), generation_config=config
        )
        return (output.size(1) - prompts.size(1)) * output.size(0)

    def close(self) -> None:
        """Release nothing."""


class Compiled(Generate):
    """`model.generate` with a static cache, for which transformers compiles the decoding step."""

    short_warm_up = False
    settings: ClassVar[dict[str, Any]] = {
        "cache_implementation": "static", "disable_compile": False
    }  # fmt: skip


class ContinuousBatching:
    """transformers' paged generation, with its manager kept between calls as a server would."""

    splits_prefill = False
    short_warm_up = False

    def __init__(self, bench: Bench, model: PreTrainedModel) -> None:
        self.bench, self.model = bench, model

    def __call__(self, prompts: Tensor, new_tokens: int) -> int:
        """Return the number of tokens sampled; its own errors end up in the log, so count."""
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        # Half of the free memory is plenty for the keys and values here.
        wanted = {"max_memory_percent": 0.5}
        known = {field.name for field in fields(ContinuousBatchingConfig)}
        self.model.eval()
        outputs = self.model.generate_batch(
            prompts.tolist(),
            generation_config=generation_config(
                self.bench, new_tokens, min_new_tokens=None, eos_token_id=-1
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                **{key: value for key, value in wanted.items() if key in known}
            ),
            persistent_manager=True,
        )
        errors = [output.error for output in outputs.values() if output.error]
        sampled = sum(len(output.generated_tokens) for output in outputs.values())
        if errors or sampled != prompts.size(0) * new_tokens:
            raise RuntimeError(
                f"{sampled} tokens in {len(outputs)} of {prompts.size(0)} outputs; {errors[:1]}"
            )
        return sampled

    def close(self) -> None:
        """Release the paged cache, which was sized for this batch."""
        self.model.destroy_cached_continuous_batching_manager()
        self.model.set_attn_implementation("sdpa")


class GraphReplay:
    """Static cache and one decoding step captured as a CUDA graph, sampling included.

    Nothing is compiled: the same kernels as in eager mode, without the time to launch them.
    All prompts have the same length, so there is no padding to mask.
    """

    splits_prefill = True
    short_warm_up = False

    def __init__(self, bench: Bench, model: PreTrainedModel) -> None:
        self.bench, self.model = bench, model
        self.graph: torch.cuda.CUDAGraph | None = None

    def sample(self, logits: Tensor) -> Tensor:
        """Sample from the nucleus of (B, V) logits, as `generate` does; returns (B, 1)."""
        sorted_logits, order = torch.sort(logits.float() / SAMPLING["temperature"], descending=True)
        probabilities = sorted_logits.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities > SAMPLING["top_p"]
        noise = torch.empty_like(probabilities).exponential_()
        choice = (probabilities.masked_fill(outside, 0.0) / noise).argmax(-1, keepdim=True)
        return order.gather(-1, choice)

    def decode(self, tokens: Tensor) -> Tensor:
        """Sample the next (B, 1) tokens."""
        output = self.model(
            input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        return self.sample(output.logits[:, -1])

    def capture(self, prompts: Tensor, new_tokens: int) -> None:
        """Allocate the cache and record one step."""
        length = prompts.size(1) + new_tokens
        self.cache = StaticCache(config=self.model.config, max_cache_len=length)
        self.tokens = self.decode(prompts).clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.decode(self.tokens)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.tokens.copy_(self.decode(self.tokens))

    @torch.no_grad()
    def __call__(self, prompts: Tensor, new_tokens: int) -> int:
        """Return the number of tokens sampled; the first call must be the longest."""
        self.model.eval()
        if self.graph is None:
            self.capture(prompts, new_tokens)
        assert self.graph is not None
        self.cache.reset()
        self.tokens.copy_(self.decode(prompts))
        sampled = [self.tokens.clone()]
        for _ in range(new_tokens - 1):
            self.graph.replay()
            sampled.append(self.tokens.clone())
        return torch.cat(sampled, 1).numel()

    def close(self) -> None:
        """Drop the graph and its memory."""
        self.graph = None
        self.cache = self.tokens = None


def measure_sampling(bench: Bench, make: Callable[[], Any], batch: int, row: Row) -> None:
    """Time one engine on one batch, against the bandwidth bound."""
    new, prompts = bench.args.new_tokens, bench.prompts(batch)
    engine = make()
    config = engine.model.config
    weights = step_bytes(engine.model)
    cached = kv_bytes(config, batch * (bench.args.prompt_tokens + new / 2))
    free_memory()
    reset_peaks()
    row["allocated_before_gib"] = allocated_gib()
    try:
        # Graphs, compiled code and paged caches are made for one length: they warm up on all of it.
        warm_up = 4 if engine.short_warm_up else new
        row["first_call_s"] = round(timed(lambda: engine(prompts, warm_up))[0], 3)
        prefill = 0.0
        if engine.splits_prefill:
            prefill = timed(lambda: engine(prompts, 1))[0]
            row["prefill_s"] = round(prefill, 4)
        runs = [timed(lambda: engine(prompts, new)) for _ in range(bench.args.repeats)]
    finally:
        row |= peak_gib()
        engine.close()
    seconds, tokens = min(runs)
    assert tokens == batch * new, tokens
    steps = new - 1 if engine.splits_prefill else new
    step = (seconds - prefill) / steps
    row |= {
        "seconds": [round(run[0], 4) for run in runs],
        "new_tokens_per_s": round(tokens / seconds, 1),
        "decode_step_ms": round(step * 1e3, 3),
        "weight_bytes": weights,
    }
    bandwidth = bench.report.data["ceilings"]["copy_bytes_per_s"]
    row |= {
        "bound_weights_ms": round(weights / bandwidth * 1e3, 3),
        "bound_weights_kv_ms": round((weights + cached) / bandwidth * 1e3, 3),
        "share_of_bound": round(weights / bandwidth / step, 4),
        "share_of_bound_with_kv": round((weights + cached) / bandwidth / step, 4),
    }


@torch.no_grad()
def copy_merged(policy: PeftModel, target: PreTrainedModel) -> int:
    """Write dequantised NF4 weights plus the adapter's update into a bf16 model."""
    copied = 0
    for name, module in policy.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            weight = module.base_layer.weight
            merged = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
            merged = merged + module.get_delta_weight("default")
            target.get_submodule(name).weight.copy_(merged)
            copied += 1
    return copied


def with_adapter(base: PreTrainedModel) -> PeftModel:
    """Add an adapter with random weights to a model."""
    policy = get_peft_model(base, lora_config())
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 1e-3)
    return policy.eval()


class SamplingModels:
    """The two copies that all engines share: NF4, with or without adapter, and bf16."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.nf4: PreTrainedModel | PeftModel | None = None
        self.bf16: PreTrainedModel | None = None

    def load_nf4(self, row: Row) -> None:
        """Load the 4-bit policy with an adapter."""
        self.nf4 = with_adapter(self.bench.load(row, nf4=True))

    def load_bf16(self, row: Row) -> None:
        """Load the bf16 copy."""
        self.bf16 = self.bench.load(row, nf4=False)

    def sync(self, row: Row) -> None:
        """Bring the bf16 copy up to date with the policy: the price of sampling from it."""
        assert isinstance(self.nf4, PeftModel)
        reset_peaks()
        for key in ("first_s", "seconds"):
            seconds, row["layers"] = timed(lambda: copy_merged(self.nf4, self.bf16))
            row[key] = round(seconds, 4)
        row |= peak_gib()

    def merge_nf4(self, row: Row) -> None:
        """Merge the adapter into the 4-bit weights, which quantises them again."""
        assert isinstance(self.nf4, PeftModel)
        reset_peaks()
        seconds, self.nf4 = timed(lambda: self.nf4.merge_and_unload().eval())
        row |= {"seconds": round(seconds, 4), **peak_gib()}

    def adapt_nf4(self, row: Row) -> None:
        """Put a new adapter on the merged 4-bit weights."""
        row["seconds"], self.nf4 = timed(lambda: with_adapter(self.nf4))

    def base_nf4(self) -> PreTrainedModel:
        """Return the 4-bit model itself; an adapter in its layers stays active."""
        return self.nf4.get_base_model() if isinstance(self.nf4, PeftModel) else self.nf4


def part_sampling(bench: Bench) -> None:
    """Measure every engine: the first two batch sizes of all of them, then the other sizes."""
    models, report, args = SamplingModels(bench), bench.report, bench.args
    on_gpu = bench.device.type == "cuda"

    def run(name: str, have: bool, make: Callable[[], Any], batches: list[int]) -> None:
        if name not in args.engines:
            return
        for batch in batches:
            labels = {"engine": name, "batch": batch}
            if name in NEEDS_CUDA and not on_gpu:
                report.skip("sampling", "needs CUDA", **labels)
            elif not have:
                report.skip("sampling", "no model", **labels)
            else:
                needs = COMPILE_SECONDS if "compile" in name else 10.0
                report.variant("sampling", partial(measure_sampling, bench, make, batch), needs,
                               **labels)  # fmt: skip

    have_nf4 = report.variant("load", models.load_nf4, 20, model="nf4 + lora")
    have_bf16 = report.variant("load", models.load_bf16, 20, model="bf16")
    if have_nf4 and have_bf16:
        report.variant("merge", models.sync, model="nf4 + lora -> bf16 copy")
    first, rest = args.batches[:2], args.batches[2:]
    for batches in filter(None, (first, rest)):
        run("nf4_lora", have_nf4, lambda: Generate(bench, models.nf4), batches)
        run("bf16", have_bf16, lambda: Generate(bench, models.bf16), batches)
        if batches is rest:  # an extra: not before every engine had its turn
            run("nf4_lora_graph", have_nf4, lambda: GraphReplay(bench, models.base_nf4()), first)
        if have_nf4:
            have_nf4 = report.variant("merge", models.merge_nf4, model="nf4 + lora -> nf4")
        run("nf4_merged", have_nf4, lambda: Generate(bench, models.nf4), batches)
        run("bf16_continuous", have_bf16, lambda: ContinuousBatching(bench, models.bf16), batches)
        run("bf16_graph", have_bf16, lambda: GraphReplay(bench, models.bf16), batches)
        run("bf16_static_compile", have_bf16, lambda: Compiled(bench, models.bf16), batches)
        if have_nf4 and batches is first and rest:
            have_nf4 = report.variant("load", models.adapt_nf4, model="nf4 + new adapter")


NEEDS_CUDA = ["bf16_static_compile", "bf16_graph", "nf4_lora_graph"]
ENGINES = ["nf4_lora", "nf4_merged", "bf16", "bf16_continuous", *NEEDS_CUDA]


# --- The run --------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    """Read the command line."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shape", choices=list(SHAPES), default="8b")
    add("--parts", default="1,3,2", help="which parts, in this order")
    add("--trainer", default="stock", help="stock, solo or both, separated by a comma")
    add("--out", type=Path, default=Path("gpu_llama8b.json"))
    add("--time_budget", type=float, default=540.0, help="seconds; later variants are skipped")
    add("--steps", type=int, default=2, help="optimizer steps of part 1; the first warms up")
    add("--prompt_tokens", type=int, default=150)
    add("--completion_tokens", type=int, default=256, help="parts 1 and 3")
    add("--new_tokens", type=int, default=64, help="part 2")
    add("--batches", type=numbers, default=[32, 64, 8, 256], help="part 2; the first two first")
    add("--micro_batches", type=numbers, default=[8, 16, 32, 4], help="part 3")
    add("--repeats", type=int, default=1, help="timed runs in part 2; the fastest counts")
    add("--engines", type=lambda text: text.split(","), default=ENGINES, help=", ".join(ENGINES))
    add("--workdir", type=Path, help="for the checkpoint; default: /dev/shm if it fits, or /tmp")
    return parser.parse_args()


def choose_workdir(config: Any) -> Path:
    """Prefer memory over disk, where the checkpoint fits several times."""
    needed = 2 * (linear_parameters(config) + 2 * config.vocab_size * config.hidden_size)
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 3 * needed:
        return memory
    return Path(tempfile.gettempdir())


def print_summary(report: Report) -> None:
    """Print the numbers that matter, last."""
    rows = report.data["rows"]
    steps = [
        {"trainer": row.get("trainer"), "step": step["step"], "phase": name, **values}
        for row in rows
        for step in row.get("steps", [])
        for name, values in [("total", {"seconds": step["seconds"]}), *step["phases"].items()]
    ]
    memory = ["peak_allocated_gib", "peak_reserved_gib"]
    print_table(steps, ["trainer", "step", "phase", "calls", "seconds", *memory])
    loads = [row for row in rows if row["part"] in ("load", "merge")]
    print_table(loads, ["part", "trainer", "model", "load_s", "seconds", "allocated_gib", *memory])
    training = [row for row in rows if row["part"] == "training"]
    print_table(
        training,
        ["micro_batch", "checkpointing", "seconds", "tokens_per_s", "useful_tflop_per_s", *memory,
         "skipped", "error"],
    )  # fmt: skip
    sampling = [row for row in rows if row["part"] == "sampling"]
    print_table(
        sorted(sampling, key=lambda row: (row["batch"], row["engine"])),
        ["batch", "engine", "new_tokens_per_s", "decode_step_ms", "bound_weights_ms",
         "share_of_bound", "share_of_bound_with_kv", "prefill_s", "first_call_s",
         "allocated_before_gib", "peak_allocated_gib", "skipped", "error"],
    )  # fmt: skip


def main() -> None:
    """Make the checkpoint, run the parts, print the table."""
    args = parse_args()
    report = Report(args.out, vars(args) | {"training": TRAINING}, args.time_budget)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    config = build_config(args.shape)
    workdir = args.workdir or choose_workdir(config)
    report.set(
        "notes",
        "Random weights: completions have full length, the worst case. Loading reads a checkpoint "
        f"that was written a moment ago to {workdir}: no cold disk.",
    )
    report.variant("ceilings", lambda row: report.set("ceilings", measure_ceilings()))
    with tempfile.TemporaryDirectory(dir=workdir, prefix="llama-") as folder:
        checkpoint = Path(folder) / "checkpoint"

        def prepare(row: Row) -> None:
            row["seconds"], _ = timed(lambda: save_random_checkpoint(config, checkpoint, device))
            row |= peak_gib()

        if report.variant("checkpoint", prepare, shape=args.shape):
            tokenizer = build_tokenizer(config.vocab_size)
            bench = Bench(args, report, device, checkpoint, tokenizer)
            trainer: GRPOTrainer | None = None
            for part in args.parts.split(","):
                if part == "1":
                    trainer = part_step(bench)
                elif part == "3":
                    part_training(bench, trainer)
                    trainer = None
                elif part == "2":
                    part_sampling(bench)
                free_memory()
    print_summary(report)


if __name__ == "__main__":
    main()
