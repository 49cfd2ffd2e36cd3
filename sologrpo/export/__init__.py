"""Export: merge, compare with what was trained, push to the Hub."""

from sologrpo.export.export import begin_export, export_and_push, save_adapter
from sologrpo.export.model_card import write_card
from sologrpo.export.pushing import PushToHub, run_repository

__all__ = [
    "PushToHub",
    "begin_export",
    "export_and_push",
    "run_repository",
    "save_adapter",
    "write_card",
]
