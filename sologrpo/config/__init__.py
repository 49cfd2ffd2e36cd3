"""Parse settings: flat YAML and command lines, into dataclasses."""

from sologrpo.config.arguments import RunArguments, SoloGRPOConfig
from sologrpo.config.chat import parse_chat
from sologrpo.config.evaluation import EvaluationSettings, parse_evaluation
from sologrpo.config.parsing import parse_config

__all__ = [
    "EvaluationSettings",
    "RunArguments",
    "SoloGRPOConfig",
    "parse_chat",
    "parse_config",
    "parse_evaluation",
]
