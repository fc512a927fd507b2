"""CUTLASS's products of weights that become wider in registers, as text and as binaries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qcut import jit
from qcut.emitters.codebook import cutlass as codebook_cutlass
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.families import CODEBOOK_CUTLASS, W8A16_CUTLASS
from qcut.emitters.gemm.cutlass import compat
from qcut.emitters.gemm.cutlass import w8a16 as w8a16_cutlass
from qcut.emitters.gemm.cutlass.text import LAUNCH_PARAMS
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from tests.support import GOLDEN
from tests.support.sass import instructions

ARCH = "sm_90a"
HALF = GemmProblem(a=DType.F16, epilogue=Epilogue(col_scale="per_channel", bias=True), alignment_k=8)
ROWS = CodebookProblem(DType.S8, epilogue=Epilogue(DType.F16, "per_token", "per_channel", bias=True), row_norm=True)
FAMILIES = {"w8a16": (W8A16_CUTLASS, HALF), "codebook": (CODEBOOK_CUTLASS, ROWS)}


def source(name: str) -> KernelSource:
    kind, problem = FAMILIES[name]
    return kind.emit(problem, kind.menu(problem, ARCH)[-1], ARCH)


@pytest.mark.parametrize("name", FAMILIES)
def test_text_is_the_golden_text(name: str) -> None:
    emitted = source(name)
    path = GOLDEN / f"sm90_{name}_mixed.txt"
    text = f"// {emitted.name}\n{emitted.text}\n// ---- host ----\n{emitted.host_text}"
    assert path.read_text() == text, f"emitted text changed; if that is meant, rewrite {path.name}"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tile_of_a_menu_has_a_text_of_its_own(name: str) -> None:
    kind, problem = FAMILIES[name]
    tiles = {*kind.menu(problem, ARCH), *kind.search_space(problem, ARCH)}
    sources = [kind.emit(problem, tile, ARCH) for tile in tiles]
    assert len({s.name for s in sources}) == len({s.text for s in sources}) == len(tiles)
    assert all(s.params == (*problem.params(), *LAUNCH_PARAMS) and s.waits for s in sources)


def test_tokens_are_the_columns_of_the_kernel() -> None:
    tile = TileConfig((192, 128, 64), cluster_shape=(1, 2), schedule="cooperative")
    text = W8A16_CUTLASS.emit(HALF, tile, ARCH).text
    assert "cute::Shape<cute::_128, cute::_192, cute::_64>" in text
    assert "cute::Shape<cute::_2,cute::_1,cute::_1>" in text
    assert "using StrideD = cute::Stride<cute::Int<1>, int64_t, cute::Int<0>>;" in text


@pytest.mark.parametrize(
    ("problem", "tile", "arch", "reason"),
    [
        ({}, {}, "sm_80", "wgmma"),
        ({"a": DType.S8}, {}, ARCH, "operands"),
        ({"layout_a": "column"}, {}, ARCH, "layouts"),
        ({"alignment_k": 4}, {}, ARCH, "alignment_k"),
        ({"alignment_n": 4}, {}, ARCH, "alignment_n"),
        ({"epilogue": Epilogue(col_scale="per_channel", residual=True)}, {}, ARCH, "epilogue"),
        ({"epilogue": Epilogue(row_scale="per_token")}, {}, ARCH, "epilogue"),
        ({"epilogue": Epilogue(DType.S8, col_scale="per_channel")}, {}, ARCH, "epilogue"),
        ({}, {"schedule": "multistage"}, ARCH, "schedule"),
        ({}, {"schedule": "stream_k"}, ARCH, "schedule"),
        ({}, {"warp_shape": (64, 64, 64)}, ARCH, "schedule"),
        ({}, {"splits": 2}, ARCH, "splits"),
        ({}, {"threadblock_shape": (120, 128, 64)}, ARCH, "threadblock_shape"),
        ({}, {"threadblock_shape": (128, 96, 64)}, ARCH, "threadblock_shape"),
        ({}, {"threadblock_shape": (128, 64, 64)}, ARCH, "cooperative"),
        ({}, {"threadblock_shape": (256, 256, 64)}, ARCH, "registers"),
        ({}, {"threadblock_shape": (128, 128, 32)}, ARCH, "k"),
        ({}, {"cluster_shape": (4, 4)}, ARCH, "cluster_shape"),
        ({}, {"epilogue_tile": (64, 64)}, ARCH, "epilogue_tile"),
    ],
)
def test_illegal_w8a16_kernels_are_refused_by_name(
    problem: dict[str, Any], tile: dict[str, Any], arch: str, reason: str
) -> None:
    legal = w8a16_cutlass.MENU[-1]
    with pytest.raises(EmitError, match=f"^qcut_w8a16_cutlass_.*: {reason}: "):
        W8A16_CUTLASS.emit(replace(HALF, **problem), replace(legal, **tile), arch)


@pytest.mark.parametrize(
    ("problem", "tile", "reason"),
    [
        ({"row_norm": False}, {}, "weights"),
        ({"bits": 3}, {}, "weights"),
        ({"alignment_n": 4}, {}, "alignment_n"),
        ({"epilogue": replace(ROWS.epilogue, residual=True)}, {}, "residual"),
        ({}, {"threadblock_shape": (256, 128, 64)}, "k"),
        ({}, {"threadblock_shape": (256, 64, 128)}, "cooperative"),
    ],
)
def test_illegal_codebook_kernels_are_refused_by_name(
    problem: dict[str, Any], tile: dict[str, Any], reason: str
) -> None:
    legal = codebook_cutlass.MENU[-1]
    with pytest.raises(EmitError, match=f"^qcut_codebook_cutlass_.*: {reason}: "):
        CODEBOOK_CUTLASS.emit(replace(ROWS, **problem), replace(legal, **tile), ARCH)


def test_rows_of_one_norm_are_int8_tokens_with_one_norm_a_unit() -> None:
    for change in ({"slots": 2}, {"x": DType.F16, "epilogue": Epilogue(col_scale="per_channel")}):
        with pytest.raises(EmitError, match="rows of one norm"):
            replace(ROWS, **change)
    assert ROWS.name != replace(ROWS, row_norm=False).name


def test_an_activation_is_a_node_after_the_scales() -> None:
    epilogue = Epilogue(DType.BF16, col_scale="per_channel", activation=Activation.SILU)
    text = W8A16_CUTLASS.emit(replace(HALF, a=DType.BF16, epilogue=epilogue), w8a16_cutlass.MENU[-1], ARCH).text
    assert "qcut::Silu" in text
    assert ", float, false, true, false\n>" in text


def test_text_that_is_not_as_expected_is_refused() -> None:
    with pytest.raises(EmitError, match="0 times"):
        compat.edit_units_text("")


@pytest.mark.parametrize(("name", "wanted"), [("w8a16", "HGMMA.64x256x16.F32"), ("codebook", "IGMMA.64x256x32.S8.S8")])
def test_binary_holds_the_instructions_it_was_written_for(name: str, wanted: str) -> None:
    binary = jit.build(source(name))
    assert binary.host_so is not None
    assert binary.resources is not None
    assert binary.resources.spill_store_bytes == binary.resources.spill_load_bytes == binary.resources.stack_bytes == 0
    found = instructions(binary.cubin)
    for prefix in (wanted, "UTMALDG", "UTMASTG", "PRMT", "ACQBULK"):
        assert any(op.startswith(prefix) for op in found), f"{prefix} not among {sorted(found)}"
    # Contraction is off: a fused multiply-add would round once where the reference rounds twice.
    assert not any(op.startswith(("LDL", "STL", "FFMA")) for op in found)
