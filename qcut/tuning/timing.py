"""Measures the device time of kernels, and describes the environment of a measurement.

A figure is a median over replays of one CUDA graph that holds many calls. The calls walk over copies of the
weights that together are larger than the L2, the L2 is flushed before each replay, and the variants of a shape
take turns, so that clock drift meets all of them alike.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from qcut.backends.cuda.launch.streams import collection_paused
from qcut.errors import QcutError

_ROOT = Path(__file__).resolve().parents[2]
ROTATE_BYTES = 256 << 20
"""Least size of all copies of a weight together, in bytes: over four times the L2 of an H200."""
MAX_COPIES = 256
MAX_CALLS = 400
TARGET_US = 2000.0
"""Duration of a graph to aim at, in µs, long enough that one launch and two events do not matter."""


class CheckError(QcutError):
    """A variant's result is wrong. The variant is reported and never timed."""


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over the samples of one variant."""

    median_us: float
    p20_us: float
    p80_us: float
    samples: int
    mode: str = "graph"

    @classmethod
    def of(cls, samples: Sequence[float], mode: str = "graph") -> Timing:
        """Median, 20th and 80th percentile (linear interpolation) of at least one sample."""
        ordered = sorted(samples)
        median, low, high = (percentile(ordered, q) for q in (0.5, 0.2, 0.8))
        return cls(median, low, high, len(ordered), mode)


def percentile(ordered: Sequence[float], q: float) -> float:
    """Quantile ``q`` of sorted values with linear interpolation between neighbours."""
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass
class Variant:
    """One way to compute a shape.

    Attributes:
        name: column name in tables and CSV.
        call: does the work once on operand copy ``i`` (``0 <= i < copies``).
        copies: how many operand sets ``call`` rotates over.
        check: raises `CheckError` if the result is wrong; run before any timing.
        graph: whether to time it in a CUDA graph; a whole model is timed as its user calls it.
    """

    name: str
    call: Callable[[int], object]
    copies: int = 1
    check: Callable[[], None] | None = None
    graph: bool = True


class Clock(Protocol):
    """Measures the time of a body of work; tests have a clock that needs no GPU."""

    def warm_up(self, body: Callable[[], object]) -> None:
        """Run ``body`` once, outside any measurement, and wait for it."""

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        """Record ``body`` and return a function that replays it; raise RuntimeError if this is impossible."""

    def time_us(self, replay: Callable[[], object]) -> float:
        """Device microseconds of one replay."""


class CudaClock:
    """Times CUDA graphs with events on a stream of its own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._flush = torch.empty(ROTATE_BYTES, dtype=torch.uint8, device="cuda")

    def warm_up(self, body: Callable[[], object]) -> None:
        """Run ``body`` once on the measuring stream: builds kernels, allocates workspaces."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            body()
        torch.cuda.synchronize()

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        """Record ``body`` in a CUDA graph. Raises RuntimeError if no graph can hold ``body``."""
        # torch.cuda.graph() would collect garbage and empty the allocator's cache on every capture.
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with collection_paused(), torch.cuda.stream(self._stream):
            graph.capture_begin()
            try:
                body()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    def time_us(self, replay: Callable[[], object]) -> float:
        """Time between events around one replay, in µs, after the L2 has been filled with other data."""
        with torch.cuda.stream(self._stream):
            # Keeps the GPU busy while the CPU launches the graph, so the launch latency is not measured.
            self._flush.zero_()
            self._start.record()
            replay()
            self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e3


class WallClock:
    """Times whole calls by the host's clock, as a user sees them: the device is idle before and after each.

    For variants that no graph holds.

    Args:
        device: where calls compute.

    Attributes:
        warm_up_s: seconds of all warm-ups, in which first calls build kernels and capture graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.warm_up_s = 0.0

    def warm_up(self, body: Callable[[], object]) -> None:
        """Run ``body`` once and wait for the device."""
        self.warm_up_s += self.time_us(body) / 1e6

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        """Raise RuntimeError: the time of launches is measured too."""
        raise RuntimeError("a host's clock times no graph")

    def time_us(self, replay: Callable[[], object]) -> float:
        """Microseconds from the call until the device is done."""
        self._wait()
        start = time.perf_counter()
        replay()
        self._wait()
        return (time.perf_counter() - start) * 1e6

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def rotation(weight_bytes: int, total: int = ROTATE_BYTES) -> int:
    """Copies of a weight needed so that together they exceed ``total`` bytes."""
    return max(1, min(MAX_COPIES, -(-total // max(1, weight_bytes))))


def plan_calls(estimate_us: float, copies: int, target_us: float = TARGET_US) -> int:
    """Calls per graph: at least one for every copy, and about ``target_us`` of work.

    The number is a multiple of ``copies``, so that each copy is read equally often.
    """
    wanted = min(MAX_CALLS, math.ceil(target_us / max(estimate_us, 1e-3)))
    return copies * max(1, round(wanted / copies))


def measure(
    variants: Sequence[Variant],
    clock: Clock,
    *,
    rounds: int = 15,
    min_rounds: int = 3,
    target_us: float = TARGET_US,
    settle_us: float = 0.0,
    deadline: float = math.inf,
    now: Callable[[], float] = time.monotonic,
    report: Callable[[str], None] = print,
) -> dict[str, Timing]:
    """Time checked variants, taking turns unless they are to settle.

    Args:
        variants: the ways to compute one shape; each was checked already.
        clock: measures device time.
        rounds: samples per variant; fewer, but at least ``min_rounds``, once ``deadline`` has passed.
        min_rounds: see ``rounds``.
        target_us: length of a graph to aim at; 0: a sample has one call on each copy of the operands.
        settle_us: if above 0, variants do not take turns: each runs untimed for about so long, then all its samples
            follow. A GPU near its power limit needs some time to find the clock that a load leaves it, and each
            variant shall have its own, not its neighbour's.
        deadline: on the scale of ``now``.
        now: the host's clock.
        report: called with the reason why a variant could not be captured.

    Returns:
        For each variant's name its timing per call. ``mode`` is ``eager`` if the variant cannot, or
        shall not, be captured: its figure then holds whatever its launches cost.
    """
    prepared = [(variant.name, *_prepare(variant, clock, target_us, report)) for variant in variants]
    samples: dict[str, list[float]] = {name: [] for name, *_ in prepared}
    if settle_us > 0:
        for name, replay, calls, _ in prepared:
            settled = 0.0
            while settled < settle_us:
                settled += max(clock.time_us(replay), 1.0)
            for i in range(rounds):
                if i < min_rounds or now() <= deadline:
                    samples[name].append(clock.time_us(replay) / calls)
        rounds = 0
    for i in range(rounds if prepared else 0):
        if i >= min_rounds and now() > deadline:
            break
        # Each round starts with another variant, so that none always follows the same neighbour.
        offset = i % len(prepared)
        for name, replay, calls, _ in prepared[offset:] + prepared[:offset]:
            samples[name].append(clock.time_us(replay) / calls)
    return {name: Timing.of(samples[name], mode) for name, _, _, mode in prepared}


def _prepare(
    variant: Variant, clock: Clock, target_us: float, report: Callable[[str], None]
) -> tuple[Callable[[], object], int, str]:
    def body(calls: int) -> None:
        for i in range(calls):
            variant.call(i % variant.copies)

    clock.warm_up(lambda: body(variant.copies))  # a first call may read tensors on the host, which no graph holds
    # Long calls are not made for an estimate that nothing depends on.
    estimate = min(clock.time_us(lambda: body(2)) / 2 for _ in range(2)) if target_us > 0 else math.inf
    calls = plan_calls(estimate, variant.copies, target_us)
    if not variant.graph:
        return (lambda: body(calls)), calls, "eager"
    try:
        replay = clock.capture(lambda: body(calls))
    except RuntimeError as error:
        report(f"{variant.name}: timed without a CUDA graph: {str(error).splitlines()[0]}")
        return (lambda: body(calls)), calls, "eager"
    clock.warm_up(replay)
    return replay, calls, "graph"


def checked(variants: Iterable[Variant], report: Callable[[str], None]) -> tuple[list[Variant], list[str]]:
    """Keep the variants with a right result.

    Returns:
        The variants to time, and the names of variants that failed their check (``report`` gets the reason).
    """
    good, wrong = [], []
    for variant in variants:
        try:
            if variant.check is not None:
                variant.check()
        except CheckError as error:
            report(f"WRONG {variant.name}: {error}")
            wrong.append(variant.name)
        else:
            good.append(variant)
    return good, wrong


@dataclass(frozen=True)
class Environment:
    """The versions and hardware that a figure depends on, besides the kernels."""

    gpu: str
    driver: str
    cuda: str
    torch: str
    commit: str


def environment(gpu: str | None = None) -> Environment:
    """Describe the environment: GPU (the current one unless named), driver, CUDA, torch and commit.

    The commit is ``QCUT_COMMIT``, or the commit of the checkout that this package lies in.
    """
    if gpu is None:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    commit = os.environ.get("QCUT_COMMIT", "")
    if not commit and (_ROOT / ".git").exists():  # else git would name the repository around an installed package
        commit = _output("git", "describe", "--always", "--dirty", "--abbrev=12")
    return Environment(gpu, driver or "unknown", torch.version.cuda or "none", torch.__version__, commit or "unknown")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
