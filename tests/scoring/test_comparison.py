"""Evaluations that can be compared. The reading of the settings here is independent of ours."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sologrpo.scoring.comparison import compare_settings

# A few values of each setting, so that equal ones are drawn often.
VALUES: dict[str, list[Any]] = {
    "model": ["a", "b"], "model_revision": [None, "12fd"], "model_hash": [None, "07d7"],
    "adapter_hash": [None, "9f86", "d7a8"], "chat_template_hash": [None, "fbb3"],
    "precision": ["merged", "adapter"], "trained_in_4bit": [False, True],
    "dtype": ["float32", "bfloat16"], "quantisation": [None, {"load_in_4bit": True}],
    "engine": ["transformers", "vllm"], "dataset": ["quickstart", "gsm8k"],
    "split": ["test", "test_unseen"], "limit": [None, 3, 4], "seed": [0, 1],
    "problems_hash": ["5678", "1234"], "prompts_hash": ["abcd", "ef01"],
    "prompt_format": ["xml", "boxed"], "max_completion_length": [2, 16], "num_samples": [0, 4],
    "temperature": [None, 0.7], "top_p": [None, 1.0],
}  # fmt: skip
SETTINGS = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in VALUES.items()})
CHANGES = st.sets(st.sampled_from(sorted(VALUES)), max_size=2)


def is_comparable(first: dict[str, Any], second: dict[str, Any]) -> bool:
    unlike = {name for name in VALUES if first[name] != second[name]} - {"adapter_hash"}
    whole = first["limit"] is None and second["limit"] is None
    if whole and first["num_samples"] == 0 and second["num_samples"] == 0:
        unlike.discard("seed")  # nothing is drawn
    untrained = first["adapter_hash"] is None or second["adapter_hash"] is None
    if untrained and {first["precision"], second["precision"]} == {"merged", "adapter"}:
        unlike.discard("precision")  # of the base model alone, both are the unquantised weights
    return not unlike


@given(SETTINGS, SETTINGS, CHANGES)
def test_evaluations_are_comparable_if_a_plain_reading_says_so(
    first: dict[str, Any], drawn: dict[str, Any], changes: set[str]
) -> None:
    second = first | {name: drawn[name] for name in changes}
    found = compare_settings(first, second)
    assert (found == {}) == is_comparable(first, second)
    assert found.keys() == compare_settings(second, first).keys()
    assert found.keys() <= changes
    assert compare_settings(first, first) == {}
    if changes & {"precision", "adapter_hash"} == set():
        assert found == {name: (first[name], second[name]) for name in found}
    # What another version recorded in addition, or left out, is a difference as well.
    left_out = {name: value for name, value in first.items() if name != "dtype"}
    assert list(compare_settings(first, left_out)) == ["dtype"]
