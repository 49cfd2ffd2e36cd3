"""Every causal architecture of transformers, each in a separate process; part of `make soak`."""

import multiprocessing
from pathlib import Path

from architectures import BOUND, names, try_everything

AT_LEAST, PACKED_AT_LEAST = 150, 80  # of transformers 5.23.0: 157 and 84


def _try(name: str, folder: str, found: "multiprocessing.Queue[object]") -> None:
    try:
        found.put(try_everything(name, folder))
    except Exception as error:
        found.put(error)


def test_every_architecture_is_right_or_left_to_others(tmp_path: Path) -> None:
    fork, wrong, packed = multiprocessing.get_context("fork"), {}, 0
    for name in names():
        queue = fork.Queue()
        process = fork.Process(target=_try, args=(name, str(tmp_path), queue))
        process.start()
        result = queue.get(timeout=120)
        process.join()
        if isinstance(result, Exception):
            wrong[name] = repr(result)
        elif result.greedy is False or (result.packed_gap or 0.0) > BOUND:
            wrong[name] = str(result)
        else:
            packed += result.packed_gap is not None
    assert not wrong
    assert len(names()) >= AT_LEAST
    assert packed >= PACKED_AT_LEAST
