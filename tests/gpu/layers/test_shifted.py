"""Codebook weights with offsets on CUDA: every family of kernels against float64 by a derived bound; layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import qcut
from qcut.backends.cuda import codebook as cuda_codebook
from qcut.backends.cuda.launch.plans import forget_plans, watched_loads
from qcut.dispatch.heuristics import Choice
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.families import (
    CODEBOOK_MMA,
    CODEBOOK_STREAM,
    CODEBOOK_STREAM_ROUNDS,
    CODEBOOK_STREAM_WGMMA,
    CODEBOOK_WGMMA,
    family,
)
from qcut.emitters.gemm.problem import TileConfig
from qcut.emitters.stream.codebook import CodebookStreamTile
from qcut.emitters.stream.codebook_rounds import CodebookRoundsTile
from qcut.emitters.stream.codebook_wgmma import CodebookStreamWgmmaTile
from qcut.layers.codebook import CodebookLinear
from qcut.layers.shifted import ShiftedCodebookLinear
from qcut.numerics.codebook.quantizer import RotatedCodebook
from qcut.schemes import Codebook, ShiftedCodebook
from tests.gpu.support.launching import arch
from tests.gpu.support.oracles import DEVICE, assert_same

HALF, BRAIN = torch.float16, torch.bfloat16
ROUNDING = {HALF: 2.0**-11, BRAIN: 2.0**-8}


def made(
    n: int,
    k: int,
    size: int | None,
    *,
    passes: int = 1,
    bias: bool = True,
    ordered: bool = False,
    activation: str = "none",
) -> ShiftedCodebookLinear:
    """On the CPU, with a row of zeros and zero points from 0 to 15, or of 8 bits from 0 to 255."""
    draws = torch.Generator().manual_seed(n + k)
    groups = -(-k // (size or k))
    book = torch.arange(-8.0, 8.0) if passes == 1 else torch.arange(16) - 7.5
    norms = (torch.rand(n, groups, generator=draws) + 0.1).half() / 64
    norms[n // 2] = 0
    zeros = torch.randint(0, 16**passes, (n, groups), generator=draws)
    offsets = (8.0 - zeros).half()
    scales = [norms]
    if passes == 2:
        missing = 127.5 - zeros
        first = (missing / 16).round()
        offsets, scales = torch.cat((first, missing - 16 * first), 1).half(), [norms * 16, norms]
    parts = [
        RotatedCodebook(torch.randint(0, 16, (n, k), generator=draws).byte(), scale, book, size or k, "none", 0)
        for scale in scales
    ]
    scheme = ShiftedCodebook(
        group_size=size,
        residual_bits=4 if passes == 2 else None,
        levels="steps" if passes == 1 else "normal",
        shifted=True,
        ordered=ordered,
    )
    order = torch.randperm(k, generator=draws).int() if ordered else None
    added = torch.randn(n, generator=draws) if bias else None
    layer = ShiftedCodebookLinear.from_parts(parts, added, scheme, offsets=offsets, order=order)
    layer.activation = activation
    return layer


def tokens(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)


def assert_near(got: Tensor, layer: ShiftedCodebookLinear, x: Tensor) -> None:
    """Each weight ``norm * (value + offset)`` is rounded as a sum of two products, each of them rounded before.

    A rounding u of ``norm * offset``, one of the sum, and with bfloat16 one of the norm, stay below 2.25 u of
    ``norm * (|value| + |offset|)``; then come float32 sums, and a rounding of the result.
    """
    exact = x.double() @ layer.dequantized_weight().double().t()
    values, sizes = torch.zeros_like(exact), x.double().abs()
    groups, size = layer.geometry.groups, layer.geometry.full
    for p, part in enumerate(layer.passes):
        offsets = layer.offsets[:, p * groups : (p + 1) * groups].double().abs()
        wide = offsets.repeat_interleave(size, 1)[:, : layer.in_features]
        norms = part.norms.double().repeat_interleave(size, 1)[:, : layer.in_features]
        summed = norms * (part.values.double()[part.indices.int()].abs() + wide)
        if layer.order is not None:
            summed = torch.empty_like(summed).index_copy_(1, layer.order.long(), summed)
        values += sizes @ summed.t()
    if layer.bias is not None:
        exact = exact + layer.bias.double()
    if layer.activation == "relu":
        exact = exact.relu()
    u = ROUNDING[x.dtype]
    bound = 2.25 * u * values + layer.in_features * 2.0**-22 * values + u * exact.abs() + 2.0**-24
    off = (got.cpu().double() - exact).abs() - bound
    assert bool((off <= 0).all()), f"{float(off.max())} beyond the bound, largest {float(bound.max())}"


FAMILIES: list[tuple[str, Any]] = [
    (CODEBOOK_STREAM.name, CodebookStreamTile(1, 7, 16)),
    (CODEBOOK_STREAM.name, CodebookStreamTile(8, 3, 10, 1, 1, 3)),
    (CODEBOOK_STREAM.name, CodebookStreamTile(4, 2, 4, 2, 2)),
    (CODEBOOK_STREAM.name, CodebookStreamTile(24, 2, 5, 1, 1, 2)),
    (CODEBOOK_STREAM_ROUNDS.name, CodebookRoundsTile(1, 3, 2, 2)),
    (CODEBOOK_STREAM_ROUNDS.name, CodebookRoundsTile(16, 2, 4, 2)),
    (CODEBOOK_STREAM_WGMMA.name, CodebookStreamWgmmaTile(8, 1, 1, 3, 1)),
    (CODEBOOK_STREAM_WGMMA.name, CodebookStreamWgmmaTile(32, 3, 4, 8, 4)),
    (CODEBOOK_STREAM_WGMMA.name, CodebookStreamWgmmaTile(128, 2, 2, 3, 2)),
    (CODEBOOK_MMA.name, TileConfig((16, 64, 128), (16, 16, 128), 6)),
    (CODEBOOK_MMA.name, TileConfig((128, 128, 128), (128, 32, 128), 2)),
    *(
        (CODEBOOK_WGMMA.name, tile)
        for tile in CODEBOOK_WGMMA.default_tiles(CodebookProblem(slots=1, offsets=True), "sm_90a")
    ),
]


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("size", [128, 64, 32, 16])
@pytest.mark.parametrize(("name", "tile"), FAMILIES, ids=lambda value: getattr(value, "name", value))
def test_every_family(name: str, tile: Any, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the operator, on the tile that is asked for: one token, the tile's, and where prompts go on, more."""
    if "wgmma" in name and not architecture(arch()).wgmma:
        pytest.skip("wgmma is sm_90a's")
    if not family(name).is_legal(CodebookProblem(slots=128 // size, offsets=True), tile, arch()):
        pytest.skip("more norms than registers")
    layer = made(136, 448, size)
    gpu = copy.deepcopy(layer).to(DEVICE)
    most = tile.threadblock_shape[0] if isinstance(tile, TileConfig) else tile.tokens
    several = (2 * most + 3,) if name in (CODEBOOK_MMA.name, CODEBOOK_WGMMA.name) else ()
    with monkeypatch.context() as patch:
        patch.setattr(cuda_codebook.dispatch, "select", lambda *_, **__: Choice(name, tile))
        forget_plans()
        for m in sorted({1, most, *several}):
            x = tokens(m, 448, dtype)
            got = gpu(x.to(DEVICE))
            assert_same(gpu(x.to(DEVICE)), got)
            assert_near(got, layer, x)
    forget_plans()


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize(
    "case",
    [
        {"size": 32},
        {"size": 64, "bias": False},
        {"size": 128, "ordered": True, "activation": "relu"},
        {"size": None},
        {"size": 48},
        {"size": 16},
        {"size": 10, "ordered": True},
        {"size": 16, "passes": 2, "activation": "relu"},
        {"size": 32, "passes": 2},
        {"size": 128, "passes": 2, "ordered": True},
    ],
    ids=str,
)
def test_layers_through_dispatch(case: dict[str, Any], dtype: torch.dtype) -> None:
    layer = made(136, 336, **case)
    gpu = copy.deepcopy(layer).to(DEVICE)
    for m in (1, 3, 9, 20, 40, 70, 130, 300):
        x = tokens(m, 336, dtype)
        got = gpu(x.to(DEVICE))
        assert_near(got, layer, x)
        with qcut.execution_path("reference"):
            assert_near(gpu(x.to(DEVICE)), layer, x)


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (48, 14336), (1280, 1280), (33, 200)])
def test_shapes(n: int, k: int) -> None:
    layer = made(n, k, 128)
    gpu = copy.deepcopy(layer).to(DEVICE)
    for m in (1, 16, 64, 200):
        x = tokens(m, k, HALF)
        assert_near(gpu(x.to(DEVICE)), layer, x)


def test_offsets_of_zero_change_nothing() -> None:
    """Few tokens: offsets enter their float32 sums, bitwise as the layer without offsets."""
    layer = made(136, 512, 128)
    assert layer.offsets is not None
    layer.offsets.zero_()
    layer._pack_offsets()
    plain = CodebookLinear.from_passes(
        layer.passes, layer.bias, Codebook(group_size=128, rotation="none", levels="steps")
    )
    gpu, other = layer.to(DEVICE), plain.to(DEVICE)
    for m in (1, 8):
        x = tokens(m, 512, HALF).to(DEVICE)
        assert_same(gpu(x), other(x))


def test_calls_are_foreseen() -> None:
    """`cuda_calls` names the kernels that a call loads."""
    layer = made(256, 512, 64).to(DEVICE)
    calls = type(layer).cuda_calls(layer.scheme, dtype=HALF, rows=24, n=256, k=512, bias=True, activation="none")
    foreseen = {source.name for call in calls for source in call.sources(torch.cuda.current_device())}
    forget_plans()
    with watched_loads() as loaded:
        layer(tokens(24, 512, HALF).to(DEVICE))
    assert set(loaded) == foreseen
