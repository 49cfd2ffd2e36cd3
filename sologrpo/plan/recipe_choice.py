"""Choose a recipe for this machine: `sologrpo train` without `--config`.

The largest recipe whose card and files are here, or can be fetched. Nothing is downloaded; if files
are missing, the Hub is asked whether it answers, with the time limit of `sologrpo.hub`.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from huggingface_hub import try_to_load_from_cache

from sologrpo.config.arguments import RunArguments
from sologrpo.console import Terminal, print_line
from sologrpo.device import default_dtype, describe_device
from sologrpo.files import recipes
from sologrpo.forgiving import take_option
from sologrpo.hub import unreachable
from sologrpo.model.loading import dtype_name
from sologrpo.schema import read_yaml

# GB of the smallest card that a recipe's header names, largest first.
CARDS = {"r1-zero-on-policy": 48, "llama3.1-8b": 24, "qwen2.5-1.5b": 16}
WITHOUT_GPU = "quickstart"  # and without the Hub
SHOWN = 0.9  # GiB that a card has at least per GB of its name: an L4 of 24 GB has 22 GiB
GATED = "meta-llama/"  # needs a licence, so that a token may not be enough
# Either proves that more was downloaded than the config, which a dry run does too.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def choose_recipe() -> None:
    """Add `--config` to the process's arguments if they name no recipe and no model; print why."""
    words = sys.argv[1:]
    options = ("--config", "--model_name_or_path", "--model-name-or-path", "--help")
    if any(take_option(option, words)[0] for option in options):
        return
    console = Terminal(quiet=os.environ.get("RANK", "0") != "0")
    if not torch.cuda.is_available():
        sys.argv += ["--config", WITHOUT_GPU]
        reason = f"{describe_device()}: the larger recipes need a GPU; --config NAME takes another"
        print_line(console, f"recipe   {WITHOUT_GPU}, for {reason}")
        return
    has_data = bool(take_option("--dataset_name", words)[0])
    passed_over = list(_obstacles(has_data))
    name = [*CARDS, WITHOUT_GPU][len(passed_over)]
    sys.argv += ["--config", name]
    device = f"{describe_device()}, {dtype_name(default_dtype())}"
    print_line(
        console,
        f"recipe   {name}, for {device}: never tried on a GPU; --config NAME takes another",
    )
    if passed_over:
        print_line(console, f"larger   {'; '.join(passed_over)}")


def _obstacles(has_data: bool) -> Iterator[str]:
    """Explain why each recipe is passed over, up to the first one that this machine can run."""
    memory = torch.cuda.get_device_properties(0).total_memory
    for name, gigabytes in CARDS.items():
        if memory < gigabytes * SHOWN * 2**30:
            yield f"{name} needs {gigabytes} GB"
        elif lack := _lack(name, has_data):
            yield f"{name}: {lack}"
        else:
            return


def _lack(name: str, has_data: bool) -> str | None:
    """Name the model or data set of a recipe that is neither here nor to be had; None if all are.

    Args:
        name: of the recipe.
        has_data: whether the command line names another data set.
    """
    settings = read_yaml(recipes()[name], dict[str, Any])
    model = settings["model_name_or_path"]
    data = settings.get("dataset_name", RunArguments.dataset_name)
    wanted = [] if any(_is_cached(model, file) for file in WEIGHTS) else [model]
    if wanted and model.startswith(GATED):
        return f"{model} is gated, and not in the Hub's local cache"
    # As `datasets` names the folder.
    folder = Path(datasets.config.HF_DATASETS_CACHE, data.replace("/", "___"))
    if not has_data and not folder.is_dir():
        wanted.append(data)
    if wanted and (problem := unreachable()):
        return f"{wanted[0]} is not in the Hub's local cache, and {problem}"
    return None


def _is_cached(model: str, file: str) -> bool:
    return isinstance(try_to_load_from_cache(model, file), str)
