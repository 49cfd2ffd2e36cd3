"""Training: the trainer, its callbacks, checkpoints, rehearsal, and the run directory."""

from sologrpo.training.fingerprints import take_fingerprints
from sologrpo.training.rehearsal import rehearse
from sologrpo.training.run import build_trainer, train
from sologrpo.training.run_directory import open_run_directory
from sologrpo.training.tracking import tolerate_tracker_failures
from sologrpo.training.trainer import SoloGRPOTrainer

__all__ = [
    "SoloGRPOTrainer",
    "build_trainer",
    "open_run_directory",
    "rehearse",
    "take_fingerprints",
    "tolerate_tracker_failures",
    "train",
]
