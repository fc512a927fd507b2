"""Breaks files for as long as you like, and prints what came of it.

python -m tests.fuzz --seconds 300
python -m tests.fuzz --cases 10000 --format plan --seed 7
python -m tests.fuzz --format plan --seed 7 --case 123
python -m tests.fuzz --models 2000 --seed 0
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator

import torch

from tests.fuzz.formats import FORMATS
from tests.fuzz.harness import COLUMNS, GOOD, Tally, command, run, run_here
from tests.fuzz.models import run_models, text_of

BATCH = 500


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, help="begin no batch of cases after this long")
    parser.add_argument("--cases", type=int, help="of each format (1000 unless --seconds is given)")
    parser.add_argument("--format", action="append", choices=[*FORMATS], help="several times for several; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run one case in this process, and show its outcome and traceback")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--show", type=int, default=3, help="failures of each kind and format to print")
    parser.add_argument("--models", type=int, help="in place of files, quantize as many random models, from --seed on")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # processes fork, and threads do not go with them
    if arguments.models is not None:
        return _models(arguments.seed, arguments.models, arguments.show)
    names = arguments.format or [*FORMATS]
    if arguments.case is not None:
        return _one(names, arguments.seed, arguments.case)
    cases = arguments.cases or (1000 if arguments.seconds is None else 1 << 40)
    begin = time.monotonic()
    tallies = _all(names, arguments.seed, cases, arguments.seconds, arguments.jobs)
    _print(tallies, arguments.seed, time.monotonic() - begin, arguments.show)
    return int(any(tally.failures for tally in tallies.values()))


def _models(seed: int, cases: int, show: int) -> int:
    begin = time.monotonic()
    count, outcomes, failures = run_models(range(seed, seed + cases))
    for outcome in failures[:show]:
        print(f"\n{outcome.result}: model {outcome.seed}, {outcome.what}: {_end_of(outcome.message)}")
        print(text_of(outcome.seed))
    for (what, result), number in sorted(count.items()):
        print(f"{what:<9} {result:<9} {number:6}")
    layers, fused = sum(o.layers for o in outcomes), sum(o.fused for o in outcomes)
    seconds = time.monotonic() - begin
    print(f"{cases} models, {layers} layers, {fused} with activations, {seconds:.0f} s, {len(failures)} failures")
    return int(bool(failures))


def _one(names: list[str], seed: int, case: int) -> int:
    if len(names) != 1:
        sys.exit("--case needs one --format")
    (outcome,) = run_here(names[0], seed, [case])
    print(f"{outcome.what}\n{outcome.result}: {outcome.message}")
    print(f"{outcome.seconds * 1e3:.0f} ms, {outcome.memory / 2**20:.1f} MiB")
    return int(outcome.result not in GOOD)


def _all(names: list[str], seed: int, cases: int, seconds: float | None, jobs: int) -> dict[str, Tally]:
    """Batches of all formats in turn, so that time runs out for all at once."""
    begin = time.monotonic()

    def batches() -> Iterator[tuple[str, range]]:
        for at in range(0, cases, BATCH):
            for name in names:
                if seconds is not None and time.monotonic() - begin > seconds:
                    return
                yield name, range(at, min(at + BATCH, cases))

    tallies = {name: Tally() for name in names}
    for outcome in run(batches(), seed, jobs):
        tallies[outcome.format].add(outcome)
    return tallies


def _end_of(message: str) -> str:
    """The last lines of a traceback, or of anything as long."""
    return "\n  ".join(line[:300] for line in message.strip().splitlines()[-5:])


def _print(tallies: dict[str, Tally], seed: int, seconds: float, show: int) -> None:
    for tally in tallies.values():
        shown: dict[str, int] = {}
        for outcome in tally.failures:
            shown[outcome.result] = shown.get(outcome.result, 0) + 1
            if shown[outcome.result] <= show:
                print(f"\n{outcome.result}: {outcome.what}\n  {command(outcome, seed)}\n  {_end_of(outcome.message)}")
    width = max(map(len, tallies), default=0)
    heads = ("cases", *COLUMNS, "slowest ms", "peak MiB")
    print(f"\n{'format':<{width}}  " + "  ".join(heads))
    for name, tally in tallies.items():
        numbers = [tally.cases, *(tally.counts[column] for column in COLUMNS)]
        cells = [*map(str, numbers), f"{tally.seconds * 1e3:.0f}", f"{tally.memory / 2**20:.1f}"]
        print(f"{name:<{width}}  " + "  ".join(f"{cell:>{len(head)}}" for cell, head in zip(cells, heads, strict=True)))
    cases, failures = sum(t.cases for t in tallies.values()), sum(len(t.failures) for t in tallies.values())
    print(f"{cases} cases, seed {seed}, {seconds:.0f} s, {failures} failures")


if __name__ == "__main__":
    sys.exit(main())
