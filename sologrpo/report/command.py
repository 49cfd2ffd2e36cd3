"""Write the report of a run, or serve it: `sologrpo report`.

sologrpo report runs/x                 # runs/x/report.html
sologrpo report --follow runs/x        # served while it trains
"""

from argparse import HelpFormatter
from collections.abc import Sequence
from pathlib import Path

from sologrpo.base.errors import InputError, one_line_errors, printable
from sologrpo.report.follow import follow
from sologrpo.report.reading import read_run
from sologrpo.report.report import write_page, write_report


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Write the report of a run directory, or serve it."""
    from sologrpo.command_line import Parser  # loads transformers, which reports do without

    parser = Parser(
        prog="sologrpo report",
        description="Write report.html into a run directory; with --follow, serve the page while "
        "the run trains.",
        formatter_class=HelpFormatter,  # without "(default: None)"
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, such as runs/x")
    parser.add_argument(
        "--output", type=Path, metavar="FILE",
        help="write the page to this file (default: report.html in the run directory)",
    )  # fmt: skip
    parser.add_argument(
        "--follow", action="store_true",
        help="serve the page on this machine, and keep it up to date",
    )  # fmt: skip
    parser.add_argument(
        "--port", type=int, metavar="N", help="of --follow (default: the first free from 8765)"
    )
    arguments = parser.parse_args(argv)
    if arguments.port is not None and not arguments.follow:
        raise InputError("--port is for --follow")
    if arguments.follow and arguments.output:
        raise InputError("--follow serves the page, and writes none: leave --output out")
    if arguments.follow:
        follow(arguments.run_dir, arguments.port)
    elif arguments.output:
        print(printable(str(write_page(read_run(arguments.run_dir), arguments.output))))
    else:
        print(printable(str(write_report(arguments.run_dir))))
