"""Kernels that ask the L2 for what the next product reads first: their texts, names, arguments and instructions."""

from __future__ import annotations

import pytest

from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import ARCHITECTURES, architecture
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.stream.codebook import CodebookStreamTile, emit_codebook_stream
from qcut.emitters.stream.w8a8 import W8A8Problem, W8A8Tile, emit_int8_stream
from qcut.emitters.stream.w8a16 import W8A16Tile, emit_w8a16_stream
from tests.support.compiled import build
from tests.support.sass import listing

BY_TOKEN = Epilogue(row_scale="per_token", col_scale="per_channel")
ROWS = W8A8Problem("rows", DType.F16, BY_TOKEN)
HALF = GemmProblem(a=DType.F16, epilogue=Epilogue(col_scale="per_channel"))


def kernels(arch: str, ahead: bool) -> list[KernelSource]:
    """With all registers of a multiprocessor, with one tile of rows, and one of each family."""
    codebook = CodebookProblem(rotates=DType.F16)
    return [
        emit_codebook_stream(codebook, CodebookStreamTile(1, 14, 32, ahead=ahead), arch),
        emit_codebook_stream(CodebookProblem(), CodebookStreamTile(8, 1, 10, ahead=ahead), arch),
        emit_int8_stream(ROWS, W8A8Tile(3, 32, tokens=8, ahead=ahead), arch),
        emit_int8_stream(ROWS, W8A8Tile(1, 10, tokens=1, ahead=ahead), arch),
        emit_w8a16_stream(HALF, W8A16Tile(21, 16, 2, 2, ahead=ahead), arch),
    ]


def test_kernels_ask_where_they_are_told_to() -> None:
    for asking, other in zip(kernels("sm_90a", True), kernels("sm_90a", False), strict=True):
        assert asking.name == f"{other.name}_ahead"
        assert [p.name for p in asking.params[len(other.params) :]] == [
            "ahead",
            "ahead_stride",
            "ahead_bytes",
            "ahead_parts",
        ]
        assert asking.params[: len(other.params)] == other.params
        assert "qcut::Ahead{" in asking.text
        assert "Ahead" not in other.text


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_architectures_without_dependent_launch_are_refused(arch: str) -> None:
    tile = W8A16Tile(1, 4, ahead=True)
    if architecture(arch).pdl:
        assert "qcut::Ahead{" in emit_w8a16_stream(HALF, tile, arch).text
        return
    with pytest.raises(EmitError, match="ahead: is for architectures with bulk copies"):
        emit_w8a16_stream(HALF, tile, arch)


def test_a_cta_asks_in_one_place_and_nothing_spills() -> None:
    sources = kernels("sm_90a", True)
    for source, binary in zip(sources, build(*sources), strict=True):
        assert binary.resources is not None, source.name
        assert binary.resources.stack_bytes == 0, source.name
        found = [name for name in listing(binary.cubin) if name.startswith("UBLKPF")]
        unrolled = 2 if "_p2_" in source.name else 1  # a place for each tile in flight
        assert len(found) == unrolled, source.name
