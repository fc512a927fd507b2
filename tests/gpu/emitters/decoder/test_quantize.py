"""The quantize kernels, launched directly: every layout they have, bitwise, with guards around outputs."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from qcut.emitters.core.arch import architecture
from qcut.emitters.core.source import DType
from qcut.emitters.decoder.quantize import ColSum, Dequantize, QuantizePerTensor, QuantizePerToken
from qcut.numerics import float8
from qcut.numerics import int8 as numerics
from tests.gpu.support.launching import Guarded, arch, launch, strided
from tests.gpu.support.oracles import TORCH_DTYPE, assert_same, full_range

FLOATS = (DType.F16, DType.BF16, DType.F32)
ROWS = (1, 15, 16, 17, 33, 129)
LAYOUTS = ((32, 1), (32, 5), (64, 3), (128, 4), (512, 1), (1024, 4), (32, 0), (256, 0))


def tokens(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Rows of every kind: normal, zero, near-tie, tiny, huge, subnormal, NaN, ±Inf."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m * k)) * 3
    kinds = (
        lambda row: row.zero_(),
        lambda row: row.copy_((torch.arange(k) % 254 - 127) + 0.5)[:1].fill_(127),
        lambda row: row.mul_(1e-6),
        lambda row: row.mul_(1e-38),
        lambda row: row.mul_(1e-43),
        lambda row: row.mul_(2e37),
        lambda row: row.fill_(1e-45),
        lambda row: row[k // 2 :].fill_(float("nan")),
        lambda row: row[-1:].fill_(float("inf")),
        lambda row: row[:1].fill_(float("-inf")),
        lambda row: row.fill_(-float(torch.finfo(dtype).max)),
    )
    for i, kind in enumerate(kinds):
        if 1 + i < m:
            kind(x[1 + i])
    return x.to(dtype)


STORED = {DType.S8: torch.int8, DType.E4M3: torch.float8_e4m3fn, DType.F16: torch.float16}
"""By the stored type of a description."""


def per_token(
    desc: QuantizePerToken, x: Tensor, k_padded: int, *, offset: int = 0, pad: int = 0
) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    source = desc.emit()
    x = strided(x, k + pad, offset)
    results = []
    for _ in range(2):
        q, scale = Guarded(m, k_padded, STORED[desc.q]), Guarded(1, m, torch.float32)
        launch(source, desc.grid(m, k_padded), x, q.tensor, scale.tensor, x.stride(0), m, k, k_padded)
        results.append((q.take(k_padded), scale.take(m)[0]))
    for first, second in zip(*results, strict=True):
        assert_same(first, second)
    return results[0]


@pytest.mark.parametrize("x", FLOATS, ids=lambda x: x.value)
@pytest.mark.parametrize(("threads", "vectors"), LAYOUTS)
def test_per_token_layouts(threads: int, vectors: int, x: DType) -> None:
    desc = QuantizePerToken(x, arch(), threads, vectors)
    size = 128 // x.bits
    full = desc.row_elements if vectors else 2 * threads * size + size
    for m in ROWS:
        data = tokens(m, full, TORCH_DTYPE[x])
        # A full row, one element less, a ragged end that leaves whole threads idle.
        for k in (full, full - 1, full // 2 + 3):
            k_padded = -(-k // 16) * 16
            if vectors and k_padded > full:
                continue
            pad = -k % size + size
            got = per_token(desc, data[:, :k], k_padded, pad=pad)
            for g, e in zip(got, numerics.quantize_per_token_ref(data[:, :k], k_padded), strict=True):
                assert_same(g, e)


@pytest.mark.parametrize("x", FLOATS, ids=lambda x: x.value)
@pytest.mark.parametrize("vectors", [0, 2])
def test_per_token_unaligned(vectors: int, x: DType) -> None:
    desc = QuantizePerToken(x, arch(), 64, vectors, aligned=False)
    for m, k, k_padded, offset, pad in (
        (1, 1, 1, 0, 0),
        (17, 37, 41, 1, 0),
        (33, 255, 256, 3, 2),
        (129, 100, 117, 0, 5),
    ):
        data = tokens(m, k, TORCH_DTYPE[x])
        got = per_token(desc, data, k_padded, offset=offset, pad=pad)
        for g, e in zip(got, numerics.quantize_per_token_ref(data, k_padded), strict=True):
            assert_same(g, e)


@pytest.mark.parametrize("x", FLOATS, ids=lambda x: x.value)
@pytest.mark.parametrize(("m", "k"), [(1, 4096), (64, 14336), (700, 1280), (1000, 4096), (3, 131_072)])
def test_per_token_chosen_layout(m: int, k: int, x: DType) -> None:
    desc = QuantizePerToken.for_shape(x, arch(), m, k)
    data = tokens(m, k, TORCH_DTYPE[x])
    for g, e in zip(per_token(desc, data, k), numerics.quantize_per_token_ref(data, k), strict=True):
        assert_same(g, e)


@pytest.mark.parametrize("x", FLOATS, ids=lambda x: x.value)
def test_quotients_next_to_ties(x: DType) -> None:
    """Rows with quotients that are halves and their neighbours: only a reciprocal rounds some of them wrongly."""
    absmax = torch.linspace(1.0, 2.0, 512).to(TORCH_DTYPE[x]).float()[:, None]
    half = (torch.arange(127) + 0.5) * (absmax / 127)
    data = torch.cat([absmax, half, torch.nextafter(half, torch.tensor(0.0)), -half], 1).to(TORCH_DTYPE[x])
    k_padded = -(-data.shape[1] // 16) * 16
    desc = QuantizePerToken.for_shape(x, arch(), 512, k_padded)
    got = per_token(desc, data, k_padded, pad=k_padded - data.shape[1])
    for g, e in zip(got, numerics.quantize_per_token_ref(data, k_padded), strict=True):
        assert_same(g, e)


@pytest.mark.parametrize("x", FLOATS, ids=lambda x: x.value)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(
    ("scale", "zero_point"), [(0.037, -11), (1.0, 127), (3e4, -128), (1e-6, 0), (1e-40, 5), (1e37, 9)]
)
def test_per_tensor(scale: float, zero_point: int, aligned: bool, x: DType) -> None:
    for m, k in ((1, 1), (15, 37), (16, 512), (17, 4099), (129, 1280)):
        k_padded = -(-k // 16) * 16
        desc = QuantizePerTensor.for_shape(x, arch(), m, k_padded, aligned=aligned)
        data = tokens(m, k, TORCH_DTYPE[x])
        device = strided(data, k_padded) if aligned else strided(data, k, 1)
        q = Guarded(m, k_padded, torch.int8)
        sizes = (device.stride(0), m, k, k_padded)
        launch(desc.emit(), desc.grid(m, k_padded), device, q.tensor, *sizes, scale, zero_point)
        assert_same(q.take(k_padded), numerics.quantize_per_tensor_ref(data, scale, zero_point, k_padded))


def float8_types() -> list[DType]:
    """How the GPU at hand stores tokens of e4m3."""
    return [DType.F16, DType.E4M3] if architecture(arch()).e4m3 else [DType.F16]


def stored(q: Tensor, dtype: DType) -> Tensor:
    """e4m3 as a kernel stores them."""
    return q if dtype is DType.E4M3 else q.to(torch.float16)


@pytest.mark.parametrize("x", FLOATS, ids=lambda x: x.value)
@pytest.mark.parametrize(("threads", "vectors"), LAYOUTS)
def test_float8_per_token(threads: int, vectors: int, x: DType) -> None:
    for q in float8_types():
        desc = QuantizePerToken(x, arch(), threads, vectors, q=q)
        size = 128 // x.bits
        full = desc.row_elements if vectors else 2 * threads * size + size
        for m in ROWS:
            data = tokens(m, full, TORCH_DTYPE[x])
            for k in (full, full - 1, full // 2 + 3):
                k_padded = -(-k // 16) * 16
                if vectors and k_padded > full:
                    continue
                got = per_token(desc, data[:, :k], k_padded, pad=-k % size + size)
                want, scale = float8.quantize_tokens_ref(data[:, :k], k_padded)
                for g, e in zip(got, (stored(want, q), scale), strict=True):
                    assert_same(g, e)


@pytest.mark.parametrize("x", FLOATS, ids=lambda x: x.value)
@pytest.mark.parametrize("vectors", [0, 2])
def test_float8_unaligned(vectors: int, x: DType) -> None:
    for q in float8_types():
        desc = QuantizePerToken(x, arch(), 64, vectors, aligned=False, q=q)
        for m, k, k_padded, offset, pad in ((1, 1, 1, 0, 0), (17, 37, 41, 1, 0), (129, 100, 117, 0, 5)):
            data = tokens(m, k, TORCH_DTYPE[x])
            got = per_token(desc, data, k_padded, offset=offset, pad=pad)
            want, scale = float8.quantize_tokens_ref(data, k_padded)
            for g, e in zip(got, (stored(want, q), scale), strict=True):
                assert_same(g, e)


def test_float8_values_next_to_ties() -> None:
    """Every e4m3, the middles between neighbours and the floats next to them, of rows with scale 1."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (values[1:] + values[:-1]) / 2
    near = [torch.nextafter(middles, middles.new_tensor(limit)) for limit in (0.0, 448.0)]
    data = torch.cat([values, middles, *near]).repeat(2, 1)
    data[1] *= -1
    k_padded = -(-data.shape[1] // 16) * 16
    for q in float8_types():
        desc = QuantizePerToken.for_shape(DType.F32, arch(), 2, k_padded, q=q)
        got = per_token(desc, data, k_padded, pad=k_padded - data.shape[1])
        want, scale = float8.quantize_tokens_ref(data, k_padded)
        assert scale.tolist() == [1.0, 1.0]
        for g, e in zip(got, (stored(want, q), scale), strict=True):
            assert_same(g, e)


@pytest.mark.parametrize("x", FLOATS, ids=lambda x: x.value)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("scale", [0.037, 1.0, 3e4, 1e-6, 2.0**-126, 1e37])
def test_float8_per_tensor(scale: float, aligned: bool, x: DType) -> None:
    for q, (m, k) in product(float8_types(), ((1, 1), (15, 37), (17, 4099), (129, 1280))):
        k_padded = -(-k // 16) * 16
        desc = QuantizePerTensor.for_shape(x, arch(), m, k_padded, aligned=aligned, q=q)
        data = tokens(m, k, TORCH_DTYPE[x])
        device = strided(data, k_padded) if aligned else strided(data, k, 1)
        out = Guarded(m, k_padded, STORED[q])
        launch(desc.emit(), desc.grid(m, k_padded), device, out.tensor, device.stride(0), m, k, k_padded, scale)
        got, want = out.take(k_padded).float(), float8.quantize_tensor_ref(data, scale, k_padded).float()
        assert_same(got, want)


@pytest.mark.parametrize("x", FLOATS, ids=lambda x: x.value)
def test_dequantize(x: DType) -> None:
    for m, k, stride, offset, aligned in (
        (1, 16, 16, 0, True),
        (33, 1280, 1296, 0, True),
        (17, 4096, 4096, 8, True),
        (15, 37, 41, 3, False),
        (129, 1001, 1001, 0, False),
    ):
        q, scale = full_range(m, k), torch.rand(m) * 0.1
        scale[0] = 1e-42
        desc = Dequantize.for_shape(x, arch(), m, k, aligned=aligned)
        device = strided(q, stride, offset)
        out = Guarded(m, k, TORCH_DTYPE[x])
        launch(desc.emit(), desc.grid(m, k), device, scale.cuda(), out.tensor, stride, m, k)
        assert_same(out.take(k), numerics.dequantize_ref(q, scale, TORCH_DTYPE[x]))


@pytest.mark.parametrize("value", [None, -128, 127])
def test_colsum(value: int | None) -> None:
    for n, k, stride, offset in (
        (1, 1, 1, 1),
        (3, 16, 16, 0),
        (17, 1280, 1296, 0),
        (33, 4099, 4112, 0),
        (5, 131_071, 131_072, 0),
        (6, 777, 777, 5),
    ):
        q = full_range(n, k) if value is None else torch.full((n, k), value, dtype=torch.int8)
        desc = ColSum(arch(), aligned=stride % 16 == 0 and offset == 0)
        device = strided(q, stride, offset)
        out = Guarded(1, n, torch.int32)
        launch(desc.emit(), desc.grid(n, k), device, out.tensor, stride, n, k)
        assert_same(out.take(n)[0], q.sum(1, dtype=torch.int32))


def test_dependent_launches_see_each_other() -> None:
    """A chain under programmatic dependent launch on a side stream: each kernel reads what the one before wrote."""
    m, k = 512, 4096
    desc = QuantizePerToken.for_shape(DType.F16, arch(), m, k)
    back = Dequantize.for_shape(DType.F16, arch(), m, k)
    first, second = desc.emit(), back.emit()
    x = torch.randn(m, k).half()
    stream, pdl = torch.cuda.Stream(), torch.cuda.get_device_capability()[0] >= 9
    with torch.cuda.stream(stream):
        device = x.cuda()
        q = torch.empty(m, k, dtype=torch.int8, device="cuda")
        scale = torch.empty(m, device="cuda")
        for _ in range(8):
            launch(first, desc.grid(m, k), device, q, scale, k, m, k, k, pdl=pdl)
            launch(second, back.grid(m, k), q, scale, device, k, m, k, pdl=pdl)
    stream.synchronize()
    for _ in range(8):
        x = numerics.dequantize_ref(*numerics.quantize_per_token_ref(x, k), torch.float16)
    assert_same(device.cpu(), x)
