"""Memory: a pass that does not fit is repeated in halves, and its memory is released first."""

import logging
import weakref

import pytest
import torch

from sologrpo.model import memory
from sologrpo.model.memory import TokenBudget, is_out_of_memory


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Error out of memory at line 380 in file /src/csrc/ops.cu"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("shape mismatch"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_that_mean_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def run_out_of_memory(held: list[weakref.ref[torch.Tensor]]) -> None:
    computed = torch.zeros(8)
    held.append(weakref.ref(computed))
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_the_budget_is_halved_until_the_pass_fits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    still_held: list[bool] = []
    monkeypatch.setattr(memory, "release_unused", lambda: still_held.append(held[-1]() is not None))
    budget, passes = TokenBudget(4096, "training"), []
    with caplog.at_level(logging.WARNING, "sologrpo.model.memory"):
        while not passes:
            with budget.halved_if_out_of_memory(largest=min(budget.tokens, 3000), rows=2):
                if budget.tokens > 1000:
                    run_out_of_memory(held)
                passes.append(budget.tokens)
    assert passes == [750]
    assert still_held == [False, False]
    assert [record.getMessage() for record in caplog.records] == [
        "out of memory in training with 3000 tokens in one pass: continuing with 1500",
        "out of memory in training with 1500 tokens in one pass: continuing with 750",
    ]


@pytest.mark.parametrize(
    ("error", "rows"),
    [(torch.OutOfMemoryError(), 1), (ValueError("wrong"), 2), (KeyboardInterrupt(), 2)],
)
def test_errors_that_smaller_passes_cannot_fix_are_passed_on(
    error: BaseException, rows: int
) -> None:
    budget = TokenBudget(4096, "training")
    with pytest.raises(type(error)), budget.halved_if_out_of_memory(3000, rows):
        raise error
    assert budget.tokens == 4096
