"""Sampling completions: engines, our loop, stop strings."""

from sologrpo.sampling.engines import Request, Sampler
from sologrpo.sampling.generation import Completion, generate_greedily
from sologrpo.sampling.loop import Sampled
from sologrpo.sampling.stopping import StopStrings

__all__ = ["Completion", "Request", "Sampled", "Sampler", "StopStrings", "generate_greedily"]
