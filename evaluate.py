"""Evaluate greedily on the test split: `python evaluate.py --run runs/quickstart`.

Reads in the order that the data flows:
arguments -> test problems -> base model -> baseline -> merge -> trained -> table -> report.
"""

import sys
from pathlib import Path

from rich.console import Console
from transformers import set_seed

from sologrpo.config import parse_evaluation
from sologrpo.data import load_test_prompts
from sologrpo.device import prepare_cpu
from sologrpo.errors import one_line_errors
from sologrpo.evaluation import generate_records, save_evaluation
from sologrpo.export import check_adapter, dequantised, merge_adapter, save_merged
from sologrpo.model import load_base_model, load_tokenizer
from sologrpo.report import write_report
from sologrpo.summary import print_samples, print_table, quiet_libraries


@one_line_errors
def main() -> None:
    """Run the stages of evaluation."""
    quiet_libraries()
    prepare_cpu()
    settings = parse_evaluation(sys.argv[1:])
    console = Console()
    set_seed(settings.seed)
    if settings.adapter:
        check_adapter(settings.adapter, settings.model.model_name_or_path)

    tokenizer = load_tokenizer(settings.model.model_name_or_path, settings.trust_remote_code)
    problems = load_test_prompts(settings.data, settings.limit, settings.seed, tokenizer)
    model = load_base_model(settings.model, settings.trust_remote_code)
    model = dequantised(model)  # baseline and trained model at the same precision

    results, before = {}, None
    if settings.baseline or not settings.adapter:
        label = settings.baseline_label if settings.adapter else settings.label
        records = generate_records(model, tokenizer, problems, settings.max_completion_length)
        results[label] = save_evaluation(records, label, settings, model, adapter=None)
        before = records
    if settings.adapter:
        model = merge_adapter(model, settings.adapter)
        records = generate_records(model, tokenizer, problems, settings.max_completion_length)
        results[settings.label] = save_evaluation(
            records, settings.label, settings, model, settings.adapter, before
        )

    print_samples(console, records)
    print_table(console, results)
    if settings.save_merged:
        save_merged(model, tokenizer, Path(settings.save_merged))
        console.print(f"merged model  {settings.save_merged}", highlight=False)
    if settings.run:
        console.print(f"report        {write_report(settings.run)}", highlight=False)


if __name__ == "__main__":
    main()
