"""The seed of hostile command lines: another one every day, the same in all of a day's runs."""

import datetime
import os


def seed_of_the_day() -> int:
    """Return `HOSTILE_SEED`, or else today's date as a number."""
    return int(os.environ.get("HOSTILE_SEED") or f"{datetime.date.today():%Y%m%d}")
