"""The rollout: how the completions of a generation batch are sampled.

Our sampling loop replaces `model.generate` for plain sampling of text; the rest is left to TRL.

Shapes: B rows of a batch, T tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from peft import PeftModel
from transformers import GenerationConfig

from sologrpo.base.errors import InputError
from sologrpo.config.arguments import SoloGRPOConfig
from sologrpo.model.trial import Model
from sologrpo.sampling.decoding import Request, Sampled, can_generate_fast
from sologrpo.sampling.sampler import TEST_ROWS, Sampler, Score, check_vllm
from sologrpo.sampling.stopping import StopStrings
from sologrpo.training.advantages import GroupRewards
from sologrpo.training.packing import Batch, Tokens, select_rows
from sologrpo.training.progress import StepMeter
from sologrpo.training.trl_patches import generate_replaced

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # of mixed precision
MORE_THAN_PLAIN = "the model or generation_kwargs ask for more than plain sampling"
Ids = list[list[int]]
LogProbs = list[list[float]] | None


@dataclass
class GenerationBatch:
    """A generation batch, and what is learned about it while TRL samples and scores it.

    With `has_sampled_log_probs` TRL need not compute those of the old policy.
    """

    rewards: GroupRewards = field(init=False)
    has_sampled_log_probs: bool = False


class Rollout:
    """Sample in place of `model.generate` if there is no obstacle, and cut at stop strings."""

    def __init__(
        self,
        sampler: Sampler,
        sampling_engine: str,
        stops: StopStrings,
        meter: StepMeter,
        obstacle: str | None,
        report: Callable[[str], None],
    ) -> None:
        self.sampler = sampler
        self.stops = stops
        self._requested = sampling_engine
        self._meter = meter
        self._obstacle = obstacle
        self._report = report

    @contextmanager
    def sampling_loop(self, model: Model) -> Iterator[list[Sampled]]:
        """Sample with our loop where TRL calls `model.generate`.

        The list that it yields stays empty if TRL sampled.
        """
        original = model.generate
        obstacle_of_all = self._obstacle or obstacle_of_model(model)
        done: list[Sampled] = []

        def generate(generation_config: GenerationConfig, **inputs: Any) -> torch.Tensor:
            obstacle = obstacle_of_all
            if obstacle is None and not can_generate_fast(model, generation_config, inputs):
                obstacle = MORE_THAN_PLAIN
            if obstacle is not None:
                self._leave_to_trl(obstacle)
                criteria = self.stops.criteria(inputs["input_ids"].size(1))
                output: torch.Tensor = original(
                    **inputs, generation_config=generation_config, stopping_criteria=criteria
                )
                return output
            request = Request(**inputs, config=generation_config, stops=self.stops)
            self.sampler.prepare(model, request)
            part = self._meter.part
            with part("sync_weights"), self.sampler.weights(model), part("sampling"):
                done.append(self.sampler.sample(model, request))
            return torch.cat([request.input_ids, done[-1].completion_ids], dim=1)

        with generate_replaced(model, generate):
            yield done

    def _leave_to_trl(self, obstacle: str) -> None:
        if self._requested not in ("auto", "adapter"):
            raise InputError(
                f"sampling_engine {self._requested} covers plain sampling of text with full "
                f"attention only, and here {obstacle}: set sampling_engine: adapter"
            )
        self._report(obstacle)

    def cut(self, completion_ids: Ids, log_probs: LogProbs) -> tuple[Ids, LogProbs]:
        """Cut completions and log-probs after a stop string, where TRL has left the padding."""
        completion_ids = [ids[: self.stops.length(ids)] for ids in completion_ids]
        if log_probs is not None:
            pairs = zip(log_probs, completion_ids, strict=True)
            log_probs = [row[: len(ids)] for row, ids in pairs]
        self._meter.count("sampling", sum(map(len, completion_ids)))
        return completion_ids, log_probs

    def is_cut_off(self, ids: list[int], end_ids: Sequence[int]) -> bool:
        """Check whether a completion ends in none of these tokens and at no stop string."""
        return ids[-1] not in end_ids and self.stops.length(ids) is None

    def describe_lengths(self, completion_ids: Ids, end_ids: Sequence[int]) -> dict[str, float]:
        """Return TRL's figures (2296-2308) of completions that stop strings may have ended."""
        cut_off = [self.is_cut_off(ids, end_ids) for ids in completion_ids]
        lengths = [len(ids) for ids, cut in zip(completion_ids, cut_off, strict=True) if not cut]
        lengths = gather_object(lengths) or [0]
        figures = {"mean": mean(lengths), "min": min(lengths), "max": max(lengths)}
        return {
            "completions/clipped_ratio": mean(map(float, gather_object(cut_off))),
            **{f"completions/{name}_terminated_length": float(n) for name, n in figures.items()},
        }

    def mask_cut_off(self, batch: Batch, end_ids: Sequence[int]) -> torch.Tensor:
        """Return the (B, T) mask of the completions with those masked that are cut off."""
        mask_BT: torch.Tensor = batch["completion_mask"]
        kept = [not self.is_cut_off(ids, end_ids) for ids in Tokens.of(batch).completions]
        return mask_BT * mask_BT.new_tensor(kept)[:, None]

    def correct_for_sampler(self, batch: Batch) -> None:
        """Take the policy that sampled for the old policy, if it is not the one that is trained."""
        sampled_BT = batch.get("sampling_per_token_logps")
        if sampled_BT is not None and not self.sampler.is_exact:
            batch["old_per_token_logps"] = sampled_BT


def measure_vllm(batch: Batch, top_p: float, score: Score) -> dict[str, float]:
    """Return how far vLLM, which sampled a batch, is from the policy that is trained.

    TRL has the trainer's log-probs already where it corrects for vLLM. If it does not, a few rows
    are scored. The run ends if vLLM samples another policy.
    """
    if "sampling_per_token_logps" not in batch:
        return {}
    trained_BT = batch.get("old_per_token_logps")
    if trained_BT is None:
        batch = select_rows(batch, list(range(min(len(batch["completion_ids"]), TEST_ROWS))))
        ids, mask = (
            torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], dim=1)
            for name in ("ids", "mask")
        )
        with torch.no_grad():
            trained_BT = score(ids, mask, batch["completion_ids"].size(1))
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    return check_vllm(batch["sampling_per_token_logps"], trained_BT, mask, top_p)


def make_sampler(
    args: SoloGRPOConfig, accelerator: Accelerator, is_sharded: bool, score: Score
) -> Sampler:
    """Create the sampler for `sampling_engine`; sharded weights are never merged."""
    return Sampler(
        "adapter" if is_sharded else args.sampling_engine,
        score,
        HALF.get(accelerator.mixed_precision),
        args.sampling_token_budget,
    )


def obstacle_of_model(model: Model) -> str | None:
    """Return why the model must be sampled by its own `generate`, or None if it need not."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if "generate" in vars(inner) or not type(inner).generate.__module__.startswith("transformers."):
        return "the model has a generate method of another kind"
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        return "the adapter puts virtual tokens before the prompt"
    return None
