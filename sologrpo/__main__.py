"""Run the command line: `python -m sologrpo train ...` is `sologrpo train ...`."""

from sologrpo.startup import start_process

start_process()  # before other imports, so that Ctrl-C ends in one line from here on

from sologrpo.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
