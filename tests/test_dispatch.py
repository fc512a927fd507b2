"""Which kernel dispatch picks: the shipped table, the model behind it, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files

import pytest

from emitters.cutlass_gemm import validate
from emitters.epilogue import Epilogue
from emitters.gemm import GemmProblem, TileConfig
from emitters.source import DType
from qcut import dispatch
from qcut._launch_plans import m_bucket
from qcut.dispatch import SM80_MENU, SM90_MENU, Target, model_cycles, select_gemm
from qcut.errors import UnsupportedError

H200 = Target("sm_90a", 132, "NVIDIA H200")
UNTUNED = Target("sm_90a", 132, "NVIDIA H100 PCIe")
A100 = Target("sm_80", 108, "NVIDIA A100-SXM4-80GB")
DYNAMIC = GemmProblem(epilogue=Epilogue(DType.F16, "per_token", "per_channel", bias=True))


def table() -> list[dict]:
    return json.loads((files("qcut") / "data" / "tuned" / "nvidia_h200.json").read_text())["choices"]


def test_every_row_of_the_shipped_table_is_legal_and_found_again():
    rows = table()
    assert len(rows) == 76
    for row in rows:
        problem = replace(DYNAMIC, epilogue=replace(DYNAMIC.epilogue, out=DType(row["out"])))
        tile = dispatch.tile_from_json(row["tile"])
        validate(problem, tile, "sm_90a")
        assert dispatch.tile_to_json(tile) == row["tile"]
        choice = select_gemm(problem, row["m"], row["n"], row["k"], H200)
        assert (choice.reason, choice.tile) == ("tuned", tile)
        assert (choice.swizzle, choice.raster, choice.splits) == (row["swizzle"], row["raster"], row["splits"])


def test_the_table_speaks_for_sizes_near_its_own_and_for_one_gpu():
    def reason(m: int, n: int, k: int, target: Target) -> str:
        return select_gemm(DYNAMIC, m, n, k, target).reason

    assert reason(4096, 14336, 4096, H200) == "tuned"
    assert reason(3584, 14336, 4096, H200) == "tuned"
    assert reason(2048, 14336, 4096, H200) == "model"
    assert reason(4096, 14336, 4112, H200) == "model"
    assert reason(4096, 14336, 4096, UNTUNED) == "model"
    assert reason(1, 1280, 1280, H200) == "tuned"


@pytest.mark.parametrize("menu", [SM80_MENU, SM90_MENU])
def test_menus_are_legal_for_every_output(menu: tuple[TileConfig, ...]):
    for tile in menu:
        for out in (DType.F16, DType.BF16, DType.F32, DType.S8):
            arches = ["sm_90a"] if menu is SM90_MENU else ["sm_80", "sm_86", "sm_89", "sm_100", "sm_120"]
            problem = replace(DYNAMIC, epilogue=replace(DYNAMIC.epilogue, out=out))
            legal = [arch for arch in arches if dispatch._is_legal(problem, tile, arch)]
            # A 256-wide tile of three stages does not fit where a CTA has 99 KB.
            assert legal == arches or tile.threadblock_shape == (128, 256, 64)
    assert any(dispatch._is_legal(DYNAMIC, tile, "sm_89") for tile in SM80_MENU)


def test_the_model_prefers_whole_waves_and_grows_with_the_work():
    wide = TileConfig((256, 160, 128), schedule="cooperative")
    square = TileConfig((128, 128, 128), schedule="pingpong")
    # 128 tiles of 256x160 are one wave of 132 SMs, 320 of 128x128 are three.
    assert model_cycles(wide, 16, 4096, 1280, 5120, H200) < model_cycles(square, 16, 4096, 1280, 5120, H200)
    for tile in (*SM90_MENU, wide, square):
        cycles = [model_cycles(tile, 16, m, 4096, 4096, H200) for m in (64, 512, 4096, 32768)]
        assert cycles == sorted(cycles)
        # Never faster than the products alone.
        assert cycles[-1] > 32768 * 4096 * 4096 / (132 * 4096)


def test_few_rows_get_small_tiles_and_many_rows_large_ones():
    few = select_gemm(DYNAMIC, 16, 4096, 4096, A100).tile.threadblock_shape
    many = select_gemm(DYNAMIC, 8192, 8192, 8192, A100).tile.threadblock_shape
    assert few[0] * few[1] < many[0] * many[1]


@pytest.mark.parametrize(
    ("n", "cutlass", "family", "reason"),
    [
        (1280, True, "cutlass", "tuned"),
        (1281, True, "mma", "rows of D unaligned"),
        (1284, True, "mma", "rows of D unaligned"),
        (1288, True, "cutlass", "model"),
        (1280, False, "mma", "no nvcc or g++"),
    ],
)
def test_family_and_its_reason(n: int, cutlass: bool, family: str, reason: str):
    problem = replace(DYNAMIC, alignment_n=dispatch.alignment_of(n))
    choice = select_gemm(problem, 1024, n, 1280, H200, cutlass=cutlass)
    assert (choice.family, choice.reason) == (family, reason)
    assert dispatch.emit(choice, problem, "sm_90a").name
    line = dispatch.explain(problem, 1024, n, 1280, H200, cutlass=cutlass)
    assert choice.tile.name in line
    assert reason in line


@pytest.mark.parametrize("size", range(1, 70))
def test_alignment_divides(size: int):
    found = dispatch.alignment_of(size)
    assert size % found == 0
    assert found in (1, 2, 4, 8, 16)
    assert found == 16 or size % (2 * found)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((12, 1), "sm_120"),
    ],
)
def test_architectures(capability: tuple[int, int], arch: str):
    assert dispatch.target_for(capability, 100, "GPU").arch == arch


@pytest.mark.parametrize("capability", [(7, 5), (6, 1), (11, 0)])
def test_gpus_without_kernels_are_refused_by_name(capability: tuple[int, int]):
    with pytest.raises(UnsupportedError, match=rf"GPU Old One has compute capability {capability[0]}\.{capability[1]}"):
        dispatch.target_for(capability, 100, "Old One")


def test_buckets_hold_their_rows_and_are_few():
    previous = 0
    for m in range(1, 5000):
        bucket = m_bucket(m)
        assert m <= bucket <= max(16, 2 * m)
        assert bucket >= previous
        assert m_bucket(bucket) == bucket
        if m > 64:
            assert bucket - m < 0.25 * m
        previous = bucket
    assert len({m_bucket(m) for m in range(1, 65537)}) <= 3 + 4 * 11


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_precompile_covers_both_toolchains(arch: str):
    sources = dispatch.precompile_sources(arch)
    assert len({source.name for source in sources}) == len(sources)
    assert {source.toolchain for source in sources} == {"nvrtc", "nvcc"}
    assert {source.arch for source in sources} == {arch}
