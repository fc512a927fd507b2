"""The problem and the tile of all GEMM families.

``D = epilogue(A B)``, A ``[M, K]``, B ``[K, N]``, D ``[M, N]``, each row-major or column-major. Unless a problem
says otherwise operands are TN in BLAS terms: A row-major, B column-major (``[N, K]`` in memory, as weights are), so
that both are contiguous along K, and D row-major.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from qcut.emitters.core.constraints import Constraint
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.experts import EXPERT_PARAMS
from qcut.emitters.core.source import DType, EmitError, Param

K_MAX = 131_071
"""Largest K with int8 products that cannot overflow int32: 2**14 * K < 2**31."""
K_MAX_ZERO_POINT = 66_311
"""Largest K with a zero point, where one factor spans 255: 255 * 127 * K < 2**31."""

Layout = Literal["row", "column"]
Schedule = Literal["multistage", "warp_specialized", "pingpong", "cooperative", "stream_k"]


@dataclass(frozen=True)
class GemmProblem:
    """Types and epilogue of one GEMM; sizes are known at launch.

    Attributes:
        a: activation type, s8, f16 or bf16; or e4m3 with weights of e4m3.
        b: weight type, s8; or e4m3 with 16-bit activations or those of e4m3.
        epilogue: see `qcut.emitters.core.epilogue`.
        alignment_k: addresses, leading dimensions and contiguous sizes of A and B (K, where both are contiguous
            along it) are multiples of this many elements.
        alignment_n: address, leading dimension and contiguous size of D (N, where it is row-major) are multiples of
            this many elements.
        layout_a: layout of A ``[M, K]``; ``row`` is contiguous along K.
        layout_b: layout of B ``[K, N]``; ``column`` is contiguous along K.
        layout_d: layout of D ``[M, N]`` and of the residual.
        device_m: whether M is read on the device: at most ``m``, which the host knows. Rows of D past it keep their
            contents.
        experts: whether B is the weights of experts, one after the other, and rows of D are routes; in layouts tnt,
            without a residual.
    """

    a: DType = DType.S8
    b: DType = DType.S8
    epilogue: Epilogue = field(default_factory=Epilogue)
    alignment_k: int = 16
    alignment_n: int = 16
    layout_a: Layout = "row"
    layout_b: Layout = "column"
    layout_d: Layout = "row"
    device_m: bool = False
    experts: bool = False

    def __post_init__(self) -> None:
        if self.epilogue.halves and (self.a is not DType.S8 or self.layouts != "tnt"):
            raise EmitError(f"{self.name}: halves are of int8 tokens, and in layouts tnt")
        if self.epilogue.halves and self.device_m:
            raise EmitError(f"{self.name}: M of halves is known on the host")
        if self.b is DType.E4M3 and self.a is DType.S8:
            raise EmitError(f"{self.name}: e4m3 weights are multiplied with activations of 16 bits or e4m3")
        if self.a is DType.E4M3 and self.b is not DType.E4M3:
            raise EmitError(f"{self.name}: e4m3 activations are multiplied with e4m3 weights")
        if self.epilogue.col_scale == "per_unit" and self.b is not DType.E4M3:
            raise EmitError(f"{self.name}: units with scales are of e4m3 weights")
        if self.experts and (self.layouts != "tnt" or self.epilogue.residual):
            raise EmitError(f"{self.name}: experts are in layouts tnt, without a residual")

    @property
    def layouts(self) -> str:
        """BLAS flags of A, B and D, ``t`` for row-major and ``n`` for column-major: ``tnt`` by default."""
        return "".join("t" if layout == "row" else "n" for layout in (self.layout_a, self.layout_b, self.layout_d))

    @property
    def name(self) -> str:
        """``{a}x{b}_{epilogue}``, the layouts where they are not tnt, the alignments unless 16, ``_dm``, ``_e``."""
        layouts = "" if self.layouts == "tnt" else f"_{self.layouts}"
        align = "" if (self.alignment_k, self.alignment_n) == (16, 16) else f"_k{self.alignment_k}n{self.alignment_n}"
        flags = f"{'_dm' * self.device_m}{'_e' * self.experts}"
        return f"{self.a.value}x{self.b.value}_{self.epilogue.name}{layouts}{align}{flags}"

    def params(self) -> tuple[Param, ...]:
        """Arguments of a launch: operands, sizes, leading dimensions, the epilogue's, ``m_count`` or `EXPERT_PARAMS`.

        m is the number of A's rows, or its bound. D has as many, or ``tokens`` where the epilogue has halves.
        """
        return (
            Param("a", "ptr", f"const {self.a.cpp}*"),
            Param("b", "ptr", f"const {self.b.cpp}*"),
            Param("d", "ptr", f"{self.epilogue.out.cpp}*"),
            Param("m", "i32"),
            Param("n", "i32"),
            Param("k", "i32"),
            Param("lda", "i32"),
            Param("ldb", "i32"),
            Param("ldd", "i32"),
            *self.epilogue.params(),
            *(Param("m_count", "count"),) * self.device_m,
            *EXPERT_PARAMS * self.experts,
        )


HOST_M = Constraint("device_m", "M is known on the host", lambda problem, tile, arch: not problem.device_m)
"""Constraint of families that cannot read M on the device; takes (problem, tile, arch)."""
ONE_WEIGHT = Constraint("experts", "B is one weight", lambda problem, tile, arch: not problem.experts)
"""Constraint of families that read no routes; takes (problem, tile, arch)."""


@dataclass(frozen=True)
class TileConfig:
    """How one kernel divides the problem.

    Attributes:
        threadblock_shape: CTA tile (m, n, k) in elements.
        warp_shape: warp tile (m, n, k) of the SM80 and raw families; (0, 0, 0) on SM90, where the schedule fixes it.
        stages: depth of the operand pipeline; 0 takes as many as shared memory holds (SM90).
        cluster_shape: CTAs (m, n) of a cluster that share loads by multicast (SM90).
        schedule: main loop and work distribution.
        epilogue_tile: (m, n) of one epilogue step on SM90; (0, 0) takes CUTLASS's choice.
        splits: CTAs, one cluster, that share a tile of D, each with its part of K (raw families, sm_90 and later).
        fast: whether the tensor core adds all products of e4m3 with its own 14 bits; otherwise the sums of 128 columns
            are added in float32 (``fp8_cutlass``).
    """

    threadblock_shape: tuple[int, int, int]
    warp_shape: tuple[int, int, int] = (0, 0, 0)
    stages: int = 0
    cluster_shape: tuple[int, int] = (1, 1)
    schedule: Schedule = "multistage"
    epilogue_tile: tuple[int, int] = (0, 0)
    splits: int = 1
    fast: bool = False

    @property
    def threads(self) -> int:
        """Threads of a CTA of the raw families; its warps cover the tile once."""
        bm, bn, _ = self.threadblock_shape
        wm, wn, _ = self.warp_shape
        return 32 * (bm // wm) * (bn // wn)

    @property
    def name(self) -> str:
        """``{m}x{n}x{k}``, then the attributes that differ from the defaults, in a fixed order."""
        parts = ["x".join(map(str, self.threadblock_shape))]
        if any(self.warp_shape):
            parts.append("w" + "x".join(map(str, self.warp_shape[:2])))
        if self.cluster_shape != (1, 1):
            parts.append("c{}x{}".format(*self.cluster_shape))
        if any(self.epilogue_tile):
            parts.append("e{}x{}".format(*self.epilogue_tile))
        if self.stages:
            parts.append(f"s{self.stages}")
        if self.splits > 1:
            parts.append(f"k{self.splits}")
        parts.append(
            {"warp_specialized": "ws", "cooperative": "coop", "stream_k": "sk"}.get(self.schedule, self.schedule)
        )
        return "_".join(parts) + "_fast" * self.fast
