"""Stop strings: text that ends a completion, row by row.

A completion ends with the first token that completes a stop string in its decoded text. Only the
completion counts: a stop string in the prompt, or one that begins in it, ends nothing.

All sampled tokens are kept, including the last one, because they are what is trained on. Where
that token contains more than the end of the stop string (`>\\n` for `</answer>`), the text that is
graded ends directly after the stop string. vLLM does the same with
`SamplingParams(stop=[...], include_stop_str_in_output=True)`.

Shapes: B rows, T tokens.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from sologrpo.base.errors import InputError

# What a decoder writes for bytes that do not, or do not yet, form a character.
GARBLED = "\N{REPLACEMENT CHARACTER}"


class StopStrings:
    """Finds where stop strings end a completion.

    What counts is the decoded text without special tokens, as rewards and judge see it.
    transformers' `StopStringCriteria` treats special tokens as text, so it misses a stop string
    with a special token inside, and stops at one that is not in the text.

    Few tokens of a vocabulary can end a given string. Only after those are the last tokens of the
    row decoded, and the complete row only if these contain a match.

    Args:
        tokenizer: of the model. Its whole vocabulary is decoded, so create this object once.
        strings: what ends a completion; may be empty.

    Raises:
        InputError: if a stop string is empty.

    Example:
        >>> stops = StopStrings(tokenizer, ["</answer>"])
        >>> stops.cut("<answer>42</answer> I hope this helps")
        '<answer>42</answer>'
        >>> stops.length(tokenizer("<answer>42</answer> I hope this helps")["input_ids"])
        8
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        if not all(strings):
            raise InputError("a stop string must not be empty: it would end every completion")
        self.strings = tuple(strings)
        self._tokenizer = tokenizer
        texts = _vocabulary_texts(tokenizer) if strings else []
        # The token that completes a stop string has its last character, or the last byte of it.
        last = {string[-1] for string in strings}
        if not all(character.isascii() for character in last):
            last.add(GARBLED)
        self._enders = {i for i, text in enumerate(texts) if not last.isdisjoint(text)}
        self._ender_ids = torch.tensor(sorted(self._enders), dtype=torch.long)
        self._visible = {i for i, text in enumerate(texts) if text}
        # Each visible token has at least one byte. One more token, because a decoder may strip
        # the space that the first token begins with.
        self._tail_T = 1 + max((len(string.encode()) for string in strings), default=0)

    def ended(self, completion_ids: torch.Tensor, newest: int = 1) -> torch.Tensor:
        """Check whether one of the newest tokens of each row completes a stop string.

        The tokens so far (B, T), T >= 1, are without the prompt; (B,) is on the same device.
        """
        T = completion_ids.size(1)
        enders = self._ender_ids.to(completion_ids.device)
        ended_B = torch.isin(completion_ids[:, -newest:], enders).any(dim=1)
        for row in ended_B.nonzero().flatten().tolist():
            ids = completion_ids[row].tolist()
            ends = range(max(T - newest, 0) + 1, T + 1)
            ended_B[row] = any(
                ids[end - 1] in self._enders and self._newest_completes(ids[:end]) for end in ends
            )
        return ended_B

    def length(self, completion_ids: Sequence[int]) -> int | None:
        """Count the tokens up to the one that completes a stop string; None if none does.

        In either case `completion_ids[: stops.length(completion_ids)]` is the completion.
        """
        ends = (i + 1 for i, token in enumerate(completion_ids) if token in self._enders)
        return next((end for end in ends if self._newest_completes(completion_ids[:end])), None)

    def cut(self, text: str) -> str:
        """Remove what follows the first complete stop string."""
        ends = [text.find(string) + len(string) for string in self.strings if string in text]
        return text[: min(ends, default=len(text))]

    def criteria(self, prompt_T: int) -> StoppingCriteriaList:
        """Build stopping criteria for `model.generate`, after prompts padded to `prompt_T`.

        It fills the rest of a row with padding: cut each row to its `length`.
        """
        return StoppingCriteriaList([_AtStopString(self, prompt_T)] if self.strings else [])

    def vllm_settings(self) -> dict[str, Any]:
        """Build the equivalent arguments of vLLM's `SamplingParams`."""
        if not self.strings:
            return {}
        return {"stop": list(self.strings), "include_stop_str_in_output": True}

    def _newest_completes(self, ids: Sequence[int]) -> bool:
        visible = (token for token in reversed(ids) if token in self._visible)
        tail = self._decode(list(islice(visible, self._tail_T))[::-1])
        # The tail may begin inside a character and be garbled: then only the complete text counts.
        return (self._found(tail) or GARBLED in tail) and self._found(self._decode(ids))

    def _found(self, text: str) -> bool:
        return any(string in text for string in self.strings)

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


class _AtStopString(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, stops: StopStrings, prompt_T: int) -> None:
        self._stops, self._prompt_T = stops, prompt_T

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return self._stops.ended(input_ids[:, self._prompt_T :])


def _vocabulary_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Decode every token, twice in a row: some decoders strip the space of a first token."""
    count = 1 + max(tokenizer.get_vocab().values())
    twice = [[token, token] for token in range(count)]
    texts: list[str] = tokenizer.batch_decode(twice, skip_special_tokens=True)
    return texts
