"""Norm or gate and W8A8 projection as one operator on CUDA: bitwise the operators one after the other.

No N is a multiple of four: their GEMMs are raw kernels, which build in a second.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from emitters.w8a8_decode import MAX_ELEMENTS, makes_tokens
from qcut import _launch_plans, numerics, ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.config import padded_k
from tests.gpu.oracles import DEVICE, activations, assert_same, full_range, name, relayout

OPS = torch.ops.qcut
HALF, SINGLE = torch.float16, torch.float32
FLOATS = (HALF, torch.bfloat16, SINGLE)
KINDS = ("rms", "layer", "gate")
ROWS = (1, 2, 3, 8, 9, 64)
SMALL, MIDDLE, LONG = (37, 33), (1283, 201), (9731, 65)
"""(K, N): of the long one a kernel makes up to 5 tokens, if its shared memory holds them."""
LAYOUTS = ("row_stride", "column_stride", "transposed", "offset_1", "offset_8")
EPS = 1e-5


class Layer:
    """A norm or a gate and the projection after it, on the GPU: together, and one after the other."""

    def __init__(
        self,
        kind: str,
        size: tuple[int, int],
        dtype: torch.dtype = HALF,
        *,
        bias: bool = True,
        activation: str = "none",
        device: str = DEVICE,
    ) -> None:
        self.kind, (self.k, n), self.dtype, self.activation = kind, size, dtype, activation
        generator = torch.Generator().manual_seed(self.k + n)
        qweight = torch.zeros(n, padded_k(self.k), dtype=torch.int8)
        qweight[:, : self.k] = full_range(n, self.k, seed=n).clamp(min=-127)
        self.qweight = qweight.to(device)
        self.scale = (torch.rand(n, generator=generator) / 100 + 1e-3).to(device)
        self.bias = torch.randn(n, generator=generator).to(device) if bias else None
        self.norm_weight, norm_bias = torch.randn(2, self.k, generator=generator).to(dtype).to(device)
        self.norm_bias = norm_bias if kind == "layer" else None

    @property
    def projection(self) -> tuple[Any, ...]:
        return self.qweight, self.scale, self.bias, self.activation

    def norm(self, x: Tensor, other: Tensor | None) -> tuple[Any, ...]:
        return x, other, self.norm_weight, self.norm_bias, self.kind == "layer", EPS

    def inputs(self, m: int) -> tuple[Tensor, Tensor]:
        """What is normed or gated, and the residual or what the gate multiplies."""
        generator = torch.Generator().manual_seed(m)
        x, other = torch.randn(2, m, self.k, generator=generator).to(self.dtype).to(self.qweight.device)
        return x, other

    def together(self, x: Tensor, other: Tensor | None) -> tuple[Tensor, ...]:
        """The sum, of a norm, and the result."""
        if self.kind == "gate":
            return (OPS.gate_w8a8(x, other, *self.projection),)
        total, y = OPS.norm_w8a8(*self.norm(x, other), *self.projection)
        return total, y

    def apart(self, x: Tensor, other: Tensor | None) -> tuple[Tensor, ...]:
        """The same of separate operators; the product, but for smooth activations, is the CPU reference's too."""
        columns, total = self.qweight.shape[1], ()
        if self.kind == "gate":
            q, scale = OPS.quantize_per_token(OPS.silu_mul(x, other), columns)
        else:
            *total, q, scale = OPS.add_norm_int8(*self.norm(x, other), columns)
        given = (q, self.qweight, scale, self.scale, self.bias)
        y = product(OPS.gemm_s8, *given, self.activation, self.dtype)
        if self.activation in ("none", "relu"):
            on_cpu = (None if t is None else t.cpu() for t in given)
            assert_same(y.cpu(), product(numerics.gemm_s8_ref, *on_cpu, self.activation, self.dtype))
        return *total, y

    def check(self, x: Tensor, other: Tensor | None) -> None:
        """Together, twice, is apart."""
        for _ in range(2):
            for got, want in zip(self.together(x, other), self.apart(x, other), strict=True):
                assert_same(got, want)


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
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_operators_one_after_the_other(kind: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    layer = Layer(kind, size, dtype)
    for m in ROWS:
        layer.check(*layer.inputs(m))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_of_no_residual(kind: str) -> None:
    layer = Layer(kind, MIDDLE)
    for m in (1, 8, 9):
        layer.check(layer.inputs(m)[0], None)


def test_a_layer_norm_without_bias() -> None:
    layer = Layer("layer", MIDDLE)
    layer.norm_bias = None
    layer.check(*layer.inputs(3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("activation", "bias"), [("none", False), ("relu", True), ("gelu_tanh", True)])
def test_epilogues(kind: str, activation: str, bias: bool) -> None:
    layer = Layer(kind, MIDDLE, activation=activation, bias=bias)
    layer.check(*layer.inputs(3))


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_no_kernel_holds_or_makes(kind: str, dtype: torch.dtype) -> None:
    sizes = [(8, 6144), (5, 9728), (3, 16384), (1, 16383), (8, 6151), (4, 12289)]
    sizes += [(1, 32761)] if dtype is not SINGLE or kind == "gate" else []  # a norm alone takes no longer rows
    sizes += [(1, MAX_ELEMENTS), (2, MAX_ELEMENTS // 2 + 1)] if kind == "gate" else []
    assert not all(makes_tokens(m, k) for m, k in sizes)
    for m, k in sizes:
        layer = Layer(kind, (k, 33), dtype)
        layer.check(*layer.inputs(m))


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_tokens_and_nan(kind: str) -> None:
    layer = Layer(kind, MIDDLE)
    x, other = activations(8, layer.k, HALF).to(DEVICE), layer.inputs(8)[1]
    x[6, 9] = float("nan")
    layer.check(x, other)
    *_, y = layer.together(x, other)
    assert y[6].isnan().all()
    layer.check(torch.zeros_like(x), torch.zeros_like(other))


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(kind: str) -> None:
    layer = Layer(kind, SMALL)
    x, other = (t[:0] for t in layer.inputs(1))
    *total, y = layer.together(x, other)
    assert y.shape == (0, 33)
    assert [t.shape for t in total] == [(0, 37)] * (kind != "gate")


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_does_not_depend_on_its_neighbours(kind: str, dtype: torch.dtype) -> None:
    layer = Layer(kind, MIDDLE, dtype)
    x, other = layer.inputs(8)
    together = layer.together(x, other)
    for i in range(8):
        for got, want in zip(layer.together(x[i : i + 1], other[i : i + 1]), together, strict=True):
            assert_same(got, want[i : i + 1])


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [1280, 1283])
@pytest.mark.parametrize("kind", KINDS)
def test_reads_any_layout(kind: str, k: int, layout: str) -> None:
    layer = Layer(kind, (k, 201))
    for m in (1, 3):
        x, other = layer.inputs(m)
        want = layer.apart(x, other)
        moved, there = (relayout(t, layout, float("nan")) for t in (x, other))
        for given in ((moved, there), (moved, other), (x, there)):
            for got, expected in zip(layer.together(*given), want, strict=True):
                assert_same(got, expected)


def test_gate_and_up_are_halves_of_one_product() -> None:
    for k in (1280, 1283):
        layer = Layer("gate", (k, 201))
        for m in (1, 3, 8):
            both = torch.cat(layer.inputs(m), 1)
            layer.check(*both.chunk(2, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_again_and_again(kind: str) -> None:
    layer = Layer(kind, (1280, 201))
    x, other = (t.expand(4, -1) for t in layer.inputs(1))
    layer.check(x, other)


@pytest.mark.parametrize("kind", ["layer", "gate"])
def test_parameters_start_anywhere(kind: str) -> None:
    layer = Layer(kind, (1280, 201))
    inputs = layer.inputs(3)
    want = layer.apart(*inputs)
    for attribute in ("qweight", "scale", "bias", "norm_weight", "norm_bias"):
        tensor = getattr(layer, attribute)
        if tensor is not None:
            moved = relayout(tensor.view(len(tensor), -1), "offset_1", 0)
            setattr(layer, attribute, moved.view(tensor.shape))
    layer.qweight = relayout(layer.qweight, "row_stride", 1)
    for got, expected in zip(layer.together(*inputs), want, strict=True):
        assert_same(got, expected)


# ── streams, devices, graphs, tracing ────────────────────────────────────────────────────────────


def step(norm: Layer, gate: Layer, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """As a decoder's: a norm and two projections in one, their gate and the next."""
    total, up = norm.together(x, other)
    (y,) = gate.together(*up.chunk(2, -1))
    return total, y


def two_layers() -> tuple[Layer, Layer]:
    return Layer("rms", (1283, 2 * 201)), Layer("gate", (201, 65))


@pytest.mark.parametrize("m", [1, 3, 8, 9])
def test_cuda_graph(m: int) -> None:
    layers = two_layers()
    x, other = layers[0].inputs(m)
    inputs = [(x, other), (other * -2, x)]
    expected = [step(*layers, *given) for given in inputs]
    held = [t.clone() for t in inputs[0]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*layers, *held)
    for given, want in zip(reversed(inputs), reversed(expected), strict=True):
        for target, source in zip(held, given, strict=True):
            target.copy_(source)
        graph.replay()
        for got, y in zip(out, want, strict=True):
            assert_same(got, y)


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


@pytest.mark.parametrize("kind", KINDS)
def test_runs_on_the_current_stream(kind: str) -> None:
    layer = Layer(kind, MIDDLE)
    fresh = layer.inputs(3)
    expected = layer.together(*fresh)
    late, stream = [torch.zeros_like(t) for t in fresh], torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # on another stream, the layer would read zeros
        for target, source in zip(late, fresh, strict=True):
            target.copy_(source)
        out = layer.together(*late)
        for target in late:
            target.zero_()
    stream.synchronize()
    for got, want in zip(out, expected, strict=True):
        assert_same(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", KINDS)
def test_runs_on_the_tensors_device(kind: str) -> None:
    layer = Layer(kind, MIDDLE, device="cuda:1")
    for m in (3, 9):
        layer.check(*layer.inputs(m))  # while cuda:0 is the current device
    assert torch.cuda.current_device() == 0


def test_compile_fullgraph() -> None:
    layers = two_layers()
    given = layers[0].inputs(3)
    compiled = torch.compile(lambda x, other: step(*layers, x, other), fullgraph=True)
    for got, want in zip(compiled(*given), step(*layers, *given), strict=True):
        assert_same(got, want)


# ── w8a8_linear of few tokens ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(SMALL, HALF), *((MIDDLE, dtype) for dtype in FLOATS), ((6144, 33), HALF), ((6151, 33), HALF), (LONG, SINGLE)],
    ids=name,
)
def test_linear_is_the_cpus(size: tuple[int, int], dtype: torch.dtype) -> None:
    layer = Layer("gate", size, dtype)
    qweight, scale, bias, activation = layer.projection
    for m in range(1, 10):
        x = activations(m, layer.k, dtype, seed=m)
        want = numerics.w8a8_linear_ref(x, qweight.cpu(), scale.cpu(), bias.cpu(), activation)
        for _ in range(2):  # the second call is C++'s
            assert_same(OPS.w8a8_linear(x.to(DEVICE), *layer.projection).cpu(), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_reads_any_layout(layout: str) -> None:
    for k in (1280, 1283):
        layer = Layer("gate", (k, 201))
        x, _ = layer.inputs(5)
        want = OPS.w8a8_linear(x, *layer.projection)
        moved = relayout(x, layout, float("nan"))
        for _ in range(2):
            assert_same(OPS.w8a8_linear(moved, *layer.projection), want)


def test_linear_reads_aligned_rows_that_end_within_a_vector() -> None:
    layer = Layer("gate", MIDDLE)
    for m in (1, 5):
        x, _ = layer.inputs(m)
        wide = torch.nn.functional.pad(x, (0, 5), value=float("nan"))
        assert wide.stride(0) * wide.element_size() % 16 == 0
        for _ in range(2):
            assert_same(OPS.w8a8_linear(wide[:, : layer.k], *layer.projection), OPS.w8a8_linear(x, *layer.projection))


def test_linear_gives_each_row_of_a_batch_what_it_gets_alone() -> None:
    for dtype in FLOATS:
        layer = Layer("gate", MIDDLE, dtype)
        x, _ = layer.inputs(8)
        together = OPS.w8a8_linear(x, *layer.projection)
        for i in range(8):
            assert_same(OPS.w8a8_linear(x[i : i + 1], *layer.projection), together[i : i + 1])


def test_linear_inside_a_cuda_graph() -> None:
    layer = Layer("gate", MIDDLE)
    first, second = layer.inputs(3)
    expected = [OPS.w8a8_linear(x, *layer.projection) for x in (first, second)]
    held, graph = first.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = OPS.w8a8_linear(held, *layer.projection)
    for x, want in zip((second, first), reversed(expected), strict=True):
        held.copy_(x)
        graph.replay()
        assert_same(out, want)
