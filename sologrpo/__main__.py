"""Run the command line: `python -m sologrpo train ...` is `sologrpo train ...`.

`train.py` and `evaluate.py` start here too: one way for all processes of the project.
"""

from sologrpo.startup import prepare_allocator, start_process

# Before other imports: a restart costs nothing yet, and Ctrl-C ends in one line from here on.
prepare_allocator()
start_process()

from sologrpo.cli import main, start_script  # noqa: E402

__all__ = ["main", "start_script"]

if __name__ == "__main__":
    main()
