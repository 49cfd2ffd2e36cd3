"""Merge parity: compare a saved model with the model that was trained.

The trained model, the adapter on the base weights of the run, answers eight problems greedily.
Each saved model is loaded from disk as its users will, and scores the same answers token by token.
Only one model is in memory at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import bitsandbytes as bnb
import torch
from datasets import Dataset
from peft import PeftModel
from pydantic import ConfigDict
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import ModelConfig

from sologrpo.base.console import print_line
from sologrpo.base.device import one_device
from sologrpo.base.errors import InputError
from sologrpo.base.schema import Schema
from sologrpo.config.evaluation import EvaluationSettings
from sologrpo.config.export import MAX_KL
from sologrpo.data.dataset import prompt_token_ids, stop_strings
from sologrpo.export.gguf import PromptTemplate
from sologrpo.export.llama import Llama, running_llama
from sologrpo.model.fitting import shortage, unquantised_bytes
from sologrpo.model.loading import dtype_name, load_base_model, load_tokenizer, pick_dtype
from sologrpo.model.memory import release_unused
from sologrpo.model.merging import load_adapter
from sologrpo.sampling.generation import completion_of, generate_batch, greedy_config
from sologrpo.sampling.stopping import StopStrings

PROBLEMS = 8
# Of the KL between the model before and after training. A saved model that is farther than half of
# that way from the trained one has lost much of what was learned, however small the number.
MAX_SHARE_OF_TRAINING = 0.5
# The likeliest tokens whose probabilities are compared one by one; all others are one bin. Storing
# every probability would take 512 KB per token at 128,000 entries.
TOP_K = 256
_LEAST_REST = 1e-7  # of probability in that bin: below it is rounding of fp32 sums


class Gap(Schema):
    """Distance of a saved model from the trained one, on the trained model's greedy answers.

    Attributes:
        kl: KL(trained || saved), mean over tokens, in nats. Tokens beyond the `TOP_K` likeliest
            count as one, so it is never above the exact value.
        training_kl: KL(trained || before training), the same way: what training changed.
    """

    model_config = ConfigDict(allow_inf_nan=True)  # weights that overflowed give NaN

    name: str
    kl: float
    training_kl: float


def describe(gap: Gap) -> str:
    """Write a gap in one line."""
    return (
        f"{gap.name}: KL from the trained model {gap.kl:.2g} nats per token; "
        f"training changed {gap.training_kl:.2g}"
    )


def parity_failure(gap: Gap, max_kl: float = MAX_KL) -> str | None:
    """Describe the bound that a saved model exceeds; None if it is within both."""
    if not gap.kl <= max_kl:  # also for NaN, which weights that overflowed give
        return f"its KL from the trained model is {gap.kl:.2g} nats per token, over {max_kl:g}"
    if not gap.kl <= MAX_SHARE_OF_TRAINING * gap.training_kl:
        return (
            f"its KL from the trained model, {gap.kl:.2g} nats per token, is more than "
            f"{MAX_SHARE_OF_TRAINING:.0%} of what training changed ({gap.training_kl:.2g})"
        )
    return None


@dataclass(frozen=True)
class _Answer:
    """A greedy answer of the trained model, with its likeliest tokens at each of the T positions.

    `training_kl_T` is the KL from the trained model to the one before training.
    """

    prompt: list[int]
    tokens: list[int]
    top_TK: torch.Tensor
    top_ids_TK: torch.Tensor
    training_kl_T: torch.Tensor


class ParityCheck:
    """Load the trained model and keep its answers to problems; compare saved models with it."""

    def __init__(self, settings: EvaluationSettings, problems: Dataset, console: Console) -> None:
        self._settings = settings
        self._problems = problems
        self._console = console
        self._tokenizer = load_tokenizer(
            str(settings.model.model_name_or_path),
            settings.trust_remote_code,
            settings.chat_template_kwargs,
        )
        release_unused()
        self._answers = self._answer()
        release_unused()

    def measure(self, name: str, folder: Path) -> Gap:
        """Measure the gap between the trained model and a saved one that reads the same prompts."""
        trust, dtype = self._settings.trust_remote_code, pick_dtype(self._settings.model.dtype)
        size = unquantised_bytes(ModelConfig(str(folder), dtype=dtype_name(dtype)), trust)
        lack = shortage(size)
        slowly = f", slowly in main memory: {lack}" if lack else ""
        print_line(self._console, f"compare   {name}{slowly}")
        self._check_prompts(folder)
        model = _load_saved(folder, dtype, trust, "cpu" if lack else one_device())
        gap = self._gap(name, [_kl(model, answer) for answer in self._answers])
        del model
        release_unused()
        return gap

    def measure_gguf(self, name: str, file: Path) -> tuple[Gap, PromptTemplate]:
        """Measure the gap between a GGUF file and the trained model, with llama.cpp.

        Return also the text of the prompt that llama.cpp reads as the tokens of the training.
        """
        print_line(self._console, f"compare   {name}")
        longest = max(len(answer.prompt) for answer in self._answers)
        with running_llama(file, longest + self._settings.max_completion_length) as llama:
            adds_opening = bool(llama.tokenize(""))
            template = PromptTemplate.of(self._problems[0], self._tokenizer, adds_opening)
            for question, answer in zip(self._problems["question"], self._answers, strict=True):
                if llama.tokenize(template.text(question)) != answer.prompt:
                    raise InputError(
                        f"{file}: llama.cpp does not read the prompt as the tokens of the "
                        "training, so it would not answer as trained: leave --gguf out"
                    )
            gap = self._gap(name, [_kl_in_llama(llama, answer) for answer in self._answers])
        return gap, template

    def _answer(self) -> list[_Answer]:
        settings, tokenizer = self._settings, self._tokenizer
        assert settings.adapter is not None
        prompts = prompt_token_ids(self._problems["prompt"], tokenizer)
        base = load_base_model(settings.model, settings.trust_remote_code)
        model = load_adapter(base, settings.adapter).eval()
        config = greedy_config(base, tokenizer, settings.max_completion_length)
        stops = StopStrings(tokenizer, stop_strings(self._problems))
        ends = set(config.eos_token_id)
        rows = generate_batch(model, tokenizer, prompts, config, stops)
        lengths = [completion_of(row, tokenizer, ends, stops).token_count for row in rows]
        answers = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        return [_score(model, *pair) for pair in zip(prompts, answers, strict=True)]

    def _check_prompts(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=self._settings.trust_remote_code
        )
        tokenizer.chat_template_kwargs = self._settings.chat_template_kwargs
        prompts = prompt_token_ids(self._problems["prompt"], tokenizer)
        if prompts != [answer.prompt for answer in self._answers]:
            raise InputError(
                f"{folder}: its tokenizer or chat template is not the trained model's: export again"
            )

    def _gap(self, name: str, kls: Sequence[torch.Tensor]) -> Gap:
        return Gap(
            name=name,
            kl=torch.cat([*kls]).mean().item(),
            training_kl=torch.cat([a.training_kl_T for a in self._answers]).mean().item(),
        )


def _load_saved(
    folder: Path, dtype: torch.dtype, trust_remote_code: bool, device: int | str
) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map={"": device}, trust_remote_code=trust_remote_code
    ).eval()
    # Four-bit layers compute in the dtype of the run, not in that of their config: this compares
    # weights, and does not take an hour on a CPU that emulates bf16.
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.compute_dtype = dtype
    return model


def _score(model: PeftModel, prompt: list[int], tokens: list[int]) -> _Answer:
    """Score a greedy answer with the adapter, and without it for what training changed."""
    log_probs_TV = _log_probs(model, prompt, tokens)
    top_TK, ids_TK = log_probs_TV.topk(min(TOP_K, log_probs_TV.size(-1)))
    with model.disable_adapter():
        before_TK = _log_probs(model, prompt, tokens).gather(1, ids_TK)
    training_kl_T = coarse_kl(top_TK, before_TK).double().cpu()
    return _Answer(prompt, tokens, top_TK.cpu(), ids_TK.cpu(), training_kl_T)


def _kl(model: PreTrainedModel, answer: _Answer) -> torch.Tensor:
    """Compute the KL from the trained model at each of the T tokens of its answer."""
    log_probs_TV = _log_probs(model, answer.prompt, answer.tokens)
    q_TK = log_probs_TV.gather(1, answer.top_ids_TK.to(log_probs_TV.device))
    return coarse_kl(answer.top_TK.to(q_TK), q_TK).double().cpu()


def _kl_in_llama(llama: Llama, answer: _Answer) -> torch.Tensor:
    q_TK = torch.empty_like(answer.top_TK)
    for t, ids in enumerate(answer.top_ids_TK.tolist()):
        listed = llama.likeliest(answer.prompt + answer.tokens[:t], TOP_K)
        # A token that llama.cpp does not list is at most as likely as the last one that it does.
        least = min(listed.values())
        q_TK[t] = torch.tensor([listed.get(token, least) for token in ids])
    return coarse_kl(answer.top_TK, q_TK).double()


def coarse_kl(p_TK: torch.Tensor, q_TK: torch.Tensor) -> torch.Tensor:
    """Compute KL(p || q) at each position in nats; all tokens but the K likeliest of p are one bin.

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
    model: PreTrainedModel | PeftModel, prompt: list[int], tokens: list[int]
) -> torch.Tensor:
    """Compute log-probabilities of all tokens at each position of an answer, T x V in fp32."""
    ids = torch.tensor([prompt + tokens], device=model.device)
    logits_BTV = model(input_ids=ids, use_cache=False, logits_to_keep=len(tokens) + 1).logits
    log_probs_TV: torch.Tensor = logits_BTV[0, :-1].float().log_softmax(-1)
    return log_probs_TV
