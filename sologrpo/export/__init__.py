"""Export: merge, compare with what was trained, push to the Hub."""

from sologrpo.export.export import save_adapter
from sologrpo.export.pushing import PushToHub

__all__ = ["PushToHub", "save_adapter"]
