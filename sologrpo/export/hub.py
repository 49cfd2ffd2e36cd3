"""The Hub: may this token write there, and bring a folder there. Knows nothing of models.

Both steps can be called again at any time. What the Hub has already is not sent twice, so a push
that was cut off goes on when its command is given again.
"""

import time
from collections.abc import Callable, Sequence
from json import JSONDecodeError
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, errors, get_token
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from sologrpo.errors import InputError

# The base of the failures of whichever HTTP package the client is built on.
HTTPError: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
# What a failed call raises. hf_xet, which carries large files, has no type of its own for most; a
# gateway that is down answers with a page where the client expects JSON.
_FAILURES = (
    HTTPError, ConnectionError, TimeoutError, PermissionError, RuntimeError, JSONDecodeError,
)  # fmt: skip

WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before each further try
_TRANSIENT = {408, 409, 412, 429, 500, 502, 503, 504}  # HTTP: busy, in conflict, or broken
_TOKENS = "https://huggingface.co/settings/tokens"

Result = TypeVar("Result")


class HubError(InputError):
    """The Hub refuses, fails or cannot be reached; the message is one line with the way on."""


def check_repository_name(name: str) -> None:
    """Refuse what can be no repository's name, without asking the Hub.

    Raises:
        InputError: if the Hub would not take the name.
    """
    try:
        validate_repo_id(name)
    except errors.HFValidationError as error:
        raise InputError(
            f"{name!r} is no repository name: write NAME or USER/NAME, with letters, "
            "digits, '-', '_' and '.' only"
        ) from error


def open_repository(name: str, private: bool = False) -> str:
    """Make the repository, or make sure that an existing one can be written to.

    Call it before any work is done: it finds out whether the work can be delivered.

    Args:
        name: `NAME`, which goes to the token's owner, or `USER/NAME`.
        private: make it so that only its owner sees it.

    Returns:
        The full name, `USER/NAME`.

    Raises:
        HubError: without a token, or if the Hub does not take it, or if the repository cannot be
            written to, or if it is public and `private` was asked for.
    """
    if get_token() is None:
        raise HubError(
            f"no Hub token: make one with write permission at {_TOKENS}, then type "
            "`hf auth login` or set HF_TOKEN"
        )
    api = HfApi()
    user = _patiently(api.whoami, "this token's owner")["name"]
    repository = name if "/" in name else f"{user}/{name}"
    _patiently(
        lambda: api.create_repo(repository, private=private or None, exist_ok=True), repository
    )
    # create_repo is content with a repository that exists but cannot be written to.
    _patiently(lambda: api.auth_check(repository, write=True), repository)
    if private and not _patiently(lambda: api.repo_info(repository), repository).private:
        raise HubError(
            f"{repository} exists already and is public, which --private does not change: make it "
            "private in its settings on the Hub, or give another name"
        )
    return repository


def push_folder(
    folder: Path,
    repository: str,
    message: str,
    leave_out: Sequence[str] = (),
    path_in_repo: str | None = None,
) -> str:
    """Bring all files of a folder to a repository; files there that are not here stay.

    Args:
        leave_out: patterns of file names that are not sent.
        path_in_repo: the folder there; its top if None.

    Returns:
        The address of the commit.

    Raises:
        HubError: if the Hub refuses, or still fails after several tries. The folder is untouched.
    """

    def upload() -> str:
        # `upload_folder` skips what the Hub has, file by file, and with hf_xet block by block.
        # (`upload_large_folder` is gone from the client; this took its place.)
        info = HfApi().upload_folder(
            repo_id=repository,
            folder_path=folder,
            path_in_repo=path_in_repo,
            commit_message=message,
            ignore_patterns=list(leave_out),  # the client appends to the list that it is given
        )
        return str(info.commit_url)

    return _patiently(upload, repository)


def _patiently(call: Callable[[], Result], what: str) -> Result:
    """Call again after failures that may pass; say the last one in one line."""
    for wait in (*WAITS, None):
        try:
            return call()
        except errors.OfflineModeIsEnabled as error:
            raise HubError("HF_HUB_OFFLINE is set: unset it to push") from error
        except _FAILURES as error:
            cause = _http_cause(error)
            if wait is None or not _may_pass(cause):
                raise HubError(_explain(cause, what)) from error
            time.sleep(wait)
    raise AssertionError("unreachable: the last try returns or raises")


def _http_cause(error: Exception) -> Exception:
    """The client wraps a failed transfer of a large file into a RuntimeError."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HTTPError):
        cause = cause.__cause__
    return cause if isinstance(cause, Exception) else error


def _status(error: Exception) -> int | None:
    return error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None


def _may_pass(error: Exception) -> bool:
    status = _status(error)
    if status is None:  # no answer at all, or none that the client could read
        return not isinstance(error, PermissionError)
    return status in _TRANSIENT


def _explain(error: Exception, what: str) -> str:
    status = _status(error)
    if isinstance(error, RuntimeError | PermissionError) and status is None:
        return f"the upload to {what} failed: {' '.join(str(error).split())[:200]}"
    if status is None:
        return f"the connection to {HfApi().endpoint} broke off ({type(error).__name__})"
    if status == 401:
        return (
            f"the Hub does not accept the token (401): make one with write permission at {_TOKENS},"
            " then type `hf auth login` or set HF_TOKEN"
        )
    if status == 403:
        return (
            f"the token may not write to {what} (403): give another name, or a token with write "
            f"permission there ({_TOKENS})"
        )
    if status == 404:
        return f"the Hub has no {what} that this token may see (404)"
    reason = (getattr(error, "server_message", None) or type(error).__name__).splitlines()[0]
    return f"the Hub answers {status} for {what}: {reason}"
