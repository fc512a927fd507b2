"""The decoder's kernels as text and as binaries: names, parameters, refusals, sizes, no spills."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qcut.dispatch.attention import emit_attention, estimated_cycles, select_attention
from qcut.dispatch.gpus import Target
from qcut.emitters.attention import mma as attention_mma
from qcut.emitters.attention import simt as attention
from qcut.emitters.attention.append import AttentionAppend, emit_attention_append
from qcut.emitters.attention.mma import AttentionMma
from qcut.emitters.attention.simt import AttentionDecode, emit_attention_decode
from qcut.emitters.codebook.rotate_rows import RowsRotation
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.decoder import activate, append, argmax, norm
from qcut.emitters.decoder.activate import ActivateRows, emit_activation
from qcut.emitters.decoder.append import RotateAndAppend, emit_append
from qcut.emitters.decoder.argmax import ArgmaxRows, emit_argmax
from qcut.emitters.decoder.norm import NormRows, emit_norm
from tests.support.compiled import build, in_turns
from tests.support.sass import instructions, listing

H200 = Target("sm_90a", 132)
F16, BF16, F32, S8, U4 = DType.F16, DType.BF16, DType.F32, DType.S8, DType.U4
WIDE = AttentionDecode(F16, F16, 128, 4, "sm_90a")
MMA = AttentionMma(F16, F16, 128, 4, "sm_90a", cluster=8)
NORM = NormRows(F16, False, "sm_90a")
TURN = RowsRotation(S8, 128)
APPEND = RotateAndAppend(F16, F16, 128, "half", "sm_90a")


def mma_attention(arch: str) -> list[AttentionMma]:
    heads = ((F16, F16, 16, 1), (BF16, BF16, 64, 3), (F16, F16, 80, 8), (F16, F16, 128, 4), (BF16, BF16, 256, 8))
    heads += ((BF16, S8, 64, 1), (F16, S8, 128, 4), (F16, S8, 256, 12))
    clusters = (1, 2, 4, 8, 1, 8, 4, 2) if arch == "sm_90a" else (1,) * len(heads)
    found = [AttentionMma.for_shape(*head, arch, n) for head, n in zip(heads, clusters, strict=True)]
    few_bits = ((F16, U4, 128, 4, None), (BF16, U4, 64, 3, None), (BF16, S8, 128, 8, U4), (F16, U4, 32, 1, None))
    found += [AttentionMma.for_shape(x, keys, head, n, arch, values=v) for x, keys, head, n, v in few_bits]
    short = AttentionMma.for_shape(F16, S8, 128, 4, arch).shortened(64)
    return [*found, AttentionMma.for_shape(BF16, U4, 256, 8, arch), short]


def appends(arch: str) -> list[RotateAndAppend]:
    heads: tuple[Any, ...] = ((F16, F16, 128, "half"), (BF16, S8, 256, "half"), (F32, F32, 8, "half"))
    heads += ((F16, S8, 64, "none"), (F16, F16, 64, "none"), (F32, F32, 250, "half"))
    heads += ((BF16, BF16, 128, "interleaved"), (F16, S8, 64, "interleaved"), (F32, F32, 40, "interleaved"))
    found = [RotateAndAppend(*head, arch, many) for head in heads for many in (False, True)]
    found += [replace(desc, aligned=False) for desc in found if desc.head != 250]
    few_bits = (RotateAndAppend(F16, U4, 128, "half", arch), RotateAndAppend(BF16, S8, 64, "none", arch, values=U4))
    return [*found, *(replace(desc, many=many) for desc in few_bits for many in (False, True))]


def sources(arch: str) -> list[KernelSource]:
    heads = ((F16, F16, 128, 4), (F16, S8, 128, 4), (BF16, BF16, 64, 1), (F32, F32, 8, 2), (F32, F32, 256, 1))
    found = [emit_attention_decode(AttentionDecode.for_shape(*head, arch)) for head in heads]
    found.append(emit_attention_decode(AttentionDecode.for_shape(F16, F16, 256, 8, arch)))
    for i, desc in enumerate(mma_attention(arch)):
        found += [emit_attention(desc), emit_attention_append(AttentionAppend(desc, i % 4 != 3))]
    for x, layer, residual, quantized, k in (
        (F16, False, True, True, 4096),
        (BF16, True, False, False, 1280),
        (F32, False, True, False, 14336),
    ):
        found.append(emit_norm(NormRows.for_shape(x, layer, arch, k, residual=residual, quantized=quantized)))
    found.append(emit_norm(NormRows.for_shape(F16, True, arch, 77, residual=True, quantized=True, aligned=False)))
    for rotation, many in ((RowsRotation(F16, 128), False), (RowsRotation(S8, 64, 2), False), (TURN, True)):
        found.append(emit_norm(NormRows.for_shape(F16, False, arch, 4096, residual=True, many=many, rotation=rotation)))
        found.append(emit_activation(ActivateRows.rotating("silu_mul", F16, arch, 14336, rotation)))
    found += [emit_append(desc) for desc in appends(arch)]
    for x, kind, aligned in ((F16, "silu_mul", True), (BF16, "gelu_tanh", True), (F32, "silu_mul", False)):
        found.append(emit_activation(ActivateRows(kind, x, arch, aligned)))
    if arch == "sm_90a":
        found += [emit_argmax(ArgmaxRows(x, arch, x is F16, argmax.PARTS, x is F16)) for x in (F16, F32)]
    return [*found, *(emit_argmax(ArgmaxRows(x, arch, x is F16)) for x in (F16, BF16, F32))]


def test_text_is_deterministic_and_names_are_unique() -> None:
    found = [*sources("sm_80"), *sources("sm_90a")]
    assert found == [*sources("sm_80"), *sources("sm_90a")]
    assert len({source.name for source in found}) == len(found)


def test_names_spell_the_kernel() -> None:
    assert WIDE.name == "qcut_attention_decode_sm90a_f16_f16_h128g4_w4u4"
    assert MMA.name == "qcut_attention_mma_sm90a_f16_f16_h128g4_w4t2_c8"
    assert AttentionAppend(MMA, True).name == "qcut_attention_append_sm90a_f16_f16_h128g4_w4t2_c8_rope"
    assert AttentionAppend(MMA, False).name == "qcut_attention_append_sm90a_f16_f16_h128g4_w4t2_c8"
    assert replace(MMA, cache=U4, cluster=1).name == "qcut_attention_mma_sm90a_f16_u4_h128g4_w4t2"
    assert replace(MMA, cache=S8, values=U4, cluster=1).name == "qcut_attention_mma_sm90a_f16_s8u4_h128g4_w4t2"
    assert replace(APPEND, cache=S8, values=U4).name == "qcut_append_sm90a_f16_s8u4_h128_rope"
    assert replace(MMA, cache=S8, cluster=1).name == "qcut_attention_mma_sm90a_f16_s8_h128g4_w4t2"
    assert replace(NORM, residual=True, quantized=True).name == "qcut_norm_sm90a_f16_rms_r_q_t256v1"
    assert replace(NORM, layer=True, aligned=False).name == "qcut_norm_sm90a_f16_layer_t256v1_u"
    assert replace(NORM, rotation=RowsRotation(F16, 64, 2)).name == "qcut_norm_sm90a_f16_rms_h64p2_t256v1"
    assert replace(NORM, rotation=TURN).name == "qcut_norm_sm90a_f16_rms_h128p1s8_t256v1"
    turned = ActivateRows.rotating("silu_mul", F16, "sm_90a", 14336, TURN)
    assert turned.name == "qcut_silu_mul_sm90a_f16_h128p1s8_t896v2"
    assert replace(turned, rotation=RowsRotation(F16, 32), threads=128, vectors=1).name.endswith("f16_h32p1")
    assert APPEND.name == "qcut_append_sm90a_f16_f16_h128_rope"
    assert ActivateRows("gelu_tanh", F16, "sm_90a", False).name == "qcut_gelu_tanh_sm90a_f16_u"
    assert ArgmaxRows(BF16, "sm_80").name == "qcut_argmax_sm80_bf16"
    assert ArgmaxRows(F16, "sm_90a", True, 8, True).name == "qcut_argmax_sm90a_f16_a_h_c8"
    assert replace(APPEND, cache=S8, rotary="none").name == "qcut_append_sm90a_f16_s8_h128"
    assert replace(APPEND, many=True, aligned=False).name == "qcut_append_sm90a_f16_f16_h128_rope_m_u"
    assert replace(APPEND, many=True, ring=True).name == "qcut_append_sm90a_f16_f16_h128_rope_m_ring"
    assert replace(APPEND, rotary="interleaved").name == "qcut_append_sm90a_f16_f16_h128_rope_pairs"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles_without_spills(arch: str) -> None:
    texts = in_turns(sources, arch)
    for source, binary in zip(texts, build(*texts), strict=True):
        resources = binary.resources
        assert resources is not None
        assert resources.spill_store_bytes == resources.spill_load_bytes == 0, source.name
        assert resources.registers * source.block <= 65_536, source.name
        assert resources.smem_bytes <= 49_152


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_attention_multiplies_on_tensor_cores(arch: str) -> None:
    descs = mma_attention(arch)
    apart = map(emit_attention, descs)
    steps = (emit_attention_append(AttentionAppend(desc, True)) for desc in descs)
    for desc, binary in zip(descs * 2, build(*apart, *steps), strict=True):
        found = instructions(binary.cubin)
        assert any(name.startswith("HMMA.16816.F32") for name in found), desc.name
        widest = any(name.startswith("LDG.E") and "128" in name for name in found)
        assert widest or (desc.cache is U4 and desc.head < 128)
        assert any(name.startswith("MOVM") for name in found)
        assert any(name.startswith("STAS") for name in found) == (desc.cluster > 1)  # to other CTAs' shared memory
        resources = binary.resources
        assert resources is not None
        assert resources.registers * desc.block * desc.resident <= 65_536, desc.name
        token = 2 * desc.group * (desc.head + 8) + 2 * desc.head * desc.cache.bits // 8 + 32
        assert resources.smem_bytes <= attention_mma._smem_bytes(desc) + token
        assert resources.spill_store_bytes == resources.spill_load_bytes == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_appending_moves_sixteen_bytes_at_a_time(arch: str) -> None:
    descs = [d for d in appends(arch) if d.aligned and d.vector * d.x.bits == 128 and d.cache is d.x]
    assert descs
    for desc, binary in zip(descs, build(*map(emit_append, descs)), strict=True):
        found = instructions(binary.cubin)
        stores = {name for name in found if name.startswith("STG")}
        assert {"128" in name for name in stores} == {True}, desc.name
        assert not any(name.startswith(("LDG.E.U16", "LDG.E.64")) for name in found), desc.name


@pytest.mark.parametrize("desc", appends("sm_90a"), ids=lambda d: d.name)
def test_appending_reaches_every_head_of_every_token(desc: RotateAndAppend) -> None:
    assert desc.head % (2 * desc.vector) == 0
    for tokens, heads, kv_heads in ((1, 32, 8), (1024, 0, 20), (77, 71, 1), (8192, 32, 8)):
        x, y, z = desc.grid(tokens, heads, kv_heads)
        shares = desc.head // 2 // desc.vector
        groups = desc.block // min(32, 1 << (shares - 1).bit_length())
        at_once = groups if desc.many else 1
        assert (x - 1) * at_once < tokens <= x * at_once
        each = max(1, 64 // desc.x.bits // -(-shares // 32)) if desc.many else groups
        assert (y - 1) * each < heads + 2 * kv_heads <= y * each
        assert z == 1


# ── choice ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("head", [8, 32, 64, 80, 96, 128, 160, 256])
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 7, 8, 12])
@pytest.mark.parametrize("x", [F16, F32])
def test_every_decoders_heads_have_a_kernel(head: int, queries: int, x: DType) -> None:
    for cache in (x, *([S8] if head % 16 == 0 else [])):
        desc = AttentionDecode.for_shape(x, cache, head, queries, "sm_90a")
        assert desc.grid(3, 2, queries, 5) == (5, 2 * -(-queries // desc.group), 3)


def test_parts_fill_the_gpu_and_leave_each_enough() -> None:
    for batch, kv_heads, context in ((1, 8, 8192), (8, 8, 8192), (1, 20, 512), (64, 8, 512), (1, 1, 32), (1, 1, 10**6)):
        parts = WIDE.parts(batch, kv_heads, 4, context, 132)
        assert 1 <= parts <= 64
        assert parts == 1 or context / parts >= 2 * WIDE.step
        assert parts == 1 or (parts - 1) * batch * kv_heads < 2 * 132
    assert WIDE.parts(1, 8, 4, 8192, 132) * 8 >= 2 * 132
    assert WIDE.workspace_floats(2, 8, 4, 1) == 0
    assert WIDE.workspace_floats(2, 8, 4, 3) == 2 * 8 * 3 * 4 * 130


@pytest.mark.parametrize("head", [16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("queries", [1, 3, 8, 12, 17])
def test_halves_attend_on_tensor_cores(head: int, queries: int) -> None:
    for x, cache in ((F16, F16), (BF16, BF16), (BF16, S8)):
        desc = AttentionMma.for_shape(x, cache, head, queries, "sm_80")
        assert desc.grid(3, 2, queries, 5) == (5, 2 * -(-queries // 8), 3)
        sizes = {"batch": 3, "kv_heads": 2, "context": 700}
        chosen, parts = select_attention(x, cache, head, queries, Target("sm_80", 108), **sizes)
        assert (chosen, 1 <= parts <= 21) == (desc.shortened(-(-700 // parts)), True)
    for x, head in ((F32, 128), (F16, 8)):
        assert isinstance(select_attention(x, x, head, queries, Target("sm_90a", 108), **sizes)[0], AttentionDecode)


@pytest.mark.parametrize("cache", [F16, S8, U4])
def test_short_contexts_have_no_tiles_that_do_nothing(cache: DType) -> None:
    most = AttentionMma.for_shape(F16, cache, 128, 4, "sm_90a").tiles
    for context in (1, 63, 64, 65, 129, 200, 513, 1024, 4096, 1 << 17):
        sizes = {"batch": 1, "kv_heads": 8, "context": context}
        desc, parts = select_attention(F16, cache, 128, 4, H200, **sizes)
        assert isinstance(desc, AttentionMma)
        held = desc.tiles * desc.warps * 16 * parts
        assert desc.tiles == most or held >= context > held - desc.warps * 16 * parts
        closed, same = select_attention(F16, cache, 128, 4, replace(H200, closed=True), **sizes)
        assert (closed, same) == (replace(desc, tiles=most), parts)
    assert desc.tiles == most > 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_masks_alone_unpack_codes(arch: str) -> None:
    """Half of what a subtraction for each pair of codes would take: 256 of them for a lane's 16 keys and values."""
    packed = AttentionMma(F16, U4, 128, 4, arch, tiles=1)
    for binary in build(emit_attention(packed), emit_attention(replace(packed, x=BF16))):
        found = [name for name in listing(binary.cubin) if name.startswith(("HADD2", "HFMA2", "HMUL2"))]
        assert sum(".F32" not in name for name in found) < 16, found


def test_short_contexts_append_with_half_the_code() -> None:
    """Code that runs once has to be fetched: a step over a few tokens takes as long as that."""
    long = AttentionMma.for_shape(F16, S8, 128, 4, "sm_90a")
    texts = [emit_attention_append(AttentionAppend(desc, True)) for desc in (long, long.shortened(64))]
    whole, short = (len(listing(binary.cubin)) for binary in build(*texts))
    assert short < 0.7 * whole
    read = build(emit_attention(long))[0]
    assert whole < 1.22 * len(listing(read.cubin))  # what turns, rounds and stores a new row stands there once


def test_parts_meet_in_a_cluster_where_reading_is_short() -> None:
    def chosen(batch: int, kv_heads: int, context: int, arch: str = "sm_90a") -> tuple[int, int]:
        sizes = {"batch": batch, "kv_heads": kv_heads, "context": context}
        desc, parts = select_attention(F16, F16, 128, 4, Target(arch, 132), **sizes)
        assert isinstance(desc, AttentionMma)
        assert desc.cluster in (1, parts)
        return desc.cluster, parts

    assert chosen(1, 8, 48) == (1, 1)
    assert chosen(1, 8, 513) == chosen(1, 8, 2049) == (8, 8)
    assert chosen(8, 8, 8193) == (1, 4)  # 256 CTAs, where 264 have a place, but only 240 in clusters of four
    assert chosen(1, 8, 32768) == (1, 33)
    assert chosen(64, 8, 4097) == (1, 1)
    assert chosen(1, 8, 4097, "sm_80")[0] == 1


def test_estimates_follow_the_bytes() -> None:
    alone = replace(MMA, cluster=1)
    short, long, longer = (estimated_cycles(alone, 1, 64, context, H200) for context in (32, 512, 2048))
    assert longer == pytest.approx(4 * long, rel=0.1)
    assert long / 12 < short < long / 4  # what it waits for at first
    four = replace(MMA, cluster=4)
    assert estimated_cycles(alone, 4, 60, 8192, H200) > estimated_cycles(four, 4, 60, 8192, H200)
    assert estimated_cycles(alone, 4, 64, 8192, H200) < estimated_cycles(four, 4, 64, 8192, H200)  # four clusters wait
    assert replace(MMA, cluster=4).workspace_floats(2, 8, 4, 4) == alone.workspace_floats(2, 8, 4, 1) == 0
    assert alone.workspace_floats(2, 8, 4, 3) == 2 * 8 * 3 * 4 * 132


@pytest.mark.parametrize("k", [1, 32, 172, 768, 1280, 4096, 5120, 8192, 14336])
@pytest.mark.parametrize("x", [F16, F32])
def test_norms_hold_their_rows(k: int, x: DType) -> None:
    desc = NormRows.for_shape(x, True, "sm_90a", k)
    assert desc.threads * desc.vectors * 128 // x.bits >= k
    assert desc.grid(7) == (7, 1, 1)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────

REFUSALS: dict[str, tuple[Any, dict[str, Any]]] = {
    "x": (WIDE, {"x": S8}),
    "cache": (WIDE, {"cache": F32}),
    "head": (WIDE, {"head": 100}),
    "group": (WIDE, {"group": 3}),
    "warps": (WIDE, {"warps": 17}),
    "unroll": (WIDE, {"unroll": 9}),
    "registers": (WIDE, {"group": 8, "unroll": 8}),
    "shared_memory": (WIDE, {"group": 8, "warps": 10, "unroll": 1, "head": 256}),
}


MMA_REFUSALS: dict[str, dict[str, Any]] = {
    "x": {"x": F32},
    "cache": {"cache": BF16},
    "head": {"head": 100},
    "group": {"group": 9},
    "warps": {"warps": 9},
    "tiles": {"tiles": 5},
    "cluster": {"cluster": 3},
    "clusters": {"arch": "sm_80"},
    "registers": {"tiles": 3},
    "shared_memory": {"group": 8, "warps": 8, "tiles": 1, "head": 240},
}


@pytest.mark.parametrize("name", MMA_REFUSALS)
def test_illegal_attention_on_tensor_cores_is_refused_by_name(name: str) -> None:
    with pytest.raises(EmitError, match=f"^qcut_attention_mma_[a-z0-9_]+: {name}: "):
        replace(MMA, **MMA_REFUSALS[name])


def test_every_constraint_is_refused_below() -> None:
    assert [c.name for c in attention_mma.CONSTRAINTS] == list(MMA_REFUSALS)
    assert [c.name for c in attention.CONSTRAINTS] == list(REFUSALS)
    assert [c.name for c in norm.CONSTRAINTS] == ["x", "threads", "vectors", "rotation", "quantized"]
    assert [c.name for c in append.CONSTRAINTS] == ["x", "cache", "aligned", "head", "rotary"]
    assert [c.name for c in activate.CONSTRAINTS] == ["kind", "x", "threads", "vectors", "rotation"]
    assert [c.name for c in argmax.CONSTRAINTS] == ["x", "parts"]


@pytest.mark.parametrize("name", REFUSALS)
def test_illegal_attention_is_refused_by_name(name: str) -> None:
    desc, changes = REFUSALS[name]
    with pytest.raises(EmitError, match=f"^qcut_attention_decode_[a-z0-9_]+: {name}: "):
        replace(desc, **changes)


@pytest.mark.parametrize(
    ("desc", "changes", "name"),
    [
        (NORM, {"x": S8}, "x"),
        (NORM, {"threads": 100}, "threads"),
        (NORM, {"vectors": 6}, "vectors"),
        (APPEND, {"x": S8}, "x"),
        (APPEND, {"cache": BF16}, "cache"),
        (APPEND, {"values": U4}, "cache"),
        (APPEND, {"cache": U4, "head": 96}, "cache"),
        (APPEND, {"cache": U4, "aligned": False}, "aligned"),
        (APPEND, {"head": 7}, "head"),
        (APPEND, {"head": 258}, "head"),
        (APPEND, {"rotary": "pairs"}, "rotary"),
        (ArgmaxRows(F16, "sm_90a"), {"x": S8}, "x"),
        (ArgmaxRows(F16, "sm_90a"), {"parts": 2}, "parts"),
        (ArgmaxRows(F16, "sm_89"), {"parts": 8}, "parts"),
        (ActivateRows("silu_mul", F16, "sm_90a"), {"x": S8}, "x"),
        (ActivateRows("silu_mul", F16, "sm_90a"), {"kind": "relu"}, "kind"),
        (ActivateRows("silu_mul", F16, "sm_90a"), {"threads": 48}, "threads"),
        (ActivateRows("silu_mul", F16, "sm_90a"), {"vectors": 2}, "vectors"),
        (ActivateRows("silu_mul", F16, "sm_90a"), {"rotation": RowsRotation(BF16, 128)}, "rotation"),
        (NORM, {"rotation": RowsRotation(F16, 256)}, "rotation"),
        (NORM, {"rotation": RowsRotation(S8, 128, 2), "vectors": 3}, "rotation"),
        (NORM, {"rotation": TURN, "x": F32}, "rotation"),
        (NORM, {"rotation": TURN, "quantized": True}, "quantized"),
    ],
)
def test_illegal_steps_are_refused_by_name(desc: Any, changes: dict[str, Any], name: str) -> None:
    with pytest.raises(EmitError, match=f"^qcut_[a-z0-9_]+: {name}: "):
        replace(desc, **changes)


def test_rows_that_no_cta_holds() -> None:
    with pytest.raises(EmitError, match="vectors: of a thread are 1 to 4"):
        NormRows.for_shape(F32, False, "sm_90a", 16385)
