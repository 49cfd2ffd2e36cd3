"""Build the trainer of a run with its callbacks, and train."""

from collections.abc import Sequence

from datasets import Dataset
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from trl import GRPOTrainer, ModelConfig, get_peft_config

from rewards import Reward
from sologrpo.base.console import Terminal
from sologrpo.base.errors import RunError, refusing
from sologrpo.base.redact import redact
from sologrpo.config import RunArguments, SoloGRPOConfig
from sologrpo.startup import finishing_step
from sologrpo.training.callbacks import ConsoleLog, MetricsFile, ValidateAtEnd
from sologrpo.training.checkpoint import (
    FinishCheckpoints,
    FollowSchedule,
    StopWithCheckpoint,
    print_resume_hint,
    train_from,
)
from sologrpo.training.diagnosis import Diagnosis
from sologrpo.training.nonfinite import StopAtNonfiniteWeights
from sologrpo.training.run_directory import OpenedRun
from sologrpo.training.trainer import SoloGRPOTrainer

# Raised by the constructors of TRL's and transformers' trainers for settings.
REFUSED_SETTINGS = (ValueError, ImportError, NotImplementedError)


def build_trainer(
    settings: tuple[RunArguments, SoloGRPOConfig, ModelConfig],
    model: PreTrainedModel,
    rewards: Sequence[Reward],
    datasets: tuple[Dataset, Dataset | None],
    tokenizer: PreTrainedTokenizerBase,
    console: Terminal,
    callbacks: Sequence[TrainerCallback] = (),
) -> GRPOTrainer:
    """Build our trainer, or TRL's with `trainer: stock`, and the callbacks of a run.

    Data sets are to train and to validate on, rewards in the order of `reward_weights`; the further
    callbacks are called last.

    Raises:
        InputError: if the trainer refuses the settings.
    """
    run, args, model_args = settings
    args.push_to_hub = False  # what transformers' push does badly, a callback does (export)
    trainer_class = SoloGRPOTrainer if run.trainer == "solo" else GRPOTrainer
    with refusing("the trainer refuses the settings", REFUSED_SETTINGS):
        trainer = trainer_class(
            model=model,
            reward_funcs=list(rewards),
            args=args,
            train_dataset=datasets[0],
            eval_dataset=datasets[1],
            processing_class=tokenizer,
            peft_config=get_peft_config(model_args),
            callbacks=[
                StopAtNonfiniteWeights(),
                FinishCheckpoints(args),  # before callbacks that send checkpoints elsewhere
                FollowSchedule(),
                MetricsFile(),
                ConsoleLog(console),
                Diagnosis(console, args.max_completion_length),
                ValidateAtEnd(),
                *callbacks,
            ],
        )
    for kept in (args, trainer.args):  # the client has the credentials; checkpoints and W&B do not
        kept.__dict__.update(redact(vars(kept)))
    _refuse_trackers_that_cannot_start(trainer)
    trainer.remove_callback(PrinterCallback)  # prints each log as a dictionary
    trainer.remove_callback(ProgressCallback)
    return trainer


def _refuse_trackers_that_cannot_start(trainer: GRPOTrainer) -> None:
    names = {INTEGRATION_TO_CALLBACK[name]: name for name in trainer.args.report_to}
    for callback in trainer.callback_handler.callbacks:
        if name := names.get(type(callback)):
            refuse = refusing(f"report_to {name}", (Exception,))
            callback.on_train_begin = refuse(callback.on_train_begin)


def train(trainer: GRPOTrainer, opened: OpenedRun) -> None:
    """Describe the run in its directory, and train to the last step.

    Raises:
        SystemExit: after SIGTERM (0) or Ctrl-C (130), once the step is finished and saved.
        InputError: if a tracker of `report_to` cannot start.
        RunError: if anything else ends the run before its adapter is saved.
    """
    opened.describe()
    stop = StopWithCheckpoint()
    trainer.add_callback(stop)
    with print_resume_hint(trainer.args), finishing_step():
        try:
            train_from(trainer, opened.checkpoint)
        except SystemExit as error:  # with code 0 the run would seem to have ended well
            raise RunError(
                f"sys.exit({error.code}) was called during training: look for it in the rewards"
            ) from error
        stop.exit_if_stopped(trainer.state)
