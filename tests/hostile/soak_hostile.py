"""Many hostile command lines, and many kills: `make soak`."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kills import Killer
from running import Range, seed_of_the_day, table
from server import Servers

CASES = 1500
KILLS = {"train": 30, "evaluate": 12, "export": 8}
WORKERS = 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Range]:
    scratch = tmp_path_factory.mktemp("hostile")
    place = Range(scratch, Servers.start(scratch, WORKERS), timeout=60.0)
    yield place
    place.servers.close()


@pytest.mark.timeout(7200)
def test_hostile_command_lines_of_all_kinds(
    place: Range, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = seed_of_the_day()
    unfit = [str(result) for result in place.run_controls() if result.faults or result.ended.code]
    assert not unfit, "\n".join(unfit)
    results = list(place.run(seed, range(CASES)))
    with capsys.disabled():
        print(f"\nHOSTILE_SEED={seed}\n{table(results)}")
    found = [str(result) for result in results if result.faults]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.timeout(7200)
def test_kills_at_random_moments(
    place: Range, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = seed_of_the_day()
    killer = Killer(place.original, tmp_path, place.servers)
    killed = [one for command, kills in KILLS.items() for one in killer.kill(seed, command, kills)]
    counts: Counter[str] = Counter()
    for one in killed:
        counts[one.work] += len(one.moments)
    with capsys.disabled():
        print(f"\nHOSTILE_SEED={seed}, {counts.total()} kills: {dict(counts)}")
    assert [one for one in killed if one.difference] == []
    assert counts.total() == sum(KILLS.values())
