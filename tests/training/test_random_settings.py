"""Whatever the settings and the model, a step has the gradient of stock TRL."""

from pathlib import Path

import pytest
from random_settings import BOUND, draw, gap_to_stock


@pytest.mark.parametrize("seed", range(103, 108))
def test_the_gradient_is_that_of_stock_trl(seed: int, tmp_path: Path) -> None:
    drawn = draw(seed)
    assert gap_to_stock(drawn, tmp_path) < BOUND, drawn
