"""What all families of kernels keep: names of their own, and the truth about whether they wait."""

from __future__ import annotations

import pytest

from benchmarks.ladder.kernels import NAIVE, emit_ladder_gemm
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.family import Grid
from qcut.emitters.core.source import DType, EmitError, KernelSource, Param
from qcut.emitters.decoder.argmax import ArgmaxRows, emit_argmax
from qcut.emitters.families import (
    ALL_FAMILIES,
    FAMILIES,
    INT8_CUTLASS,
    INT8_DP4A,
    INT8_MMA,
    INT8_WMMA,
    SPELLINGS,
    W8A16_MMA,
    family,
)
from qcut.emitters.gemm.cutlass.tiles import SM80_MENU, SM90_MENU, tile
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.stream.codebook import CodebookStreamTile
from qcut.emitters.stream.codebook_rounds import CodebookRoundsTile
from qcut.emitters.stream.codebook_wgmma import CodebookStreamWgmmaTile
from qcut.emitters.stream.w8a8 import W8A8Problem, W8A8Tile
from qcut.emitters.stream.w8a16 import W8A16Tile
from tests.support.compiled import build
from tests.support.sass import instructions

ARCH = "sm_90a"
SCALED = Epilogue(DType.S8, col_scale="per_channel", bias=True)
INT8 = GemmProblem(epilogue=SCALED)
TOKENS = Epilogue(DType.F16, row_scale="per_token", col_scale="per_channel")
HALF = GemmProblem(a=DType.F16, epilogue=Epilogue(col_scale="per_channel", bias=True))


def raw_kernels() -> list[KernelSource]:
    return [
        INT8_MMA.emit(INT8, INT8_MMA.default_tiles(GemmProblem(), ARCH)[0], ARCH),
        INT8_WMMA.emit(INT8, INT8_WMMA.default_tiles(GemmProblem(), ARCH)[0], ARCH),
        INT8_DP4A.emit(INT8, INT8_DP4A.default_tiles(GemmProblem(), ARCH)[0], ARCH),
        W8A16_MMA.emit(HALF, W8A16_MMA.default_tiles(GemmProblem(DType.F16), ARCH)[0], ARCH),
        emit_argmax(ArgmaxRows(DType.F16, ARCH)),
        emit_ladder_gemm(INT8, NAIVE, ARCH),
    ]


def test_a_kernel_waits_for_its_predecessor_where_its_source_says_so():
    sources = raw_kernels()
    assert [source.waits for source in sources] == [True] * 5 + [False]
    for source, binary in zip(sources, build(*sources), strict=True):
        # ACQBULK is griddepcontrol.wait.
        assert ("ACQBULK" in instructions(binary.cubin)) == source.waits, source.name


def test_cutlass_waits_but_in_multistage_and_stream_k_kernels():
    tiles = (*SM90_MENU, *SM80_MENU, tile("stream_k", "128x64x128"))
    for choice in tiles:
        waits = choice.schedule not in ("multistage", "stream_k")
        source = INT8_CUTLASS.emit(INT8, choice, ARCH)
        assert source.waits == waits == ("CUTLASS_ENABLE_GDC_FOR_SM90" in source.defines), source.name


PROBLEMS: dict[str, object] = {
    "int8_stream": W8A8Problem("rows", DType.F16, TOKENS),
    "codebook_cutlass": CodebookProblem(DType.S8, epilogue=TOKENS, row_norm=True),
}
TILES: dict[str, object] = {
    "int8_cutlass": SM80_MENU[0],
    "int8_stream": W8A8Tile(2, 8),
    "w8a16_stream": W8A16Tile(2, 8),
    "codebook_stream": CodebookStreamTile(8, 1, 10),
    "codebook_stream_rounds": CodebookRoundsTile(8, 1, 8),
    "codebook_stream_wgmma": CodebookStreamWgmmaTile(8, 1, 1, 3, 1),
}
"""Where a menu has none."""


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_a_family_refuses_an_architecture_that_it_does_not_know(name: str) -> None:
    kind = family(name)
    default = CodebookProblem() if name.startswith("codebook") else HALF if name.startswith("w8a16") else INT8
    problem = PROBLEMS.get(name) or default
    chosen = TILES.get(name) or kind.menu(problem, ARCH)[0]
    for act in (kind.emit, kind.validate):
        with pytest.raises(EmitError, match=rf"^qcut_{name}_sm75_\S+: architecture: (allowed are|is) .*sm_90a"):
            act(problem, chosen, "sm_75")
    assert not kind.is_legal(problem, chosen, "sm_75")


@pytest.mark.parametrize("name", ["sm_75", "sm_90", "sm_999", ""])
def test_no_kernel_is_emitted_for_an_unknown_architecture(name: str) -> None:
    with pytest.raises(EmitError, match=f"architecture '{name}' is not one of sm_80"):
        architecture(name)
    with pytest.raises(EmitError, match=f"^qcut_argmax_{name.replace('_', '')}_f16: architecture '{name}' is not"):
        emit_argmax(ArgmaxRows(DType.F16, name))


def test_families_are_found_by_name_and_by_the_command_lines_spelling():
    for spelling, name in SPELLINGS.items():
        assert family(spelling) is family(name)
    assert tuple(SPELLINGS.values()) == FAMILIES
    with pytest.raises(EmitError, match="family 'tpu' does not exist"):
        family("tpu")


def test_a_grid_grows_with_rows_up_to_its_most():
    assert [Grid(64, (3, 1, 1))(m) for m in (1, 64, 65)] == [(3, 1, 1), (3, 1, 1), (6, 1, 1)]
    assert [Grid(64, (4, 1, 1), most=6)(m) for m in (1, 65, 4096)] == [(4, 1, 1), (6, 1, 1), (6, 1, 1)]


def test_a_pointer_without_its_type_is_refused():
    with pytest.raises(EmitError, match="parameter 'x'"):
        Param("x", "ptr")
    with pytest.raises(EmitError, match="parameter 'n'"):
        Param("n", "i32", "float*")
