"""Sampling completions: the decoding loop, stop strings, engines, batches that fit memory."""

from sologrpo.sampling.decoding import Request, Sampled, can_generate_fast, generate_fast
from sologrpo.sampling.generation import Completion, generate_greedily
from sologrpo.sampling.sampler import Sampler, check_vllm
from sologrpo.sampling.stopping import StopStrings

__all__ = [
    "Completion",
    "Request",
    "Sampled",
    "Sampler",
    "StopStrings",
    "can_generate_fast",
    "check_vllm",
    "generate_fast",
    "generate_greedily",
]
