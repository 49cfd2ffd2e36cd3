"""On a pretend GPU: devices are not mixed, and the host rarely waits.

`pretend_card.py` explains what that shows, and what it does not.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention
from transformers import GenerationConfig

from fixed_rollouts import config, make_trainer
from pretend_card import Card, pretend_card
from sologrpo.model.loading import load_tokenizer
from sologrpo.model.merging import merged
from sologrpo.sampling.decoding import LOOK_EVERY, Request, generate_fast
from sologrpo.sampling.stopping import StopStrings
from sologrpo.training import token_tree
from sologrpo.training.packing import Batch
from sologrpo.training.trainer import SoloGRPOTrainer
from tiny import with_adapter

pytestmark = pytest.mark.skipif(
    torch.backends.cuda.is_built() or sys.platform != "linux",
    reason="needs a build of torch for CPUs, on Linux",
)


@pytest.fixture
def card() -> Iterator[Card]:
    with pretend_card() as card:
        yield card


def test_mixed_devices_are_refused_and_waits_counted(card: Card) -> None:
    host = torch.zeros(2)
    with pytest.raises(RuntimeError, match=r"different devices: tests/test_pretend_card.py:\d+"):
        card.move(host) + host
    card.move(host).sum().item()
    assert card.waits.total() == 1


# -- sampling -------------------------------------------------------------------------------------

ROWS = [[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 9], [5, 6, 9], [5, 6, 10, 11, 12, 13]]
NEVER = -1
STOPS: dict[str, list[str]] = {"no stop strings": [], "a stop string": ["never 1"]}
WEIGHTS = {"adapter": lambda model: nullcontext(), "merged": merged}


def request_of(path: Path, new_tokens: int, stops: list[str], **settings: Any) -> Request:
    width = max(map(len, ROWS))
    return Request(
        torch.tensor([[0] * (width - len(ids)) + ids for ids in ROWS]),
        torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in ROWS]),
        GenerationConfig(
            max_new_tokens=new_tokens,
            eos_token_id=[NEVER],
            pad_token_id=0,
            **settings,
        ),
        StopStrings(load_tokenizer(str(path)), stops),
    )


def on_card(card: Card, request: Request) -> Request:
    ids, mask = card.move((request.input_ids, request.attention_mask))
    return Request(ids, mask, request.config, request.stops)


@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_host_waits_once_for_16_tokens(
    weights: str, stops: str, card: Card, tiny_llama: Path
) -> None:
    model = card.move(with_adapter(tiny_llama).eval())

    def waits(new_tokens: int) -> int:
        asked = request_of(
            tiny_llama, new_tokens, STOPS[stops], do_sample=True, top_p=0.9, temperature=0.8
        )
        with WEIGHTS[weights](model):
            card.waits.clear()
            sampled = generate_fast(model, on_card(card, asked), with_log_probs=True)
        assert sampled.completion_ids.shape == (len(ROWS), new_tokens)
        return card.waits.total()

    waits(4)  # the first call of all checks the model
    fixed = waits(LOOK_EVERY)
    assert waits(1 + 7 * LOOK_EVERY) <= fixed + 7, card.report()
    assert fixed <= 20, card.report()


# -- training -------------------------------------------------------------------------------------


def flex_stand_in(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
    scaling: float,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """FlexAttention is compiled for a GPU. This is the same, along the same mask."""
    N = query.size(2)
    sees = create_mask(mask.mask_mod, 1, 1, N, N, device=query.device)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=sees, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


def batch_of(n_prompts: int, longest: int, **more: Any) -> Batch:
    """A batch as TRL lays it out: four completions of each prompt, ragged."""
    draw = random.Random(n_prompts)
    prompts = [[5, 6, *draw.choices(range(20, 500), k=3 + i % 5)] for i in range(n_prompts)]
    prompts = [ids for ids in prompts for _ in range(4)]
    B, P, T = len(prompts), max(map(len, prompts)), longest
    lengths = [longest, *(draw.randint(1, longest) for _ in range(B - 1))]
    generator = torch.Generator().manual_seed(B)
    return {
        "prompt_ids": torch.tensor([[0] * (P - len(ids)) + ids for ids in prompts]),
        "prompt_mask": torch.tensor([[0] * (P - len(ids)) + [1] * len(ids) for ids in prompts]),
        "completion_ids": torch.randint(20, 500, (B, T), generator=generator),
        "completion_mask": torch.tensor([[1] * n + [0] * (T - n) for n in lengths]),
        "advantages": torch.randn(B, generator=generator),
        "num_items_in_batch": torch.tensor(sum(lengths)),
        "old_per_token_logps": -6 + 0.1 * torch.randn(B, T, generator=generator),
        "ref_per_token_logps": -6 + 0.1 * torch.randn(B, T, generator=generator),
    }


def gradients(trainer: SoloGRPOTrainer, batch: Batch) -> None:
    """Compute the gradient of an optimizer step, clipped."""
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, batch).backward()
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    torch.nn.utils.clip_grad_norm_(trained, 1.0)


@pytest.mark.parametrize(("beta", "n"), [(0.05, 3), (0.0, 4)])
def test_the_host_waits_as_often_in_every_optimizer_step(
    beta: float, n: int, card: Card, tiny_llama: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(token_tree, "flex_attention_forward", flex_stand_in)

    def waits(batch: Batch, budget: int) -> tuple[int, int]:
        """Count the passes of a step, and the waits."""
        args = config(tmp_path, train_token_budget=budget, beta=beta, num_iterations=2)
        trainer = make_trainer(SoloGRPOTrainer, tiny_llama, args, lambda completions, **_: 0.0)
        trainer.current_gradient_accumulation_steps = 1
        card.move(trainer.model.train())
        del trainer._scorer._shares_prompts  # found on the CPU
        batch, passes = card.move(batch), []
        score = trainer._scorer.score
        trainer._scorer.score = lambda *a, **k: passes.append(1) or score(*a, **k)
        gradients(trainer, batch)  # measures the speed of the device, once
        passes.clear()
        card.waits.clear()
        gradients(trainer, batch)
        return len(passes), card.waits.total()

    small, large = batch_of(2, 8), batch_of(4, 40)
    (passes, one), (_, longer) = waits(small, 2**20), waits(large, 2**20)
    assert passes == 1
    (many, in_parts) = waits(large, 100)
    assert many > 4
    assert one == longer == in_parts == n, card.report()
