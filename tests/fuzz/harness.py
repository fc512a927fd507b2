"""Runs cases: breaks a file, has qcut read the folder, and judges what came of it, in a process of its own."""

from __future__ import annotations

import collections
import contextlib
import gc
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from qcut.errors import QcutError
from tests.fuzz import readers
from tests.fuzz.formats import FORMATS, Format, Read
from tests.fuzz.mutations import Mutation, mutate
from tests.support.files import scratch

TIME_LIMIT_S = 10.0
"""For one case: the largest files take some milliseconds."""
STUCK_S = 40.0
"""A process that has not heeded `TIME_LIMIT_S` after this long is in a call that cannot be interrupted."""
MEMORY_CONSTANT = 64 << 20
"""What a case may take in addition to twice the bytes of its folder."""
ADDRESS_SPACE = 1 << 30
"""More of it than at the start, a process gets none."""

GOOD = ("refused", "right", "as stated", "left out")
BAD = ("foreign", "unnamed", "wrong", "hang", "memory", "crash")
COLUMNS = (*GOOD, *BAD)
"""Outcomes.

- refused: an exception of qcut's own that names the file.
- right: what the unbroken file gives, bit by bit.
- as stated: other values, which are those of the broken file; only for formats without digests.
- left out: the reader said what it ignored, or made the thing anew, and all else is as the file states.
- foreign: an exception that is not qcut's. unnamed: one of qcut's that does not name the file.
- wrong: values that are neither.
- hang, memory, crash: beyond the limits above, or the process died.
"""


@dataclass(frozen=True)
class Outcome:
    """What came of one case."""

    format: str
    index: int
    what: str
    result: str
    message: str = ""
    seconds: float = 0.0
    memory: int = 0


@dataclass
class Tally:
    """Outcomes of a format's cases."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    memory: int = 0

    def add(self, outcome: Outcome) -> None:
        self.counts[outcome.result] += 1
        self.seconds, self.memory = max(self.seconds, outcome.seconds), max(self.memory, outcome.memory)
        if outcome.result in BAD:
            self.failures.append(outcome)

    @property
    def cases(self) -> int:
        return sum(self.counts.values())


class TimeLimit(BaseException):
    """Not an Exception: nothing that is tested shall catch it."""


class Bench:
    """A format's right files, and a place to break copies of them.

    Attributes:
        right: what the right files give.
    """

    def __init__(self, format: Format, seed: int, base: Path) -> None:
        self.format, self.seed = format, seed
        self.whole, self.folder = base / "whole", base / "case"
        self.whole.mkdir()
        # The random parts of names are the same each time, too.
        names = Random(seed)
        with _cache_at(self.whole), mock.patch("secrets.token_hex", lambda count: names.randbytes(count).hex()):
            format.build(self.whole)
        self.files = [
            (path.relative_to(self.whole), kind)
            for pattern, kind in format.kinds.items()
            for path in sorted(self.whole.glob(pattern))
            if path.is_file() and not path.is_symlink()
        ]
        assert self.files, f"{format.name}: nothing to break"
        self.right = self._read_whole()
        assert self._read_whole() == self.right, f"{format.name}: two readings differ"

    def _read_whole(self) -> Any:
        self._copy()
        with _cache_at(self.folder):
            found = self.format.read(self.folder)
            assert not found.ignored, f"{self.format.name}: the right file is not understood"
            if self.format.agrees is not None:
                assert self.format.agrees(self.folder, found.state), f"{self.format.name}: the readers disagree"
            if self.format.mend is not None:
                self.format.mend(self.folder)
        return found.state

    def _copy(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.whole, self.folder, symlinks=True)

    def break_file(self, index: int) -> tuple[str, Path]:
        """Lay the files out with one of them broken; returns what was done, and to which file."""
        rng = Random(f"{self.format.name} {self.seed} {index}")
        name, kind = rng.choice(self.files)
        mutation: Mutation = mutate(rng, (self.whole / name).read_bytes(), kind)
        self._copy()
        mutation.apply(self.folder / name)
        return f"{name}: {mutation.what}", self.folder / name

    def run(self, index: int) -> Outcome:
        """Break a file, read the folder, judge."""
        what, path = self.break_file(index)
        budget = MEMORY_CONSTANT + 2 * sum(
            f.lstat().st_blocks * 512 for f in self.folder.rglob("*") if f.is_file() and not f.is_symlink()
        )
        gc.collect(0)
        before = _reset_peak()
        begin = time.perf_counter()
        result, message = self._judge()
        seconds = time.perf_counter() - begin
        memory = max(0, _peak() - before)
        if memory > budget and result in GOOD:
            result, message = "memory", f"{memory >> 20} MiB, allowed are {budget >> 20}"
        del path
        return Outcome(self.format.name, index, what, result, message, seconds, memory)

    def _judge(self) -> tuple[str, str]:
        folder, format = self.folder, self.format
        try:
            with _cache_at(folder), _time_limit():
                try:
                    found: Read = format.read(folder)
                except QcutError as error:
                    named = str(folder) in str(error) if format.folder_is_enough else f"{folder}/" in str(error)
                    return ("refused" if named else "unnamed"), f"{type(error).__name__}: {error}"[:2000]
                result = self._compare(found)
                if format.mend is not None and result in GOOD:
                    with contextlib.suppress(QcutError):
                        format.mend(folder)
                return result, ""
        except TimeLimit:
            return "hang", f"more than {TIME_LIMIT_S} s\n{traceback.format_exc()[-3000:]}"
        except MemoryError:
            return "memory", traceback.format_exc()[-3000:]
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return "foreign", traceback.format_exc()[-3000:]

    def _compare(self, found: Read) -> str:
        if found.state == self.right and not found.ignored:
            return "right"
        if self.format.agrees is None:
            return "right" if found.state == self.right else "wrong"
        if found.ignored and found.state == self.right:
            return "left out"
        try:
            agrees = self.format.agrees(self.folder, found.state)
        except (readers.Unreadable, ValueError, KeyError, TypeError, RecursionError, OSError):
            agrees = False
        return "wrong" if not agrees else "left out" if found.ignored else "as stated"


@contextlib.contextmanager
def _cache_at(folder: Path) -> Iterator[None]:
    before = os.environ.get("QCUT_CACHE_DIR")
    os.environ["QCUT_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["QCUT_CACHE_DIR"]
        else:
            os.environ["QCUT_CACHE_DIR"] = before


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeLimit

    old = signal.signal(signal.SIGALRM, stop)
    # Again and again, in case that something swallows the first one.
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def _status(field_name: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(f"{field_name}:"))


def _reset_peak() -> int:
    """Start a new high-water mark of resident memory; returns what is resident."""
    with contextlib.suppress(OSError):  # where it is not allowed, peaks below the highest one go unseen
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmHWM")


def _peak() -> int:
    return _status("VmHWM")


# ── processes ────────────────────────────────────────────────────────────────────────────────────


def run_here(format: str, seed: int, indices: Iterable[int]) -> Iterator[Outcome]:
    """Run cases in this process."""
    with scratch("qcut-fuzz-") as base:
        bench = Bench(FORMATS[format], seed, Path(base))
        for index in indices:
            yield bench.run(index)


def _quiet() -> None:
    """What libraries say of broken files is nobody's interest."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _child(connection: Connection, format: str, seed: int, indices: range) -> None:
    try:
        _quiet()
        limit = _status("VmSize") + ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with scratch("qcut-fuzz-") as base:
            bench = Bench(FORMATS[format], seed, Path(base))
            for index in indices:
                connection.send(bench.run(index))
    except BaseException:
        connection.send(traceback.format_exc())
    os._exit(0)


class _Worker:
    """A forked process that runs cases; another one goes on where a process dies or is stuck.

    Attributes:
        connection: readable when `advance` has something to do.
    """

    def __init__(self, format: str, seed: int, indices: range) -> None:
        self.format, self.seed, self.stop = format, seed, indices.stop
        self._start(indices.start)

    def _start(self, index: int) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe(duplex=False)
        self._next, self._heard = index, time.monotonic()
        self._process = context.Process(
            target=_child, args=(theirs, self.format, self.seed, range(index, self.stop)), daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def done(self) -> bool:
        return self._next >= self.stop

    @property
    def stuck(self) -> bool:
        return time.monotonic() - self._heard > STUCK_S

    def advance(self) -> Outcome:
        """The next outcome: the one that the process has sent, or that it died or is stuck."""
        try:
            if not self.connection.poll():
                outcome = self._ended("hang")
            else:
                message = self.connection.recv()
                if not isinstance(message, Outcome):
                    raise RuntimeError(f"the harness failed in format {self.format}:\n{message}")
                outcome = message
        except EOFError:
            outcome = self._ended("crash")
        self._next, self._heard = outcome.index + 1, time.monotonic()
        if self.done:
            self.end()
        elif outcome.result in ("hang", "crash") and not self._process.is_alive():
            self._start(self._next)
        return outcome

    def _ended(self, result: str) -> Outcome:
        self.end()
        message = f"the process ended with {self._process.exitcode}"
        return Outcome(self.format, self._next, "see the command", result, message)

    def end(self) -> None:
        """End the process."""
        if not self.done:
            self._process.kill()
        self._process.join()
        self.connection.close()


def run(batches: Iterable[tuple[str, range]], seed: int, jobs: int = 1) -> Iterator[Outcome]:
    """Run batches of cases, each in a forked process, several at a time.

    Args:
        batches: format and numbers of the cases.
        seed: of all cases.
        jobs: processes at a time.

    Raises:
        RuntimeError: the harness itself failed.
    """
    with contextlib.suppress(ImportError):  # before processes fork: the import takes seconds in each of them
        import transformers.models.llama.modeling_llama  # noqa: F401
    todo = iter(batches)
    workers: list[_Worker] = []
    try:
        while True:
            while len(workers) < jobs and (batch := next(todo, None)) is not None:
                workers.append(_Worker(batch[0], seed, batch[1]))
            if not workers:
                return
            ready = wait([worker.connection for worker in workers], timeout=1.0)
            for worker in [w for w in workers if w.connection in ready or w.stuck]:
                yield worker.advance()
            workers = [worker for worker in workers if not worker.done]
    finally:
        for worker in workers:
            worker.end()


def command(outcome: Outcome, seed: int) -> str:
    """The command that repeats one case."""
    return f"python -m tests.fuzz --format {outcome.format} --seed {seed} --case {outcome.index}"
