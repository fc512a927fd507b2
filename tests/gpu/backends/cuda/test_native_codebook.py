"""The C++ operators of codebook layers on CUDA: bitwise what Python's return, and really in their place."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qcut.backends.cuda.launch import native as _native
from qcut.errors import QcutError
from qcut.layers.codebook import CodebookLinear
from qcut.numerics.codebook.layout import from_blocks
from qcut.numerics.codebook.products import pack_book
from tests.gpu.layers.test_codebook import layer, tokens
from tests.gpu.layers.test_shifted import made
from tests.gpu.support.launching import left_to_python
from tests.gpu.support.oracles import DEVICE, assert_same

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
SCHEMES = (
    *("codebook4", "codebook3", "codebook2_g64", "codebook4+4", "codebook4+2", "codebook4_g32_qr", "codebook4_none"),
    *("int4", "codebook4_pairs", "codebook4_pairs_g32", "codebook4_rows_qr"),
    *("codebook4_int8", "codebook3_g64_int8", "codebook4+4_int8", "codebook4+3_int8", "codebook4_g32_qr_int8"),
    *("int4_g32_int8", "codebook4_pairs_int8", "codebook4_rows_qr_int8", "int4_g16", "int4_g16_int8", "int4_g10"),
)
FEW = ("codebook4", "codebook4_int8", "codebook4+2", "codebook3_qr_int8")
ROWS = (1, 8, 33, 300, 2048)


@pytest.fixture(autouse=True)
def library() -> _native.Library:
    found = _native.library()
    assert found is not None, f"no C++ operators: {_native.problem()}"
    return found


def by_python(library: _native.Library, call: Callable[[], Any]) -> Any:
    """The call's result, computed by Python; it makes the plans that C++ uses."""
    before = library.hits
    with left_to_python():
        result = call()
    assert library.hits == before
    return result


def by_cpp(library: _native.Library, call: Callable[[], Any], operators: int = 1) -> Any:
    """The call's result; C++ must have computed so many operators of it."""
    before = library.hits
    result = call()
    assert library.hits - before == operators, "Python served the call"
    return result


def operators(linear: CodebookLinear, x: Tensor) -> int:
    """Operators that a layer calls where nobody has rotated its tokens."""
    whole = x.numel() == linear.in_features and linear._rotates_one and x.dtype is not SINGLE
    return 1 if whole else 1 + len(linear.set_bits)


def assert_equal_calls(library: _native.Library, linear: CodebookLinear, x: Tensor) -> None:
    expected = by_python(library, lambda: linear(x))
    got = by_cpp(library, lambda: linear(x), operators(linear, x))
    assert_same(got, expected)
    assert got.stride() == expected.stride()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_equals_python(library: _native.Library, scheme: str) -> None:
    gpu = layer(scheme, 384).to(DEVICE)
    for m in ROWS:
        assert_equal_calls(library, gpu, tokens(m, 384).to(DEVICE))


@pytest.mark.parametrize("scheme", FEW)
def test_other_types_and_epilogues(library: _native.Library, scheme: str) -> None:
    gpu = layer(scheme, 384, bias=False, activation="gelu_tanh").to(DEVICE)
    for dtype in (BRAIN, SINGLE) if gpu.int8 and gpu.kind != "qr" else (BRAIN,):
        for m in (1, 33, 300):
            assert_equal_calls(library, gpu, tokens(m, 384, dtype).to(DEVICE))


@pytest.mark.parametrize("scheme", ["codebook4", "codebook4_int8"])
@pytest.mark.parametrize(("k", "n"), [(320, 33), (4096, 4096), (6144, 1288)])
def test_sizes_of_models_and_odd_ones(library: _native.Library, scheme: str, k: int, n: int) -> None:
    gpu = layer(scheme, k, n).to(DEVICE)
    for m in (1, 17, 700):
        assert_equal_calls(library, gpu, tokens(m, k).to(DEVICE))


def test_offsets(library: _native.Library) -> None:
    for passes in (1, 2):
        gpu = made(136, 320, 64, passes=passes, activation="relu").to(DEVICE)
        for m in ROWS:
            assert_equal_calls(library, gpu, tokens(m).to(DEVICE))


@pytest.mark.parametrize("scheme", FEW)
def test_more_dimensions_and_strided_rows(library: _native.Library, scheme: str) -> None:
    gpu = layer(scheme).to(DEVICE)
    wide = tokens(34, 336).to(DEVICE)
    for x in (tokens(30).to(DEVICE).view(2, 3, 5, 320), wide[:, 16:], wide[::2, :320], wide[:, 1:321], wide[3:4, :320]):
        assert_equal_calls(library, gpu, x)
    across = tokens(17).to(DEVICE).t().contiguous().t()
    assert_same(gpu(across), by_python(library, lambda: gpu(across.clone())))
    assert gpu(torch.empty(2, 0, 320, dtype=HALF, device=DEVICE)).shape == (2, 0, 136)


@torch.no_grad()
@pytest.mark.parametrize("scheme", FEW)
@pytest.mark.parametrize("m", [1, 17, 130])
def test_inside_a_cuda_graph(library: _native.Library, scheme: str, m: int) -> None:
    gpu = layer(scheme, 384, 1280).to(DEVICE)
    first, second = (tokens(m, 384).to(DEVICE) * s for s in (1, -2))
    expected = [by_python(library, lambda x=x: gpu(x)) for x in (first, second)]
    static = first.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = by_cpp(library, lambda: gpu(static), operators(gpu, static))
    for x, y in zip((second, first), reversed(expected), strict=True):
        static.copy_(x)
        graph.replay()
        assert_same(out, y)


@torch.no_grad()
def test_layers_share_rotations(library: _native.Library) -> None:
    layers = [layer("codebook4_int8", 384, 136).to(DEVICE) for _ in range(3)]
    x = tokens(33, 384).to(DEVICE)
    expected = [by_python(library, lambda one=one: one(x.clone())) for one in layers]
    got = by_cpp(library, lambda: [one(x) for one in layers], 1 + len(layers))
    for mine, wanted in zip(got, expected, strict=True):
        assert_same(mine, wanted)
    with torch.inference_mode():  # tensors without versions are rotated for each layer
        own = x.clone()
        by_cpp(library, lambda: [one(own) for one in layers], 2 * len(layers))


@torch.no_grad()
@pytest.mark.parametrize("scheme", FEW)
def test_runs_on_the_current_stream(library: _native.Library, scheme: str) -> None:
    gpu = layer(scheme).to(DEVICE)
    x = tokens(33).to(DEVICE)
    expected = by_python(library, lambda: gpu(x))
    late, stream = torch.zeros_like(x), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # on another stream, the layer would read zeros
        late.copy_(x)
        got = by_cpp(library, lambda: gpu(late), operators(gpu, late))
    stream.synchronize()
    assert_same(got, expected)


@torch.no_grad()
def test_threads_share_layers(library: _native.Library) -> None:
    layers = [layer(scheme).to(DEVICE) for scheme in FEW]
    inputs = [tokens(m).to(DEVICE) for m in (5, 130)]
    expected = {
        (i, j): by_python(library, lambda gpu=gpu, x=x: gpu(x))
        for i, gpu in enumerate(layers)
        for j, x in enumerate(inputs)
    }
    torch.cuda.synchronize()
    before, failures = library.hits, []

    def work() -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
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
    assert library.hits - before >= 2 * 50 * len(expected), "each call has a product"


@torch.no_grad()
def test_a_layer_that_takes_anothers_place(library: _native.Library) -> None:
    x = tokens(9).to(DEVICE)
    one, other = layer("codebook4_int8"), layer("codebook4_int8")
    other.col_scale.neg_()

    def run(cpu: CodebookLinear) -> Tensor:
        return copy.deepcopy(cpu).to(DEVICE)(x.clone())

    first, second = run(one), run(other)
    assert not torch.equal(first, second)
    gpu = copy.deepcopy(one).to(DEVICE)
    assert_same(gpu(x.clone()), first)
    for mine, others in zip(gpu.buffers(), other.buffers(), strict=True):
        mine.copy_(others)
    assert_same(by_cpp(library, lambda: gpu(x.clone()), 2), second)
    assert_same(run(one), first)


@pytest.mark.parametrize("scheme", FEW)
def test_tokens_that_require_grad(library: _native.Library, scheme: str) -> None:
    gpu = layer(scheme).to(DEVICE)
    x = tokens(5).to(DEVICE)
    expected = by_python(library, lambda: gpu(x))
    x.requires_grad_()
    got, reference = by_cpp(library, lambda: gpu(x), operators(gpu, x)), by_python(library, lambda: gpu(x))
    assert got.requires_grad == reference.requires_grad
    assert_same(got.detach(), expected)


@torch.no_grad()
@pytest.mark.parametrize("scheme", FEW)
def test_compiles(library: _native.Library, scheme: str) -> None:
    gpu = layer(scheme).to(DEVICE)
    x = tokens(17).to(DEVICE)
    expected = by_python(library, lambda: gpu(x))
    torch.compiler.reset()  # code is kept for few layers of a class
    compiled = torch.compile(nn.Sequential(gpu), fullgraph=True)
    for got in (compiled(x), by_cpp(library, lambda: compiled(x), operators(gpu, x))):
        # Where two products are added, a kernel of the compiler's ends the sum.
        assert torch.allclose(got, expected, rtol=2.0**-10 * (len(gpu.set_bits) - 1), atol=0)


def arguments(gpu: CodebookLinear, x: Tensor) -> dict[str, list[Any]]:
    """Those of each operator of an int8 layer: of one token for ``codebook_gemv``."""
    signs = gpu._rotation.operands(HALF, x.device)
    rotate = [x, signs, gpu.kind, gpu.group_size, list(gpu.scheme.seeds), torch.int8]
    blocks, scale = torch.ops.qcut.rotate_tokens(*rotate)
    weight = [gpu.units, gpu.packed_norms, gpu.fold, gpu.col_scale, list(pack_book(gpu.codebook, HALF))]
    rest = [*weight, gpu.bias, 4, "none", torch.randn(len(x), gpu.out_features, device=DEVICE).half(), HALF]
    one = [x[:1].clone(), signs, gpu.group_size, list(gpu.scheme.seeds), *rest[:-2], rest[-2][:1].clone(), rest[-1]]
    return {"rotate_tokens": rotate, "codebook_gemm": [blocks, scale, len(x), *rest], "codebook_gemv": one}


@pytest.mark.parametrize("op", ["rotate_tokens", "codebook_gemm", "codebook_gemv"])
def test_operators(library: _native.Library, op: str) -> None:
    """Python computes the same; errors and odd tensors are Python's."""
    m = 33
    given = arguments(layer("codebook4_int8", 384).to(DEVICE), tokens(m, 384).to(DEVICE))[op]
    call = getattr(torch.ops.qcut, op).early_read
    expected = written(by_python(library, lambda: call(*given)), m)
    for got, wanted in zip(written(by_cpp(library, lambda: call(*given)), m), expected, strict=True):
        assert_same(got, wanted)
    torch.library.opcheck(call, tuple(given), test_utils=("test_schema", "test_faketensor"))
    for i, value in enumerate(given):
        if not isinstance(value, Tensor):
            continue
        off = torch.empty(value.numel() + 1, dtype=value.dtype, device=DEVICE)[1:].view(value.shape).copy_(value)
        changed = [*given[:i], off, *given[i + 1 :]]
        for got, wanted in zip(written(call(*changed), m), expected, strict=True):
            assert_same(got, wanted)
        for wrong in (value.unsqueeze(0).unsqueeze(0), value.double(), value.cpu()):
            with pytest.raises(QcutError, match=f"qcut::{op}: "):
                call(*given[:i], wrong, *given[i + 1 :])


def written(result: Any, m: int) -> tuple[Tensor, ...]:
    """What kernels write: of blocks of tokens the rows of m tokens, since the last block may have more."""
    if isinstance(result, Tensor):
        return (result,)
    blocks, scale = result
    return from_blocks(blocks, m), scale


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_second_device(library: _native.Library) -> None:
    gpu = layer("codebook4_int8").to("cuda:1")
    x = tokens(17).to("cuda:1")
    with torch.cuda.device(1):
        expected = by_python(library, lambda: gpu(x))
        assert_same(by_cpp(library, lambda: gpu(x.clone()), 2), expected)
    assert_same(gpu(x.clone()), expected)
