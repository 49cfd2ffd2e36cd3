"""Read files and values by a typed schema; every deviation is one `InputError` line.

A schema is a subclass of `Schema`, or another type that pydantic knows: `dict[str, Number]`, say.
Types are strict: `true` is not a number, `"5"` not an integer, and numbers are finite.
"""

import json
import os
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, TypeAdapter
from pydantic import ValidationError as Deviation

from sologrpo.base.errors import LIBRARY_ERRORS, InputError
from sologrpo.base.redact import redact
from sologrpo.base.text import one_line, shortened

T = TypeVar("T")
STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
SHOWN = 60  # characters of a wrong value in an error
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class Schema(BaseModel):
    """Describe a mapping; other keys are ignored, so that files of later versions can be read."""

    model_config = STRICT | ConfigDict(frozen=True)


def as_number(value: Any) -> Any:
    """Return the number that a text stands for; other values unchanged.

    In YAML 1.1, `1e-6` is a text, unlike `1.0e-6`.

    >>> as_number("1e-6"), as_number("fast"), as_number(True)
    (1e-06, 'fast', True)
    """
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def one_of(*names: str) -> AfterValidator:
    """Limit a text to these."""

    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"{shown(value)}; expected {', '.join(names[:-1])} or {names[-1]}")
        return value

    return AfterValidator(check)


Number = Annotated[float, BeforeValidator(as_number)]


def parse(schema: type[T], value: Any, where: str | Path) -> T:
    """Check a value of plain types against a schema; `where` is its origin, for the message.

    >>> parse(dict[str, int], {"seed": True}, "a.yaml")
    Traceback (most recent call last):
    sologrpo.base.errors.InputError: a.yaml: seed: True; expected a valid integer
    """
    try:
        checked: T = _adapter(schema).validate_python(value)  # type: ignore[arg-type]
    except Deviation as deviation:
        raise InputError(f"{where}: {_describe(deviation, value)}") from deviation
    except RecursionError as error:
        raise InputError(f"{where}: nested too deeply") from error
    return checked


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    is_model = isinstance(schema, type) and issubclass(schema, BaseModel)
    return TypeAdapter(schema, config=None if is_model else STRICT)  # a model has its own


def _describe(deviation: Deviation, value: Any) -> str:
    """Describe the first deviation, with all alternatives of a union."""
    first, *others = deviation.errors(include_url=False, include_context=False)
    key = _key(first, value)
    name = f"{'.'.join(map(str, key))}: " if key else ""
    if first["type"] == "missing":
        return f"{name}missing"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{name}unknown key"
    given = shown(redact(first["input"], str(key[-1]) if key else ""))
    if first["type"] == "value_error":
        problem: str = first["msg"].removeprefix("Value error, ")
        return name + problem.replace(shown(first["input"]), given)
    messages = [first["msg"], *(error["msg"] for error in others if _key(error, value) == key)]
    texts = dict.fromkeys(re.sub(r"^\w+ should (be|have) ", "", text) for text in messages)
    expected = " or ".join(texts)
    if first["type"] in ("model_type", "dataclass_type", "dict_type"):
        expected = "key: value pairs"
    return f"{name}{given}; expected {expected}"


def _key(error: Any, value: Any) -> list[int | str]:
    """Keep what leads into the value; pydantic adds the alternative of a union that it tried."""
    key: list[int | str] = []
    for part in error["loc"]:
        try:
            value = value[part]
        except (LookupError, TypeError):
            continue
        key.append(part)
    return [*key, error["loc"][-1]] if error["type"] == "missing" else key


def shown(value: Any) -> str:
    """Write a value for an error: on one line, with an ellipsis if it is long, and no escapes.

    >>> shown("a\\x1b[31m"), shown([1, None])
    ("'a\\\\x1b[31m'", '[1, None]')
    """
    try:
        text = repr(value)
    except ValueError:  # an integer of over 4,300 digits
        text = f"a {type(value).__name__}"
    return shortened(text, SHOWN)


@contextmanager
def advising(advice: str) -> Iterator[None]:
    """Add how to fix it to the errors of a block."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{error}: {advice}") from error


# -- files ---------------------------------------------------------------------------------------


def read_bytes(path: Path) -> bytes:
    """Read a regular file; an `InputError` says why it cannot be read."""
    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe might never end
        raise InputError(f"{path} is a folder or a device: give a regular file")
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"no file {path}{looked_in(path)}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {path}: {reason}") from error


def looked_in(path: str | Path) -> str:
    """Tell from which folder a relative path was looked for; empty for an absolute one."""
    return "" if os.path.isabs(path) else f" in {os.getcwd()}"


def read_text(path: Path) -> str:
    """Read a text file, not empty; UTF-8, with or without the mark that Windows puts first."""
    content = read_bytes(path)
    if not content.strip():
        raise InputError(f"{path} is empty")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text: byte {error.start} ({error.reason})"
        ) from error


def read_json(path: Path, schema: type[T]) -> T:
    """Read a JSON file; refuse a key that is named twice."""
    return parse(schema, parse_json(read_text(path), path), path)


def read_json_lines(path: Path, schema: type[T], unfinished: bool = False) -> list[T]:
    """Read a file with one JSON value a line; empty lines are left out.

    `unfinished` leaves out what follows the last line break: writing it was interrupted.
    """
    if unfinished:
        text = read_bytes(path).rpartition(b"\n")[0].decode("utf-8", "replace")
    else:
        text = read_text(path)
    rows = []
    # Not `splitlines`, which also breaks at characters that JSON may hold as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            rows.append(parse(schema, parse_json(line, where), where))
    return rows


def parse_json(text: str, where: str | Path) -> Any:
    """Parse JSON; refuse a key that is named twice, and deep nesting."""
    return _parsed(lambda: json.loads(text, object_pairs_hook=_unique), "JSON", where)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shown(key)} is there twice")
        found[key] = value
    return found


def read_yaml(path: Path, schema: type[T]) -> T:
    """Read a YAML file of plain types, without aliases; a key is text and named once."""
    text = read_text(path)
    # Of a text, PyYAML would quote lines in its errors, which may hold a secret.
    return parse(schema, _parsed(lambda: yaml.load(StringIO(text), _Loader), "YAML", path), path)


def _parsed(load: Callable[[], Any], language: str, where: str | Path) -> Any:
    try:
        return load()
    except RecursionError as error:
        raise InputError(f"{where}: nested too deeply") from error
    except (yaml.YAMLError, *LIBRARY_ERRORS) as error:
        problem = one_line(str(error).replace('in "<file>", ', ""))
        raise InputError(f"{where} is not valid {language}: {problem}") from error


class _Loader(yaml.SafeLoader):
    """Load plain types; refuse what would be lost or guessed, or would grow without bound."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()  # type: ignore[no-untyped-call]
            problem = f"alias *{event.anchor}: write the value out"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _error(f"the key {shown(key)} is not a text: put it in quotes", key_node)
            if key in seen:
                raise _error(f"the key {shown(key)} is there twice: keep one", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _error(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
