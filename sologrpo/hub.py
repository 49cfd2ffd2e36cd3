"""Names on the Hub: without a network they are looked up in the local cache, at once."""

import os
import sys
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

from sologrpo.errors import InputError, first_line
from sologrpo.schema import looked_in, read_json

# Seconds that the Hub gets to answer once. A satellite link takes three for a name, a connection
# and an answer. HF_HUB_ETAG_TIMEOUT sets another limit. Downloads have their own.
ANSWER_TIME = 5.0


def check_hub(name: str) -> None:
    """Switch the libraries to their local cache if `name` needs the Hub and it does not answer.

    They would try every file of a model or data set six times, for a minute in all. It is asked
    once per process, through the client of `huggingface_hub`, which knows proxies and mirrors.

    Args:
        name: a name on the Hub, or a local path, for which there is nothing to do.

    Raises:
        InputError: if it is neither.
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
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


@cache
def unreachable() -> str:
    """Return why the Hub cannot be reached, and work offline from then on; "" if it answers."""
    from huggingface_hub import constants, get_session, is_offline_mode

    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    limit = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or ANSWER_TIME)
    problems = [f"no answer within {limit:g} s, HF_HUB_ETAG_TIMEOUT sets another limit"]

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=limit)
        except Exception as error:  # of the HTTP client, which differs between versions
            problems[0] = first_line(error)
        else:
            problems.clear()

    thread = Thread(target=ask, daemon=True)  # no time limit of the client covers the name server
    thread.start()
    thread.join(limit)
    if not problems:
        return ""
    constants.HF_HUB_OFFLINE = True  # read at every request
    if (datasets := sys.modules.get("datasets")) is not None:
        datasets.config.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries imported later, and other processes
    return f"{constants.ENDPOINT} cannot be reached ({problems[0]})"


def why_not_found(name: str, error: BaseException) -> str:
    """Explain why a name gives no model or data set: where it was looked for.

    Args:
        name: as the user wrote it.
        error: of the library.

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
