"""W8A8 for few tokens, bound by memory: what stands before a projection, quantization and product in one kernel.

Up to `MAX_TOKENS` tokens, on ``mma.sync.m16n8k32``, with the weights of the int8 GEMMs as they are. Every CTA makes the
token where there is one that is short (`MAX_ELEMENTS`); others come quantized. Device code:
``include/qcut/w8a8_decode.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from emitters.constraints import Constraint, check
from emitters.epilogue import Epilogue
from emitters.gemm import K_MAX, procedural_name
from emitters.mma_gemm import CLUSTER_ARCHITECTURES, SMEM_LIMIT, argument_setup, epilogue_type
from emitters.source import DType, EmitError, KernelSource, Param
from emitters.weight_only_decode import Cut, best_cut, register_limit

FAMILY = "w8a8_decode"
MAX_TOKENS = 8
"""Of a kernel: the columns of one tensor-core product."""
MAX_ELEMENTS = 16_384
"""Of a token that every CTA makes: a longer one is read sooner from a kernel that made it once."""
Prologue = Literal["none", "given", "quantize", "gate", "rms", "layer"]

_TOKENS = (1, 2, 4, 8)
_FLOATS = (DType.F16, DType.BF16, DType.F32)
_OTHER_REGISTERS = 36
"""What a thread needs beside weights, tokens and sums: addresses, counters, bounds, a token on its way."""


@dataclass(frozen=True)
class W8A8Problem:
    """What a kernel computes; sizes are known at launch.

    Attributes:
        prologue: what tokens come from. ``none``: int8 ``a`` and ``row_scale``; ``given``: the same, of weights that no
            kernel just before writes. ``quantize``: rows of x. ``gate``:
            ``rne(rne(silu(x)) * other)``. ``rms``, ``layer``: the norm of ``rne(x + other)``, as
            `emitters.transformer.NormRows`, which writes that sum too; of x where ``other`` is null.
        x: element type of what tokens are made of.
        epilogue: with a scale for each token and channel.
        aligned: addresses and rows of what is read before quantization are multiples of 16 bytes.
    """

    prologue: Prologue
    x: DType
    epilogue: Epilogue
    aligned: bool = True

    @property
    def makes(self) -> bool:
        """Whether the kernel makes its tokens."""
        return self.prologue not in ("none", "given")

    @property
    def name(self) -> str:
        """``{prologue}_{x}_{epilogue}``, and ``_u`` where unaligned."""
        return f"{self.prologue}_{self.x.value}_{self.epilogue.name}{'' if self.aligned else '_u'}"

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order.

        ``none``, ``given`` and ``quantize`` have those of a `emitters.gemm.GemmProblem`, with a of int8 rows multiples
        of 16 bytes apart, or of x's type and without ``row_scale``. The others: ``x, other``, ``sum, weight,
        norm_bias`` (norms), strides of x and other in elements, ``eps`` (norms); then ``b, d, m, n, k, ldb, ldd,
        col_scale`` and the ``bias`` where there is one.
        """
        scaling = [p for p in self.epilogue.params() if not self.makes or p.name != "row_scale"]
        sizes = ["m", "n", "k", "lda", "ldb", "ldd"]
        if not self.makes or self.prologue == "quantize":
            return (*(Param(p, "ptr") for p in ("a", "b", "d")), *(Param(s, "i32") for s in sizes), *scaling)
        norm = self.prologue in ("rms", "layer")
        sizes.remove("lda")
        return (
            *(Param(name, "ptr") for name in ("x", "other", *("sum", "weight", "norm_bias") * norm)),
            *(Param(name, "i64") for name in ("x_stride", "other_stride")),
            *(Param("eps", "f32"),) * norm,
            *(Param(name, "ptr") for name in ("b", "d")),
            *(Param(name, "i32") for name in sizes),
            *scaling,
        )


@dataclass(frozen=True)
class W8A8Tile:
    """How one kernel cuts the problem up; see `emitters.weight_only_decode.WeightOnlyTile`.

    Attributes:
        row_tiles: of 16 weight rows, one after the other.
        warps: of a CTA.
        units: of 128 columns that a warp takes at a time.
        prefetch: row tiles of a warp in flight.
        tokens: that the kernel holds, 1, 2, 4 or 8; fewer may be given.
        columns: of a token, in shared memory; 0 where tokens come quantized.
        splits: CTAs, one cluster, that divide K further (sm_90 and later).
    """

    row_tiles: int
    warps: int
    units: int = 1
    prefetch: int = 1
    tokens: int = 8
    columns: int = 0
    splits: int = 1

    @property
    def name(self) -> str:
        """``m{tokens}_c{columns}_r{row_tiles}_w{warps}_u{units}_p{prefetch}`` and the splits where there are any."""
        columns = f"_c{self.columns}" if self.columns else ""
        splits = f"_k{self.splits}" if self.splits > 1 else ""
        return f"m{self.tokens}{columns}_r{self.row_tiles}_w{self.warps}_u{self.units}_p{self.prefetch}{splits}"


def chunk_columns(x: DType) -> int:
    """Columns that a warp reads at once: tokens are held in multiples of them."""
    return 32 * 128 // x.bits


def smem_bytes(problem: W8A8Problem, tile: W8A8Tile) -> int:
    """Dynamic shared memory of a CTA: rows' scales and biases, tokens; what they are made of, then the warps' sums."""
    rows, size = 16 * tile.row_tiles, problem.x.bits // 8
    fixed, sums = 8 * rows + 32, 4 * tile.warps * tile.tokens * (rows + 4)
    if not problem.makes:
        return fixed + sums
    parameters = 2 * size * tile.columns if problem.prologue in ("rms", "layer") else 0
    partial = 3 * 4 * tile.tokens * tile.columns // chunk_columns(problem.x)
    making = size * tile.tokens * tile.columns + parameters + partial
    return fixed + tile.tokens * (tile.columns + 64) + max(sums, making)


def registers(tile: W8A8Tile) -> int:
    """About what a thread needs: weights in flight, tokens, sums, and the rest."""
    return 16 * tile.units * tile.prefetch + 8 * tile.units + 4 + _OTHER_REGISTERS


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
    Constraint("architecture", f"allowed are {', '.join(SMEM_LIMIT)}", lambda p, t, arch: arch in SMEM_LIMIT),
    Constraint("tokens", "are 1, 2, 4 or 8", lambda p, t, arch: t.tokens in _TOKENS),
    Constraint(
        "columns",
        "are whole chunks of 512 bytes, or 0 where tokens come quantized",
        lambda p, t, arch: t.columns == 0 if not p.makes else t.columns > 0 and t.columns % chunk_columns(p.x) == 0,
    ),
    Constraint("row_tiles", "are at least 1", lambda p, t, arch: t.row_tiles >= 1),
    Constraint("warps", "are 1 to 32, what a CTA may have", lambda p, t, arch: 1 <= t.warps <= 32),
    Constraint("units", "are at least 1", lambda p, t, arch: t.units >= 1),
    Constraint(
        "prefetch",
        "is 1 to row_tiles: the first tiles of a round fill it",
        lambda p, t, arch: 1 <= t.prefetch <= t.row_tiles,
    ),
    Constraint(
        "registers",
        f"weights in flight, tokens, sums and {_OTHER_REGISTERS} more fit a thread's 255 and the SM's 65536",
        lambda p, t, arch: registers(t) <= register_limit(t.warps),
    ),
    Constraint(
        "splits", "are 1, 2, 4 or 8: the CTAs of a portable cluster", lambda p, t, arch: t.splits in (1, 2, 4, 8)
    ),
    Constraint(
        "clusters",
        f"splits need thread-block clusters: {', '.join(CLUSTER_ARCHITECTURES)}",
        lambda p, t, arch: t.splits == 1 or arch in CLUSTER_ARCHITECTURES,
    ),
    Constraint(
        "shared_memory",
        "tokens and sums fit what the architecture gives a CTA: "
        + ", ".join(f"{limit} bytes on {arch}" for arch, limit in SMEM_LIMIT.items()),
        lambda p, t, arch: smem_bytes(p, t) <= SMEM_LIMIT[arch],
    ),
)
"""What this family can build, on (problem, tile, arch)."""


def validate(problem: W8A8Problem, tile: W8A8Tile, arch: str) -> None:
    """Check that this family can build the pair.

    Raises:
        EmitError: naming the kernel and the first of `CONSTRAINTS` it breaks.
    """
    check(procedural_name(FAMILY, arch, problem, tile), CONSTRAINTS, problem, tile, arch)


def grid(tile: W8A8Tile, m: int, n: int) -> tuple[int, int, int]:
    """CTAs of a launch, ``splits`` for each ``16 * row_tiles`` columns of D, in one dimension; m does not matter."""
    return (-(-n // (16 * tile.row_tiles)) * tile.splits, 1, 1)


def makes_tokens(m: int, k: int) -> bool:
    """Whether the kernel makes the tokens itself: one of a length that a CTA reads at once.

    Eight cost every CTA more than two kernels before it; in a step under dependent launch one does too, though less
    (`benchmarks/NOTES.md`, "A decoder's step").
    """
    return m == 1 and k <= MAX_ELEMENTS


def is_legal(problem: W8A8Problem, m: int, k: int, arch: str) -> bool:
    """Whether there is a kernel for so many tokens of so many columns, whatever N and the GPU's size."""
    try:
        validate(problem, _tile(problem, Cut(1, 1, 1, 1, 1), m, k), arch)
    except EmitError:
        return False
    return True


def for_shape(problem: W8A8Problem, arch: str, m: int, n: int, k: int, sm_count: int) -> W8A8Tile:
    """A tile for a shape: one wave of CTAs where that is possible, few rounds, much in flight.

    Args:
        problem: prologue, types and epilogue.
        arch: the kernel's.
        m: tokens, up to `MAX_TOKENS`.
        n: rows of weights.
        k: columns.
        sm_count: of the GPU.

    Raises:
        EmitError: m is more than `MAX_TOKENS`, K beyond the exact range, or `CONSTRAINTS` refuse the problem.
    """

    def fits(cut: Cut) -> bool:
        tile = _tile(problem, cut, m, k)
        return registers(tile) <= register_limit(cut.warps) and smem_bytes(problem, tile) <= SMEM_LIMIT.get(arch, 0)

    tile = _tile(problem, best_cut(n, k, arch, sm_count, fits), m, k)
    validate(problem, tile, arch)
    return tile


def _tile(problem: W8A8Problem, cut: Cut, m: int, k: int) -> W8A8Tile:
    """The tile that holds m tokens of k columns."""
    if not 1 <= m <= MAX_TOKENS:
        raise EmitError(f"{FAMILY}: {m} tokens; allowed are 1 to {MAX_TOKENS}")
    if not 1 <= k <= K_MAX:
        raise EmitError(f"{FAMILY}: K is {k}; allowed is 1 to {K_MAX}")
    tokens, chunk = next(size for size in _TOKENS if m <= size), chunk_columns(problem.x)
    columns = -(-k // chunk) * chunk if problem.makes else 0
    return W8A8Tile(cut.row_tiles, cut.warps, cut.units, cut.prefetch, tokens, columns, cut.splits)


def emit_w8a8_decode(problem: W8A8Problem, tile: W8A8Tile, arch: str) -> KernelSource:
    """Text of one kernel.

    Arguments are ``problem.params()`` in order; 1 <= m <= ``tile.tokens``; k up to ``tile.columns`` where there are
    any, a multiple of 16 where not. b: int8 ``[n, ldb]``, 16-byte aligned, ldb a multiple of 16 and at least k, zero
    from k on. ``sum`` has rows close together; D is stored element by element. But for
    ``none``, b, the vectors of n and a norm's parameters are read before the kernel waits for its predecessor.

    Exactness: tokens bitwise as `emitters.quantize.QuantizePerToken` makes them of what `emitters.transformer` gives;
    integer sums are exact, and the epilogue is that of the other int8 GEMMs, bitwise.

    Raises:
        EmitError: see `validate`.

    Source: PTX ISA, ``mma.sync.m16n8k32``, ``ld.global.nc``, ``griddepcontrol``, ``barrier.cluster``.
    """
    validate(problem, tile, arch)
    name = procedural_name(FAMILY, arch, problem, tile)
    x, params = problem.x.cpp, problem.params()
    types = dict.fromkeys(("x", "other", "weight", "norm_bias"), f"const {x}*")
    types |= {
        "a": f"const {x if problem.makes else 'int8_t'}*",
        "b": "const int8_t*",
        "sum": f"{x}*",
        "d": f"{problem.epilogue.out.cpp}*",
    }
    types |= {"x_stride": "long long", "other_stride": "long long", "eps": "float"}
    types |= dict.fromkeys(("row_scale", "col_scale", "bias"), "const float*")
    names = {p.name for p in params}
    fields = dict.fromkeys(("x", "other", "sum", "weight", "norm_bias"), "nullptr")
    fields |= {"x_stride": "0", "other_stride": "0", "eps": "0.0f"}
    if problem.prologue == "quantize":
        fields |= {"x": "a", "x_stride": "lda"}
    source = ", ".join(name if name in names else other for name, other in fields.items())
    assignments = argument_setup(problem.epilogue)
    if problem.makes:
        assignments = assignments.replace("  args.row_scale = row_scale;\n", "")
    signature = ", ".join(f"{types.get(p.name, 'int')} {p.name}" for p in params)
    columns = tile.columns or chunk_columns(problem.x)
    shape = (tile.row_tiles, tile.warps, tile.units, tile.prefetch, tile.tokens, columns, tile.splits)
    cluster = f"__cluster_dims__({tile.splits}, 1, 1) " if tile.splits > 1 else ""
    a = "nullptr, 0" if problem.makes else "a, lda"
    text = (
        "#include <qcut/w8a8_decode.cuh>\n\n"
        f'extern "C" __global__ void {cluster}__launch_bounds__({32 * tile.warps})\n'
        f"{name}(\n    {signature}) {{\n"
        f"  using Tile = qcut::W8A8Tile<{x}, qcut::Prologue::k{problem.prologue.capitalize()}, "
        f"{', '.join(map(str, shape))}>;\n"
        f"  using Epilogue = {epilogue_type(problem.epilogue)};\n"
        f"{assignments}"
        f"  const qcut::TokenSource<{x}> source{{{source}}};\n"
        f"  qcut::w8a8_decode<Tile, {str(problem.aligned).lower()}, Epilogue>"
        f"({a}, source, b, d, m, n, k, ldb, ldd, args);\n"
        "}\n"
    )
    return KernelSource(
        name=name,
        text=text,
        entry=name,
        params=params,
        arch=arch,
        block=32 * tile.warps,
        smem_bytes=smem_bytes(problem, tile),
        includes=("qcut", "cuda"),
    )
