"""The cells of docs/colab.md: every command parses, and computes on a T4 in what the page says."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from sologrpo.base.errors import InputError
from sologrpo.config import parse_config
from sologrpo.config.chat import ChatArguments
from sologrpo.config.evaluation import EvaluationArguments
from sologrpo.config.parsing import CheckedParser
from sologrpo.model.loading import pick_dtype

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "colab.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
# `sologrpo` or a launched `train.py`, as the last part of a cell's line, in a pipe or a container.
COMMAND = re.compile(r"(?:^!?|\| |/work )sologrpo (\w+)(.*)$|/(train)\.py (.*)$", re.MULTILINE)
COMMANDS = [
    (found[1] or found[3], shlex.split(found[2] or found[4] or ""))
    for block in BLOCKS
    for found in COMMAND.finditer(block)
]


@pytest.fixture
def t4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the settings the default of a GPU without bf16; `default_dtype` has its own test."""
    for module in ("sologrpo.config.arguments", "sologrpo.model.loading"):
        monkeypatch.setattr(f"{module}.default_dtype", lambda: torch.float16)


@pytest.mark.parametrize(("name", "argv"), COMMANDS, ids=lambda part: "".join(part)[:40])
def test_every_command_parses(
    name: str, argv: list[str], monkeypatch: pytest.MonkeyPatch, t4: None
) -> None:
    monkeypatch.setattr(sys, "argv", ["sologrpo"])
    if name == "train":
        _, args, model = parse_config(argv)
        single = "--dtype" in argv
        assert args.fp16 is not single
        assert not args.bf16
        assert pick_dtype(model.dtype) is (torch.float32 if single else torch.float16)
    elif name == "evaluate":
        CheckedParser(EvaluationArguments).parse(argv)
    elif name == "chat":
        CheckedParser(ChatArguments).parse(argv)
    else:
        assert argv == []


def test_two_gpus_in_one_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sologrpo.config.arguments.SoloGRPOConfig.n_gpu", 2)
    with pytest.raises(InputError, match=r"2 GPUs are visible .* CUDA_VISIBLE_DEVICES=0"):
        parse_config(["--config", "qwen2.5-1.5b"])
