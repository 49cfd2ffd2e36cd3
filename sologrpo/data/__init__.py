"""Data sets, and the prompts built from them."""

from sologrpo.data.dataset import (
    build_prompts,
    load_rows,
    load_test_prompts,
    load_train_and_validation,
)

__all__ = ["build_prompts", "load_rows", "load_test_prompts", "load_train_and_validation"]
