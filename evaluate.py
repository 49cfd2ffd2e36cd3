"""Evaluate greedily on the test split: `python evaluate.py --run runs/quickstart`.

Reads in the order that the data flows:
arguments -> test problems -> base model -> baseline -> adapter -> trained -> table -> export
-> report. `--compare_precisions` evaluates the adapter in every form of the weights instead, and
`--regrade` judges the completions of an earlier evaluation again.
"""

import sys
from collections.abc import Sequence

from rich.console import Console

from sologrpo.errors import one_line_errors
from sologrpo.scoring.regrade import regrade


@one_line_errors
def main() -> None:
    """Evaluate models, or judge old records again, which needs none."""
    arguments = sys.argv[1:]
    if any(argument.partition("=")[0] == "--regrade" for argument in arguments):
        regrade(arguments)
    else:
        evaluate_models(arguments)


def evaluate_models(arguments: Sequence[str]) -> None:
    """Run the stages of evaluation."""
    # Imported here, because judging old records again shall not wait for torch.
    from transformers import set_seed

    from sologrpo.config.evaluation import parse_evaluation
    from sologrpo.console import quiet_libraries
    from sologrpo.data.dataset import load_test_prompts
    from sologrpo.device import prepare_cpu
    from sologrpo.evaluation.evaluate import evaluate, evaluate_precisions
    from sologrpo.evaluation.precisions import add_adapter, load_untrained
    from sologrpo.export.export import begin_export, export_and_push
    from sologrpo.model.loading import load_tokenizer
    from sologrpo.model.merging import check_adapter
    from sologrpo.report.report import write_report
    from sologrpo.scoring.table import print_precisions, print_samples, print_table

    quiet_libraries()
    prepare_cpu()
    settings = parse_evaluation(arguments)
    console = Console()
    set_seed(settings.seed)
    if settings.adapter:
        check_adapter(settings.adapter, settings.model.model_name_or_path)
    export = begin_export(settings)

    tokenizer = load_tokenizer(settings.model.model_name_or_path, settings.trust_remote_code)
    problems = load_test_prompts(settings.data, settings.limit, settings.seed, tokenizer)

    if settings.compare_precisions:
        table = evaluate_precisions(tokenizer, problems, settings)
        print_precisions(console, table, settings.trained_precision)
    else:
        model = load_untrained(settings)
        results, before = {}, None
        if settings.baseline or not settings.adapter:
            label = settings.baseline_label if settings.adapter else settings.label
            records, results[label] = evaluate(model, tokenizer, problems, settings, label)
            before = records
        if settings.adapter:
            model = add_adapter(model, tokenizer, settings)
            records, results[settings.label] = evaluate(
                model, tokenizer, problems, settings, settings.label, settings.adapter, before
            )
        del model  # the export loads its own
        print_samples(console, records)
        print_table(console, results)

    if export is not None:
        export_and_push(export, console)
    if settings.run:
        console.print(f"report        {write_report(settings.run)}", highlight=False)


if __name__ == "__main__":
    main()
