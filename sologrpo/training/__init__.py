"""Training: the trainer, its callbacks, checkpoints, and the run directory."""

from sologrpo.training.callbacks import ConsoleLog, MetricsFile, ValidateAtEnd
from sologrpo.training.checkpoint import StopWithCheckpoint, train_from
from sologrpo.training.diagnosis import Diagnosis
from sologrpo.training.run_directory import open_run_directory, save_run_description
from sologrpo.training.trainer import SoloGRPOTrainer

__all__ = [
    "ConsoleLog",
    "Diagnosis",
    "MetricsFile",
    "SoloGRPOTrainer",
    "StopWithCheckpoint",
    "ValidateAtEnd",
    "open_run_directory",
    "save_run_description",
    "train_from",
]
