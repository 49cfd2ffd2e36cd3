"""Make up run directories: one with every file of the layout, one that attacks the page."""

import json
import random
from pathlib import Path
from typing import Any

import pandas as pd

from sologrpo.base.schema import parse
from sologrpo.scoring.records import Record, hash_text
from sologrpo.scoring.summary import summarise

ATTACK = "</pre></details><script>document.title='owned'</script><img src=x onerror=alert(1)>"
STEPS = 40
PROBLEMS = 60


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def metric_row(step: int, rng: random.Random) -> dict[str, Any]:
    """Make a logged step of a run that learns the format first and the answers slowly."""
    form = min(1.0, 0.2 + step / 15) + rng.gauss(0, 0.04)
    answer = 0.5 + step / STEPS + rng.gauss(0, 0.15)
    return {
        "step": step,
        "reward": form + answer,
        "reward_std": 0.6 - step / 100,
        "rewards/strict_format/mean": form,
        "rewards/answer_correctness/mean": answer,
        "frac_reward_zero_std": min(1.0, max(0.0, 0.1 + step / 60 + rng.gauss(0, 0.05))),
        "completions/mean_length": 220 - step + rng.gauss(0, 8),
        "completions/clipped_ratio": max(0.0, 0.25 - step / 100),
        "entropy": 0.9 / (1 + step / 20),
        "kl": step / 4000 if step > 3 else None,
        "loss": rng.gauss(0, 0.02),
        "grad_norm": abs(rng.gauss(0.4, 0.1)),
        "learning_rate": 1e-5 * (1 - step / STEPS),
        "step_time": 31 + rng.gauss(0, 2),
        "time/sampling": 19 + rng.gauss(0, 1),
        "time/forward and backward": 11 + rng.gauss(0, 1),
        "time/rewards": 0.3,
        "progress": step / STEPS,
    }


def metric_rows() -> list[dict[str, Any]]:
    rng = random.Random(0)
    rows = []
    for step in range(1, STEPS + 1):
        rows.append(metric_row(step, rng))
        if step % 10 == 0:
            accuracy = 0.31 + step / 200
            validation = {"eval_accuracy": accuracy, "eval_format_rate": 0.9, "eval_n": 200}
            rows.append({"step": step, **validation})
    return rows


def write_completions(folder: Path, step: int) -> None:
    """Write a log as TRL does: chat lists for prompt and completion, a column per reward.

    Two groups of eight. The first is told apart by its rewards, the second has no signal.
    """
    folder.mkdir(exist_ok=True)
    system = {"role": "system", "content": "Answer."}
    questions = [{"role": "user", "content": f"What is {step} + {i // 8}?"} for i in range(16)]
    texts = [f"<thinking>\n{step} + {i}\n</thinking>\n" for i in range(16)]
    table = {
        "step": [step] * 16,
        "prompt": [[system, question] for question in questions],
        "completion": [[{"role": "assistant", "content": text}] for text in texts],
        "strict_format": [float(i % 2) for i in range(8)] + [1.0] * 8,
        "answer_correctness": [None, *[float(i % 3 == 0) for i in range(1, 8)], *[0.0] * 8],
        "answer_correctness/reason": [
            f"{i} is the gold answer" if i in (3, 6) else f"{i} is not the gold answer {step}"
            for i in range(16)
        ],
        "read_as": ["five"] * 16,  # log_extra adds such columns
        "advantage": [(-1.0) ** i if i < 8 else 0.004 for i in range(16)],
    }
    pd.DataFrame(table).to_parquet(folder / f"completions_{step:05d}.parquet")


def grow(run_dir: Path, steps: range) -> None:
    """Log steps of a run that trains."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text("rewards: [strict_format, answer_correctness]\n")
    for step in steps:
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metric_row(step, random.Random(step))) + "\n")
        write_completions(run_dir / "completions", step)


def eval_record(index: int, correct: bool, completion: str) -> dict[str, Any]:
    question = f"Mina has {index} boxes of 6 pens and gives away 2 pens. How many are left?"
    return {
        "index": index,
        "question_hash": hash_text(question),
        "question": question,
        "gold": f"#### {6 * index - 2}",
        "prompt_format": "xml",
        "prompt": question,
        "kind": "share" if index % 2 else "add",
        "completion": completion,
        "completion_tokens": 60 + index,
        "stop_reason": "length" if index % 11 == 0 else "end_token",
        "truncated": index % 11 == 0,
        "extracted": str(6 * index - 2) if correct else None,
        "correct": correct,
        "lenient_correct": correct or index % 5 == 0,
        "format_ok": correct,
        "trailing_text": False,
        "integer_answer": correct,
        "samples": [],
    }


SETTINGS = {
    "model": "HuggingFaceTB/SmolLM2-135M", "model_revision": "12fd25f", "model_hash": None,
    "precision": "merged", "dtype": "bfloat16", "quantisation": None, "engine": "transformers",
    "dataset": "quickstart", "split": "test", "limit": None, "seed": 0, "problems_hash": "d7a8",
    "prompts_hash": "fbb3", "prompt_format": "xml", "max_completion_length": 48,
    "num_samples": 0, "temperature": None, "top_p": None, "chat_template_hash": "07d7",
}  # fmt: skip


def write_eval(run_dir: Path, label: str, right: list[bool], **extra: Any) -> None:
    rows = [eval_record(i, ok, f"<answer>\n{i}\n</answer>") for i, ok in enumerate(right)]
    results = {
        **summarise([parse(Record, row, "row") for row in rows]),
        "seconds": 5.0,
        "tokens_per_second": 123.4,
        "label": label,
        "model": "HuggingFaceTB/SmolLM2-135M",
        "adapter": None if label.startswith("baseline") else "adapter",
        "precision": "bf16",
        "prompt_format": "xml",
        "split": "test",
        "max_completion_length": 48,
        **extra,
        "settings": SETTINGS
        | {"adapter_hash": None if label.startswith("baseline") else "9f86"}
        | extra.get("settings", {}),
    }
    folder = run_dir / "eval" / label
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    write_lines(folder / "records.jsonl", rows)


def write_run(root: Path) -> Path:
    """Write a finished run."""
    root.mkdir(parents=True)
    config = "model_name_or_path: HuggingFaceTB/SmolLM2-135M\nlearning_rate: 1.0e-05\n"
    config += "hub_token: hf_secret\nlora_target_modules: [q_proj, v_proj]\n"
    config += "rewards: [strict_format, answer_correctness]\n"
    (root / "config.yaml").write_text(config)
    environment = {"python": "3.11.2", "packages": {"trl": "1.16.0"}, "device": "cpu"}
    (root / "environment.json").write_text(json.dumps(environment))
    write_lines(root / "metrics.jsonl", metric_rows())
    warned = {"topic": "signal", "text": "no group had a signal for 5 steps; all are wrong"}
    write_lines(root / "warnings.jsonl", [{"step": 9, **warned}, {"step": 36, **warned}])
    for step in range(1, STEPS + 1, 3):
        write_completions(root / "completions", step)
    before = [i % 3 == 0 for i in range(PROBLEMS)]
    after = [(i % 3 == 0 and i % 9 != 0) or i % 2 == 0 for i in range(PROBLEMS)]
    write_eval(root, "baseline", before)
    write_eval(root, "trained", after)
    return root


def attack_everywhere(run_dir: Path) -> None:
    """Hostile text in every field that a model, a data set or a user can fill."""
    rows = [
        {"step": s, "reward": s, f"rewards/{ATTACK}/mean": s, "rewards/$x_/mean": 1} for s in (1, 2)
    ]
    write_lines(run_dir / "metrics.jsonl", [*rows, {"step": 2, f"time/{ATTACK}": 1.0}])
    warned = {"step": 1, "topic": ATTACK, "text": ATTACK}
    write_lines(run_dir / "warnings.jsonl", [warned])
    settings = {"model_name_or_path": ATTACK, "rewards": ["answer_correctness"]}
    (run_dir / "config.yaml").write_text(json.dumps({ATTACK: ATTACK, **settings}))
    (run_dir / "environment.json").write_text(json.dumps({ATTACK: {ATTACK: [ATTACK]}}))
    table = {"step": [1], "prompt": [ATTACK], "completion": [ATTACK], ATTACK: [ATTACK]}
    table |= {"answer_correctness": [0.0], "answer_correctness/reason": [ATTACK]}
    table["advantage"] = [0.0]
    (run_dir / "completions").mkdir()
    pd.DataFrame(table).to_parquet(run_dir / "completions" / "completions_00001.parquet")
    row = {"role": ATTACK, "label": "trained", "baseline": "baseline"}
    write_lines(run_dir / "eval" / "prompt_formats.json", [{"prompt_formats": {ATTACK: row}}])
    hostile = dict.fromkeys(("model", "precision", "prompt_format", "split"), ATTACK)
    hostile |= {"by_kind": {ATTACK: {"n": 2, "accuracy": 0.5}}}
    for label, right in (("baseline", [True, False]), ("trained", [False, True])):
        write_eval(run_dir, label, right, **hostile)
        records = [eval_record(i, ok, ATTACK) for i, ok in enumerate(right)]
        fields = {"question": ATTACK, "gold": f"{ATTACK} #### 1", "extracted": ATTACK}
        hurt = [{**record, **fields, "kind": ATTACK} for record in records]
        write_lines(run_dir / "eval" / label / "records.jsonl", hurt)
    write_eval(run_dir, "trained-apart", [True], settings={"model": ATTACK})
