"""The parts of `gpu_check.py` that measure; each runs in a separate process.

python benchmarks/_gpu_parts.py PART real|rehearsal FILE SECONDS
"""

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from _live_memory import LiveMemory
from _llama import (
    build_config,
    build_prompts,
    build_tokenizer,
    random_model,
    step_bytes,
)
from _measure import (
    GIB,
    PhaseClock,
    Report,
    Row,
    allocated_gib,
    copy_bandwidth,
    free_memory,
    peak_gib,
    reset_peaks,
    timed,
)
from _trainers import CONTENDERS, ROOT, Gradients, Workload, build, distance
from peft import PeftModel, get_peft_model
from transformers import GenerationConfig, PreTrainedModel, TrainerCallback
from trl import GRPOTrainer, get_peft_config

from sologrpo.base.console import quiet_libraries
from sologrpo.base.environment import environment
from sologrpo.config.parsing import parse_config
from sologrpo.config.schedule import prompts_of_a_batch
from sologrpo.model.loading import load_base_model
from sologrpo.model.memory import bytes_for_tensors, cpu_process
from sologrpo.model.merging import merged
from sologrpo.plan.footprint import footprint
from sologrpo.plan.memory_plan import plan_memory
from sologrpo.plan.preflight import build_policy
from sologrpo.sampling.decoding import Request, _Step, generate_fast
from sologrpo.sampling.stopping import StopStrings
from sologrpo.training.trl_patches import replaced

RECIPE = ROOT / "configs/llama3.1-8b.yaml"
GROUP = 4  # rows of a prompt in the sampling part, as in the recipe
WARM_UP_TOKENS = 4
# A step of the recipe that can be repeated: a rate of 0 leaves the policy unchanged.
ONE_STEP: dict[str, Any] = {
    "max_steps": 1,
    "learning_rate": 0.0,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "eval_strategy": "no",
    "num_validation_examples": 0,
    "save_strategy": "no",
    "log_completions": False,
    "disable_tqdm": True,
}
# Relative distance between both gradients in fp32, by whether weights are in 4 bits: TRL then keeps
# the adapter and its gradient in bf16, which gave 0.005 on a CPU.
MAX_GAP = {False: 0.001, True: 0.01}
# How much farther from fp32 than stock TRL's gradient ours may be in bf16.
MAX_RATIO = 2.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work; the defaults are those of `make gpu-check`.

    Attributes:
        small: shape of the model whose gradients are compared.
        planned: shapes whose memory is measured, and whether in 4 bits.
        large: shape of the model of the other parts.
        prompt_tokens: tokens of a prompt.
        new_tokens: that the sampling part samples per row.
        rows: that it samples at once.
        settings: changes to the recipe.
    """

    small: str = "25m"
    planned: tuple[tuple[str, bool], ...] = (
        ("1b", False), ("1b", True), ("3b", True), ("8b", True),
    )  # fmt: skip
    large: str = "8b"
    prompt_tokens: int = 150
    new_tokens: int = 128
    rows: tuple[int, ...] = (8, 32, 64)
    settings: dict[str, Any] = field(default_factory=dict)


REHEARSAL = Sizes(
    small="tiny",
    planned=(("tiny", False), ("tiny", True)),
    large="tiny",
    prompt_tokens=20,
    new_tokens=6,
    rows=(8,),
    settings={"max_completion_length": 8, "dtype": "bfloat16", "bf16": True},  # as on a card
)


@dataclass(frozen=True)
class Check:
    """The context of a part: where its rows go, the sizes, and a folder for its files."""

    report: Report
    sizes: Sizes
    folder: Path

    def workload(self, shape: str, **settings: Any) -> Workload:
        """Build the recipe's work for a model of this shape; `settings` change the recipe."""
        config, model = build_config(shape), self.folder / shape
        config.save_pretrained(model)
        values = {
            **ONE_STEP, **self.sizes.settings, "model_name_or_path": model,
            "output_dir": self.folder / "run", **settings,
        }  # fmt: skip
        arguments = [text for key, value in values.items() for text in (f"--{key}", str(value))]
        _, args, model_args = parsed = parse_config(["--config", str(RECIPE), *arguments])
        args.reward_weights = None  # the scores of `Workload.rewards` are weighted already
        tokenizer = build_tokenizer(config.vocab_size)
        # One more than a step takes: TRL's sampler leaves out an incomplete batch.
        prompts = build_prompts(
            prompts_of_a_batch(args) + 1, self.sizes.prompt_tokens, len(tokenizer)
        )
        return Workload(parsed, tokenizer, prompts, partial(random_model, config, model_args))


# --- parity ---------------------------------------------------------------------------------------


def parity(check: Check) -> None:
    """Compare the gradients of both trainers, in bf16 and with NF4 weights."""
    for weights in ("bf16", "NF4"):
        measure = partial(compare_gradients, check, weights == "NF4")
        check.report.variant("parity", measure, weights=weights)


def compare_gradients(check: Check, four_bit: bool, row: Row) -> None:
    """Compare both with each other in fp32, and in bf16 with ours in fp32."""
    gradients: dict[tuple[str, str], list[Gradients]] = {}
    for dtype in ("float32", "bfloat16"):
        workload = check.workload(
            check.sizes.small, load_in_4bit=four_bit, dtype=dtype, bf16=dtype == "bfloat16",
            lora_dropout=0.0, max_grad_norm=0.0,
        )  # fmt: skip
        workload.invent = partial(ragged, workload.settings[1].max_completion_length)
        for name in CONTENDERS:
            contender = build([name], workload)[name]
            contender.train(capture=True)
            gradients[name, dtype] = contender.gradients
    exact = gradients["solo", "float32"]
    row |= {
        "stock_to_solo_fp32": distance(exact, gradients["stock", "float32"]),
        "stock_to_fp32": distance(exact, gradients["stock", "bfloat16"]),
        "solo_to_fp32": distance(exact, gradients["solo", "bfloat16"]),
    }
    check_gaps(row, MAX_GAP[four_bit])


def check_gaps(row: Row, largest: float) -> None:
    """Judge the distances between gradients.

    Raises:
        RuntimeError: if ours is too far off.
    """
    if not row["stock_to_solo_fp32"] <= largest:
        raise RuntimeError(f"the gradients of the two trainers differ by more than {largest}")
    if not row["solo_to_fp32"] <= MAX_RATIO * row["stock_to_fp32"]:
        raise RuntimeError(f"in bf16, ours is more than {MAX_RATIO} times as far off as TRL's")


def ragged(limit: int, prompts: list[list[int]]) -> list[list[int]]:
    """Make up completions of all lengths, without an end token."""
    rng = random.Random(0)
    return [rng.choices(range(100, 900), k=rng.randint(1, limit)) for _ in prompts]


# --- memory ---------------------------------------------------------------------------------------


def memory(check: Check) -> None:
    """Compare the planned with the measured memory of a step, for several models."""
    for shape, four_bit in check.sizes.planned:
        measure = partial(measure_memory, check, shape, four_bit)
        weights = "NF4" if four_bit else "bf16"
        check.report.variant("memory", measure, needs=25, shape=shape, weights=weights)


def measure_memory(check: Check, shape: str, four_bit: bool, row: Row) -> None:
    """Take a step, sampling included, and compare its peak with the plan's."""
    workload = check.workload(shape, load_in_4bit=four_bit)
    _, args, model_args = workload.settings
    on_gpu = torch.cuda.is_available()
    size = footprint(build_policy(model_args), model_args)
    process = cpu_process(size.number_bytes, bool(args.gradient_checkpointing))
    free = bytes_for_tensors(torch.device("cuda" if on_gpu else "cpu"), process)
    plan = plan_memory(size, args, [check.sizes.prompt_tokens], free, on_gpu=on_gpu)
    row["planned_gib"] = round(plan.peak(free) / GIB, 4)
    with peak_of_tensors(row):
        contender = build(["solo"], workload)["solo"]
        contender.samples = True
        row["step_s"] = round(contender.train()["step_s"], 3)
    row["planned_to_allocated"] = round(row["planned_gib"] / row["peak_allocated_gib"], 3)


@contextmanager
def peak_of_tensors(row: Row) -> Iterator[None]:
    """Measure the memory of tensors; on a CPU by following all operations."""
    reset_peaks()
    if torch.cuda.is_available():
        yield
        row |= peak_gib()
        return
    with LiveMemory() as live:
        yield
    row["peak_allocated_gib"] = round(live.peak / GIB, 4)


# --- sampling -------------------------------------------------------------------------------------


def sampling(check: Check) -> None:
    """Measure the decoding loop for three kinds of weights, with CUDA graphs and without."""
    copies: list[float] = []

    def measure_copy(row: Row) -> None:
        copies.append(copy_bandwidth())
        row["copied_gb_per_s"] = round(copies[0] / 1e9, 1)

    if check.report.variant("sampling", measure_copy, weights="plain copies"):
        for four_bit in (True, False):  # one model at a time
            sample_from(check, four_bit, copies[0])


def sample_from(check: Check, four_bit: bool, bandwidth: float) -> None:
    """Load a model, and measure the loop for all numbers of rows."""
    loaded: list[PreTrainedModel | PeftModel] = []
    load = partial(load_policy if four_bit else load_bf16, check, loaded)
    name = "NF4" if four_bit else "bf16"
    if not check.report.variant("sampling", load, needs=25, weights=name):
        return
    model = loaded.pop()
    kinds: dict[str, Callable[[], AbstractContextManager[None]]] = (
        {"NF4 + adapter": nullcontext, "NF4 + merged copy": partial(merged, model)}
        if four_bit
        else {"bf16, merged": nullcontext}
    )
    loops = {"no graph": without_graphs}  # first: an error in a graph ends all work of the process
    if torch.cuda.is_available():
        loops["CUDA graph"] = nullcontext
    for decoding, loop in loops.items():
        for weights, kind in kinds.items():
            for rows in check.sizes.rows:
                measure = partial(measure_sampling, check, model, kind, loop, bandwidth, rows)
                labels = {"weights": weights, "decoding": decoding, "rows": rows}
                check.report.variant("sampling", measure, **labels)


def load_policy(check: Check, loaded: list[Any], row: Row) -> None:
    """Load 4-bit weights with an adapter, in the mode in which a run samples."""
    workload = check.workload(check.sizes.large)
    adapter = get_peft_config(workload.settings[2])
    row["load_s"], model = timed(lambda: get_peft_model(workload.load_model(), adapter).train())
    row["allocated_gib"] = allocated_gib()
    loaded.append(model)


def load_bf16(check: Check, loaded: list[Any], row: Row) -> None:
    """Load weights in half precision, as an adapter leaves them that is merged for good."""
    workload = check.workload(check.sizes.large, load_in_4bit=False)
    row["load_s"], model = timed(workload.load_model)
    row["allocated_gib"] = allocated_gib()
    loaded.append(model)


def measure_sampling(
    check: Check,
    model: PreTrainedModel | PeftModel,
    weights: Callable[[], AbstractContextManager[None]],
    loop: Callable[[], AbstractContextManager[None]],
    bandwidth: float,
    rows: int,
    row: Row,
) -> None:
    """Time the decoding loop, against reading all weights once per token.

    Args:
        bandwidth: of the memory, in bytes per second.
        row: gets tokens per second, and milliseconds per token of all rows and of the bound.
    """
    new_tokens = check.sizes.new_tokens
    request = make_request(model, rows, check.sizes.prompt_tokens, new_tokens)
    reset_peaks()
    with weights(), loop():
        bound = step_bytes(model) / bandwidth
        generate_fast(model, request.limited(WARM_UP_TOKENS))
        prefill, _ = timed(lambda: generate_fast(model, request.limited(1)))
        seconds, sampled = timed(lambda: generate_fast(model, request))
    row |= peak_gib()
    step = (seconds - prefill) / (new_tokens - 1)
    tokens = int(request.mask_of(sampled.completion_ids).sum())
    row |= {
        "tokens_per_s": round(tokens / seconds, 1),
        "prefill_ms": round(1e3 * prefill, 2),
        "step_ms": round(1e3 * step, 3),
        "bound_ms": round(1e3 * bound, 6),
        "share_of_bound": round(bound / step, 6),
    }


def make_request(model: torch.nn.Module, rows: int, prompt_T: int, new_tokens: int) -> Request:
    """Make groups of random prompts, to be sampled as in the recipe; no token ends a completion."""
    shape, entries = (max(1, rows // GROUP), prompt_T), model.config.vocab_size
    prompts = torch.randint(0, entries - 16, shape, device=model.device)
    ids = prompts.repeat_interleave(rows // len(prompts), dim=0)
    config = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=True, temperature=0.7, top_p=0.9, top_k=0,
        pad_token_id=model.config.pad_token_id, eos_token_id=entries,
    )  # fmt: skip
    return Request(ids, torch.ones_like(ids), config, StopStrings(None, []))


def without_graphs() -> AbstractContextManager[None]:
    """Launch each kernel of a decoding step alone."""
    return replaced(_Step, "__call__", _step_without_graph)


def _step_without_graph(step: _Step, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    step._cache.make_room()
    return step._forward(tokens, position)


# --- step -----------------------------------------------------------------------------------------


def step(check: Check) -> None:
    """Take steps of the recipe, stock TRL's first: an error of CUDA ends all work of a process."""
    for name in CONTENDERS:
        check.report.variant("step", partial(measure_steps, check, name), needs=30, trainer=name)


def measure_steps(check: Check, name: str, row: Row) -> None:
    """Take a step, and a second one if there is enough time: the first compiles kernels."""
    take_steps(check, name, check.workload(check.sizes.large), row)


def vllm(check: Check) -> None:
    """Take steps with TRL and vLLM."""
    check.report.variant("vllm", partial(measure_vllm, check), trainer="stock + vLLM")


def measure_vllm(check: Check, row: Row) -> None:
    """Take steps of stock TRL that samples with vLLM: in bf16, since it merges into the weights."""
    workload = check.workload(
        check.sizes.large, load_in_4bit=False, trainer="stock", use_vllm=True,
        vllm_mode="colocate", vllm_gpu_memory_utilization=0.45, vllm_max_model_length=512,
    )  # fmt: skip
    folder, model_args = check.folder / check.sizes.large, workload.settings[2]
    workload.load_model().save_pretrained(folder)  # vLLM reads files
    free_memory()
    workload.tokenizer.save_pretrained(folder)
    workload.load_model = lambda: load_base_model(model_args)
    take_steps(check, "stock", workload, row)


def take_steps(check: Check, name: str, workload: Workload, row: Row) -> None:
    """Take a step of a workload, and a second one if there is enough time."""
    row["load_s"], built = timed(lambda: build([name], workload))
    contender = built[name]
    contender.samples = True
    phases = Phases(contender.trainer)
    times = contender.train()
    row["first_step_s"] = round(times["step_s"], 3)
    if check.report.time_left() > 3 * times["step_s"]:  # leaves some for the next contender
        times = contender.train(seed=1)
    if name == "solo":
        row["engine"] = contender.trainer._rollout.sampler.engine
    row |= {key: round(times[key], 3) for key in ("step_s", "sampling_s", "training_s")}
    row["sampled_tokens_per_s"] = round(times["sampled_tokens"] / times["sampling_s"], 1)
    for key, peak in peak_gib().items():
        if peak is not None:
            row[key] = max(phase[key] for phase in phases.latest.values())
    row["phases"] = phases.latest


class Phases(TrainerCallback):  # type: ignore[misc]
    """Seconds and memory of the phases of the latest step."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._clock = PhaseClock()
        self.latest: dict[str, dict[str, Any]] = {}
        for owner, method, phase in (
            (trainer, "_generate_and_score_completions", "scoring"),
            (trainer, "_generate_single_turn", "sampling"),
            (trainer, "compute_loss", "forward"),
            (trainer.accelerator, "backward", "backward"),
        ):
            self._clock.wrap(owner, method, phase)
        trainer.add_callback(self)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._clock.restart()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Start the clock of the update, after gradient clipping."""
        self._clock.enter("optimizer")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Stop the clock of the update."""
        self._clock.leave()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Keep the phases."""
        self.latest = self._clock.take()


PARTS: dict[str, Callable[[Check], None]] = {
    "parity": parity, "memory": memory, "sampling": sampling, "step": step, "vllm": vllm,
}  # fmt: skip


def main(part: str, sizes: str, file: str, limit: str) -> None:
    """Run a part in this process."""
    quiet_libraries()
    elapsed = time.time() - psutil.Process().create_time()
    report = Report(Path(file), {}, float(limit) - elapsed)
    report.set("commit", environment()["git_commit"])
    chosen = REHEARSAL if sizes == "rehearsal" else Sizes()
    PARTS[part](Check(report, chosen, Path(file).parent))


if __name__ == "__main__":
    main(*sys.argv[1:])
