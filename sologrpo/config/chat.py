"""Parse the command line of a chat, and fill it from the run's config."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers.hf_argparser import HfArg

from sologrpo.base.errors import InputError
from sologrpo.config.evaluation import EvaluationArguments, EvaluationSettings, fill_from_run
from sologrpo.config.parsing import RENAMED, CheckedParser
from sologrpo.prompts import PROMPT_FORMATS


@dataclass
class ChatArguments:
    """Hold the options of `sologrpo chat`, each of which `sologrpo evaluate` has too."""

    run: str | None = HfArg(default=None, help="Run directory")
    prompt_format: str | None = HfArg(
        default=None, metadata={"choices": sorted(PROMPT_FORMATS)}, help="As in training"
    )
    max_completion_length: int | None = HfArg(
        default=None, help="In tokens (default: the run's, or 512)"
    )
    trust_remote_code: bool = HfArg(
        default=False, help="Run code of the model's repository; never taken from the run's config"
    )
    traceback: bool = HfArg(default=False, help="Show tracebacks of bad input")


def parse_chat(argv: Sequence[str]) -> EvaluationSettings:
    """Parse the command line of a chat: the run, and how to ask."""
    (args,) = CheckedParser(ChatArguments, renamed=RENAMED).parse(argv)
    if not args.run:
        raise InputError("give --run runs/NAME")
    return fill_from_run(EvaluationArguments(**vars(args)))
