"""Plan a run: its memory and likely problems; check its rewards and the machine."""

from sologrpo.plan.plan import print_plan

__all__ = ["print_plan"]
