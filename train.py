"""Train a LoRA adapter with GRPO: `accelerate launch train.py --config configs/quickstart.yaml`.

Reads in the order that the data flows:
config -> run directory -> data -> model -> rewards -> trainer -> train -> adapter -> summary.
"""

import sys
from pathlib import Path

from rich.console import Console
from transformers import PrinterCallback, ProgressCallback
from trl import GRPOTrainer, get_peft_config

from rewards import load_rewards
from sologrpo.config.parsing import parse_config
from sologrpo.console import quiet_libraries
from sologrpo.data.dataset import load_train_and_validation
from sologrpo.device import prepare_cpu
from sologrpo.errors import one_line_errors
from sologrpo.export.export import save_adapter
from sologrpo.export.model_card import write_card
from sologrpo.export.pushing import PushToHub, run_repository
from sologrpo.files import ADAPTER
from sologrpo.model.loading import load_base_model, load_tokenizer
from sologrpo.plan.plan import print_plan
from sologrpo.report.report import write_report
from sologrpo.training.callbacks import ConsoleLog, MetricsFile, ValidateAtEnd
from sologrpo.training.checkpoint import StopWithCheckpoint, train_from
from sologrpo.training.diagnosis import Diagnosis
from sologrpo.training.rehearsal import rehearse, should_rehearse
from sologrpo.training.run_directory import (
    open_run_directory,
    save_run_description,
    saying_how_to_go_on,
)
from sologrpo.training.tracking import outlived_trackers, prepare_trackers
from sologrpo.training.trainer import SoloGRPOTrainer


@one_line_errors
def main() -> None:
    """Run the stages of training."""
    quiet_libraries()
    prepare_cpu()
    run, args, model_args = parse_config()
    console = Console(quiet=args.process_index != 0)

    # Everything that can be wrong in the input is found before the run directory is made.
    tokenizer = load_tokenizer(model_args.model_name_or_path, args.trust_remote_code)
    train_dataset, validation_dataset = load_train_and_validation(run, tokenizer, args.seed)
    reward_funcs = load_rewards(run.rewards, train_dataset.column_names, run.reward_timeout)
    print_plan(console, run, args, model_args, train_dataset, tokenizer, reward_funcs)
    if run.dry_run:
        return
    prepare_trackers(args, console)
    repository = run_repository(args)

    opened = open_run_directory(run, args, model_args)
    if should_rehearse(run, args):
        rehearse(sys.argv[1:], args, console)
    model = load_base_model(model_args, args.trust_remote_code)
    save_run_description(run, args, model_args)

    trainer_class = SoloGRPOTrainer if run.trainer == "solo" else GRPOTrainer
    stop, push = StopWithCheckpoint(), PushToHub(args, repository, console)
    trainer = trainer_class(
        model=model,
        reward_funcs=reward_funcs,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=validation_dataset,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
        callbacks=[
            MetricsFile(),
            ConsoleLog(console),
            Diagnosis(console, args.max_completion_length),
            ValidateAtEnd(),
            push,
            stop,
        ],
    )
    trainer.remove_callback(PrinterCallback)  # prints each log as a dictionary
    trainer.remove_callback(ProgressCallback)

    with outlived_trackers(trainer, console):
        with saying_how_to_go_on(args), stop:
            train_from(trainer, opened.checkpoint)
            stop.exit_if_stopped(trainer.state)

        adapter = Path(args.output_dir) / ADAPTER
        save_adapter(trainer, adapter)
        if trainer.is_world_process_zero():
            report = write_report(Path(args.output_dir))
            base = str(model_args.model_name_or_path)
            write_card(adapter, "adapter", adapter.parent.name, adapter.parent, base)
            console.print(f"adapter  {adapter}\nreport   {report}")
            push.finish(adapter)
            console.print(f"next     python evaluate.py --run {args.output_dir}")


if __name__ == "__main__":
    main()
