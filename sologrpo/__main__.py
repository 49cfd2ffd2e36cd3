"""Run the command line: `python -m sologrpo train ...` is `sologrpo train ...`."""

from sologrpo.cli import main

main()
