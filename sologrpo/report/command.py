"""Write a report, compare runs, or serve the page of a run: `sologrpo report`.

sologrpo report runs/x                 # runs/x/report.html
sologrpo report runs/x runs/y runs/z   # runs/comparison.html
sologrpo report --follow runs/x        # served while it trains
"""

from argparse import HelpFormatter
from collections.abc import Sequence
from pathlib import Path

from sologrpo.errors import InputError, one_line_errors, printable
from sologrpo.report.follow import follow
from sologrpo.report.report import write_comparison, write_report


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Write the report of one run directory, or the comparison of several.

    Args:
        argv: the arguments after `sologrpo report`; by default those of the process.
    """
    from sologrpo.command_line import Parser  # loads transformers, which reports do without

    parser = Parser(
        prog="sologrpo report",
        description="Write report.html into a run directory, or one page that compares several; "
        "with --follow, serve the page of a run while it trains.",
        formatter_class=HelpFormatter,  # without "(default: None)"
    )
    parser.add_argument(
        "run_dirs", nargs="+", type=Path, metavar="RUN", help="a run directory, such as runs/x"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE",
        help="page of several runs (default: comparison.html next to the first)",
    )  # fmt: skip
    parser.add_argument(
        "--follow", action="store_true",
        help="serve the page of one run on this machine, and keep it up to date",
    )  # fmt: skip
    parser.add_argument(
        "--port", type=int, metavar="N", help="of --follow (default: the first free from 8765)"
    )
    arguments = parser.parse_args(argv)
    if arguments.port is not None and not arguments.follow:
        raise InputError("--port is for --follow")
    if arguments.follow:
        if len(arguments.run_dirs) > 1 or arguments.output:
            raise InputError("--follow serves the page of one run, and writes none")
        follow(arguments.run_dirs[0], arguments.port)
    elif len(arguments.run_dirs) > 1:
        print(printable(str(write_comparison(arguments.run_dirs, arguments.output))))
    elif arguments.output:
        raise InputError("--output is for several runs; the page of one is its report.html")
    else:
        print(printable(str(write_report(arguments.run_dirs[0]))))
