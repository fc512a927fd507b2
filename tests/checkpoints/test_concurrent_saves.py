"""Two processes save to one directory while a third one loads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.checkpoints.concurrent_saves import KINDS, run

ROUNDS = int(os.environ.get("QCUT_SAVE_ROUNDS", "20"))
"""200 rounds: ``python -m tests.checkpoints.concurrent_saves``."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_load_gives_one_whole_save(kind: str, tmp_path: Path) -> None:
    loads, saves = run(kind, tmp_path, ROUNDS)
    assert loads >= saves > 1
