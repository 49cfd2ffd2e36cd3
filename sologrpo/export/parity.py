"""Merge parity: is a saved model the model that was trained?

What was trained is the adapter on the base weights of the run, four-bit ones for a four-bit run.
It answers some problems greedily; then each saved model, loaded from disk with plain transformers
in a fresh process, scores the same answers token by token and writes its own. Only one model is in
memory at a time.

    python -m sologrpo.export.parity reference FOLDER            # started by `Reference`
    python -m sologrpo.export.parity candidate FOLDER MODEL NAME
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import bitsandbytes as bnb
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl import ModelConfig

from rewards.grading import is_correct
from sologrpo.config.export import MAX_KL
from sologrpo.data.dataset import prompt_token_ids
from sologrpo.device import one_device, prepare_cpu
from sologrpo.errors import InputError, one_line_errors
from sologrpo.files import write_atomically
from sologrpo.model.loading import end_token_ids, load_base_model, load_tokenizer, pick_dtype
from sologrpo.model.memory import release_unused
from sologrpo.prompts import Prompt
from sologrpo.scoring.statistics import Interval, compare_paired

# Of the KL between the model before and after training. A saved model that is farther than half of
# that way from the trained one has lost much of what was learned, however small the number.
MAX_SHARE_OF_TRAINING = 0.5

BATCH = 16  # completions generated together
# The likeliest tokens whose probabilities are compared one by one; all others are one bin. Storing
# every probability would take 512 KB a token at 128,000 entries.
TOP_K = 256
_LEAST_REST = 1e-7  # of probability in that bin: below it is rounding of fp32 sums


@dataclass(frozen=True)
class Problem:
    """One problem that the models are compared on."""

    prompt: Prompt
    gold: str
    prompt_format: str


@dataclass(frozen=True)
class Trained:
    """How to load what was trained, and how it was asked.

    Attributes:
        model: base model with the precision of the run.
        max_new_tokens: limit of an answer, in tokens.
        stop_strings: text that ends an answer, beside the end-of-text token.
    """

    model: ModelConfig
    adapter: Path
    trust_remote_code: bool
    max_new_tokens: int
    stop_strings: list[str]


@dataclass(frozen=True)
class Gap:
    """A saved model against the trained one, on the trained model's greedy answers.

    Attributes:
        name: which saved model.
        problems: how many answers.
        tokens: how many tokens they have.
        kl: KL(trained || saved), mean of the tokens, in nats. Tokens beyond the `TOP_K` likeliest
            count as one, so it is never above the exact value.
        training_kl: KL(trained || before training), the same way: what training changed.
        mean_logprob_gap: mean of |log p(saved) - log p(trained)| of the answers' tokens, in nats.
        max_logprob_gap: the largest of them.
        top1_agreement: share of tokens where both find the same token likeliest.
        greedy_agreement: share of problems that both answer with the same tokens.
        accuracy_trained, accuracy: share of right answers.
        delta: `accuracy - accuracy_trained`, with its paired 95 % interval `delta_ci95`.
    """

    name: str
    problems: int
    tokens: int
    kl: float
    training_kl: float
    mean_logprob_gap: float
    max_logprob_gap: float
    top1_agreement: float
    greedy_agreement: float
    accuracy_trained: float
    accuracy: float
    delta: float
    delta_ci95: Interval


def why_not_the_trained_model(gap: Gap, max_kl: float = MAX_KL) -> str | None:
    """The bound that a saved model breaks, in words; None if it keeps both."""
    if gap.kl > max_kl:
        return f"its KL from the trained model is {gap.kl:.2g} nats a token, over {max_kl:g}"
    if gap.kl > MAX_SHARE_OF_TRAINING * gap.training_kl:
        return (
            f"its KL from the trained model, {gap.kl:.2g} nats a token, is more than "
            f"{MAX_SHARE_OF_TRAINING:.0%} of what training changed ({gap.training_kl:.2g})"
        )
    return None


# -- the caller's side -----------------------------------------------------------------------------


class Reference:
    """The trained model's answers, made when the first gap is asked for.

    Example::

        with Reference(trained, problems) as reference:
            gap = reference.gap("merged", Path("out/merged"))
    """

    def __init__(self, trained: Trained, problems: Sequence[Problem]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sologrpo-parity-")
        self._made = False
        request = asdict(trained) | {"adapter": str(trained.adapter)}
        request["problems"] = [asdict(problem) for problem in problems]
        write_atomically(self._path("request.json"), json.dumps(request))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the answers."""
        self._folder.cleanup()

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def gap(self, name: str, model: Path) -> Gap:
        """Compare a saved model with the trained one.

        Raises:
            InputError: if one of them cannot be loaded.
        """
        if not self._made:
            _in_fresh_process("reference", self._folder.name)
            self._made = True
        _in_fresh_process("candidate", self._folder.name, str(model), name)
        return load_gap(json.loads(self._path(f"{name}.json").read_text(encoding="utf-8")))


def load_gap(fields: dict[str, Any]) -> Gap:
    """A gap as it was written to a file."""
    low, high = fields["delta_ci95"]
    return Gap(**fields | {"delta_ci95": (low, high)})


def _in_fresh_process(*arguments: str) -> None:
    release_unused()  # the GPU's memory is the other process's for now
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "sologrpo.export.parity", *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    if done.returncode == 0:
        return
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if last.startswith("error: "):
        raise InputError(last.removeprefix("error: "))
    raise RuntimeError(f"{arguments[0]} ended with {done.returncode}:\n{done.stderr}")


# -- the fresh process's side ----------------------------------------------------------------------


def _answer_and_score(folder: Path) -> None:
    """The trained model: its greedy answers, their probabilities, and what training changed."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    settings = ModelConfig(**request["model"])
    tokenizer = load_tokenizer(settings.model_name_or_path, request["trust_remote_code"])
    base = load_base_model(settings, request["trust_remote_code"])
    model = PeftModel.from_pretrained(base, request["adapter"]).eval()
    prompts = prompt_token_ids([row["prompt"] for row in request["problems"]], tokenizer)
    # The saved model's own generation config must come to the same: no penalty, every end token.
    config = {
        "eos_token_id": sorted(end_token_ids(base, tokenizer)),
        "pad_token_id": tokenizer.pad_token_id,
        "repetition_penalty": 1.0,
    }
    answers = _complete(model, tokenizer, prompts, request, config)
    rows, training_kl = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        log_probs_TV = _log_probs(model, prompt, answer)
        top = log_probs_TV.topk(min(TOP_K, log_probs_TV.size(-1)))
        with model.disable_adapter():
            before_TV = _log_probs(model, prompt, answer)
        training_kl += coarse_kl(top.values, before_TV.gather(1, top.indices)).tolist()
        rows.append(
            {
                "prompt": prompt,
                "answer": answer,
                "token_T": _of_tokens(log_probs_TV, answer).cpu(),
                "top_TK": top.values.cpu(),
                "top_ids_TK": top.indices.int().cpu(),
            }
        )
    verdicts = _judge(tokenizer, answers, request["problems"])
    reference = {"rows": rows, "verdicts": verdicts, "training_kl": fmean(training_kl)}
    torch.save(reference, folder / "reference.pt")


def _compare(folder: Path, path: str, name: str) -> None:
    """A saved model, loaded as its users will, on the trained model's answers."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    reference = torch.load(folder / "reference.pt", weights_only=True)
    trust: bool = request["trust_remote_code"]
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=pick_dtype(request["model"]["dtype"]),
        device_map={"": one_device()},
        trust_remote_code=trust,
    ).eval()
    _compute_in(model, model.dtype)
    prompts = prompt_token_ids([row["prompt"] for row in request["problems"]], tokenizer)
    rows = reference["rows"]
    if prompts != [row["prompt"] for row in rows]:
        raise InputError(f"{path}: its tokenizer or chat template is not the trained model's")
    kl, gaps, same_top = [], [], []
    for row in rows:
        log_probs_TV = _log_probs(model, row["prompt"], row["answer"])
        ids_TK = row["top_ids_TK"].long().to(log_probs_TV.device)
        kl += coarse_kl(row["top_TK"].to(log_probs_TV), log_probs_TV.gather(1, ids_TK)).tolist()
        token_T = row["token_T"].to(log_probs_TV)
        gaps += (_of_tokens(log_probs_TV, row["answer"]) - token_T).abs().tolist()
        same_top += (log_probs_TV.argmax(-1) == ids_TK[:, 0]).tolist()
    answers = _complete(model, tokenizer, prompts, request, {})
    same = [answer == row["answer"] for answer, row in zip(answers, rows, strict=True)]
    paired = compare_paired(reference["verdicts"], _judge(tokenizer, answers, request["problems"]))
    gap = Gap(
        name=name,
        problems=len(rows),
        tokens=len(gaps),
        kl=fmean(kl),
        training_kl=reference["training_kl"],
        mean_logprob_gap=fmean(gaps),
        max_logprob_gap=max(gaps),
        top1_agreement=fmean(same_top),
        greedy_agreement=fmean(same),
        accuracy_trained=paired.baseline_accuracy,
        accuracy=paired.accuracy,
        delta=paired.delta,
        delta_ci95=paired.delta_ci95,
    )
    write_atomically(folder / f"{name}.json", json.dumps(asdict(gap)))


def _compute_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Let four-bit layers compute in the dtype of the run, not in the one of their config.

    The comparison is then one of weights, and does not take an hour on a CPU that emulates bf16.
    """
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.compute_dtype = dtype


def coarse_kl(p_TK: torch.Tensor, q_TK: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of each position, from log-probabilities of K tokens and one bin for the rest.

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


def _of_tokens(log_probs_TV: torch.Tensor, answer: list[int]) -> torch.Tensor:
    ids = torch.tensor(answer, device=log_probs_TV.device)
    return log_probs_TV.gather(1, ids[:, None]).squeeze(1)


@torch.no_grad()
def _complete(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    request: dict[str, Any],
    config: dict[str, Any],
) -> list[list[int]]:
    """Greedy answers by plain `generate`, as token ids up to the end-of-text token."""
    stops = request["stop_strings"]
    stopping = {"stop_strings": stops, "tokenizer": tokenizer} if stops else {}
    answers = []
    for start in range(0, len(prompts), BATCH):
        batch = tokenizer.pad(
            {"input_ids": prompts[start : start + BATCH]}, padding_side="left", return_tensors="pt"
        ).to(model.device)
        output = model.generate(
            **batch, max_new_tokens=request["max_new_tokens"], do_sample=False, **config, **stopping
        )
        ended = output[:, batch["input_ids"].size(1) :].tolist()
        answers += [_without_padding(row, model, tokenizer) for row in ended]
    return answers


def _without_padding(
    ids: list[int], model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    ends = end_token_ids(model, tokenizer)
    end = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
    while end > 1 and ids[end - 1] == tokenizer.pad_token_id and ids[end - 1] not in ends:
        end -= 1  # a row that a stop string ended is filled up with padding
    return ids[:end]


def _judge(
    tokenizer: PreTrainedTokenizerBase, answers: list[list[int]], problems: list[dict[str, Any]]
) -> list[bool]:
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return [
        is_correct(text, problem["gold"], problem["prompt_format"])
        for text, problem in zip(texts, problems, strict=True)
    ]


@one_line_errors
def main() -> None:
    """Run one side of a comparison, as `Reference` asks."""
    prepare_cpu()
    step, folder, *rest = sys.argv[1:]
    if step == "reference":
        _answer_and_score(Path(folder))
    else:
        _compare(Path(folder), *rest)


if __name__ == "__main__":
    main()
