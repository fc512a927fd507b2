"""Layers with prompts that CUTLASS's mixed kernels serve: which kernel a call takes, and what it computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.backends.cuda.launch.plans import forget_plans, watched_loads
from qcut.dispatch.heuristics.tiled import CUTLASS_TOKENS
from tests.gpu.layers.test_linear import check_w8a16
from tests.gpu.support.oracles import assert_same

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("wgmma exists only on sm_90a", allow_module_level=True)


def layer(scheme: str, k: int, n: int) -> qcut.Linear:
    torch.manual_seed(k + n)
    return qcut.Linear.from_float(nn.Linear(k, n), scheme)


def call(layer: qcut.Linear, x: Tensor) -> tuple[list[Tensor], list[str]]:
    """Two calls' results, the second perhaps from C++, and the kernels that they took."""
    forget_plans()
    on_gpu, x = layer.cuda(), x.cuda()
    with watched_loads() as loaded:
        results = [on_gpu(x).cpu() for _ in range(2)]
    layer.cpu()
    return results, loaded


@pytest.mark.parametrize(
    ("m", "k", "n", "cutlass"),
    [
        (1024, 272, 4104, True),
        (1300, 272, 4096, True),
        (128, 1280, 5120, True),
        (1024, 264, 336, False),
        (1024, 272, 330, False),
        (64, 272, 336, False),
    ],
)
def test_w8a16(m: int, k: int, n: int, cutlass: bool) -> None:
    quantized = layer("w8a16", k, n)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).half()
    results, loaded = call(quantized, x)
    assert [name.startswith("qcut_w8a16_cutlass_") for name in loaded] == [cutlass]
    assert_same(results[0], results[1])
    check_w8a16(quantized, x, results[0])


@pytest.mark.parametrize(
    ("scheme", "m", "n", "cutlass"),
    [
        ("codebook4_rows_int8", CUTLASS_TOKENS, 336, True),
        ("codebook4_rows_none_int8", CUTLASS_TOKENS + 301, 1288, True),
        ("codebook4_rows_int8", CUTLASS_TOKENS, 330, False),
        ("codebook4_rows_int8", 65, 336, False),
        ("codebook4_int8", CUTLASS_TOKENS, 336, False),
    ],
)
def test_codebooks_of_one_norm_a_row(scheme: str, m: int, n: int, cutlass: bool) -> None:
    """The same integers as on the CPU."""
    quantized = layer(scheme, 1024, n)
    x = torch.randn(m, 1024, generator=torch.Generator().manual_seed(m)).half()
    results, loaded = call(quantized, x)
    assert [name.startswith("qcut_codebook_cutlass_") for name in loaded] == [False, cutlass]
    assert_same(results[0], results[1])
    assert_same(results[0], quantized(x))
