"""A merged model under lm-evaluation-harness, and its completions under our judge.

    pip install lm-eval
    python benchmarks/harness.py --model runs/quickstart/merged --data quickstart

An independent check of an accuracy. The harness loads the model, prompts it in its own way (its
gsm8k task, with worked examples from the training split), and scores with its own two filters. Our
judge then reads the same completions, and every disagreement is listed with both readings. Only the
data is ours: `train.jsonl` and `test.jsonl` with `question` and `answer`, as in GSM8K.
"""

import argparse
import collections
import datetime
import json
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `rewards`, whether or not the project is installed

from rewards.grading import judge, lenient_is_correct  # noqa: E402

MARK = "####"  # starts the answer line, in the data and so in the harness's worked examples
NAMES = {"strict-match": "strict", "flexible-extract": "flexible"}  # the harness's filters


@dataclass(frozen=True)
class Verdicts:
    """One completion, read by both sides.

    Attributes:
        index: place in the test split.
        completion: what the model wrote under the harness's prompt.
        gold: the raw answer of the data set.
        harness: by filter, what the harness extracted and whether it calls that right.
        ours: by the same names, the reason of our judge's verdict, and the verdict.
    """

    index: int
    completion: str
    gold: str
    harness: dict[str, tuple[str, bool]]
    ours: dict[str, tuple[str, bool]]

    def disagreements(self) -> list[str]:
        """Return the names under which the two sides differ."""
        return [name for name in self.ours if self.ours[name][1] != self.harness[name][1]]


def our_verdicts(completion: str, gold: str) -> dict[str, tuple[str, bool]]:
    """Judge a completion in the harness's format with our judge.

    Strict: the line after the first `####`, where the worked examples put the answer, is judged as
    the content of an answer element. Flexible: the last number anywhere.

    Args:
        completion: what the model wrote.
        gold: the raw answer of the data set.

    Returns:
        By name the reason of the verdict, and the verdict.

    >>> our_verdicts("9 * 2 = 18\\n#### $18.00", "#### 18")["strict"]
    ('18 is the gold answer', True)
    >>> our_verdicts("It is 18.", "#### 18")
    {'strict': ('no line with ####', False), 'flexible': ('last number', True)}
    """
    _, mark, rest = completion.partition(MARK)
    line = rest.split("\n", 1)[0].replace("<", "&lt;")
    verdict = judge(f"<answer>{line}</answer>", gold, "xml")
    return {
        "strict": (verdict.reason, verdict.correct) if mark else (f"no line with {MARK}", False),
        "flexible": ("last number", lenient_is_correct(completion, gold)),
    }


def evaluate(args: argparse.Namespace) -> tuple[list[Verdicts], dict[str, Any]]:
    """Evaluate the model with the harness.

    Args:
        args: from `parse_args`.

    Returns:
        The verdicts in the order of the test split, and the harness's own scores.
    """
    import lm_eval  # type: ignore[import-not-found]
    from lm_eval.api.task import ConfigurableTask  # type: ignore[import-not-found]
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]
    from lm_eval.tasks._yaml_loader import load_yaml  # type: ignore[import-not-found]

    config = load_yaml(Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml")
    del config["dataset_name"]
    files = {split: str(args.data / f"{split}.jsonl") for split in ("train", "test")}
    config |= {"dataset_path": "json", "dataset_kwargs": {"data_files": files}}
    config |= {"num_fewshot": args.num_fewshot}
    config["generation_kwargs"] |= {"max_gen_toks": args.max_new_tokens}
    model = HFLM(str(args.model), dtype=args.dtype, batch_size=args.batch_size, device=args.device)
    results = lm_eval.simple_evaluate(
        model,
        tasks=[ConfigurableTask(config=config)],
        limit=args.limit,
        apply_chat_template=args.apply_chat_template,
        fewshot_as_multiturn=args.apply_chat_template,
        log_samples=True,
        bootstrap_iters=0,
    )
    scores = {
        NAMES[key.partition(",")[2]]: value
        for key, value in results["results"]["gsm8k"].items()
        if key.startswith("exact_match,")
    }
    return read_samples(results["samples"]["gsm8k"]), scores


def read_samples(samples: list[dict[str, Any]]) -> list[Verdicts]:
    """Join the harness's rows, of which there is one per document and filter."""
    rows: dict[int, dict[str, dict[str, Any]]] = collections.defaultdict(dict)
    for sample in samples:
        rows[sample["doc_id"]][NAMES[sample["filter"]]] = sample
    verdicts = []
    for index, by_filter in sorted(rows.items()):
        first = by_filter["strict"]
        completion, gold = first["resps"][0][0], first["doc"]["answer"]
        harness = {
            name: (str(sample["filtered_resps"][0]), bool(sample["exact_match"]))
            for name, sample in by_filter.items()
        }
        ours = our_verdicts(completion, gold)
        verdicts.append(Verdicts(index, completion, gold, harness, ours))
    return verdicts


def print_report(verdicts: list[Verdicts], scores: dict[str, Any]) -> None:
    """Print both sides' scores, and every disagreement."""
    n = len(verdicts)
    print(f"\n{n} problems, completions of the harness's own prompt")
    print(f"{'':10} {'harness':>8} {'ours':>8} {'agree':>12}")
    for name in NAMES.values():
        ours = sum(row.ours[name][1] for row in verdicts)
        agree = sum(name not in row.disagreements() for row in verdicts)
        print(f"{name:10} {scores[name]:8.1%} {ours / n:8.1%} {agree:5} of {n}")
    for row in verdicts:
        for name in row.disagreements():
            (found, theirs), (reason, ours_right) = row.harness[name], row.ours[name]
            said = ["wrong", "right"]
            print(
                f"{row.index}, {name}: harness {said[theirs]} (read {found!r}), "
                f"ours {said[ours_right]} ({reason}); gold {row.gold.rpartition(MARK)[2].strip()}; "
                f"ends in {row.completion[-60:]!r}"
            )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of a merged model (--save_merged)")
    add("--data", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    add("--limit", type=int, help="use only the first N test problems (default: all)")
    add(
        "--num_fewshot",
        type=int,
        default=5,
        help="number of worked examples (default: 5, as in the task)",
    )
    add("--apply_chat_template", action="store_true", help="write the examples as turns of a chat")
    add(
        "--max_new_tokens",
        type=int,
        default=256,
        help="limit of a completion (default: 256, as in the task)",
    )
    add("--batch_size", type=int, default=8)
    add("--dtype", default="float32", help="of the weights (default: float32)")
    add("--device", default="cpu")
    add("--out", type=Path, help="JSON file with all completions and verdicts")
    args = parser.parse_args(argv)
    if find_spec("lm_eval") is None:
        parser.error("lm-evaluation-harness is not installed: pip install lm-eval")
    for file in (args.model / "config.json", args.data / "train.jsonl", args.data / "test.jsonl"):
        if not file.is_file():
            parser.error(f"{file} does not exist")
    return args


def main() -> None:
    """Run the harness, judge its completions again, and print both scores."""
    args = parse_args()
    verdicts, scores = evaluate(args)
    print_report(verdicts, scores)
    if args.out:
        settings = {key: str(value) for key, value in vars(args).items() if key != "out"}
        data = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("lm-eval", "transformers", "torch")},
            "settings": settings,
            "harness": scores,
            "rows": [asdict(row) for row in verdicts],
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
