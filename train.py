"""Train a LoRA adapter with GRPO: `sologrpo train --config quickstart`.

Also `accelerate launch --quiet train.py --config FILE`, and `python train.py` on one device.
Reads in the order that the data flows:
config -> data -> rewards -> run directory -> model -> trainer -> train -> adapter -> report.
"""

if __name__ == "__main__":  # before the imports: Ctrl-C or a wrong path need not wait for them
    from sologrpo.__main__ import start_script

    start_script("train")

import shlex
from pathlib import Path

from rewards import load_rewards
from sologrpo.base.console import Terminal, quiet_libraries
from sologrpo.base.environment import fix_prompt_date
from sologrpo.base.errors import one_line_errors
from sologrpo.config import parse_config
from sologrpo.data import load_train_and_validation
from sologrpo.export import PushToHub, save_adapter
from sologrpo.model import load_base_model, load_tokenizer
from sologrpo.plan import choose_number_format, print_plan, try_settings
from sologrpo.report import write_report
from sologrpo.startup import end_imports
from sologrpo.training import (
    build_trainer,
    open_run_directory,
    take_fingerprints,
    train,
)


@one_line_errors
def main() -> None:
    """Run the stages of training."""
    end_imports()
    quiet_libraries()
    run, args, model_args = settings = parse_config()
    console = Terminal(quiet=args.process_index != 0)

    fix_prompt_date(Path(args.output_dir) if run.resume else None)
    # Bad input is found before the run directory is made.
    tokenizer = load_tokenizer(
        model_args.model_name_or_path, args.trust_remote_code, args.chat_template_kwargs
    )
    datasets = load_train_and_validation(run, tokenizer, args.seed)
    columns = datasets[0].column_names
    rewards = load_rewards(run.rewards, columns, run.reward_timeout, run.reward_workers)
    policy = try_settings(run, args, model_args, tokenizer)
    gflops = choose_number_format(run, args, model_args, policy)
    print_plan(console, run, args, model_args, datasets[0], tokenizer, policy, gflops)
    if run.dry_run:
        return

    push = PushToHub(args, console)
    made_from = take_fingerprints(run, model_args, datasets, tokenizer, rewards)
    opened = open_run_directory(run, args, model_args, gflops, made_from)
    run_name = shlex.quote(str(opened.directory))
    console.print(f"follow   sologrpo report --follow {run_name}", soft_wrap=True)
    model = load_base_model(model_args, args.trust_remote_code)
    trainer = build_trainer(settings, model, rewards, datasets, tokenizer, console, [push])
    train(trainer, opened)
    save_adapter(trainer, opened.adapter)
    if trainer.is_world_process_zero():
        report = write_report(opened.directory)
        console.print(f"adapter  {opened.adapter}\nreport   {report}", soft_wrap=True)
        push.finish(opened.adapter, str(model_args.model_name_or_path))
        console.print(f"next     sologrpo evaluate --run {run_name}", soft_wrap=True)


if __name__ == "__main__":
    main()
