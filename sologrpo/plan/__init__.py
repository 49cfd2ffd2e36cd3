"""Plan a run: its memory and likely problems; check its rewards and the machine."""

from sologrpo.plan.number_format import choose_number_format
from sologrpo.plan.plan import print_plan
from sologrpo.plan.preflight import try_settings

__all__ = ["choose_number_format", "print_plan", "try_settings"]
