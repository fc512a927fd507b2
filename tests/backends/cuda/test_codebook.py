"""`qcut.backends.cuda.codebook`: the kernels of a layer, as its calls look them up and as they are built ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut.backends.cuda import codebook as codebook_cuda
from qcut.backends.cuda.codebook import CodebookLayer, has_kernel
from qcut.dispatch.gpus import Target
from qcut.layers.codebook import CodebookLinear
from qcut.numerics.codebook import tokens as rotated_tokens
from qcut.numerics.codebook.products import pack_book
from qcut.ops.codebook import CodebookGemmOp, CodebookGemvOp, RotateTokensOp
from tests.support.fakes.launches import A100, H200, Launches, note_launches

HALF = torch.float16
LONG = 1 << 18
"""More columns than the warps of one kernel hold."""


def described(layer: CodebookLinear, rows: int) -> CodebookLayer:
    (call,) = type(layer).cuda_calls(
        layer.scheme,
        dtype=HALF,
        rows=rows,
        n=layer.out_features,
        k=layer.in_features,
        bias=layer.bias is not None,
        activation=layer.activation,
    )
    assert isinstance(call, CodebookLayer)
    return call


AHEAD_OF_TIME = (replace(H200, ahead_of_time=True), replace(A100, ahead_of_time=True))


@pytest.fixture(params=[H200, A100, *AHEAD_OF_TIME], ids=lambda gpu: gpu.arch + "-aot" * gpu.ahead_of_time)
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Launches:
    return note_launches(codebook_cuda, request.param, monkeypatch)


def forward(layer: CodebookLinear, x: Tensor) -> None:
    """Call the operators of a layer, those of one token where the layer calls them."""
    seeds, tokens = list(layer.scheme.seeds), torch.int8 if layer.int8 else HALF
    matrices = rotated_tokens.operands(layer.kind, layer.group_size, layer.in_features, seeds, HALF)
    book = list(pack_book(layer.codebook, HALF))
    last = (layer.col_scale, book, layer.bias, layer.set_bits[0], layer.activation, None, HALF)
    if len(x) == 1 and layer._rotates_one:
        call = CodebookGemvOp(x, matrices, layer.group_size, seeds, layer.units, layer.packed_norms, layer.fold, *last)
        y = codebook_cuda.codebook_gemv(call)
    else:
        rotate = RotateTokensOp(x, matrices, layer.kind, layer.group_size, seeds, tokens)
        blocks, scale = codebook_cuda.rotate_tokens(rotate)
        row_scale, fold = (scale, layer.fold) if layer.int8 else (None, None)
        product = CodebookGemmOp(blocks, row_scale, len(x), layer.units, layer.packed_norms, fold, *last)
        y = codebook_cuda.codebook_gemm(product)
    assert y.shape == (len(x), layer.out_features)


@pytest.mark.parametrize("scheme", ["codebook4", "codebook3+3_g64", "codebook4_int8", "codebook2_qr", "int4_g32"])
def test_calls_launch_what_is_built_ahead(scheme: str, launches: Launches) -> None:
    layer = CodebookLinear.from_float(torch.nn.Linear(256, 80), scheme, activation="relu")
    for m in (1, 7, 64, 65, 300):
        forward(layer, torch.randn(m, 256).half())
        assert [launch["kernel"] for launch in launches] == names(described(layer, m), launches.gpu)
        assert {launch["rows"] for launch in launches} == {m}
        launches.clear()
    forward(layer, torch.randn(0, 256).half())
    assert not launches


def test_one_token_with_many_columns_is_rotated_apart(launches: Launches) -> None:
    layer = CodebookLinear.from_float(torch.nn.Linear(LONG, 8), "codebook4")
    assert layer._rotates_one
    forward(layer, torch.randn(1, LONG).half())
    assert len(launches) == 2
    assert [launch["kernel"] for launch in launches] == names(described(layer, 1), launches.gpu)


def names(layer: CodebookLayer, gpu: Target) -> list[str]:
    return [spec.source.name for spec in layer.specs(gpu)]


@pytest.mark.parametrize("gpu", [H200, A100], ids=lambda gpu: gpu.arch)
def test_launches_of_a_layer(gpu: Target) -> None:
    common: dict[str, Any] = {"n": 1280, "dtype": HALF, "bits": 4, "passes": 1, "bias": True, "activation": "none"}
    common |= {"kind": "hadamard", "group_size": 128, "int8": False}

    def layer(rows: int, k: int = 1280, **changes: Any) -> CodebookLayer:
        return CodebookLayer(rows=rows, k=k, **{**common, **changes})

    assert len(names(layer(1), gpu)) == len(names(layer(1, int8=True), gpu)) == 1
    for apart in (layer(2), layer(2, int8=True), layer(1, kind="none"), layer(1, kind="qr"), layer(1, group_size=256)):
        rotation, product = names(apart, gpu)
        assert "rotate" in rotation
        assert "codebook" in product or "cb" in product
    assert len(names(layer(1, kind="qr", int8=True), gpu)) == 3  # dense rotations end as float32
    long = layer(1, LONG)
    assert not has_kernel(long.product._replace(rotates=HALF), gpu)
    assert len(names(long, gpu)) == 2
    assert names(layer(65), gpu) == names(layer(80), gpu) != names(layer(2), gpu)
