"""Twice as many random settings as there are architectures; part of `make soak`."""

from pathlib import Path

import pytest
from random_settings import BOUND, FAMILIES, draw, gap_to_stock

SEEDS = range(2 * len(FAMILIES))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_gradient_is_that_of_stock_trl(seed: int, tmp_path: Path) -> None:
    drawn = draw(seed)
    assert gap_to_stock(drawn, tmp_path) < BOUND, drawn
