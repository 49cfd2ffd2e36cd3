"""TRL's trainer as a script of a few lines uses it: the part `user` of cpu.py times it.

    python benchmarks/stock_trl.py models/SmolLM2-135M-Instruct runs/stock 3

Everything is TRL's default, except the quickstart's prompts, completions and adapter, a batch of
4 x 8 completions, and a learning rate of 0, so that all steps are alike.
"""

import json
import sys
from pathlib import Path
from typing import Any

from _by_position import all_groups
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `sologrpo`, for the quickstart's prompts

from sologrpo.config import parse_config  # noqa: E402
from sologrpo.data import load_train_and_validation  # noqa: E402
from sologrpo.model import load_tokenizer  # noqa: E402


class Log(TrainerCallback):  # type: ignore[misc]
    """Write what TRL logs of each step to `metrics.jsonl`, as `train.py` does."""

    def on_log(self, args: GRPOConfig, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Write a line."""
        with (Path(args.output_dir) / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(logs) + "\n")


def main(model: str, output_dir: str, steps: str) -> None:
    """Train some steps."""
    config = ["--config", str(ROOT / "configs/quickstart.yaml"), "--model_name_or_path", model]
    run, _, _ = parse_config([*config, "--dataset_name", str(ROOT / "quickstart")])
    dataset, _ = load_train_and_validation(run, load_tokenizer(model), 0)
    Path(output_dir).mkdir(exist_ok=True)
    GRPOTrainer(
        model,
        all_groups,
        GRPOConfig(
            output_dir,
            gradient_accumulation_steps=4,
            num_generations=8,
            max_completion_length=48,
            learning_rate=0.0,
            max_steps=int(steps),
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,  # TRL asks for it where there is no GPU
            report_to="none",
        ),
        train_dataset=dataset,
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[Log()],
    ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
