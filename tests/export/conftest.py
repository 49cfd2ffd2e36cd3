"""A finished four-bit run."""

import json
from pathlib import Path

import pytest
import yaml

from scripts import exit_code, load_script
from tiny import tiny_config


@pytest.fixture(scope="session")
def run(tiny_llama: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A four-bit run whose adapter is a real change, with results of an evaluation."""
    folder = tmp_path_factory.mktemp("runs") / "shells"
    config = tiny_config(tiny_llama, tiny_data, folder) | {
        "load_in_4bit": True, "dtype": "auto", "reward_weights": [0.5, 1.0], "learning_rate": 0.02,
        "max_completion_length": 12, "num_validation_examples": 4,
    }  # fmt: skip
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    assert exit_code(load_script("train"), "--config", file) == 0
    for label, adapter in (("baseline", None), ("trained", str(folder / "adapter"))):
        results = {
            "n": 6, "accuracy": 0.5, "accuracy_ci95": [0.19, 0.81], "accuracy_lenient": 0.5,
            "accuracy_lenient_ci95": [0.19, 0.81], "format_rate": 1.0, "integer_rate": 1.0,
            "trailing_text_rate": 0.0, "truncated_rate": 0.0, "no_answer_rate": 0.0, "by_kind": {},
            "completion_tokens": {}, "seconds": 2.0, "tokens_per_second": 9.0, "settings": {},
            "adapter": adapter, "split": "test", "precision": "NF4 dequantised, float32",
            "dataset": str(tiny_data),
        }  # fmt: skip
        if adapter:
            results |= {
                "baseline": "baseline", "baseline_accuracy": 0.5, "delta": 0.0,
                "delta_ci95": [-0.2, 0.2], "mcnemar_p": 1.0, "both_right": 3, "newly_right": 0,
                "newly_wrong": 0, "both_wrong": 3,
            }  # fmt: skip
        (folder / "eval" / label).mkdir(parents=True)
        (folder / "eval" / label / "results.json").write_text(json.dumps(results))
    return folder
