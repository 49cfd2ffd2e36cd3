"""Export: merge, compare with what was trained, push to the Hub."""

from sologrpo.export.export import begin_export, export_and_push, save_adapter
from sologrpo.export.pushing import PushToHub

__all__ = [
    "PushToHub",
    "begin_export",
    "export_and_push",
    "save_adapter",
]
