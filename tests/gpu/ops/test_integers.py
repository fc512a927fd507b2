"""Layers in integers on CUDA: bitwise the CPU's, for any number of tokens and layout, and at the ends of all ranges."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.numerics import int16, integers
from qcut.numerics.integers import BIAS_MAX, K_MAX, MULTIPLIER_MAX
from tests.gpu.support.oracles import DEVICE, assert_same, name
from tests.support.operands import case

OP = torch.ops.qcut.integer_linear
TYPES = (torch.int8, torch.int16)
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 300)
SIZES = ((33, 37), (201, 1283), (64, 48), (272, 1280), (1040, 9728))
"""(N, K)."""


def arguments(dtype: torch.dtype, m: int, n: int, k: int, *, relu: bool = False) -> tuple[Any, ...]:
    zero = torch.tensor([-19], dtype=torch.int32) if dtype is torch.int8 else None
    return *case(dtype, m, n, k, seed=m + n), zero, relu


def check(args: tuple[Any, ...], **options: Any) -> None:
    want = integers.integer_linear_ref(*args)
    on_device = [t.to(DEVICE) if isinstance(t, Tensor) else t for t in args]
    for _ in range(2):
        assert_same(OP(*on_device, **options).cpu(), want)


@pytest.mark.parametrize("size", SIZES, ids=name)
@pytest.mark.parametrize("dtype", TYPES, ids=name)
def test_equals_the_definition(dtype: torch.dtype, size: tuple[int, int]) -> None:
    most = arguments(dtype, max(ROWS), *size)
    want = integers.integer_linear_ref(*most)
    saturated = float((want == integers.LIMITS[dtype][1]).float().mean())
    assert 0.02 < saturated < 0.45
    _, *rest = (t.to(DEVICE) if isinstance(t, Tensor) else t for t in most)
    q = most[0].to(DEVICE)
    for m in ROWS:
        assert_same(OP(q[:m], *rest).cpu(), want[:m])
        assert_same(OP.early_read(q[:m], *rest).cpu(), want[:m])


@pytest.mark.parametrize("dtype", TYPES, ids=name)
def test_relu(dtype: torch.dtype) -> None:
    for m in (1, 8, 20, 70):
        check(arguments(dtype, m, 100, 320, relu=True))


@pytest.mark.parametrize("dtype", TYPES, ids=name)
def test_the_longest_sums(dtype: torch.dtype) -> None:
    for value in (-(2**15), int16.LARGEST) if dtype is torch.int16 else (-128, 127):
        weight = torch.full((34, K_MAX), -128, dtype=torch.int8)
        weight[::2] = 127
        for sign in (1, -1):
            bias = torch.full((34,), sign * BIAS_MAX)
            multiplier = torch.full((34,), MULTIPLIER_MAX, dtype=torch.int32)
            shift = torch.arange(34, dtype=torch.int32) + 29
            zero = torch.tensor([127], dtype=torch.int32) if dtype is torch.int8 else None
            for m in (1, 9, 40):
                check((torch.full((m, K_MAX), value, dtype=dtype), weight, bias, multiplier, shift, zero, False))


@pytest.mark.parametrize("dtype", TYPES, ids=name)
def test_every_shift_and_halves_to_even(dtype: torch.dtype) -> None:
    n = 63 * 6
    weight = torch.zeros(n, 16, dtype=torch.int8)
    weight[:, 0] = 1
    shift = torch.arange(63, dtype=torch.int32).repeat_interleave(6)
    multiplier = torch.tensor([1, 2, 3, 2**23, MULTIPLIER_MAX, 0], dtype=torch.int32).repeat(63)
    bias = torch.zeros(n, dtype=torch.int64)
    bias[n // 2 :] = BIAS_MAX - 200
    zero = torch.zeros(1, dtype=torch.int32) if dtype is torch.int8 else None
    for m in (5, 130):
        q = torch.zeros(m, 16, dtype=dtype)
        q[:, 0] = torch.arange(m).to(dtype) - m // 2
        check((q, weight, bias, multiplier, shift, zero, False))
        check((q, weight, -bias, multiplier, shift, zero, False))


@pytest.mark.parametrize("dtype", TYPES, ids=name)
@pytest.mark.parametrize("k", [1280, 1283])
def test_reads_any_layout(k: int, dtype: torch.dtype) -> None:
    q, *rest = arguments(dtype, 20, 97, k)
    want = integers.integer_linear_ref(q, *rest)
    on_device = [t.to(DEVICE) if isinstance(t, Tensor) else t for t in rest]
    for m in (1, 3, 20):
        for wide in (k + 16, k + 5):
            rows = torch.full((m, wide), 99, dtype=dtype, device=DEVICE)
            for at in (0, 1, 5):
                view = rows[:, at : at + k]
                view.copy_(q[:m])
                assert_same(OP(view, *on_device).cpu(), want[:m])
        assert_same(OP(q[:m].to(DEVICE).t().contiguous().t(), *on_device).cpu(), want[:m])
    assert_same(OP(q.view(4, 5, k).to(DEVICE), *on_device).cpu(), want.view(4, 5, 97))
    assert OP(q[:0].to(DEVICE), *on_device).shape == (0, 97)
    shifted = torch.empty(on_device[1].numel() + 1, dtype=torch.int64, device=DEVICE)[1:].copy_(on_device[1])
    assert_same(OP.early_read(q.to(DEVICE), on_device[0], shifted, *on_device[2:]).cpu(), want)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = (96, 256, 161, 512, 64)
    steps: list[nn.Module] = []
    for k, n in pairwise(sizes):
        steps += [nn.Linear(k, n), nn.ReLU()]
    return nn.Sequential(*steps[:-1])


@pytest.mark.parametrize("bits", [8, 16])
def test_a_chain_is_bitwise_that_of_the_cpu(bits: int) -> None:
    batches = [torch.randn(64, 96, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    model = network()
    chain = qcut.IntegerChain.from_float(model, batches, bits=bits)
    x = torch.randn(300, 96, generator=torch.Generator().manual_seed(9)) * 1.3
    x[0, 3], x[1, 5] = float("nan"), float("inf")
    want = {dtype: chain(x.to(dtype)) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
    on_device = chain.to(DEVICE)
    for dtype, expected in want.items():
        for m in ROWS:
            assert_same(on_device(x[:m].to(dtype).to(DEVICE)).cpu(), expected[:m])
    with torch.no_grad():
        floats = model(batches[0])
        error = (on_device(batches[0].to(DEVICE)).cpu() - floats).norm() / floats.norm()
    assert float(error) < (0.05 if bits == 8 else 0.015)


@pytest.mark.parametrize("bits", [8, 16])
def test_a_captured_graph_and_another_stream(bits: int) -> None:
    chain = qcut.IntegerChain.from_float(network().to(DEVICE), [torch.randn(64, 96, device=DEVICE)], bits=bits)
    for m in (1, 20):
        x = torch.randn(m, 96, device=DEVICE)
        want = chain(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert_same(chain(x), want)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = chain(x)
        y.zero_()
        graph.replay()
        assert_same(y, want)


@pytest.mark.parametrize("bits", [8, 16])
def test_a_layer_is_the_same_made_on_the_gpu(bits: int) -> None:
    linear, ranges = nn.Linear(77, 33), (qcut.StaticRange(-1, 2), qcut.StaticRange(-3, 1))
    on_cpu = qcut.IntegerLinear.from_float(linear, *ranges, bits=bits).state_dict()
    on_gpu = qcut.IntegerLinear.from_float(linear.to(DEVICE), *ranges, bits=bits).state_dict()
    for key, buffer in on_cpu.items():
        assert_same(on_gpu[key].cpu(), buffer)


def test_opcheck() -> None:
    for dtype in TYPES:
        args = [t.to(DEVICE) if isinstance(t, Tensor) else t for t in arguments(dtype, 6, 20, 21)]
        torch.library.opcheck(OP.default, tuple(args))
