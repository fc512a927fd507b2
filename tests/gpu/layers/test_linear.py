"""qcut.Linear on CUDA: the same integers as on the CPU; with float tokens except for the order of sums."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut import StaticRange
from qcut.errors import DeviceError, DtypeError
from qcut.numerics import int8 as numerics
from qcut.numerics.float8 import of_weights
from tests.gpu.support.oracles import DEVICE, activations, assert_same, half_ulp, name

pytestmark = pytest.mark.usefixtures("prebuilt")

EXACT = ("w8a8", "w8a8_static")
FLOAT_TOKENS = ("w8a16", "fp8", "fp8_blocks")
FLOAT8 = ("fp8_dynamic", "fp8_static")
SCHEMES = (*EXACT, *FLOAT_TOKENS, *FLOAT8)
SIZES = ((272, 336), (37, 33), (1280, 1280))
"""(K, N): a CUTLASS kernel, a raw one, a whole layer."""
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
CASES = [
    *(("w8a8", size, dtype) for size in SIZES for dtype in (HALF, BRAIN)),
    *(("w8a8_static", size, HALF) for size in SIZES),
    # The rest of the dtypes at the odd size: its kernels build in a second.
    *(
        (scheme, (37, 33), dtype)
        for scheme, dtype in (("w8a8", SINGLE), ("w8a8_static", BRAIN), ("w8a8_static", SINGLE))
    ),
    *((scheme, size, dtype) for scheme in FLOAT_TOKENS for size in SIZES for dtype in (HALF, BRAIN)),
    ("fp8_blocks", (301, 80), HALF),  # several units of rows that start anywhere
    *((scheme, size, dtype) for scheme in FLOAT8 for size in SIZES for dtype in (HALF, BRAIN)),
    *((scheme, (37, 33), SINGLE) for scheme in FLOAT8),
]


def layer(scheme: str, k: int, n: int, *, bias: bool = True, activation: str = "none") -> qcut.Linear:
    """A quantized layer on the CPU; its weights hold a zero row and an outlier."""
    torch.manual_seed(k + n)
    linear = nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        linear.weight[0] = 0
        linear.weight[n // 2, k // 2] = 9.0
    static_range = StaticRange(-3.0, 5.0) if scheme.endswith("_static") else None
    return qcut.Linear.from_float(linear, scheme, activation=activation, static_range=static_range)


def tokens(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)


def check_w8a16(cpu: qcut.Linear, x: Tensor, got: Tensor) -> None:
    """Within float32 summation's worst case, 2**-23 per addition, and one rounding of the output."""
    w = cpu.codes.double() * of_weights(cpu.weight_scale, *cpu.codes.shape).double()
    exact = x.double() @ w.t()
    slack = (x.double().abs() @ w.abs().t()) * 2.0**-23 * (cpu.in_features + 4)
    if cpu.bias is not None:
        exact = exact + cpu.bias.double()
    bound = slack + exact.abs() * 2.0**-22 + half_ulp(exact, got.dtype)
    assert bool(((got.double() - exact).abs() <= bound).all())
    # The worst case never happens to all elements at once: on the whole, the output's rounding remains.
    limit = {HALF: 2.0**-11, BRAIN: 2.0**-8}[got.dtype]
    assert (got.double() - exact).norm() < limit * exact.norm()


def check_fp8(cpu: qcut.Linear, x: Tensor, got: Tensor) -> None:
    """Quantized tokens are bitwise the CPU's; tensor cores add e4m3 products of 128 columns with 14 bits."""
    tokens = cpu.quantized_tokens(x)
    assert tokens is not None
    w = cpu.dequantized_weight().double()
    exact = tokens.double() @ w.t()
    slack = (tokens.double().abs() @ w.abs().t()) * (2.0**-5 + 2.0**-23 * (cpu.in_features + 4))
    if cpu.bias is not None:
        exact = exact + cpu.bias.double()
    assert bool(((got.double() - exact).abs() <= slack + exact.abs() * 2.0**-22 + half_ulp(exact, got.dtype)).all())
    limit = 2.0**-6 if len(x) > 32 else {HALF: 2.0**-10, BRAIN: 2.0**-8, SINGLE: 2.0**-18}[got.dtype]
    assert (got.double() - exact).norm() < limit * exact.norm()


@pytest.mark.parametrize(("scheme", "size", "dtype"), CASES, ids=name)
def test_agrees_with_the_cpu(scheme: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    cpu = layer(scheme, *size)
    gpu = copy.deepcopy(cpu).to(DEVICE)
    for m in (1, 17, 129):
        x = tokens(m, size[0], dtype)
        got = gpu(x.to(DEVICE)).cpu()
        assert got.dtype is dtype
        assert_same(gpu(x.to(DEVICE)).cpu(), got)
        if scheme in EXACT:
            assert_same(got, cpu(x))
        else:
            (check_fp8 if scheme in FLOAT8 else check_w8a16)(cpu, x, got)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_from_float_on_the_gpu_gives_the_same_buffers(scheme: str) -> None:
    torch.manual_seed(3)
    linear = nn.Linear(1280, 336)
    static_range = StaticRange(-3.0, 5.0) if scheme.endswith("_static") else None
    cpu = qcut.Linear.from_float(linear, scheme, static_range=static_range)
    gpu = qcut.Linear.from_float(linear.to(DEVICE), scheme, static_range=static_range)
    assert gpu.qweight.device.type == torch.device(DEVICE).type
    for key, value in cpu.state_dict().items():
        assert_same(gpu.state_dict()[key].cpu(), value)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_bias(scheme: str) -> None:
    cpu = layer(scheme, 37, 33, bias=False)
    x = tokens(9, 37, torch.float16)
    got = copy.deepcopy(cpu).to(DEVICE)(x.to(DEVICE)).cpu()
    if scheme in EXACT:
        assert_same(got, cpu(x))
    else:
        (check_fp8 if scheme in FLOAT8 else check_w8a16)(cpu, x, got)


@pytest.mark.parametrize("activation", ["relu", "gelu_erf", "gelu_tanh", "silu"])
@pytest.mark.parametrize("scheme", ["w8a8", *FLOAT_TOKENS])
def test_fused_activation(scheme: str, activation: str) -> None:
    plain, fused = layer(scheme, 272, 336), layer(scheme, 272, 336, activation=activation)
    x = tokens(129, 272, torch.float16).to(DEVICE)
    # The plain layer in float32 returns the activation's argument, up to w8a16's order of summation.
    v = plain(x.cpu().float())
    exact = numerics.apply_activation(v.double(), activation)
    error = (fused.to(DEVICE)(x).cpu().double() - exact).abs()
    slack = v.double().abs() * 2.0**-21 + (0.0 if scheme == "w8a8" else 2.0**-14)
    assert bool((error <= slack + half_ulp(exact, torch.float16)).all())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_shapes_and_strides_of_x(scheme: str) -> None:
    cpu = layer(scheme, 272, 336)
    gpu = copy.deepcopy(cpu).to(DEVICE)
    x = tokens(6, 272, torch.float16).to(DEVICE)
    expected = gpu(x)
    assert gpu(x.view(2, 3, 272)).shape == (2, 3, 336)
    views = {
        "3d": x.view(2, 3, 272),
        "wide rows": torch.cat([x, x.flip(0)], 1)[:, :272],
        "transposed": x.t().contiguous().t(),
        "permuted": x.view(2, 3, 272).transpose(0, 1).contiguous().transpose(0, 1),
        "offset": torch.cat([x.new_full((1,), 9.0), x.flatten()])[1:].view(6, 272),
    }
    views["repeated row"] = x[2:3].expand(6, 272)
    for what, view in views.items():
        y = expected[2:3].expand(6, 336) if what == "repeated row" else expected
        # Which rows share a tile must not matter to integers; w8a16 may sum in another order.
        torch.testing.assert_close(
            gpu(view).reshape(6, 336), y, rtol=0 if scheme in EXACT else 2e-3, atol=0 if scheme in EXACT else 1e-4
        )
    assert gpu(x[:0]).shape == (0, 336)
    assert gpu(x.view(2, 3, 272)[:, :0]).shape == (2, 0, 336)
    assert gpu(x[0]).shape == (336,)


@pytest.mark.parametrize("scheme", EXACT)
def test_a_token_does_not_depend_on_its_neighbours(scheme: str) -> None:
    gpu = layer(scheme, 272, 336).to(DEVICE)
    x = tokens(129, 272, torch.float16).to(DEVICE)
    together = gpu(x)
    for i in (0, 64, 128):
        assert_same(gpu(x[i : i + 1]), together[i : i + 1])


def test_extreme_tokens_and_nan() -> None:
    cpu = layer("w8a8", 272, 336)
    x = activations(33, 272, torch.float16)
    x[9, 7] = float("nan")
    got = copy.deepcopy(cpu).to(DEVICE)(x.to(DEVICE)).cpu()
    assert_same(got, cpu(x))
    assert got.isnan().any(1).nonzero().flatten().tolist() == [9]


def test_bad_tokens_of_fp8_stay_in_their_rows() -> None:
    for scheme, bad in (("fp8_dynamic", [9, 11]), ("fp8_static", [9])):
        gpu = layer(scheme, 272, 336).to(DEVICE)
        for m in (17, 129):
            x = tokens(m, 272, torch.float16)
            x[9, 7], x[11, 3] = float("nan"), float("inf")
            assert gpu(x.to(DEVICE)).isnan().any(1).nonzero().flatten().tolist() == bad


@pytest.mark.parametrize("scheme", SCHEMES)
def test_moves_between_devices_and_dtypes(scheme: str) -> None:
    cpu = layer(scheme, 272, 336)
    there = copy.deepcopy(cpu).to(DEVICE).half()
    back = copy.deepcopy(there).to("cpu", torch.bfloat16)
    for key, value in cpu.state_dict().items():
        assert_same(there.state_dict()[key].cpu(), value)
        assert_same(back.state_dict()[key], value)
    fresh = qcut.Linear(272, 336, scheme=scheme, device=DEVICE)
    fresh.load_state_dict(cpu.state_dict())
    x = tokens(9, 272, torch.float16).to(DEVICE)
    assert_same(fresh(x), there(x))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cuda_graph(scheme: str) -> None:
    model = nn.Sequential(layer(scheme, 272, 336), nn.ReLU(), layer(scheme, 336, 272)).to(DEVICE)
    first, second = (tokens(17, 272, torch.float16).to(DEVICE) * s for s in (1, -2))
    expected = [model(x) for x in (first, second)]
    static = first.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(static)
    for x, y in zip((second, first), reversed(expected), strict=True):
        static.copy_(x)
        graph.replay()
        assert_same(out, y)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compile_fullgraph(scheme: str) -> None:
    model = nn.Sequential(layer(scheme, 272, 336), nn.ReLU(), layer(scheme, 336, 272)).to(DEVICE)
    compiled = torch.compile(model, fullgraph=True)
    x = tokens(17, 272, torch.float16).to(DEVICE)
    assert_same(compiled(x), model(x))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_x_on_another_device_is_refused(scheme: str) -> None:
    gpu = layer(scheme, 272, 336).to(DEVICE)
    with pytest.raises(DeviceError):
        gpu(tokens(2, 272, torch.float16))


@pytest.mark.parametrize("scheme", FLOAT_TOKENS)
def test_float32_tokens_are_refused(scheme: str) -> None:
    gpu = layer(scheme, 272, 336).to(DEVICE)
    with pytest.raises(DtypeError, match=r"float32.*float16, bfloat16"):
        gpu(tokens(2, 272, SINGLE).to(DEVICE))
