"""Kills a writer again and again, and looks at what it has left."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from qcut.errors import QcutError
from tests.kills.writers import VERSIONS, Writer
from tests.support.files import scratch

MOST_WRITES = 5
"""A writer is killed after as many finished writes at most, and thus often in its first one."""
LONGEST_S = 0.25
"""And no longer after that."""
LIMIT_S = 60.0


@dataclass
class Tally:
    """What the kills of one writer came to.

    Attributes:
        counts: by outcome: ``old`` is the last version whose write had returned, ``new`` the one in progress.
        unfinished: kills that left files behind which no reader reads.
        writes: how many writes had returned, all kills together.
        failures: what was found instead, and the command that shows it again.
    """

    counts: Counter[str] = field(default_factory=Counter)
    unfinished: int = 0
    writes: int = 0
    failures: list[str] = field(default_factory=list)


def run(writer: Writer, kills: int, seed: int, first: int = 0) -> Tally:
    """Kill a writer at seeded moments.

    Each time, a forked process writes one version after the other, and is killed with signal 9 a random time after a
    random number of them. Whatever was written when it died, a reader must find the last version that was finished, or
    the next one, whole. Then another process writes once more, and the folder must hold no file that a folder without
    kills does not.

    Args:
        writer: whom to kill.
        kills: how often.
        seed: of the moments.
        first: number of the first kill.
    """
    tally = Tally()
    with scratch("qcut-kills-") as base:
        whole, folder = Path(base) / "whole", Path(base) / "folder"
        whole.mkdir()
        typical = _typical_seconds(writer, whole)
        expected = writer.listing(whole)
        for number in range(first, first + kills):
            rng = Random(f"{writer.name} {seed} {number}")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            after, delay = rng.randint(0, MOST_WRITES), rng.uniform(0, min(LONGEST_S, 1.5 * typical))
            try:
                _kill(writer, folder, after, delay, expected, tally)
            except Exception:
                repeat = f"python -m tests.kills --writer '{writer.name}' --kills 1 --first {number} --seed {seed}"
                tally.failures.append(f"{repeat}\n{traceback.format_exc()}")
    return tally


def _typical_seconds(writer: Writer, folder: Path) -> float:
    """Write each version, so that libraries are loaded and models made before processes fork; time of a write."""
    seconds = []
    for i in range(1, 2 * VERSIONS + 1):
        begin = time.perf_counter()
        writer.write(folder, i)
        seconds.append(time.perf_counter() - begin)
    writer.end()
    assert writer.found(folder) == writer.version(2 * VERSIONS), f"{writer.name}: what is written is not what is read"
    assert writer.version(1) != writer.version(2) != writer.version(3)
    return min(seconds)


def _write_on(writer: Writer, folder: Path, done: Any, begun: Any) -> None:
    logging.disable(logging.CRITICAL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    begun.set()
    for i in count(1):
        writer.write(folder, i)
        done.value = i


def _write_once(writer: Writer, folder: Path, i: int) -> None:
    child = multiprocessing.get_context("fork").Process(target=writer.write, args=(folder, i))
    child.start()
    child.join(LIMIT_S)
    if child.exitcode is None:
        child.kill()
    assert child.exitcode == 0, f"the next writer ended with {child.exitcode}"


def _kill(writer: Writer, folder: Path, after: int, delay: float, expected: list[str], tally: Tally) -> None:
    context = multiprocessing.get_context("fork")
    done, begun = context.Value("l", 0, lock=False), context.Event()
    child = context.Process(target=_write_on, args=(writer, folder, done, begun), daemon=True)
    child.start()
    assert begun.wait(LIMIT_S), "the writer does not begin"
    end = time.monotonic() + LIMIT_S
    while done.value < after and child.is_alive() and time.monotonic() < end:
        time.sleep(0.0005)
    time.sleep(delay)
    child.kill()
    child.join(LIMIT_S)
    assert child.exitcode == -signal.SIGKILL, f"the writer ended by itself, with {child.exitcode}"

    n = int(done.value)
    tally.writes += n
    left = writer.listing(folder)
    tally.unfinished += any(name.endswith(".tmp") for name in left) or (not writer.counts_up and left != expected)
    try:
        found = writer.found(folder)
    except QcutError:
        if n:
            raise
        found = None  # There was nothing before the first write.
    if found == writer.version(n + 1):
        outcome = "new"
        n += 1
    elif found == writer.version(n) or (n == 0 and not found):
        outcome = "old"
    else:
        others = [i for i in range(1, n) if found == writer.version(i)]
        raise AssertionError(f"after {n} writes a reader finds {f'version {others[-1]}' if others else 'a mixture'}")

    _write_once(writer, folder, n + 1)
    assert writer.found(folder) == writer.version(n + 1), "a reader does not find what the next writer wrote"
    names = writer.listing(folder)
    # A folder without kills has the files of one version; where versions add up, of all, and no temporary ones.
    if not writer.counts_up:
        assert names == expected, f"the next writer leaves {names}, without kills there are {expected}"
    stray = [name for name in names if name.endswith(".tmp")]
    assert not stray, f"the next writer leaves {stray}"
    tally.counts[outcome] += 1
