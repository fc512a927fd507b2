"""Which kernels dispatch picks for rotated tokens and codebook weights, on every architecture and at any size."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from qcut.dispatch import codebook as codebook_dispatch
from qcut.dispatch.buckets import m_bucket
from qcut.dispatch.codebook import DECODE_TOKENS, FEW_TOKENS, problem_of, select, select_rotation
from qcut.dispatch.gpus import GPUS, Target
from qcut.dispatch.heuristics.tiled import CUTLASS_TOKENS
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.codebook.rotate import RotateTokens, padded_columns
from qcut.emitters.codebook.rotate_dense import RotateTokensDense
from qcut.emitters.core.source import DType
from qcut.emitters.families import family
from qcut.numerics.codebook.layout import UNIT_COLUMNS, Geometry

H200 = Target("sm_90a", 132, "NVIDIA H200")
A100 = Target("sm_80", 108, "NVIDIA A100-SXM4-80GB")
TARGETS = (H200, A100, Target("sm_86", 82), Target("sm_89", 128), Target("sm_100", 148), Target("sm_120", 48))
TOKENS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 129, 1000, 4096)
LAYERS = ((256, 384, True, "gelu_tanh"), (512, 256, False, "none"))


def problem(x: DType, bits: int = 4, slots: int = 1, alignment_n: int = 16, out: DType = DType.F16) -> CodebookProblem:
    return problem_of(x, bits, slots, out, True, "none", False, alignment_n)


def sizes() -> list[tuple[int, int]]:
    """N and units of K: small, ragged, long, and those of models."""
    rng = random.Random(0)
    drawn = [(rng.randint(1, 20_000), rng.randint(1, 300)) for _ in range(12)]
    small, models = [(1, 1), (15, 2), (17, 1)], [(50_257, 10), (1280, 10), (4096, 32), (14336, 32), (4096, 112)]
    return [*small, *models, (64, 1023), (64, 4000), *drawn]


# ── buckets ──────────────────────────────────────────────────────────────────────────────────────


def test_buckets_hold_their_tokens_and_are_few():
    previous = 0
    for m in range(1, 5000):
        size = m_bucket(m)
        assert m <= size <= max(8, 2 * m)
        assert size >= previous
        assert m_bucket(size) == size
        if m > 64:
            assert size - m < 0.25 * m
        previous = size
    assert len({m_bucket(m) for m in range(1, 65537)}) <= 5 + 4 * 11


def test_buckets_end_where_families_do():
    assert m_bucket(1) == 1
    assert m_bucket(FEW_TOKENS) == FEW_TOKENS
    assert m_bucket(DECODE_TOKENS) == DECODE_TOKENS


# ── products ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
@pytest.mark.parametrize("pairs", [False, True], ids=["values", "pairs"])
@pytest.mark.parametrize("x", [DType.F16, DType.S8], ids=lambda x: x.value)
def test_every_choice_is_legal_and_covers_the_product(target: Target, x: DType, pairs: bool):
    for (n, units), m in itertools.product(sizes(), TOKENS):
        alignment = next(a for a in (16, 8, 4, 2, 1) if n % a == 0)
        asked = replace(problem(x, alignment_n=alignment), pairs=pairs)
        m = m_bucket(m)
        choice = select(asked, m, n, units, target)
        source = codebook_dispatch.emit(choice, asked, target.arch)  # which validates the tile
        assert source.arch == target.arch
        grid = codebook_dispatch.grid(choice, n, target.sm_count)
        ctas, *rest = grid(m)
        assert ctas >= 1
        assert rest == [1, 1]
        tile = choice.tile
        if choice.family in ("codebook_stream", "codebook_stream_rounds"):
            assert grid.rows >= m
        if choice.family == "codebook_stream":
            assert tile.capacity >= units
            assert ctas // tile.splits * tile.row_tiles * 16 >= n
        elif choice.family == "codebook_stream_rounds":
            assert ctas * tile.row_tiles * 16 >= n
        elif choice.family == "codebook_stream_wgmma":
            assert ctas // tile.splits * tile.groups * 64 * tile.tokens >= m * n
        elif choice.family == "codebook_mma":
            assert ctas * tile.threadblock_shape[0] * tile.threadblock_shape[1] >= m * n


def test_cutlass_serves_prompts_of_rows_with_one_norm():
    rows = problem_of(DType.S8, 4, 1, DType.F16, True, "none", False, 16, row_norm=True)

    def chosen(problem: CodebookProblem, m: int, target: Target = H200, cutlass: bool = True) -> str:
        choice = select(problem, m, 4096, 32, target, cutlass=cutlass)
        family(choice.family).validate(replace(problem, row_norm="cutlass" in choice.family), choice.tile, target.arch)
        return choice.family

    assert chosen(rows, CUTLASS_TOKENS) == chosen(rows, 65_536) == "codebook_cutlass"
    others = [
        chosen(rows, CUTLASS_TOKENS - 1),
        chosen(rows, 4096, cutlass=False),
        chosen(rows, 4096, target=A100),
        chosen(replace(rows, row_norm=False), 4096),
        chosen(replace(rows, alignment_n=4), 4096),
        chosen(replace(rows, epilogue=replace(rows.epilogue, residual=True)), 4096),
    ]
    assert "codebook_cutlass" not in others


def test_kernels_that_read_norms_ignore_row_norm():
    rows = problem_of(DType.S8, 4, 1, DType.F16, True, "none", False, 16, row_norm=True)
    for target in (H200, A100):
        for m in (1, 16, 64, 4096):
            choice = select(rows, m, 4096, 32, target)
            apart = codebook_dispatch.emit(choice, replace(rows, row_norm=False), target.arch)
            assert codebook_dispatch.emit(choice, rows, target.arch) == apart


def test_few_int8_tokens_have_kernels_of_mirrored_codebooks():
    for slots, m in itertools.product((1, 4, 8), TOKENS):
        plain = problem(DType.S8, slots=slots, out=DType.F16)
        mirrored = replace(plain, mirrored=True)
        of_plain, of_mirrored = (select(p, m, 4096, 32, H200) for p in (plain, mirrored))
        if m <= 8:
            assert of_mirrored.tile.mirrored
            codebook_dispatch.emit(of_mirrored, mirrored, "sm_90a")
        else:
            assert of_mirrored == of_plain


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("slots", [1, 2, 4, 8])
def test_every_problem_has_a_kernel(target: Target, bits: int, slots: int):
    for x, m in itertools.product((DType.F16, DType.BF16, DType.S8), (1, 8, 16, 32, 64, 256)):
        asked = problem(x, bits, slots, out=DType.F32 if x is DType.S8 else x)
        source = codebook_dispatch.emit(select(asked, m, 4096, 32, target), asked, target.arch)
        assert asked.name in source.name
        assert source.params == asked.params()


def test_families_by_architecture_and_tokens():
    def families(target: Target, n: int = 4096, units: int = 32) -> list[str]:
        return [select(problem(DType.F16), m, n, units, target).family for m in (1, 8, 16, 17, 64, 65, 4096)]

    assert families(A100, 1280, 10) == ["codebook_stream"] * 3 + ["codebook_mma"] * 4
    hopper = families(H200)
    assert hopper[:2] == ["codebook_stream"] * 2
    assert hopper[4:] == ["codebook_stream_wgmma", "codebook_stream_wgmma", "codebook_wgmma"]
    # K so long that no warps hold the tokens of all of it.
    assert families(A100, 64, 4000)[:3] == ["codebook_stream_rounds"] * 3
    assert families(H200, 64, 4000)[:3] == ["codebook_stream_wgmma"] * 3


@pytest.mark.parametrize("x", [DType.F16, DType.S8], ids=lambda x: x.value)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_weights_stream_past_few_tokens_on_every_gpu(x: DType, bits: int):
    """At any K of a model, of one pass and of two, no GPU falls to the kernels of many tokens."""
    gpus = {(gpu.arch, gpu.sm_count): gpu for gpu in GPUS}.values()
    columns = (1024, 1280, 2048, 4096, 5120, 8192, 11008, 14336, 28672)
    tokens = range(1, FEW_TOKENS + 1) if bits == 4 else (1, 8, 16)
    asked = problem(x, bits)
    for gpu, k, passes, m in itertools.product(gpus, columns, (1, 2), tokens):
        choice = select(asked, m, 4096, passes * k // UNIT_COLUMNS, gpu)
        assert choice.family.startswith("codebook_stream"), (gpu, k, passes, m)
        family(choice.family).validate(asked, choice.tile, gpu.arch)


# ── rotations ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
def test_rotations(target: Target):
    def select_kinds(kind: str, out: DType) -> list[type]:
        found = select_rotation(kind, DType.F16, out, 16, 640, 128, 2, target)
        assert all(one.emit().arch == target.arch for one in found)
        assert all(one.out is (out if one is found[-1] else DType.F32) for one in found)
        return [type(one) for one in found]

    for kind, out in itertools.product(("hadamard", "none"), (DType.F16, DType.S8)):
        assert select_kinds(kind, out) == [RotateTokens]
    assert select_kinds("qr", DType.F16) == [RotateTokensDense]
    assert select_kinds("qr", DType.S8) == [RotateTokensDense, RotateTokens]


@pytest.mark.parametrize("kind", ["hadamard", "none", "qr"])
@pytest.mark.parametrize("out", [DType.F16, DType.S8], ids=lambda out: out.value)
def test_grids_of_rotations_cover_all_columns(kind: str, out: DType):
    for (k, group), m, passes in itertools.product(
        ((64, 64), (1280, 128), (14336, 128), (96, 32), (1040, 16)), (1, 16, 4096), (1, 2)
    ):
        padded = Geometry(k, group, kind).k_padded
        widths = (padded, passes * padded)  # the second kernel reads what the first one wrote
        for one, columns in zip(select_rotation(kind, DType.F16, out, m, k, group, passes, H200), widths, strict=False):
            x, y, z = one.grid(m, columns)
            if isinstance(one, RotateTokensDense):
                assert (x * one.tokens >= m, y * one.columns, z) == (True, padded, passes)
            else:
                assert x * one.rows >= m
                assert y * one.row_columns >= columns or not one.held
                assert z == 1


def test_medium_rotations_start_late():
    early = [codebook_dispatch.starts_early(m, 4096) for m in (1, 16, 64, 128, 512, 4096)]
    assert early == [True, True, True, False, False, True]
    assert [codebook_dispatch.starts_early(*size) for size in ((256, 1280), (320, 1280), (96, 5120))] == [1, 0, 1]


def test_padding_is_that_of_the_layout():
    for k, group, kind in itertools.product(
        (1, 31, 64, 96, 127, 128, 130, 640, 1000, 4096), (1, 7, 16, 17, 32, 64, 100, 128, 256, 4096), ("none", "qr")
    ):
        assert padded_columns(k, min(group, k), kind) == Geometry(k, group, kind).k_padded
