"""TRL's trainer and ours: one policy, one config, the same completions and rewards.

Both are measured from outside, through `train()` and `_generate_single_turn`, as in a run.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _measure import synchronize, timed
from datasets import Dataset
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
)
from trl import GRPOTrainer, ModelConfig, get_peft_config

from sologrpo.config.arguments import RunArguments, SoloGRPOConfig
from sologrpo.config.parsing import parse_config
from sologrpo.data.dataset import load_train_and_validation
from sologrpo.model.loading import load_base_model, load_tokenizer
from sologrpo.training.trainer import SoloGRPOTrainer

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs/quickstart.yaml"
Settings = tuple[RunArguments, SoloGRPOConfig, ModelConfig]
Gradients = dict[str, torch.Tensor]
Times = dict[str, Any]

CONTENDERS = {"stock": GRPOTrainer, "solo": SoloGRPOTrainer}

# Rewards of a group with signal as the quickstart gives them: 0.2 for the format, 1 for the answer.
SIGNAL = (1.2, 0.2, 0.0, 0.2, 0.0, 1.2, 0.2, 0.2)

# The quickstart, made repeatable: a learning rate of 0 leaves the policy unchanged, so every repeat
# is the same step. Gradients are not clipped, which would hide a wrong scale.
REPEATABLE: dict[str, Any] = {
    "dataset_name": ROOT / "quickstart",
    "dtype": "float32",
    "bf16": False,
    "learning_rate": 0.0,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "max_steps": 1,
    "per_device_train_batch_size": 8,  # fits anywhere, and is a common choice
    "gradient_accumulation_steps": 4,
    "max_completion_length": 96,
    "save_strategy": "no",
    "log_completions": False,
    "disable_tqdm": True,
}


def by_position(count: int, group: int, signal: float) -> list[float]:
    """Score `count` completions in groups; only the first groups, a share `signal`, have signal."""
    n_signal = round(signal * (count // group))
    return [
        SIGNAL[row % group % len(SIGNAL)] if row // group < n_signal else 0.0
        for row in range(count)
    ]


def settings_for(model: str | Path, output_dir: Path, **changes: Any) -> Settings:
    """Read the settings of `configs/quickstart.yaml`, changed by `REPEATABLE` and `changes`."""
    values = {**REPEATABLE, "model_name_or_path": model, "output_dir": output_dir, **changes}
    arguments = [text for key, value in values.items() for text in (f"--{key}", str(value))]
    run, args, model_args = parse_config(["--config", str(CONFIG), *arguments])
    args.reward_weights = None  # the scores of `Workload.rewards` are weighted already
    return run, args, model_args


@dataclass
class Workload:
    """The work that every contender gets.

    Attributes:
        settings: config of the run.
        tokenizer: of the policy.
        dataset: rows with `prompt`.
        load_model: loads the frozen weights, again for each contender.
        signal: share of the groups whose completions differ in their rewards; they come first.
        prompts: token ids of the prompts, one for each completion, once they are known.
        completions: token ids that every contender trains on, once they are known.
        invent: makes completions for prompts; without it the first contender samples them.
    """

    settings: Settings
    tokenizer: PreTrainedTokenizerBase
    dataset: Dataset
    load_model: Callable[[], PreTrainedModel]
    signal: float = 1.0
    prompts: list[list[int]] | None = None
    completions: list[list[int]] | None = None
    invent: Callable[[list[list[int]]], list[list[int]]] | None = None

    def rewards(self, completions: list[Any], **_: Any) -> list[float]:
        """Score by position alone."""
        return by_position(len(completions), self.settings[1].num_generations, self.signal)

    def keep(self, prompts: list[list[int]], completions: list[list[int]]) -> None:
        """Use these completions for all contenders from now on."""
        self.prompts, self.completions = prompts, completions

    def completions_for(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the completions that were kept.

        Raises:
            RuntimeError: if they belong to other prompts; the contenders would not be comparable.
        """
        if self.completions is None or prompts != self.prompts:
            raise RuntimeError("a contender was given other prompts than those of the completions")
        return self.completions

    def describe(self) -> dict[str, float]:
        """Count the tokens that are trained on."""
        assert self.prompts is not None
        assert self.completions is not None
        lengths = [len(ids) for ids in self.completions]
        return {
            "completions": len(lengths),
            "prompt_tokens": sum(map(len, self.prompts)),
            "completion_tokens": sum(lengths),
            "longest_completion": max(lengths),
            "mean_completion": round(sum(lengths) / len(lengths), 1),
        }


def quickstart_workload(settings: Settings) -> Workload:
    """Build the workload of the model and problems in the settings, by default the quickstart's."""
    run, args, model_args = settings
    tokenizer = load_tokenizer(model_args.model_name_or_path)
    dataset, _ = load_train_and_validation(run, tokenizer, args.seed)
    return Workload(settings, tokenizer, dataset, lambda: load_base_model(copy.copy(model_args)))


@dataclass
class Contender(TrainerCallback):  # type: ignore[misc]
    """A trainer that can repeat the same step.

    Attributes:
        name: one of `CONTENDERS`.
        samples: sample in every step, for the time that it takes. It is still trained on the
            completions of the workload, because the lengths of others are random.
        gradients: of every optimizer step of the last run, with `capture`.
    """

    name: str
    workload: Workload
    samples: bool = False
    gradients: list[Gradients] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Build the trainer."""
        self.trainer = _build_trainer(self.name, self.workload)
        self.trainer.add_callback(self)
        self._sample = self.trainer._generate_single_turn
        self.trainer._generate_single_turn = self._generate_single_turn
        self._capture = False
        self._times: Times = {}

    def train(self, seed: int = 0, capture: bool = False) -> Times:
        """Run all steps of the config.

        Args:
            seed: of what is sampled.
            capture: keep the gradients.

        Returns:
            Seconds of sampling and of the rest, the training, from the start of a step to the end
            of its optimizer update; tokens sampled.
        """
        self._times = {"step_s": 0.0, "sampling_s": 0.0, "sampled_tokens": 0}
        self._capture, self.gradients = capture, []
        torch.manual_seed(seed)
        self.trainer.train()
        return self._times | {"training_s": self._times["step_s"] - self._times["sampling_s"]}

    def _generate_single_turn(self, prompts: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        workload = self.workload
        if workload.completions is None and workload.invent is not None:
            workload.keep(prompts, workload.invent(prompts))
        if self.samples or workload.completions is None:
            seconds, (completions, *_) = timed(lambda: self._sample(prompts, *args, **kwargs))
            self._times["sampling_s"] += seconds
            self._times["sampled_tokens"] += sum(map(len, completions))
            if workload.completions is None:
                workload.keep(prompts, completions)
        return workload.completions_for(prompts), None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        synchronize()
        self._since = time.perf_counter()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Stop the clock while the gradients are copied."""
        start = time.perf_counter()
        if self._capture:
            parameters = self.trainer.model.named_parameters()
            self.gradients.append(
                {name: p.grad.detach().clone() for name, p in parameters if p.requires_grad}
            )
        self._since += time.perf_counter() - start

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock."""
        synchronize()
        self._times["step_s"] += time.perf_counter() - self._since


def _build_trainer(name: str, workload: Workload) -> GRPOTrainer:
    _, args, model_args = workload.settings
    trainer = CONTENDERS[name](
        model=workload.load_model(),
        reward_funcs=workload.rewards,
        args=copy.copy(args),
        train_dataset=workload.dataset,
        processing_class=workload.tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.remove_callback(PrinterCallback)
    _make_adapter_do_something(trainer.model)
    return trainer


def _make_adapter_do_something(model: torch.nn.Module) -> None:
    """Fill the adapter: LoRA starts with B = 0, where the gradient of A is zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                # Drawn in main memory: a device has another generator. In bf16, because TRL keeps
                # the adapter of 4-bit weights in it.
                drawn = torch.empty(parameter.shape).normal_(0.0, 1e-2, generator=generator)
                parameter.copy_(drawn.bfloat16())


def build(names: Sequence[str], workload: Workload) -> dict[str, Contender]:
    """Build the contenders one after the other."""
    return {name: Contender(name, workload) for name in names}


def distance(reference: list[Gradients], other: list[Gradients]) -> float:
    """Compute |a - b| / |a| of the gradients of all parameters and optimizer steps together."""
    pairs = [(a[n], b[n]) for a, b in zip(reference, other, strict=True) for n in a]
    squared = sum(float((a - b).norm()) ** 2 for a, b in pairs)
    return math.sqrt(squared / sum(float(a.norm()) ** 2 for a, _ in pairs))


def gradient_gap(reference: list[Gradients], other: list[Gradients]) -> float:
    """Compute the largest |a - b| / |a| of any parameter and optimizer step; 0 if both are zero."""
    pairs = [
        (a[name], b[name])
        for a, b in zip(reference, other, strict=True)
        for name in a.keys() | b.keys()
    ]
    differing = [(a, b) for a, b in pairs if not torch.equal(a, b)]
    return max((float((a - b).norm() / a.norm()) for a, b in differing), default=0.0)
