"""What the rewards of a group amount to before and after they become advantages.

Shapes: B completions of all processes, R rewards, G completions of a prompt.
"""

import torch
from trl.trainer.utils import nanstd

from sologrpo.config.arguments import TRL_EPSILON

# Every reward of `rewards/` that judges the answer gives 1 for a right one.
RIGHT = 1.0


def gate_side_rewards(
    rewards_BR: torch.Tensor, outcome: int, num_generations: int, gate: str
) -> torch.Tensor:
    """Let side rewards count only where the outcome reward found a right answer.

    An ungated side reward makes signal out of a group in which everything is wrong, and teaches
    what has nothing to do with the answer.

    Args:
        rewards_BR: scores, NaN where a reward could not judge.
        outcome: index of the outcome reward; an answer is right from a score of 1 on.
        num_generations: G.
        gate: ``group``: side rewards are 0 in groups without a right answer; ``completion``: they
            are 0 in every completion that is not right.

    Returns:
        (B, R) scores of which the advantages are made.
    """
    right_B = rewards_BR[:, outcome] >= RIGHT  # NaN is not right
    if gate == "group":
        right_B = right_B.view(-1, num_generations).any(dim=1).repeat_interleave(num_generations)
    side_BR = torch.ones_like(rewards_BR, dtype=torch.bool)
    side_BR[:, outcome] = False
    shut_BR = side_BR & ~right_B[:, None] & ~rewards_BR.isnan()
    return rewards_BR.masked_fill(shut_BR, 0.0)


def degenerate_groups(
    rewards_BR: torch.Tensor, weights_R: torch.Tensor, num_generations: int
) -> torch.Tensor:
    """Which groups have one and the same weighted sum in all their completions, (P,) booleans.

    Completions that no reward could judge do not count.
    """
    sums_B = (rewards_BR * weights_R).nansum(dim=1)
    unjudged_B = rewards_BR.isnan().all(dim=1)
    highest = sums_B.masked_fill(unjudged_B, -torch.inf).view(-1, num_generations).amax(dim=1)
    lowest = sums_B.masked_fill(unjudged_B, torch.inf).view(-1, num_generations).amin(dim=1)
    return highest <= lowest


def rescaling(
    rewards_BR: torch.Tensor, weights_R: torch.Tensor, num_generations: int, epsilon: float
) -> torch.Tensor:
    """What turns TRL's advantages, scaled by group, into those with another epsilon; (B,)."""
    sums_B = (rewards_BR * weights_R).nansum(dim=1)
    sums_B = sums_B.masked_fill(rewards_BR.isnan().all(dim=1), torch.nan)
    std_P = nanstd(sums_B.view(-1, num_generations), dim=1)
    factor_P: torch.Tensor = (std_P + TRL_EPSILON) / (std_P + epsilon)
    return factor_P.nan_to_num(1.0).repeat_interleave(num_generations)


def advantage_shares(
    rewards_BR: torch.Tensor,
    weights_R: torch.Tensor,
    num_generations: int,
    scale_by_group: bool,
) -> list[float] | None:
    """The share of the advantages that each reward contributes; None if there are none.

    An advantage is a sum over rewards, ``weight * (score - group mean)``, over the deviation of
    the group where advantages are scaled by it. A reward's share is the mean absolute value of
    its terms over that of all rewards: 1.0 in all, also where terms cancel out.
    """
    terms_PGR = (rewards_BR * weights_R).nan_to_num().view(-1, num_generations, len(weights_R))
    terms_PGR = terms_PGR - terms_PGR.mean(dim=1, keepdim=True)
    terms_PGR[degenerate_groups(rewards_BR, weights_R, num_generations)] = 0.0
    if scale_by_group:
        terms_PGR = terms_PGR / (terms_PGR.sum(dim=2, keepdim=True).std(dim=1, keepdim=True) + 1e-4)
    sizes_R = terms_PGR.abs().mean(dim=(0, 1))
    total = sizes_R.sum()
    return (sizes_R / total).tolist() if total > 0 else None
