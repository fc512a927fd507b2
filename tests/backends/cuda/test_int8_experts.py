"""Products with weights of experts: what their kernels are given, and which kernel serves which calls."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut.backends.cuda import experts as experts_cuda
from qcut.errors import DtypeError
from qcut.ops.experts import Int16x8ExpertsOp, W8A8ExpertsOp, W8A16ExpertsOp
from tests.backends.cuda.test_decoder import has
from tests.support.fakes.launches import H200, Launches, note_launches
from tests.support.oracles import s8
from tests.support.routes import random_experts, tiles_of

E, N, K = 7, 70, 96


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return note_launches(experts_cuda, H200, monkeypatch)


def weights(bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    return s8(E, N, K), torch.rand(E, N), torch.rand(E, N) if bias else None


def w8a8(rows: int, per_row: int, size: int, weight: tuple[Any, ...], dtype: torch.dtype) -> W8A8ExpertsOp:
    tiles = tiles_of(random_experts(rows, per_row, E), E, size)
    tokens = s8(rows, K), torch.rand(rows)
    if tiles.ordered:
        tokens = s8(tiles.places * 16, 8).view(1, -1, 8, 128), torch.rand(tiles.total)
    return W8A8ExpertsOp(*tokens, rows, per_row, tiles.experts, tiles.routes, *weight, "none", dtype)


def w8a16(x: Tensor, per_row: int, size: int, weight: tuple[Any, ...]) -> W8A16ExpertsOp:
    tiles, (rows, k) = tiles_of(random_experts(len(x), per_row, E), E, size), x.shape
    if tiles.ordered:
        x = torch.rand(2, tiles.places // 8, 8, 64).to(x.dtype)
    return W8A16ExpertsOp(x, rows, k, per_row, tiles.experts, tiles.routes, *weight, "silu")


def ctas(launch: dict[str, Any], tiles: int) -> tuple[int, int, int]:
    """The grid of a CTA for each group of rows of each tile: fewer than the GPU runs at a time."""
    prefetch = re.search(r"_k1_p(\d+)_", launch["kernel"])
    assert prefetch is not None
    return tiles * -(-N // (16 * int(prefetch[1]))), 1, 1


@pytest.mark.parametrize("size", [1, 8, 16, 32])
def test_w8a8(size: int, launches: Launches) -> None:
    weight = weights()
    call = w8a8(9, 3, size, weight, torch.bfloat16)
    y = experts_cuda.w8a8_experts(call)
    assert y.shape == (27, N)
    (launch,) = launches
    has(launch, a=call.q, b=weight[0], d=y, row_scale=call.q_scale, col_scale=weight[1], bias=weight[2])
    tiles = len(call.tile_experts)
    has(launch, m=tiles * size, n=N, k=K, lda=K, ldb=K, ldd=N, experts=E, per_row=3, rows=9)
    has(launch, tile_experts=call.tile_experts, tile_routes=0 if size == 1 else call.tile_routes)
    assert launch["grid"] == ctas(launch, tiles)
    assert launch["kernel"].startswith(f"qcut_int8_experts_sm90a_s8xs8_bf16_sm_sn_b_k16n2_e_t{size}_r")


@pytest.mark.parametrize("size", [1, 8, 16, 32])
def test_w8a16(size: int, launches: Launches) -> None:
    weight, wide = weights(bias=False), torch.randn(9, K + 8).half()
    call = w8a16(wide[:, :K], 2, size, weight)
    y = experts_cuda.w8a16_experts(call)
    (launch,) = launches
    has(launch, a=wide, b=weight[0], d=y, col_scale=weight[1])
    has(launch, n=N, k=K, lda=K + 8, ldb=K, ldd=N, experts=E, per_row=2, rows=9)
    assert "bias" not in launch
    if size == 32:  # a CTA of one warp has no registers for so many tokens of 16 bits
        assert launch["kernel"].startswith("qcut_w8a16_stream_sm90a_f16xs8_f16_sn_silu_k8n2_e_m32_r")
        return
    assert launch["grid"] == ctas(launch, len(call.tile_experts))
    assert launch["kernel"].startswith(f"qcut_int8_experts_sm90a_f16xs8_f16_sn_silu_k8n2_e_t{size}_r")


@pytest.mark.parametrize("size", [1, 8])
def test_int16x8(size: int, launches: Launches) -> None:
    weight, wide = weights(), torch.randn(9, K + 3).bfloat16()
    tiles, absmax = tiles_of(random_experts(9, 3, E), E, size), torch.rand(9)
    call = Int16x8ExpertsOp(wide[:, 3:], absmax, 3, tiles.experts, tiles.routes, *weight, "none")
    y = experts_cuda.int16x8_experts(call)
    (launch,) = launches
    assert y.shape == (27, N)
    has(launch, a=call.x, b=weight[0], d=y, a_absmax=absmax, col_scale=weight[1], bias=weight[2])
    has(launch, m=tiles.places, n=N, k=K, lda=K + 3, ldb=K, ldd=N, experts=E, per_row=3, rows=9)
    has(launch, tile_experts=tiles.experts, tile_routes=0 if size == 1 else tiles.routes)
    assert launch["kernel"].startswith("qcut_int8_stream_sm90a_rows_bf16_bf16_halves_sm_sn_b_u_e_")


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16"])
def test_prompts(scheme: str, launches: Launches) -> None:
    weight = weights()
    if scheme == "w8a8":
        call: Any = w8a8(9, 3, 128, weight, torch.bfloat16)
        tokens, y, vectors = call.q, experts_cuda.w8a8_experts(call), {"row_scale": call.q_scale}
    else:
        call = w8a16(torch.randn(9, 90).bfloat16(), 3, 128, weight)
        tokens, y, vectors = call.x, experts_cuda.w8a16_experts(call), {}
    (launch,) = launches
    assert y.shape == (27, N)
    has(launch, a=tokens, b=weight[0], d=y, **vectors, col_scale=weight[1], bias=weight[2])
    tiles = len(call.tile_experts)
    has(launch, m=128 * tiles, n=N, k=96 if scheme == "w8a8" else 90, ldb=K, ldd=N, experts=E, per_row=1, rows=27)
    has(launch, tile_experts=call.tile_experts, tile_routes=call.tile_routes)
    assert re.match(
        rf"qcut_int8_wgmma_sm90a_{'s8' if scheme == 'w8a8' else 'bf16'}xs8_bf16_.*_e_128x128_", launch["kernel"]
    )


def test_tokens_of_any_layout(launches: Launches) -> None:
    weight = (s8(E, N, 96), torch.rand(E, N), None)
    for x, k in ((torch.randn(9, 91).half(), 91), (torch.randn(9, 97).half()[:, 1:], 96)):
        experts_cuda.w8a16_experts(w8a16(x, 1, 8, weight))
        has(launches[-1], a=x, k=k, lda=x.stride(0), ldb=96)
        assert "w8a16_stream" in launches[-1]["kernel"]
    experts_cuda.w8a16_experts(w8a16(torch.randn(96, 9).half().t(), 1, 8, weight))
    has(launches[-1], lda=96)
    call = w8a8(9, 1, 8, weight, torch.float16)
    experts_cuda.w8a8_experts(call._replace(q=s8(K, 9).t(), qweight=s8(K, N, E).permute(2, 1, 0)))
    has(launches[-1], lda=K, ldb=K)


def test_no_tokens_launch_nothing(launches: Launches) -> None:
    weight = weights()
    for size in (1, 8):
        assert experts_cuda.w8a8_experts(w8a8(0, 3, size, weight, torch.float16)).shape == (0, N)
        assert experts_cuda.w8a16_experts(w8a16(torch.randn(0, K).half(), 3, size, weight)).shape == (0, N)
    assert not launches


def test_kernels_depend_on_sizes_not_on_routes(launches: Launches) -> None:
    weight = weights()
    for _ in range(3):
        experts_cuda.w8a8_experts(w8a8(40, 2, 8, weight, torch.float16))
    assert len({launch["kernel"] for launch in launches}) == 1


def test_float32_tokens_are_refused() -> None:
    with pytest.raises(DtypeError, match=r"w8a16_experts: x is torch\.float32; allowed on CUDA: float16, bfloat16"):
        experts_cuda.w8a16_experts(w8a16(torch.randn(3, K), 1, 8, weights()))
