"""Finds the fastest tile of a family for a GEMM, on the real GPU.

Candidates are the family's legal tiles. A model of occupancy and waves picks the tiles worth a build; registers and
spills of the binaries pick the tiles worth a launch; a check against exact sums picks the tiles to time. The few
fastest tiles are then timed once more, together, with every tile walk. Each measurement is in the journal before
the next starts.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch

from qcut.common.progress import progress_bar, with_progress
from qcut.dispatch.cost_model import estimate, occupancy
from qcut.dispatch.gemm import Choice, emit, problem_of
from qcut.dispatch.gpus import Target
from qcut.dispatch.tables import Row
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import CUTLASS_FAMILIES, W8A16_CUTLASS, family
from qcut.emitters.gemm.problem import GemmProblem
from qcut.errors import BuildError, DeviceError
from qcut.jit import Binary, build_many
from qcut.jit.build import fingerprint
from qcut.tuning import timing
from qcut.tuning.journal import Journal

KEEP_WITHIN = 2.0
"""Tiles are built if the model expects at most this many times the cycles of the best tile."""
DEFAULT_LIMIT = 48
"""Most tiles built for one GEMM and one family."""
SAMPLED = 0.25
"""Share of the limit that is drawn at random from tiles that the model ranks lower, since the model may be wrong."""
PER_SHAPE = 3
"""Most tiles, of those the model ranks first, with the same CTA and warp tiles, which the model ranks about equal."""
BATCH = 8
"""Number of variants that take turns and go to the journal together."""
FINALISTS = 4
SCREEN_ROUNDS, FINAL_ROUNDS = 4, 7
GRAPH_US = 300.0
WALKS = tuple((swizzle, raster) for raster in (1, 2) for swizzle in (1, 2, 4, 8))
PLAIN_WALK = (1, 0)
_HALVES = Epilogue(DType.F16, "per_token", "per_channel", bias=True, halves=True)


@dataclass(frozen=True)
class Task:
    """One GEMM to find a tile of one family for; the fields are those of `qcut.dispatch.tables.Row`.

    Of the class ``halves``, tokens are int16, and A has the rows of their halves.
    """

    family: str
    out: str
    layouts: str
    m: int
    n: int
    k: int

    @property
    def problem(self) -> GemmProblem:
        """The GEMM with the whole dequantization fused, which published figures are measured on."""
        if self.family != W8A16_CUTLASS.name:
            if self.out == "halves":
                return problem_of(self.m, self.n, self.k, layouts=self.layouts, epilogue=_HALVES)
            return problem_of(self.m, self.n, self.k, layouts=self.layouts, out=self.out)
        # CUTLASS asks for whole 16 bytes of int8, too, and has only these layouts: no tile serves what is unaligned.
        serves = self.k % 16 == 0 and self.layouts == "tnt" and self.out != "halves"
        out = "f16" if self.out == "halves" else self.out
        return replace(problem_of(self.m, self.n, self.k, out=out, tokens="f16"), alignment_k=8 if serves else 1)

    @property
    def rows(self) -> int:
        """Rows of A."""
        return self.problem.epilogue.rows(self.m)

    @property
    def name(self) -> str:
        """Name of the task, for messages and for keys of the journal."""
        return f"{self.family} {self.m}x{self.n}x{self.k} {self.layouts} {self.out}"


class Bench(Protocol):
    """Runs kernels; tests have a bench that needs no GPU."""

    target: Target
    clock: timing.Clock

    def variant(self, task: Task, name: str, choice: Choice, source: KernelSource, binary: Binary) -> timing.Variant:
        """A kernel on a task's operands, its check included. Raises LaunchError if it cannot be loaded."""

    def is_alive(self) -> bool:
        """Whether the device still answers; a kernel that fails may destroy the CUDA context."""


@dataclass(frozen=True)
class Result:
    """The result of tuning a task.

    Attributes:
        task: the task.
        row: the fastest kernel; None if nothing could be timed.
        complete: False if time ran out before everything was measured.
        tiles: number of candidates.
        measured: number of measurements in this run; other measurements came from the journal.
        left_out: by tile name, the reason why a candidate was not timed.
        wrong: names of tiles with a wrong result.
    """

    task: Task
    row: Row | None
    complete: bool
    tiles: int
    measured: int
    left_out: Mapping[str, str]
    wrong: tuple[str, ...]


class _OutOfTime(Exception):
    pass


# ── candidates ───────────────────────────────────────────────────────────────────────────────────


@cache
def _space(family_name: str, problem: GemmProblem, arch: str) -> tuple[Any, ...]:
    searched = family(family_name)
    # The menu is searched too, so that a tuned choice is never slower than an untuned one.
    return tuple(dict.fromkeys([*searched.search_space(problem, arch), *searched.menu(problem, arch)]))


def candidates(task: Task, target: Target, limit: int = DEFAULT_LIMIT) -> list[Any]:
    """The tiles worth a build, in the model's order.

    These are all tiles within `KEEP_WITHIN` of the best. If they are more than ``limit``, three quarters of the limit
    are the tiles that the model ranks first, at most `PER_SHAPE` of the same CTA and warp tiles, and the rest is a
    random sample of the others, the same in every run.
    """
    if task.out == "halves" and task.layouts != "tnt":
        return []
    problem = task.problem

    def cycles(tile: Any) -> float:
        return estimate(task.family, problem, tile, task.rows, task.n, task.k, target).cycles

    ranked = sorted(((cycles(tile), i, tile) for i, tile in enumerate(_space(task.family, problem, target.arch))))
    kept = [tile for cost, _, tile in ranked if cost <= KEEP_WITHIN * ranked[0][0]]
    if len(kept) <= limit:
        return kept
    sure = _varied(kept, limit - int(limit * SAMPLED))
    rest = [tile for tile in kept if tile not in sure]
    drawn = set(random.Random(task.name).sample(range(len(rest)), limit - len(sure)))
    return [*sure, *(tile for i, tile in enumerate(rest) if i in drawn)]


def _varied(ranked: Sequence[Any], count: int) -> dict[Any, None]:
    """The first tiles, without those that have CTA and warp tiles taken `PER_SHAPE` times already."""
    taken: Counter[Any] = Counter()
    varied: dict[Any, None] = {}
    for tile in ranked:
        warp = tile.warp_shape if hasattr(tile, "warp_shape") else (tile.wm, tile.wn)
        shape = (*tile.threadblock_shape[:2], *warp[:2])
        if len(varied) < count and taken[shape] < PER_SHAPE:
            taken[shape] += 1
            varied[tile] = None
    return varied


def unfit(binary: Binary, source: KernelSource) -> str:
    """The reason not to launch a binary: spills, local memory, or more resources than an SM has; empty if none."""
    resources = binary.resources
    if resources is None:
        return ""
    if spilled := resources.spill_store_bytes + resources.spill_load_bytes:
        return f"spills {spilled} bytes a thread"
    if resources.stack_bytes:
        return f"{resources.stack_bytes} bytes of local memory a thread"
    # Block and shared memory of a kernel with a host launcher are known only after loading.
    if source.block and not occupancy(
        source.arch, source.block, resources.registers, resources.smem_bytes + source.smem_bytes
    ):
        return (
            f"{source.block} threads of {resources.registers} registers and {source.smem_bytes} bytes do not fit an SM"
        )
    return ""


# ── search ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Trial:
    """One thing to time."""

    tile: Any
    source: KernelSource
    walk: tuple[int, int]
    final: bool
    key: str

    @property
    def name(self) -> str:
        return f"{self.tile.name} swizzle {self.walk[0]} raster {self.walk[1]}"


Builder = Callable[..., Mapping[str, "Binary | BuildError"]]


class _Search:
    """One task's search; all its state is in the journal."""

    def __init__(
        self,
        task: Task,
        bench: Bench,
        journal: Journal,
        *,
        limit: int,
        jobs: int | None,
        progress: bool,
        build: Builder,
        is_late: Callable[[], bool],
        report: Callable[[str], None],
    ) -> None:
        self.task, self._bench, self._journal = task, bench, journal
        self._jobs, self._progress, self._build = jobs, progress, build
        self._is_late, self._report = is_late, report
        arch = bench.target.arch
        tiles = candidates(task, bench.target, limit)
        self._sources = {tile: emit(Choice(task.family, tile), task.problem, arch) for tile in tiles}
        self._digests = {tile: fingerprint(source)[:32] for tile, source in self._sources.items()}
        self.measured = 0
        self.left_out: dict[str, str] = {}
        self.wrong: list[str] = []

    def run(self) -> Result:
        complete = True
        finals: dict[_Trial, float] = {}
        first = [self._trial(tile, PLAIN_WALK, False) for tile in self._sources]
        try:
            self._measure(first, SCREEN_ROUNDS)
            best = sorted(self._times(first).items(), key=lambda item: item[1])[:FINALISTS]
            last = [self._trial(t.tile, walk, True) for t, _ in best for walk in self._walks(t.tile)]
            self._measure(last, FINAL_ROUNDS)
            finals = self._times(last)
        except _OutOfTime:
            complete = False
        times = finals or self._times(first)
        row = None
        if times:
            trial = min(times, key=lambda t: times[t])
            t, (swizzle, raster) = self.task, trial.walk
            row = Row(t.family, t.out, t.layouts, t.m, t.n, t.k, trial.tile, times[trial], swizzle, raster)
        tiles = len(self._sources)
        return Result(self.task, row, complete, tiles, self.measured, self.left_out, tuple(self.wrong))

    def _trial(self, tile: Any, walk: tuple[int, int], final: bool) -> _Trial:
        phase = "final" if final else "screen"
        key = f"{self._digests[tile]} {self.task.name} {walk[0]},{walk[1]} {phase}"
        return _Trial(tile, self._sources[tile], walk, final, key)

    def _walks(self, tile: Any) -> Sequence[tuple[int, int]]:
        walks = self.task.family in CUTLASS_FAMILIES and tile.schedule != "multistage"
        return (PLAIN_WALK, *WALKS) if walks else (PLAIN_WALK,)

    def _times(self, trials: Iterable[_Trial]) -> dict[_Trial, float]:
        """Times in µs of the trials that the journal has times for; notes the reasons why others were left out."""
        times = {}
        for trial in trials:
            fact = self._journal.get(trial.key)
            if fact is None:
                continue
            if "us" in fact:
                times[trial] = float(fact["us"])
                continue
            self.left_out[trial.tile.name] = fact["left_out"]
            if fact.get("wrong") and trial.tile.name not in self.wrong:
                self.wrong.append(trial.tile.name)
        return times

    def _measure(self, trials: Sequence[_Trial], rounds: int) -> None:
        """Time the trials that the journal does not hold."""
        missing = [trial for trial in trials if self._journal.get(trial.key) is None]
        if not missing:
            return
        self._stop_if_late()
        built = self._build([t.source for t in missing], jobs=self._jobs, progress=self._progress)
        ready = [trial for trial in missing if self._is_fit(trial, built[trial.source.name])]
        with progress_bar(len(ready), self.task.name, "kernel", shown=self._progress) as advance:
            for start in range(0, len(ready), BATCH):
                self._stop_if_late()
                batch = ready[start : start + BATCH]
                self._time(batch, built, rounds)
                advance(len(batch))

    def _stop_if_late(self) -> None:
        if self._is_late():
            raise _OutOfTime

    def _is_fit(self, trial: _Trial, binary: Binary | BuildError) -> bool:
        if isinstance(binary, BuildError):
            self._leave_out(trial, f"does not compile: {str(binary).splitlines()[0]}")
            return False
        if reason := unfit(binary, trial.source):
            self._leave_out(trial, reason)
            return False
        return True

    def _leave_out(self, trial: _Trial, reason: str, *, wrong: bool = False) -> None:
        self._journal.add(trial.key, kernel=trial.source.name, left_out=reason, wrong=wrong)

    def _time(self, batch: Sequence[_Trial], built: Mapping[str, Binary | BuildError], rounds: int) -> None:
        good: dict[str, tuple[_Trial, timing.Variant]] = {}
        for trial in batch:
            variant = self._checked(trial, built[trial.source.name])
            if variant is not None:
                good[trial.name] = trial, variant
        variants = [variant for _, variant in good.values()]
        try:
            clock, say = self._bench.clock, self._report
            times = timing.measure(variants, clock, rounds=rounds, min_rounds=rounds, target_us=GRAPH_US, report=say)
        except RuntimeError as error:
            names = ", ".join(good)
            raise DeviceError(f"{self.task.name}: timing {names} failed: {str(error).splitlines()[0]}") from error
        for name, took in times.items():
            trial = good[name][0]
            facts = {"us": took.median_us, "p20_us": took.p20_us, "p80_us": took.p80_us, "samples": took.samples}
            self._journal.add(trial.key, kernel=trial.source.name, **facts)
        self.measured += len(times)

    def _checked(self, trial: _Trial, binary: Binary | BuildError) -> timing.Variant | None:
        """The variant of a trial if its result is right, else None, with the reason in the journal."""
        assert isinstance(binary, Binary)
        swizzle, raster = trial.walk
        choice = Choice(self.task.family, trial.tile, swizzle, raster, reason="tuner")
        try:
            variant = self._bench.variant(self.task, trial.name, choice, trial.source, binary)
            if variant.check is not None:
                variant.check()
        except timing.CheckError as error:
            self._report(f"WRONG {trial.source.name}: {error}")
            self._leave_out(trial, f"wrong: {error}", wrong=True)
            return None
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"{self.task.name}: its operands do not fit the GPU's memory") from error
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            self._leave_out(trial, f"failed: {reason}", wrong=True)
            if not self._bench.is_alive():
                raise DeviceError(
                    f"{trial.source.name} took the GPU's context along ({reason}); the same command again goes on "
                    "without this kernel"
                ) from error
            self._report(f"FAILED {trial.source.name}: {reason}")
            return None
        return variant


def tune(
    tasks: Sequence[Task],
    bench: Bench,
    journal: Journal,
    *,
    limit: int = DEFAULT_LIMIT,
    deadline: float = math.inf,
    jobs: int | None = None,
    progress: bool = False,
    build: Builder = build_many,
    now: Callable[[], float] = time.monotonic,
    report: Callable[[str], None] = print,
    done: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Find the fastest tile for each task.

    Args:
        tasks: worked off in order.
        bench: the GPU and its clock.
        journal: holds earlier measurements, and takes new ones.
        limit: tiles built for a task; see `candidates`.
        deadline: time on the clock ``now`` after which no measurement starts.
        jobs: compilers at a time.
        progress: show bars on stderr.
        build: makes binaries of sources, as `qcut.jit.build_many`.
        now: the host's clock.
        report: called with each wrong kernel.
        done: called with each result as soon as it is known.

    Returns:
        One result per task that was begun.

    Raises:
        DeviceError: a kernel left the GPU unusable. The journal holds the kernel, and the next run leaves it out.
        ToolchainError: the family's compiler is missing.
    """
    results = []
    for task in with_progress(tasks, "tuning", "GEMM", shown=progress):
        if now() > deadline:
            break
        search = _Search(
            task,
            bench,
            journal,
            limit=limit,
            jobs=jobs,
            progress=progress,
            build=build,
            is_late=lambda: now() > deadline,
            report=report,
        )
        results.append(search.run())
        done(results[-1])
    return results
