"""Raw kernels that quantize, dequantize and sum: HBM-bound, one pass, bitwise equal to `qcut.numerics`.

Device code: ``include/qcut/decoder/quantize.cuh``, ``quantize_halves.cuh`` and ``quantize_float8.cuh``. Rows are spread
over ``threads`` threads and ``max(1, 128 // threads)`` rows share a CTA, so that short rows neither waste threads nor
cross a barrier.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.arch import E4M3_ARCHITECTURES
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import FLOATS, DType, EmitError, KernelSource, Param
from qcut.emitters.core.text import flag

THREADS = (32, 64, 128, 256, 512, 1024)
MAX_VECTORS = 6
"""16-byte vectors a thread keeps in registers: more would starve occupancy."""
_MAX_VECTORS_1024 = 4  # 64 registers a thread hold no more
_VECTOR_BYTES = 16
_COLSUM_ROWS = 4
_BUSY_THREADS = 768
"""Threads of an SM that keep its memory pipeline busy with five vectors each."""


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _max_vectors(threads: int) -> int:
    return _MAX_VECTORS_1024 if threads == 1024 else MAX_VECTORS


@dataclass(frozen=True)
class _RowKernel(Kernel):
    """How a kernel spreads rows over threads.

    Attributes:
        x: float type of the input (quantize) or the output (dequantize).
        arch: real architecture.
        threads: threads per row, a power of two from 32 to 1024.
        vectors: 16-byte vectors of floats per thread; 0 (per-token only) reads rows of any length twice.
        aligned: the float rows start at multiples of 16 bytes and the int8 rows at multiples of 16 (8 for
            dequantize); False loads and stores single elements.
    """

    x: DType
    arch: str
    threads: int = 256
    vectors: int = 2
    aligned: bool = True

    _kind = "row"
    _min_vectors = 1

    def __post_init__(self) -> None:
        if self.x not in FLOATS:
            raise EmitError(f"{self._kind}: float type {self.x.value!r} is not one of f16, bf16, f32")
        if self.threads not in THREADS:
            raise EmitError(f"{self._kind}: {self.threads} threads per row; allowed are {THREADS}")
        most = _max_vectors(self.threads)
        if not self._min_vectors <= self.vectors <= most:
            raise EmitError(
                f"{self._kind}: {self.vectors} vectors per thread; allowed are {self._min_vectors} to {most} "
                f"at {self.threads} threads"
            )

    @property
    def name(self) -> str:
        """``qcut_{kind}_{arch}_{x}_t{threads}v{vectors}``, and ``_u`` where rows are unaligned."""
        suffix = "" if self.aligned else "_u"
        arch = self.arch.replace("_", "")
        return f"qcut_{self._kind}_{arch}_{self.x.value}_t{self.threads}v{self.vectors}{suffix}"

    @property
    def rows(self) -> int:
        """Rows per CTA."""
        return max(1, 128 // self.threads)

    @property
    def block(self) -> int:
        """Threads per CTA."""
        return self.threads * self.rows

    @property
    def row_elements(self) -> int:
        """Elements that the threads of a row hold at once."""
        return self.threads * self.vectors * _VECTOR_BYTES * 8 // self.x.bits

    @property
    def template(self) -> str:
        """Arguments of the device code's template."""
        return f"{self.x.cpp}, {self.threads}, {self.rows}, {self.vectors}, {flag(self.aligned)}"

    def grid(self, m: int, k: int) -> tuple[int, int, int]:
        """CTAs for m rows of k columns (k_padded where the kernel pads)."""
        return (_ceil_div(m, self.rows), max(1, _ceil_div(k, self.row_elements)), 1)


@dataclass(frozen=True)
class _Quantize(_RowKernel):
    """A kernel that quantizes.

    Attributes:
        halves: tokens become int16.
        q: type that tokens are stored in: s8, e4m3, or f16 for e4m3 in 16 bits each.
    """

    halves: bool = False
    q: DType = DType.S8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.q not in (DType.S8, DType.E4M3, DType.F16) or (self.halves and self.q is not DType.S8):
            halves = "halves of " * self.halves
            raise EmitError(f"{self._kind}: {halves}{self.q.value}; allowed are s8, e4m3, f16 and halves of s8")
        if self.q is DType.E4M3 and self.arch not in E4M3_ARCHITECTURES:
            raise EmitError(f"{self._kind}: e4m3 on {self.arch}; allowed are {', '.join(E4M3_ARCHITECTURES)}")

    @property
    def name(self) -> str:
        """The name of all row kernels, with ``_halves``, ``_e4m3`` or ``_e4m3f16``."""
        stored = {DType.S8: "_halves" * self.halves, DType.E4M3: "_e4m3", DType.F16: "_e4m3f16"}
        return super().name + stored[self.q]

    @property
    def template(self) -> str:
        """See `_RowKernel`; e4m3 has the stored type before."""
        return super().template if self.q is DType.S8 else f"{self.q.cpp}, {super().template}"

    @property
    def stem(self) -> str:
        """Of the header, and of the device code's functions."""
        return "quantize_halves" if self.halves else "quantize" if self.q is DType.S8 else "quantize_float8"


@dataclass(frozen=True)
class QuantizePerToken(_Quantize):
    """``scale[m] = max_k |x[m,k]| / 127`` (1 where that is 0), ``q = clamp(rne(x / scale), -127, 127)``.

    x ``[m, k]`` f16, bf16 or f32 with a row stride in elements; q ``[m, k_padded]`` int8, contiguous, zero beyond k;
    scale ``[m]`` float32. A row that holds NaN or Inf gets scale NaN and q = 0, so that its outputs are NaN.

    With ``vectors > 0`` the row stays in registers: k_padded <= `row_elements`.

    Attributes:
        halves: tokens become int16 with the scale ``max |x| / 32639``; q has their halves in blocks of 16 rows, as
            `qcut.numerics.int16.in_blocks` describes. Rows of tokens past m are not written.
        q: of e4m3 and f16, tokens become e4m3 with the scale ``max |x| / 448``, at least 2**-126.

    Exactness: bitwise equal to ``qcut.numerics.int8.quantize_per_token_ref`` (IEEE division, ties to even), with
    halves to ``qcut.numerics.int16.quantize_tokens_ref``, of e4m3 to ``qcut.numerics.float8.quantize_tokens_ref``.
    """

    _kind = "quantize_per_token"
    _min_vectors = 0

    @classmethod
    def for_shape(
        cls,
        x: DType,
        arch: str,
        m: int,
        k_padded: int,
        *,
        aligned: bool = True,
        sm_count: int = 132,
        halves: bool = False,
        q: DType = DType.S8,
    ) -> QuantizePerToken:
        """The layout for m rows of k_padded columns.

        Few rows: as many threads as the row has vectors, because latency bounds the time. Many rows: up to five
        vectors per thread, which keeps enough bytes in flight per SM and needs a barrier over fewer warps, or no
        barrier for rows of up to 160 vectors; up to three where five would leave the SMs few threads.
        """
        vectors = max(1, _ceil_div(k_padded * x.bits // 8, _VECTOR_BYTES))
        busy = m * _ceil_div(vectors, 5) >= _BUSY_THREADS * sm_count
        per_thread = 1 if m < 4 * sm_count else 5 if busy else 3
        threads = next((t for t in THREADS if t * per_thread >= vectors), THREADS[-1])
        held = _ceil_div(vectors, threads)
        return cls(x, arch, threads, held if held <= _max_vectors(threads) else 0, aligned, halves, q)

    def grid(self, m: int, k: int) -> tuple[int, int, int]:
        """CTAs for m rows; k_padded must fit in the registers of a row's threads.

        Raises:
            EmitError: the row is longer than this kernel holds.
        """
        if self.vectors and k > self.row_elements:
            raise EmitError(f"{self.name}: {k} columns; this kernel holds rows of up to {self.row_elements}")
        return (_ceil_div(m, self.rows), 1, 1)

    def params(self) -> tuple[Param, ...]:
        """``x, q, scale, x_stride, m, k, k_padded``."""
        return (
            Param("x", "ptr", f"const {self.x.cpp}*"),
            Param("q", "ptr", "int8_t*"),
            Param("scale", "ptr", "float*"),
            Param("x_stride", "i64"),
            *(Param(size, "i32") for size in ("m", "k", "k_padded")),
        )

    def emit(self) -> KernelSource:
        """Text of the kernel."""
        function = "quantize_per_token" if self.stem == "quantize" else self.stem
        return self._call(f"{function}<{self.template}>", f"decoder/{self.stem}.cuh")


@dataclass(frozen=True)
class QuantizePerTensor(_Quantize):
    """``q = clamp(rne(x / scale) + zero_point, -128, 127)`` with one scale for the tensor.

    x and q as in `QuantizePerToken`; columns beyond k are 0 (not zero_point: padded weights and their colsum hold no
    such column). NaN becomes zero_point, infinities saturate. scale must be positive.

    Attributes:
        halves: tokens become int16, without a zero point; q is as that of `QuantizePerToken` with halves.
        q: of e4m3 and f16, tokens become e4m3, without a zero point; NaN stays NaN.

    Exactness: bitwise equal to ``qcut.numerics.int8.quantize_per_tensor_ref``, with halves to
    ``qcut.numerics.int16.quantize_tensor_ref``, of e4m3 to ``qcut.numerics.float8.quantize_tensor_ref``.
    """

    _kind = "quantize_per_tensor"

    @classmethod
    def for_shape(
        cls,
        x: DType,
        arch: str,
        m: int,
        k_padded: int,
        *,
        aligned: bool = True,
        halves: bool = False,
        q: DType = DType.S8,
    ) -> QuantizePerTensor:
        """The layout for rows of k_padded columns: two vectors per thread, up to 256 threads along a row."""
        del m
        return cls(x, arch, *_elementwise(x, k_padded), aligned, halves, q)

    def params(self) -> tuple[Param, ...]:
        """``x, q, x_stride, m, k, k_padded, scale``, and ``zero_point`` for int8."""
        return (
            Param("x", "ptr", f"const {self.x.cpp}*"),
            Param("q", "ptr", "int8_t*"),
            Param("x_stride", "i64"),
            *(Param(size, "i32") for size in ("m", "k", "k_padded")),
            Param("scale", "f32"),
            *(Param("zero_point", "i32"),) * (self.stem == "quantize"),
        )

    def emit(self) -> KernelSource:
        """Text of the kernel."""
        return self._call(f"{self.stem}_per_tensor<{self.template}>", f"decoder/{self.stem}.cuh")


@dataclass(frozen=True)
class Dequantize(_RowKernel):
    """``out = x_dtype(f32(q) * scale[row])``: one float32 product, rounded once more to the output type.

    q ``[rows, columns]`` int8 with a row stride; scale ``[rows]`` float32; out ``[rows, columns]``, contiguous.

    Exactness: bitwise equal to ``qcut.numerics.int8.dequantize_ref``.
    """

    _kind = "dequantize"

    @classmethod
    def for_shape(cls, x: DType, arch: str, m: int, k: int, *, aligned: bool = True) -> Dequantize:
        """The layout for rows of k columns: two vectors per thread, up to 256 threads along a row."""
        del m
        return cls(x, arch, *_elementwise(x, k), aligned)

    def params(self) -> tuple[Param, ...]:
        """``q, scale, out, q_stride, rows, columns``."""
        return (
            Param("q", "ptr", "const int8_t*"),
            Param("scale", "ptr", "const float*"),
            Param("out", "ptr", f"{self.x.cpp}*"),
            Param("q_stride", "i64"),
            Param("rows", "i32"),
            Param("columns", "i32"),
        )

    def emit(self) -> KernelSource:
        """Text of the kernel."""
        return self._call(f"dequantize<{self.template}>", "decoder/quantize.cuh")


@dataclass(frozen=True)
class ColSum(Kernel):
    """``colsum[n] = sum_k q[n, k]`` in int32, one warp per row of q ``[n, k]`` int8 (row stride given).

    Attributes:
        arch: real architecture.
        aligned: rows of q start at multiples of 16 bytes.

    Exactness: integers, exact for k < 2**24.
    """

    arch: str
    aligned: bool = True

    @property
    def name(self) -> str:
        """``qcut_colsum_{arch}``, and ``_u`` where rows are unaligned."""
        return f"qcut_colsum_{self.arch.replace('_', '')}{'' if self.aligned else '_u'}"

    @property
    def block(self) -> int:
        """Threads per CTA: a warp a row."""
        return 32 * _COLSUM_ROWS

    def grid(self, n: int, k: int) -> tuple[int, int, int]:
        """CTAs for n rows; k does not matter."""
        del k
        return (_ceil_div(n, _COLSUM_ROWS), 1, 1)

    def params(self) -> tuple[Param, ...]:
        """``q, colsum, q_stride, n, k``."""
        return (
            Param("q", "ptr", "const int8_t*"),
            Param("colsum", "ptr", "int32_t*"),
            Param("q_stride", "i64"),
            Param("n", "i32"),
            Param("k", "i32"),
        )

    def emit(self) -> KernelSource:
        """Text of the kernel."""
        return self._call(f"colsum<{_COLSUM_ROWS}, {flag(self.aligned)}>", "decoder/quantize.cuh")


def _elementwise(x: DType, columns: int) -> tuple[int, int]:
    """Threads per row and vectors per thread of the kernels that need no reduction."""
    vectors = max(1, _ceil_div(columns * x.bits // 8, _VECTOR_BYTES))
    threads = next((t for t in THREADS[:4] if 2 * t >= vectors), 256)
    return threads, min(2, _ceil_div(vectors, threads))
