"""Outcome gating and what each reward contributes to the advantages."""

import pytest
import torch

from sologrpo.training.advantages import (
    advantage_shares,
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
    gated = gate_side_rewards(SCORES, 1, G, "group")
    assert gated[:, 0].nan_to_num(-1.0).tolist() == pytest.approx(
        [0.5, 1.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.2]
    )
    torch.testing.assert_close(gated[:, 1], SCORES[:, 1], equal_nan=True)


def test_gate_of_completions() -> None:
    gated = gate_side_rewards(SCORES, 1, G, "completion")
    assert gated[:, 0].nan_to_num(-1.0).tolist() == pytest.approx(
        [0.5, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.2]
    )


def test_gate_leaves_its_input_alone() -> None:
    before = SCORES.clone()
    gate_side_rewards(SCORES, 1, G, "group")
    torch.testing.assert_close(SCORES, before, equal_nan=True)


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


def test_shares_by_hand() -> None:
    # Group 1: deviations of the rewards ±0.5 and ±1 (weight 2 x ±0.5); group 2 is degenerate.
    rewards = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    weights = torch.tensor([1.0, 2.0])
    for scale_by_group in (True, False):
        shares = advantage_shares(rewards, weights, 2, scale_by_group)
        assert shares == pytest.approx([1 / 3, 2 / 3])


def test_shares_are_those_of_the_scaled_advantages() -> None:
    # A group that hardly differs counts as much as one that differs a lot: GRPO scales both.
    rewards = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    weights = torch.ones(2)
    assert advantage_shares(rewards, weights, 2, True) == pytest.approx([0.5, 0.5], abs=1e-3)
    assert advantage_shares(rewards, weights, 2, False) == pytest.approx([10 / 11, 1 / 11])


def test_terms_that_cancel_out_are_no_advantage() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert advantage_shares(rewards, torch.ones(2), 2, True) is None


def test_another_epsilon() -> None:
    rewards = torch.tensor([[0.0], [0.01], [1.0], [1.0], [NAN], [1.0]])
    weights = torch.tensor([2.0])
    std = 0.02 / 2**0.5
    advantages = torch.tensor([-0.01, 0.01]) / (std + 1e-4)
    factors = rescaling(rewards, weights, 2, 1e-6)
    torch.testing.assert_close(advantages * factors[:2], torch.tensor([-0.01, 0.01]) / (std + 1e-6))
    assert factors.isfinite().all()
