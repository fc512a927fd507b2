"""The C++ operators on CUDA: bitwise what Python's return, and really in their place."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import qcut
from qcut.backends.cuda.launch import native as _native
from qcut.layers.int8 import W8A8StaticLinear
from tests.gpu.layers.test_linear import FLOAT8, layer, tokens
from tests.gpu.layers.test_linear import SCHEMES as LAYERS
from tests.gpu.support.launching import left_to_python
from tests.gpu.support.oracles import DEVICE, assert_same, name

pytestmark = pytest.mark.usefixtures("prebuilt")
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
SCHEMES = tuple(scheme for scheme in LAYERS if scheme not in FLOAT8)
"""Those that C++ serves: tokens in e4m3 go through Python."""
SIZES = ((272, 336), (37, 33), (1280, 1280))
CASES = [
    *((scheme, size, dtype, True) for scheme in SCHEMES for size in SIZES for dtype in (HALF, BRAIN)),
    *((scheme, (37, 33), HALF, False) for scheme in SCHEMES),
    ("w8a8", (37, 33), SINGLE, True),
    ("w8a8_static", (37, 33), SINGLE, True),
]


@pytest.fixture(autouse=True)
def library() -> _native.Library:
    found = _native.library()
    assert found is not None, f"no C++ operators: {_native.problem()}"
    return found


def arguments(linear: qcut.Linear, x: Tensor) -> tuple[str, tuple[Any, ...]]:
    """The operator a layer calls and its arguments."""
    if isinstance(linear, W8A8StaticLinear):
        return "w8a8_static_linear", (
            *(x, linear.qweight, linear.col_scale, linear.colsum, linear.bias),
            *(*linear.input_qparams, linear.activation),
        )
    op = "w8a8_linear" if linear.scheme.name == "w8a8" else "w8a16_linear"
    return op, (x, linear.qweight, linear.weight_scale, linear.bias, linear.activation)


def by_python(linear: qcut.Linear, x: Tensor) -> Tensor:
    with left_to_python():
        result: Tensor = linear(x)
    return result


def by_cpp(library: _native.Library, call: Callable[[], Tensor]) -> Tensor:
    """The call's result, which C++ must have computed."""
    before = library.hits
    result = call()
    assert library.hits > before, "Python served the call"
    return result


@pytest.mark.parametrize(("scheme", "size", "dtype", "bias"), CASES, ids=name)
def test_equals_python(
    library: _native.Library, scheme: str, size: tuple[int, int], dtype: torch.dtype, bias: bool
) -> None:
    gpu = layer(scheme, *size, bias=bias).to(DEVICE)
    for m in (1, 17, 64, 65, 129):
        x = tokens(m, size[0], dtype).to(DEVICE)
        expected = by_python(gpu, x)
        got = by_cpp(library, lambda x=x: gpu(x))
        assert_same(got, expected)
        assert got.stride() == expected.stride()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_more_dimensions_and_strided_rows(library: _native.Library, scheme: str) -> None:
    gpu = layer(scheme, 272, 336).to(DEVICE)
    wide = tokens(34, 288, HALF).to(DEVICE)
    for x in (tokens(30, 272, HALF).to(DEVICE).view(2, 3, 5, 272), wide[:, 16:], wide[::2, :272], wide[3:4, 1:273]):
        expected = by_python(gpu, x)
        assert_same(by_cpp(library, lambda x=x: gpu(x)), expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transposed_tokens_are_pythons(library: _native.Library, scheme: str) -> None:
    gpu = layer(scheme, 272, 336).to(DEVICE)
    x = tokens(17, 272, HALF).to(DEVICE)
    expected = gpu(x)
    before = library.hits
    assert_same(gpu(x.t().contiguous().t()), expected)
    assert library.hits == before


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_tokens(library: _native.Library, scheme: str) -> None:
    gpu = layer(scheme, 272, 336).to(DEVICE)
    gpu(tokens(1, 272, HALF).to(DEVICE))
    assert gpu(torch.empty(2, 0, 272, dtype=HALF, device=DEVICE)).shape == (2, 0, 336)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inside_a_cuda_graph(library: _native.Library, scheme: str) -> None:
    gpu = layer(scheme, 1280, 1280).to(DEVICE)
    first, second = (tokens(17, 1280, HALF).to(DEVICE) * s for s in (1, -2))
    expected = [by_python(gpu, x) for x in (first, second)]
    static = first.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = by_cpp(library, lambda: gpu(static))
    for x, y in zip((second, first), reversed(expected), strict=True):
        static.copy_(x)
        graph.replay()
        assert_same(out, y)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_runs_on_the_current_stream(library: _native.Library, scheme: str) -> None:
    gpu = layer(scheme, 272, 336).to(DEVICE)
    x = tokens(33, 272, HALF).to(DEVICE)
    expected = by_python(gpu, x)
    late, stream = torch.zeros_like(x), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # on another stream, the layer would read zeros
        late.copy_(x)
        got = by_cpp(library, lambda: gpu(late))
    stream.synchronize()
    assert_same(got, expected)


def test_threads_share_layers(library: _native.Library) -> None:
    layers = [layer(scheme, 272, 336).to(DEVICE) for scheme in SCHEMES]
    inputs = [tokens(m, 272, HALF).to(DEVICE) for m in (5, 130)]
    expected = {(i, j): by_python(gpu, x) for i, gpu in enumerate(layers) for j, x in enumerate(inputs)}
    torch.cuda.synchronize()
    before, failures = library.hits, []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                for (i, j), y in expected.items():
                    if not torch.equal(layers[i](inputs[j]), y):
                        failures.append((i, j))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert library.hits - before == 2 * 50 * len(expected)


def test_a_layer_that_takes_anothers_place(library: _native.Library) -> None:
    x = tokens(9, 272, HALF).to(DEVICE)
    one, other = layer("w8a8", 272, 336), layer("w8a8", 272, 336)
    other.qweight.neg_()

    def run(cpu: qcut.Linear) -> Tensor:
        return copy.deepcopy(cpu).to(DEVICE)(x)

    first, second = run(one), run(other)
    assert_same(second.cpu(), other(x.cpu()))
    assert not torch.equal(first, second)
    gpu = copy.deepcopy(one).to(DEVICE)
    assert_same(gpu(x), first)
    for mine, others in zip(gpu.buffers(), other.buffers(), strict=True):
        mine.copy_(others)
    assert_same(by_cpp(library, lambda: gpu(x)), second)
    assert_same(run(one), first)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_that_require_grad(library: _native.Library, scheme: str) -> None:
    gpu = layer(scheme, 272, 336).to(DEVICE)
    x = tokens(5, 272, HALF).to(DEVICE)
    expected = by_python(gpu, x)
    x.requires_grad_()
    got, reference = by_cpp(library, lambda: gpu(x)), by_python(gpu, x)
    assert got.requires_grad == reference.requires_grad
    assert_same(got.detach(), expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compiles_and_passes_opcheck(library: _native.Library, scheme: str) -> None:
    gpu = layer(scheme, 272, 336).to(DEVICE)
    x = tokens(17, 272, HALF).to(DEVICE)
    expected = by_python(gpu, x)
    assert_same(by_cpp(library, lambda: torch.compile(gpu, fullgraph=True)(x)), expected)
    op, args = arguments(gpu, x)
    if not scheme.startswith("fp8"):  # opcheck multiplies arguments, as torch cannot on CUDA in float8_e4m3fn
        torch.library.opcheck(getattr(torch.ops.qcut, op).early_read, args)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_second_device(library: _native.Library) -> None:
    gpu = layer("w8a8", 272, 336).to("cuda:1")
    x = tokens(17, 272, HALF).to("cuda:1")
    expected = by_python(gpu, x)
    assert_same(gpu(x), expected)
    with torch.cuda.device(1):
        assert_same(by_cpp(library, lambda: gpu(x)), expected)
