"""Ask the base and the trained model of a run: `sologrpo chat --run runs/quickstart`.

Both are one model in memory, with the adapter switched off and on. They get the prompt, length
limit and stop strings of the run, and answer greedily, as in an evaluation. Questions come from the
terminal, or from a pipe with one per line.
"""

import io
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec

from datasets import Dataset
from peft import PeftModel
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from rewards.grading import extract_answer
from sologrpo.base.console import Terminal, print_warning, quiet_libraries
from sologrpo.base.errors import InputError
from sologrpo.base.text import escaped
from sologrpo.config.chat import parse_chat
from sologrpo.config.evaluation import EvaluationSettings
from sologrpo.data.dataset import build_prompts, prompt_token_ids, stop_strings
from sologrpo.evaluation.precisions import describe_precision, fit_precision, load_untrained
from sologrpo.model.fitting import explaining_out_of_memory
from sologrpo.model.loading import load_tokenizer
from sologrpo.model.merging import check_adapter, load_adapter
from sologrpo.sampling.generation import Completion, generate_greedily
from sologrpo.scoring.records import LENGTH

QUIT = "/quit"
WIDE = 100  # columns of a terminal from which both answers are shown next to each other


def main(argv: Sequence[str]) -> None:
    """Ask both models each question, and show their answers."""
    settings = parse_chat(argv)
    base_name, adapter = str(settings.model.model_name_or_path), settings.adapter
    assert adapter is not None
    quiet_libraries()
    console = Terminal()
    check_adapter(adapter, base_name)
    tokenizer = load_tokenizer(base_name, settings.trust_remote_code, settings.chat_template_kwargs)
    tokenizer.model_max_length = sys.maxsize  # `_ask` checks it, and tells more
    settings = fit_precision(settings)
    model = load_adapter(load_untrained(settings), adapter)
    weights = describe_precision(settings, model.dtype)
    console.print(f"base     {base_name}, {weights}\ntrained  with {adapter}", soft_wrap=True)
    unanswered = 0
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    for question in _questions(console, is_terminal):
        try:
            _show(console, _ask(question, model, tokenizer, settings), settings)
        except InputError as error:
            print_warning(console, str(error))
            unanswered += 1
    if unanswered and not is_terminal:
        raise InputError(f"questions without an answer: {unanswered}")


def _questions(console: Console, is_terminal: bool) -> Iterator[str]:
    """Read questions up to the end of the input, or `QUIT`; lines without text are skipped."""
    if not isinstance(sys.stdin, io.TextIOWrapper):  # closed
        return
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    if is_terminal:
        if find_spec("readline"):  # not in every Python
            import_module("readline")  # for `input`: line editing, and earlier questions
        console.print(f"Ask a question. {QUIT} or Ctrl-D ends.")
    try:
        while (line := input("> " if is_terminal else "").strip()) != QUIT:
            if line and not is_terminal:
                console.print(f"> {line}", soft_wrap=True)
            if line:
                yield line
    except EOFError:
        console.print(end="\n" if is_terminal else "")


def _ask(
    question: str,
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: EvaluationSettings,
) -> dict[str, tuple[Completion, float]]:
    """Return the completion and the seconds of each model."""
    rows = build_prompts(Dataset.from_list([{"question": question}]), settings.data, tokenizer)
    (prompt,) = prompt_token_ids(rows["prompt"], tokenizer)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = settings.max_completion_length
    if context is not None:
        room = min(room, context - len(prompt))
    if room < 1:
        raise InputError(
            f"the prompt has {len(prompt)} tokens with this question, and the context of the model "
            f"{context}: ask a shorter one"
        )
    answers = {}
    for name, adapter in (("base", model.disable_adapter), ("trained", nullcontext)):
        start = time.perf_counter()
        with (
            adapter(),
            explaining_out_of_memory("ask a shorter question, or lower --max_completion_length"),
        ):
            (completion,) = generate_greedily(
                model, tokenizer, [prompt], room, stop_strings=stop_strings(rows)
            )
        answers[name] = completion, time.perf_counter() - start
    return answers


def _show(
    console: Console,
    answers: Mapping[str, tuple[Completion, float]],
    settings: EvaluationSettings,
) -> None:
    """Print the answers: next to each other on a wide terminal, else one below the other."""
    panels = []
    for name, (completion, seconds) in answers.items():
        answer = extract_answer(completion.text, settings.data.prompt_format) or "none"
        cut = ", cut off" if completion.stop_reason == LENGTH else ""
        # Escaped here too: the panel counts the columns of what is printed.
        text = Text(escaped(completion.text.strip()))
        summary = f"answer {answer}, {completion.token_count} tokens{cut}, {seconds:.1f} s"
        panels.append(Panel(text.append(f"\n\n{summary}", "bold"), title=name))
    if console.width < WIDE:
        console.print(*panels, sep="\n")
        return
    table = Table.grid(expand=True)
    for _ in panels:
        table.add_column(ratio=1)
    table.add_row(*panels)
    console.print(table)
