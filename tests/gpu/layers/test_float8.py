"""Weights in 8-bit floats on CUDA: every kernel makes exactly the floats of them that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import qcut
from qcut.layers.experts.linear_stack import LinearStack
from qcut.numerics.float8 import E4M3
from qcut.numerics.routing import RouteTiles
from qcut.schemes import FP8
from tests.gpu.support.oracles import DEVICE

pytestmark = pytest.mark.usefixtures("prebuilt")

N = 256


def codes() -> Tensor:
    """Every finite code in every column, uint8 ``[N, N]``: rows are rotated against one another."""
    every = torch.arange(256, dtype=torch.uint8)
    every = torch.where((every & 127) == 127, 0, every)
    return torch.stack([every.roll(i) for i in range(N)])


def layer(blocks: bool) -> qcut.Linear:
    """Scales are powers of two, so that results are exact in 16 bits too."""
    made = qcut.Linear(N, N, False, FP8(blocks))
    scale = torch.ones(N)
    if blocks:
        scale = 2.0 ** (torch.arange(32).view(N // 16, 2) % 5)
    made.load_state_dict({"qweight": codes().view(E4M3), "weight_scale": scale})
    return made.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 7, 9, 32, 33, 100, N])
@pytest.mark.parametrize("blocks", [False, True])
def test_every_code_is_decoded_exactly(blocks: bool, dtype: torch.dtype, m: int) -> None:
    one = layer(blocks)
    want = one.dequantized_weight().t().cpu()
    unit = torch.eye(N, dtype=dtype, device=DEVICE)
    with torch.no_grad():
        for first in range(0, N, m):
            got = one(unit[first : first + m]).float().cpu()
            assert torch.equal(got, want[first : first + m])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 8, 16, 32, 128])
@pytest.mark.parametrize("blocks", [False, True])
def test_every_code_of_experts_is_decoded_exactly(blocks: bool, dtype: torch.dtype, size: int) -> None:
    if size == 128 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("tiles of prompts need wgmma")
    one = layer(blocks)
    stack = LinearStack.of([one, layer(blocks)]).to(DEVICE)
    unit = torch.eye(N, dtype=dtype, device=DEVICE)
    chosen = torch.arange(N, dtype=torch.int32, device=DEVICE) % 2
    tiles = RouteTiles(chosen, None, N)
    if size > 1:
        tiles = RouteTiles(*torch.ops.qcut.sort_routes(chosen[:, None], 2, size), N)
    with torch.no_grad():
        got = stack.routed(unit, tiles, 1)
    assert got is not None
    assert torch.equal(got.float(), one.dequantized_weight().t())
