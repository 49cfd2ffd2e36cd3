"""Merge parity: compare a saved model with the model that was trained.

The trained model is the adapter on the base weights of the run: four-bit ones for a four-bit run.
It answers some problems greedily. Each saved model is loaded from disk with plain transformers,
scores the same answers token by token, and answers the problems itself. Only one model is in memory
at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import bitsandbytes as bnb
import torch
from datasets import Dataset
from peft import PeftModel
from pydantic import ConfigDict, Field
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rewards.grading import is_correct
from sologrpo.config.evaluation import EvaluationSettings
from sologrpo.config.export import MAX_KL
from sologrpo.data.dataset import prompt_token_ids, stop_strings
from sologrpo.device import one_device
from sologrpo.errors import InputError
from sologrpo.model.loading import end_token_ids, load_base_model, load_tokenizer, pick_dtype
from sologrpo.model.memory import release_unused
from sologrpo.model.merging import load_adapter
from sologrpo.sampling.generation import completion_of, greedy_config
from sologrpo.sampling.stopping import StopStrings
from sologrpo.schema import Schema
from sologrpo.scoring.statistics import Interval, compare_paired

# Of the KL between the model before and after training. A saved model that is farther than half of
# that way from the trained one has lost much of what was learned, however small the number.
MAX_SHARE_OF_TRAINING = 0.5

BATCH = 16  # completions generated together
# The likeliest tokens whose probabilities are compared one by one; all others are one bin. Storing
# every probability would take 512 KB per token at 128,000 entries.
TOP_K = 256
_LEAST_REST = 1e-7  # of probability in that bin: below it is rounding of fp32 sums


class Gap(Schema):
    """Distance of a saved model from the trained one, on the trained model's greedy answers.

    Attributes:
        name: which saved model.
        problems: number of answers.
        tokens: number of tokens in them.
        kl: KL(trained || saved), mean over tokens, in nats. Tokens beyond the `TOP_K` likeliest
            count as one, so it is never above the exact value.
        training_kl: KL(trained || before training), the same way: what training changed.
        top1_agreement: share of tokens for which both models find the same token likeliest.
        greedy_agreement: share of problems that both models answer with the same tokens.
        accuracy: share of correct answers of the saved model.
        delta: `accuracy` minus that of the trained one, with its paired 95 % interval `delta_ci95`.
    """

    model_config = ConfigDict(allow_inf_nan=True)  # weights that overflowed give NaN

    name: str
    problems: int
    tokens: int
    kl: float
    training_kl: float
    top1_agreement: float
    greedy_agreement: float
    accuracy: float
    delta: float
    delta_ci95: Interval = Field(strict=False)  # JSON has lists alone


def parity_failure(gap: Gap, max_kl: float = MAX_KL) -> str | None:
    """Describe the bound that a saved model exceeds; None if it is within both.

    Args:
        gap: as measured.
        max_kl: largest KL from the trained model, nats per token.
    """
    if not gap.kl <= max_kl:  # also for NaN, which weights that overflowed give
        return f"its KL from the trained model is {gap.kl:.2g} nats per token, over {max_kl:g}"
    if gap.kl > MAX_SHARE_OF_TRAINING * gap.training_kl:
        return (
            f"its KL from the trained model, {gap.kl:.2g} nats per token, is more than "
            f"{MAX_SHARE_OF_TRAINING:.0%} of what training changed ({gap.training_kl:.2g})"
        )
    return None


_ROWS: tuple[tuple[str, Callable[[Gap], str]], ...] = (
    ("KL from the trained model, nats per token", lambda gap: f"{gap.kl:.2g}"),
    ("  what training changed, same measure", lambda gap: f"{gap.training_kl:.2g}"),
    ("same likeliest token", lambda gap: f"{gap.top1_agreement:.1%}"),
    ("same greedy answer", lambda gap: f"{gap.greedy_agreement:.1%}"),
    ("accuracy", lambda gap: f"{gap.accuracy:.1%}"),
    (
        "  minus the trained model's, 95 % interval",
        lambda gap: f"{gap.delta:+.1%} ({gap.delta_ci95[0]:+.1%} to {gap.delta_ci95[1]:+.1%})",
    ),
)


def gap_table(gaps: Sequence[Gap]) -> list[list[str]]:
    """Lay out gaps as a table: a header row, then one row per measure, one column per model.

    Args:
        gaps: of the merge that was kept, and then of all others.
    """
    kept, *others = gaps
    header = ["saved as", f"{kept.name} (kept)", *(gap.name for gap in others)]
    return [header, *([title, *(cell(gap) for gap in gaps)] for title, cell in _ROWS)]


@dataclass(frozen=True)
class _Answer:
    """A greedy answer of the trained model, with its likeliest tokens at each of the T positions.

    `training_kl_T` is the KL from the trained model to the one before training.
    """

    prompt: list[int]
    tokens: list[int]
    is_correct: bool
    top_TK: torch.Tensor
    top_ids_TK: torch.Tensor
    training_kl_T: torch.Tensor


class ParityCheck:
    """Load the trained model and keep its answers to some problems; compare saved models with it.

    Args:
        settings: names the trained model: base, precision and adapter.
        problems: rows with `prompt`, `answer` and `prompt_format`.

    Example::

        check = ParityCheck(settings, problems)
        gap = check.measure("merged", Path("out/merged"))
    """

    def __init__(self, settings: EvaluationSettings, problems: Dataset) -> None:
        self._settings = settings
        self._problems = problems
        release_unused()
        self._answers = self._answer_and_score()
        release_unused()

    def measure(self, name: str, folder: Path) -> Gap:
        """Measure the gap between a saved model and the trained one.

        Args:
            name: of the saved model, for `Gap.name`.
            folder: that it was saved in.

        Raises:
            InputError: if the model cannot be loaded, or does not read the same prompts.
        """
        gap = self._compare(name, folder)
        release_unused()
        return gap

    def _answer_and_score(self) -> list[_Answer]:
        """Load the trained model, let it answer, and score its answers."""
        settings = self._settings
        assert settings.adapter is not None
        name = str(settings.model.model_name_or_path)
        tokenizer = load_tokenizer(name, settings.trust_remote_code)
        base = load_base_model(settings.model, settings.trust_remote_code)
        model = load_adapter(base, settings.adapter).eval()
        prompts = prompt_token_ids(self._problems["prompt"], tokenizer)
        # The saved model's own generation config must agree with this: no penalty, every end token.
        config = greedy_config(base, tokenizer, settings.max_completion_length)
        answers = self._answer(model, tokenizer, prompts, generation_config=config)
        return [
            _score(model, prompt, *answer) for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def _compare(self, name: str, folder: Path) -> Gap:
        """Load a saved model as its users will, and compare it on the trained model's answers."""
        settings, trained = self._settings, self._answers
        trust = settings.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
        prompts = prompt_token_ids(self._problems["prompt"], tokenizer)
        if prompts != [answer.prompt for answer in trained]:
            raise InputError(
                f"{folder}: its tokenizer or chat template is not the trained model's: export again"
            )
        model = _load_saved(folder, pick_dtype(settings.model.dtype), trust)
        kl_T, same_top_T = torch.cat([_distances(model, answer) for answer in trained], dim=1)
        limit = settings.max_completion_length
        answers = self._answer(model, tokenizer, prompts, max_new_tokens=limit, do_sample=False)
        pairs = zip(answers, trained, strict=True)
        paired = compare_paired([a.is_correct for a in trained], [right for _, right in answers])
        return Gap(
            name=name,
            problems=len(prompts),
            tokens=len(kl_T),
            kl=kl_T.mean().item(),
            training_kl=torch.cat([answer.training_kl_T for answer in trained]).mean().item(),
            top1_agreement=same_top_T.mean().item(),
            greedy_agreement=fmean(tokens == answer.tokens for (tokens, _), answer in pairs),
            accuracy=paired.accuracy,
            delta=paired.delta,
            delta_ci95=paired.delta_ci95,
        )

    @torch.no_grad()
    def _answer(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[list[int]],
        **options: Any,
    ) -> list[tuple[list[int], bool]]:
        """Answer the problems with plain `generate`; return the tokens, and if they are right."""
        stops = StopStrings(tokenizer, stop_strings(self._problems))
        rows: list[list[int]] = []
        for start in range(0, len(prompts), BATCH):
            batch = tokenizer.pad(
                {"input_ids": prompts[start : start + BATCH]},
                padding_side="left",
                return_tensors="pt",
            ).to(model.device)
            prompt_T = batch["input_ids"].size(1)
            criteria = stops.criteria(prompt_T)
            output = model.generate(**batch, stopping_criteria=criteria, **options)
            rows += output[:, prompt_T:].tolist()
        ends = end_token_ids(model, tokenizer)
        answers = []
        for row, problem in zip(rows, self._problems, strict=True):
            found = completion_of(row, tokenizer, ends, stops)
            right = is_correct(found.text, problem["answer"], problem["prompt_format"])
            answers.append((row[: found.token_count], right))
        return answers


def _load_saved(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map={"": one_device()}, trust_remote_code=trust_remote_code
    ).eval()
    # Four-bit layers compute in the dtype of the run, not in that of their config: this compares
    # weights, and does not take an hour on a CPU that emulates bf16.
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.compute_dtype = dtype
    return model


def _score(model: PeftModel, prompt: list[int], tokens: list[int], is_correct: bool) -> _Answer:
    """Score a greedy answer with the adapter, and without it for what training changed."""
    log_probs_TV = _log_probs(model, prompt, tokens)
    top = log_probs_TV.topk(min(TOP_K, log_probs_TV.size(-1)))
    with model.disable_adapter():
        before_TV = _log_probs(model, prompt, tokens)
    return _Answer(
        prompt=prompt,
        tokens=tokens,
        is_correct=is_correct,
        top_TK=top.values.cpu(),
        top_ids_TK=top.indices.int().cpu(),
        training_kl_T=coarse_kl(top.values, before_TV.gather(1, top.indices)).double().cpu(),
    )


def _distances(model: PreTrainedModel, answer: _Answer) -> torch.Tensor:
    """Measure KL and top-1 agreement at each token of an answer, 2 x T."""
    log_probs_TV = _log_probs(model, answer.prompt, answer.tokens)
    ids_TK = answer.top_ids_TK.long().to(log_probs_TV.device)
    kl_T = coarse_kl(answer.top_TK.to(log_probs_TV), log_probs_TV.gather(1, ids_TK))
    same_top_T = log_probs_TV.argmax(-1) == ids_TK[:, 0]
    return torch.stack([kl_T, same_top_T.to(kl_T)]).double().cpu()


def coarse_kl(p_TK: torch.Tensor, q_TK: torch.Tensor) -> torch.Tensor:
    """Compute KL(p || q) at each position from K log-probabilities and one bin for the rest.

    Args:
        p_TK: log-probabilities of the K likeliest tokens of p, in nats.
        q_TK: log-probabilities of the same tokens under q.

    Returns:
        T values, in nats.

    >>> p = torch.tensor([[0.5, 0.25]]).log()
    >>> coarse_kl(p, p).item()
    0.0
    """
    p, q = (torch.cat([x, _log_rest(x)], dim=-1) for x in (p_TK, q_TK))
    return (p.exp() * (p - q)).sum(-1).clamp_min(0.0)


def _log_rest(log_probs_TK: torch.Tensor) -> torch.Tensor:
    rest = 1.0 - log_probs_TK.exp().sum(-1, keepdim=True)
    return rest.clamp_min(_LEAST_REST).log()


@torch.no_grad()
def _log_probs(
    model: PreTrainedModel | PeftModel, prompt: list[int], answer: list[int]
) -> torch.Tensor:
    """Log-probabilities of all tokens at each position of the answer, T x V in fp32."""
    ids = torch.tensor([prompt + answer], device=model.device)
    logits_BTV = model(input_ids=ids, logits_to_keep=len(answer) + 1, use_cache=False).logits
    log_probs: torch.Tensor = logits_BTV[0, :-1].float().log_softmax(-1)
    return log_probs
