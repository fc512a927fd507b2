"""Writers that are killed leave the old or the new version, and the next one clears up after them."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

import qcut
from tests.kills.harness import run
from tests.kills.writers import WRITERS

KILLS, SEED = 6, 1
PAUSE_S = 0.02
"""Of a writer with a fault, where a kill shows it: nearly all of its time, so that few kills are enough."""

pytest.importorskip("transformers")


def test_every_public_writer_is_killed() -> None:
    assert {name for name in qcut.__all__ if name.startswith("save")} <= WRITERS.keys()


@pytest.mark.parametrize("name", WRITERS)
def test_killed_writer_leaves_the_old_or_the_new(name: str) -> None:
    tally = run(WRITERS[name], KILLS, SEED)
    assert not tally.failures, "\n".join(tally.failures)
    assert sum(tally.counts.values()) == KILLS
    assert tally.writes, "every writer died before it had written once"


def test_writer_in_place_is_found() -> None:
    def write(folder: Path, i: int) -> None:
        (folder / "a").write_text(str(i))
        time.sleep(PAUSE_S)
        (folder / "b").write_text(str(i))

    def found(folder: Path) -> list[str]:
        return [(folder / part).read_text() for part in ("a", "b") if (folder / part).exists()]

    writer = replace(WRITERS["plan"], name="careless", write=write, found=found, version=lambda i: [str(i), str(i)])
    assert any("a mixture" in failure for number in range(10) for failure in run(writer, 1, SEED, number).failures)


def test_writer_that_never_clears_up_is_found() -> None:
    def write(folder: Path, i: int) -> None:
        new = folder / f"{i}-{os.getpid()}.tmp"
        new.write_text(str(i))
        time.sleep(PAUSE_S)
        new.replace(folder / "file")

    def found(folder: Path) -> str | None:
        return (folder / "file").read_text() if (folder / "file").exists() else None

    writer = replace(WRITERS["plan"], name="untidy", write=write, found=found, version=str)
    assert any(run(writer, 1, SEED, number).unfinished for number in range(10))
    leaves = "the next writer leaves"
    assert any(leaves in failure for number in range(10) for failure in run(writer, 1, SEED, number).failures)
