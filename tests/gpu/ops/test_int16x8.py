"""Linear layers of int16 tokens on CUDA: bitwise the CPU's, for every number of tokens and any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qcut
from qcut.backends.cuda import linear as linear_cuda
from qcut.numerics import int16
from qcut.schemes import K_MAX
from tests.gpu.ops.test_linear import FLOATS, LAYOUTS, Layer
from tests.gpu.support.launching import left_to_python
from tests.gpu.support.oracles import DEVICE, activations, assert_same, name, relayout

OPS = torch.ops.qcut
ROWS = (1, 2, 4, 5, 8, 9, 16, 17, 33, 64, 129, 300)
SMALL, MIDDLE, LONG, ALIGNED = (37, 33), (1283, 201), (9731, 65), (1280, 273)


class Int16(Layer):
    """A layer with tokens that become int16."""

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = OPS.int16x8_linear(x, *self.projection)
        return y

    def oracle(self, x: Tensor) -> Tensor:
        given = (t.cpu() if isinstance(t, Tensor) else t for t in self.projection)
        return int16.int16x8_linear_ref(x.cpu(), *given).to(x.device)

    def check(self, x: Tensor) -> None:
        want = self.oracle(x)
        with left_to_python():
            assert_same(self(x), want)
        assert_same(self(x), want)  # by C++, where it is built
        assert_same(self(x), want)


class Static(Int16):
    """A layer with one calibrated scale for tokens."""

    range_scale = int16.static_scale(-3.0, 2.5)

    @property
    def calibrated(self) -> tuple[Any, ...]:
        return self.qweight, self.scale, self.bias, self.range_scale, self.activation

    def check(self, x: Tensor) -> None:
        given = (t.cpu() if isinstance(t, Tensor) else t for t in self.calibrated)
        want = int16.int16x8_static_linear_ref(x.cpu(), *given).to(x.device)
        for _ in range(2):
            assert_same(OPS.int16x8_static_linear(x, *self.calibrated), want)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("size", [SMALL, MIDDLE, ALIGNED], ids=name)
def test_static_equals_the_oracle(size: tuple[int, int], dtype: torch.dtype) -> None:
    layer = Static(size, dtype)
    for m in ROWS:
        x = layer.rows(m)
        x[0, 3], x[-1, 5], x[-1, 7] = float("nan"), float("inf"), float("-inf")
        layer.check(x)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(SMALL, torch.float16), (ALIGNED, torch.float16), *((size, dtype) for size in (MIDDLE, LONG) for dtype in FLOATS)],
    ids=name,
)
def test_equals_the_oracle(size: tuple[int, int], dtype: torch.dtype) -> None:
    layer = Int16(size, dtype)
    for m in ROWS:
        layer.check(layer.rows(m))


@pytest.mark.parametrize(("activation", "bias"), [("none", False), ("relu", True)])
def test_epilogues(activation: str, bias: bool) -> None:
    layer = Int16(MIDDLE, activation=activation, bias=bias)
    for m in (1, 3, 40):
        layer.check(layer.rows(m))


@pytest.mark.parametrize("activation", ["gelu_erf", "gelu_tanh", "silu"])
def test_smooth_activations(activation: str) -> None:
    layer, plain = Int16(MIDDLE, torch.float32, activation=activation), Int16(MIDDLE, torch.float32)
    for m in (1, 3, 40):
        x = layer.rows(m)
        v = plain.oracle(x)
        error = (layer(x) - layer.oracle(x)).abs()
        assert bool((error <= v.abs() * 2.0**-20).all())


def test_extreme_tokens_and_nan() -> None:
    for size in (MIDDLE, ALIGNED):
        layer = Int16(size)
        for m in (8, 40):
            x = activations(m, layer.k, torch.float16).to(DEVICE)
            x[6, 9] = float("nan")
            layer.check(x)
            assert layer(x)[6].isnan().all()
            layer.check(torch.zeros_like(x))


def test_the_longest_row() -> None:
    weight = torch.full((3, K_MAX + 1), 127, dtype=torch.int8)
    weight[1], weight[2] = -127, -128
    weight[:, K_MAX:] = 0
    layer = Int16((K_MAX, 3), torch.float32)
    layer.qweight, layer.bias = weight.to(DEVICE), None
    for m in (1, 3, 9, 70):
        layer.check(torch.full((m, K_MAX), -7.0, device=DEVICE))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [1280, 1283])
def test_reads_any_layout(k: int, layout: str) -> None:
    layer = Int16((k, 201))
    for m in (1, 3, 20):
        x = layer.rows(m)
        assert_same(layer(relayout(x, layout, float("nan"))), layer.oracle(x))


def test_no_tokens_and_leading_dimensions() -> None:
    layer = Int16(SMALL)
    x = layer.rows(6)
    assert layer(x[:0]).shape == (0, 33)
    assert_same(layer(x.view(2, 3, 37)), layer.oracle(x).view(2, 3, 33))
    assert_same(layer(x[0]), layer.oracle(x)[0])


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    layer = Int16(MIDDLE)
    x = layer.rows(70)
    together = layer(x)
    for i in (0, 7, 8, 69):
        assert_same(layer(x[i : i + 1]), together[i : i + 1])
    assert_same(layer(x[:20]), together[:20])


def test_a_captured_graph_and_another_stream() -> None:
    layer = Int16(ALIGNED)
    x = layer.rows(20)
    want = layer.oracle(x)
    layer(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert_same(layer(x), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    y.zero_()
    graph.replay()
    assert_same(y, want)


def test_a_model_of_layers_prebuilds_what_it_calls() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(96, 161), torch.nn.ReLU(), torch.nn.Linear(161, 63)).half().to(DEVICE)
    x = torch.randn(20, 96, device=DEVICE).half()
    want = model(x)
    qcut.quantize(model, "int16x8", skip=(), allow_growth=True, prebuild=(1, 20), progress=False)
    linear_cuda._plans.clear()
    with torch.no_grad():
        got = model(x)
    assert float((got - want).norm() / want.norm()) < 0.01
