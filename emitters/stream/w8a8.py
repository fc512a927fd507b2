"""W8A8 for few tokens, bound by memory, on ``mma.sync.m16n8k32``, with int8 weights in the layout of the int8 GEMMs.

Tokens are int8, or rows of floats whose largest magnitudes the previous kernel has stored. The kernel quantizes such
rows as it loads them. Device code: ``include/qcut/stream/w8a8.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qcut.emitters.core.constraints import ARCHITECTURE, CLUSTERS, SPLITS, Constraint, check, shared_memory
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.names import procedural_name
from qcut.emitters.core.source import DType, EmitError, KernelSource, Param
from qcut.emitters.core.text import flag, include, kernel_source
from qcut.emitters.gemm.problem import K_MAX
from qcut.emitters.stream.int8 import CUT_CONSTRAINTS, Int8StreamTile, register_limit

FAMILY = "int8_stream"
MAX_TOKENS = 8
"""The most tokens of a kernel: the columns of one tensor-core product."""
Tokens = Literal["none", "given", "rows"]

_TOKENS = (1, 2, 4, 8)
_FLOATS = (DType.F16, DType.BF16, DType.F32)
_OTHER_REGISTERS = 36
"""Registers of a thread for addresses, counters, bounds and a token on its way."""
_NEEDS_MORE = ("sm_100", "sm_120")
"""Architectures whose compilers need more registers to quantize eight rows: without them, they spill."""


@dataclass(frozen=True)
class W8A8Problem:
    """The types, tokens and epilogue of one product; sizes are known at launch.

    Attributes:
        tokens: ``none``: int8 ``a`` and ``row_scale``. ``given``: int8 ``a`` and ``row_scale``, and weights that the
            previous kernel does not write. ``rows``: rows of type x with their largest magnitudes ``a_absmax``, which
            the kernel quantizes as `qcut.emitters.decoder.quantize.QuantizePerToken` does, with weights as for
            ``given``.
        x: element type of rows.
        epilogue: one with a scale for each token and each channel.
        aligned: addresses and strides of rows are multiples of 16 bytes.
        absmax: whether ``absmax``, float32 ``[m]``, is raised to the largest magnitude of each row of D; NaN counts
            as the largest.
    """

    tokens: Tokens
    x: DType
    epilogue: Epilogue
    aligned: bool = True
    absmax: bool = False

    @property
    def name(self) -> str:
        """``{tokens}_{epilogue}``, with the type of rows before, ``_absmax`` and ``_u`` where unaligned after."""
        rows = f"_{self.x.value}" * (self.tokens == "rows")
        return f"{self.tokens}{rows}_{self.epilogue.name}{'_absmax' * self.absmax}{'' if self.aligned else '_u'}"

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order: those of a `GemmProblem`, ``absmax`` where there is one, and ``activation`` last.

        int8 rows of a are multiples of 16 bytes apart. Rows of x have ``a_absmax`` in place of ``row_scale``.
        """
        sizes = ("m", "n", "k", "lda", "ldb", "ldd")
        scaling = self.epilogue.params()
        if self.tokens == "rows":
            scaling = (Param("a_absmax", "ptr", "const float*"), *(p for p in scaling if p.name != "row_scale"))
        return (
            Param("a", "ptr", "const void*"),
            Param("b", "ptr", "const int8_t*"),
            Param("d", "ptr", f"{self.epilogue.out.cpp}*"),
            *(Param(size, "i32") for size in sizes),
            *(param for param in scaling if param.name != "activation"),
            *(Param("absmax", "ptr", "float*"),) * self.absmax,
            *(param for param in scaling if param.name == "activation"),
        )


class W8A8Tile(Int8StreamTile):
    """An `Int8StreamTile` whose ``tokens`` are 1, 2, 4 or 8."""


def smem_bytes(tile: W8A8Tile) -> int:
    """Dynamic shared memory of a CTA: rows' scales and biases, tokens' scales, largest magnitudes, the warps' sums."""
    rows = 16 * tile.row_tiles
    return 8 * rows + 64 + 4 * tile.warps * tile.tokens * (rows + 4)


def registers(problem: W8A8Problem, tile: W8A8Tile, arch: str) -> int:
    """Estimate a thread's registers: weights in flight, tokens, sums, and the rest."""
    # Rows of 16-bit floats are quantized in the registers into which they were loaded.
    tokens = (16 if problem.tokens == "rows" and problem.x is DType.F32 else 8) * tile.units
    more = 16 * tile.units if arch in _NEEDS_MORE and problem.tokens == "rows" and tile.tokens == 8 else 0
    return 16 * tile.units * tile.prefetch + tokens + 4 + _OTHER_REGISTERS + more


CONSTRAINTS = (
    Constraint("x", "is f16, bf16 or f32", lambda p, t, arch: p.x in _FLOATS),
    Constraint(
        "epilogue",
        "scales tokens and channels, and has no zero point and no residual",
        lambda p, t, arch: (
            (p.epilogue.row_scale, p.epilogue.col_scale, p.epilogue.zero_point, p.epilogue.residual)
            == ("per_token", "per_channel", "none", False)
        ),
    ),
    Constraint(
        "output", "is f16, bf16 or f32", lambda p, t, arch: p.epilogue.out in (DType.F16, DType.BF16, DType.F32)
    ),
    ARCHITECTURE,
    Constraint("tokens", "are 1, 2, 4 or 8", lambda p, t, arch: t.tokens in _TOKENS),
    *CUT_CONSTRAINTS,
    Constraint(
        "registers",
        f"weights in flight, tokens, sums and {_OTHER_REGISTERS} more fit a thread's 255 and the SM's 65536",
        lambda p, t, arch: registers(p, t, arch) <= register_limit(t.warps),
    ),
    SPLITS,
    CLUSTERS,
    shared_memory("sums fit what the architecture gives a CTA", lambda problem, tile: smem_bytes(tile)),
)
"""What this family can build, on (problem, tile, arch)."""


def validate(problem: W8A8Problem, tile: W8A8Tile, arch: str) -> None:
    """Check that this family can build a kernel for the problem with this tile on this architecture.

    Raises:
        EmitError: a constraint is broken; the message has the kernel's name and the first broken constraint.
    """
    check(procedural_name(FAMILY, arch, problem, tile), CONSTRAINTS, problem, tile, arch)


def tokens_of(m: int, k: int) -> int:
    """Tokens that a tile holds for m tokens of k columns.

    Raises:
        EmitError: m is more than `MAX_TOKENS`, or K beyond the exact range.
    """
    if not 1 <= m <= MAX_TOKENS:
        raise EmitError(f"{FAMILY}: {m} tokens; allowed are 1 to {MAX_TOKENS}")
    if not 1 <= k <= K_MAX:
        raise EmitError(f"{FAMILY}: K is {k}; allowed is 1 to {K_MAX}")
    return next(size for size in _TOKENS if m <= size)


def is_legal(problem: W8A8Problem, m: int, k: int, arch: str) -> bool:
    """Whether there is a kernel for m tokens of k columns, with any N and on a GPU of any size."""
    try:
        validate(problem, W8A8Tile(1, 1, tokens=tokens_of(m, k)), arch)
    except EmitError:
        return False
    return True


def emit_int8_stream(problem: W8A8Problem, tile: W8A8Tile, arch: str) -> KernelSource:
    """Text of one kernel.

    Arguments are ``problem.params()`` in order; 1 <= m <= ``tile.tokens``; k is a multiple of 16 unless tokens are
    ``rows``. b: int8 ``[n, ldb]``, 16-byte aligned, ldb a multiple of 16 and at least k, zero from k on. D is stored
    element by element. Unless tokens are ``none``, b and the vectors of n are read before the kernel waits for its
    predecessor.

    Exactness: integer sums are exact, and the epilogue is that of the other int8 GEMMs, bitwise.

    Raises:
        EmitError: see `validate`.

    Source: PTX ISA, ``mma.sync.m16n8k32``, ``ld.global.nc``, ``griddepcontrol``, ``barrier.cluster``.
    """
    validate(problem, tile, arch)
    name = procedural_name(FAMILY, arch, problem, tile)
    tokens = f"qcut::Tokens::k{problem.tokens.capitalize()}"
    a_absmax = "a_absmax" if problem.tokens == "rows" else "nullptr"
    absmax = "absmax" if problem.absmax else "nullptr"
    params = problem.params()
    return kernel_source(
        name,
        arch,
        params,
        f"using Tile = qcut::W8A8Tile<{problem.x.cpp}, {tokens}, {tile.sizes}>;",
        *problem.epilogue.statements(params),
        f"qcut::int8_stream<Tile, {flag(problem.aligned)}, {flag(problem.absmax)}, Epilogue>(\n"
        f"      a, {a_absmax}, b, d, {absmax}, m, n, k, lda, ldb, ldd, args);",
        device_code=include("stream/w8a8.cuh"),
        block=32 * tile.warps,
        ctas_per_sm=1,
        waits=True,
        smem_bytes=smem_bytes(tile),
        cluster=tile.splits,
    )
