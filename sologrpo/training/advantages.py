"""Rewards of a generation batch, and what they amount to as advantages.

Shapes: B completions of all processes, R rewards, G completions of a prompt, P prompts.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import torch
from trl.trainer.utils import nanstd

from rewards import OUTCOME_REWARDS
from sologrpo.base.errors import InputError
from sologrpo.config.arguments import TRL_EPSILON
from sologrpo.training.loss import nanmax, nanmin

# Every reward of `rewards/` that judges the answer gives 1 for a right one.
RIGHT = 1.0
OF_A_KIND = "accuracy/"  # a metric: the share of right completions of a kind of problem


@dataclass(frozen=True)
class GroupRewards:
    """The rewards of a generation batch, of all processes.

    Attributes:
        scores_BR: returned by the reward functions, NaN where one could not judge.
        rewards_BR: the scores gated by the outcome, of which the advantages are made.
        outcome: index of the reward that tells right from wrong.
    """

    scores_BR: torch.Tensor
    rewards_BR: torch.Tensor
    weights_R: torch.Tensor
    num_generations: int
    outcome: int | None = None

    @classmethod
    def of_scores(
        cls,
        scores_BR: torch.Tensor,
        weights_R: torch.Tensor,
        num_generations: int,
        outcome: int | None,
        is_gated: bool,
    ) -> "GroupRewards":
        """Take the scores of a batch, gated by the outcome or as they are."""
        rewards_BR = scores_BR
        if is_gated and outcome is not None:
            rewards_BR = gate_side_rewards(scores_BR, outcome, num_generations)
        return cls(scores_BR, rewards_BR, weights_R.to(scores_BR.device), num_generations, outcome)

    @cached_property
    def degenerate_P(self) -> torch.Tensor:
        """Groups without a signal, (P,) booleans."""
        return degenerate_groups(self.rewards_BR, self.weights_R, self.num_generations)

    def exact_advantages(
        self, advantages_B: torch.Tensor, own: slice, epsilon: float, scale_by_group: bool
    ) -> torch.Tensor:
        """Correct the advantages of this process, `own` of all, that TRL made of sums of rewards.

        In a group of equal rewards the advantage should be zero, but the mean of equal floats is
        off by rounding, and dividing by std + 1e-4 makes that up to 0.005.
        """
        G = self.num_generations
        if scale_by_group and epsilon != TRL_EPSILON:
            factors_B = rescaling(self.rewards_BR, self.weights_R, G, epsilon)
            advantages_B = advantages_B * factors_B[own]
        return advantages_B.masked_fill(self.degenerate_P.repeat_interleave(G)[own], 0.0)

    def describe(self) -> dict[str, float]:
        """Return what is logged of the rewards besides TRL's own figures."""
        sums_B = weighted_sums(self.rewards_BR, self.weights_R)
        figures = {"reward_min": nanmin(sums_B), "reward_max": nanmax(sums_B)}
        if self.outcome is not None:
            right_B = self.scores_BR[:, self.outcome] >= RIGHT
            right_PG = right_B.view(-1, self.num_generations)
            for name, same_P in (("right", right_PG.all(dim=1)), ("wrong", ~right_PG.any(dim=1))):
                share = (self.degenerate_P & same_P).float().mean()
                figures[f"degenerate/all_{name}"] = share
        values = torch.stack(list(figures.values())).tolist()  # the host waits once
        return dict(zip(figures, values, strict=True))

    def accuracy_by_kind(self, kinds_B: Sequence[str | None]) -> dict[str, float]:
        """Return the share of right completions by kind, of those that the outcome could judge."""
        if self.outcome is None:
            return {}
        by_kind = defaultdict(list)
        for kind, score in zip(kinds_B, self.scores_BR[:, self.outcome].tolist(), strict=True):
            if kind is not None and not math.isnan(score):
                by_kind[kind].append(score >= RIGHT)
        return {f"{OF_A_KIND}{kind}": fmean(right) for kind, right in sorted(by_kind.items())}


def find_outcome(names: Sequence[str], configured: str | None) -> int | None:
    """Find the reward that tells right from wrong: the configured one, or the first judge."""
    if configured is not None and configured not in names:
        raise InputError(f"outcome_reward {configured!r} is not among {names}")
    judges = OUTCOME_REWARDS if configured is None else (configured,)
    return next((i for i, name in enumerate(names) if name in judges), None)


def weighted_sums(rewards_BR: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
    """Sum the weighted rewards of every completion, (B,); NaN where no reward could judge."""
    sums_B = (rewards_BR * weights_R).nansum(dim=1)
    return sums_B.masked_fill(rewards_BR.isnan().all(dim=1), torch.nan)


def gate_side_rewards(rewards_BR: torch.Tensor, outcome: int, num_generations: int) -> torch.Tensor:
    """Let side rewards count only in groups where the outcome reward found a right answer.

    Otherwise a side reward makes a signal out of a group in which everything is wrong, and teaches
    something that has nothing to do with the answer.
    """
    right_PG = (rewards_BR[:, outcome] >= RIGHT).view(-1, num_generations)  # NaN is not right
    open_B = right_PG.any(dim=1).repeat_interleave(num_generations)
    is_side_R = torch.arange(rewards_BR.size(1), device=rewards_BR.device) != outcome
    shut_BR = is_side_R & ~open_B[:, None] & ~rewards_BR.isnan()
    return rewards_BR.masked_fill(shut_BR, 0.0)


def degenerate_groups(
    rewards_BR: torch.Tensor, weights_R: torch.Tensor, num_generations: int
) -> torch.Tensor:
    """Find the (P,) groups whose weighted sums are all the same; those that are NaN are ignored."""
    sums_PG = weighted_sums(rewards_BR, weights_R).view(-1, num_generations)
    highest_P = sums_PG.nan_to_num(nan=-torch.inf).amax(dim=1)
    lowest_P = sums_PG.nan_to_num(nan=torch.inf).amin(dim=1)
    return highest_P <= lowest_P


def rescaling(
    rewards_BR: torch.Tensor, weights_R: torch.Tensor, num_generations: int, epsilon: float
) -> torch.Tensor:
    """Return (B,) factors that turn TRL's advantages, scaled by group, to another epsilon."""
    std_P = nanstd(weighted_sums(rewards_BR, weights_R).view(-1, num_generations), dim=1)
    factor_P: torch.Tensor = (std_P + TRL_EPSILON) / (std_P + epsilon)
    return factor_P.nan_to_num(1.0).repeat_interleave(num_generations)
