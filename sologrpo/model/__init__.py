"""The model: loading, NF4, dtype, memory, and merging an adapter."""

from sologrpo.model.loading import load_base_model, load_tokenizer, pick_dtype
from sologrpo.model.memory import TokenBudget
from sologrpo.model.merging import check_adapter, merge_adapter, save_merged

__all__ = [
    "TokenBudget",
    "check_adapter",
    "load_base_model",
    "load_tokenizer",
    "merge_adapter",
    "pick_dtype",
    "save_merged",
]
