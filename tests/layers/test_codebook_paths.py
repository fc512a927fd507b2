"""qcut.Linear under codebook schemes, on the CPU: the CPU's path, the kernels' path, rotations that layers share."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import qcut
from qcut import errors
from qcut.layers import codebook as codebook_linear
from qcut.layers import rotations as shared_rotations
from qcut.layers.codebook import CodebookLinear
from qcut.layers.linear import Linear
from qcut.ops.paths import execution_path, path
from tests.layers.test_codebook import INT8, SCHEMES, quantized
from tests.support.oracles import FLOATS

# ── paths ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scheme", [*SCHEMES, *INT8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_both_paths_agree(scheme, dtype, kernels):
    _, layer = quantized(scheme, activation="relu")
    if not layer.int8 and dtype is torch.float32:
        with pytest.raises(
            errors.DtypeError, match=r"layer 'q': x is float32; .* computes in float16, bfloat16 on CUDA"
        ):
            quantized(scheme, name="q")[1](torch.randn(2, 320))
        return
    x = torch.randn(2, 3, 320).to(dtype)
    fused = layer(x)
    with execution_path("reference"):
        explicit = layer(x)
    assert fused.dtype == explicit.dtype == dtype
    assert fused.shape == (2, 3, 77)
    if layer.int8:
        assert torch.equal(fused, explicit)
    else:
        # Tokens, codebook, and the output are rounded to the type, norms to float16; errors of 320 products add up
        # like a random walk.
        bound = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}[dtype]
        assert (fused.float() - explicit.float()).abs().max() <= bound * explicit.abs().max()
    assert layer(x[:, :0]).shape == (2, 0, 77)


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["codebook4", "codebook4+2", "codebook4_int8", "codebook4_g50_qr"])
def test_compiles_to_one_graph(scheme, kernels):
    _, layer = quantized(scheme, activation="silu")
    torch.compiler.reset()
    for name in ("cuda", "reference"):
        with execution_path(name):
            compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
            for m in (3, 8):
                x = torch.randn(2, m, 320).half()
                assert torch.equal(compiled(x), layer(x))


def test_execution_paths():
    message = "back end 'fast' does not exist; allowed: cuda, triton, reference"
    with pytest.raises(errors.ConfigError, match=message), execution_path("fast"):
        pass
    with pytest.raises(ZeroDivisionError), execution_path("reference"):
        raise ZeroDivisionError
    assert path.name == "cuda"
    assert qcut.execution_path is execution_path


# ── shared rotations ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def rotations(kernels, monkeypatch):
    """Rotations that were made, as the numbers of their rows."""
    calls: list[int] = []
    real = shared_rotations._ROTATE

    def counted(x, *rest):
        calls.append(len(x))
        return real(x, *rest)

    monkeypatch.setattr(shared_rotations, "_ROTATE", counted)
    return calls


def layers(*schemes: str) -> list[CodebookLinear]:
    return [quantized(scheme, 16 + i, 64)[1] for i, scheme in enumerate(schemes)]


def test_layers_that_read_one_tensor_share_its_rotation(rotations):
    q, k, v = layers("codebook4", "codebook2", "codebook4")
    x = torch.randn(5, 64).half()
    shared = [layer(x) for layer in (q, k, v)]
    assert rotations == [5]
    assert all(torch.equal(y, layer(x.clone())) for y, layer in zip(shared, (q, k, v), strict=True))
    assert len(rotations) == 4


def test_int8_rows_are_shared_apart_from_blocks(kernels, monkeypatch):
    real, calls = shared_rotations._QUANTIZE, []
    monkeypatch.setattr(shared_rotations, "_QUANTIZE", lambda *call: calls.append(len(call[0])) or real(*call))
    schemes = ("w8a8_rotated", "w8a8_rotated", "codebook4_int8")
    q, k, other = (Linear.from_float(torch.nn.Linear(64, 16), scheme) for scheme in schemes)
    x = torch.randn(2, 3, 64).half()
    shared = [layer(x) for layer in (q, k)]
    assert calls == [6]
    other(x)
    assert torch.equal(q(x), shared[0])
    assert calls == [6, 6]


def test_what_differs_is_not_shared(rotations, monkeypatch):
    a, b = layers("codebook4", "codebook4")
    others = layers("codebook4_seed1", "codebook4_int8", "codebook4_g32", "codebook4_qr", "codebook4+4")
    x = torch.randn(5, 64).half()
    for layer in (a, *others, a):
        layer(x)
    assert len(rotations) == 7
    a(x)  # a layer's second call: something outside of torch may have written to x
    assert len(rotations) == 8
    b(x)
    assert len(rotations) == 8
    x.add_(1)
    want = b(x.clone())
    assert torch.equal(b(x), want)
    x = torch.randn(5, 64).half()
    rotations.clear()
    a(x)
    b(x.view(5, 64))  # another object
    assert len(rotations) == 2
    rotations.clear()
    states = iter([(0, 0), (1, 0), (1, 9), (1, 9)])  # another stream, another capture, the same one
    monkeypatch.setattr(shared_rotations, "stream_state", lambda device: next(states))
    y = torch.randn(5, 64).half()
    for layer in (a, b, a, b):
        layer(y)
    assert len(rotations) == 3


def test_inference_tensors_and_other_devices_are_not_shared(rotations, monkeypatch):
    a, b = layers("codebook4", "codebook4")
    with torch.inference_mode():
        x = torch.randn(5, 64).half()
        a(x), b(x)
    assert len(rotations) == 2
    monkeypatch.setattr(shared_rotations, "stream_state", lambda device: None)
    x = torch.randn(5, 64).half()
    a(x), b(x)
    assert len(rotations) == 4


def test_a_rotation_dies_with_its_tensor(rotations):
    a, b = layers("codebook4", "codebook4")
    x = torch.randn(5, 64).half()
    a(x)
    assert shared_rotations.shared._last is not None
    del x
    gc.collect()
    assert shared_rotations.shared._last is None
    b(torch.randn(5, 64).half())
    assert len(rotations) == 2


def test_layers_that_rotate_alike_share_operands():
    a, b, c = layers("codebook4", "codebook2", "codebook4_qr")
    half, brain, cpu = torch.float16, torch.bfloat16, torch.device("cpu")
    assert a._rotation is b._rotation is pickle.loads(pickle.dumps(copy.deepcopy(a)))._rotation
    assert a._rotation.operands(half, cpu) is b._rotation.operands(brain, cpu)
    assert c._rotation.operands(half, cpu).dtype is half
    assert c._rotation.operands(brain, cpu).dtype is brain


def test_operands_die_with_their_last_layer():
    a, b = layers("codebook4_seed77", "codebook2_seed77")
    operands = weakref.ref(a._rotation.operands(torch.float16, torch.device("cpu")))
    del a
    gc.collect()
    assert operands() is not None
    del b
    gc.collect()
    assert operands() is None


def test_an_execution_path_is_a_threads_own(kernels):
    layer = layers("codebook4")[0]
    x = torch.randn(5, 64)  # which kernels refuse, of a codebook with 16-bit tokens

    def run() -> bool:
        try:
            layer(x)
        except errors.DtypeError:
            return False
        return True

    with execution_path("reference"), ThreadPoolExecutor(1) as other:
        assert run()
        assert not other.submit(run).result()
    assert not run()


def test_layers_report_one_norm_a_row(kernels, monkeypatch):
    said = []

    def product(*args):
        said.append(args[-1])
        return gemm(*args)

    gemm = codebook_linear._GEMM
    monkeypatch.setattr(codebook_linear, "_GEMM", product)
    expected = {
        "codebook4_rows_qr_int8": True,
        "codebook4_g512_qr_int8": True,
        "codebook4_int8": False,
        "codebook3_rows_qr_int8": False,
        "codebook4_rows_qr": False,
    }
    for scheme, one in expected.items():
        _, layer = quantized(scheme)
        layer(torch.randn(3, 320).half())
        assert said.pop() == one, scheme
        assert not said
    _, layer = quantized("codebook4_rows_qr_int8")
    layer.codebook.copy_(torch.arange(16.0) - 8)  # values on midpoints
    layer(torch.randn(3, 320).half())
    assert said == [False]
