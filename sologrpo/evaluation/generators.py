"""Generate the completions of an evaluation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.sampling.generation import (
    Completion,
    generate_in_batches,
    greedy_config,
    sampling_config,
)


@dataclass(frozen=True)
class Generator:
    """A model with everything that decides its completions of given prompts.

    Attributes:
        max_new_tokens: limit of a completion, in tokens.
        stop_strings: text that ends a completion, besides the end tokens.
        seed: of sampling.
        temperature: of sampling.
        top_p: of sampling, from 0 to 1.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    stop_strings: Sequence[str] = ()
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0

    def complete(
        self, prompts: Sequence[Sequence[int]], greedy: bool = True
    ) -> Iterator[list[tuple[int, Completion]]]:
        """Complete prompts greedily, or by sampling.

        Args:
            prompts: token ids of each prompt.
            greedy: take the likeliest token at every step.

        Yields:
            (index of the prompt, completion) pairs, one batch at a time, in any order.
        """
        model, tokenizer, limit = self.model, self.tokenizer, self.max_new_tokens
        if greedy:
            config = greedy_config(model, tokenizer, limit)
        else:
            config = sampling_config(model, tokenizer, limit, self.temperature, self.top_p)
        return generate_in_batches(
            model, tokenizer, prompts, config, stop_strings=self.stop_strings, seed=self.seed
        )
