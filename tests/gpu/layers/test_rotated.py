"""Rotated W8A8 layers on CUDA: bitwise the CPU's layers, and float32 epilogues of int64 sums."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.backends.cuda.launch.plans import target, watched_loads
from qcut.numerics import int8
from qcut.numerics.codebook.tokens import quantize_rotated_ref
from tests.gpu.support.oracles import DEVICE, assert_same

pytestmark = pytest.mark.usefixtures("prebuilt")

TOKENS = (1, 2, 8, 16, 17, 64, 65, 128, 1024)
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
CASES = [
    ("w8a8_rotated", 1280, 1280, HALF),
    ("w8a8_rotated", 1280, 1280, BRAIN),
    ("w8a8_rotated", 272, 336, HALF),  # the last group has 16 columns
    ("w8a8_rotated_g64", 272, 336, BRAIN),
    ("w8a8_rotated_g32_seed7", 40, 33, HALF),
    ("w8a8_rotated", 40 - 8, 33, SINGLE),
    ("w8a8_rotated_rows", 1024, 80, HALF),
    ("w8a8_rotated_g32", 416, 80, HALF),
]


def layer(scheme: str, k: int, n: int, activation: str = "none") -> qcut.Linear:
    """On the CPU; its weights hold a zero row and an outlier."""
    torch.manual_seed(k + n)
    linear = nn.Linear(k, n)
    with torch.no_grad():
        linear.weight[0] = 0
        linear.weight[n // 2, k // 2] = 9.0
    return qcut.Linear.from_float(linear, scheme, activation=activation)


def tokens(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """With outliers; a row of zeros, one with NaN and one with infinity."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
    x[:, k // 3] *= 60
    if m > 3:
        x[1], x[2, 0], x[3, k - 1] = 0, float("nan"), float("inf")
    return x.to(dtype)


@torch.no_grad()
@pytest.mark.parametrize(("scheme", "k", "n", "dtype"), CASES)
def test_agrees_with_the_cpu(scheme: str, k: int, n: int, dtype: torch.dtype) -> None:
    cpu = layer(scheme, k, n, "relu")
    gpu = copy.deepcopy(cpu).to(DEVICE)
    group, seed = cpu.scheme.group_columns(k), cpu.scheme.seed  # type: ignore[attr-defined]
    signs = gpu._rotation.operands_for(gpu.qweight)  # type: ignore[attr-defined]
    for m in TOKENS:
        x = tokens(m, k, dtype)
        q, scale = quantize_rotated_ref(x, group, seed, cpu.qweight.shape[1])
        got_q, got_scale = torch.ops.qcut.quantize_rotated(x.to(DEVICE), signs, group, seed)
        assert_same(got_q.cpu(), q)
        assert_same(got_scale.cpu(), scale)
        sums = q.long() @ cpu.qweight.long().t()
        exact = {"row_scale": scale, "col_scale": cpu.weight_scale, "bias": cpu.bias, "activation": "relu"}
        want = int8.epilogue_ref(sums.float(), **exact, out_dtype=dtype)
        got = gpu(x.to(DEVICE))
        assert_same(got.cpu(), want)
        assert_same(gpu(x.to(DEVICE)), got)
        assert_same(want, cpu(x))


@torch.no_grad()
@pytest.mark.parametrize(
    ("group", "k", "fused"),
    [(32, 160, True), (64, 1280, True), (128, 4096, True), (128, 14336, True), (128, 16512, False)],
)
def test_product_rotates_one_token(group: int, k: int, fused: bool) -> None:
    """Bitwise the two kernels, for tokens of all kinds; a token that starts within 16 bytes takes these."""
    gpu = layer(f"w8a8_rotated_g{group}", k, 144).to(DEVICE)
    b, signs = dict(gpu.named_buffers()), gpu._rotation.operands_for(gpu.qweight)  # type: ignore[attr-defined]
    with watched_loads() as loaded:
        for dtype in (HALF, BRAIN):
            given = tokens(9, k, dtype).to(DEVICE)
            shifted = torch.empty(1, k + 1, dtype=dtype, device=DEVICE)[:, 1:].copy_(given[:1])
            for x in (*given.split(1), shifted):
                q, scale = torch.ops.qcut.quantize_rotated(x, signs, group, gpu.scheme.seed)  # type: ignore[attr-defined]
                weight = b["qweight"], b["weight_scale"], b["bias"]
                want = torch.ops.qcut.int8_linear(q, scale, *weight, "none", dtype)
                assert_same(gpu(x), want)
                assert_same(gpu(x), want)  # as C++ serves it
    if not target(torch.cuda.current_device()).ahead_of_time:
        assert any(f"_h{group}_" in name for name in loaded) is fused


@torch.no_grad()
def test_rows_of_any_strides() -> None:
    cpu = layer("w8a8_rotated", 272, 336)
    gpu, whole = copy.deepcopy(cpu).to(DEVICE), tokens(9, 600, HALF)
    for x in (whole[:, :272], whole[:, 3:275], whole[:, 3:275].t().contiguous().t(), whole[:, :272].reshape(3, 3, 272)):
        strided = torch.empty_strided(x.shape, x.stride(), dtype=HALF, device=DEVICE).copy_(x)
        assert_same(gpu(strided).cpu(), cpu(x))
    assert gpu(whole[:0, :272].to(DEVICE)).shape == (0, 336)


@torch.no_grad()
def test_layers_share_tokens_until_they_change() -> None:
    made = [layer("w8a8_rotated", 272, n) for n in (336, 48, 48)]
    x = tokens(17, 272, HALF)
    on_gpu, layers = x.to(DEVICE), [copy.deepcopy(one).to(DEVICE) for one in made]
    for _ in range(2):
        for cpu, gpu in zip(made, layers, strict=True):
            assert_same(gpu(on_gpu).cpu(), cpu(x))
        x = -2 * x
        on_gpu.mul_(-2)


@torch.no_grad()
def test_weights_are_rotated_alike_on_both_devices() -> None:
    torch.manual_seed(3)
    linear = nn.Linear(1376, 336)
    for scheme in ("w8a8_rotated_g64", "w8a8_rotated_g32"):
        cpu = qcut.Linear.from_float(linear, scheme)
        gpu = qcut.Linear.from_float(copy.deepcopy(linear).to(DEVICE), scheme)
        for key, value in cpu.state_dict().items():
            assert_same(gpu.state_dict()[key].cpu(), value)
        assert_same(gpu.dequantized_weight().cpu(), cpu.dequantized_weight())


@torch.no_grad()
def test_compiled_and_captured() -> None:
    model = nn.Sequential(*(layer("w8a8_rotated", 1280, 1280) for _ in range(2))).to(DEVICE)
    x, graph = tokens(1, 1280, HALF).to(DEVICE), torch.cuda.CUDAGraph()
    want = model(x)
    assert_same(torch.compile(model, fullgraph=True)(x), want)
    with torch.cuda.graph(graph):
        y = model(x)
    graph.replay()
    assert_same(y, want)
    x.mul_(0.5)
    graph.replay()
    assert_same(y, model(x))
