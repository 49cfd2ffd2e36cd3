"""The GRPO loss of rows whose tokens are scored.

It is `_compute_loss` of TRL 1.16.0 (grpo_trainer.py:2989-3290) for the settings that a packed pass
takes over; `drop_in` names the others.

Shapes: B rows, T tokens of a completion; 1 where one value stands for a whole row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from trl import GRPOTrainer

from sologrpo.training.packing import Batch

# Loss types that are sums over rows, by how they are normalised: over the tokens of the whole
# generation batch, or over the rows of the call.
GLOBALLY_NORMALISED = ("dapo", "cispo", "vespo")
ROW_NORMALISED = ("grpo", "sapo", "dr_grpo", "luspo")

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Terms:
    """The parts that the loss of a token is made of.

    Attributes:
        log_probs_BT: of the policy that is trained, with gradient.
        ratios: new over old probability, (B, T), or (B, 1) at the level of sequences.
        sampler_ratios_BT: old policy over vLLM's, None without vLLM.
    """

    log_probs_BT: torch.Tensor
    old_log_probs_BT: torch.Tensor
    ratios: torch.Tensor
    advantages_B1: torch.Tensor
    mask_BT: torch.Tensor
    sampler_ratios_BT: torch.Tensor | None

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Average (B, T) values over the tokens, or (B, 1) values over the rows."""
        if values.size(1) == 1:
            return values.mean()
        return (values * self.mask_BT).sum() / self.mask_BT.sum().clamp(min=1.0)

    def row_means(self, values: torch.Tensor) -> torch.Tensor:
        """Average (B, T) or (B, 1) values over each row, (B,)."""
        if values.size(1) == 1:
            return values.squeeze(1)
        return (values * self.mask_BT).sum(dim=1) / self.mask_BT.sum(dim=1)


def grpo_loss(
    trainer: GRPOTrainer,
    log_probs_BT: torch.Tensor,
    entropies_BT: torch.Tensor,
    batch: Batch,
) -> tuple[torch.Tensor, Metrics]:
    """Return the loss of the rows of a batch, and what TRL logs of it, on the device."""
    terms = _terms(trainer, log_probs_BT, batch)
    losses, metrics = _POLICY_LOSSES[trainer.loss_type](trainer, terms)
    if trainer.off_policy_mask_threshold is not None:
        losses = losses * GRPOTrainer.get_off_policy_mask(
            terms.advantages_B1,
            log_probs_BT,
            batch.get("sampling_per_token_logps", terms.old_log_probs_BT),
            terms.mask_BT,
            trainer.off_policy_mask_threshold,
        )
    if terms.sampler_ratios_BT is not None and trainer.loss_type != "vespo":
        losses = losses * terms.sampler_ratios_BT
    if trainer.beta != 0.0:
        kl_BT = _kl(trainer, terms, batch["ref_per_token_logps"])
        losses = losses + trainer.beta * kl_BT
        metrics["kl"] = terms.mean(kl_BT)
    metrics["entropy"] = terms.mean(entropies_BT)
    loss = _normalised(trainer, losses * terms.mask_BT, terms.mask_BT, batch)
    return loss, {name: value.detach() for name, value in metrics.items()}


def _terms(trainer: GRPOTrainer, log_probs_BT: torch.Tensor, batch: Batch) -> Terms:
    mask_BT, old_BT = batch["completion_mask"], batch.get("old_per_token_logps")
    if old_BT is None:  # the policy that sampled is the one that is trained
        old_BT = log_probs_BT.detach()
    log_ratios = log_probs_BT - old_BT
    if trainer.importance_sampling_level == "sequence":
        lengths_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1.0)
        log_ratios = (log_ratios * mask_BT).sum(dim=1, keepdim=True) / lengths_B1
    return Terms(
        log_probs_BT,
        old_BT,
        log_ratios.exp(),
        batch["advantages"].unsqueeze(1),
        mask_BT,
        batch.get("importance_sampling_ratio"),
    )


def _clipped(trainer: GRPOTrainer, terms: Terms) -> tuple[torch.Tensor, Metrics]:
    low, high = 1 - trainer.epsilon_low, 1 + trainer.epsilon_high
    ratios, advantages_B1 = terms.ratios, terms.advantages_B1
    clipped = ratios.clamp(low, high)
    if trainer.args.delta is not None:
        ratios = ratios.clamp(max=trainer.args.delta)
    losses = -torch.min(ratios * advantages_B1, clipped * advantages_B1)
    is_low = (ratios < low) & (advantages_B1 < 0)
    is_high = (ratios > high) & (advantages_B1 > 0)
    metrics = {
        "clip_ratio/low_mean": terms.mean(is_low.float()),
        "clip_ratio/high_mean": terms.mean(is_high.float()),
        "clip_ratio/region_mean": terms.mean((is_low | is_high).float()),
        "clip_ratio/low_min": nanmin(terms.row_means(is_low.float())),
        "clip_ratio/high_max": nanmax(terms.row_means(is_high.float())),
    }
    return losses, metrics


def _cispo(trainer: GRPOTrainer, terms: Terms) -> tuple[torch.Tensor, Metrics]:
    high = trainer.epsilon_high
    clamped = terms.ratios.clamp(max=high).detach()
    losses = -clamped * terms.advantages_B1 * terms.log_probs_BT
    is_clipped = (terms.ratios > high) & (terms.advantages_B1 > 0)
    return losses, {"cispo_clip_ratio": terms.mean(is_clipped.float())}


def _sapo(trainer: GRPOTrainer, terms: Terms) -> tuple[torch.Tensor, Metrics]:
    args = trainer.args
    temperatures_B1 = torch.where(
        terms.advantages_B1 > 0, args.sapo_temperature_pos, args.sapo_temperature_neg
    )
    soft = torch.sigmoid(temperatures_B1 * (terms.ratios - 1)) * 4 / temperatures_B1
    return -soft * terms.advantages_B1, {}


def _vespo(trainer: GRPOTrainer, terms: Terms) -> tuple[torch.Tensor, Metrics]:
    args = trainer.args
    weights_B1 = GRPOTrainer.get_gamma_weights(
        terms.advantages_B1,
        terms.log_probs_BT - terms.old_log_probs_BT,
        terms.mask_BT,
        terms.sampler_ratios_BT,
        args.vespo_k_pos,
        args.vespo_lambda_pos,
        args.vespo_k_neg,
        args.vespo_lambda_neg,
    )
    losses_BT = -weights_B1 * terms.advantages_B1 * terms.log_probs_BT
    return losses_BT, {"vespo/phi_seq_mean": terms.mean(weights_B1)}


_POLICY_LOSSES: dict[str, Callable[[GRPOTrainer, Terms], tuple[torch.Tensor, Metrics]]] = {
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "luspo"), _clipped),
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
}


def _kl(trainer: GRPOTrainer, terms: Terms, reference_BT: torch.Tensor) -> torch.Tensor:
    gaps_BT = reference_BT - terms.log_probs_BT
    kl_BT = gaps_BT.exp() - gaps_BT - 1
    return kl_BT * terms.ratios if trainer.args.use_bias_correction_kl else kl_BT


def _normalised(
    trainer: GRPOTrainer, losses_BT: torch.Tensor, mask_BT: torch.Tensor, batch: Batch
) -> torch.Tensor:
    if trainer.loss_type in ("grpo", "sapo"):
        return (losses_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1.0)).mean()
    if trainer.loss_type == "luspo":
        return losses_BT.sum(dim=1).mean()
    if trainer.loss_type == "dr_grpo":
        count = len(losses_BT) * trainer.max_completion_length
    else:
        tokens = batch["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        count = tokens / trainer.args.steps_per_generation
    loss: torch.Tensor = losses_BT.sum() / count
    return loss


def nanmin(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the minimum of what is not NaN, NaN if all is; waits for no device, unlike TRL's."""
    is_nan = tensor.isnan()
    return tensor.masked_fill(is_nan, torch.inf).amin().masked_fill(is_nan.all(), torch.nan)


def nanmax(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the maximum as `nanmin` does the minimum."""
    return -nanmin(-tensor)
