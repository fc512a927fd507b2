"""W8A8 layers of rows about which more is known, on CUDA: bitwise what quantization and the int8 GEMM give.

No N is a multiple of four: their GEMMs are raw kernels, which build in a second.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.numerics import int8 as numerics
from qcut.schemes import padded_k
from tests.gpu.support.oracles import DEVICE, activations, assert_same, full_range, name, relayout

OPS = torch.ops.qcut
HALF, SINGLE = torch.float16, torch.float32
FLOATS = (HALF, torch.bfloat16, SINGLE)
ROWS = (1, 2, 3, 8, 9, 64)
SMALL, MIDDLE, LONG = (37, 33), (1283, 201), (9731, 65)
"""(K, N)."""
LAYOUTS = ("row_stride", "column_stride", "transposed", "offset_1", "offset_8")


class Layer:
    """A W8A8 layer on the GPU."""

    def __init__(
        self,
        size: tuple[int, int],
        dtype: torch.dtype = HALF,
        *,
        bias: bool = True,
        activation: str = "none",
        device: str = DEVICE,
    ) -> None:
        (self.k, n), self.dtype, self.activation = size, dtype, activation
        generator = torch.Generator().manual_seed(self.k + n)
        qweight = torch.zeros(n, padded_k(self.k), dtype=torch.int8)
        qweight[:, : self.k] = full_range(n, self.k, seed=n).clamp(min=-127)
        self.qweight = qweight.to(device)
        self.scale = (torch.rand(n, generator=generator) / 100 + 1e-3).to(device)
        self.bias = torch.randn(n, generator=generator).to(device) if bias else None

    @property
    def projection(self) -> tuple[Any, ...]:
        return self.qweight, self.scale, self.bias, self.activation

    def rows(self, m: int) -> Tensor:
        generator = torch.Generator().manual_seed(m)
        return torch.randn(m, self.k, generator=generator).to(self.dtype).to(self.qweight.device)

    def int8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows that are quantized before, and the largest magnitudes it notes."""
        q, scale = OPS.quantize_per_token(x, self.qweight.shape[1])
        absmax = torch.zeros(len(x), device=x.device)
        return OPS.int8_linear(q, scale, *self.projection, self.dtype, absmax), absmax

    def noted(self, x: Tensor) -> Tensor:
        y: Tensor = OPS.noted_linear(x, x.float().abs().amax(1), *self.projection)
        return y

    def oracle(self, x: Tensor) -> Tensor:
        """On the CPU, except smooth activations: their bits are the device's."""
        if self.activation in ("none", "relu"):
            given = (t.cpu() if isinstance(t, Tensor) else t for t in self.projection)
            return numerics.w8a8_linear_ref(x.cpu(), *given).to(x.device)
        q, scale = OPS.quantize_per_token(x, self.qweight.shape[1])
        return product(OPS.gemm_s8, q, self.qweight, scale, self.scale, self.bias, self.activation, self.dtype)

    def check(self, x: Tensor) -> None:
        want, noted = self.oracle(x), torch.zeros(len(x), device=x.device)
        numerics.raise_absmax(noted, want)
        for _ in range(2):
            y, absmax = self.int8(x)
            assert_same(y, want)
            assert_same(absmax, noted)
            assert_same(self.noted(x), want)


def product(
    gemm: Any, q: Any, qweight: Any, row_scale: Any, scale: Any, bias: Any, activation: str, dtype: torch.dtype
) -> Tensor:
    y: Tensor = gemm(
        q, qweight, row_scale=row_scale, col_scale=scale, bias=bias, activation=activation, out_dtype=dtype
    )
    return y


# ── results ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(SMALL, HALF), *((size, dtype) for size in (MIDDLE, LONG) for dtype in FLOATS)],
    ids=name,
)
def test_equals_the_oracle(size: tuple[int, int], dtype: torch.dtype) -> None:
    layer = Layer(size, dtype)
    for m in ROWS:
        layer.check(layer.rows(m))


@pytest.mark.parametrize(("activation", "bias"), [("none", False), ("relu", True), ("gelu_tanh", True)])
def test_epilogues(activation: str, bias: bool) -> None:
    layer = Layer(MIDDLE, activation=activation, bias=bias)
    for m in (3, 9):
        layer.check(layer.rows(m))


def test_extreme_tokens_and_nan() -> None:
    layer = Layer(MIDDLE)
    x = activations(8, layer.k, HALF).to(DEVICE)
    x[6, 9] = float("nan")
    layer.check(x)
    y, absmax = layer.int8(x)
    assert y[6].isnan().all()
    assert absmax.isnan().tolist() == [i == 6 for i in range(8)]
    layer.check(torch.zeros_like(x))


def test_no_tokens() -> None:
    layer = Layer(SMALL)
    x = layer.rows(1)[:0]
    empty = torch.zeros(0, device=DEVICE)
    assert layer.int8(x)[0].shape == (0, 33)
    assert OPS.noted_linear(x, empty, *layer.projection).shape == (0, 33)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_a_token_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    layer = Layer(MIDDLE, dtype)
    x = layer.rows(8)
    together, (int8, absmax) = layer.noted(x), layer.int8(x)
    for i in range(8):
        assert_same(layer.noted(x[i : i + 1]), together[i : i + 1])
        for got, want in zip(layer.int8(x[i : i + 1]), (int8, absmax), strict=True):
            assert_same(got, want[i : i + 1])


# ── what notes largest magnitudes for them ───────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("columns", [1, 37, 1280, 5003])
def test_activations_note_absmax(columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(columns)
    x, other = torch.randn(2, 5, columns, generator=generator).to(dtype).to(DEVICE)
    x[3, columns // 2] = float("nan")
    for op, given in ((OPS.silu_mul, (x, other)), (OPS.gelu_tanh, (x,))):
        start = torch.tensor([0.0, 100.0, 0.0, 0.0, 1e-9], device=DEVICE)
        absmax = start.clone()
        y = op(*given, absmax)
        assert_same(y, op(*given))
        numerics.raise_absmax(start, y)
        assert_same(absmax, start)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [1280, 1283])
def test_reads_any_layout(k: int, layout: str) -> None:
    layer = Layer((k, 201))
    for m in (1, 3):
        x = layer.rows(m)
        assert_same(layer.noted(relayout(x, layout, float("nan"))), layer.oracle(x))


def test_one_row_again_and_again() -> None:
    layer = Layer((1280, 201))
    layer.check(layer.rows(1).expand(4, -1))


def test_parameters_start_anywhere() -> None:
    layer = Layer((1280, 201))
    x = layer.rows(3)
    want = layer.oracle(x)
    for attribute in ("qweight", "scale", "bias"):
        tensor = getattr(layer, attribute)
        moved = relayout(tensor.view(len(tensor), -1), "offset_1", 0)
        setattr(layer, attribute, moved.view(tensor.shape))
    layer.qweight = relayout(layer.qweight, "row_stride", 1)
    assert_same(layer.noted(x), want)
    assert_same(layer.int8(x)[0], want)


# ── streams, devices, graphs, tracing ────────────────────────────────────────────────────────────


def step(first: Layer, second: Layer, x: Tensor) -> Tensor:
    """Of two layers; the first gives the second what it needs to quantize."""
    y, absmax = first.int8(x)
    z: Tensor = OPS.noted_linear(y, absmax, *second.projection)
    return z


def two_layers() -> tuple[Layer, Layer]:
    return Layer((1283, 201)), Layer((201, 65))


@pytest.mark.parametrize("m", [1, 3, 8, 9])
def test_cuda_graph(m: int) -> None:
    """Kernels under dependent launch: the second starts early, and must not quantize before all is noted."""
    first, second = two_layers()
    inputs = [first.rows(m), first.rows(m) * -2]
    expected = [second.oracle(first.oracle(x)) for x in inputs]
    assert_same(step(first, second, inputs[0]), expected[0])
    held, graph = inputs[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(first, second, held)
    for i in range(40):
        held.copy_(inputs[i % 2])
        graph.replay()
        assert_same(out, expected[i % 2])


def test_a_gemm_of_few_tokens_waits_for_its_weights() -> None:
    """One kernel after the other in a graph: the first starts the second early, which must not read b yet."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 513, 4096, generator=generator).half().to(DEVICE)
    a, row_scale = full_range(1, 4096).to(DEVICE), torch.ones(1, device=DEVICE)

    def run(w: Tensor) -> Tensor:
        b, scale = OPS.quantize_per_token(w, 4096)
        return product(OPS.gemm_s8, a, b, row_scale, scale, None, "none", SINGLE)

    expected = []
    for w in (first, second):
        b, scale = numerics.quantize_per_token_ref(w.cpu(), 4096)
        on_cpu = (a.cpu(), b, row_scale.cpu(), scale, None)
        expected.append(product(numerics.gemm_s8_ref, *on_cpu, "none", SINGLE))
    held = first.clone()
    run(held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(held)
    for i in range(40):
        held.copy_((first, second)[i % 2])
        graph.replay()
        assert_same(out.cpu(), expected[i % 2])


def test_runs_on_the_current_stream() -> None:
    first, second = two_layers()
    x = first.rows(3)
    expected = step(first, second, x)
    late, stream = torch.zeros_like(x), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # on another stream, the layer would read zeros
        late.copy_(x)
        out = step(first, second, late)
        late.zero_()
    stream.synchronize()
    assert_same(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_runs_on_the_tensors_device() -> None:
    layer = Layer(MIDDLE, device="cuda:1")
    for m in (3, 9):
        layer.check(layer.rows(m))  # while cuda:0 is the current device
    assert torch.cuda.current_device() == 0


def test_compile_fullgraph() -> None:
    first, second = two_layers()
    x = first.rows(3)
    compiled = torch.compile(lambda x: step(first, second, x), fullgraph=True)
    assert_same(compiled(x), step(first, second, x))


# ── w8a8_linear of few tokens ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(SMALL, HALF), *((MIDDLE, dtype) for dtype in FLOATS), ((6144, 33), HALF), ((6151, 33), HALF), (LONG, SINGLE)],
    ids=name,
)
def test_linear_is_the_cpus(size: tuple[int, int], dtype: torch.dtype) -> None:
    layer = Layer(size, dtype)
    qweight, scale, bias, activation = layer.projection
    for m in range(1, 10):
        x = activations(m, layer.k, dtype, seed=m)
        want = numerics.w8a8_linear_ref(x, qweight.cpu(), scale.cpu(), bias.cpu(), activation)
        for _ in range(2):  # the second call is C++'s
            assert_same(OPS.w8a8_linear(x.to(DEVICE), *layer.projection).cpu(), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_reads_any_layout(layout: str) -> None:
    for k in (1280, 1283):
        layer = Layer((k, 201))
        x = layer.rows(5)
        want = OPS.w8a8_linear(x, *layer.projection)
        moved = relayout(x, layout, float("nan"))
        for _ in range(2):
            assert_same(OPS.w8a8_linear(moved, *layer.projection), want)


def test_linear_reads_aligned_rows_that_end_within_a_vector() -> None:
    layer = Layer(MIDDLE)
    for m in (1, 5):
        x = layer.rows(m)
        wide = torch.nn.functional.pad(x, (0, 5), value=float("nan"))
        assert wide.stride(0) * wide.element_size() % 16 == 0
        for _ in range(2):
            assert_same(OPS.w8a8_linear(wide[:, : layer.k], *layer.projection), OPS.w8a8_linear(x, *layer.projection))


def test_linear_gives_each_row_of_a_batch_what_it_gets_alone() -> None:
    for dtype in FLOATS:
        layer = Layer(MIDDLE, dtype)
        x = layer.rows(8)
        together = OPS.w8a8_linear(x, *layer.projection)
        for i in range(8):
            assert_same(OPS.w8a8_linear(x[i : i + 1], *layer.projection), together[i : i + 1])


def test_linear_inside_a_cuda_graph() -> None:
    layer = Layer(MIDDLE)
    first, second = layer.rows(3), layer.rows(3) * -2
    expected = [OPS.w8a8_linear(x, *layer.projection) for x in (first, second)]
    held, graph = first.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = OPS.w8a8_linear(held, *layer.projection)
    for x, want in zip((second, first), reversed(expected), strict=True):
        held.copy_(x)
        graph.replay()
        assert_same(out, want)
