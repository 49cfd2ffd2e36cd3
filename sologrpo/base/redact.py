"""Hide secrets in what others may see: files of a run, pages, trackers and error messages."""

import json
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# A key that names a secret; `eos_token` and others name parts of a vocabulary.
_NAME = (
    r"[\w-]{0,40}(?:(?:api|access|private)[_-]?key|secret|passw(?:or)?d|passphrase|credential"
    r"|authorization|bearer)[\w-]{0,40}|[\w-]{0,40}(?<!bos_|eos_|pad_|unk_|sep_|cls_)token"
)
_KEY = re.compile(_NAME, re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"""((["'])(?:{_NAME})\2:\s*|\b(?:{_NAME})=)(?:(["']).*?(?:\3|$)|[^\s,;&)}}\]]+)""",
    re.IGNORECASE,
)
# User and password of a URL, and texts with the form that a service gives its keys.
_SECRET = re.compile(
    r"(?<=://)[^/\s]*(?=@)|(?<=[Bb]earer )(?=\S{0,200}\d)\S{8,}|(?<![\w-])(?:"
    r"(?:hf_|gh[opsur]_|AKIA)[A-Za-z0-9]{16,}|(?:sk|xox[a-z])-(?=\S{0,200}\d)[\w-]{16,})"
)


def redact(value: Any, key: str = "") -> Any:
    """Replace the secrets in a value of plain types; the key may name one.

    >>> redact({"api_key": "x", "pad_token": "<pad>", "url": "http://me:pw@host"})
    {'api_key': '***', 'pad_token': '<pad>', 'url': 'http://***@host'}
    """
    if _KEY.fullmatch(key) and value and not isinstance(value, bool):
        return HIDDEN
    if isinstance(value, Mapping):
        return {name: redact(entry, str(name)) for name, entry in value.items()}
    if isinstance(value, list):
        return [redact(entry) for entry in value]
    if isinstance(value, str) and _SECRET.search(value):
        return _SECRET.sub(HIDDEN, value) if "://" in value else HIDDEN
    return value


def redact_text(text: str) -> str:
    """Replace the secrets in a message, also where it quotes a key and its value.

    >>> redact_text("{'api_key': 'x'} refused at http://me:pw@host?token=y")
    "{'api_key': '***'} refused at http://***@host?token=***"
    """
    return _ASSIGNED.sub(rf"\1\3{HIDDEN}\3", _SECRET.sub(HIDDEN, text))


def count_redacted(value: Any) -> int:
    """Count the values that `redact` has replaced."""
    texts = json.dumps(value, default=str)
    return len(re.findall(r'"(?:\*{3}|\w+://[^"\s]*\*{3}[^"\s]*)"', texts))
