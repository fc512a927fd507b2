"""Layers on the Triton back end: integers of the other two, floats near, graphs, compiled code, refused GPUs."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.backends.cuda.launch.plans import forget_plans
from qcut.backends.triton import codebook, int8, launch
from qcut.errors import PathWarning, UnsupportedError
from qcut.layers import codebook as codebook_linear
from qcut.ops import paths
from tests.gpu.support.oracles import DEVICE, assert_same

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
EXACT = (
    "w8a8",
    "w8a8_rotated",
    "w8a8_rotated_g32",
    "w8a8_static",
    "int16x8",
    "int16x8_static",
    "codebook4_int8",
    "codebook4_g64_int8",
    "codebook3_g64_int8",
    "codebook2_g32_int8",
    "codebook4_pairs_int8",
    "codebook4+4_int8",
    "int4_g32_int8",
    "int4_g16_int8",
)
MANY = ("w8a8", "int16x8", "codebook4_int8", "codebook3_g64_int8")
"""Tried with many tokens as well."""
NEAR = (
    "w8a16",
    "codebook4",
    "codebook4_pairs",
    "codebook4_g32",
    "codebook3",
    "codebook2_g64",
    "codebook4+4",
    "codebook4+2",
    "codebook4_g64_qr",
    "int4",
    "int4_g16",
    "nvfp4",
)
LIMIT = {HALF: 2.0**-10, BRAIN: 2.0**-7}
"""Of the whole error, relative: one rounding of each weight and one of the output, in the tokens' type."""


@pytest.fixture
def likely_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tile of each list: Triton takes a second for each."""
    for module in (codebook, int8):
        tiles_of = module.tiles_of
        monkeypatch.setattr(module, "tiles_of", lambda *args, all_of=tiles_of, **kw: all_of(*args, **kw)[:1])
    monkeypatch.setattr(launch, "_choices", {})


def layer(scheme: str, k: int = 384, n: int = 136, *, activation: str = "none") -> qcut.Linear:
    """On the CPU; its weights hold a zero row and an outlier."""
    torch.manual_seed(k + n)
    linear = nn.Linear(k, n)
    with torch.no_grad():
        linear.weight[0] = 0
        linear.weight[n // 2, k // 2] = 9.0
    static_range = qcut.StaticRange(-3.0, 3.5) if scheme.endswith("_static") else None
    return qcut.Linear.from_float(linear, scheme, activation=activation, static_range=static_range)


def tokens(m: int, k: int = 384, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)


@pytest.mark.usefixtures("likely_tiles")
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        *((scheme, HALF) for scheme in EXACT),
        ("w8a8", SINGLE),
        ("w8a8", BRAIN),
        ("int16x8", SINGLE),
        ("codebook4_int8", BRAIN),
    ],
)
def test_int8_products_are_the_same_on_three_paths(scheme: str, dtype: torch.dtype) -> None:
    cpu = layer(scheme, activation="relu")
    gpu = copy.deepcopy(cpu).to(DEVICE)
    for m in (5, 150) if scheme in MANY else (5,):
        x = tokens(m, dtype=dtype)
        want = cpu(x)
        # Many tokens are W8A8's in CUTLASS kernels, which take nvcc a minute.
        for path in paths.BACK_ENDS if m < 10 else ("triton",):
            with qcut.execution_path(path):
                got = gpu(x.to(DEVICE))
                assert_same(got.cpu(), want)
                assert_same(gpu(x.to(DEVICE)), got)


@pytest.mark.usefixtures("likely_tiles")
@pytest.mark.parametrize(
    ("scheme", "dtype"), [*((scheme, HALF) for scheme in NEAR), *((scheme, BRAIN) for scheme in NEAR[:4])]
)
def test_16_bit_products_are_near(scheme: str, dtype: torch.dtype) -> None:
    gpu = layer(scheme, activation="relu").to(DEVICE)
    for m in (5, 150) if scheme in NEAR[:2] else (5,):
        x = tokens(m, dtype=dtype).to(DEVICE)
        with qcut.execution_path("reference"):
            want = gpu(x).double()
        for path in ("cuda", "triton"):
            with qcut.execution_path(path):
                got = gpu(x)
                assert_same(gpu(x), got)
            assert got.dtype is dtype
            error = float((got.double() - want).norm() / want.norm())
            assert error <= 4 * LIMIT[dtype], f"{path}, {m} tokens"


@pytest.mark.usefixtures("likely_tiles")
@pytest.mark.parametrize(("scheme", "most"), [("w8a8", 40), ("codebook4_int8", 20)])
def test_every_number_of_tokens(scheme: str, most: int) -> None:
    cpu = layer(scheme, 128, 72)
    gpu = copy.deepcopy(cpu).to(DEVICE)
    for m in range(1, most + 1):
        x = tokens(m, 128)
        with qcut.execution_path("triton"):
            got = gpu(x.to(DEVICE))
        assert_same(got.cpu(), cpu(x))


@pytest.mark.usefixtures("likely_tiles")
@pytest.mark.parametrize("activation", ["none", "gelu_erf", "gelu_tanh", "silu"])
def test_activations(activation: str) -> None:
    """Arguments are the same integers, scaled; functions differ by what their docstrings state."""
    gpu = layer("w8a8", activation=activation).to(DEVICE)
    plain = layer("w8a8").to(DEVICE)
    x = 5 * tokens(64, dtype=SINGLE).to(DEVICE)
    with qcut.execution_path("reference"):
        want, v = gpu(x).double(), plain(x).double()
    with qcut.execution_path("triton"):
        got = gpu(x).double()
    ulp = torch.maximum(v.abs(), want.abs()) * 2.0**-23
    assert bool(((got - want).abs() <= 8 * ulp).all())


@pytest.mark.usefixtures("likely_tiles")
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_static", "int16x8", "int16x8_static"])
def test_special_tokens(scheme: str) -> None:
    """A GPU's maximum of NaN and a number is the number, the interpreter's is NaN."""
    cpu = layer(scheme)
    gpu = copy.deepcopy(cpu).to(DEVICE)
    x = tokens(5)
    x[0, 3], x[1, 5], x[2], x[3, 0] = float("nan"), float("inf"), 0, -float("inf")
    with qcut.execution_path("triton"):
        got = gpu(x.to(DEVICE))
    assert_same(got.cpu(), cpu(x))


@pytest.mark.usefixtures("likely_tiles")
@pytest.mark.parametrize("scheme", ["w8a8", "codebook4"])
def test_tokens_of_any_strides(scheme: str) -> None:
    gpu = layer(scheme).to(DEVICE)
    x = tokens(6, 2 * 384).to(DEVICE)
    odd = torch.empty(6 * 384 + 1, dtype=HALF, device=DEVICE)[1:].view(6, 384).copy_(x[:, :384])
    with qcut.execution_path("triton"):
        want = gpu(x[:, :384].contiguous())
        for given in (x[:, :384], odd, x.t()[:384].t()):
            assert_same(gpu(given), want)
        assert gpu(x[:0, :384]).shape == (0, 136)
        assert_same(gpu(x[:, :384].view(2, 3, 384)).view(6, -1), want)


@pytest.mark.usefixtures("likely_tiles")
@pytest.mark.parametrize("scheme", ["w8a8", "codebook4"])
def test_a_cuda_graph_and_compiled_code(scheme: str) -> None:
    gpu = layer(scheme).to(DEVICE)
    x = tokens(5).to(DEVICE)
    with qcut.execution_path("triton"), torch.no_grad():
        want = gpu(x)
        compiled = torch.compile(gpu, fullgraph=True, backend="eager")
        assert_same(compiled(x), want)
        static, graph = torch.zeros_like(x), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = gpu(static)
        static.copy_(x)
        graph.replay()
        assert_same(y, want)


@pytest.mark.usefixtures("likely_tiles")
def test_a_capture_before_any_call() -> None:
    gpu = layer("w8a8", 96, 48).to(DEVICE)
    static, graph = tokens(3, 96).to(DEVICE), torch.cuda.CUDAGraph()
    with qcut.execution_path("triton"):
        with torch.cuda.graph(graph):
            y = gpu(static)
        graph.replay()
        assert_same(y, gpu(static))


@pytest.mark.usefixtures("likely_tiles")
@pytest.mark.parametrize("scheme", ["w8a8", "codebook4"])
def test_no_memory_of_the_weights_size(scheme: str) -> None:
    gpu = layer(scheme, 2048, 4096).to(DEVICE)
    x = tokens(100, 2048).to(DEVICE)
    with qcut.execution_path("triton"):
        y = gpu(x)  # chooses its tile
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = gpu(x)
        activations = y.nbytes + 3 * x.nbytes
        assert torch.cuda.max_memory_allocated() - before <= activations + (1 << 20)


@pytest.mark.usefixtures("likely_tiles")
def test_a_gpu_that_kernels_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer(scheme).to(DEVICE) for scheme in ("w8a8", "codebook4_int8")]
    x = tokens(5).to(DEVICE)
    want = [gpu(x) for gpu in layers]
    monkeypatch.setattr(paths, "_refusals", {0: "GPU Thor has compute capability 11.0"})
    monkeypatch.setattr(paths, "_warned", set())
    forget_plans()  # C++ has none for such a GPU
    with pytest.warns(PathWarning, match=r"11[.]0[.] Layers run Triton's kernels") as caught:
        got = [gpu(x) for gpu in layers]
    assert len(caught) == 1
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers[0](x)
    with pytest.raises(UnsupportedError, match=r"11[.]0; only layers"):
        torch.ops.qcut.silu_mul(x, x)


@pytest.mark.usefixtures("likely_tiles")
def test_paths_are_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the Triton back end no CUDA kernel of qcut's runs."""
    from qcut.backends.cuda.launch import plans

    gpu, codebook = layer("w8a8").to(DEVICE), layer("codebook4").to(DEVICE)
    assert isinstance(codebook, codebook_linear.CodebookLinear)
    x = tokens(2).to(DEVICE)
    gpu(x), codebook(x)

    def refuse(*args: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(plans.LaunchPlan, "launch", refuse)
    for path in ("triton", "reference"):
        with qcut.execution_path(path):
            gpu(x), codebook(x)


def test_the_fastest_tile_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_choices", {})
    monkeypatch.setattr(launch, "_kept", lambda *args: None)
    gpu = layer("w8a8", 2048, 1024).to(DEVICE)
    x = tokens(4, 2048).to(DEVICE)
    with qcut.execution_path("triton"):
        want = gpu(x)
        ((key, tile),) = launch._choices.items()
        assert tile in int8.tiles_of(4, True)
        for other in int8.tiles_of(4, True):
            launch._choices[key] = other
            assert_same(gpu(x), want)  # sums of integers are the same in every tile
