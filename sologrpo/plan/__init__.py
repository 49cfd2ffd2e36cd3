"""Plan a run: its memory and likely problems; check its rewards and the machine."""

from sologrpo.plan.plan import print_plan
from sologrpo.plan.preflight import try_settings

__all__ = ["print_plan", "try_settings"]
