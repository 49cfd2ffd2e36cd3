"""The Hub: without a network names are looked up in the local cache; failures are one line."""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants, errors, get_session, is_offline_mode
from huggingface_hub.utils._validators import validate_repo_id

from sologrpo.base.errors import InputError, first_line
from sologrpo.base.schema import looked_in, read_json
from sologrpo.base.text import one_line, shortened

# The base of the failures of whichever HTTP package the client is built on.
HTTPError: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
NEW_TOKEN = (
    "create one with write permission at https://huggingface.co/settings/tokens, then run "
    "`hf auth login` or set HF_TOKEN"
)


def check_hub(name: str) -> None:
    """Switch the libraries to their local cache if `name` needs the Hub and it does not answer.

    They would try every file of a model or data set six times, for a minute in all. It is asked
    once per process, through the client of `huggingface_hub`, which knows proxies and mirrors.

    Raises:
        InputError: if `name` is neither a local path nor has the form of a name on the Hub.
    """
    if Path(name).exists():
        return
    if not is_hub_name(name):
        raise InputError(f"there is no {name}{looked_in(name)}, and a name on the Hub is USER/NAME")
    unreachable()


def is_hub_name(name: str) -> bool:
    """Check whether a text has the form of a name on the Hub.

    >>> is_hub_name("Qwen/Qwen3-8B"), is_hub_name("./model"), is_hub_name("runs/x/merged")
    (True, False, False)
    """
    try:
        validate_repo_id(name)
    except errors.HFValidationError:
        return False
    return True


@cache
def unreachable() -> str:
    """Return why the Hub cannot be reached, and work offline from then on; "" if it answers."""
    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # of the HTTP client, which differs between versions
        problem = first_line(error)
    else:
        return ""
    constants.HF_HUB_OFFLINE = True  # read at every request
    if (datasets := sys.modules.get("datasets")) is not None:
        datasets.config.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries imported later, and other processes
    return f"{constants.ENDPOINT} cannot be reached ({problem})"


def why_not_found(name: str, error: BaseException) -> str:
    """Explain why a name gives no model or data set: where it was looked for.

    Raises:
        InputError: for a local folder with a file that is missing or damaged.
    """
    path = Path(name)
    if path.exists():
        for file in (path / "config.json", *sorted(path.glob("*.json"))):
            read_json(file, dict[str, Any])
        return _reason(error)
    here = f"there is no {name}{looked_in(name)}"
    if problem := unreachable():
        return f"{here}, it is not in the Hub's local cache, and {problem}"
    return f"{here}, and the Hub says: {_reason(error)}"


def _reason(error: BaseException) -> str:
    """Return what a library says; not the names of its variables, which tell a user nothing."""
    if isinstance(error, TypeError | LookupError | AttributeError):
        kind = type(error).__name__
        return f"its files are not those of a model that transformers can read ({kind})"
    return first_line(error)


def explain_failure(error: Exception, repository: str) -> str:
    """Explain in one line why the client of the Hub failed with a repository."""
    cause = error
    # The client wraps a failed transfer of a large file in a RuntimeError.
    if not isinstance(error, HTTPError) and isinstance(error.__cause__, HTTPError):
        cause = error.__cause__
    if isinstance(cause, errors.HfHubHTTPError):
        status = cause.response.status_code
        if status == 401:
            return f"the Hub does not accept the token (401): {NEW_TOKEN}"
        if status == 403:
            other = f"give another name, or {NEW_TOKEN}"
            return f"the token may not write to {repository} (403): {other}"
        return f"the Hub answers {status} for {repository}: {first_line(cause)}"
    if isinstance(cause, HTTPError | ConnectionError | TimeoutError):
        return f"the connection to {constants.ENDPOINT} broke off ({type(cause).__name__})"
    return f"the upload to {repository} failed: {shortened(one_line(str(cause)), 200)}"
