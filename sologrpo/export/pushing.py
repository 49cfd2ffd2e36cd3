"""`push_to_hub` of a training run: checkpoints in the background, the adapter at the end.

transformers' own way sends whatever lies in the run directory, pickles and paths of this machine
among it, says nothing of uploads that failed, and ends with a traceback if the last one does.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy

from sologrpo.console import print_line, print_warning
from sologrpo.errors import first_line
from sologrpo.export.hub import check_repository_name, open_repository, push_folder
from sologrpo.files import CHECKPOINT

LAST = "last-checkpoint"  # in the repository, as transformers calls it
_NOT_SENT = [TRAINING_ARGS_NAME]  # a pickle full of paths and settings of this machine


def run_repository(args: TrainingArguments) -> str | None:
    """The repository of the run, made and tried, under its full name; None if nothing is pushed.

    Raises:
        InputError: if it can have no such name, or cannot be written to.
    """
    if not args.push_to_hub or args.process_index != 0:
        return None
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    check_repository_name(name)
    return open_repository(name, bool(args.hub_private_repo))


class PushToHub(TrainerCallback):  # type: ignore[misc]
    """Push as `hub_strategy` says; what fails costs a warning, and the next push brings it along.

    `end` pushes the adapter alone; `all_checkpoints` gives each checkpoint a folder of its own, any
    other the latest. One that is saved while another is on its way is left out, unless
    `hub_always_push`.
    """

    def __init__(self, args: TrainingArguments, repository: str | None, console: Console) -> None:
        args.push_to_hub = False  # before the trainer looks: this class does it instead
        self._repository = repository
        self._console = console
        self._uploads = ThreadPoolExecutor(1)
        self._last: Future[str] | None = None

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start the upload of the checkpoint that was just saved."""
        if self._repository is None or args.hub_strategy == HubStrategy.END:
            return
        if self._last is not None and not self._last.done() and not args.hub_always_push:
            return
        name = CHECKPOINT.format(state.global_step)
        self._last = self._uploads.submit(
            push_folder,
            Path(args.output_dir) / name,
            self._repository,
            f"Step {state.global_step}",
            _NOT_SENT,
            name if args.hub_strategy == HubStrategy.ALL_CHECKPOINTS else LAST,
        )
        self._last.add_done_callback(
            lambda upload: self._warn(upload, name, "later checkpoints are sent all the same")
        )

    def finish(self, adapter: Path) -> None:
        """Wait for the checkpoint on its way, then push the adapter."""
        if self._repository is None:
            return
        upload = self._uploads.submit(push_folder, adapter, self._repository, "The trained adapter")
        run = adapter.parent
        mend = f"python -m sologrpo.export.export --run {run} --push_to_hub {self._repository}"
        if not self._warn(upload, "the adapter", mend):
            print_line(self._console, f"pushed   {upload.result()}")

    def _warn(self, upload: Future[str], what: str, way_on: str) -> bool:
        error = upload.exception()  # waits
        if error is not None:
            print_warning(self._console, f"{what} is not on the Hub: {first_line(error)}; {way_on}")
        return error is not None
