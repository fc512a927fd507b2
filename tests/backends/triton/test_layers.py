"""Layers on the Triton back end in Triton's interpreter: the reference's integers, and floats near its."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import qcut
from qcut import errors
from qcut.backends.triton import codebook, int8
from qcut.backends.triton import launch as triton
from qcut.ops import paths, registry

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def quantized(scheme: str, n: int, k: int, **options) -> qcut.Linear:
    """A layer with a zero row and an outlier in its weights."""
    linear = nn.Linear(k, n)
    with torch.no_grad():
        linear.weight[0] = 0
        linear.weight[n // 2, k // 2] = 9.0
    static_range = qcut.StaticRange(-3.0, 3.5) if scheme.endswith("_static") else None
    return qcut.Linear.from_float(linear, scheme, static_range=static_range, **options)


def both(layer: qcut.Linear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad(), qcut.execution_path("triton"):
        kernels = layer(x)
    with torch.no_grad(), qcut.execution_path("reference"):
        return kernels, layer(x)


@pytest.mark.parametrize(
    ("scheme", "dtype", "m", "n", "k"),
    [
        ("w8a8", HALF, 5, 40, 100),
        ("w8a8", SINGLE, 1, 33, 21),
        ("w8a8", HALF, 70, 24, 48),
        ("w8a8_static", HALF, 3, 40, 100),
        ("w8a8_static", SINGLE, 2, 16, 64),
        ("int16x8", HALF, 5, 40, 100),
        ("int16x8", SINGLE, 1, 33, 21),
        ("int16x8", HALF, 70, 24, 48),
        ("int16x8_static", HALF, 3, 40, 100),
        ("int16x8_static", SINGLE, 2, 16, 64),
        ("w8a8_rotated", HALF, 5, 40, 256),
        ("w8a8_rotated_g32", SINGLE, 1, 33, 96),
        ("w8a8_rotated_rows", HALF, 70, 24, 16),
        ("w8a8_rotated", HALF, 3, 40, 192),
        ("codebook4_int8", HALF, 3, 40, 256),
        ("codebook4_pairs_int8", HALF, 3, 40, 256),
        ("codebook3_g64_int8", SINGLE, 2, 20, 192),
        ("codebook2_g32_int8", HALF, 9, 20, 96),
        ("codebook4+4_int8", HALF, 2, 20, 128),
        ("codebook4_g64_int8", HALF, 70, 20, 64),
        ("int4_g32_int8", HALF, 2, 70, 160),
        ("int4_g16_int8", HALF, 3, 70, 150),
    ],
)
def test_integers_are_those_of_the_explicit_path(scheme, dtype, m, n, k):
    layer = quantized(scheme, n, k, activation="relu")
    x = torch.randn(m, k).to(dtype)
    x[0, 1] = 40.0
    kernels, reference = both(layer, x)
    assert kernels.dtype is dtype
    assert torch.equal(kernels, reference)


@pytest.mark.parametrize(
    ("scheme", "m", "n", "k"),
    [
        ("w8a16", 3, 40, 100),
        ("w8a16", 70, 20, 40),
        ("codebook4", 2, 40, 256),
        ("codebook4", 70, 20, 128),
        ("codebook4_pairs", 2, 40, 256),
        ("codebook4_g32", 2, 20, 160),
        ("codebook3", 2, 20, 128),
        ("codebook2_g64", 2, 20, 192),
        ("codebook4+4", 2, 20, 128),
        ("codebook4+2", 2, 20, 128),
        ("codebook4_g50_qr", 2, 20, 120),
        ("codebook4", 2, 20, 192),
        ("int4", 2, 20, 128),
        ("int4_g16", 70, 20, 150),
        ("nvfp4", 3, 21, 160),
    ],
)
def test_floats_are_near_those_of_the_explicit_path(scheme, m, n, k):
    """The interpreter has no bfloat16: arrays of numpy stand for tensors."""
    kernels, reference = both(quantized(scheme, n, k), torch.randn(m, k).half())
    # A rounding of each weight, one of the tokens where they are rotated, and one of the result.
    assert (kernels.double() - reference.double()).norm() <= 3 * 2.0**-11 * reference.double().norm()


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(
    ("scheme", "k"), [("w8a8", 200), ("w8a8_static", 130), ("int16x8", 200), ("codebook4_int8", 384)]
)
def test_parts_of_k_add_up(scheme, k, parts, monkeypatch):
    monkeypatch.setattr(int8, "tiles_of", lambda *_: [int8.Tile(16, 32, 64, True, 4, 2, parts)])
    monkeypatch.setattr(codebook, "tiles_of", lambda *_: [codebook.Tile(16, 64, True, 4, 2, parts)])
    kernels, reference = both(quantized(scheme, 40, k, activation="relu"), torch.randn(3, k).half())
    assert torch.equal(kernels, reference)


@pytest.mark.parametrize("activation", ["gelu_erf", "gelu_tanh", "silu"])
def test_activations_are_those_of_the_definition(activation):
    layer = quantized("w8a8", 32, 64, activation=activation)
    kernels, reference = both(layer, 3 * torch.randn(8, 64))
    layer.activation = "none"
    v = both(layer, torch.zeros(1, 64))[0].abs().max() + reference.abs().max()
    assert (kernels - reference).abs().max() <= 8 * 2.0**-23 * v


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_rotated_g32", "int16x8", "int16x8_static"])
def test_special_tokens(scheme):
    layer = quantized(scheme, 24, 64)
    x = torch.randn(4, 64)
    x[0, 3], x[1, 5], x[2] = float("nan"), float("inf"), 0
    kernels, reference = both(layer, x)
    assert torch.equal(kernels.nan_to_num(), reference.nan_to_num())
    assert scheme.endswith("_static") or kernels[:2].isnan().all()


def test_tokens_of_any_strides_and_number():
    layer = quantized("w8a8", 24, 40)
    x = torch.randn(6, 80).half()
    want = both(layer, x[:, :40].contiguous())[0]
    for given in (x[:, :40], x[:, :40].t().contiguous().t()):
        assert torch.equal(both(layer, given)[0], want)
    assert torch.equal(both(layer, x[:, :40].reshape(2, 3, 40))[0].view(6, -1), want)
    assert both(layer, x[:0, :40])[0].shape == (0, 24)


def test_int8_tokens_raise_the_largest_magnitudes():
    layer = quantized("w8a8", 24, 48)
    x = torch.randn(3, 48).half()
    with qcut.execution_path("triton"):
        q, scale = torch.ops.qcut.quantize_per_token(x, 48)
        absmax = torch.zeros(3)
        y = layer.forward_int8(q, scale, HALF, absmax)
        assert torch.equal(y, layer(x))
        assert torch.equal(absmax, y.abs().amax(1).float())
        assert torch.equal(layer.forward_with_absmax(x, x.abs().amax(1).float()), y)


@pytest.mark.parametrize("out", [HALF, torch.int8])
@pytest.mark.parametrize(
    ("kind", "group", "k", "seeds"),
    [
        ("hadamard", 128, 256, [1]),
        ("hadamard", 32, 96, [1, 7]),
        ("hadamard", 256, 256, [3]),
        ("hadamard", 64, 160, [3]),  # a shorter last group, in torch
        ("none", 64, 192, [1]),
        ("none", 32, 100, [1, 2]),
        ("none", 16, 100, [1, 2]),
        ("none", 10, 100, [1]),  # groups with padding, in torch
    ],
)
def test_blocks_of_tokens_are_the_cpus(kind, group, k, seeds, out):
    from qcut.numerics.codebook import tokens

    x = torch.randn(5, k).half()
    arguments = (x, tokens.operands(kind, group, k, seeds, HALF), kind, group, seeds, out)
    want = torch.ops.qcut.rotate_tokens(*arguments)
    with qcut.execution_path("triton"):
        got = torch.ops.qcut.rotate_tokens(*arguments)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("group", [16, 32])
def test_residuals_and_offsets(group):
    from qcut.numerics.codebook import layout, products

    n, k, m = 24, 128, 3
    geometry = layout.Geometry(k, group, "none")
    units = layout.pack_units(torch.randint(0, 16, (n, k), dtype=torch.uint8), 4, geometry)
    norms = layout.pack_norms(torch.rand(n, k // group), torch.ones(n), geometry)
    norms = layout.pack_offsets(norms, torch.randint(-8, 9, (n, k // group)).half(), geometry)
    book = products.pack_book(torch.arange(16.0) - 8, HALF)
    blocks = layout.to_blocks(torch.randn(m, k).half())
    residual = torch.randn(m, n)
    arguments = (blocks, None, m, units, norms, None, torch.rand(n), book, torch.randn(n), 4, "none", residual, SINGLE)
    want = torch.ops.qcut.codebook_gemm(*arguments)
    with qcut.execution_path("triton"):
        got = torch.ops.qcut.codebook_gemm(*arguments)
    assert (got - want).norm() <= 2 * 2.0**-11 * (want - residual).norm()


# ── what chooses ─────────────────────────────────────────────────────────────────────────────────


def test_first_fitting_tile_serves_without_measurements():
    tried = []

    def launch(tile: int) -> None:
        tried.append(tile)
        if tile < 2:
            raise triton.required().runtime.errors.OutOfResources(1 << 20, 1 << 17, "shared memory")

    triton.launch_best("kernel", [0, 1, 2, 3], launch, torch.device("cpu"))
    assert tried == [0, 1, 2]
    with pytest.raises(errors.UnsupportedError, match="no tile of the kernel"):
        triton.launch_best("kernel", [0, 1], launch, torch.device("cpu"))


def test_a_choice_is_kept_for_other_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cpu = torch.device("cpu")
    assert triton._kept("kernel", ["a", "b"], cpu) is None
    triton._keep("kernel", ["a", "b"], cpu, "b")
    assert triton._kept("kernel", ["a", "b"], cpu) == "b"
    assert triton._kept("kernel", ["b", "a"], cpu) is None  # other tiles to choose from
    assert triton._kept("other", ["a", "b"], cpu) is None
    (file,) = (path for path in tmp_path.rglob("tile*") if path.is_file())
    for content in (b"7", b"", b"\xff", b"-1"):
        file.write_bytes(content)
        assert triton._kept("kernel", ["a", "b"], cpu) is None


@pytest.mark.parametrize("m", [1, 2, 3, 64, 65, 4096])
def test_buckets(m):
    assert m <= triton.bucket(m) < 2 * m


def test_compiled_code_takes_the_path(monkeypatch):
    layer = quantized("w8a8", 24, 48)
    x = torch.randn(3, 48)
    with torch.no_grad(), qcut.execution_path("triton"):
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), layer(x))


def test_the_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(triton, "interpreted", lambda: False)
    layers = quantized("w8a8", 24, 48), quantized("codebook4", 24, 128)
    for layer, k in zip(layers, (48, 128), strict=True):
        with pytest.raises(errors.UnsupportedError, match="TRITON_INTERPRET=1"):
            both(layer, torch.randn(1, k).half())


def test_a_missing_triton(monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(triton.importlib, "import_module", missing)
    with pytest.raises(errors.UnsupportedError, match=r"needs triton.*pip install triton"):
        triton.required()


def test_float32_tokens_of_16_bit_products_are_refused():
    for scheme, k in (("w8a16", 48), ("codebook4", 128)):
        with pytest.raises(errors.DtypeError, match="float16, bfloat16"):
            both(quantized(scheme, 24, k), torch.randn(1, k))


def test_paths_are_counted_for_all_threads():
    counts: list[int] = []
    paths.watch(counts.append)
    try:
        with qcut.execution_path("triton"), qcut.execution_path("cuda"), qcut.execution_path("reference"):
            assert paths.path.name == "reference"
        assert [count - counts[0] for count in counts] == [0, 1, 2, 1, 0]
    finally:
        paths._watchers.remove(counts.append)


def test_an_operator_that_nothing_serves_there_is_refused(monkeypatch):
    class Probe(NamedTuple):
        x: torch.Tensor

        def check(self) -> None:
            pass

        def fake(self) -> torch.Tensor:
            return self.x

        cpu = fake

    served: dict[str, Callable[..., Any]] = {}
    library = SimpleNamespace(define=lambda *_, **__: None, impl=lambda name, call, key: served.update({key: call}))
    monkeypatch.setattr(registry, "library", library)
    monkeypatch.setattr(registry, "get_type_hints", lambda *_, **__: {"x": torch.Tensor})
    monkeypatch.setattr(torch.library, "register_fake", lambda *_, **__: None)
    registry.operator("probe", returns="Tensor", layers=True)(Probe)
    x = torch.zeros(1)
    assert served["CPU"](x) is x
    with (
        pytest.raises(errors.UnsupportedError, match="qcut::probe: the back end triton has no kernel for it"),
        qcut.execution_path("triton"),
    ):
        served["CPU"](x)
