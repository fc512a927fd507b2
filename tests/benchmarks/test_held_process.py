"""Processes that get ready together, and go on one after another."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.engine.held_process import HeldProcess
from tests.support import ROOT

WORK = """
import json, sys
from benchmarks.engine.held_process import wait_for_turn
print("some warning"); print(json.dumps({"ready": 1}), flush=True)
wait_for_turn()
open(sys.argv[1], "a").write(sys.argv[2]); print(json.dumps({"done": sys.argv[2]}))
"""


def held(program: str, *args: object) -> HeldProcess:
    return HeldProcess([sys.executable, "-c", program, *map(str, args)], {**os.environ, "PYTHONPATH": str(ROOT)})


def test_processes_go_on_in_turn(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    with ExitStack() as started:
        processes = {name: started.enter_context(held(WORK, log, name)) for name in "abc"}
        for process in processes.values():
            process.wait_until_ready(60)
        assert log.read_text() == ""
        for name in "bca":
            with processes[name] as process:
                assert process.results(60) == [{"ready": 1}, {"done": name}]
        assert log.read_text() == "bca"


def test_a_process_that_ends_early_is_reported() -> None:
    with held("import sys; print('{\"a\": 1}'); sys.exit('no GPU')") as process:
        process.wait_until_ready(60)
        with pytest.raises(RuntimeError, match=r"status 1: \{\"a\": 1\}\s+no GPU"):
            process.results(60)


def test_what_a_late_process_has_started_is_ended(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    child = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with held(program) as process:
        while not mark.exists() or not mark.read_text():
            time.sleep(0.05)
        process.wait_until_ready(0.0)
        with pytest.raises(RuntimeError, match="no end in 0 s"):
            process.results(0.0)
    deadline = time.monotonic() + 30
    while _runs(int(mark.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(int(mark.read_text()))


def _runs(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
