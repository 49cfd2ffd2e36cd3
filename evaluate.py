"""Evaluate greedily on the test split: `sologrpo evaluate --run runs/quickstart`.

Reads in the order that the data flows: settings -> tokenizer -> test problems -> evaluation of the
baseline and of the trained model -> table -> report.
`--prompt_formats` evaluates both models under several prompts.
"""

if __name__ == "__main__":  # before the imports: Ctrl-C or a wrong path need not wait for them
    from sologrpo.__main__ import start_script

    start_script("evaluate")

import sys

from sologrpo.base.console import Terminal, quiet_libraries
from sologrpo.base.errors import one_line_errors
from sologrpo.config import parse_evaluation
from sologrpo.data import load_test_prompts
from sologrpo.evaluation import evaluate_formats, evaluate_models
from sologrpo.model import check_adapter, load_tokenizer
from sologrpo.report import write_report
from sologrpo.scoring import print_ending, print_formats, print_results
from sologrpo.startup import end_imports


@one_line_errors
def main() -> None:
    """Run the stages of an evaluation."""
    end_imports()
    quiet_libraries()
    console = Terminal()
    settings = parse_evaluation(sys.argv[1:])
    if settings.adapter:
        check_adapter(settings.adapter, settings.model.model_name_or_path)

    tokenizer = load_tokenizer(
        settings.model.model_name_or_path,
        settings.trust_remote_code,
        settings.chat_template_kwargs,
    )
    problems = {
        name: load_test_prompts(settings.data_in(name), settings.limit, settings.seed, tokenizer)
        for name in settings.prompt_formats
    }

    evaluated = {}
    if len(problems) > 1:
        print_formats(console, evaluate_formats(settings, tokenizer, problems))
    else:
        evaluated = evaluate_models(settings, tokenizer, problems)
        print_results(console, evaluated)

    if settings.run:
        report = write_report(settings.run, settings.output_dir)
        files = {"adapter": settings.adapter, "report": report}
        print_ending(console, evaluated, settings.run, files)


if __name__ == "__main__":
    main()
