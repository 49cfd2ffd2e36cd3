"""Hostile command lines, other ones every day; `make soak` runs many more.

A failure names the command that runs it again. `HOSTILE_SEED=20261122` repeats a day.
"""

import pytest

from running import Range, quick_numbers, seed_of_the_day, table
from server import Server, Servers

CASES = 48
TIMEOUT = 100.0  # seconds of one command line, on a machine that runs four tests at once


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Range:
    return Range(tmp_path_factory.mktemp("hostile"), Servers([server]), timeout=TIMEOUT)


@pytest.mark.timeout(900)
def test_hostile_command_lines(place: Range, capsys: pytest.CaptureFixture[str]) -> None:
    seed = seed_of_the_day()
    results = list(place.run(seed, quick_numbers(CASES)))
    with capsys.disabled():
        print(f"\nHOSTILE_SEED={seed}\n{table(results)}")
    found = [str(result) for result in results if result.faults]
    assert not found, "\n" + "\n".join(found)
