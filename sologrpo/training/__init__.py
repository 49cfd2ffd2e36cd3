"""Training: the trainer, its callbacks, checkpoints, and the run directory."""

from sologrpo.training.fingerprints import take_fingerprints
from sologrpo.training.run import build_trainer, train
from sologrpo.training.run_directory import open_run_directory
from sologrpo.training.trainer import SoloGRPOTrainer

__all__ = [
    "SoloGRPOTrainer",
    "build_trainer",
    "open_run_directory",
    "take_fingerprints",
    "train",
]
