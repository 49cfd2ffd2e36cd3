"""The plan of a run: memory, warnings, the rewards tried, the machine checked."""

from sologrpo.plan.plan import print_plan

__all__ = ["print_plan"]
