"""Outcome gating, groups without signal and the epsilon of the advantages."""

import pytest
import torch

from sologrpo.training.advantages import (
    degenerate_groups,
    gate_side_rewards,
    rescaling,
)

NAN = float("nan")
G = 2
# Columns: a side reward, the outcome. Groups: one right answer; none; none judged; both right.
SCORES = torch.tensor(
    [[0.5, 1.0], [1.0, 0.0], [0.5, 0.0], [1.0, 0.9], [0.5, NAN], [1.0, NAN], [NAN, 1.0], [0.2, 1.0]]
)


def test_gate_of_groups() -> None:
    gated = gate_side_rewards(SCORES, 1, G)
    assert gated[:, 0].nan_to_num(-1.0).tolist() == pytest.approx(
        [0.5, 1.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.2]
    )
    torch.testing.assert_close(gated[:, 1], SCORES[:, 1], equal_nan=True)


def test_degenerate_groups() -> None:
    weights = torch.tensor([1.0, 2.0])
    rewards = torch.tensor(
        [[0.7, 0.0]] * 2  # equal
        + [[1.0, 0.0], [0.0, 0.5]]  # equal in the weighted sum
        + [[1.0, 0.0], [0.0, 0.0]]
        + [[NAN, NAN], [1.0, 1.0]]  # one of them cannot be judged
        + [[NAN, NAN]] * 2
    )
    assert degenerate_groups(rewards, weights, 2).tolist() == [True, True, False, True, True]


def test_another_epsilon() -> None:
    rewards = torch.tensor([[0.0], [0.01], [1.0], [1.0], [NAN], [1.0]])
    weights = torch.tensor([2.0])
    std = 0.02 / 2**0.5
    advantages = torch.tensor([-0.01, 0.01]) / (std + 1e-4)
    factors = rescaling(rewards, weights, 2, 1e-6)
    torch.testing.assert_close(advantages * factors[:2], torch.tensor([-0.01, 0.01]) / (std + 1e-6))
    assert factors.isfinite().all()
