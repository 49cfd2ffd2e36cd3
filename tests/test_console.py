"""Text from data and paths reaches the terminal as text."""

import io

import pytest
from rich.table import Table

from sologrpo.base.console import Terminal, print_line, print_warning

HOSTILE = {
    "colour": ("\x1b[31mred", r"\x1b[31mred"),
    "title of the window": ("\x1b]0;owned\x07", r"\x1b]0;owned"),
    "an earlier line": ("ok\rerror", "okerror"),
    "eight bits": ("\x9b2J", r"\x9b2J"),
    "reading direction": ("\u202eevil\u2066", r"\u202eevil\u2066"),
    "half a surrogate pair": ("\ud83d", r"\ud83d"),
    "markup": ("[red]a[/b] :smile:", "[red]a[/b] :smile:"),
}


@pytest.mark.parametrize(("text", "shown"), HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("colours", [False, True])
def test_what_data_holds_is_shown_and_not_obeyed(text: str, shown: str, colours: bool) -> None:
    written = io.StringIO()
    terminal = Terminal(file=written, width=120, force_terminal=colours, _environ={})
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    print_line(terminal, text)
    print_warning(terminal, text)
    terminal.print(table)
    terminal.print(f"report  {text}")
    printed = written.getvalue()
    assert printed.count(shown) == 6
    assert text in shown or text not in printed
