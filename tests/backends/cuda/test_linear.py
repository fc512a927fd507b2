"""`qcut.backends.cuda.linear`: the kernels of a layer, as a call launches them and as they are built ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qcut.backends.cuda import codebook as codebook_cuda
from qcut.backends.cuda import gemm as gemm_cuda
from qcut.backends.cuda import linear as linear_cuda
from qcut.backends.cuda.launch.plans import LaunchSpec, PlanCache, m_bucket
from qcut.backends.cuda.linear import Int8Layer, LinearLayer, LinearPlan, linear_problem, w8a16_linear
from qcut.dispatch import gemm as dispatch
from qcut.dispatch.gpus import Target
from qcut.emitters.core.family import Grid
from qcut.emitters.core.source import DType
from qcut.errors import DtypeError
from qcut.layers.linear import Linear
from qcut.numerics import float8
from qcut.ops.codebook import QuantizeRotatedOp, W8A8RotatedLinearOp
from qcut.ops.linear import FP8DynamicLinearOp, FP8StaticLinearOp, Int8LinearOp, W8A16LinearOp
from qcut.schemes import parse_scheme
from tests.support.fakes.launches import A100, H200


@pytest.fixture(params=[H200, A100], ids=lambda gpu: gpu.arch)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(linear_cuda, "target", lambda device: request.param)
    monkeypatch.setattr(gemm_cuda, "has_cutlass", lambda: False)  # so that texts are made in no time
    return request.param


def layer(scheme: str, m: int, *, k: int = 640, aligned: bool = True) -> LinearLayer:
    return LinearLayer(scheme, torch.float16, m_bucket(m), 1280, k, True, "none", aligned)


def test_the_class_of_a_layer_describes_its_calls() -> None:
    for scheme in ("w8a8", "w8a8_static", "w8a16", "fp8", "fp8_dynamic", "fp8_static", "int16x8"):
        describe, call = Linear.subclass_for(scheme).cuda_calls, layer(scheme, 63)
        wanted = {"dtype": torch.float16, "rows": 63, "n": 1280, "bias": True, "activation": "none"}
        assert describe(parse_scheme(scheme), k=640, **wanted) == [call]
        assert describe(parse_scheme(scheme), k=636, **wanted) == [call._replace(k=636, aligned=False)]


def test_a_call_of_w8a8_quantizes_and_multiplies(gpu: Target) -> None:
    for scheme in ("w8a8", "w8a8_static"):
        for m in (8, 16, 17, 64, 65, 4096):
            quantize, product = layer(scheme, m, k=4096).sources(0)
            assert quantize.name.startswith("qcut_quantize_per_t")
            problem = linear_problem(DType.F16, 1280, 4096, True, "none", scheme)
            choice = dispatch.select_gemm(problem, max(m_bucket(m), 64), 1280, 4096, gpu, cutlass=False)
            assert (product.name == dispatch.emit(choice, problem, gpu.arch).name) == (m > 16)


def test_rotated_calls_launch_what_is_built_ahead(gpu: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Linear.from_float(torch.nn.Linear(640, 1280), "w8a8_rotated", activation="relu")
    monkeypatch.setattr(codebook_cuda, "target", lambda device: gpu)
    monkeypatch.setattr(codebook_cuda, "current_stream", lambda device: 0)
    launched: list[str] = []

    class Noted(Recorded):
        def __init__(self, spec: LaunchSpec) -> None:
            super().__init__(spec)
            self.name, self.raises_absmax, self.product = spec.source.name, False, self

        def run(self, m: int, args: tuple[int | float, ...], device: int) -> None:
            super().run(m, args, device)
            launched.append(self.name)

        def launch(self, m: int, args: tuple[int | float, ...], stream: int) -> None:
            self.run(m, args, 0)

    monkeypatch.setattr(codebook_cuda, "_rotation_plans", PlanCache(lambda one, _: [Noted(s) for s in one.specs(gpu)]))
    monkeypatch.setattr(linear_cuda, "_int8_plans", PlanCache(lambda one, device: Noted(one.spec(device)[0])))
    operands = made._rotation.operands_for(made.qweight)  # type: ignore[attr-defined]
    monkeypatch.setattr(
        linear_cuda, "_token_plans", PlanCache(lambda one, device: linear_cuda.ProductPlan(Noted(one.spec(gpu))))
    )
    weight = (made.qweight, made.weight_scale, made.bias, "relu")
    x = torch.randn(1, 640).half()
    linear_cuda.w8a8_rotated_linear(W8A8RotatedLinearOp(x, operands, 128, 42, *weight, early_read=True))  # type: ignore[arg-type]
    described = {"dtype": torch.float16, "rows": 1, "n": 1280, "k": 640, "bias": True, "activation": "relu"}
    (ahead,) = type(made).cuda_calls(made.scheme, **described)  # type: ignore[arg-type]
    assert launched == [spec.source.name for spec in ahead.launches(0)]
    assert "_floats_f16_h128_" in launched[0]
    for m in (8, 17, 64, 65, 300):
        launched.clear()
        call = QuantizeRotatedOp(torch.randn(m, 640).half(), operands, 128, 42, early_read=True)
        q, scale = codebook_cuda.quantize_rotated(call)
        last = (made.bias, "relu", torch.float16)
        product = Int8LinearOp(q, scale, made.qweight, made.weight_scale, *last, early_read=True)  # type: ignore[arg-type]
        linear_cuda.int8_linear(product)
        described = {"dtype": torch.float16, "rows": m, "n": 1280, "k": 640, "bias": True, "activation": "relu"}
        (ahead,) = type(made).cuda_calls(made.scheme, **described)  # type: ignore[arg-type]
        assert launched == [spec.source.name for spec in ahead.launches(0)]
        assert launched[0].startswith("qcut_rotate_")
        assert launched[0].endswith("_n_rows")


def test_product_of_one_w8a8_token_quantizes(gpu: Target) -> None:
    for m, k, fused in ((1, 640, True), (1, 16_384, True), (1, 16_400, False), (2, 640, False)):
        names = [source.name for source in layer("w8a8", m, k=k).sources(0)]
        assert (len(names) == 1) == fused, (m, k)
        assert ("_floats_f16_" in names[-1]) == fused
    assert len(layer("w8a8_static", 1).sources(0)) == 2


def test_int16x8_quantizes_halves_and_multiplies_twice_the_rows(gpu: Target) -> None:
    problem = linear_problem(DType.F16, 14336, 4096, True, "none", "int16x8")
    for m in (1, 2, 8, 9, 16, 17, 64, 65, 4096):
        call = layer("int16x8", m, k=4096)._replace(n=14336)
        *quantize, product = call.specs(0)
        if m == 1:
            assert quantize == [None]
            assert "_floats_f16_f16_halves_" in product.source.name
            continue
        assert quantize[0] is not None
        assert quantize[0].source.name.endswith("_halves")
        if m <= 8:
            assert "_given_f16_halves_" in product.source.name
            continue
        choice = dispatch.select_gemm(problem, max(2 * m_bucket(m), 64), 14336, 4096, gpu, cutlass=False)
        assert product.source.name == dispatch.emit(choice, problem, gpu.arch).name
        tile = choice.tile.threadblock_shape  # type: ignore[union-attr]
        splits = getattr(choice.tile, "splits", 1)
        assert product.grid(m) == (-(-problem.epilogue.rows(m) // tile[0]) * -(-14336 // tile[1]) * splits, 1, 1)


def test_w8a16_multiplies_tokens_as_they_are(gpu: Target) -> None:
    for m in (1, 16, 17, 512):
        (product,) = layer("w8a16", m).sources(0)
        problem = linear_problem(DType.F16, 1280, 640, True, "none", "w8a16")
        choice = dispatch.select_w8a16(problem, m_bucket(m), 1280, 640, gpu, nvcc=False)
        assert product.name == dispatch.emit(choice, problem, gpu.arch).name


def test_fp8_quantizes_to_what_the_product_takes(gpu: Target) -> None:
    for scheme, quantizes in (("fp8_dynamic", "per_token"), ("fp8_static", "per_tensor")):
        for m in (1, 32, 33, 512, 4096):
            tokens, quantize, product = layer(scheme, m).typed_specs(0)
            assert quantize is not None
            bytes_of_tokens = gpu is H200 and m > 32
            assert tokens is (DType.E4M3 if bytes_of_tokens else DType.F16)
            assert f"quantize_{quantizes}_" in quantize.source.name
            assert quantize.source.name.endswith("_e4m3" if bytes_of_tokens else "_e4m3f16")
            assert f"_{tokens.value}xe4m3_f16_{'sm_' * (scheme == 'fp8_dynamic')}sn_b_" in product.source.name


class Recorded:
    """A launch plan that records the arguments of its launches."""

    row_multiple, rows_for = 1, staticmethod(lambda m: m)

    def __init__(self, spec: LaunchSpec) -> None:
        self.params, self.calls = spec.source.params, list[dict[str, Any]]()

    def run(self, m: int, args: tuple[int | float, ...], device: int) -> None:
        self.calls.append(dict(zip((param.name for param in self.params), args, strict=True)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_fp8_launches_share_memory_and_scales(gpu: Target, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cuda, "_called", PlanCache())
    n, k, made = 48, 40, list[Recorded]()
    qweight, scale, bias = torch.zeros(n, 48, dtype=torch.int8).view(float8.E4M3), torch.ones(n), torch.ones(n)

    def plan_for(call: LinearLayer, device: int) -> LinearPlan:
        tokens, *specs = call.typed_specs(0)
        made[:] = (Recorded(spec) for spec in specs if spec is not None)
        return LinearPlan(*made, call.n, 48, tokens.bits // 8)  # type: ignore[misc, arg-type]

    monkeypatch.setattr(linear_cuda, "plan_for", plan_for)
    for m in (1, 7, 64):
        x = torch.zeros(m, k, dtype=dtype)
        y = linear_cuda.fp8_dynamic_linear(FP8DynamicLinearOp(x, qweight, scale, bias, "relu"))
        assert (y.shape, y.dtype) == ((m, n), dtype)
        (quantize,), (product,) = (plan.calls for plan in made)
        size = 1 if gpu is H200 and m > 32 else 2
        assert quantize["scale"] == quantize["q"] + m * 48 * size == product["row_scale"]
        assert (quantize["x"], quantize["m"], quantize["k"], quantize["k_padded"]) == (x.data_ptr(), m, k, 48)
        assert (product["a"], product["k"], product["lda"], product["ldb"]) == (quantize["q"], 48, 48, 48)
        assert (product["col_scale"], product["bias"]) == (scale.data_ptr(), bias.data_ptr())

        linear_cuda.fp8_static_linear(FP8StaticLinearOp(x, qweight, scale, None, 0.25, "none"))
        (quantize,), (product,) = (plan.calls for plan in made)
        assert quantize["scale"] == 0.25
        assert (product["a"], product["col_scale"]) == (quantize["q"], scale.data_ptr())
        assert "row_scale" not in product


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.float8_e5m2])
def test_weights_of_other_types_are_refused(dtype: torch.dtype) -> None:
    weight = torch.zeros(8, 64, dtype=dtype)
    with pytest.raises(DtypeError, match=r"qweight is \w+; allowed: int8, float8_e4m3fn"):
        w8a16_linear(W8A16LinearOp(torch.zeros(3, 64).half(), weight, torch.ones(8), None, "none"))


def test_unaligned_tokens_are_read_by_other_kernels(gpu: Target) -> None:
    for scheme in ("w8a8", "w8a8_static", "w8a16", "fp8", "fp8_dynamic", "fp8_static", "int16x8"):
        first, other = layer(scheme, 32).sources(0)[0], layer(scheme, 32, aligned=False).sources(0)[0]
        assert first.name != other.name


def test_launches_are_data_that_cpp_can_repeat(gpu: Target) -> None:
    for scheme in ("w8a8", "w8a8_static", "w8a16", "fp8", "fp8_dynamic", "fp8_static", "int16x8"):
        for m in (1, 64, 4096):
            for spec in layer(scheme, m).specs(0):
                assert spec is None or (isinstance(spec.grid, Grid) and spec.grid.one[2] == 1)


def test_the_kernel_for_few_int8_tokens_notes_magnitudes(gpu: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_cuda, "has_cutlass", lambda: False)
    for m, absmax, notes in ((1, True, True), (8, True, True), (16, True, True), (8, False, False), (33, True, False)):
        spec, noted = Int8Layer(torch.float16, m_bucket(m), 1280, 640, True, "none", absmax).spec(0)
        assert noted == notes
        assert any(p.name == "absmax" for p in spec.source.params) == notes
