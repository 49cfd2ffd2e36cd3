"""Measure what bf16 saves on this CPU, and how far its gradient is from that in fp32.

    python benchmarks/number_format.py

One optimizer step of the quickstart in each format, on the same prompts, completions and rewards.
Prints a line per format: seconds of the training part, and how far its gradient is from that in
fp32, of all parameters together and of the worst one.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median

import torch
from _trainers import ROOT, Contender, Gradients, gradient_gap, quickstart_workload, settings_for

from sologrpo.environment import prepare_process

# Formats by name: the dtype of the weights, and whether products are autocast. The second bf16
# computes the adapter's products in fp32.
FORMATS = {
    "fp32": {"dtype": "float32", "bf16": False},
    "bf16": {"dtype": "bfloat16", "bf16": True},
    "bf16, adapter in fp32": {"dtype": "bfloat16", "bf16": False},
}


def build(name: str, model: Path, prompts: int, scratch: Path) -> Contender:
    """Build our trainer in a format, with every prompt of the step eight times."""
    shape = {"per_device_train_batch_size": 8 * prompts, "gradient_accumulation_steps": 1}
    settings = settings_for(model, scratch, **FORMATS[name], **shape, max_completion_length=48)
    workload = quickstart_workload(settings)
    workload.kept_in = scratch / "completions.json"
    workload.load()
    contender = Contender("solo", workload)
    contender.train()  # warms up; in the first format, it samples the completions
    workload.save()
    return contender


def distance(reference: Gradients, other: Gradients) -> float:
    """Compute |a - b| / |a| of all parameters together."""
    a, b = (torch.cat([g[name].flatten() for name in reference]) for g in (reference, other))
    return float((a - b).norm() / a.norm())


def main() -> None:
    """Alternate between the formats, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models/SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=int, default=8, help="of a step (default: 8)")
    parser.add_argument("--repeats", type=int, default=3, help="of each step (default: 3)")
    args = parser.parse_args()
    prepare_process()
    with tempfile.TemporaryDirectory() as scratch:
        contenders = {
            name: build(name, args.model, args.prompts, Path(scratch)) for name in FORMATS
        }
    seconds: dict[str, list[float]] = {name: [] for name in FORMATS}
    for _ in range(args.repeats):
        for name, contender in contenders.items():
            seconds[name].append(contender.train(capture=True)["training_s"])
    reference = contenders["fp32"].gradients
    for name, contender in contenders.items():
        shown = ", ".join(f"{second:.1f}" for second in seconds[name])
        apart = distance(reference[0], contender.gradients[0])
        worst = gradient_gap(reference, contender.gradients)
        print(f"{name:<22} {median(seconds[name]):6.2f} s ({shown})  {apart:.1e}  {worst:.1e}")


if __name__ == "__main__":
    main()
