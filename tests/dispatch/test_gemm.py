"""Which kernel dispatch picks: the tables, the model behind them, what it refuses, and what it says about it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import qcut
from qcut.dispatch import gemm as dispatch
from qcut.dispatch import tables as tuned
from qcut.dispatch.cost_model import tile_cycles
from qcut.dispatch.gemm import Choice, select_gemm
from qcut.dispatch.gpus import Target, target_for, target_named
from qcut.dispatch.heuristics import best_tile
from qcut.dispatch.tables import Row, Table
from qcut.emitters.core.arch import ARCHITECTURES
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType
from qcut.emitters.families import FP8_MMA, W8A16_WGMMA, family
from qcut.emitters.gemm.cutlass.tiles import SM80_MENU, SM90_MENU
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from qcut.emitters.gemm.w8a16_wgmma import ctas
from qcut.errors import ConfigError, DeviceError, UnsupportedError

H200 = Target("sm_90a", 132, "NVIDIA H200")
UNTUNED = Target("sm_90a", 132)
A100 = Target("sm_80", 108, "NVIDIA A100-SXM4-80GB")
DYNAMIC = GemmProblem(epilogue=Epilogue(DType.F16, "per_token", "per_channel", bias=True))
HALVES = replace(DYNAMIC.epilogue, halves=True)


LAYOUTS = tuple("".join(flags) for flags in itertools.product("tn", repeat=3))


@pytest.fixture(autouse=True)
def _own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path))
    tuned.forget()
    yield
    tuned.forget()


def shipped_rows() -> list[dict]:
    return json.loads((files("qcut.dispatch") / "tuned" / "nvidia_h200.json").read_text())["choices"]


def test_shipped_rows_are_legal_and_cutlass_rows_found():
    rows = shipped_rows()
    assert sum(row["family"] == "int8_cutlass" for row in rows) >= 76
    for row in rows:
        halves = row["out"] == "halves"
        options = {"epilogue": HALVES} if halves else {"out": row["out"]}
        problem = dispatch.problem_of(row["m"], row["n"], row["k"], layouts=row["layouts"], **options)
        sizes = (problem.epilogue.rows(row["m"]), row["n"], row["k"])
        tile = tuned.tile_from_json(row["family"], row["tile"])
        family(row["family"]).validate(problem, tile, "sm_90a")
        assert tuned.tile_to_json(tile) == row["tile"]
        choice = select_gemm(problem, *sizes, H200)
        same = [r for r in rows if all(r[key] == row[key] for key in ("out", "layouts", "m", "n", "k"))]
        fastest = min(same, key=lambda r: r["time_us"])
        if row["family"] == "int8_dp4a" and len(same) == 1:
            choice = select_gemm(problem, *sizes, H200, tensor_cores=False)
        elif row != fastest:
            continue
        assert (choice.family, choice.tile, choice.tuned_us) == (row["family"], tile, row["time_us"])
        assert choice.reason.startswith("tuned")
        assert (choice.swizzle, choice.raster, choice.splits) == (row["swizzle"], row["raster"], row["splits"])


def write_user_rows(target: Target, *rows: Row) -> None:
    path = tuned.user_path(target.name)
    assert path is not None
    tuned.write(path, Table(target.name, rows))


MMA = family("int8_mma").default_tiles(GemmProblem(), "sm_80")[3]
WMMA = family("int8_wmma").default_tiles(GemmProblem(), "sm_80")[0]
SIMT = family("int8_dp4a").default_tiles(GemmProblem(), "sm_80")[0]


def test_fastest_tuned_family_that_can_serve_wins():
    sizes = (256, 1280, 1280)
    rows = [
        Row("int8_cutlass", "f16", "tnt", *sizes, SM80_MENU[0], 9.0),
        Row("int8_mma", "f16", "tnt", *sizes, MMA, 8.0),
        Row("int8_wmma", "f16", "tnt", *sizes, WMMA, 7.0),
        Row("int8_dp4a", "f16", "tnt", *sizes, SIMT, 30.0),
    ]
    write_user_rows(A100, *rows)
    choice = select_gemm(DYNAMIC, *sizes, A100)
    assert choice == Choice("int8_wmma", WMMA, reason="tuned", tuned_us=7.0)
    assert select_gemm(DYNAMIC, *sizes, A100, tensor_cores=False).tile == SIMT
    assert select_gemm(DYNAMIC, *sizes, A100, tensor_cores=False).reason.startswith("tuned")
    write_user_rows(A100, replace(rows[0], time_us=1.0), *rows[1:])
    assert select_gemm(DYNAMIC, *sizes, A100).family == "int8_cutlass"
    assert select_gemm(DYNAMIC, *sizes, A100, cutlass=False).family == "int8_wmma"
    # Float outputs of other types share the rows of f16; int8 and other layouts have none.
    for out, layouts, reason in (("bf16", "tnt", "tuned"), ("s8", "tnt", "model"), ("f16", "ttt", "model")):
        problem = dispatch.problem_of(*sizes, out=out, layouts=layouts)
        assert select_gemm(problem, *sizes, A100).reason.startswith(reason)


def test_int16_tokens_take_rows_of_halves_or_int8():
    halves = replace(DYNAMIC, epilogue=HALVES)
    int8, int16 = (Row("int8_mma", out, "tnt", 256, 1280, 1280, MMA, us) for out, us in (("f16", 8.0), ("halves", 9.0)))
    write_user_rows(A100, int16)
    # 256 int16 tokens are 512 rows of A.
    assert select_gemm(halves, 512, 1280, 1280, A100, cutlass=False).tuned_us == 9.0
    assert select_gemm(halves, 256, 1280, 1280, A100, cutlass=False).reason.startswith("model")
    assert select_gemm(DYNAMIC, 256, 1280, 1280, A100, cutlass=False).reason.startswith("model")
    write_user_rows(A100, int8)
    assert select_gemm(halves, 256, 1280, 1280, A100, cutlass=False).tuned_us == 8.0
    write_user_rows(A100, int8, int16)
    assert select_gemm(halves, 512, 1280, 1280, A100, cutlass=False).tuned_us == 9.0
    assert select_gemm(DYNAMIC, 256, 1280, 1280, A100, cutlass=False).tuned_us == 8.0


def test_dp4a_rows_do_not_exclude_unmeasured_tensor_cores():
    sizes = (256, 1280, 1280)
    write_user_rows(A100, Row("int8_dp4a", "f16", "tnt", *sizes, SIMT, 30.0))
    assert select_gemm(DYNAMIC, *sizes, A100).reason == "model"
    assert select_gemm(DYNAMIC, *sizes, A100).family != "int8_dp4a"
    assert select_gemm(DYNAMIC, *sizes, A100, tensor_cores=False).tuned_us == 30.0


def test_nearest_tuned_m_wins_by_time_per_row():
    write_user_rows(
        A100,
        Row("int8_mma", "f16", "tnt", 256, 1280, 1280, MMA, 10.0),
        Row("int8_mma", "f16", "tnt", 224, 1280, 1280, replace(MMA, stages=3), 9.0),
        Row("int8_wmma", "f16", "tnt", 256, 1280, 1280, WMMA, 9.5),
    )
    # At 200 rows the 224 of mma stand for it: 9.0/224 is more than wmma's 9.5/256.
    assert select_gemm(DYNAMIC, 200, 1280, 1280, A100).family == "int8_wmma"
    write_user_rows(A100, Row("int8_mma", "f16", "tnt", 224, 1280, 1280, MMA, 8.0))
    assert select_gemm(DYNAMIC, 200, 1280, 1280, A100).tuned_us == 8.0
    assert select_gemm(DYNAMIC, 230, 1280, 1280, A100).reason == "model"


def test_table_serves_nearby_sizes_of_one_gpu():
    def reason(m: int, n: int, k: int, target: Target) -> str:
        return select_gemm(DYNAMIC, m, n, k, target).reason

    assert reason(4096, 14336, 4096, H200) == "tuned"
    assert reason(3584, 14336, 4096, H200) == "tuned"
    assert reason(2048, 14336, 4096, H200) == "model"
    assert reason(4096, 14336, 4112, H200) == "model"
    assert reason(4096, 14336, 4096, UNTUNED) == "model"
    assert reason(1, 1280, 1280, H200) == "tuned"


def test_model_prefers_whole_waves_and_grows_with_work():
    wide = TileConfig((256, 160, 128), schedule="cooperative")
    square = TileConfig((128, 128, 128), schedule="pingpong")
    # 128 tiles of 256x160 are one wave of 132 SMs, 320 of 128x128 are three.
    assert tile_cycles(wide, 16, 4096, 1280, 5120, H200) < tile_cycles(square, 16, 4096, 1280, 5120, H200)
    for tile in (*SM90_MENU, wide, square):
        cycles = [tile_cycles(tile, 16, m, 4096, 4096, H200) for m in (64, 512, 4096, 32768)]
        assert cycles == sorted(cycles)
        # Never faster than only the products.
        assert cycles[-1] > 32768 * 4096 * 4096 / (132 * 4096)


def test_tile_size_follows_the_number_of_rows():
    few = select_gemm(DYNAMIC, 16, 4096, 4096, A100).tile.threadblock_shape
    many = select_gemm(DYNAMIC, 8192, 8192, 8192, A100).tile.threadblock_shape
    assert few[0] * few[1] < many[0] * many[1]


@pytest.mark.parametrize(
    ("n", "cutlass", "name", "reason"),
    [
        (1280, True, "int8_cutlass", "tuned"),
        (1281, True, "int8_mma", "model; not cutlass: rows of D unaligned"),
        (1284, True, "int8_mma", "model; not cutlass: rows of D unaligned"),
        (1288, True, "int8_cutlass", "model"),
        (1280, False, "int8_mma", "model; not cutlass: no nvcc or g++"),
    ],
)
def test_family_and_its_reason(n: int, cutlass: bool, name: str, reason: str):
    problem = replace(DYNAMIC, alignment_n=dispatch.alignment_of(n))
    choice = select_gemm(problem, 1024, n, 1280, UNTUNED, cutlass=cutlass) if reason.startswith("model") else None
    choice = choice or select_gemm(problem, 1024, n, 1280, H200, cutlass=cutlass)
    assert (choice.family, choice.reason) == (name, reason)
    source = dispatch.emit(choice, problem, "sm_90a")
    explained = dispatch.explain(problem, 1024, n, 1280, H200, cutlass=cutlass)
    assert explained.kernel == dispatch.emit(explained.choice, problem, "sm_90a").name
    assert source.name.startswith(f"qcut_{name}_sm90a_")
    assert explained.kernel in str(explained)
    assert explained.choice.reason in str(explained)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("out", ["f16", "s8", "s32"])
def test_there_is_a_kernel_for_everything(arch: str, layouts: str, out: str):
    gpu = target_named(arch)
    for sizes in ((1, 1, 1), (1, 4096, 4096), (17, 1283, 100), (64, 64, 65536), (65536, 16, 128), (1024, 1024, 1024)):
        problem = dispatch.problem_of(*sizes, layouts=layouts, out=out)
        for tensor_cores in (True, False):
            choice = select_gemm(problem, *sizes, gpu, tensor_cores=tensor_cores)
            family(choice.family).validate(problem, choice.tile, arch)
            assert tensor_cores or choice.family == "int8_dp4a"
            assert min(dispatch.grid(choice, sizes[1], 132)(sizes[0])) >= 1
            if layouts != "tnt" or out == "s32":
                assert choice.family != "int8_cutlass"
                assert "not cutlass" in choice.reason


def test_large_products_take_tensor_cores():
    for arch in ARCHITECTURES:
        gpu = target_named(arch)
        for layouts in LAYOUTS:
            problem = dispatch.problem_of(4096, 4096, 4096, layouts=layouts)
            choice = select_gemm(problem, 4096, 4096, 4096, gpu)
            assert choice.family == ("int8_cutlass" if layouts == "tnt" else "int8_mma")


def test_few_rows_of_long_k_split_into_clusters():
    problem = dispatch.problem_of(16, 1024, 16384, layouts="tnn")
    assert select_gemm(problem, 16, 1024, 16384, UNTUNED).tile.splits > 1
    assert select_gemm(problem, 16, 1024, 16384, A100).tile.splits == 1
    assert select_gemm(problem, 4096, 4096, 4096, UNTUNED).tile.splits == 1


def test_the_raw_families_need_no_alignment():
    problem = replace(dispatch.problem_of(64, 1280, 1296), alignment_k=1)
    choice = select_gemm(problem, 64, 1280, 1296, H200)
    assert choice.family != "int8_cutlass"
    assert choice.reason == "model; not cutlass: rows of A and B unaligned"


@pytest.mark.parametrize("gpu", [H200, A100], ids=lambda gpu: gpu.arch)
def test_w8a16_kernels_by_tokens(gpu: Target):
    problem = GemmProblem(a=DType.F16, epilogue=Epilogue(DType.F16, "none", "per_channel", bias=True), alignment_k=8)
    for m in (1, 8, 16, 32, 33, 64, 4096):
        for n, k in ((1, 1), (1280, 1280), (14336, 4096), (4096, 14336)):
            choice = dispatch.select_w8a16(problem, m, n, k, gpu)
            many = "w8a16_wgmma" if gpu.arch == "sm_90a" else "w8a16_mma"
            if gpu.arch == "sm_90a" and m == 4096 and n > 1:
                many = "w8a16_cutlass"
            assert choice.family == ("w8a16_stream" if m <= 32 else many)
            assert dispatch.emit(choice, problem, gpu.arch).arch == gpu.arch  # which validates the tile
            if choice.family == "w8a16_wgmma":
                assert choice.tile in W8A16_WGMMA.menu(problem, gpu.arch)
            if choice.family in ("w8a16_wgmma", "w8a16_cutlass"):
                continue
            grid = dispatch.grid(choice, n, gpu.sm_count)
            x, y, z = grid(m)
            assert (y, z) == (1, 1)
            if m <= 32:
                assert grid.rows >= m
                assert x // choice.tile.splits * 16 * choice.tile.row_tiles >= n
            else:
                assert x * grid.rows * choice.tile.threadblock_shape[1] >= m * n


def test_cutlass_serves_prompts_of_w8a16_where_it_can():
    problem = GemmProblem(a=DType.F16, epilogue=Epilogue(DType.F16, "none", "per_channel", bias=True), alignment_k=8)

    def chosen(problem: GemmProblem, m: int, k: int = 4096, gpu: Target = H200, cutlass: bool = True) -> str:
        choice = dispatch.select_w8a16(problem, m, 4096, k, gpu, nvcc=cutlass)
        assert family(choice.family).is_legal(problem, choice.tile, gpu.arch)
        return choice.family

    for m in (512, 1024, 4096, 65_536):
        assert chosen(problem, m) == "w8a16_cutlass"
        assert chosen(replace(problem, a=DType.BF16), m) == "w8a16_cutlass"
        assert chosen(replace(problem, b=DType.E4M3), m) == "w8a16_cutlass"
    others = [
        chosen(problem, 32),
        chosen(problem, 256),
        chosen(problem, 4096, cutlass=False),
        chosen(problem, 4096, gpu=A100),
        chosen(problem, 4096, k=4088),
        chosen(replace(problem, alignment_k=1), 4096),
        chosen(replace(problem, alignment_n=4), 4096),
        chosen(replace(problem, b=DType.E4M3, epilogue=Epilogue(DType.F16, col_scale="per_unit")), 4096),
    ]
    assert "w8a16_cutlass" not in others


def test_a_tuned_row_of_w8a16_decides(tmp_path: Path):
    problem = GemmProblem(a=DType.F16, epilogue=Epilogue(DType.F16, "none", "per_channel", bias=True), alignment_k=8)
    tile = family("w8a16_cutlass").menu(problem, "sm_90a")[0]
    path = tuned.user_path("NVIDIA H200")
    rows = (
        Row("w8a16_cutlass", "f16", "tnt", 4096, 4096, 4096, tile, 200.0, 4, 2),
        Row("int8_mma", "f16", "tnt", 4096, 4096, 4096, family("int8_mma").menu(DYNAMIC, "sm_90a")[0], 1.0),
    )
    tuned.write(path, Table("NVIDIA H200", rows))
    tuned.forget()
    choice = dispatch.select_w8a16(problem, 4096, 4096, 4096, H200)
    assert choice == Choice("w8a16_cutlass", tile, 4, 2, reason="tuned", tuned_us=200.0)
    assert dispatch.select_w8a16(problem, 4096, 4096, 4096, H200, nvcc=False).family == "w8a16_mma"
    assert select_gemm(DYNAMIC, 4096, 4096, 4096, H200).family != "w8a16_cutlass"


def test_w8a16_products_without_wgmma_keep_their_families():
    problem = GemmProblem(a=DType.F16, epilogue=Epilogue(DType.F16, "none", "per_channel", bias=True), alignment_k=8)
    assert dispatch.select_w8a16(problem, 256, 4096, 4096, H200).family == "w8a16_wgmma"
    assert dispatch.select_w8a16(problem, 256, 4096, 4096, H200, nvcc=False).family == "w8a16_mma"
    assert dispatch.select_w8a16(replace(problem, alignment_k=1), 256, 4096, 4095, H200).family == "w8a16_mma"


def test_w8a16_splits_k_within_one_wave():
    for m in (33, 64, 65, 128, 200, 512, 1024, 4096):
        for n, k in ((16, 16), (1280, 1280), (5120, 1280), (1280, 5120), (333, 1008), (14336, 4096), (4096, 14336)):
            tile = best_tile(W8A16_WGMMA, GemmProblem(DType.F16), m, n, k, H200)
            units = -(-k // 128)
            assert (tile.splits - 1) * -(-units // tile.splits) < units
            assert tile.splits == 1 or ctas(tile, m, n) <= 132 * tile.ctas


# ── explain ──────────────────────────────────────────────────────────────────────────────────────


def test_explain_names_kernel_reason_model_and_table(monkeypatch: pytest.MonkeyPatch):
    text = str(qcut.explain(4096, 4096, 4096, gpu="NVIDIA H200"))
    assert text.startswith("4096x4096x4096 on NVIDIA H200 (132 SMs): qcut_int8_cutlass_sm90a_s8xs8_f16_zm_sm_sn_b_")
    assert "_128x128x128_pingpong" in text.splitlines()[0]
    assert "Why: tuned. Its row says 105.85 us." in text
    assert "Others by the model: int8_mma " in text
    assert "shipped nvidia_h200.json: " in text
    text = str(qcut.explain(4096, 4096, 4096, gpu="sm_80", layouts="nnn", out="s32"))
    assert "its kernels take layouts tnt, these are nnn" in text
    assert "Tables: none for this GPU, nor for a similar one." in text
    simt = qcut.explain(64, 64, 64, gpu="sm_80", tensor_cores=False)
    assert simt.choice.family == "int8_dp4a"
    assert simt.others == ()
    for tokens, gpu, kernel, model in (
        ("f16", "NVIDIA H200", "qcut_w8a16_cutlass_sm90a_f16xs8_f16_sn_b_k8n16_", " CTAs an SM"),
        ("bf16", "sm_80", "qcut_w8a16_mma_sm80_bf16xs8_f16_sn_b_k8n16_", "none."),
    ):
        monkeypatch.setattr("qcut.jit.is_toolchain_available", lambda name: True)
        text = str(qcut.explain(4096, 4096, 4096, tokens=tokens, gpu=gpu))
        assert f": {kernel}" in text
        assert model in next(line for line in text.splitlines() if line.startswith("Model: "))
    fused = Epilogue(DType.F32, bias=True)
    assert "_f32_b_" in qcut.explain(64, 64, 64, gpu="sm_80", epilogue=fused).kernel


def test_explain_names_the_kernel_of_few_tokens():
    few = qcut.explain(4, 4096, 4096, gpu="NVIDIA H200")
    assert few.kernel.startswith("qcut_int8_stream_sm90a_none_f16_zm_sm_sn_b_m4_")
    assert (few.choice.family, few.choice.reason, few.others) == ("int8_stream", "few tokens", ())
    assert "Why: few tokens.\nModel: " in str(few)
    assert 16.8 / 4.48 < few.estimate.time_us < 8
    assert qcut.explain(4, 4096, 4096, gpu="NVIDIA H200", tensor_cores=False).choice.family == "int8_dp4a"
    assert qcut.explain(4, 4096, 4096, gpu="NVIDIA H200", out="s32").choice.family != "int8_stream"
    assert qcut.explain(512, 4096, 4096, gpu="NVIDIA H200").choice.family == "int8_cutlass"


def test_explain_says_whose_table_is_a_start():
    text = str(qcut.explain(4096, 4096, 4096, gpu="NVIDIA H100 80GB HBM3"))
    assert "Why: tuned for NVIDIA H200, used as a start for NVIDIA H100 80GB HBM3." in text
    assert "Its row says" not in text  # a time of another GPU
    assert "3,350 GB/s" in text
    h200, h100 = (qcut.explain(4096, 4096, 4096, gpu=name) for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
    assert h100.choice.tile == h200.choice.tile
    text = str(qcut.explain(4096, 4096, 4096, gpu="NVIDIA H100 PCIe"))
    assert "Why: model." in text
    assert "none for this GPU, nor for a similar one" in text


def test_explain_says_which_table_it_ignores_and_why():
    path = tuned.user_path("NVIDIA H200")
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert f"ignored {path}: not readable as JSON" in str(qcut.explain(64, 64, 64, gpu="NVIDIA H200"))


def test_explain_refuses_what_does_not_exist():
    with pytest.raises(ConfigError, match="layouts 'tn' do not exist"):
        qcut.explain(1, 1, 1, layouts="tn", gpu="sm_80")
    with pytest.raises(ConfigError, match="output 'f64'"):
        qcut.explain(1, 1, 1, out="f64", gpu="sm_80")
    with pytest.raises(ConfigError, match="tokens 'f8' do not exist"):
        qcut.explain(1, 1, 1, tokens="f8", gpu="sm_80")
    with pytest.raises(ConfigError, match="layouts 'nnn' with tokens of f16; allowed: tnt"):
        qcut.explain(1, 1, 1, tokens="f16", layouts="nnn", gpu="sm_80")
    with pytest.raises(ConfigError, match="at least 1"):
        qcut.explain(1, 0, 1, gpu="sm_80")
    with pytest.raises(UnsupportedError, match=r"GPU .GeForce 256. is not known.*sm_80.*NVIDIA H200"):
        qcut.explain(1, 1, 1, gpu="GeForce 256")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="gpu='NVIDIA H200'"):
            qcut.explain(1, 1, 1)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_problems_of_sizes_know_their_alignment(layouts: str):
    problem = dispatch.problem_of(16, 32, 64, layouts=layouts)
    assert problem.layouts == layouts
    assert (problem.alignment_k, problem.alignment_n) == (16, 16)
    odd = dispatch.problem_of(17, 33, 72, layouts=layouts)
    assert odd.alignment_k == (8 if layouts.startswith("tn") else 1)
    assert odd.alignment_n == 1


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
    assert target_for(capability, 100, "GPU").arch == arch


@pytest.mark.parametrize("capability", [(7, 5), (6, 1), (11, 0)])
def test_gpus_without_kernels_are_refused_by_name(capability: tuple[int, int]):
    with pytest.raises(UnsupportedError, match=rf"GPU Old One has compute capability {capability[0]}\.{capability[1]}"):
        target_for(capability, 100, "Old One")


# ── e4m3 tokens ──────────────────────────────────────────────────────────────────────────────────

FLOAT8 = GemmProblem(DType.E4M3, DType.E4M3, Epilogue(DType.BF16, "per_token", "per_channel"))


def test_few_e4m3_tokens_are_multiplied_as_float16():
    for gpu in (H200, A100, target_named("NVIDIA L40S")):
        for m in (1, 8, 16):
            problem, choice = dispatch.select_fp8(FLOAT8, m, 4096, 4096, gpu, nvcc=m < 16)
            assert (problem, choice.family) == (replace(FLOAT8, a=DType.F16, alignment_k=8), "w8a16_stream")
            assert dispatch.emit(choice, problem, gpu.arch).params == problem.params()


def test_many_e4m3_tokens_are_multiplied_as_bytes():
    assert dispatch.select_fp8(FLOAT8, 32, 4096, 4096, H200)[1].family == "fp8_cutlass"
    assert dispatch.select_fp8(FLOAT8, 32, 4096, 4096, H200, nvcc=False)[1].family == "w8a16_stream"
    for m in (128, 512, 4096):
        assert dispatch.select_fp8(FLOAT8, m, 4096, 4096, H200)[1].family == "fp8_cutlass"
        assert dispatch.select_fp8(FLOAT8, m, 4096, 4096, H200, nvcc=False)[1].family == "fp8_mma"
        for name in ("NVIDIA L40S", "NVIDIA GeForce RTX 5090"):
            gpu = target_named(name)
            problem, choice = dispatch.select_fp8(FLOAT8, m, 4096, 4096, gpu)
            assert (problem, choice.family) == (FLOAT8, "fp8_mma")
            assert FP8_MMA.is_legal(problem, choice.tile, gpu.arch)
        for gpu in (A100, target_named("NVIDIA B200")):
            problem, choice = dispatch.select_fp8(FLOAT8, m, 4096, 4096, gpu)
            assert (problem.a, choice.family) == (DType.F16, "w8a16_mma")


def test_e4m3_products_of_odd_widths_leave_cutlass():
    odd = replace(FLOAT8, alignment_n=1)
    assert dispatch.select_fp8(odd, 512, 4095, 4096, H200)[1].family == "w8a16_wgmma"
    assert dispatch.select_fp8(odd, 512, 4095, 4096, H200, nvcc=False)[1].family == "fp8_mma"
