"""Merge parity: compare a saved model with the model that was trained.

The trained model is the adapter on the base weights of the run: four-bit ones for a four-bit run.
It answers some problems greedily. Each saved model is loaded from disk as its users will, with
transformers or llama.cpp, scores the same answers token by token, and answers the problems itself.
Only one model is in memory at a time: on the GPU, or in main memory where it does not fit there.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import bitsandbytes as bnb
import torch
from datasets import Dataset
from peft import PeftModel
from pydantic import ConfigDict, Field
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl import ModelConfig

from rewards.grading import is_correct
from sologrpo.config.evaluation import EvaluationSettings
from sologrpo.config.export import MAX_KL
from sologrpo.console import print_line
from sologrpo.data.dataset import prompt_token_ids, stop_strings
from sologrpo.device import one_device
from sologrpo.errors import InputError
from sologrpo.export.gguf import PromptTemplate
from sologrpo.export.llama import Llama, running_llama
from sologrpo.model.fitting import shortage, unquantised_bytes
from sologrpo.model.loading import (
    dtype_name,
    listed_end_ids,
    load_base_model,
    load_tokenizer,
    pick_dtype,
)
from sologrpo.model.memory import release_unused
from sologrpo.model.merging import load_adapter
from sologrpo.sampling.decoding import has_plain_cache
from sologrpo.sampling.generation import completion_of, generate_batch, greedy_config
from sologrpo.sampling.shared_cache import shared_beginning
from sologrpo.sampling.stopping import StopStrings
from sologrpo.schema import Schema
from sologrpo.scoring.statistics import Interval, compare_paired

# Of the KL between the model before and after training. A saved model that is farther than half of
# that way from the trained one has lost much of what was learned, however small the number.
MAX_SHARE_OF_TRAINING = 0.5

BATCH = 16  # completions generated together
# Problems to compare models on: the most and the fewest that the speed of the machine decides on,
# and the seconds that the answers of all models together may take.
MOST, FEWEST, SECONDS = 32, 8, 45.0
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
    ("problems, tokens", lambda gap: f"{gap.problems}, {gap.tokens}"),
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
    top_TK: torch.Tensor
    top_ids_TK: torch.Tensor
    training_kl_T: torch.Tensor


class ParityCheck:
    """Load the trained model and keep its answers to some problems; compare saved models with it.

    Without `parity_problems`, the time of the first answers decides how many problems are used, the
    fewest where merged models do not fit on the GPU.

    Args:
        settings: names the trained model: base, precision and adapter.
        problems: rows with `prompt`, `question`, `answer` and `prompt_format`.
        models: number of saved models that will be measured.
        console: to print progress on.

    Example::

        check = ParityCheck(settings, problems, 1, Terminal())
        gap = check.measure("merged", Path("out/merged"))
    """

    def __init__(
        self, settings: EvaluationSettings, problems: Dataset, models: int, console: Console
    ) -> None:
        self._settings = settings
        self._problems = problems
        self._console = console
        name = str(settings.model.model_name_or_path)
        self._tokenizer = load_tokenizer(
            name, settings.trust_remote_code, settings.chat_template_kwargs
        )
        self._stops = StopStrings(self._tokenizer, stop_strings(problems))
        release_unused()
        self._answers = self._answer_and_score(models)
        self._are_right = self._judge([answer.tokens for answer in self._answers], self._tokenizer)
        release_unused()

    def measure(self, name: str, folder: Path) -> Gap:
        """Measure the gap between a saved model and the trained one.

        Args:
            name: of the saved model, for `Gap.name`.
            folder: that it was saved in.

        Raises:
            InputError: if the model cannot be loaded, or does not read the same prompts.
        """
        print_line(self._console, f"compare   {name}")
        gap = self._compare(name, folder)
        release_unused()
        return gap

    def measure_gguf(self, name: str, file: Path) -> tuple[Gap, PromptTemplate]:
        """Measure the gap between a GGUF file and the trained model, with llama.cpp.

        Args:
            name: of the saved model, for `Gap.name`.
            file: of the model.

        Returns:
            The gap, and the text of the prompt that llama.cpp reads as the tokens of the training.

        Raises:
            InputError: if llama.cpp fails, or reads no text as these tokens.
        """
        print_line(self._console, f"compare   {name}")
        tokenizer, limit = self._tokenizer, self._settings.max_completion_length
        context = limit + max(len(answer.prompt) for answer in self._answers)
        rows, distances = [], []
        with running_llama(file, context) as llama:
            template = PromptTemplate.of(self._problems[0], tokenizer, bool(llama.tokenize("")))
            for question, answer in zip(self._problems["question"], self._answers, strict=False):
                if llama.tokenize(template.text(question)) != answer.prompt:
                    raise InputError(
                        f"{file}: llama.cpp does not read the prompt as the tokens of the "
                        "training, so it would not answer as trained: leave --gguf out"
                    )
                distances.append(_distances_in_llama(llama, answer))
                tokens = llama.complete(answer.prompt, limit)
                # Cut at a stop string, but at no end token: llama.cpp must know them itself.
                end = completion_of(tokens, tokenizer, set(), self._stops).token_count
                rows.append(tokens[:end])
        return self._gap(name, distances, rows, tokenizer), template

    def _answer_and_score(self, models: int) -> list[_Answer]:
        """Load the trained model, let it answer, and score its answers."""
        settings = self._settings
        assert settings.adapter is not None
        prompts = prompt_token_ids(self._problems["prompt"], self._tokenizer)
        lack = shortage(unquantised_bytes(settings.model, settings.trust_remote_code))
        base = load_base_model(settings.model, settings.trust_remote_code)
        model = load_adapter(base, settings.adapter).eval()
        # The saved model's own generation config must agree with this: no penalty, every end token.
        config = greedy_config(base, self._tokenizer, settings.max_completion_length)

        def answer(prompts: list[list[int]]) -> list[_Answer]:
            return _score(model, prompts, self._complete(model, self._tokenizer, prompts, config))

        start = time.perf_counter()
        first = answer(prompts[:FEWEST])
        seconds = (time.perf_counter() - start) / len(first)
        by_speed = FEWEST if lack else max(FEWEST, int(SECONDS / seconds / (1 + models)))
        count = min(settings.export.parity_problems or by_speed, len(prompts))
        pace = f"about {count * seconds:.0f} s for each model"
        if lack:
            pace = f"slowly, merged models in main memory: {lack}"
        print_line(self._console, f"compare   on {count} training problems, {pace}")
        return first[:count] + answer(prompts[len(first) : count])

    def _compare(self, name: str, folder: Path) -> Gap:
        """Load a saved model as its users will, and compare it on the trained model's answers."""
        settings, answers = self._settings, self._answers
        trust = settings.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
        tokenizer.chat_template_kwargs = self._settings.chat_template_kwargs
        prompts = prompt_token_ids(self._problems["prompt"][: len(answers)], tokenizer)
        if prompts != [answer.prompt for answer in answers]:
            raise InputError(
                f"{folder}: its tokenizer or chat template is not the trained model's: export again"
            )
        model = _load_saved(folder, pick_dtype(settings.model.dtype), trust)
        scored = _each_log_probs(model, [(answer.prompt, answer.tokens) for answer in answers])
        distances = [_distances(*pair) for pair in zip(scored, answers, strict=True)]
        config = _own_config(model, tokenizer, settings.max_completion_length)
        rows = self._complete(model, tokenizer, prompts, config)
        return self._gap(name, distances, rows, tokenizer)

    def _complete(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: list[list[int]],
        config: GenerationConfig,
    ) -> list[list[int]]:
        """Answer the problems; return the tokens of each answer."""
        rows: list[list[int]] = []
        for start in range(0, len(prompts), BATCH):
            batch = prompts[start : start + BATCH]
            rows += generate_batch(model, tokenizer, batch, config, self._stops)
        ends = set(config.eos_token_id)
        return [row[: completion_of(row, tokenizer, ends, self._stops).token_count] for row in rows]

    def _judge(self, rows: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> list[bool]:
        """Check which of the answers, without padding, are right."""
        return [
            is_correct(
                completion_of(row, tokenizer, set(), self._stops).text,
                problem["answer"],
                problem["prompt_format"],
            )
            for row, problem in zip(rows, self._problems, strict=False)
        ]

    def _gap(
        self,
        name: str,
        distances: list[torch.Tensor],
        rows: list[list[int]],
        tokenizer: PreTrainedTokenizerBase,
    ) -> Gap:
        """Summarise (2, T) distances at the tokens of each answer, and a model's own answers."""
        kl_T, same_top_T = torch.cat(distances, dim=1)
        paired = compare_paired(self._are_right, self._judge(rows, tokenizer))
        pairs = zip(rows, self._answers, strict=True)
        return Gap(
            name=name,
            problems=len(rows),
            tokens=len(kl_T),
            kl=kl_T.mean().item(),
            training_kl=torch.cat([a.training_kl_T for a in self._answers]).mean().item(),
            top1_agreement=same_top_T.mean().item(),
            greedy_agreement=fmean(tokens == answer.tokens for tokens, answer in pairs),
            accuracy=paired.accuracy,
            delta=paired.delta,
            delta_ci95=paired.delta_ci95,
        )


def _load_saved(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    size = unquantised_bytes(ModelConfig(str(folder), dtype=dtype_name(dtype)), trust_remote_code)
    device = one_device() if shortage(size) is None else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map={"": device}, trust_remote_code=trust_remote_code
    ).eval()
    # Four-bit layers compute in the dtype of the run, not in that of their config: this compares
    # weights, and does not take an hour on a CPU that emulates bf16.
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.compute_dtype = dtype
    return model


def _own_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, limit: int
) -> GenerationConfig:
    """Take a saved model's generation config, greedy: a penalty or a missing end token shows."""
    config = copy.deepcopy(model.generation_config)
    config.eos_token_id = listed_end_ids(config)
    config.pad_token_id = tokenizer.pad_token_id
    config.max_new_tokens, config.do_sample = limit, False
    return config


def _score(model: PeftModel, prompts: list[list[int]], answers: list[list[int]]) -> list[_Answer]:
    """Score greedy answers with the adapter, and without it for what training changed."""
    rows = list(zip(prompts, answers, strict=True))
    tops = []
    for log_probs_TV in _each_log_probs(model, rows):
        top = log_probs_TV.topk(min(TOP_K, log_probs_TV.size(-1)))
        tops.append((top.values, top.indices))
    with model.disable_adapter():
        before = [
            log_probs_TV.gather(1, ids_TK)
            for log_probs_TV, (_, ids_TK) in zip(_each_log_probs(model, rows), tops, strict=True)
        ]
    return [
        _Answer(
            prompt=prompt,
            tokens=tokens,
            top_TK=top_TK.cpu(),
            top_ids_TK=ids_TK.int().cpu(),
            training_kl_T=coarse_kl(top_TK, before_TK).double().cpu(),
        )
        for (prompt, tokens), (top_TK, ids_TK), before_TK in zip(rows, tops, before, strict=True)
    ]


def _distances(log_probs_TV: torch.Tensor, answer: _Answer) -> torch.Tensor:
    """Measure KL and top-1 agreement at each token of an answer, 2 x T."""
    ids_TK = answer.top_ids_TK.long().to(log_probs_TV.device)
    kl_T = coarse_kl(answer.top_TK.to(log_probs_TV), log_probs_TV.gather(1, ids_TK))
    same_top_T = log_probs_TV.argmax(-1) == ids_TK[:, 0]
    return torch.stack([kl_T, same_top_T.to(kl_T)]).double().cpu()


def _distances_in_llama(llama: Llama, answer: _Answer) -> torch.Tensor:
    """Let llama.cpp score an answer of the trained model; return what `_distances` returns."""
    q_TK, same_top_T = torch.empty_like(answer.top_TK), torch.empty(len(answer.tokens))
    for t, ids in enumerate(answer.top_ids_TK.tolist()):
        listed = llama.likeliest(answer.prompt + answer.tokens[:t], TOP_K)
        # A token that llama.cpp does not list is at most as likely as the last one that it does.
        q_TK[t] = torch.tensor([listed.get(token, min(listed.values())) for token in ids])
        same_top_T[t] = next(iter(listed)) == ids[0]
    return torch.stack([coarse_kl(answer.top_TK, q_TK), same_top_T]).double()


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
def _each_log_probs(
    model: PreTrainedModel | PeftModel, rows: Sequence[tuple[list[int], list[int]]]
) -> Iterator[torch.Tensor]:
    """Compute log-probabilities of all tokens at each position of each answer, T x V in fp32.

    What all prompts begin with is computed once.

    Args:
        model: to score with.
        rows: token ids of prompts and answers.
    """
    config = model.config.get_text_config()
    cache = DynamicCache(config=config) if has_plain_cache(config) else None
    shared_T = 0 if cache is None else shared_beginning([prompt for prompt, _ in rows])
    if shared_T:
        beginning = torch.tensor([rows[0][0][:shared_T]], device=model.device)
        model(input_ids=beginning, past_key_values=cache, use_cache=True, logits_to_keep=1)
    for prompt, answer in rows:
        ids = torch.tensor([prompt[shared_T:] + answer], device=model.device)
        logits_BTV = model(
            input_ids=ids,
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=len(answer) + 1,
        ).logits
        if cache is not None:
            cache.crop(-ids.size(1))
        log_probs_TV: torch.Tensor = logits_BTV[0, :-1].float().log_softmax(-1)
        yield log_probs_TV
