"""A finished four-bit run."""

from pathlib import Path

import pytest
import yaml

from made_up_run import write_eval
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
    for label in ("baseline", "trained"):
        adapter = None if label == "baseline" else str(folder / "adapter")
        facts = {"precision": "NF4 dequantised, float32", "dataset": str(tiny_data)}
        write_eval(folder, label, [True, False] * 3, adapter=adapter, **facts)
    return folder
