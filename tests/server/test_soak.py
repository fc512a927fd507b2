"""A short run of `tests.server.soak`: ``python -m tests.server.soak`` is the long one."""

from __future__ import annotations

from pathlib import Path

from qcut.text.tokenization import PROCESSES
from tests.server.serving import Process
from tests.server.soak import KINDS, TEXTS, soak


def test_nothing_is_lost_mixed_or_kept(tmp_path: Path) -> None:
    with Process(tmp_path / "log") as server:
        report = soak(server.port, server.process.pid, 4, 4, TEXTS[:5])
        server.process.terminate()
        assert server.ended() == 0
    assert not report.wrong, report.lines
    assert set(report.done) == set(KINDS)
    (files, threads), (last_files, last_threads) = report.counts
    assert last_files <= files + 1 + 2 * PROCESSES  # the tokenizer's processes, each with two pipes
    assert last_threads <= threads + 1
    assert "Traceback" not in server.log.read_text()
