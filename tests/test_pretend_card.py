"""On a pretend GPU: devices are not mixed, the host rarely waits, and little is launched per token.

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
from peft import LoraConfig, get_peft_model
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from trl import GRPOTrainer

from fixed_rollouts import config, make_trainer
from pretend_card import CUDA, Card, CardTensor, autocast_on_card, pretend_card
from sologrpo.model.loading import load_tokenizer
from sologrpo.model.merging import merged
from sologrpo.sampling import shared_cache
from sologrpo.sampling.decoding import LOOK_EVERY, Request, Sampled, generate_fast
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


# -- the card itself ------------------------------------------------------------------------------


def test_a_computation_is_that_of_the_cpu(card: Card) -> None:
    x = torch.rand(3, 4)
    on_card = card.move(x)
    assert on_card.device == CUDA
    assert on_card.is_cuda
    assert torch.equal((on_card @ on_card.T).softmax(-1).cpu(), (x @ x.T).softmax(-1))
    leaf = card.move(x).requires_grad_()
    (leaf.sin() * 2).sum().backward()
    assert isinstance(leaf.grad, CardTensor)
    torch.testing.assert_close(leaf.grad.cpu(), 2 * x.cos())


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[[2, 0]],
        lambda x: x[1:, [0, 1, 1]],
        lambda x: x[x > 5],
        lambda x: x.__setitem__(([0, 2], 1), -1.0),
        lambda x: x.__setitem__((slice(1), x[0] > 1), 9.0),
        lambda x: x[0].add_(x.new_tensor([1.0, 2.0, 3.0, 4.0])),
        lambda x: x.__setitem__(1, torch.tensor([4.0] * 4, device=x.device)),
        lambda x: x.where(x > 3, 0.5),
    ],
)
def test_values_are_those_of_the_cpu(card: Card, change: Any) -> None:
    host = torch.arange(12.0).reshape(3, 4)
    on_card = card.move(host)
    expected, found = change(host), change(on_card)
    assert on_card.tolist() == host.tolist()
    assert expected is None or found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "mix",
    [
        lambda card, host: card + host,
        lambda card, host: torch.cat([card, host]),
        lambda card, host: host[card.long()],
        lambda card, host: card.index_put_((card.long(),), host),
    ],
)
def test_mixed_devices_are_refused(card: Card, mix: Any) -> None:
    host = torch.zeros(2)
    with pytest.raises(RuntimeError, match=r"different devices: tests/test_pretend_card.py:\d+"):
        mix(card.move(host), host)
    card.move(host) + torch.tensor(1.0)  # a single number is handed over with the operation


@pytest.mark.parametrize(
    ("waits", "n"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: bool((x > 0).any()), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x[[0, 1]], 1),
        (lambda x: x.nonzero().cpu(), 2),
        (lambda x: x.add_(torch.ones(2).to(x.device)), 1),
        (lambda x: x.add_(torch.tensor([1.0, 2.0], device=x.device)), 1),
        (lambda x: x.copy_(torch.ones(2)), 1),
        (lambda x: torch.cuda.synchronize(), 1),
        (lambda x: x.add_(torch.ones(2).to(x.device, non_blocking=True)), 0),
        (lambda x: x[0].add_(1.0), 0),
        (lambda x: x.__setitem__(x > 0, 0.0), 0),
        (lambda x: torch.zeros(2, device=x.device) + x.new_ones(2), 0),
    ],
)
def test_waits_are_counted_with_their_place(card: Card, waits: Any, n: int) -> None:
    waits(card.move(torch.tensor([0.0, 1.0])))
    assert card.waits.total() == n, card.report()
    assert all(place.startswith("tests/test_pretend_card.py:") for place in card.waits)


def test_a_graph_repeats_what_was_recorded(card: Card) -> None:
    x, state = card.move(torch.ones(2)), card.move(torch.zeros(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state.add_(x)
        doubled = state.view(2, 1) * 2
    card.reset()
    x.copy_(card.move(torch.tensor([3.0, 4.0])))
    state.zero_()
    graph.replay()
    graph.replay()
    launches = dict(card.launches)
    assert doubled.flatten().tolist() == [12.0, 16.0]
    assert launches == {"aten.copy_.default": 1, "aten.zero_.default": 1, "CUDA graph": 2}
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"), card.capture(graph):
        x.sum().item()


# -- sampling -------------------------------------------------------------------------------------

ROWS = [[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 9], [5, 6, 9], [5, 6, 10, 11, 12, 13]]
NEVER = -1
STOPS: dict[str, list[str]] = {"no stop strings": [], "a stop string": ["never 1"]}
WEIGHTS = {"adapter": lambda model: nullcontext(), "merged": merged}


def request_of(
    path: Path, new_tokens: int, stops: list[str], end: int = NEVER, **settings: Any
) -> Request:
    width = max(map(len, ROWS))
    return Request(
        torch.tensor([[0] * (width - len(ids)) + ids for ids in ROWS]),
        torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in ROWS]),
        GenerationConfig(
            max_new_tokens=new_tokens,
            eos_token_id=[end],
            pad_token_id=0,
            **{"do_sample": False} | settings,
        ),
        StopStrings(load_tokenizer(str(path)), stops),
    )


def on_card(card: Card, request: Request) -> Request:
    ids, mask = card.move((request.input_ids, request.attention_mask))
    return Request(ids, mask, request.config, request.stops)


def completions(request: Request, sampled: Sampled) -> list[list[int]]:
    ids = sampled.completion_ids.cpu()
    lengths = request.mask_of(ids).sum(dim=1).tolist()
    return [row[:n] for row, n in zip(ids.tolist(), lengths, strict=True)]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_tokens_are_those_of_the_cpu(
    weights: str, card: Card, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With graphs that are recorded again as the cache grows and as rows leave."""
    monkeypatch.setattr(shared_cache, "ROOM", 24)
    model = with_adapter(tiny_llama).eval()
    tokenizer = load_tokenizer(str(tiny_llama))
    asked = request_of(tiny_llama, 60, ["7"], tokenizer.eos_token_id)
    with WEIGHTS[weights](model):
        expected = generate_fast(model, asked, with_log_probs=True)
    card.move(model)
    with WEIGHTS[weights](model):
        sampled = generate_fast(model, on_card(card, asked), with_log_probs=True)
    found = completions(asked, sampled)
    assert found == completions(asked, expected)
    assert len({len(ids) for ids in found}) > 2
    assert len(card.graphs) > 2
    for row, ids in enumerate(found):
        its = sampled.log_probs[row].cpu()[: len(ids)]  # type: ignore[index]
        torch.testing.assert_close(its, expected.log_probs[row, : len(ids)], rtol=0, atol=1e-5)  # type: ignore[index]


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
            card.reset()
            sampled = generate_fast(model, on_card(card, asked), with_log_probs=True)
        assert sampled.completion_ids.shape == (len(ROWS), new_tokens)
        return card.waits.total()

    waits(4)  # the first call of all checks the model
    fixed = waits(LOOK_EVERY)
    assert waits(1 + 7 * LOOK_EVERY) <= fixed + 7, card.report()
    assert fixed <= 20, card.report()


def llama_with_adapter(layers: int) -> Any:
    """An adapter in fp32 on weights in bf16, as they are trained."""
    llama = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        pad_token_id=0, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    lora = LoraConfig(
        r=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    return get_peft_model(LlamaForCausalLM(llama).to(torch.bfloat16), lora).eval()


# What the host launched for a token before the loop was made for GPUs, counted in the same way.
BEFORE = {"merged": 2060, "adapter": 3404}


@pytest.mark.parametrize("weights", BEFORE)
def test_operations_per_token_of_32_layers(weights: str, card: Card, tiny_llama: Path) -> None:
    def per_token(layers: int) -> tuple[float, int]:
        """Count what the host launches, and what a graph holds."""
        model = card.move(llama_with_adapter(layers))
        counts = []
        for new_tokens in (8, 24):
            asked = request_of(
                tiny_llama, new_tokens, [], do_sample=True, top_p=0.9, temperature=0.7
            )
            with WEIGHTS[weights](model), autocast_on_card():
                card.reset()
                generate_fast(model, on_card(card, asked))
            counts.append(card.launches.total())
        (graph,) = card.graphs
        return (counts[1] - counts[0]) / 16, graph.launches.total()

    (few, graph_2), (many, graph_6) = per_token(2), per_token(6)
    in_graph = graph_2 + 30 * (graph_6 - graph_2) / 4
    print(f"{weights}: {few:.0f} launched per token; {in_graph:.0f} in a graph of 32 layers")
    assert few == many  # a replay, whatever the number of layers
    assert few <= 30
    assert in_graph <= 1.05 * BEFORE[weights]


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


class Training:
    """A trainer whose model can be moved to the card."""

    def __init__(self, trainer_class: type, path: Path, output: Path, **settings: Any) -> None:
        settings = {"num_iterations": 2, "beta": 0.05} | settings
        self.trainer = make_trainer(
            trainer_class, path, config(output, **settings), lambda completions, **_: 0.0
        )
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.model.train()

    def move(self, card: Card) -> None:
        card.move(self.trainer.model)
        if scorer := getattr(self.trainer, "_scorer", None):
            del scorer._shares_prompts  # found on the CPU

    def gradients(self, batch: Batch) -> list[torch.Tensor]:
        """The gradient of an optimizer step, clipped."""
        model = self.trainer.model
        parameters = [p for p in model.parameters() if p.requires_grad]
        for p in parameters:
            p.grad = None
        self.trainer.compute_loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        return [p.grad for p in parameters]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo", "vespo"])
@pytest.mark.parametrize("trainer_class", [SoloGRPOTrainer, GRPOTrainer])
def test_the_gradient_is_that_of_the_cpu(
    trainer_class: type, loss_type: str, card: Card, tiny_llama: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(token_tree, "flex_attention_forward", flex_stand_in)
    training = Training(trainer_class, tiny_llama, tmp_path, loss_type=loss_type)
    batch = batch_of(3, 12)
    expected = training.gradients(batch)
    training.move(card)
    found = training.gradients(card.move(batch))
    for one, other in zip(expected, found, strict=True):
        assert isinstance(other, CardTensor)
        assert (one - other.cpu()).norm() <= 1e-5 * one.norm()


def no_compiler(*args: Any) -> tuple[torch.Tensor, None]:
    raise NotImplementedError("no Triton for this card\nat all")


def wrong_attention(module: Any, query: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, None]:
    return -20 * query.transpose(1, 2), None


def not_a_number(module: Any, query: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, None]:
    return torch.nan * query.transpose(1, 2), None


def one_size_only() -> Any:
    """Build attention that compiles once, but not for all sizes."""
    sizes = set()

    def attend(module: Any, query: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, None]:
        sizes.add(query.size(2))
        if len(sizes) > 1:
            raise RuntimeError("no kernel for any size")
        return flex_stand_in(module, query, *rest)

    return attend


@pytest.mark.parametrize(
    ("flex", "problem"),
    [
        (no_compiler, "no Triton for this card"),
        (wrong_attention, "nats off the model's own"),
        (not_a_number, "nan nats off"),
        (one_size_only(), "no kernel for any size"),
    ],
)
def test_where_attention_along_a_tree_fails_no_prompt_is_shared(
    flex: Any, problem: str, card: Card, tiny_llama: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(token_tree, "flex_attention_forward", flex)
    training = Training(SoloGRPOTrainer, tiny_llama, tmp_path)
    batch = batch_of(3, 12)
    expected = training.gradients(batch)
    training = Training(SoloGRPOTrainer, tiny_llama, tmp_path)
    training.move(card)
    for one, other in zip(expected, training.gradients(card.move(batch)), strict=True):
        assert (one - other.cpu()).norm() <= 1e-5 * one.norm()
    (line,) = [r.getMessage() for r in caplog.records if "prompts are not" in r.getMessage()]
    assert line.startswith("prompts are not shared in training: ")
    assert problem in line
    assert "\n" not in line


@pytest.mark.parametrize(("beta", "n"), [(0.05, 3), (0.0, 4)])
def test_the_host_waits_as_often_in_every_optimizer_step(
    beta: float, n: int, card: Card, tiny_llama: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(token_tree, "flex_attention_forward", flex_stand_in)

    def waits(batch: Batch, budget: int) -> tuple[int, int]:
        """Count the passes of a step, and the waits."""
        settings = {"train_token_budget": budget, "beta": beta}
        training = Training(SoloGRPOTrainer, tiny_llama, tmp_path, **settings)
        training.move(card)
        batch, passes = card.move(batch), []
        score = training.trainer._scorer.score
        training.trainer._scorer.score = lambda *a, **k: passes.append(1) or score(*a, **k)
        training.gradients(batch)  # measures the speed of the device, once
        passes.clear()
        card.reset()
        training.gradients(batch)
        return len(passes), card.waits.total()

    small, large = batch_of(2, 8), batch_of(4, 40)
    (passes, one), (_, longer) = waits(small, 2**20), waits(large, 2**20)
    assert passes == 1
    (many, in_parts) = waits(large, 100)
    assert many > 4
    assert one == longer == in_parts == n, card.report()
