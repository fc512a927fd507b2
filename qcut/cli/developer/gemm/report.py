"""Requests to ``qcut gemm`` and its reports, as data, JSON and text. Imports no torch."""

from __future__ import annotations

import ctypes
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from qcut.dispatch.gemm import Choice
    from qcut.tuning.timing import Timing

UNIFORM_VARIANCE = (256**2 - 1) / 12
"""Variance of a uniform int8 value. A sum of K products of two such values deviates by about this times sqrt(K)."""
DEVIATION = 40.0
"""Standard deviation of the results at the default scale, in steps of int8."""


@dataclass(frozen=True)
class Request:
    """A product to compute, and whether to check and compare it.

    Attributes:
        m: rows of A and C.
        n: columns of B and C.
        k: columns of A, rows of B.
        layouts: memory orders of A, B and C, as in `GemmProblem.layouts`.
        tensor_cores: whether dispatch may choose kernels that use tensor cores.
        family: the kernel's family; None lets dispatch choose.
        tile: name of the kernel's tile; None takes the tile that the cost model expects to be fastest.
        wrap: results are the low eight bits of the sums, instead of scaled and saturated sums.
        scale: factor of the sums; None takes the factor that gives results the standard deviation `DEVIATION`.
        seed: seed of the random data.
        check: whether to compare with exact sums.
        compare: whether to time cuBLASLt as well.
    """

    m: int
    n: int
    k: int
    layouts: str = "tnt"
    tensor_cores: bool = True
    family: str | None = None
    tile: str | None = None
    wrap: bool = False
    scale: float | None = None
    seed: int = 0
    check: bool = True
    compare: bool = True

    @property
    def factor(self) -> float:
        """The factor of the sums, a float32 value; 1 for ``wrap``."""
        if self.wrap:
            return 1.0
        return ctypes.c_float(self.scale or self.default_scale).value

    @property
    def default_scale(self) -> float:
        """The scale that gives results the standard deviation `DEVIATION`: a few in a thousand saturate."""
        return DEVIATION / (UNIFORM_VARIANCE * math.sqrt(self.k))

    @property
    def out_layout(self) -> Literal["row", "column"]:
        """Layout of C."""
        return "row" if self.layouts[2] == "t" else "column"


@dataclass(frozen=True)
class Baseline:
    """cuBLASLt's figures: its algorithm, the layouts it was given, and its time."""

    kernel: str
    layouts: str
    timing: Timing


@dataclass
class Report:
    """The outcome of a request.

    Attributes:
        request: the request.
        device: the GPU's name, or ``cpu``.
        kernel: procedural name.
        choice: family, tile and reason; None on the CPU.
        wrong: elements that differ from the exact result; None if nothing was checked.
        timing: time per call; None if nothing was timed.
        baseline: cuBLASLt's figures; None if cuBLASLt was not timed.
        notes: remarks for the reader, such as why nothing was timed.
    """

    request: Request
    device: str
    kernel: str
    choice: Choice | None = None
    wrong: int | None = None
    timing: Timing | None = None
    baseline: Baseline | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def tops(self) -> float | None:
        """10^12 operations a second, a multiply-add being two."""
        r = self.request
        return 2 * r.m * r.n * r.k / self.timing.median_us / 1e6 if self.timing else None

    @property
    def gb_s(self) -> float | None:
        """10^9 bytes a second, each operand and result counted once."""
        r = self.request
        return (r.m * r.k + r.n * r.k + r.m * r.n) / self.timing.median_us / 1e3 if self.timing else None

    @property
    def x_cublaslt(self) -> float | None:
        """cuBLASLt's time divided by the kernel's: the kernel is faster if this is above 1."""
        return self.baseline.timing.median_us / self.timing.median_us if self.timing and self.baseline else None

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON. Every report has the same keys; values that are not known are null."""
        r, choice, baseline = self.request, self.choice, self.baseline
        return {
            "m": r.m,
            "n": r.n,
            "k": r.k,
            "layouts": r.layouts,
            "tensor_cores": r.tensor_cores,
            "mode": "wrap" if r.wrap else "saturate",
            "scale": None if r.wrap else r.factor,
            "seed": r.seed,
            "device": self.device,
            "kernel": self.kernel,
            "family": choice.family if choice else None,
            "tile": choice.tile.name if choice else None,
            "reason": choice.reason if choice else None,
            "checked": self.wrong is not None,
            "wrong": self.wrong,
            "timing": asdict(self.timing) if self.timing else None,
            "tops": self.tops,
            "gb_s": self.gb_s,
            "cublaslt": asdict(baseline) if baseline else None,
            "x_cublaslt": self.x_cublaslt,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        r = self.request
        orders = ", ".join(
            f"{name} {'row' if flag == 't' else 'column'}-major" for name, flag in zip("ABC", r.layouts, strict=True)
        )
        mode = "low eight bits" if r.wrap else f"scale {r.factor:.4g}, saturated"
        lines = [f"C = A B, {r.m} x {r.n} x {r.k}, {orders}; int8, {mode}; {self.device}", f"kernel    {self.kernel}"]
        if self.choice:
            lines.append(f"chosen    {self.choice.family}: {self.choice.reason}")
        elements = r.m * r.n
        if self.wrong is not None:
            lines.append(
                f"WRONG     {self.wrong} of {elements} elements differ from the exact result"
                if self.wrong
                else f"checked   all {elements} elements equal the exact result"
            )
        if self.timing:
            t = self.timing
            how = "replays of a CUDA graph" if t.mode == "graph" else "runs"
            lines.append(f"time      {t.median_us:.2f} µs (p20 {t.p20_us:.2f}, p80 {t.p80_us:.2f}, {t.samples} {how})")
            lines.append(f"rate      {self.tops:.1f} TOPS, {self.gb_s:.1f} GB/s")
        if self.baseline:
            lines.append(
                f"cuBLASLt  {self.baseline.timing.median_us:.2f} µs ({self.baseline.kernel}): "
                f"qcut has {self.x_cublaslt:.2f}x its speed"
            )
        return "\n".join(lines + [f"note      {note}" for note in self.notes])
