"""Products with codebook weights of experts: what their kernels are given."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.backends.cuda import codebook as codebook_cuda
from qcut.backends.cuda import experts as experts_cuda
from qcut.layers.experts.linear_stack import LinearStack
from qcut.ops.experts import CodebookExpertsOp, RotateRoutesOp
from tests.backends.cuda.test_decoder import has
from tests.support.fakes.launches import H200, Launches, note_launches
from tests.support.routes import random_experts, tiles_of

E, N, K = 3, 70, 256


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return note_launches(experts_cuda, H200, monkeypatch)


def product(size: int, scheme: str = "codebook4_int8", **changes: Any) -> CodebookExpertsOp:
    """Of 9 tokens with 2 routes each."""
    layers = LinearStack.of([qcut.Linear.from_float(nn.Linear(K, N), scheme)] * E)
    b: dict[str, Any] = layers._buffers
    tiles = tiles_of(random_experts(9, 2, E), E, size)
    int8 = "int8" in scheme
    rows, routes = (tiles.places, tiles.total) if tiles.ordered else (9, 9)
    shape = (2 if int8 else 4, -(-rows // 8), 8, 128 if int8 else 64)
    x = torch.zeros(shape, dtype=torch.int8 if int8 else torch.float16)
    scale = torch.ones(routes) if int8 else None
    weight = b["units"], b["packed_norms"], b["fold"], b["col_scale"], [0] * 8, b["bias"]
    call = CodebookExpertsOp(x, scale, 9, 2, tiles.experts, tiles.routes, *weight, 4, "none", torch.float16)
    return call._replace(**changes)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("size", [1, 8, 32])
def test_few_routes(size: int, early: bool, launches: Launches) -> None:
    call = product(size, early_routes=early)
    assert experts_cuda.codebook_experts(call).shape == (18, N)
    (launch,) = launches
    has(launch, x=call.x, units=call.units, norms=call.norms, fold=call.fold, row_scale=call.row_scale)
    has(launch, col_scale=call.col_scale, bias=call.bias, m=call.tiles.places, n=N, units_k=2, ldd=N)
    has(launch, tile_experts=call.tile_experts, tile_routes=0 if size == 1 else call.tile_routes)
    has(launch, experts=E, per_row=2, rows=9)
    routes = "ee" if early else "e"
    assert launch["kernel"].startswith(f"qcut_codebook_experts_sm90a_s8xc4s1_f16_sm_sn_b_n2_{routes}_t{size}_")


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("scheme", ["codebook4_int8", "codebook4"])
def test_sums(scheme: str, early: bool, launches: Launches) -> None:
    weights, chosen = torch.rand(3, 3), torch.tensor([0, 1, 2, 2, 2, 5, -1, 0, 1], dtype=torch.int32)
    call = product(1, scheme, per_row=1, tile_experts=chosen, early_routes=early, weights=weights)
    y = experts_cuda.codebook_experts(call)
    assert y.shape == (3, N)
    (launch,) = launches
    given = {"row_scale": call.row_scale, "fold": call.fold} if scheme == "codebook4_int8" else {}
    has(launch, x=call.x, units=call.units, norms=call.norms, d=y, col_scale=call.col_scale, bias=call.bias, **given)
    has(launch, m=3, n=N, units_k=2, ldd=N, chosen=chosen, weights=weights, experts=E, per_token=3)
    assert f"_n2_{'ees' if early else 'es'}_t1_" in launch["kernel"]
    rows, warps = (int(re.search(rf"_{key}(\d+)_", launch["kernel"])[1]) for key in ("r", "w"))  # type: ignore[index]
    assert launch["grid"] == (3 * -(-N // (16 * rows)), 1, 1)
    assert warps <= 6


def test_sums_without_a_kernel_take_two(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[Any] = []
    monkeypatch.setattr(experts_cuda, "sum_routes", lambda call: summed.append(call) or call.results)
    call = product(1, tile_experts=torch.zeros(18, dtype=torch.int32), weights=torch.rand(9, 2))
    experts_cuda.codebook_experts(call)
    assert [launch["kernel"].split("_sm90a")[0] for launch in launches] == ["qcut_codebook_experts"]
    assert summed[0].results.shape == (18, N)
    assert summed[0].experts.shape == (9, 2)


def test_routes_of_copies_are_not_early(launches: Launches) -> None:
    call = product(8, early_routes=True)
    experts_cuda.codebook_experts(call._replace(units=call.units.transpose(0, 1).contiguous().transpose(0, 1)))
    assert "_e_t8_" in launches[0]["kernel"]


@pytest.mark.parametrize("scheme", ["codebook4", "codebook4_int8"])
def test_many_routes(scheme: str, launches: Launches) -> None:
    call = product(128, scheme, early_routes=True)
    experts_cuda.codebook_experts(call)
    (launch,) = launches
    has(launch, m=call.tiles.places, experts=E, per_row=1, rows=18, tile_routes=call.tile_routes)
    assert launch["kernel"].startswith("qcut_codebook_wgmma_sm90a_")
    assert "_e_128x128_" in launch["kernel"]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_rotations(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = note_launches(codebook_cuda, H200, monkeypatch)
    x, signs = torch.randn(9, K).half(), torch.zeros(1, K // 32, dtype=torch.int32)
    routes = tiles_of(random_experts(9, 2, E), E, 8).routes
    given: tuple[Tensor, Any, Any, Any, Any, Any] = x, signs, "hadamard", 128, [0], dtype
    for order in (routes, None):
        call = RotateRoutesOp(*given, order, 2)
        experts_cuda.rotate_routes(call)
        has(launches[-1], x=x, signs=signs, m=9 if order is None else order.numel(), k=K, per_row=2, total=18)
        has(launches[-1], routes=0 if order is None else order)
        assert launches[-1]["kernel"].endswith("_e")
    experts_cuda.rotate_routes(RotateRoutesOp(x[:0], *given[1:], None, 2))
    assert len(launches) == 2
    if dtype is torch.int8:
        experts_cuda.rotate_routes(RotateRoutesOp(*given, routes, 2, natural=True))
        assert launches[-1]["kernel"].endswith("_e_n")
