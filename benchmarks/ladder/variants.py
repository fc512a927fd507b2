"""The variants that the ladder times: kernels, cuBLASLt and peaks, each with a check against exact results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import CheckError, Variant
from benchmarks.ladder.kernels import PEAKS, Unit, emit_peak
from benchmarks.ladder.steps import LIBRARY, Candidate
from qcut import jit
from qcut.backends.cuda.launch import plans as launch_plans
from qcut.dispatch.cost_model import occupancy
from qcut.dispatch.machines import MULTIPROCESSORS
from qcut.tuning.cublaslt import Int8Matmul

OUT_INV_SCALE, OUT_ZERO_POINT = 40.0, 3
SLOW_US = 2000.0
"""From here on one copy of the operands does: what they cost to fetch cannot be seen."""
PEAK_ROUNDS = 1000
PEAK_WORDS = (0x7F80C1A5, 0x5A3D80FE)


@dataclass
class Operands:
    """Full-range int8, scales that bring results to about one, and the exact sums."""

    a: Tensor
    b: list[Tensor]
    col_scale: Tensor
    acc: Tensor
    d: Tensor

    @classmethod
    def random(cls, m: int, n: int, k: int, copies: int | None = None) -> Operands:
        """``b`` holds equal copies to rotate over, ``d`` is where every step writes."""
        generator = torch.Generator("cuda").manual_seed(m + n + k)

        def integers(rows: int) -> Tensor:
            return torch.randint(-128, 128, (rows, k), generator=generator, dtype=torch.int8, device="cuda")

        a, b = integers(m), integers(n)
        scale = (torch.rand(n, generator=generator, device="cuda") + 0.5) / (74**2 * math.sqrt(k))
        # Every partial sum is an integer under 2**31: float64 is exact in any order.
        acc = (a.double() @ b.double().t()).to(torch.int32)
        wanted = harness.rotation(b.nbytes) if copies is None else copies
        d = torch.empty(m, n, dtype=torch.int8, device="cuda")
        return cls(a, [b, *(b.clone() for _ in range(wanted - 1))], scale, acc, d)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N, K."""
        return (*self.d.shape, self.a.shape[1])

    def check(self) -> None:
        """Compare d bitwise with the epilogue of the exact sums, one float32 operation at a time."""
        v = (self.acc.float() * self.col_scale).double() * OUT_INV_SCALE
        wrong = int((self.d != (v.round() + OUT_ZERO_POINT).clamp(-128, 127)).sum())
        if wrong:
            raise CheckError(f"{wrong} of {self.d.numel()} elements differ")


@dataclass
class Measured:
    """A step that can be timed, and the other columns of its row."""

    step: str
    title: str
    kernel: str
    variant: Variant
    unit: Unit | None = None
    occupied: dict[str, object] = field(default_factory=dict)


def kernel_variant(candidate: Candidate, binary: jit.Binary, data: Operands) -> tuple[Variant, dict[str, object]]:
    """Return one kernel on the operands, with the resources that it occupies."""
    device = torch.cuda.current_device()
    kernel = jit.load(binary, candidate.source, device)
    m, n, k = data.sizes
    tail = (data.col_scale.data_ptr(), OUT_INV_SCALE, float(OUT_ZERO_POINT), *candidate.tail)
    args = [(data.a.data_ptr(), b.data_ptr(), data.d.data_ptr(), m, n, k, k, k, n, *tail) for b in data.b]

    def call(i: int) -> None:
        kernel.launch(candidate.grid, args[i], torch.cuda.current_stream().cuda_stream)

    def check() -> None:
        data.d.fill_(-77)
        call(0)
        data.check()

    variant = Variant(candidate.source.name, call, len(args), check)
    return variant, occupied(launch_plans.target(device).arch, kernel)


def occupied(arch: str, kernel: jit.Kernel) -> dict[str, object]:
    """Registers and spills as ptxas reports them, shared memory, and how many CTAs a multiprocessor holds."""
    found = kernel.resources
    if found is None:
        return {"threads": kernel.block}
    smem = kernel.smem_bytes + found.smem_bytes
    ctas = occupancy(arch, kernel.block, found.registers, smem)
    return {
        "threads": kernel.block,
        "registers": found.registers,
        "spill_bytes": found.spill_store_bytes + found.spill_load_bytes,
        "smem_bytes": smem,
        "ctas_per_sm": ctas,
        "occupancy_pct": round(100 * ctas * kernel.block / MULTIPROCESSORS[arch].threads, 1),
    }


def fastest(
    variants: list[Variant], clock: harness.Clock, report: Callable[[str], None]
) -> tuple[Variant | None, list[str]]:
    """Return the fastest kernel with a correct result, and the names of the kernels with a wrong one.

    A slow kernel keeps a single copy of the operands.
    """
    good, wrong = harness.checked(variants, report)
    if len(good) > 1:
        timings = harness.measure(good, clock, rounds=5, target_us=500)
        good.sort(key=lambda variant: timings[variant.name].median_us)
    for variant in good[:1]:
        if clock.time_us(functools.partial(variant.call, 0)) > SLOW_US:
            variant.copies = 1
    return (good[0] if good else None), wrong


def library_step(data: Operands, clock: harness.Clock) -> Measured:
    """CuBLASLt with the fastest of its eight heuristics. Raises CublasLtError where it has none."""
    gemm = Int8Matmul(*data.sizes)
    # A power of two: all products are exact, and only a tie may round either way.
    alpha = 2.0 ** round(math.log2(OUT_INV_SCALE / (74**2 * math.sqrt(data.sizes[2]))))

    def run(algorithm: int, i: int) -> None:
        gemm.run(data.a, data.b[i], data.d, alpha, algorithm)

    def time_us(algorithm: int) -> float:
        run(algorithm, 0)  # one that cannot run says so here
        candidate = Variant("algorithm", lambda i: run(algorithm, i), len(data.b))
        return harness.measure([candidate], clock, rounds=5, target_us=500)["algorithm"].median_us

    best = gemm.best(time_us)

    def check() -> None:
        data.d.fill_(-77)
        run(best, 0)
        error = (data.d - (data.acc.double() * alpha).clamp(-128, 127)).abs().max().item()
        if not error <= 0.5:
            raise CheckError(f"off by {error}")

    variant = Variant(LIBRARY, lambda i: run(best, i), len(data.b), check)
    return Measured(LIBRARY, "cuBLASLt, best of eight", f"{LIBRARY}:{best} {gemm.describe(best)}", variant)


class PeakRun:
    """One CTA for each multiprocessor that does nothing but one unit's products."""

    def __init__(self, unit: Unit, rounds: int = PEAK_ROUNDS) -> None:
        gpu = launch_plans.target(torch.cuda.current_device())
        source = emit_peak(unit, gpu.arch)
        self.unit, self.name, self.peak, self.rounds = unit, source.name, PEAKS[unit], rounds
        self._grid = (gpu.sm_count, 1, 1)
        self._kernel = jit.load(jit.build(source), source, torch.cuda.current_device())
        self.sums = torch.empty(gpu.sm_count, self.peak.threads, dtype=torch.int32, device="cuda")
        self.cycles = torch.empty(gpu.sm_count, dtype=torch.int64, device="cuda")
        self.variant = Variant(f"{unit}_peak", self.call, 1, self.check)
        self.occupied = occupied(gpu.arch, self._kernel)

    def call(self, i: int) -> None:
        """Queue one launch."""
        args = (self.sums.data_ptr(), self.cycles.data_ptr(), self.rounds, *PEAK_WORDS)
        self._kernel.launch(self._grid, args, torch.cuda.current_stream().cuda_stream)

    def check(self) -> None:
        """Raise `CheckError` unless every product was made."""
        self.sums.fill_(-1)
        self.call(0)
        x, y = (torch.tensor([word], dtype=torch.int64).to(torch.int32).view(torch.int8).long() for word in PEAK_WORDS)
        count = self.peak.sums
        added = count * self.rounds * self.peak.factor * int((x * y).sum())
        first = count * torch.arange(self.peak.threads) + count * (count - 1) // 2
        expected = (first + added).to(torch.int32).to(self.sums.device)
        if not bool((self.sums == expected).all()):
            raise CheckError("sums are not what so many products add up to")

    @property
    def ops(self) -> float:
        """Multiplications and additions of one launch."""
        return 2.0 * self.peak.macs * self.rounds * len(self.cycles)

    @property
    def macs_per_cycle(self) -> float:
        """Multiply-adds a cycle and multiprocessor in the last launch, by the multiprocessors' own clocks."""
        return self.peak.macs * self.rounds / self.cycles.double().mean().item()
