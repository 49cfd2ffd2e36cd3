"""The grid: one training step of stock TRL and of ours, on many kinds of batches."""

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from _live_memory import LiveMemory
from _measure import GIB, Report, Row, alternate, compare, free_memory, timed
from _trainers import (
    Contender,
    Gradients,
    Workload,
    build,
    distance,
    gradient_gap,
    quickstart_workload,
    settings_for,
)
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from sologrpo.model.loading import load_base_model, load_tokenizer

FACTORS: dict[str, tuple[Any, ...]] = {
    "prompt": (30, 310, 1000),
    "limit": (48, 200, 480),
    "group": (4, 8, 16),
    "signal": (1.0, 0.5, 0.25),
    "dtype": ("float32", "bfloat16"),
    "beta": (0.0, 0.02),
    "loss_type": ("dapo", "grpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"),
}
# Tokens that all prompts of a step begin with, such as worked examples, and the range of those that
# a prompt has to itself.
COMMON = {30: 0, 310: 281, 1000: 800}
OWN = {30: (25, 45), 310: (24, 34), 1000: (150, 250)}
# Lengths of completions are lognormal and cut at the limit: mean of the logarithm. Those with a
# limit of 48 are all as long; the quickstart's lengths are those of its first steps.
LOG_MEAN = {200: 4.2, 480: 5.2}
LOG_DEVIATION = 0.6
QUICKSTART_LENGTHS = (3.4, 0.4)
# TRL's documentation asks for these with the loss.
OF_LOSS = {
    "dr_grpo": {"scale_rewards": "none"},
    "cispo": {"epsilon_high": 2.0},
    "luspo": {"importance_sampling_level": "sequence"},
}
# What stock TRL computes in a step, and in one pass: enough to be timed, and it fits into 16 GB.
TOKENS = 2500
PASS_TOKENS = 4200
# To plan with: seconds of stock TRL per token on two cores of an EPYC with AVX512-BF16.
SECONDS = {"float32": 7e-3, "bfloat16": 5e-3}
COST_POWER = 0.4  # between few long steps (0) and many short ones (1): the least time in all
FIXED_PROMPTS = 4  # of a step, in the fixed cells
GEMM_SIZE = 2048


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work; the defaults are those of `make bench`.

    Attributes:
        shrink: what the tokens of a cell are divided by.
        rounds: rounds of every comparison, if there is enough time; two are always taken.
        seconds: after which a comparison begins no third round.
    """

    shrink: int = 1
    rounds: int = 4
    seconds: float = 60.0


# Enough to check that every part works; the figures are meaningless.
REHEARSAL = Sizes(shrink=10, rounds=2, seconds=0.0)


@dataclass(frozen=True)
class Bench:
    """The context of every measurement.

    Attributes:
        report: takes the rows.
        model: folder of the policy.
        sizes: of the work.
        scratch: output directory of the trainers, which save nothing there.
        seed: of the made-up prompts and completions.
    """

    report: Report
    model: Path
    sizes: Sizes
    scratch: Path
    seed: int = 0


@dataclass(frozen=True)
class Cell:
    """One kind of batch.

    Attributes:
        prompt: tokens of a prompt, about.
        limit: of the tokens of a completion.
        group: completions of a prompt.
        signal: share of the groups whose completions differ in their rewards.
        dtype: of the frozen weights and the computation.
        beta: weight of the KL term.
        loss_type: TRL's.
        name: of a fixed cell.
    """

    prompt: int
    limit: int
    group: int
    signal: float
    dtype: str
    beta: float = 0.0
    loss_type: str = "dapo"
    name: str = ""

    def labels(self) -> Row:
        """Return the labels of its row."""
        return {key: value for key, value in asdict(self).items() if value != ""}

    @property
    def prompts(self) -> int:
        """Prompts of a step: whole groups of each kind, and tokens that are worth timing."""
        if self.name:
            return FIXED_PROMPTS
        least = round(1 / self.signal)
        tokens = least * self.group * (self.prompt + self.limit)
        return least * max(1, round(TOKENS / tokens))

    @property
    def micro_batch(self) -> int:
        """Completions that stock TRL holds in one pass: a power of two, at most 8."""
        fitting = PASS_TOKENS // (self.prompt + self.limit)
        return min(8, 2 ** int(math.log2(fitting)), self.prompts * self.group)

    @property
    def seconds(self) -> float:
        """Estimate the seconds of one step of stock TRL."""
        tokens = self.prompts * self.group * (self.prompt + self.limit)
        passes = (1.0 if self.beta == 0.0 else 1.33) + ("updates" in self.name)
        return tokens * SECONDS[self.dtype] * passes


# Batches for which docs/performance.md gives a goal, and one that scores old log-probs.
FIXED = [
    Cell(30, 200, 8, 1.0, "float32", name="ragged"),
    Cell(30, 200, 8, 1.0, "bfloat16", name="ragged"),
    *(
        Cell(310, 48, 8, signal, dtype, name="quickstart")
        for dtype in FACTORS["dtype"]
        for signal in (1.0, 0.25)
    ),
    Cell(30, 200, 8, 1.0, "bfloat16", name="two updates"),
]


def grid(seed: int) -> list[Cell]:
    """Choose cells in which every two values of different factors meet; about 30.

    Args:
        seed: other cells for another seed.
    """
    return [Cell(**chosen) for chosen in covering(FACTORS, lambda row: Cell(**row).seconds, seed)]


def covering(
    factors: Mapping[str, Sequence[Any]], cost: Callable[[Row], float], seed: int
) -> list[Row]:
    """Choose combinations in which every two values of different factors meet.

    Greedy: each is the one with the most pairs that have not met, for its cost.

    Example:
        >>> rows = covering({"a": (1, 2), "b": (1, 2), "c": (1, 2)}, lambda row: 1.0, seed=0)
        >>> sorted({(row["a"], row["c"]) for row in rows}), len(rows) < 8
        ([(1, 1), (1, 2), (2, 1), (2, 2)], True)
    """
    rows = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    random.Random(seed).shuffle(rows)
    candidates = [(row, set(combinations(row.items(), 2)), cost(row) ** COST_POWER) for row in rows]
    missing = set().union(*(pairs for _, pairs, _ in candidates))
    chosen = []
    while missing:
        row, met, _ = max(candidates, key=lambda row: len(row[1] & missing) / row[2])
        chosen.append(row)
        missing -= met
    return chosen


# --- the work of a cell ---------------------------------------------------------------------------


def cell_workload(bench: Bench, cell: Cell, dtype: str | None = None) -> Workload:
    """Make up prompts and completions of a cell; the quickstart's fixed cells have its prompts."""
    dtype = dtype or cell.dtype
    limit = max(2, cell.limit // bench.sizes.shrink)
    changes = {
        "dtype": dtype,
        "bf16": dtype == "bfloat16",
        "num_generations": cell.group,
        "per_device_train_batch_size": cell.micro_batch,
        "gradient_accumulation_steps": cell.prompts * cell.group // cell.micro_batch,
        "max_completion_length": limit,
        "beta": cell.beta,
        "loss_type": cell.loss_type,
        **OF_LOSS.get(cell.loss_type, {}),
    }
    if cell.name == "two updates":
        changes |= {"num_iterations": 2, "max_steps": 2}
    settings = settings_for(bench.model, bench.scratch, **changes)
    if cell.name == "quickstart":
        workload = quickstart_workload(settings)
    else:
        tokenizer = load_tokenizer(str(bench.model))
        prompts = made_up_prompts(tokenizer, cell, bench.sizes.shrink, bench.seed)
        dataset = Dataset.from_dict({"prompt": prompts})
        workload = Workload(settings, tokenizer, dataset, lambda: load_base_model(settings[2]))
    workload.signal = cell.signal
    lengths = [max(1, n // bench.sizes.shrink) for n in completion_lengths(cell, bench.seed)]
    make = partial(made_up_completions, workload.tokenizer, lengths, limit, bench.seed)
    workload.invent = make
    return workload


def completion_lengths(cell: Cell, seed: int) -> list[int]:
    """Draw the lengths of all completions of a step, in tokens."""
    rng, count = random.Random(seed), cell.prompts * cell.group
    if cell.name == "quickstart":
        mean, deviation = QUICKSTART_LENGTHS
    elif cell.limit in LOG_MEAN:
        mean, deviation = LOG_MEAN[cell.limit], LOG_DEVIATION
    else:
        return [cell.limit] * count
    return [min(int(rng.lognormvariate(mean, deviation)), cell.limit) for _ in range(count)]


def made_up_completions(
    tokenizer: PreTrainedTokenizerBase,
    lengths: list[int],
    limit: int,
    seed: int,
    prompts: list[list[int]],
) -> list[list[int]]:
    """Make up a completion for each prompt; those below the limit end in an end token."""
    rng = random.Random(seed)
    ids = tokenizer.convert_tokens_to_ids(one_token_words(tokenizer))
    end = int(tokenizer.eos_token_id)
    return [
        rng.choices(ids, k=length) if length >= limit else [*rng.choices(ids, k=length - 1), end]
        for _, length in zip(prompts, lengths, strict=True)
    ]


def made_up_prompts(
    tokenizer: PreTrainedTokenizerBase, cell: Cell, shrink: int, seed: int
) -> list[str]:
    """Make up prompts of ragged lengths with a common beginning, one more than a step takes.

    TRL's sampler leaves out an incomplete batch.
    """
    rng, words = random.Random(seed), one_token_words(tokenizer)
    beginning = rng.choices(words, k=COMMON[cell.prompt] // shrink)
    own = [rng.randint(*OWN[cell.prompt]) // shrink for _ in range(cell.prompts + 1)]
    prompts = [beginning + rng.choices(words, k=length) for length in own]
    return [tokenizer.convert_tokens_to_string(prompt) for prompt in prompts]


def one_token_words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """List tokens that are a word with the space before it, and so stay one token in a text.

    Raises:
        ValueError: if the vocabulary is not that of a byte-level BPE.
    """
    words = [word for word in tokenizer.get_vocab() if re.fullmatch("Ġ[a-z]{2,}", word)]
    if not words:
        raise ValueError("made-up prompts need the tokenizer of a byte-level BPE")
    return sorted(words)


# --- measuring ------------------------------------------------------------------------------------


def measure_cell(bench: Bench, row: Row, cell: Cell) -> None:
    """Compare a step of both trainers on the same completions.

    The first step of each does not count; it gives the gradients. Live tensors and matrix products
    are counted in steps that are not timed, because counting them takes time. In the quickstart's
    cells both sample too, for the time that it takes; ours tests its engines in the first step.
    """
    exact = exact_gradients(bench, cell)
    workload = cell_workload(bench, cell)
    contenders = build(["stock", "solo"], workload)
    stock, solo = contenders.values()
    counted = {"stock": count_work(stock, capture=True)}
    solo.samples = cell.name == "quickstart"
    solo.train(capture=True)
    row["gradient_gap"] = gradient_gap(stock.gradients, solo.gradients)
    if exact is not None:
        row["from_fp32"] = {name: distance(exact, c.gradients) for name, c in contenders.items()}
    stock.gradients, solo.gradients = [], []
    row |= workload.describe()
    row["gemm_peak"] = gemm_rate(getattr(torch, cell.dtype))
    stock.samples = solo.samples
    runs = {name: partial(_train, contender) for name, contender in contenders.items()}
    measured = alternate(runs, bench.sizes.rounds, bench.sizes.seconds, at_least=2)
    row |= compare(measured, "training_s")
    if cell.name == "quickstart":
        row |= {key: compare(measured, key)[key] for key in ("sampling_s", "step_s")}
    solo.samples = False
    counted["solo"] = count_work(solo)
    row["peak_gib"] = {name: round(work.peak / GIB, 3) for name, work in counted.items()}
    row["gemm_flop"] = {name: work.gemm_flop for name, work in counted.items()}


def exact_gradients(bench: Bench, cell: Cell) -> list[Gradients] | None:
    """Compute the gradients of a cell in fp32, unless that is its number format."""
    if cell.dtype == "float32":
        return None
    workload = cell_workload(bench, cell, dtype="float32")
    solo = build(["solo"], workload)["solo"]
    solo.train(capture=True)
    gradients = solo.gradients
    del solo, workload
    free_memory()
    return gradients


def _train(contender: Contender, seed: int) -> Row:
    return contender.train(seed)


def count_work(contender: Contender, capture: bool = False) -> LiveMemory:
    """Take a step and count its live tensors and its matrix products."""
    with LiveMemory() as memory:
        contender.train(capture=capture)
    return memory


def gemm_rate(dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a large matrix product, the best of several."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=dtype) for _ in range(2))
    return 2 * GEMM_SIZE**3 / min(timed(lambda: a @ b)[0] for _ in range(8))


# --- what was measured ----------------------------------------------------------------------------


def one_line(row: Row) -> str:
    """Format the figures of a cell for the terminal."""
    stock, solo = (row["training_s"][name] for name in ("stock", "solo"))
    rounds = [a / b for a, b in zip(stock, solo, strict=True)]
    memory = row["peak_gib"]["solo"] / row["peak_gib"]["stock"]
    gemm = row["gemm_flop"]["solo"] / row["median"]["solo"] / row["gemm_peak"]
    whole = f"; whole step {mean_ratio(row, 'step_s'):.2f}x" if "step_s" in row else ""
    return (
        f"{row['ratio']['solo']:.2f}x ({min(rounds):.2f}-{max(rounds):.2f}){whole}  "
        f"{name_cell(row)}; stock {row['median']['stock']:.3g} s, ours {row['median']['solo']:.3g} "
        f"s, {gap(row)}, memory {memory:.0%} of stock's, {gemm:.0%} of the GEMM peak"
    )


def gap(row: Row) -> str:
    """Format the gap between the gradients; in bf16, how far both are from that in fp32."""
    if "from_fp32" not in row:
        return f"gradient gap {row['gradient_gap']:.1e}"
    stock, solo = (row["from_fp32"][name] for name in ("stock", "solo"))
    return f"gradients {stock:.1e} and {solo:.1e} from fp32"


def mean_ratio(row: Row, key: str) -> float:
    """Compute how many times faster ours is in `key`, over all rounds."""
    return sum(row[key]["stock"]) / sum(row[key]["solo"])


def name_cell(row: Row) -> str:
    """Describe the batch of a cell in a few words."""
    name = f"{row['name']}: " if "name" in row else ""
    return (
        f"{name}{row['prompt']} + {row['limit']} tokens, G {row['group']}, signal "
        f"{row['signal']:.0%}, {row['dtype']}, beta {row['beta']:g}, {row['loss_type']}"
    )
