"""The rotation kernels as text and as binaries: parameters, constraints, heuristics, instructions, no spills."""

from __future__ import annotations

import random

import pytest

from qcut.dispatch.codebook import emit_rotation
from qcut.emitters.codebook.rotate import Kind, RotateTokens
from qcut.emitters.codebook.rotate_dense import RotateTokensDense
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.numerics.codebook.layout import Geometry
from tests.support.compiled import build, in_turns
from tests.support.sass import instructions

F16, BF16, F32, S8 = DType.F16, DType.BF16, DType.F32, DType.S8
CONVERSIONS = ((F16, F16), (F16, S8), (BF16, BF16), (BF16, S8), (F32, BF16), (F32, S8))


def sources(arch: str) -> list[KernelSource]:
    """The heuristics' kernels of many shapes, every template flag among them."""
    found: dict[str, RotateTokens | RotateTokensDense] = {}
    shapes = ((1, 4096, 128), (4096, 1280, 32), (4096, 16384, 16384), (1, 20480, 4096), (8, 40, 2))
    for i, (x, out) in enumerate(CONVERSIONS):
        for j, (m, k, group) in enumerate(shapes):
            aligned, passes = i != 3, 1 + (i + j) % 2
            desc = RotateTokens.for_shape(x, out, "hadamard", arch, m, k, group, passes=passes, aligned=aligned)
            plain = RotateTokens.for_shape(x, out, "none", arch, m, k, (96, 128)[i % 2], aligned=aligned)
            found[desc.name] = desc
            if i == j or j == 0:
                found[plain.name] = plain
    # Registers are scarcest here.
    for desc in (
        RotateTokens.for_shape(F32, S8, "hadamard", arch, 1, 16384, 16384, passes=2),
        RotateTokens.for_shape(F32, S8, "hadamard", arch, 1, 20480, 4096, passes=2),
        RotateTokens.for_shape(F16, S8, "hadamard", arch, 1, 14336, 128, passes=2),
    ):
        found[desc.name] = desc
    for x in (F16, BF16):
        for out, m, group in ((x, 1, 128), (x, 64, 200), (F32, 32, 20), (F32, 130, 1024), (x, 8, 32)):
            dense = RotateTokensDense.for_shape(x, out, arch, m, 4096, group, passes=2, aligned=x is F16)
            found[dense.name] = dense
    return [emit_rotation(desc) for desc in found.values()]


def test_text_instantiates_the_header():
    source = emit_rotation(RotateTokens(F16, S8, "hadamard", 128, "sm_90a", 2, 96))
    assert source.text == (
        "#include <qcut/codebook/rotate.cuh>\n\n"
        'extern "C" __global__ void __launch_bounds__(96)\n'
        "qcut_rotate_sm90a_f16tos8_hadamard128p2_t96r1("
        "const __half* x, void* y, float* scale, const uint32_t* signs, "
        "long long x_stride, int m, int k, int k_padded) {\n"
        "  qcut::RowRotation<__half, int8_t, true, 128, 128, 2, 96, 1, true, true>::run("
        "x, y, scale, signs, x_stride, m, k, k_padded, 0x1.6a09e60000000p-4f);\n"
        "}\n"
    )
    assert [p.name for p in source.params] == ["x", "y", "scale", "signs", "x_stride", "m", "k", "k_padded"]
    assert (source.block, source.smem_bytes, source.struct_format) == (96, 0, "@PPPPqiii")


def test_text_of_a_dense_rotation():
    desc = RotateTokensDense(BF16, F32, 100, "sm_80", 1, 16, False)
    source = emit_rotation(desc)
    assert source.text == (
        "#include <qcut/codebook/rotate_dense.cuh>\n\n"
        'extern "C" __global__ void __launch_bounds__(128)\n'
        "qcut_rotate_sm80_bf16tof32_qr100p1_m16_u(const __nv_bfloat16* x, void* y, const __nv_bfloat16* q, "
        "long long x_stride, int m, int k, int k_padded) {\n"
        "  qcut::rotate_dense<__nv_bfloat16, float, 100, 128, 16, 64, false>(x, y, q, x_stride, m, k, k_padded);\n"
        "}\n"
    )
    assert desc.grid(33, 256) == (3, 4, 1)


def test_names_are_unique_and_text_repeats():
    first, second = sources("sm_80"), sources("sm_80")
    assert first == second
    assert len({s.name for s in first}) == len(first) == len({s.text for s in first})


def test_shared_memory_holds_a_row_of_wide_groups():
    assert RotateTokens(F16, F16, "hadamard", 512, "sm_80").smem_bytes == 0
    assert RotateTokens(F16, F16, "hadamard", 1024, "sm_80", threads=64, rows=2).smem_bytes == 2 * 1024 * 4
    assert RotateTokens(F16, F16, "none", 1024, "sm_80").smem_bytes == 0


def test_heuristics_cover_every_row():
    """Threads and pieces hold all columns, cut no group, and leave no CTA without work."""
    gen = random.Random(4)
    for _ in range(2000):
        group = 2 ** gen.randrange(15)
        k = group * gen.randrange(1, 60) + (2 ** gen.randrange(group.bit_length()) if gen.random() < 0.5 else 0)
        m = gen.choice((1, 2, 16, 200, 4096))
        x, out = gen.choice(CONVERSIONS)
        kind: Kind = gen.choice(("hadamard", "none"))
        desc = RotateTokens.for_shape(x, out, kind, "sm_90a", m, k, group)
        k_padded = Geometry(k, group).k_padded
        along_m, pieces, _ = desc.grid(m, k_padded)
        assert m <= along_m * desc.rows < m + desc.rows
        if desc.held:
            assert (pieces - 1) * desc.row_columns < k_padded <= pieces * desc.row_columns
        else:
            assert k_padded > desc.row_columns
        if kind == "hadamard" and (pieces > 1 or not desc.held):
            assert desc.row_columns % desc.padded_group == 0


def test_one_token_is_spread_over_ctas():
    desc = RotateTokens.for_shape(F16, F16, "hadamard", "sm_90a", 1, 4096, 128)
    assert desc.grid(1, 4096) == (1, 8, 1)
    many = RotateTokens.for_shape(F16, F16, "hadamard", "sm_90a", 4096, 4096, 128)
    assert many.grid(4096, 4096) == (4096, 2, 1)


def test_without_a_rotation_unpadded_groups_share_a_kernel():
    def name(k: int, group: int) -> str:
        return RotateTokens.for_shape(F16, S8, "none", "sm_90a", 8, k, group).name

    assert name(1024, 64) == name(1024, 128) == name(1024, 1024) == name(1000, 5000)
    assert name(1024, 96) != name(1024, 128)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"kind": "qr"}, "kind: .*RotateTokensDense"),
        ({"x": S8}, "input: is f16, bf16 or f32"),
        ({"out": BF16}, "output: "),
        ({"out": F32}, "output: "),
        ({"group": 0}, "group: has 1 column"),
        ({"group": 96}, "hadamard_group: is a power of two up to 16384"),
        ({"group": 32768}, "hadamard_group: "),
        ({"passes": 3}, "passes: "),
        ({"threads": 48}, "threads: "),
        ({"threads": 512, "rows": 4}, "rows: "),
        ({"held": False}, "held: "),
        ({"held": False, "out": S8, "group": 1024, "threads": 32}, "pieces: "),
        ({"group": 4}, "aligned: "),
    ],
)
def test_refusals(changes: dict[str, object], match: str):
    fields = {"x": F16, "out": F16, "kind": "hadamard", "group": 128, "arch": "sm_90a", **changes}
    with pytest.raises(EmitError, match=match):
        RotateTokens(**fields)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"x": F32}, "input: "),
        ({"out": BF16}, "output: "),
        ({"group": 1025}, "group: .*larger groups take hadamard"),
        ({"passes": 0}, "passes: "),
        ({"tokens": 128}, "tokens: "),
        ({"group": 20}, "aligned: "),
    ],
)
def test_dense_refusals(changes: dict[str, object], match: str):
    fields = {"x": F16, "out": F16, "group": 128, "arch": "sm_90a", **changes}
    with pytest.raises(EmitError, match=match):
        RotateTokensDense(**fields)


def test_grid_refuses_what_does_not_fit():
    with pytest.raises(EmitError, match="holds rows of up to 4096"):
        RotateTokens(F16, S8, "hadamard", 128, "sm_90a").grid(1, 4224)
    with pytest.raises(EmitError, match="cut groups of 1024"):
        RotateTokens(F16, F16, "hadamard", 1024, "sm_90a", threads=96).grid(1, 2048)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles_without_spills(arch: str):
    """But for a word or two where 1024 threads hold two passes of a row."""
    texts = in_turns(sources, arch)
    for source, binary in zip(texts, build(*texts), strict=True):
        resources = binary.resources
        allowed = 16 if source.block == 1024 and "p2" in source.name else 0
        assert resources.stack_bytes <= allowed, source.name
        assert max(resources.spill_store_bytes, resources.spill_load_bytes) <= allowed, source.name


def test_instructions():
    rows = instructions(build(emit_rotation(RotateTokens(F16, S8, "hadamard", 1024, "sm_90a", threads=64)))[0].cubin)
    assert {"SHFL.BFLY", "LDG.E.128", "STG.E.128", "STS.128", "LDS.128"} <= rows
    dense = instructions(build(emit_rotation(RotateTokensDense(BF16, BF16, 128, "sm_90a")))[0].cubin)
    assert "HMMA.16816.F32.BF16" in dense
    assert any(name.startswith("LDGSTS") for name in dense)
    assert any(name.startswith("LDSM") for name in dense)
