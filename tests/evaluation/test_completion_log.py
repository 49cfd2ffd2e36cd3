"""The log that `--resume` reads."""

from pathlib import Path
from typing import Any

import pytest

from sologrpo.errors import InputError
from sologrpo.evaluation.completion_log import CompletionLog, check_same_settings
from sologrpo.sampling.generation import Completion

BATCHES = [
    {(1, 0): Completion("a\nb", 3, "length"), (0, 0): Completion("c", 1, "end_token")},
    {(0, 1): Completion("\ud83d", 2, "length")},
]


def open_log(path: Path, resume: bool = False, **settings: Any) -> CompletionLog:
    return CompletionLog(path, {"seed": 0, "limit": 4} | settings, resume)


def write_log(path: Path) -> CompletionLog:
    log = open_log(path)
    for batch in BATCHES:
        log.append(batch, 1.5)
    return log


def test_a_log_is_read_back(tmp_path: Path) -> None:
    written = write_log(tmp_path / "log")
    assert written.completions == BATCHES[0] | BATCHES[1]
    again = open_log(tmp_path / "log", resume=True)
    halved = {(0, 1): Completion("?", 2, "length")}  # half of a surrogate pair
    assert (again.completions, again.seconds) == (BATCHES[0] | halved, 3.0)
    assert again.describe_speed() == {"seconds": 3.0, "tokens_per_second": 2.0}
    again.delete()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", [1, 2, 10, 30, 49])
def test_an_incomplete_batch_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "log"
    write_log(path)
    complete = path.read_bytes()
    assert cut < len(complete.splitlines(keepends=True)[-1])
    path.write_bytes(complete[:-cut])
    again = open_log(path, resume=True)
    assert list(again.completions) == [(1, 0), (0, 0)]
    again.append(BATCHES[1], 1.5)
    assert path.read_bytes() == complete  # the incomplete line is gone


def test_a_log_starts_again_without_resume_or_settings(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    assert open_log(tmp_path / "log").completions == {}
    assert open_log(tmp_path / "log", resume=True).completions == {}
    (tmp_path / "log").write_text('{"settings": {"se', encoding="utf-8")
    assert open_log(tmp_path / "log", resume=True).completions == {}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 is not valid JSON"),
        ("\0\0", "line 2 is not valid JSON"),
        ("[]", "line 2: .*expected key: value pairs"),
        ('{"seconds": 1}', "line 2: done: missing"),
        ('{"seconds": "long", "done": []}', "line 2: seconds: 'long'"),
        ('{"seconds": 1, "done": [[0, 0, "a"]]}', "line 2: done.0.3: missing"),
        ('{"seconds": 1, "done": [[0, 0, "a", true, "length"]]}', "line 2: done.0.3: True"),
        ('{"seconds": 1, "done": [[0, 0, "a", 3, "tired"]]}', "line 2: done.0.4: 'tired'"),
    ],
)
def test_a_damaged_batch_is_refused(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "log"
    write_log(path)
    first, *others = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([first, line, *others, ""]), encoding="utf-8")
    with pytest.raises(InputError, match=f"{says}.*: delete it, or leave out --resume"):
        open_log(path, resume=True)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    before = (tmp_path / "log").read_bytes()
    with pytest.raises(InputError, match=r"limit 4, not 8.*leave out --resume") as caught:
        open_log(tmp_path / "log", resume=True, limit=8)
    assert "seed" not in str(caught.value)
    assert (tmp_path / "log").read_bytes() == before
    with pytest.raises(InputError, match=r"top_p None, not 1\.0"):
        check_same_settings({}, {"top_p": 1.0})
