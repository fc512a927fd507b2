"""Products of experts on the CPU: each route is what its expert's layer makes of its token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut import errors
from qcut.layers.experts.linear_stack import LinearStack
from qcut.layers.tokens import RotatedTokens
from qcut.numerics.codebook import layout
from qcut.numerics.int8 import sqnr_db
from qcut.numerics.routing import RouteTiles
from qcut.ops.experts import TILE_SIZES

OPS = torch.ops.qcut
SCHEMES = ("codebook4", "codebook4_int8", "codebook3_g64", "codebook4_pairs", "codebook2_none_int8", "int4_g16")
E, N, K = 5, 72, 256


def stack(scheme: str, *, bias: bool = True) -> LinearStack:
    torch.manual_seed(0)
    return LinearStack.of([qcut.Linear.from_float(nn.Linear(K, N, bias=bias), scheme) for _ in range(E)])


def routed(tokens: int, top_k: int, size: int, *, sort: bool = True) -> tuple[Tensor, RouteTiles]:
    """Experts int32 ``[M, k]``, one of them none, and their tiles."""
    generator = torch.Generator().manual_seed(tokens)
    index = torch.stack([torch.randperm(E, generator=generator)[:top_k] for _ in range(tokens)]).int()
    index[-1, -1] = E + 3
    if not sort:
        return index, RouteTiles(index.flatten(), None, index.numel())
    return index, RouteTiles(*OPS.sort_routes(index, E, size), index.numel())


@pytest.mark.parametrize("size", TILE_SIZES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_routes_are_those_of_layers(scheme: str, size: int) -> None:
    layers = stack(scheme)
    for tokens, top_k in ((1, 2), (9, 3), (40, 1)):
        x = torch.randn(tokens, K).half()
        for sort in {True, size > 1}:
            index, tiles = routed(tokens, top_k, size, sort=sort)
            got = layers.routed(x, tiles, top_k)
            assert got is not None
            assert got.shape == (tokens * top_k, N)
            for route, e in enumerate(index.flatten().tolist()):
                if e < E:
                    want = layers.expert(e)(x[route // top_k][None])
                    if "int8" in scheme:
                        assert torch.equal(got[route], want[0])
                    else:
                        assert sqnr_db(want.double(), got[route][None].double()) > 50


@pytest.mark.parametrize("scheme", ["codebook4", "codebook4_int8", "w8a8", "w8a16"])
def test_sums_are_those_of_the_rows(scheme: str) -> None:
    layers, (index, tiles) = stack(scheme), routed(3, 2, 1, sort=False)
    x, weights = torch.randn(6, K).half(), torch.rand(3, 2)
    rows = layers.routed(x, tiles, 1)
    got = layers.routed(x, tiles, 1, weights=weights)
    assert rows is not None
    assert got is not None
    assert torch.equal(got, OPS.sum_routes(rows, weights, index, E, None))


@pytest.mark.parametrize("size", [1, 32])
@pytest.mark.parametrize("scheme", SCHEMES[:2])
def test_tokens_may_be_rotated_before(scheme: str, size: int) -> None:
    layers, x = stack(scheme), torch.randn(9, K).half()
    one: Any = layers.form
    tokens = torch.int8 if one.int8 else x.dtype
    made = OPS.rotate_tokens(x, one._rotation.operands_for(x), one.kind, one.group_size, one.scheme.seeds, tokens)
    _, tiles = routed(9, 3, size)
    got, want = layers.routed(RotatedTokens(*made, 9, x.dtype), tiles, 3), layers.routed(x, tiles, 3)
    assert got is not None
    assert want is not None
    assert torch.equal(got, want)


def test_other_codebooks_have_no_kernel() -> None:
    layers = stack("codebook4")
    x, tiles = torch.randn(1, K).half(), routed(1, 2, 8)[1]
    assert layers.routed(x, tiles, 2) is not None
    layers._buffers["codebook"][1] *= 2  # type: ignore[index]
    assert layers.routed(x, tiles, 2) is None
    assert stack("codebook4+3").routed(x, tiles, 2) is None
    assert stack("codebook4").routed(x.double(), tiles, 2) is None


def given(**changes: Any) -> dict[str, Any]:
    """Arguments of a product of 6 tokens with 2 routes each."""
    layers = stack("codebook4_int8")
    b = layers._buffers
    rotated, scale = layout.to_blocks(torch.zeros(6, K, dtype=torch.int8)), torch.ones(6)
    _, tiles = routed(6, 2, 8)
    arguments = {
        "x": rotated,
        "row_scale": scale,
        "rows": 6,
        "per_row": 2,
        "tile_experts": tiles.experts,
        "tile_routes": tiles.routes,
        "units": b["units"],
        "norms": b["packed_norms"],
        "fold": b["fold"],
        "col_scale": b["col_scale"],
        "book": [0] * 8,
        "bias": b["bias"],
        "bits": 4,
        "activation": "none",
        "out_dtype": torch.float16,
    }
    return arguments | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"units": torch.zeros(4, 8, 2, 1024, dtype=torch.uint8)}, errors.ShapeError, "norms has shape .5, "),
        ({"bias": torch.zeros(E, N + 1)}, errors.ShapeError, "bias has shape"),
        ({"per_row": 0}, errors.ConfigError, "0 routes of 6 rows, 0 each"),
        ({"tile_experts": torch.zeros(3, dtype=torch.int64)}, errors.DtypeError, "tile_experts"),
        ({"tile_routes": None}, errors.ShapeError, r"tile_experts has shape \[.*\]; allowed: \[12\]"),
        ({"tile_routes": torch.zeros(7, 3, dtype=torch.int32)}, errors.ConfigError, "tiles of 3 routes"),
        ({"row_scale": None}, errors.ConfigError, "row_scale goes with int8"),
        ({"activation": "tanh"}, errors.ConfigError, "tanh"),
    ],
)
def test_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OPS.codebook_experts(**given(**changes))


def test_weights_of_other_routes_are_refused() -> None:
    of_one = {"tile_experts": torch.zeros(12, dtype=torch.int32), "tile_routes": None}
    for weights in (torch.ones(6, 2), torch.ones(4, 3)):
        torch.library.opcheck(OPS.codebook_experts.default, (), given(**of_one, weights=weights))
        assert OPS.codebook_experts(**given(**of_one, weights=weights)).shape == (len(weights), N)
    for weights, tiles in ((torch.ones(6, 3), "one route"), (torch.ones(12), "one route")):
        with pytest.raises(errors.ShapeError, match=rf"weights has shape .*, with tiles of {tiles}; allowed: \[M, k\]"):
            OPS.codebook_experts(**given(**of_one, weights=weights))
    with pytest.raises(errors.ShapeError, match="with tiles of 8 routes"):
        OPS.codebook_experts(**given(weights=torch.ones(6, 2)))
    with pytest.raises(errors.DtypeError, match="weights is float16; allowed: float32"):
        OPS.codebook_experts(**given(**of_one, weights=torch.ones(6, 2).half()))


def test_routes_that_do_not_exist_are_refused() -> None:
    arguments = given()
    for route in (12, 1000):
        arguments["tile_routes"] = arguments["tile_routes"].clone()
        arguments["tile_routes"][0, 0] = route
        with pytest.raises(errors.RangeError, match="tile_routes"):
            OPS.codebook_experts(**arguments)


def test_rotations_are_those_of_tokens() -> None:
    x = torch.randn(5, 384).half()
    layer = qcut.Linear.from_float(nn.Linear(384, 64), "codebook4_int8")
    rotation = layer._rotation.operands_for(x), "hadamard", 128, layer.scheme.seeds, torch.int8  # type: ignore
    _, tiles = routed(5, 2, 8)
    blocks, scale = OPS.rotate_routes(x, *rotation, tiles.routes, 2)
    want, scales = OPS.rotate_tokens(x, *rotation)
    got, rows = layout.from_blocks(blocks, tiles.places), layout.from_blocks(want, 5)
    assert tiles.routes is not None
    for place, route in enumerate(tiles.routes.flatten().tolist()):
        if route >= 0:
            assert torch.equal(got[place], rows[route // 2])
            assert scale[route] == scales[route // 2]
    natural, same = OPS.rotate_routes(x, *rotation, tiles.routes, 2, natural=True)
    assert torch.equal(layout.from_blocks(natural, tiles.places, natural=True), got)
    assert torch.equal(same, scale)
    assert not torch.equal(natural, blocks)
    with pytest.raises(errors.ConfigError, match="kind is 'qr'"):
        OPS.rotate_routes(x, rotation[0], "qr", *rotation[2:], tiles.routes, 2)
    with pytest.raises(errors.ShapeError, match="eights of routes"):
        OPS.rotate_routes(x, *rotation, torch.zeros(1, 7, dtype=torch.int32), 2)
    with pytest.raises(errors.ConfigError, match="per_row is 0"):
        OPS.rotate_routes(x, *rotation, tiles.routes, 0)
