"""Layers whose kernels ask the L2 for the next product's weight: results are the same, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qcut.cuda.plans import pdl, target, watched_loads
from qcut.layers.base import Linear
from qcut.layers.int8 import W8A8Linear
from tests.gpu.support.oracles import DEVICE, assert_same

HALF = torch.float16
N, K = 4096, 1536
"""More tiles of rows than multiprocessors: CTAs with one tile, or with several."""


def layer(scheme: str, k: int = K, n: int = N) -> Linear:
    torch.manual_seed(k + n)
    return Linear.from_float(torch.nn.Linear(k, n), scheme).to(DEVICE)


def aheads(scheme: str, m: int) -> list[Tensor]:
    """What a layer reads first, none, no bytes, odd sizes and strides, and more parts than there are CTAs."""
    memory = torch.zeros(4096, 64, dtype=torch.uint8, device=DEVICE)
    found = layer(scheme, 256, 33 * 128).first_read(m, HALF)
    assert (found is None) == (not asks())
    odd = [memory[:0], memory[:, :0], memory[1:, 3:60], memory.view(-1)[: 63 * 65].view(63, 65), memory]
    return odd if found is None else [found, *odd]


def asks() -> bool:
    device = torch.cuda.current_device()
    return pdl(device) and not target(device).closed


@pytest.mark.parametrize("scheme", ["codebook4", "codebook4_int8", "w8a8", "w8a16"])
@pytest.mark.parametrize("m", [1, 8])
def test_results_do_not_depend_on_it(scheme: str, m: int) -> None:
    made, x = layer(scheme), torch.randn(m, K, device=DEVICE).half()
    want = made(x)
    with watched_loads() as names:
        for ahead in aheads(scheme, m):
            assert_same(made(x, ahead=ahead), want)
    assert any(name.endswith("_ahead") for name in names) == asks()
    if isinstance(made, W8A8Linear):
        q, scale = torch.ops.qcut.quantize_per_token(x, K)
        absmax = x.abs().amax(1).float()
        for ahead in aheads(scheme, m):
            noted = torch.zeros(m, device=DEVICE)
            assert_same(made.forward_int8(q, scale, HALF, noted, ahead), want)
            assert_same(noted, want.abs().amax(1).float())
            assert_same(made.forward_with_absmax(x, absmax, ahead), want)
