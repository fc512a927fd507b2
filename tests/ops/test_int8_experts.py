"""Products of tokens with int8 weights of experts, on the CPU: values, fakes, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.errors import ConfigError, DeviceError, DtypeError, QcutError, RangeError, ShapeError
from qcut.numerics.codebook import layout
from qcut.numerics.routing import RouteTiles
from qcut.schemes import padded_k
from tests.support.oracles import FLOATS, NAN, normal, s8
from tests.support.routes import in_tiles, random_experts, tiles_of

OPS = torch.ops.qcut
SIZES = (1, 8, 16, 32, 128)
OPERATORS = ("w8a8_experts", "w8a16_experts", "int16x8_experts")
S32, F16 = torch.int32, torch.float16
N, K = 35, 48


def weights(experts: int, n: int = N, k: int = K, *, bias: bool = True) -> dict[str, Any]:
    qweight = torch.zeros(experts, n, padded_k(k), dtype=torch.int8)
    qweight[..., :k] = s8(experts * n, k).view(experts, n, k)
    scale = normal(experts, n, seed=1).abs() / 100 + 1e-3
    return {"qweight": qweight, "weight_scale": scale, "bias": normal(experts, n, seed=2) if bias else None}


def arguments(
    op: str, experts: int = 7, rows: int = 9, per_row: int = 3, size: int = 8, dtype: torch.dtype = F16, **options: Any
) -> tuple[dict[str, Any], Tensor]:
    """Valid arguments of an operator by name, and the expert of each route."""
    chosen = random_experts(rows, per_row, experts)
    tiles = tiles_of(chosen, experts, size)
    routed = {"rows": rows, "per_row": per_row, "tile_experts": tiles.experts, "tile_routes": tiles.routes}
    rest = {**routed, **weights(experts, **options), "activation": "relu"}
    if op == "w8a8_experts":
        tokens = {"q": s8(rows, K), "q_scale": normal(rows, seed=3).abs()}
        return {**tokens, **rest, "out_dtype": dtype}, chosen
    x = normal(rows, K, seed=4).to(dtype)
    if op == "int16x8_experts":
        del rest["rows"]
        return {"x": x, "x_absmax": x.abs().amax(1).float(), **rest}, chosen
    return {"x": x, "k": K, **rest}, chosen


def in_order(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments with tokens in the order of tiles, if tiles are so large, as `RotateRoutesOp` leaves them."""
    rows = given.get("rows", len(given.get("x", ())))
    tiles = RouteTiles(given["tile_experts"], given["tile_routes"], rows * given["per_row"])
    if not tiles.ordered:
        return given
    name = "q" if "q" in given else "x"
    tokens, source = given[name], tiles.sources(1).new_zeros(tiles.places)
    routes = given["tile_routes"].flatten()
    source[routes >= 0] = routes[routes >= 0].long() // given["per_row"]
    padded = tokens.new_zeros(tiles.places, 128)
    padded[:, :K] = tokens[source]
    made = {**given, name: layout.to_blocks(padded, natural=True)}
    if name == "q":
        made["q_scale"] = given["q_scale"].repeat_interleave(given["per_row"])
    return made


def of_one(op: str, given: dict[str, Any], route: int, expert: int) -> Tensor:
    """What the layer of an expert makes of one route's token."""
    row = route // given["per_row"]
    bias = None if given["bias"] is None else given["bias"][expert]
    weight = given["qweight"][expert], given["weight_scale"][expert], bias, given["activation"]
    if op == "w8a8_experts":
        q, scale = given["q"][row : row + 1], given["q_scale"][row : row + 1]
        y: Tensor = OPS.int8_linear(q, scale, *weight, given["out_dtype"])
    else:
        linear = OPS.int16x8_linear if op == "int16x8_experts" else OPS.w8a16_linear
        y = linear(given["x"][row : row + 1], *weight)
    return y[0]


def check(op: str, given: dict[str, Any], chosen: Tensor, exact: bool) -> None:
    y = getattr(OPS, op)(**in_order(given))
    assert y.shape == (chosen.numel(), N)
    assert y.is_contiguous()
    count = len(given["qweight"])
    for route in in_tiles(chosen, count).nonzero()[:, 0].tolist():
        want = of_one(op, given, route, int(chosen.flatten()[route]))
        if exact:
            assert torch.equal(y[route], want)
        else:  # the order of float32 sums may differ with the number of tokens
            torch.testing.assert_close(y[route], want, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("experts", [1, 7])
@pytest.mark.parametrize("dtype", FLOATS)
def test_w8a8_is_bitwise_the_layers_of_the_experts(dtype: torch.dtype, experts: int, size: int) -> None:
    for rows, per_row, bias in ((1, 1, True), (9, 3, False), (40, 2, True)):
        given, chosen = arguments("w8a8_experts", experts, rows, per_row, size, dtype, bias=bias)
        check("w8a8_experts", given, chosen, exact=True)


@pytest.mark.parametrize("size", SIZES[:2])
@pytest.mark.parametrize("dtype", FLOATS)
def test_int16x8_is_bitwise_the_layers_of_the_experts(dtype: torch.dtype, size: int) -> None:
    for rows, per_row, bias in ((1, 1, True), (9, 3, False), (40, 2, True)):
        given, chosen = arguments("int16x8_experts", 7, rows, per_row, size, dtype, bias=bias)
        check("int16x8_experts", given, chosen, exact=True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("experts", [1, 7])
def test_w8a16_is_what_layers_of_experts_give(experts: int, size: int) -> None:
    for rows, per_row, dtype in ((1, 1, F16), (9, 3, torch.bfloat16), (40, 2, torch.float32 if size < 33 else F16)):
        given, chosen = arguments("w8a16_experts", experts, rows, per_row, size, dtype)
        check("w8a16_experts", given, chosen, exact=False)


@pytest.mark.parametrize("op", OPERATORS)
def test_tokens_of_no_expert_are_not_read(op: str) -> None:
    given, chosen = arguments(op, size=8)
    chosen[4] = 7
    given |= dict(zip(("tile_experts", "tile_routes"), tiles_of(chosen, 7, 8), strict=False))
    want = getattr(OPS, op)(**given)
    given["q_scale" if op == "w8a8_experts" else "x"][4] = NAN
    rest = in_tiles(chosen, 7)
    assert torch.equal(getattr(OPS, op)(**given)[rest], want[rest])


@pytest.mark.parametrize("op", OPERATORS)
def test_opcheck_and_no_tokens(op: str) -> None:
    for rows, size in ((9, 8), (9, 1), *(((9, 128),) if op != "int16x8_experts" else ()), (0, 8), (0, 1)):
        given = in_order(arguments(op, rows=rows, size=size)[0])
        torch.library.opcheck(getattr(OPS, op).default, (), given)
        assert getattr(OPS, op)(**given).shape == (3 * rows, N)


@pytest.mark.parametrize("op", OPERATORS)
def test_strides_and_offsets_do_not_matter(op: str) -> None:
    def strided(t: Any) -> Any:
        if not isinstance(t, Tensor) or t is given.get("x_absmax"):
            return t
        wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1] + 3, dtype=t.dtype)
        return wide[..., 3::2].copy_(t)

    given, chosen = arguments(op)
    y, want = (getattr(OPS, op)(**arguments) for arguments in ({k: strided(v) for k, v in given.items()}, given))
    assert torch.equal(y[in_tiles(chosen, 7)], want[in_tiles(chosen, 7)])


OF_ALL: tuple[tuple[dict[str, Any], type[QcutError], str], ...] = (
    ({"qweight": s8(N, K)}, ShapeError, r"qweight has shape \[35, 48\]|weight_scale has shape"),
    ({"weight_scale": torch.rand(6, N)}, ShapeError, r"weight_scale has shape \[6, 35\]; allowed: \[7, \.\.\.\]"),
    ({"bias": torch.rand(N)}, ShapeError, r"bias has shape \[35\]; allowed: \[7, \.\.\.\] with E >= 1"),
    ({"qweight": s8(1, 0)[:0]}, ShapeError, r"qweight has shape \[0, 0\]; allowed: \[E, \.\.\.\] with E >= 1"),
    ({"weight_scale": torch.rand(7, N).half()}, DtypeError, "weight_scale is float16; allowed: float32"),
    ({"per_row": 0}, ConfigError, "0 routes of 9 rows, 0 each"),
    ({"tile_experts": torch.zeros(3, dtype=torch.int64)}, DtypeError, "tile_experts is int64; allowed: int32"),
    ({"tile_routes": None}, ShapeError, r"tile_experts has shape \[\d+\]; allowed: \[27\]"),
    ({"tile_routes": torch.zeros(8, 8, dtype=S32)}, ShapeError, r"tile_routes has shape \[8, 8\]; allowed: \[9, 8\]"),
    ({"tile_routes": torch.zeros(9, 12, dtype=S32)}, ConfigError, "tiles of 12 routes; allowed: 1, 8, 16, 32, 96"),
    ({"activation": "tanh"}, ConfigError, "tanh"),
    ({"tile_experts": torch.zeros(9, dtype=S32, device="meta")}, DeviceError, "tile_experts is on meta"),
)


@pytest.mark.parametrize(
    ("op", "changes", "error", "message"),
    [
        *((op, *case) for op in OPERATORS for case in OF_ALL),
        ("int16x8_experts", {"x_absmax": torch.rand(8)}, ShapeError, r"x_absmax has shape \[8\]; allowed: \[9\]"),
        (
            "int16x8_experts",
            {"x_absmax": torch.rand(18)[::2]},
            ShapeError,
            r"x_absmax has strides \[2\]; allowed: cont",
        ),
        ("int16x8_experts", {"x": normal(9, 65).half()}, ShapeError, r"x has K = 65, qweight has shape \[35, 48\]"),
        ("int16x8_experts", {"x": normal(3, 3, K).half()}, ShapeError, r"x has shape \[3, 3, 48\]; allowed: \[M, K\]"),
        ("int16x8_experts", {"x": s8(9, K)}, DtypeError, "x is int8"),
        ("int16x8_experts", {"tile_routes": torch.zeros(9, 16, dtype=S32)}, ConfigError, "of 16 routes; allowed: 1, 8"),
        ("w8a8_experts", {"q": s8(9, 32)}, ShapeError, r"q has shape \[9, 32\]; allowed: \[9, 48\]"),
        ("w8a8_experts", {"q": s8(9, 3, 16)}, ShapeError, r"q has shape \[9, 3, 16\]"),
        ("w8a8_experts", {"q_scale": torch.rand(8)}, ShapeError, r"q_scale has shape \[8\]; allowed: \[9\]"),
        ("w8a8_experts", {"out_dtype": torch.int8}, DtypeError, "dtype is int8"),
        ("w8a16_experts", {"x": normal(9, 65).half()}, ShapeError, r"x has shape \[9, 65\]; allowed: \[9, 48\]"),
        ("w8a16_experts", {"k": 65}, ShapeError, r"x has K = 65, qweight has shape \[35, 48\]"),
        ("w8a16_experts", {"x": normal(3, 3, K).half()}, ShapeError, r"x has shape \[3, 3, 48\]; allowed: \[9, 48\]"),
        ("w8a16_experts", {"x": s8(9, K)}, DtypeError, "x is int8"),
    ],
)
def test_refusals(op: str, changes: dict[str, Any], error: type[QcutError], message: str) -> None:
    given, _ = arguments(op)
    with pytest.raises(error, match=message):
        getattr(OPS, op)(**{**given, **changes})


@pytest.mark.parametrize("op", ["w8a8_experts", "w8a16_experts"])
def test_tokens_out_of_order_are_refused(op: str) -> None:
    given, _ = arguments(op, size=128)
    with pytest.raises(ShapeError, match=r"(q_scale|x) has shape .*; allowed: \["):
        getattr(OPS, op)(**given)


@pytest.mark.parametrize("op", OPERATORS)
def test_routes_that_do_not_exist_are_refused(op: str) -> None:
    given, _ = arguments(op)
    given["tile_routes"][0, 0] = 27
    with pytest.raises(RangeError, match=f"qcut::{op}: tile_routes holds 27; allowed: 0 to 26"):
        getattr(OPS, op)(**given)
