"""Operators of int8 on the CPU: agreement with the references, fakes and compilation."""

from __future__ import annotations

import json

import pytest
import torch

from qcut.numerics import float8, int16
from qcut.numerics import int8 as numerics
from qcut.ops.gemm import OUT_DTYPES
from qcut.ops.registry import import_modules
from tests.support import GOLDEN
from tests.support.operands import case
from tests.support.oracles import FLOATS, NAN, layer, layer_fp8, s8, tokens

qcut = torch.ops.qcut
NAMES = (
    "quantize_per_token",
    "quantize_per_tensor",
    "dequantize",
    "colsum",
    "gemm_s8",
    "w8a8_linear",
    "w8a8_static_linear",
    "w8a16_linear",
    "fp8_dynamic_linear",
    "fp8_static_linear",
    "int16x8_linear",
    "int16x8_static_linear",
    "integer_linear",
)
SCHEMAS = json.loads((GOLDEN / "operator_schemas.json").read_text())
"""Of every operator: saved graphs and callers in other languages rely on them, character by character."""
S8, S32, F32 = torch.int8, torch.int32, torch.float32


def samples() -> dict[str, list[tuple[tuple, dict]]]:
    """Valid calls of every operator: (args, kwargs)."""
    w, f8 = layer(), layer_fp8()
    a, b = s8(5, 32), s8(7, 32)
    every = {
        "zero_point": torch.arange(-3, 2, dtype=S32),
        "colsum": b.sum(1, dtype=S32),
        "row_scale": torch.rand(5),
        "col_scale": torch.rand(7) * 1e-4,
        "bias": torch.randn(7),
    }
    residual = {"activation": "silu", "residual": tokens(5, 7, dtype=torch.bfloat16), "out_dtype": torch.bfloat16}
    requantize = {"activation": "relu", "out_dtype": S8, "out_inv_scale": 3.0, "out_zero_point": -4}
    batch, none = tokens(2, 3, 21), tokens(0, 21)
    return {
        "quantize_per_token": [((batch, 32), {}), ((none, 21), {}), ((tokens(21), 21), {})],
        "quantize_per_tensor": [((batch, 0.1, -3, 32), {}), ((none, 0.1, 127, 21), {})],
        "dequantize": [((a, torch.rand(5), torch.bfloat16), {}), ((s8(0, 3), torch.rand(0), F32), {})],
        "colsum": [((b,), {}), ((s8(0, 3),), {})],
        "gemm_s8": [
            ((a, b), {}),
            ((a, b), every | residual),
            ((a, b), every | requantize),
            ((s8(0, 32), b), {}),
            ((a, b), {"out_dtype": S32}),
            ((a, b), {"out_dtype": S8, "wrap": True}),
        ],
        "w8a8_linear": [((x, w["qweight"], w["scale"], w["bias"], "relu"), {}) for x in (batch, none)],
        "w8a8_static_linear": [
            ((x, w["qweight"], w["scale"], w["colsum"], w["bias"], 0.05, 7, "none"), {}) for x in (batch, none)
        ],
        "w8a16_linear": [((x, w["qweight"], w["scale"], None, "gelu_tanh"), {}) for x in (batch, none)],
        "fp8_dynamic_linear": [((x, f8["qweight"], f8["scale"], f8["bias"], "silu"), {}) for x in (batch, none)],
        "fp8_static_linear": [((x, f8["qweight"], f8["scale"], None, 0.01, "none"), {}) for x in (batch, none)],
        "int16x8_linear": [((x, w["qweight"], w["scale"], w["bias"], "silu"), {}) for x in (batch, none)],
        "int16x8_static_linear": [((x, w["qweight"], w["scale"], w["bias"], 1e-4, "none"), {}) for x in (batch, none)],
        "integer_linear": [
            ((*case(dtype, m, 7, 21), torch.tensor([5], dtype=S32) if dtype is S8 else None, True), {})
            for dtype in (S8, torch.int16)
            for m in (6, 0)
        ],
    }


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for args, kwargs in samples()[name]:
        # torch compares no tensors of 8-bit floats to find out whether one was written.
        chosen = tests[1:] if name.startswith("fp8") else tests
        torch.library.opcheck(getattr(qcut, name).default, args, kwargs, test_utils=chosen)


# ── values ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", FLOATS)
def test_quantizers_flatten_leading_dimensions(dtype):
    x = tokens(2, 3, 21, dtype=dtype)
    flat = x.reshape(6, 21)
    for got, want in zip(qcut.quantize_per_token(x, 32), numerics.quantize_per_token_ref(flat, 32), strict=True):
        assert torch.equal(got, want)
    want = numerics.quantize_per_tensor_ref(flat, 0.1, -3, 32)
    assert torch.equal(qcut.quantize_per_tensor(x, 0.1, -3, 32), want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 21), (33, 130)])
def test_linears_flatten_leading_dimensions(dtype, n, k):
    w, f8 = layer(n, k), layer_fp8(n, k)
    x = tokens(2, 3, k, dtype=dtype)
    dynamic = (w["qweight"], w["scale"], w["bias"], "relu")
    static = (w["qweight"], w["scale"], w["colsum"], w["bias"], 0.05, 7, "relu")
    for name, module, rest in (
        ("w8a8_linear", numerics, dynamic),
        ("w8a8_static_linear", numerics, static),
        ("w8a16_linear", numerics, dynamic),
        ("fp8_dynamic_linear", float8, (f8["qweight"], f8["scale"], f8["bias"], "relu")),
        ("fp8_static_linear", float8, (f8["qweight"], f8["scale"], f8["bias"], 0.01, "relu")),
        ("int16x8_linear", int16, dynamic),
        ("int16x8_static_linear", int16, (w["qweight"], w["scale"], w["bias"], 1e-4, "relu")),
    ):
        got = getattr(qcut, name)(x, *rest)
        assert (got.dtype, got.shape) == (dtype, (2, 3, n))
        reference = name.removeprefix("fp8_") if module is float8 else name
        want = getattr(module, f"{reference}_ref")(x.reshape(6, k), *rest)
        assert torch.equal(got.reshape(6, n), want), name
        assert getattr(qcut, name)(x[0, 0], *rest).shape == (n,)
        assert getattr(qcut, name)(x[:0], *rest).shape == (0, 3, n)


@pytest.mark.parametrize("name", NAMES)
def test_strides_and_offsets_do_not_matter(name):
    def strided(t):
        if not isinstance(t, torch.Tensor) or t.dim() == 0:
            return t
        wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1] + 3, dtype=t.dtype)
        view = wide[..., 3::2]
        assert not view.is_contiguous() or view.numel() <= 1
        return view.copy_(t)

    op = getattr(qcut, name)
    for args, kwargs in samples()[name]:
        want = as_tuple(op(*args, **kwargs))
        got = as_tuple(op(*map(strided, args), **{key: strided(value) for key, value in kwargs.items()}))
        for g, w in zip(got, want, strict=True):
            assert torch.equal(g, w)
            assert g.is_contiguous()


def test_gemm_defaults_and_epilogue(int8):
    a, b = int8(5, 37), int8(7, 37)
    acc = a.long() @ b.long().t()
    assert torch.equal(qcut.gemm_s8(a, b), acc.to(F32).half())
    for args, options in samples()["gemm_s8"]:
        assert torch.equal(qcut.gemm_s8(*args, **options), numerics.gemm_s8_ref(*args, **options))
    for dtype in OUT_DTYPES:
        assert qcut.gemm_s8(a, b, out_dtype=dtype).dtype is dtype


def test_a_bad_token_makes_its_row_nan():
    w = layer()
    x = tokens(3, 21)
    x[1, 4] = NAN
    for op in (qcut.w8a8_linear, qcut.int16x8_linear):
        y = op(x, w["qweight"], w["scale"], w["bias"], "none")
        assert y.isnan().all(1).tolist() == [False, True, False]


# ── compilation ──────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def test_compile_one_graph_for_every_number_of_tokens():
    w = layer()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def both(x):
        q, scale = qcut.quantize_per_token(x, 32)
        y = qcut.gemm_s8(q, w["qweight"], row_scale=scale, col_scale=w["scale"], bias=w["bias"], out_dtype=x.dtype)
        z = qcut.w8a8_linear(x, w["qweight"], w["scale"], w["bias"], "none")
        return y, z, qcut.w8a8_static_linear(x, w["qweight"], w["scale"], w["colsum"], None, 0.05, 7, "silu") + 1

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend=backend)
    for m in (5, 2, 33):
        x = tokens(m, 21)
        y, z, s = compiled(x)
        assert torch.equal(y, z)
        assert torch.equal(s, both(x)[2])
    assert len(graphs) == 1


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_compile_through_aot(name):
    op = getattr(qcut, name)
    for args, kwargs in samples()[name]:
        torch.compiler.reset()  # all operators share the code that is compiled here
        compiled = torch.compile(lambda *a, kwargs=kwargs: op(*a, **kwargs), fullgraph=True, backend="aot_eager")
        for got, want in zip(as_tuple(compiled(*args)), as_tuple(op(*args, **kwargs)), strict=True):
            assert torch.equal(got, want)


def test_schemas_are_the_committed_ones() -> None:
    import_modules("qcut.ops")
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("qcut::")]
    assert {name: str(torch._C._get_schema(*f"{name}.".split(".")[:2])) for name in names} == SCHEMAS


def test_every_operator_has_cpu_cuda_and_meta_kernels() -> None:
    for name in SCHEMAS:
        for key in ("CPU", "CUDA", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), (name, key)
        operator, _, overload = name.removeprefix("qcut::").partition(".")
        assert torch.Tag.pt2_compliant_tag in getattr(getattr(qcut, operator), overload or "default").tags, name
