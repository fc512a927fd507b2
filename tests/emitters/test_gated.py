"""Products of few tokens that multiply gate and up: text, tiles, binaries, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qcut.cuda.linear import linear_problem
from qcut.dispatch import codebook
from qcut.dispatch.gemm import select_gated_w8a16, select_w8a16
from qcut.dispatch.gpus import Target
from qcut.dispatch.tiles.stream import few_tokens
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.families import CODEBOOK_STREAM, INT8_STREAM, W8A16_STREAM
from qcut.emitters.stream.codebook import CodebookStreamTile
from tests.support.compiled import build
from tests.support.launches import A100, H200

F16, S8 = DType.F16, DType.S8
LLAMA, SMALL = (28672, 4096), (2 * 1376, 512)
"""Rows of gate and up, and columns."""


def of_codebook(m: int, *, x: DType = F16, bias: bool = False, gated: bool = False) -> Any:
    common = {"bits": 4, "slots": 1, "out": F16, "bias": bias, "activation": "none", "residual": False}
    return codebook.problem_of(x, **common, alignment_n=16, rotates=F16 if m == 1 else None, gated=gated)


def gated(problem: Any) -> Any:
    return replace(problem, epilogue=replace(problem.epilogue, gated=True))


def chosen(m: int, n: int, k: int, gpu: Target) -> list[tuple[Any, Any, KernelSource]]:
    """Of each family: the plain product's tile, the gated product's, and its text."""
    found = []
    for x in (F16, S8):
        plain, problem = of_codebook(m, x=x), of_codebook(m, x=x, gated=True)
        one = codebook.select(problem, m, n, k // 128, gpu)
        text = codebook.emit(one, problem, gpu.arch)
        found.append((codebook.select(plain, m, n, k // 128, gpu).tile, one.tile, text))
    layer = linear_problem(F16, n, k, True, "none", "w8a8")
    plain, few = (few_tokens(layer, m, n, k, gpu, "given", absmax=True, gated=gated) for gated in (False, True))
    assert plain is not None
    assert few is not None
    found.append((plain.tile, few.tile, INT8_STREAM.emit(few.problem, few.tile, gpu.arch)))
    layer = linear_problem(F16, n, k, True, "none", "w8a16")
    choice = select_gated_w8a16(gated(layer), m, n, k, gpu, nvcc=False)
    text = W8A16_STREAM.emit(gated(layer), choice.tile, gpu.arch)
    return [*found, (select_w8a16(layer, m, n, k, gpu, nvcc=False).tile, choice.tile, text)]


def test_text_instantiates_the_header() -> None:
    text = CODEBOOK_STREAM.emit(of_codebook(1, bias=True, gated=True), CodebookStreamTile(1, 2, 4), "sm_90a")
    assert text.name == "qcut_codebook_stream_sm90a_f16hxc4s1_f16_sn_b_gated_n16_t1_r2_w4_u1_k1_p1"
    assert "using Epilogue = qcut::Gated<qcut::Epilogue<__half, " in text.text
    plain = CODEBOOK_STREAM.emit(of_codebook(1, bias=True), CodebookStreamTile(1, 2, 4), "sm_90a")
    assert text.params == plain.params


@pytest.mark.parametrize("gpu", [H200, A100], ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("m", [1, 8])
def test_tiles_are_the_plain_products_in_pairs_of_row_tiles(m: int, gpu: Target) -> None:
    """Sums of floats are then those of the plain product, bit by bit."""
    for size in (LLAMA, SMALL):
        for plain, tile, _ in chosen(m, *size, gpu):
            assert tile == replace(plain, row_tiles=plain.row_tiles + plain.row_tiles % 2)


@pytest.mark.parametrize("gpu", [H200, A100], ids=lambda gpu: gpu.arch)
def test_compiles_without_spills(gpu: Target) -> None:
    sources = list(dict.fromkeys(source for m in (1, 8) for _, _, source in chosen(m, *LLAMA, gpu)))
    for source, binary in zip(sources, build(*sources), strict=True):
        resources = binary.resources
        assert resources is not None
        assert resources.stack_bytes == resources.spill_store_bytes == resources.spill_load_bytes == 0, source.name
        assert resources.registers * source.block <= 65_536, source.name


@pytest.mark.parametrize(
    ("n", "k", "gpu"),
    [(2 * 1384, 512, H200), (*SMALL, replace(H200, closed=True)), (8192, 1 << 17, H200)],
    ids=["half_tiles", "closed", "clusters"],
)
def test_other_products_have_no_kernel(n: int, k: int, gpu: Target) -> None:
    with pytest.raises(EmitError, match="no kernel multiplies gate and up"):
        codebook.select(of_codebook(8, gated=True), 8, n, k // 128, gpu)
    if k < 1 << 17:
        assert few_tokens(linear_problem(F16, n, k, True, "none", "w8a8"), 8, n, k, gpu, "given", gated=True) is None
        with pytest.raises(EmitError, match="no kernel multiplies gate and up"):
            select_gated_w8a16(gated(linear_problem(F16, n, k, True, "none", "w8a16")), 8, n, k, gpu, nvcc=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": Activation.SILU},
        {"residual": True},
        {"zero_point": "per_token"},
        {"halves": True},
        {"out": DType.S8},
        {"out": DType.S32},
    ],
    ids=str,
)
def test_what_an_epilogue_with_a_gate_does_not_fuse(changes: dict[str, Any]) -> None:
    with pytest.raises(EmitError, match=r"epilogue: gated \([a-z0-9_]*\) fuses scales and bias alone"):
        replace(Epilogue(col_scale="per_channel", gated=True), **changes)
