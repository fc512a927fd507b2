"""What the self-test computes: for every family an operator's call on small data, and what must come out.

Data are full-range int8 and normal floats with fixed seeds. A check computes on the device that it is given; on the CPU
it computes the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import qcut
from qcut.backends.cuda.gemm import gemm_s8
from qcut.backends.cuda.launch.plans import target
from qcut.backends.cuda.linear import linear_problem
from qcut.cli.selftest import bounds
from qcut.cli.selftest.bounds import Near
from qcut.dispatch import gemm as dispatch
from qcut.dispatch.gemm import Choice
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import best_tile
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import INT8_CUTLASS, INT8_DP4A, INT8_MMA, INT8_WMMA, family
from qcut.emitters.gemm.problem import GemmProblem
from qcut.numerics import int8
from qcut.numerics.codebook import layout, products, tokens
from qcut.ops.gemm import GemmS8

OPS = torch.ops.qcut
HALF = torch.float16

Expected = Tensor | Near
Results = Sequence[Tensor]


@dataclass(frozen=True)
class Check:
    """One call of one family.

    Attributes:
        family: the family, as kernels' names, or the operator's name.
        shape: sizes, for messages.
        run: computes results on a device.
        expect: what must come out, given what came out, all on the CPU: a tensor that is equal bit by bit, or `Near`.
            None: bit by bit what ``run`` computes on the CPU.
        toolchain: what builds the kernel.
    """

    family: str
    shape: str
    run: Callable[[torch.device], Results]
    expect: Callable[[Results], Sequence[Expected]] | None = None
    toolchain: str = "nvrtc"

    def expected(self, got: Results) -> Sequence[Expected]:
        """What must come out."""
        return self.run(torch.device("cpu")) if self.expect is None else self.expect(got)


def all_checks() -> list[Check]:
    """Every check, in the order in which they run: the ones that build quickly first."""
    parts = (_quantize, _decoder, _attention, _codebook, _gemm_stream, _gemm)
    return [check for part in parts for check in part()]


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu").to(
        dtype
    )


def _integers(low: int, high: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.randint(
        low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int64, device="cpu"
    ).to(dtype)


def _on(device: torch.device, *values: Any) -> tuple[Any, ...]:
    """The arguments on a device; tensors are copies, since operators may write them."""
    return tuple(v.clone().to(device) if isinstance(v, Tensor) else v for v in values)


def _same(family: str, shape: str, call: Callable[..., Any], *args: Any) -> Check:
    """A check of an operator whose results are equal on every device."""

    def run(device: torch.device) -> Results:
        given = _on(device, *args)
        result = call(*given)
        return (result,) if isinstance(result, Tensor) else result

    return Check(family, shape, run)


def _always(*expected: Expected) -> Callable[[Results], Sequence[Expected]]:
    return lambda got: expected


def _near(family: str, shape: str, expect: Callable[[], Near], call: Callable[..., Any], *args: Any) -> Check:
    """A check of an operator whose result is near an exact one."""

    def run(device: torch.device) -> Results:
        return (call(*_on(device, *args)),)

    return Check(family, shape, run, lambda got: (expect(),))


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


def _quantize() -> Iterator[Check]:
    x = _random(5, 333, dtype=HALF)
    x[1] = 0
    x[2, 7] = 6e4
    yield _same("quantize_per_token", "5x333 float16", OPS.quantize_per_token, x, 336)
    yield _same("quantize_per_tensor", "5x333 float16", OPS.quantize_per_tensor, x, 0.05, -7, 336)
    q, scale = int8.quantize_per_token_ref(x, 336)
    yield _same("dequantize", "5x336 to float16", OPS.dequantize, q, scale, HALF)
    yield _same("colsum", "5x336", OPS.colsum, q)


def _decoder() -> Iterator[Check]:
    def add_norm(layer: bool) -> Check:
        k, eps = 1280, 1e-5
        x, residual = 3 * _random(5, k, dtype=HALF), _random(5, k, seed=1, dtype=HALF)
        weight, bias = (1 + 0.3 * _random(k, seed=2)).to(HALF), _random(k, seed=3, dtype=HALF) if layer else None
        total = x + residual

        def run(device: torch.device) -> Results:
            given = _on(device, x, residual, weight, bias)
            s, y = OPS.add_norm(*given, layer, eps)
            _, q, scale = OPS.add_norm_int8(*given, layer, eps, k)
            return s, y, q, scale

        def expect(got: Results) -> Sequence[Expected]:
            # The quantized norm quantizes the device's own norm, bit by bit.
            return total, bounds.norm(total, weight, bias, eps), *int8.quantize_per_token_ref(got[1], k)

        return Check("norm", f"{'layer' if layer else 'rms'} 5x{k} float16", run, expect)

    yield from map(add_norm, (False, True))
    gate, up = 4 * _random(7, 1000, dtype=HALF), _random(7, 1000, seed=1, dtype=HALF)
    yield _near("silu_mul", "7x1000 float16", lambda: bounds.silu_mul(gate, up), OPS.silu_mul, gate, up)
    single = gate.float()
    yield _near("gelu_tanh", "7x1000 float32", lambda: bounds.gelu_tanh(single), OPS.gelu_tanh, single)

    ids, positions = (
        torch.tensor([0, 36, 5, 5], dtype=torch.int64, device="cpu"),
        torch.tensor([1, 0, 8, 2], dtype=torch.int32, device="cpu"),
    )
    table, scale, places = _integers(-127, 128, 37, 320), _random(37).abs(), _random(9, 320, seed=1, dtype=HALF)
    yield _same("embed", "4 of 37x320 int8", OPS.embed_rows, ids, table, scale, positions, places, HALF)

    logits = _random(5, 50257, dtype=HALF)
    logits[1, 100:200] = torch.inf
    yield _same("argmax", "5x50257 float16", OPS.argmax, logits)

    def advance(*given: Tensor) -> Results:
        OPS.advance(*given, 64)
        return given[1:]

    state = (
        torch.zeros(5, dtype=torch.int64, device="cpu"),
        *(torch.full((5,), 63 + i, dtype=torch.int32, device="cpu") for i in range(2)),
    )
    yield _same("advance", "5x50257 float16", advance, logits, *state)


# ── attention ────────────────────────────────────────────────────────────────────────────────────


def _cache(batch: int, kv_heads: int, context: int, head: int, dtype: torch.dtype, quantized: bool) -> tuple[Any, ...]:
    """Keys, values and their scales."""
    kv = _random(2, batch, kv_heads, context, head, seed=context).to(dtype)
    if not quantized:
        return kv[0], kv[1], None, None
    q, scale = int8.quantize_per_token_ref(kv.view(-1, head), head)
    return *q.view(kv.shape), *scale.view(kv.shape[:-1])


def _attention() -> Iterator[Check]:
    head, context, kv_heads = 64, 300, 2
    angles = torch.outer(
        torch.arange(context, dtype=torch.float32, device="cpu"),
        torch.arange(head // 2, dtype=torch.float32, device="cpu") / head,
    ).repeat(1, 2)
    tables = angles.cos().to(HALF), angles.sin().to(HALF)
    for quantized in (False, True):
        kind = "int8" if quantized else "float16"
        rows = [_random(3, n, head, seed=i, dtype=HALF) for i, n in enumerate((6, kv_heads, kv_heads))]
        slots = torch.tensor([0, 299, 100], dtype=torch.int32, device="cpu")
        cache = _cache(3, kv_heads, context, head, HALF, quantized)

        def append(*given: Any) -> Results:
            OPS.append_kv(*given)
            return [given[0], *(t for t in given[7:] if t is not None)]

        yield _same(
            "append_kv", f"3 tokens, heads of {head}, {kind} cache", append, *rows, *tables, slots, slots, *cache
        )

    yield _step()
    yield from _prompts()
    # One part of the context; parts that meet in a cluster, where there are some; parts that meet in a workspace.
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
        scale = head**-0.5
        name = str(dtype).removeprefix("torch.") + (", int8 cache" if quantized else "")
        yield _near(
            "attention",
            f"{batch} sequences, {heads}/{kv_heads} heads of {head}, {context} tokens, {name}",
            partial(bounds.attention, q, cache[0], cache[1], cache[2], cache[3], positions, scale),
            OPS.decode_attention,
            q,
            *cache,
            positions,
            scale,
        )


def _prompts() -> Iterator[Check]:
    """Chunks of two sequences, after what their caches hold; few tokens and more than a tile."""
    for dtype, length, heads, kv_heads, head, quantized in (
        (HALF, 70, 8, 2, 128, False),
        (torch.bfloat16, 70, 8, 2, 64, True),
        (HALF, 5, 6, 6, 80, False),
        (HALF, 40, 2, 1, 256, True),
    ):
        starts, scale = torch.tensor([0, 150], dtype=torch.int32, device="cpu"), head**-0.5
        lengths = torch.full_like(starts, length)
        q = _random(2 * length, heads, head, seed=length, dtype=dtype)
        cache = _cache(2, kv_heads, 220, head, dtype, quantized)
        positions = (starts[:, None] + torch.arange(length, dtype=torch.int32, device="cpu")).flatten()
        # For each token its sequence's cache.
        keys, values, *scales = (None if t is None else t.repeat_interleave(length, 0) for t in cache)
        assert keys is not None
        assert values is not None
        expect = partial(bounds.attention, q, keys, values, scales[0], scales[1], positions, scale)
        name = str(dtype).removeprefix("torch.") + (", int8 cache" if quantized else "")
        shape = f"2 chunks of {length} tokens, {heads}/{kv_heads} heads of {head}, {name}"
        given = (q, *cache, starts, lengths, scale, length)
        yield _near("prompt_attention", shape, expect, OPS.prompt_attention, *given)


def _step() -> Check:
    """A step's rotary positions, its cache's new rows, its attention, and the largest magnitudes of the result."""
    batch, heads, kv_heads, head, context, scale = 3, 8, 2, 64, 700, 0.125
    q, k, v = (_random(batch, n, head, seed=n + i, dtype=HALF) for i, n in enumerate((heads, kv_heads, kv_heads)))
    angles = torch.outer(
        torch.arange(context, dtype=torch.float32, device="cpu"),
        1 / (1 + torch.arange(head // 2, dtype=torch.float32, device="cpu")),
    ).repeat(1, 2)
    tables = angles.cos().to(HALF), angles.sin().to(HALF)
    slots = torch.tensor([0, 699, 350], dtype=torch.int32, device="cpu")
    cache = _cache(batch, kv_heads, context, head, HALF, True)

    def run(device: torch.device) -> Results:
        *given, absmax = _on(
            device, q, k, v, *tables, slots, slots, *cache, torch.zeros(batch, dtype=torch.float32, device="cpu")
        )
        y = OPS.append_attention(*given, scale, None, absmax)
        return y, *given[-4:], absmax

    def expect(got: Results) -> Sequence[Expected]:
        given = _on(torch.device("cpu"), q, k, v, *tables, slots, slots, *cache)
        OPS.append_kv(*given)
        turned, after = given[0], given[-4:]
        largest = torch.zeros(batch, dtype=torch.float32, device="cpu")
        int8.raise_absmax(largest, got[0])
        near = bounds.attention(turned, after[0], after[1], after[2], after[3], slots, scale)
        return near, *after, largest

    return Check("append_attention", f"{batch} sequences, {heads}/{kv_heads} heads of {head}, int8 cache", run, expect)


# ── products with int8 weights ───────────────────────────────────────────────────────────────────


def _layer(m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, scale and bias of a layer whose results for full-range tokens are of order 1."""
    weight = _integers(-127, 128, n, k, seed=n)
    return weight, (_random(n).abs() + 0.5) / (74 * k**0.5), _random(n, seed=1)


_MIXED_SIZES = 80, 336, 272


def _gemm_stream() -> Iterator[Check]:
    many, n, k = _MIXED_SIZES
    weight, scale, bias = _layer(3, n, k)
    q, q_scale = _integers(-128, 128, 3, k), (_random(3).abs() + 0.5) / 74
    yield _same("int8_stream", f"3x{n}x{k}", OPS.int8_linear, q, q_scale, weight, scale, bias, "relu", HALF)
    # Rows of D that are no multiple of 16 bytes are not CUTLASS's.
    odd = weight[:-1], scale[:-1], bias[:-1]
    for m in (1, 3, 40):
        yield _same("int16x8", f"{m}x{n - 1}x{k}", OPS.int16x8_linear, _random(m, k, dtype=HALF), *odd, "relu")
    bias_at_sums = _integers(-(2**20), 2**20, n, dtype=torch.int64)
    multiplier, shift = (_integers(*ends, n, dtype=torch.int32) for ends in ((2**23, 2**24), (34, 38)))
    for m, (low, high, dtype) in product((3, 40), ((-128, 128, torch.int8), (-32_639, 32_640, torch.int16))):
        tokens_of = _integers(low, high, m, k, dtype=dtype)
        zero_point = torch.tensor([-3], dtype=torch.int32, device="cpu") if dtype is torch.int8 else None
        scaled = bias_at_sums, multiplier, shift if zero_point is not None else shift + 1, zero_point
        name = f"integers{8 * dtype.itemsize}"
        yield _same(name, f"{m}x{n}x{k}", OPS.integer_linear, tokens_of, weight, *scaled, True)
    # Rows of tokens that are no multiple of 16 bytes are the mma kernel's on every GPU. Hopper has other kernels for 40
    # tokens than for 80.
    sizes = ("w8a16_stream", 3, k), ("w8a16", 40, k), ("w8a16", many, k), ("w8a16_mma", many, k - 2)
    for name, m, columns in sizes:
        x = _random(m, columns, dtype=HALF)
        near = bounds.w8a16(x, weight[:, :columns], scale, bias)

        def run(device: torch.device, x: Tensor = x) -> Results:
            given = _on(device, x, weight, scale, bias)
            return [OPS.w8a16_linear(*given, "none") for _ in range(2)]  # by Python, then by C++ where it is built

        yield Check(name, f"{m}x{n}x{columns}", run, _always(near, near))


_GEMM_SIZES = 129, 336, 272
_GEMM_FAMILIES = (INT8_MMA.name, INT8_WMMA.name, INT8_DP4A.name, INT8_CUTLASS.name)


def _gemm_problem() -> GemmProblem:
    epilogue = Epilogue(DType.F16, row_scale="per_token", col_scale="per_channel", bias=True)
    return dispatch.problem_of(*_GEMM_SIZES, epilogue=epilogue)


def _gemm_choice(name: str, gpu: Target) -> Choice:
    return Choice(name, best_tile(family(name), _gemm_problem(), *_GEMM_SIZES, gpu))


def slow_sources(gpu: Target, *, cutlass: bool) -> list[KernelSource]:
    """The kernels that take longest to build, so that they can be built beside other checks."""
    names = [name for name in _GEMM_FAMILIES if cutlass or name != INT8_CUTLASS.name]
    problem = linear_problem(DType.F16, *_MIXED_SIZES[1:], True, "none", "w8a16")
    mixed = dispatch.select_w8a16(problem, *_MIXED_SIZES, gpu, nvcc=cutlass)
    int8 = [dispatch.emit(_gemm_choice(name, gpu), _gemm_problem(), gpu.arch) for name in names]
    return [*int8, dispatch.emit(mixed, problem, gpu.arch)]


def _gemm() -> Iterator[Check]:
    m, n, k = _GEMM_SIZES
    weight, scale, bias = _layer(m, n, k)
    row_scale = (_random(m, seed=2).abs() + 0.5) / 74
    for name in _GEMM_FAMILIES:

        def run(device: torch.device, name: str = name) -> Results:
            a, b, rows, columns, added = _on(device, _integers(-128, 128, m, k), weight, row_scale, scale, bias)
            call = GemmS8(a, b, row_scale=rows, col_scale=columns, bias=added)
            if device.type == "cpu":
                return (call.cpu(),)
            return (gemm_s8(call, _gemm_choice(name, target(a.get_device()))),)

        yield Check(name, f"{m}x{n}x{k}", run, toolchain="nvcc" if name == INT8_CUTLASS.name else "nvrtc")


# ── products with codebook weights ───────────────────────────────────────────────────────────────


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
                yield from _codebook_product(layer, m, scheme)
    x = _random(9, 256, dtype=HALF)
    matrix = tokens.operands("qr", 128, 256, (0,), HALF)

    def rotate(x: Tensor, matrix: Tensor) -> Tensor:
        blocks, _ = OPS.rotate_tokens(x, matrix, "qr", 128, [0], HALF)
        return layout.from_blocks(blocks.cpu(), 9)

    def expect() -> Near:
        near = bounds.rotate_dense(x.view(9, 2, 128), matrix[0])
        return Near(near.exact.flatten(1), near.within.flatten(1))

    yield _near("rotate_dense", "9x256, groups of 128", expect, rotate, x, matrix)


def _codebook_product(layer: Any, m: int, scheme: str) -> Iterator[Check]:
    k, n, seeds, group = layer.in_features, layer.out_features, list(layer.scheme.seeds), layer.group_size
    is_int8 = layer.int8
    x = _random(m, k, seed=m, dtype=HALF)
    signs = tokens.operands("hadamard", group, k, seeds, HALF)
    book = list(products.pack_book(layer.codebook, HALF))
    weight = layer.units, layer.packed_norms, layer.fold, layer.col_scale
    shape = f"{scheme}, {m}x{n}x{k}"
    rotation = (x, signs, "hadamard", group, seeds, torch.int8 if is_int8 else HALF)

    def rotate(*given: Any) -> Results:
        blocks, scale = OPS.rotate_tokens(*given)
        return layout.from_blocks(blocks.cpu(), m), scale  # kernels leave the last block's other rows as they were

    yield _same("rotate", shape, rotate, *rotation)
    blocks, row_scale = OPS.rotate_tokens(*rotation)
    scale = row_scale if is_int8 else None
    given = (blocks, scale, m, *weight, book, layer.bias, 4, "none", None, HALF)
    rotated = (x, signs, group, seeds, *weight, book, layer.bias, 4, "none", None, HALF)
    if is_int8:
        yield _same("codebook", shape, OPS.codebook_gemm, *given)
        if m == 1:
            yield _same("codebook", f"{shape}, rotated by the product", OPS.codebook_gemv, *rotated)
        return

    def expect() -> Near:
        exact = OPS.codebook_gemm(*given[:-1], torch.float32).double()
        # The magnitudes of all weights: pairs without their signs, which are bits of indices.
        values, units = book, layer.units & 63
        if not layer.scheme.pairs:
            values, units = list(products.pack_book(layer.codebook.abs(), HALF)), layer.units
        terms = (blocks.abs(), None, m, units, *weight[1:], values, None, 4, "none", None, torch.float32)
        sizes = OPS.codebook_gemm(*terms).double() + layer.bias.abs().double()
        rows = layout.from_blocks(blocks, m).double().abs().sum(1, keepdim=True)
        return bounds.codebook(exact, sizes, rows * layer.col_scale.double(), k, HALF)

    if m == 1:
        yield _near("codebook", f"{shape}, rotated by the product", expect, OPS.codebook_gemv, *rotated)
    yield _near("codebook", shape, expect, OPS.codebook_gemm, *given)
