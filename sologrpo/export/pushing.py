"""`push_to_hub` of a training run: checkpoints in the background, the adapter at the end.

transformers' own push uploads everything in the run directory, including pickles and paths of this
machine, does not report failed uploads, and ends with a traceback if the last one fails.
"""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy

from sologrpo.base.console import print_line, print_warning
from sologrpo.base.errors import InputError, first_line
from sologrpo.base.files import CHECKPOINT
from sologrpo.export.hub import open_repository, push_folder
from sologrpo.export.model_card import write_card

LAST = "last-checkpoint"  # its folder in the repository, named as transformers does


class PushToHub(TrainerCallback):  # type: ignore[misc]
    """Push checkpoints and the adapter as `hub_strategy` asks; a failed upload is a warning.

    `end` pushes only the adapter; `all_checkpoints` gives each checkpoint its folder, any other
    strategy keeps the latest. A checkpoint that is saved during an upload is left out, unless
    `hub_always_push`.
    """

    def __init__(self, args: TrainingArguments, console: Console) -> None:
        self._repository: str | None = None
        self._console = console
        self._api = HfApi()
        self._last: Future[str] | None = None
        if args.push_to_hub and args.process_index == 0:
            name = args.hub_model_id or Path(args.output_dir).absolute().name
            self._repository = open_repository(name, bool(args.hub_private_repo))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start to upload the checkpoint that was just saved."""
        if self._repository is None or args.hub_strategy == HubStrategy.END:
            return
        if self._last is not None and not self._last.done() and not args.hub_always_push:
            return
        name = CHECKPOINT.format(state.global_step)
        self._last = self._api.run_as_future(
            push_folder,
            Path(args.output_dir) / name,
            self._repository,
            f"Step {state.global_step}",
            ignore=[TRAINING_ARGS_NAME],  # a pickle with paths and settings of this machine
            path_in_repo=name if args.hub_strategy == HubStrategy.ALL_CHECKPOINTS else LAST,
        )
        self._last.add_done_callback(
            lambda upload: self._warn_if_failed(upload, name, "later checkpoints are still pushed")
        )

    def finish(self, adapter: Path, base_model: str) -> None:
        """Write the adapter's model card; push the adapter after the last checkpoint."""
        try:
            write_card(adapter, "adapter", adapter.parent.name, adapter.parent, base_model)
        except InputError as error:  # a damaged file, which must not end a finished run
            print_warning(self._console, f"the adapter has no model card: {error}")
        if self._repository is None:
            return
        upload = self._api.run_as_future(
            push_folder, adapter, self._repository, "The trained adapter"
        )
        fix = f"sologrpo export --run {adapter.parent} --push_to_hub {self._repository}"
        if not self._warn_if_failed(upload, "the adapter", f"push it with: {fix}"):
            print_line(self._console, f"pushed   {upload.result()}")

    def _warn_if_failed(self, upload: Future[str], what: str, next_step: str) -> bool:
        error = upload.exception()  # waits for the upload
        if error is not None:
            print_warning(
                self._console, f"{what} is not on the Hub: {first_line(error)}; {next_step}"
            )
        return error is not None
