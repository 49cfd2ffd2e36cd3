"""The Hub: check that a repository can be written to, and upload a folder to it.

`huggingface_hub` retries failed transfers and skips files that the Hub already has, so an
interrupted push resumes when its command is given again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, errors, get_token

from sologrpo.base.errors import InputError
from sologrpo.base.hub import NEW_TOKEN, HTTPError, explain_failure, is_hub_name

# hf_xet, which transfers large files, raises RuntimeError for most failures; a gateway that is down
# answers with a page where the client expects JSON, which is a ValueError.
_FAILURES = (HTTPError, OSError, RuntimeError, ValueError)


class HubError(InputError):
    """The Hub refuses, fails or cannot be reached; the message is one line that names the fix."""


def check_repository_name(name: str) -> None:
    """Refuse a name (`NAME` or `USER/NAME`) that the Hub would not accept, without asking it."""
    if not is_hub_name(name):
        raise InputError(
            f"{name!r} is not a repository name: write NAME or USER/NAME, with letters, "
            "digits, '-', '_' and '.' only"
        )


def open_repository(name: str, private: bool = False) -> str:
    """Create the repository, or check that it can be written to; return its name, `USER/NAME`.

    Call it before any work is done. `NAME` alone belongs to the token's owner. A repository that is
    public already is refused if it should be private.
    """
    check_repository_name(name)
    if get_token() is None:
        raise HubError(f"no Hub token: {NEW_TOKEN}")
    api = HfApi()
    with _one_line_failures(name):
        repository = name if "/" in name else f"{api.whoami()['name']}/{name}"
    with _one_line_failures(repository):
        api.create_repo(repository, private=private or None, exist_ok=True)
        # create_repo accepts an existing repository that cannot be written to.
        api.auth_check(repository, write=True)
        is_public = private and not api.repo_info(repository).private
    if is_public:
        raise HubError(
            f"{repository} exists already and is public, which --private does not change: make it "
            "private in its settings on the Hub, or give another name"
        )
    return repository


def push_folder(
    folder: Path,
    repository: str,
    message: str,
    ignore: Sequence[str] = (),
    path_in_repo: str | None = None,
) -> str:
    """Upload a folder; other files in the repository stay. Return the URL of the commit."""
    with _one_line_failures(repository):
        info = HfApi().upload_folder(
            repo_id=repository,
            folder_path=folder,
            path_in_repo=path_in_repo,
            commit_message=message,
            ignore_patterns=list(ignore),  # the client appends to the list that it is given
        )
    return str(info.commit_url)


@contextmanager
def _one_line_failures(repository: str) -> Iterator[None]:
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise HubError("HF_HUB_OFFLINE is set: unset it to push") from error
    except _FAILURES as error:
        raise HubError(explain_failure(error, repository)) from error
