"""The records of an evaluation that may end early."""

import json
from pathlib import Path

import pytest

from sologrpo.base.errors import InputError
from sologrpo.scoring.records import (
    Evaluated,
    Problem,
    Record,
    RecordLog,
    judge_answer,
    make_record,
)

SETTINGS = {"seed": 0, "limit": 4}


def record(index: int, text: str) -> Record:
    problem = Problem(
        index=index, question_hash="5678", question="5 + 7?", gold="#### 12", prompt_format="xml",
        prompt="5 + 7?", kind=None,
    )  # fmt: skip
    answer = judge_answer(text, 3, "length", "#### 12", "xml")
    return make_record(problem, answer, [answer])


BATCHES = [[record(1, "a\nb"), record(2, "ü")], [record(0, "12")]]


def write_log(folder: Path) -> RecordLog:
    log = RecordLog(folder, SETTINGS, resume=False)
    for batch in BATCHES:
        log.append(batch, 1.5)
    return log


def test_records_cut_within_a_character(tmp_path: Path) -> None:
    write_log(tmp_path)
    path = tmp_path / "records.jsonl"
    path.write_bytes(path.read_bytes().partition("ü".encode()[1:])[0])
    assert RecordLog(tmp_path, SETTINGS, resume=True).records == BATCHES[0][:1]


def test_finished_records_are_in_order_and_can_be_continued(tmp_path: Path) -> None:
    log = write_log(tmp_path)
    assert not (tmp_path / "results.json").exists()
    records = sorted(log.records, key=lambda record: record.index)
    log.finish(Evaluated(records, {"settings": SETTINGS, "seconds": 3.0}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records.jsonl", "results.json"]
    lines = (tmp_path / "records.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1, 2]


@pytest.mark.parametrize(
    ("line", "says"),
    [("{", "line 1 is not valid JSON"), ('{"index": 1}', "line 1: question_hash: missing")],
)
def test_a_damaged_record_is_refused(tmp_path: Path, line: str, says: str) -> None:
    write_log(tmp_path)
    path = tmp_path / "records.jsonl"
    path.write_text(f"{line}\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(InputError, match=f"{says}.*: delete it, or leave out --resume"):
        RecordLog(tmp_path, SETTINGS, resume=True)
    (tmp_path / "unfinished.json").write_text('{"settings": 3}', encoding="utf-8")
    with pytest.raises(InputError, match=r"settings: 3; .*: delete it, or leave out --resume"):
        RecordLog(tmp_path, SETTINGS, resume=True)
