"""Run hostile command lines.

python tests/hostile --count 200                 # drawn by today's date
python tests/hostile --seed 20261122 --case 17   # one of them again; its folder is kept
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[number]) for number in (1, 2)]
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

from cases import ROUND  # noqa: E402
from running import Range, seed_of_the_day, table  # noqa: E402
from server import Servers  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description="Run hostile command lines.")
    parser.add_argument("--seed", type=int, default=seed_of_the_day())
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--case", type=int)
    parser.add_argument("--only", help="COMMAND or KIND")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--controls", action="store_true", help="run what has to succeed")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="hostile-"))
    place = Range(scratch, Servers.start(scratch, options.workers), options.timeout)
    numbers = [options.case] if options.case is not None else [
        number for number in range(options.first, options.first + options.count)
        if options.only in (None, *ROUND[(number + options.seed * 80) % len(ROUND)])
    ]  # fmt: skip
    keep = options.case is not None
    results = []
    for result in (
        place.run_controls() if options.controls else place.run(options.seed, numbers, keep)
    ):
        results.append(result)
        if result.faults or keep:
            print(result, flush=True)
    if keep:
        print(results[0].case, results[0].ended.out, results[0].ended.err, sep="\n")
        print(f"folder: {scratch}")
    print(table(results))
    place.servers.close()


if __name__ == "__main__":
    main()
