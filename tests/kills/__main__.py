"""Kills every writer of qcut at random moments, and prints what was left.

python -m tests.kills --kills 100
python -m tests.kills --kills 1000 --writer plan --seed 7
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from tests.kills.harness import Tally, run
from tests.kills.writers import WRITERS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="of each writer")
    parser.add_argument("--writer", action="append", choices=[*WRITERS], help="several times for several; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first kill")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # processes fork, and threads do not go with them
    tallies: dict[str, Tally] = {}
    begin = time.monotonic()
    width = max(map(len, WRITERS))
    print(f"{'writer':<{width}}  kills  writes finished  old  new  left something  failures")
    for name in arguments.writer or WRITERS:
        tally = tallies[name] = run(WRITERS[name], arguments.kills, arguments.seed, arguments.first)
        cells = (arguments.kills, tally.writes, tally.counts["old"], tally.counts["new"], tally.unfinished)
        widths = (5, 15, 3, 3, 14)
        numbers = "  ".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True))
        print(f"{name:<{width}}  {numbers}  {len(tally.failures):>8}", flush=True)
    print(f"seed {arguments.seed}, {time.monotonic() - begin:.0f} s")
    for tally in tallies.values():
        for failure in tally.failures[:3]:
            print(f"\n{failure}")
    return int(any(tally.failures for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
