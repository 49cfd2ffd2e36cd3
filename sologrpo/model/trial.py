"""Try a faster computation against the model's own forward pass, on a few tokens, before using it.

No flag of a model class tells what its layers do: the convolutions of LFM2 run across the rows of
a packed sequence, DiffLlama attends twice in a layer, AFMoE drops the positions of packed rows.

Shapes: T tokens of a row, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from sologrpo.base.errors import first_line
from sologrpo.model.loading import keep_nf4_trainable
from sologrpo.model.memory import is_out_of_memory
from sologrpo.model.merging import working_dtype

Model: TypeAlias = PreTrainedModel | PeftModel

# Differences of log-probs that rounding explains, in nats: the mean over the vocabulary, at the
# worst token. SmolLM2-135M packed: 1e-5 in fp32, 0.02 in fp16, 0.17 in bf16. LFM2 and AFMoE with
# random weights: 0.95 and 1.3 in fp32.
ROUNDING, ROUNDING_IN_HALF = 1e-3, 0.3


def trial_rows(model: Model, lengths: tuple[int, ...] = (12, 9), same: int = 5) -> list[list[int]]:
    """Build rows of these lengths, which begin with the same tokens and then differ."""
    vocabulary = model.config.get_text_config().vocab_size
    return [
        [(3 + 7 * (t if t < same else t + 41 * row)) % vocabulary for t in range(length)]
        for row, length in enumerate(lengths)
    ]


def log_probs_alone(model: Model, row: list[int]) -> torch.Tensor:
    """Compute the (T, V) log-probs after each token of a row, as transformers does by itself."""
    ids = torch.tensor([row], device=model.device)
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    logits_TV: torch.Tensor = output.logits[0]
    return logits_TV.float().log_softmax(dim=-1)


def problem_of(model: Model, gaps: Callable[[], Iterator[torch.Tensor]]) -> str | None:
    """Run a trial without dropout, and return what is wrong with what was tried, None if nothing.

    `gaps` yields (..., V) or (...) differences from the model's own log-probs.
    """
    kind, autocasts = model.device.type, []
    devices = [model.device] if kind == "cuda" else []
    # accelerate switches mixed precision on within the model's forward pass only.
    hook = model.base_model.register_forward_pre_hook(
        lambda *_: autocasts.append(torch.is_autocast_enabled(kind))
    )
    try:
        with eval_mode(model), torch.no_grad(), torch.random.fork_rng(devices):
            worst = [gap.abs().mean(dim=-1).amax() for gap in gaps()]
        gap = float(torch.stack(worst).amax())
    except Exception as error:  # a compiler's or a layer's, of any type
        if is_out_of_memory(error):
            raise
        return first_line(error)
    finally:
        hook.remove()
    is_half = working_dtype(model).itemsize < 4 or any(autocasts)
    bound = ROUNDING_IN_HALF if is_half else ROUNDING
    return None if gap <= bound else f"log-probs are {gap:.2g} nats off the model's own"


@contextmanager
def eval_mode(model: Model) -> Iterator[None]:
    """Switch dropout off inside the context; NF4 weights stay as they are trained."""
    keep_nf4_trainable(model)
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
