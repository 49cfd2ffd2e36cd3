"""A sequence that has each token once gives what the rows give one by one."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, PreTrainedModel

from fixed_rollouts import MIXED, config, relative_gap, trained_on
from sologrpo.training import token_tree
from sologrpo.training.packing import SMALLEST_BUDGET, Batch, Rows, Tokens
from sologrpo.training.token_tree import TokenTree
from sologrpo.training.trainer import SoloGRPOTrainer

tokens = st.integers(3, 99)


def batch_of(prompts: list[list[int]], completions: list[list[int]]) -> Batch:
    """Lay out rows as TRL does: prompts padded on the left, completions on the right, with 0."""

    def padded(rows: list[list[int]], side: str) -> torch.Tensor:
        return pad_sequence(list(map(torch.tensor, rows)), batch_first=True, padding_side=side)

    prompt_ids, completion_ids = padded(prompts, "left"), padded(completions, "right").long()
    masks = {"prompt_mask": (prompt_ids > 0).long(), "completion_mask": (completion_ids > 0).long()}
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, **masks}


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Prompts with and without a common beginning, which may begin one another; any lengths."""
    root = draw(st.lists(tokens, max_size=20))
    stems = draw(st.lists(st.lists(tokens, max_size=8), min_size=1, max_size=4))
    prompts = draw(
        st.lists(st.sampled_from([root + stem or [3] for stem in stems]), min_size=1, max_size=9)
    )
    lengths = st.lists(tokens, min_size=1, max_size=30)
    return batch_of(prompts, [draw(lengths) for _ in prompts])


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_qwen", "tiny_tied"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    path: Path = request.getfixturevalue(request.param)
    return AutoModelForCausalLM.from_pretrained(path)


def log_probs_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    picked = logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return picked.masked_fill(labels == -100, 0.0)


def row_by_row(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    rows = torch.zeros(batch["completion_ids"].shape)
    for i in range(len(rows)):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()]
        completion = batch["completion_ids"][i][batch["completion_mask"][i].bool()]
        logits = model(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits[0]
        rows[i, : len(completion)] = log_probs_of(logits[len(prompt) - 1 : -1], completion)
    return rows


def at_once(model: PreTrainedModel, batch: Batch, share_prompts: bool = True) -> torch.Tensor:
    tree = TokenTree.of(Tokens.of(batch), share_prompts)
    output = model(
        input_ids=tree.input_ids, position_ids=tree.position_ids, use_cache=False, **tree.attention
    )
    return tree.rows(log_probs_of(output.logits[:, tree.places], tree.next_ids))


def gradients(model: PreTrainedModel, log_probs: torch.Tensor) -> torch.Tensor:
    weights = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(1))
    parameters = list(model.parameters())
    found = torch.autograd.grad((log_probs * weights).sum(), parameters, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in found])


@pytest.mark.parametrize("share_prompts", [True, False])
@settings(deadline=None, max_examples=40)
@given(batch=batches())
def test_log_probs_and_gradients_are_those_of_the_rows(
    share_prompts: bool, batch: Batch, model: PreTrainedModel
) -> None:
    expected, got = row_by_row(model, batch), at_once(model, batch, share_prompts)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    of_rows, of_tree = gradients(model, expected), gradients(model, got)
    assert (of_tree - of_rows).norm() <= 1e-5 * of_rows.norm()


@pytest.mark.parametrize("share_prompts", [True, False])
@settings(deadline=None)
@given(batch=batches())
def test_each_token_comes_once(share_prompts: bool, batch: Batch) -> None:
    ids = Tokens.of(batch)
    tree, rows = TokenTree.of(ids, share_prompts), Rows.of(ids, share_prompts)
    every = list(range(len(batch["prompt_ids"])))
    assert tree.input_ids.size(1) == rows.tokens(every)
    assert tree.next_ids.size(1) == len(tree.places) == int(batch["completion_mask"].sum())
    if share_prompts:
        beginnings = {tuple(p[: i + 1]) for p in rows.prompts for i in range(len(p) - 1)}
        assert rows.tokens(every) >= len(beginnings) + sum(rows.completion_T)


class Shapes(TorchDispatchMode):
    """Collects the last two sizes of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self.made |= {tuple(x.shape[-2:]) for x in tree_iter(made) if isinstance(x, torch.Tensor)}
        return made


@pytest.mark.parametrize("share_prompts", [True, False])
def test_a_tree_needs_no_mask_of_all_places(model: PreTrainedModel, share_prompts: bool) -> None:
    prompts = [[5, 6, 7 + i % 3, 8] for i in range(9)]
    batch = batch_of(prompts, [[10 + i] * (3 + i) for i in range(9)])
    N = TokenTree.of(Tokens.of(batch), share_prompts).input_ids.size(1)
    with Shapes() as shapes:
        gradients(model, at_once(model, batch, share_prompts))
    # Rows that share nothing are packed as transformers does it, with a mask.
    assert ((N, N) in shapes.made) is not share_prompts


@torch.no_grad()
@settings(deadline=None, max_examples=10)
@given(batch=batches())
def test_flex_attention_along_the_tree_is_the_same(batch: Batch) -> None:
    """The way of GPUs; on a CPU it has no backward pass."""
    tree = TokenTree.of(Tokens.of(batch), share_prompts=True)
    N = tree.input_ids.size(1)
    q, k, v = (torch.randn(1, heads, N, 16) for heads in (4, 2, 2))
    ours = token_tree._in_parts(q, k, v, tree, 0.25)
    flex = flex_attention(q, k, v, block_mask=tree.block_mask, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(ours, flex, atol=1e-5, rtol=1e-5)


@settings(deadline=None)
@given(batches(), st.integers(1, 200), st.booleans())
def test_packing_keeps_every_row_once_and_the_budget(
    batch: Batch, budget: int, share_prompts: bool
) -> None:
    rows = Rows.of(Tokens.of(batch), share_prompts)
    packed = list(rows.packed(range(len(rows.prompts)), budget))
    assert sorted(row for group in packed for row in group) == list(range(len(rows.prompts)))
    for group in packed:
        assert len(group) == 1 or rows.tokens(group) <= budget
    for group, following in pairwise(packed):  # none ends early
        assert rows.tokens([*group, following[0]]) > budget
    assert packed == list(rows.packed(range(len(rows.prompts))[::-1], budget))


def test_rows_of_a_prompt_stay_together() -> None:
    rows = Rows(["a", "b", "a", "b"], [10] * 4, [5] * 4)
    assert list(rows.packed(range(4), 19)) == [[0, 2], [1, 3]]
    assert list(rows.packed(range(4), 38)) == [[0, 2, 1, 3]]


def test_passes_are_large_where_that_saves_work() -> None:
    def best(prompt_T: int, root_T: int, most: int = 2**20, pass_tokens: int = 0) -> int:
        prompts = [row // 8 for row in range(64)]
        rows = Rows(prompts, [prompt_T] * 64, [60] * 64, root_T)
        return rows.best_budget(range(64), most, pass_tokens)

    assert best(30, 0) == SMALLEST_BUDGET  # nothing is shared but with neighbours
    assert best(1000, 950) >= 950 + 8 * 50 + 64 * 60  # one pass
    assert best(1000, 950, most=3000) == 3000
    assert best(1000, 950, most=10) == 10  # rows are passed through one by one
    assert best(30, 0, pass_tokens=2000) > SMALLEST_BUDGET


def no_kernel(*args: Any) -> torch.Tensor:
    raise NotImplementedError("no kernel for this card\nat all")


def wrong_attention(tree: Any, module: Any, query: torch.Tensor, *rest: Any) -> torch.Tensor:
    return -20 * query.transpose(1, 2)


@pytest.mark.parametrize(
    ("attend", "problem"),
    [(no_kernel, "no kernel for this card"), (wrong_attention, "nats off the model's own")],
)
def test_where_attention_along_a_tree_fails_no_prompt_is_shared(
    attend: Any, problem: str, tiny_llama: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    (expected,), _ = trained_on(SoloGRPOTrainer, tiny_llama, config(tmp_path), MIXED)
    monkeypatch.setattr(TokenTree, "attend", attend)
    (found,), _ = trained_on(SoloGRPOTrainer, tiny_llama, config(tmp_path), MIXED)
    assert relative_gap(expected, found) < 1e-5
    (line,) = [r.getMessage() for r in caplog.records if "prompts are not" in r.getMessage()]
    assert line.startswith("prompts are not shared in training: ")
    assert problem in line
    assert "\n" not in line
