"""The rotation kernels, launched directly: bitwise where float32 defines the bits, guards around outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qcut.emitters.codebook.rotate import RotateTokens
from qcut.emitters.codebook.rotate_dense import RotateTokensDense
from qcut.emitters.core.source import DType
from qcut.numerics.codebook.layout import Geometry, from_blocks
from qcut.numerics.codebook.tokens import operands, quantize_rotated_ref, rotate_tokens
from qcut.schemes import padded_k
from tests.gpu.support.launching import SENTINEL, Guarded, arch, launch, strided
from tests.gpu.support.oracles import DEVICE, TORCH_DTYPE, assert_same, half_ulp

F16, BF16, F32, S8 = DType.F16, DType.BF16, DType.F32, DType.S8
SEEDS = (42, 1042)
ROWS = (1, 3, 8, 9, 130)
CONVERSIONS = ((F16, F16), (F16, S8), (BF16, BF16), (BF16, S8), (F32, F16), (F32, BF16), (F32, S8))
# K and group size: a ragged last group is a power of two, one column included; the last needs a CTA's every thread.
SHAPES = (
    (38, 2),
    (40, 16),
    (136, 32),
    (96, 64),
    (320, 128),
    (257, 128),
    (768, 256),
    (1280, 1024),
    (4096, 128),
    (4096, 4096),
    (2560, 2048),
)


def tokens(m: int, k: int, dtype: DType, seed: int = 0) -> Tensor:
    """Rows of every kind: normal, with outliers, zero, tiny, large, NaN, infinite."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed + m * k))
    kinds = (
        lambda row: row[k // 3].mul_(1000),
        lambda row: row.zero_(),
        lambda row: row.mul_(1e-6),
        lambda row: row.mul_(3000),
        lambda row: row[k // 2].fill_(float("nan")),
        lambda row: row[-1].fill_(float("inf")),
        lambda row: row[0].fill_(-float("inf")),
        lambda row: row.fill_(1),
    )
    for i, kind in enumerate(kinds):
        if 1 + i < m:
            kind(x[1 + i])
    return x.to(TORCH_DTYPE[dtype])


def run(
    desc: RotateTokens | RotateTokensDense,
    x: Tensor,
    geometry: Geometry,
    seeds: tuple[int, ...],
    *,
    offset: int = 0,
    pad: int = 0,
    pdl: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Launch twice into guarded memory: both results agree, and nothing but rows 0..m was written."""
    m, k = x.shape
    dense = isinstance(desc, RotateTokensDense)
    dtype = TORCH_DTYPE[desc.out]
    wide = x.element_size() * k
    stride = k + pad if not desc.aligned else (-(-wide // 16) * 16) // x.element_size() + 8 * pad
    on_gpu = strided(x, stride, offset)
    extra = []
    if dense or desc.kind == "hadamard":
        kind = "qr" if dense else "hadamard"
        extra.append(operands(kind, geometry.full, k, seeds, x.dtype, DEVICE))
    blocked = not (dense and desc.out is F32)
    columns = len(seeds) * geometry.k_padded
    per_block = 128 // dtype.itemsize
    m8 = -(-m // 8)
    results = []
    for _ in range(2):
        out = Guarded(columns // per_block * m8 * 8, per_block, dtype) if blocked else Guarded(m, columns, dtype)
        scale = Guarded(1, m, torch.float32)
        args = [on_gpu, out.tensor] + ([scale.tensor] if desc.out is S8 else []) + extra
        sizes = [stride, m, k, geometry.k_padded]
        launch(desc.emit(), desc.grid(m, geometry.k_padded), *args, *sizes, pdl=pdl)
        got = out.take(per_block if blocked else columns)
        if blocked:
            blocks = got.view(-1, m8, 8, per_block)
            if m % 8:
                beyond = blocks[:, -1, m % 8 :].contiguous().view(torch.uint8)
                assert bool((beyond == SENTINEL).all()), "rows past m were written"
            got = from_blocks(blocks, m)
        results.append((got, scale.take(m)[0] if desc.out is S8 else None))
    assert_same(results[0][0], results[1][0])
    if desc.out is S8:
        assert_same(results[0][1], results[1][1])
    return results[0]


def check(desc: RotateTokens, x: Tensor, group_size: int, *, offset: int = 0, pad: int = 0, pdl: bool = False) -> None:
    """Hold a kernel to the reference, bitwise."""
    seeds = SEEDS[: desc.passes]
    geometry = Geometry(x.shape[1], group_size, desc.kind)
    got, scale = run(desc, x, geometry, seeds, offset=offset, pad=pad, pdl=pdl)
    rows, expected_scale = rotate_tokens(x, desc.kind, group_size, seeds, TORCH_DTYPE[desc.out])
    assert_same(got, rows)
    if scale is not None:
        assert_same(scale, expected_scale)


@pytest.mark.parametrize(("x", "out"), CONVERSIONS)
@pytest.mark.parametrize(("k", "group"), SHAPES)
def test_hadamard_bitwise(k: int, group: int, x: DType, out: DType):
    for number, m in enumerate(ROWS):
        passes = 1 + number % 2
        aligned = k * x.bits % 128 == 0
        desc = RotateTokens.for_shape(x, out, "hadamard", arch(), m, k, group, passes=passes, aligned=aligned)
        check(desc, tokens(m, k, x), group, pad=number % 2, pdl=bool(number % 2))


@pytest.mark.parametrize("x", [F16, BF16, F32])
@pytest.mark.parametrize(
    ("k", "group"),
    [
        *((1, 1), (16, 16), (40, 32), (136, 32), (96, 64), (320, 128), (257, 128), (768, 256), (1280, 1024)),
        *((4096, 128), (4096, 4096), (14336, 128), (16384, 16384), (20480, 128)),
    ],
)
def test_rows_of_int8_bitwise(k: int, group: int, x: DType):
    signs, k_padded = operands("hadamard", group, k, (42,), torch.float16, DEVICE), padded_k(k)
    for number, m in enumerate((*ROWS, 600)):
        aligned, pad = k * x.bits % 128 == 0, number % 2
        rows = {"natural": True, "row_major": True, "aligned": aligned}
        desc = RotateTokens.for_shape(x, S8, "hadamard", arch(), m, k, group, **rows)
        given, stride = tokens(m, k, x), k + (8 * pad if aligned else pad)
        want, want_scale = quantize_rotated_ref(given, group, 42, k_padded)
        for _ in range(2):
            q, scale = Guarded(m, k_padded, torch.int8), Guarded(1, m, torch.float32)
            args = strided(given, stride), q.tensor, scale.tensor, signs, stride, m, k, k_padded
            launch(desc.emit(), desc.grid(m, Geometry(k, group).k_padded), *args, pdl=bool(pad))
            assert_same(q.take(k_padded), want)
            assert_same(scale.take(m)[0], want_scale)


@pytest.mark.parametrize("out", [F16, S8])
@pytest.mark.parametrize(("k", "group"), [(16384, 16384), (14336, 2048), (8192, 8192), (20480, 16384), (17408, 1024)])
def test_long_rows(k: int, group: int, out: DType):
    for passes in (1, 2):
        check(
            RotateTokens.for_shape(F16, out, "hadamard", arch(), 3, k, group, passes=passes), tokens(3, k, F16), group
        )


@pytest.mark.parametrize("out", [F16, S8])
def test_many_rows_share_ctas(out: DType):
    for k, group in ((320, 64), (1280, 128), (1024, 1024)):
        desc = RotateTokens.for_shape(F16, out, "hadamard", arch(), 600, k, group)
        assert desc.rows > 1 or desc.threads >= 64
        check(desc, tokens(600, k, F16), group)


@pytest.mark.parametrize(("threads", "rows"), [(32, 1), (32, 4), (96, 1), (96, 2), (64, 2), (256, 1), (1024, 1)])
@pytest.mark.parametrize("out", [F16, S8])
def test_every_layout(threads: int, rows: int, out: DType):
    k, group = 1536, 512
    held = out is F16 or threads * 16 >= k
    desc = RotateTokens(F16, out, "hadamard", group, arch(), 2, threads, rows, held)
    check(desc, tokens(9, k, F16), group)


@pytest.mark.parametrize(("x", "out"), CONVERSIONS)
@pytest.mark.parametrize(
    ("k", "group"), [(1, 128), (100, 128), (200, 96), (4096, 128), (130, 12), (216, 16), (4096, 4096)]
)
def test_without_a_rotation(k: int, group: int, x: DType, out: DType):
    aligned = k * x.bits % 128 == 0
    for number, m in enumerate(ROWS):
        desc = RotateTokens.for_shape(x, out, "none", arch(), m, k, group, passes=1 + number % 2, aligned=aligned)
        check(desc, tokens(m, k, x), group)


@pytest.mark.parametrize(("offset", "pad"), [(0, 0), (1, 0), (0, 3), (3, 5)])
@pytest.mark.parametrize("x", [F16, BF16, F32])
def test_unaligned(x: DType, offset: int, pad: int):
    for k, group, out in ((320, 128, S8), (76, 4, S8), (36, 32, x if x is not F32 else F16)):
        desc = RotateTokens.for_shape(x, out, "hadamard", arch(), 9, k, group, aligned=False)
        check(desc, tokens(9, k, x), group, offset=offset, pad=pad)


@pytest.mark.parametrize("out", [F16, S8])
def test_tokens_are_independent(out: DType):
    x = tokens(130, 1280, F16)
    desc = RotateTokens.for_shape(F16, out, "hadamard", arch(), 130, 1280, 128)
    together, scale = run(desc, x, Geometry(1280, 128), SEEDS[:1])
    alone, alone_scale = run(desc, x[70:71], Geometry(1280, 128), SEEDS[:1])
    assert_same(alone[0], together[70])
    if scale is not None:
        assert_same(alone_scale[0], scale[70])


def dense_product(x: Tensor, geometry: Geometry, seeds: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """float64 ``x q^T`` of the 16-bit matrices, and the bound on float32 sums of d products."""
    k, full = geometry.k, geometry.full
    matrices = operands("qr", full, k, seeds, x.dtype).double()
    exact = torch.zeros(len(x), len(seeds), geometry.k_padded, dtype=torch.float64)
    slack = torch.zeros_like(exact)
    for number in range(len(seeds)):
        for group in range(geometry.groups):
            piece = x[:, group * full : (group + 1) * full].double()
            d = piece.shape[1]
            q = matrices[number, group, :d, :d]
            place = group * geometry.padded_group
            exact[:, number, place : place + d] = piece @ q.t()
            slack[:, number, place : place + d] = d * 2.0**-23 * (piece.abs() @ q.abs().t())
    return exact.flatten(1), slack.flatten(1)


DENSE_SHAPES = ((256, 128), (100, 20), (129, 128), (37, 37), (450, 200), (1, 128), (96, 64), (70, 32), (1536, 1024))


@pytest.mark.parametrize("x", [F16, BF16])
@pytest.mark.parametrize(("k", "group"), DENSE_SHAPES)
def test_dense_rotations(k: int, group: int, x: DType):
    geometry = Geometry(k, group)
    for number, m in enumerate((1, 3, 9, 17, 32, 33, 130)):
        seeds = SEEDS[: 1 + number % 2]
        for out in (x, F32):
            aligned = k * x.bits % 128 == 0
            desc = RotateTokensDense.for_shape(x, out, arch(), m, k, group, passes=len(seeds), aligned=aligned)
            tensor = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(TORCH_DTYPE[x])
            got, _ = run(desc, tensor, geometry, seeds, pad=number % 2)
            exact, slack = dense_product(tensor, geometry, seeds)
            rounding = half_ulp(exact.abs() + slack, got.dtype) if out is x else 0.0
            assert bool(((got.double() - exact).abs() <= slack + rounding).all())


@pytest.mark.parametrize("tokens_per_cta", [16, 32, 64])
def test_dense_of_bad_and_unaligned_tokens(tokens_per_cta: int):
    k, group = 300, 100
    x = torch.randn(70, k, generator=torch.Generator().manual_seed(7)).half()
    x[3, 150] = float("nan")
    x[66, 299] = float("inf")
    desc = RotateTokensDense(F16, F16, group, arch(), 1, tokens_per_cta, aligned=False)
    got, _ = run(desc, x, Geometry(k, group), SEEDS[:1], offset=1, pad=3)
    good = x.clone()
    good[3, 150] = good[66, 299] = 0
    expected, _ = run(desc, good, Geometry(k, group), SEEDS[:1], offset=1, pad=3)
    bad = torch.zeros_like(got, dtype=torch.bool)
    bad[3, 128:228] = bad[66, 256:356] = True
    assert not bool(got[bad].isfinite().any())
    assert_same(got[~bad], expected[~bad])


@pytest.mark.parametrize(("k", "group"), [(256, 128), (450, 200)])
def test_dense_rotations_become_int8_in_two_launches(k: int, group: int):
    geometry = Geometry(k, group)
    x = tokens(9, k, F16)
    aligned = k % 8 == 0
    rows, _ = run(
        RotateTokensDense.for_shape(F16, F32, arch(), 9, k, group, passes=2, aligned=aligned), x, geometry, SEEDS
    )
    columns = rows.shape[1]
    desc = RotateTokens.for_shape(F32, S8, "none", arch(), 9, columns, 128)
    q, scale = run(desc, rows, Geometry(columns, 128), (0,))
    expected, expected_scale = rotate_tokens(rows, "none", 128, (0,), torch.int8)
    assert_same(q, expected)
    assert_same(scale, expected_scale)
    assert expected_scale.isnan().tolist() == [False] * 5 + [True] * 3 + [False]
