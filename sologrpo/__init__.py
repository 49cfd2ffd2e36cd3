"""GRPO training on one GPU: TRL's `GRPOTrainer`, with the same gradient for less work.

from sologrpo import SoloGRPOConfig, SoloGRPOTrainer
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sologrpo.config.arguments import SoloGRPOConfig
    from sologrpo.training.trainer import SoloGRPOTrainer

__all__ = ["SoloGRPOConfig", "SoloGRPOTrainer"]

_HOMES = {"SoloGRPOConfig": "sologrpo.config", "SoloGRPOTrainer": "sologrpo.training"}


def __getattr__(name: str) -> Any:
    """Import the trainer when it is asked for: `import sologrpo` alone loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
