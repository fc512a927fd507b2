"""``qcut doctor --selftest``: runs every family of kernels once on a GPU and compares with the CPU.

Data are full-range int8 and normal floats with fixed seeds. Results of integer arithmetic are equal bit by bit. A float
result lies near the exact one, computed in float64: its bound adds the roundings of the kernel's float32 arithmetic, of
its 16-bit intermediate values, and of the result.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qcut
from qcut import jit
from qcut.backends.cuda.gemm import gemm_s8
from qcut.backends.cuda.launch import native
from qcut.backends.cuda.launch.plans import forget_plans, target, watched_loads
from qcut.backends.cuda.linear import linear_problem
from qcut.common.progress import progress_bar
from qcut.dispatch import gemm as dispatch
from qcut.dispatch.gemm import Choice
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import best_tile
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.families import INT8_CUTLASS, INT8_DP4A, INT8_MMA, INT8_WMMA, family
from qcut.emitters.gemm.problem import GemmProblem
from qcut.errors import DeviceError, QcutError
from qcut.jit.waiting import no_fallbacks
from qcut.numerics import int8
from qcut.numerics.codebook import layout, products, tokens
from qcut.numerics.routing import logits_of
from qcut.ops.gemm import GemmS8Op

OPS = torch.ops.qcut
CPU = torch.device("cpu")
HALF = torch.float16

_EPS = 2.0**-23
"""Distance of float32 values from 1 up; twice the largest relative error of an operation."""


class Near(NamedTuple):
    """An exact result and the distance that a kernel's may have from it, both float64 of one shape."""

    exact: Tensor
    within: Tensor

    @classmethod
    def rounded(cls, exact: Tensor, slack: Tensor, dtype: torch.dtype) -> Near:
        """A value that is off by up to ``slack``, then rounded to ``dtype``."""
        return cls(exact, slack + half_ulp(exact.abs() + slack, dtype))


Expected = Tensor | Near
Results = Sequence[Tensor]


@dataclass(frozen=True)
class Check:
    """One call of one family.

    Attributes:
        family: the family, as kernels' names, or the operator's name.
        shape: sizes, for messages.
        call: computes a result or several, of ``args`` on a device.
        args: tensors, which are copied for each call since operators may write them, and other values.
        expect: what must come out, given what came out and ``args``, all on the CPU: tensors that are equal bit by bit,
            or `Near`. None: bit by bit what ``call`` computes on the CPU.
        toolchain: what builds the kernel.
    """

    family: str
    shape: str
    call: Callable[..., Any]
    args: Sequence[Any] = ()
    expect: Callable[..., Sequence[Expected]] | None = None
    toolchain: str = "nvrtc"

    def run(self, device: torch.device) -> Results:
        """The results on a device."""
        result = self.call(*_on(device, self.args))
        return (result,) if isinstance(result, Tensor) else result

    def expected(self, got: Results) -> Sequence[Expected]:
        """What must come out."""
        return self.run(CPU) if self.expect is None else self.expect(got, *self.args)


def _on(device: torch.device, values: Iterable[Any]) -> list[Any]:
    return [v.clone().to(device) if isinstance(v, Tensor) else v for v in values]


# ── the table ────────────────────────────────────────────────────────────────────────────────────


def all_checks() -> list[Check]:
    """Every check, in the order in which they run: the ones that build quickly first."""
    parts = (_quantization(), _decoder(), _routing(), _attention(), _codebook(), _int8_weights(), _gemm())
    return [check for part in parts for check in part]


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def _integers(low: int, high: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.int8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int64, device="cpu").to(dtype)


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def _near(bound: Callable[..., Near]) -> Callable[..., Sequence[Expected]]:
    """What is expected of an operator with one result that is near an exact one."""
    return lambda got, *args: (bound(*args),)


def _quantization() -> Iterator[Check]:
    x = _random(5, 333, dtype=HALF)
    x[1] = 0
    x[2, 7] = 6e4
    q, scale = int8.quantize_per_token_ref(x, 336)
    yield Check("quantize_per_token", "5x333 float16", OPS.quantize_per_token, (x, 336))
    signs = tokens.operands("hadamard", 128, 320, (3,), HALF)  # of a last group of 64 columns
    yield Check("quantize_rotated", "5x320 float16", OPS.quantize_rotated, (x[:, :320], signs, 128, 3))
    yield Check("quantize_per_tensor", "5x333 float16", OPS.quantize_per_tensor, (x, 0.05, -7, 336))
    yield Check("dequantize", "5x336 to float16", OPS.dequantize, (q, scale, HALF))
    yield Check("colsum", "5x336", OPS.colsum, (q,))


def _decoder() -> Iterator[Check]:
    k = 1280
    x, residual = 3 * _random(5, k, dtype=HALF), _random(5, k, seed=1, dtype=HALF)
    weight, bias = (1 + 0.3 * _random(k, seed=2)).to(HALF), _random(k, seed=3, dtype=HALF)
    for kind, added in (("rms", None), ("layer", bias)):
        args = (x, residual, weight, added, kind == "layer", 1e-5)
        yield Check("norm", f"{kind} 5x{k} float16", _add_norm, args, _add_norm_expected)
    gate, up = 4 * _random(7, 1000, dtype=HALF), _random(7, 1000, seed=1, dtype=HALF)
    yield Check("silu_mul", "7x1000 float16", OPS.silu_mul, (gate, up), _near(silu_mul))
    yield Check("gelu_tanh", "7x1000 float32", OPS.gelu_tanh, (gate.float(),), _near(gelu_tanh))
    ids, positions = torch.tensor([0, 36, 5, 5], dtype=torch.int64, device="cpu"), _int32(1, 0, 8, 2)
    table, scale, places = _integers(-127, 128, 37, 320), _random(37).abs(), _random(9, 320, seed=1, dtype=HALF)
    yield Check("embed", "4 of 37x320 int8", OPS.embed_rows, (ids, table, scale, positions, places, HALF))
    logits = _random(5, 50257, dtype=HALF)
    logits[1, 100:200] = torch.inf
    yield Check("argmax", "5x50257 float16", OPS.argmax, (logits,))
    state = torch.zeros(5, dtype=torch.int64, device="cpu"), _int32(*[63] * 5), _int32(*[64] * 5)
    yield Check("advance", "5x50257 float16", _advance, (logits, *state))
    text = _integers(0, 3, 5, 4096, dtype=torch.int32)
    drafted = _integers(0, 3, 8, 5, seed=1, dtype=torch.int64)
    at = _int32(*[4000] * 4, 4096)
    step = drafted[:5].t().contiguous(), drafted, _int32(*[8] * 5), at, at.clone(), text, _int32(*[4001] * 5)
    yield Check("accept", "5x4096 of 3 tokens", _accept, step)


def _routing() -> Iterator[Check]:
    logits, bias = _random(37, 128, dtype=HALF), 0.2 * _random(128, seed=1)
    for groups, options in ((1, (None, "softmax", 8)), (8, (bias, "logits", 6, 8, 4, "top2"))):
        yield Check("route", f"37x128 float16, groups {groups}", OPS.route, (logits, *options), _routes_expected)
    x, weight = _integers(-2, 3, 5, 256, dtype=HALF), _integers(-2, 3, 128, 256, seed=1, dtype=HALF) / 64
    router = (x, weight, HALF, None, "softmax", 8)
    yield Check("linear_route", "5x256 of 128 float16", OPS.linear_route, router, _router_expected)
    experts = _integers(-1, 131, 37, 8, dtype=torch.int32)
    yield Check("sort_routes", "37x8 of 128", OPS.sort_routes, (experts, 128, 8))
    yield Check("sort_routes", "5x8 of 128", OPS.sort_routes, (experts[:5], 128, 8))
    results, added, weights = (
        _random(37 * 8, 320, dtype=HALF),
        _random(37, 320, seed=1, dtype=HALF),
        _random(37, 8).abs(),
    )
    yield Check("sum_routes", "37x8x320 float16", OPS.sum_routes, (results, weights, experts, 128, added))


def _routes_expected(got: Results, logits: Tensor, bias: Tensor | None, scores: str, *rest: Any) -> Sequence[Expected]:
    _, experts = OPS.route(logits, bias, scores, *rest)
    return routes(logits, experts, scores), experts


def _router_expected(got: Results, x: Tensor, weight: Tensor, dtype: torch.dtype, *rest: Any) -> Sequence[Expected]:
    """Logits have so few bits that every order of their sums is exact."""
    return _routes_expected(got, logits_of(x, weight, dtype), *rest)


def _add_norm(*args: Any) -> Results:
    s, y = OPS.add_norm(*args)
    _, q, scale = OPS.add_norm_int8(*args, s.shape[1])
    return s, y, q, scale


def _add_norm_expected(got: Results, x: Tensor, residual: Tensor, *args: Any) -> Sequence[Expected]:
    s = x + residual
    # The quantized norm quantizes the device's own norm, bit by bit.
    return s, norm(s, *args), *int8.quantize_per_token_ref(got[1], x.shape[1])


def _advance(logits: Tensor, *state: Tensor) -> Results:
    OPS.advance(logits, *state, 64)
    return state


def _accept(chosen: Tensor, *state: Tensor) -> Results:
    OPS.accept(chosen, *state, 4096, most=8)
    return state


def _rotary_tables(context: int, speeds: Tensor) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(context, dtype=torch.float32, device="cpu"), speeds).repeat(1, 2)
    return angles.cos().to(HALF), angles.sin().to(HALF)


def _cache(batch: int, kv_heads: int, context: int, head: int, dtype: torch.dtype, quantized: bool) -> tuple[Any, ...]:
    """Keys, values and their scales."""
    kv = _random(2, batch, kv_heads, context, head, seed=context).to(dtype)
    if not quantized:
        return kv[0], kv[1], None, None
    q, scale = int8.quantize_per_token_ref(kv.view(-1, head), head)
    return *q.view(kv.shape), *scale.view(kv.shape[:-1])


def _attention() -> Iterator[Check]:
    frequencies = torch.arange(32, dtype=torch.float32, device="cpu")
    slots, tables = _int32(0, 299, 100), _rotary_tables(300, frequencies / 64)
    for quantized in (False, True):
        qkv = [_random(3, n, 64, seed=i, dtype=HALF) for i, n in enumerate((6, 2, 2))]
        args = (*qkv, *tables, slots, slots, *_cache(3, 2, 300, 64, HALF, quantized))
        kind = "int8" if quantized else "float16"
        yield Check("append_kv", f"3 tokens, heads of 64, {kind} cache", _append_kv, args)

    slots, tables = _int32(0, 699, 350), _rotary_tables(700, 1 / (1 + frequencies))
    qkv = [_random(3, n, 64, seed=n + i, dtype=HALF) for i, n in enumerate((8, 2, 2))]
    absmax = torch.zeros(3, dtype=torch.float32, device="cpu")
    args = (*qkv, *tables, slots, slots, *_cache(3, 2, 700, 64, HALF, True), absmax)
    shape = "3 sequences, 8/2 heads of 64, int8 cache"
    yield Check("append_attention", shape, _append_attention, args, _append_attention_expected)

    # Chunks of two sequences, after what their caches hold; few tokens and more than a tile.
    for dtype, length, heads, kv_heads, head, quantized in (
        (HALF, 70, 8, 2, 128, False),
        (torch.bfloat16, 70, 8, 2, 64, True),
        (HALF, 5, 6, 6, 80, False),
        (HALF, 40, 2, 1, 256, True),
    ):
        q = _random(2 * length, heads, head, seed=length, dtype=dtype)
        cache = _cache(2, kv_heads, 220, head, dtype, quantized)
        shape = f"2 chunks of {length} tokens, {heads}/{kv_heads} heads of {head}, {_kind(dtype, quantized)}"
        args = (q, *cache, _int32(0, 150), _int32(length, length), head**-0.5, length)
        yield Check("prompt_attention", shape, OPS.prompt_attention, args, _near(chunks_attention))
    # One part of the context; parts that meet in a cluster, if there are some; parts that meet in a workspace.
    for dtype, batch, heads, kv_heads, head, context, quantized in (
        (torch.float32, 1, 4, 2, 64, 2000, False),
        (HALF, 128, 4, 2, 64, 100, False),
        (HALF, 1, 8, 8, 64, 1024, False),
        (HALF, 1, 32, 8, 128, 8192, False),
        (torch.bfloat16, 3, 8, 2, 64, 1500, True),
    ):
        q = _random(batch, heads, head, seed=1, dtype=dtype)
        cache = _cache(batch, kv_heads, context, head, dtype, quantized)
        positions = context - 1 - torch.arange(batch, dtype=torch.int32, device="cpu") % 50
        shape = f"{batch} sequences, {heads}/{kv_heads} heads of {head}, {context} tokens, {_kind(dtype, quantized)}"
        args = (q, *cache, positions, head**-0.5)
        yield Check("attention", shape, OPS.decode_attention, args, _near(attention))


def _kind(dtype: torch.dtype, quantized: bool) -> str:
    return str(dtype).removeprefix("torch.") + (", int8 cache" if quantized else "")


def _append_kv(*args: Any) -> Results:
    OPS.append_kv(*args)
    return [args[0], *(t for t in args[7:] if t is not None)]


def _append_attention(*args: Any) -> Results:
    """A step's rotary positions, its cache's new rows, its attention, and the largest magnitudes of the result."""
    y = OPS.append_attention(*args[:-1], 0.125, None, args[-1])
    return y, *args[-5:]


def _append_attention_expected(got: Results, *args: Any) -> Sequence[Expected]:
    q, k, v, k_scales, v_scales = _append_kv(*_on(CPU, args[:-1]))
    largest = torch.zeros_like(args[-1])
    int8.raise_absmax(largest, got[0])
    near = attention(q, k, v, k_scales, v_scales, args[6], 0.125)
    return near, k, v, k_scales, v_scales, largest


def _layer(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, scale and bias of a layer whose results for full-range tokens are of order 1."""
    weight = _integers(-127, 128, n, k, seed=n)
    return weight, (_random(n).abs() + 0.5) / (74 * k**0.5), _random(n, seed=1)


_MIXED_SIZES = 80, 336, 272
_GEMM_SIZES = 129, 336, 272
_GEMM_FAMILIES = (INT8_MMA.name, INT8_WMMA.name, INT8_DP4A.name, INT8_CUTLASS.name)


def _int8_weights() -> Iterator[Check]:
    many, n, k = _MIXED_SIZES
    weight, scale, bias = layer = _layer(n, k)
    args: tuple[Any, ...] = (_integers(-128, 128, 3, k), (_random(3).abs() + 0.5) / 74, *layer, "relu", HALF)
    yield Check("int8_stream", f"3x{n}x{k}", OPS.int8_linear, args)
    # Rows of D that are no multiple of 16 bytes are not CUTLASS's.
    odd = [t[:-1] for t in layer]
    for m in (1, 3, 40):
        yield Check("int16x8", f"{m}x{n - 1}x{k}", OPS.int16x8_linear, (_random(m, k, dtype=HALF), *odd, "relu"))
    bias_at_sums = _integers(-(2**20), 2**20, n, dtype=torch.int64)
    multiplier, shift = (_integers(*ends, n, dtype=torch.int32) for ends in ((2**23, 2**24), (34, 38)))
    for m, (bits, low, high) in product((3, 40), ((8, -128, 128), (16, -32_639, 32_640))):
        x = _integers(low, high, m, k, dtype=torch.int8 if bits == 8 else torch.int16)
        scaled = (shift, _int32(-3)) if bits == 8 else (shift + 1, None)
        args = (x, weight, bias_at_sums, multiplier, *scaled, True)
        yield Check(f"integers{bits}", f"{m}x{n}x{k}", OPS.integer_linear, args)
    # Rows of tokens that are no multiple of 16 bytes are the mma kernel's on every GPU. Hopper has other kernels for 40
    # tokens than for 80.
    sizes = ("w8a16_stream", 3, k), ("w8a16", 40, k), ("w8a16", many, k), ("w8a16_mma", many, k - 2)
    for name, m, columns in sizes:
        args = (_random(m, columns, dtype=HALF), weight, scale, bias)
        yield Check(name, f"{m}x{n}x{columns}", _w8a16_linear, args, lambda got, *args: [w8a16(*args)] * 2)


def _w8a16_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Results:
    """By Python, then by C++ where it is built."""
    return [OPS.w8a16_linear(x, weight, scale, bias, "none") for _ in range(2)]


def _gemm() -> Iterator[Check]:
    m, n, k = _GEMM_SIZES
    weight, scale, bias = _layer(n, k)
    args = (_integers(-128, 128, m, k), weight, (_random(m, seed=2).abs() + 0.5) / 74, scale, bias)
    for name in _GEMM_FAMILIES:
        toolchain = "nvcc" if name == INT8_CUTLASS.name else "nvrtc"
        yield Check(name, f"{m}x{n}x{k}", partial(_gemm_s8, name), args, toolchain=toolchain)


def _gemm_s8(name: str, a: Tensor, b: Tensor, row_scale: Tensor, col_scale: Tensor, bias: Tensor) -> Tensor:
    call = GemmS8Op(a, b, row_scale=row_scale, col_scale=col_scale, bias=bias)
    return call.cpu() if a.device == CPU else gemm_s8(call, _gemm_choice(name, target(a.get_device())))


def _gemm_problem() -> GemmProblem:
    epilogue = Epilogue(DType.F16, row_scale="per_token", col_scale="per_channel", bias=True)
    return dispatch.problem_of(*_GEMM_SIZES, epilogue=epilogue)


def _gemm_choice(name: str, gpu: Target) -> Choice:
    return Choice(name, best_tile(family(name), _gemm_problem(), *_GEMM_SIZES, gpu))


def slow_sources(gpu: Target, *, cutlass: bool) -> list[KernelSource]:
    """The kernels that take longest to build, which are built while other checks run."""
    names = [name for name in _GEMM_FAMILIES if cutlass or name != INT8_CUTLASS.name]
    problem = linear_problem(DType.F16, *_MIXED_SIZES[1:], True, "none", "w8a16")
    mixed = dispatch.select_w8a16(problem, *_MIXED_SIZES, gpu, nvcc=cutlass)
    sources = [dispatch.emit(_gemm_choice(name, gpu), _gemm_problem(), gpu.arch) for name in names]
    return [*sources, dispatch.emit(mixed, problem, gpu.arch)]


def _codebook() -> Iterator[Check]:
    # Few tokens, some, a prompt; few of a long K and a prompt of many channels, which have kernels of their own on some
    # GPUs.
    for n, k, rows in ((136, 384, (1, 9, 40, 130)), (48, 14336, (1, 9)), (8192, 128, (300,))):
        linear = nn.Linear(k, n)
        with torch.no_grad():
            linear.weight.copy_(_random(n, k, seed=n))
            linear.bias.copy_(_random(n))
        for scheme in ("codebook4", "codebook4_int8", "codebook4_pairs", "codebook4_pairs_int8"):
            layer: Any = qcut.Linear.from_float(linear, scheme)
            for m in rows:
                yield from _codebook_product(layer, m, f"{scheme}, {m}x{n}x{k}")
    args = (_random(9, 256, dtype=HALF), tokens.operands("qr", 128, 256, (0,), HALF), "qr", 128, [0], HALF)
    yield Check("rotate_dense", "9x256, groups of 128", lambda *args: _rotate(*args)[0], args, _near(rotate_dense))


def _rotate(x: Tensor, *args: Any) -> Results:
    blocks, scale = OPS.rotate_tokens(x, *args)
    return layout.from_blocks(blocks.cpu(), len(x)), scale  # kernels leave the last block's other rows as they were


def _codebook_product(layer: Any, m: int, shape: str) -> Iterator[Check]:
    k, seeds, group = layer.in_features, list(layer.scheme.seeds), layer.group_size
    x = _random(m, k, seed=m, dtype=HALF)
    signs = tokens.operands("hadamard", group, k, seeds, HALF)
    book = list(products.pack_book(layer.codebook, HALF))
    stored = layer.packed_norms, layer.fold, layer.col_scale
    rotation = (x, signs, "hadamard", group, seeds, torch.int8 if layer.int8 else HALF)
    yield Check("rotate", shape, _rotate, rotation)
    blocks, row_scale = OPS.rotate_tokens(*rotation)
    rest = (book, layer.bias, 4, "none", None, HALF)

    def bound(*_: Any) -> Near:
        options = (4, "none", None, torch.float32)
        exact = OPS.codebook_gemm(blocks, None, m, layer.units, *stored, book, layer.bias, *options).double()
        # The magnitudes of all weights: pairs without their signs, which are bits of indices.
        values, units = book, layer.units & 63
        if not layer.scheme.pairs:
            values, units = list(products.pack_book(layer.codebook.abs(), HALF)), layer.units
        terms = OPS.codebook_gemm(blocks.abs(), None, m, units, *stored, values, None, *options)
        sizes = terms.double() + layer.bias.abs().double()
        rows = layout.from_blocks(blocks, m).double().abs().sum(1, keepdim=True)
        return codebook(exact, sizes, rows * layer.col_scale.double(), k, HALF)

    expect = None if layer.int8 else _near(bound)
    given = (blocks, row_scale if layer.int8 else None, m, layer.units, *stored, *rest)
    checks = [Check("codebook", shape, OPS.codebook_gemm, given, expect)]
    if m == 1:
        rotated = (x, signs, group, seeds, layer.units, *stored, *rest)
        checks.append(Check("codebook", f"{shape}, rotated by the product", OPS.codebook_gemv, rotated, expect))
    yield from checks if layer.int8 else reversed(checks)


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────


def half_ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of rounding a float64 value to ``dtype``."""
    info, exponent = torch.finfo(dtype), torch.frexp(value).exponent - 1
    spacing = torch.ldexp(torch.full_like(value, info.eps), exponent)
    return spacing.clamp(min=info.smallest_normal * info.eps) / 2


def _half_ulps(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of 1 and of 0."""
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return half_ulp(one, dtype), half_ulp(0 * one, dtype)


def w8a16(x: Tensor, qweight: Tensor, scale: Tensor, bias: Tensor) -> Near:
    """A product of 16-bit tokens with int8 weights: float32 sums in any order, a scale, a bias."""
    rows, weight = x.double(), qweight[:, : x.shape[1]].double()
    exact = (rows @ weight.t()) * scale.double() + bias.double()
    sizes = (rows.abs() @ weight.abs().t()) * scale.double() + bias.abs().double()
    return Near.rounded(exact, sizes * ((x.shape[1] + 4) * _EPS), x.dtype)


def codebook(exact: Tensor, sizes: Tensor, token_sizes: Tensor, columns: int, dtype: torch.dtype) -> Near:
    """A product of 16-bit tokens with codebook weights, each rounded once to the tokens' type, and float32 sums.

    Args:
        exact: the result.
        sizes: the sum of the magnitudes of all terms of each result, and of the bias.
        token_sizes: the sum of the magnitudes of each token times the channel's scale, as ``exact``.
        columns: terms of a sum.
        dtype: type of tokens and result.
    """
    weight, smallest = _half_ulps(dtype)
    return Near.rounded(exact, sizes * (weight + (columns + 8) * _EPS) + token_sizes * smallest, dtype)


def norm(s: Tensor, weight: Tensor, bias: Tensor | None, layer: bool, eps: float) -> Near:
    """The norm of rows: a LayerNorm with its bias, or an RMSNorm."""
    rows, w, k, dtype = s.double(), weight.double(), s.shape[1], s.dtype
    if layer and bias is not None:
        exact = F.layer_norm(rows, (k,), w, bias.double(), eps)
        sizes, rounding = (exact - bias.double()).abs() + 4 * w.abs(), 0.0 * w
    else:
        scaled = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
        exact = scaled * w
        # The quotient is rounded before the weight multiplies it, to either side of a power of two.
        sizes, rounding = exact.abs(), half_ulp(scaled.abs() * (1 + 2.0**-10), dtype) * w.abs()
    # A sum of k squares errs by k 2**-24 of itself; a few roundings of float32 follow.
    return Near.rounded(exact, sizes * ((k + 16) * _EPS) + rounding + 1e-6, dtype)


def routes(logits: Tensor, experts: Tensor, scores: str) -> Near:
    """The weights of chosen experts: shares of all of a token's experts, or of those chosen."""
    x, chosen = logits.double(), experts.long()
    exact = x.softmax(1).gather(1, chosen) if scores == "softmax" else x.gather(1, chosen).softmax(1)
    return Near(exact, exact * ((logits.shape[1] + 128) * 2.0**-24))


def gelu_tanh(x: Tensor) -> Near:
    """GELU by its hyperbolic tangent; a kernel's sigmoid is within ``2**-21``."""
    rows = x.double()
    exact = rows * (2 * (2 / torch.pi) ** 0.5 * (rows + 0.044715 * rows**3)).sigmoid()
    return Near.rounded(exact, rows.abs() * 2.0**-21, x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Near:
    """SiLU of the gate, rounded, times ``up``."""
    rows, factor = gate.double(), up.double()
    silu, slack = rows * rows.sigmoid(), rows.abs() * 2.0**-21
    slack = (slack + half_ulp(silu.abs() + slack, gate.dtype)) * factor.abs()
    return Near.rounded(silu * factor, slack, gate.dtype)


def rotate_dense(x: Tensor, matrix: Tensor, *_: Any) -> Near:
    """Groups of columns of ``x`` times a matrix ``[1, G, d, d]``, 16-bit values in float32 sums of any order."""
    (turn,) = matrix.double()
    rows = x.double().view(len(x), len(turn), -1)
    exact = torch.einsum("mgk,gnk->mgn", rows, turn).flatten(1)
    sizes = torch.einsum("mgk,gnk->mgn", rows.abs(), turn.abs()).flatten(1)
    return Near.rounded(exact, sizes * ((rows.shape[2] + 4) * _EPS), x.dtype)


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    positions: Tensor,
    scale: float,
) -> Near:
    """Attention of a query of each sequence to its cache.

    A score errs by ``head * 2**-23`` of its terms' sizes, an exponential by ``2**-21``, a sum of T terms by
    ``T * 2**-23`` of its size. An error of a score is the same share of its weight, and weights add up to 1. Tensor
    cores round every eight products once more. They take weights in 16 bits: each errs by a share of itself, and below
    ``2**-14`` of the largest by half a step, in units in which the largest, with an int8 cache times its scale, is 1.

    ``q`` is ``[B, heads, head]``, the cache ``[B, kv_heads, context, head]`` with scales if it is int8, and
    ``positions`` has the last one of each sequence.
    """
    (batch, _, head), dtype = q.shape, q.dtype
    last = positions.view(batch, 1, 1, 1)
    unseen = torch.arange(keys.shape[2], dtype=torch.int64, device="cpu").view(-1, 1) > last
    rows = q.double().view(batch, keys.shape[1], -1, head)
    k, stored = (t.double().masked_fill(unseen, 0) for t in (keys, values))
    v = stored
    if key_scales is not None and value_scales is not None:
        k, v = k * key_scales.double()[..., None], v * value_scales.double()[..., None]
    weights = (rows @ k.mT * scale).masked_fill(unseen.mT, -torch.inf).softmax(-1)
    exact, terms = weights @ v, weights @ v.abs()
    sizes = (rows.abs() @ k.abs().mT) * scale
    share = (1.25 * head + 8) * _EPS * sizes.amax(-1, keepdim=True) + 2.0**-20 + 1.25 * (last + 64) * _EPS
    slack = 2 * share * terms
    if dtype is not torch.float32:
        weight, step = _half_ulps(dtype)
        steps = stored.abs().sum(2, keepdim=True)
        if value_scales is not None:
            steps = steps * value_scales.double()[..., None].masked_fill(unseen, 0).amax(2, keepdim=True)
        slack = slack + 2 * weight * terms + step * (steps + (last + 1) * exact.abs())
    return Near(*(t.view(q.shape) for t in Near.rounded(exact, slack, dtype)))


def chunks_attention(q: Tensor, *args: Any) -> Near:
    """Attention of chunks of tokens: each token is a sequence of its own, with its chunk's cache."""
    *cache, starts, _, scale, length = args
    each: Any = [None if t is None else t.repeat_interleave(length, 0) for t in cache]
    positions = (starts[:, None] + torch.arange(length, dtype=torch.int32, device="cpu")).flatten()
    k, v, k_scales, v_scales = each
    return attention(q, k, v, k_scales, v_scales, positions, scale)


# ── verdicts ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Verdict:
    """What one check found.

    Attributes:
        family: the family, as kernels' names, or the operator's name.
        shape: sizes.
        kernels: names of the kernels that ran.
        problem: what differs, or why nothing could be compared; empty if all is right.
        skipped: why the check did not run; empty if it did.
    """

    family: str
    shape: str
    kernels: tuple[str, ...] = ()
    problem: str = ""
    skipped: str = ""

    def __str__(self) -> str:
        mark = "skip" if self.skipped else "FAIL" if self.problem else "ok  "
        ran = ", ".join(self.kernels)
        text = f"[{mark}] {self.family:<20} {self.shape}" + (f"  {ran}" if ran else "")
        return text + "".join(f"\n{'':7}-> {why}" for why in (self.problem, self.skipped) if why)


def difference(got: Tensor, expected: Expected) -> str:
    """What differs between a result and what must come out, both on the CPU; empty if nothing does."""
    exact, within = expected if isinstance(expected, Near) else (expected, None)
    if got.shape != exact.shape or (within is None and got.dtype is not exact.dtype):
        return f"{got.dtype} {list(got.shape)}, not {exact.dtype} {list(exact.shape)}"
    if within is None:
        wrong = (got != exact) & ~(got.isnan() & exact.isnan())
        if got.is_floating_point():
            wrong |= (got == 0) & (exact == 0) & (got.signbit() != exact.signbit())
    else:
        wrong = ~((got.double() - exact).abs() <= within)
    if not bool(wrong.any()):
        return ""
    first = tuple(int(i) for i in wrong.nonzero()[0])
    tolerance = "every bit" if within is None else f"within {within[first]:.3g}"
    share = f"{int(wrong.sum()):,} of {wrong.numel():,} values differ"
    return f"{share}, first at {list(first)}: {got[first].item()!r}, must be {exact[first].item()!r} ({tolerance})"


def run_check(check: Check, device: torch.device) -> Verdict:
    """Run a check on a device. A kernel that cannot be built or launched is one that failed."""
    with watched_loads() as loaded:
        try:
            got = [t.cpu() for t in check.run(device)]
            found = [difference(*pair) for pair in zip(got, check.expected(got), strict=True)]
            problem = "; ".join(f"result {i}: {text}" if found[1:] else text for i, text in enumerate(found) if text)
        except (QcutError, EmitError, RuntimeError) as error:
            problem = f"{type(error).__name__}: {error}"
    return Verdict(check.family, check.shape, tuple(dict.fromkeys(loaded)), problem)


def run_checks(checks: Sequence[Check], device: torch.device, *, nvcc: bool, title: str = "") -> list[Verdict]:
    """A verdict for each check, in order. After a device error no further check can run.

    Args:
        checks: of `all_checks`.
        device: where they compute.
        nvcc: whether nvcc's kernels can be built.
        title: of a progress bar on standard error; empty: none is shown.
    """
    verdicts, lost = [], ""
    with progress_bar(len(checks), title, "check", shown=bool(title)) as advance:
        for check in checks:
            skipped = lost
            if not lost and check.toolchain == "nvcc" and not nvcc:
                skipped = "no nvcc or g++: other kernels serve instead"
            unrun = Verdict(check.family, check.shape, skipped=skipped)
            verdicts.append(unrun if skipped else run_check(check, device))
            lost = lost or _device_error(device)
            advance(1)
    return verdicts


def _device_error(device: torch.device) -> str:
    """Why the device can compute no more; empty if it can."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        return f"the device is lost: {str(error).splitlines()[0]}"
    return ""


@no_fallbacks()  # the checks are of the best kernels
def selftest(ordinal: int, *, progress: bool = True) -> list[Verdict]:
    """Run every check on a GPU.

    Kernels come from the cache or are built. Plans of this process are forgotten first.

    Args:
        ordinal: CUDA ordinal.
        progress: show a bar on standard error.

    Returns:
        A verdict for each check, in order.

    Raises:
        UnsupportedError: the GPU has no kernels.
    """
    gpu, nvcc = target(ordinal), jit.is_toolchain_available("nvcc")
    slow = slow_sources(gpu, cutlass=nvcc)
    # What fails to build fails once more, with its message, when it is needed.
    builders = [threading.Thread(target=jit.build_many, args=(slow,), kwargs={"progress": False})]
    builders.append(threading.Thread(target=native.build))
    for builder in builders:
        builder.start()
    forget_plans()
    title = f"self-test of {gpu.name}" if progress else ""
    with torch.cuda.device(ordinal):
        verdicts = run_checks(all_checks(), torch.device("cuda", ordinal), nvcc=nvcc, title=title)
    for builder in builders:
        builder.join()
    return verdicts


def selftest_gpus(ordinal: int | None) -> list[dict[str, Any]]:
    """Test GPUs and print what was found.

    Args:
        ordinal: CUDA ordinal; None: every visible GPU.

    Returns:
        Each verdict as plain data, and its GPU's number.

    Raises:
        DeviceError: there is no GPU, or none of that number.
        UnsupportedError: a GPU has no kernels.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise DeviceError("doctor --selftest: there is no CUDA device here; the self-test compares a GPU with the CPU")
    if ordinal is not None and not 0 <= ordinal < count:
        raise DeviceError(f"doctor --selftest: device {ordinal} does not exist; allowed: 0 to {count - 1}")
    found: list[dict[str, Any]] = []
    for each in range(count) if ordinal is None else (ordinal,):
        verdicts = selftest(each, progress=sys.stderr.isatty())
        gpu, wrong = target(each), sum(bool(v.problem) for v in verdicts)
        skipped = sum(bool(v.skipped) for v in verdicts)
        print(f"cuda:{each} {gpu.name} ({gpu.arch}): {gpu.machine}", *verdicts, sep="\n")
        print(f"{len(verdicts) - wrong - skipped} right, {wrong} wrong, {skipped} not run\n")
        found += [{"gpu": each, **asdict(verdict)} for verdict in verdicts]
    return found
