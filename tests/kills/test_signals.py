"""Commands that signals end take back what they have half written, and say so by their exit status."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import qcut
from qcut.cli.main import ENDING, main
from tests.fuzz.formats import build_huggingface, model_state
from tests.support import ROOT

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """Of tests that began in the background, or under nohup, the shell has had signals ignored."""
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    build_huggingface(found)
    assert quantize(found, tmp_path_factory.mktemp("warm") / "out") == 0  # the first command of a process takes longer
    return found


def quantize(folder: Path, out: Path, *more: str) -> int:
    return main(["quantize", str(folder), "--scheme", "w8a16", "--out", str(out), *more])


def _write_on(folder: Path, out: Path, begun: Any) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that all signals end the process between two commands
    begun.set()
    while not (status := quantize(folder, out, "--overwrite")):
        pass
    os._exit(status)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_leaves_the_old_or_new_folder(folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    begin = time.monotonic()
    assert quantize(folder, tmp_path / "first") == 0
    typical, draws = time.monotonic() - begin, Random(int(number))
    expected = model_state(qcut.load(tmp_path / "first", progress=False))
    # Of a process with one thread, as that of a command: locks that other threads hold at a fork stay taken.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.models.llama.modeling_llama"])
    for i in range(6):
        place = tmp_path / f"{i}"
        place.mkdir()
        begun = context.Event()
        child = context.Process(target=_write_on, args=(folder, place / "out", begun), daemon=True)
        child.start()
        assert begun.wait(60)
        time.sleep(draws.uniform(0.05, 2 * typical))
        os.kill(child.pid or 0, number)
        child.join(60)
        assert child.exitcode in (128 + number, -number)  # the latter between two commands
        left = [path.name for path in place.iterdir()]
        assert left in ([], ["out"])
        if left:
            assert model_state(qcut.load(place / "out", progress=False)) == expected


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_an_object_is_deleted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Python drops what is raised there."""

    class Deleted:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)

    def save(*_: object, **__: object) -> None:
        Deleted()
        time.sleep(30)

    monkeypatch.setattr(qcut, "save", save)
    begin, hook = time.monotonic(), sys.unraisablehook
    assert quantize(folder, tmp_path / "out") == 128 + number
    assert time.monotonic() - begin < 20
    assert sys.unraisablehook is hook
    assert not list(tmp_path.iterdir())


def test_a_signal_that_comes_while_another_is_dropped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the one that is sent again comes before Python has dropped the first."""

    class Deleted:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    class Timer(threading.Timer):
        begun = 0

        def start(self) -> None:
            Timer.begun += 1
            first = Timer.begun == 1
            super().start()
            if first:
                self.join()

    def save(*_: object, **__: object) -> None:
        Deleted()
        time.sleep(10)

    monkeypatch.setattr(qcut, "save", save)
    monkeypatch.setattr(threading, "Timer", Timer)
    assert quantize(folder, tmp_path / "out") == 128 + signal.SIGTERM
    assert Timer.begun == 2


def test_a_failure_by_a_signal_is_the_signal(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(*_: object, **__: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        finally:
            raise RuntimeError("half entered")

    monkeypatch.setattr(qcut, "save", save)
    assert quantize(folder, tmp_path / "out") == 143
    assert capsys.readouterr().err.endswith("qcut: terminated\n")


def test_signals_that_are_ignored_stay_ignored(folder: Path, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert quantize(folder, tmp_path / "out") == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_folder_that_made_room_comes_back(folder: Path, tmp_path: Path) -> None:
    assert quantize(folder, tmp_path / "out[1]") == 0
    (tmp_path / "out[1]").rename(tmp_path / ".out[1].01234567.old")  # its writer was killed between two renames
    assert quantize(folder, tmp_path / "out[1]") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out[1]"]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_waits_for_the_import_of_torch(tmp_path: Path, number: signal.Signals) -> None:
    """An exception in its C++ ends the process with SIGABRT."""
    lines = (
        "import os, time, types",
        "ops = types.SimpleNamespace(aten=types.ModuleType('aten'))",
        f"os.kill(os.getpid(), {int(number)})",
        "time.sleep(0.1)",
        "open('imported', 'w').close()",
        "def __getattr__(name): time.sleep(30)",
    )
    (tmp_path / "torch.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "qcut", "generate", "model"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (128 + number, f"qcut: {ENDING[number]}\n")
    assert (tmp_path / "imported").exists()
