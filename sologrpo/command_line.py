"""Parse command lines; every mistake is one line that names the option and what to write."""

import difflib
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from transformers.hf_argparser import HfArgumentParser

from sologrpo.base.errors import InputError


class Parser(HfArgumentParser):  # type: ignore[misc]
    """Parse options into dataclasses, without abbreviations.

    `renamed` says what to write instead of names that are known from elsewhere.
    """

    def __init__(
        self, *dataclasses: type, renamed: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        super().__init__(dataclasses, allow_abbrev=False, **options)
        self._renamed = renamed or {}

    def error(self, message: str) -> NoReturn:
        """Raise the one line, in place of argparse's usage and exit."""
        raise InputError(message)

    def check_keys(self, keys: Iterable[str]) -> None:
        """Refuse names that are not options, with the nearest one."""
        known = {action.dest for action in self._actions}
        for key in keys:
            name = key.replace("-", "_")
            if name in known or name.removeprefix("no_") in known:  # argparse adds --no_baseline
                continue
            if key in self._renamed:
                raise InputError(f"unknown key {key!r}: here it is {self._renamed[key]}")
            near = difflib.get_close_matches(key, known, n=1)
            hint = (
                f"; did you mean {near[0]!r}?" if near else "; see --help, or docs/configuration.md"
            )
            raise InputError(f"unknown key {key!r}{hint}")

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Parse as argparse does, once the names are known. All other methods call this one."""
        args = list(sys.argv[1:] if args is None else args)
        if empty := [arg for arg in args if re.fullmatch("--[^=]+=--", arg)]:  # argparse drops it
            raise InputError(f"{empty[0]}: '--' is not a value")
        self.check_keys(arg[2:].partition("=")[0] for arg in args if arg.startswith("--"))
        parsed: tuple[Namespace, list[str]] = super().parse_known_args(args, namespace)
        return parsed
