"""The decoder's kernels as text and as binaries: names, parameters, refusals, sizes, no spills."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from emitters import attention, transformer
from emitters.attention import AttentionDecode, emit_attention_decode
from emitters.source import DType, EmitError, KernelSource
from emitters.transformer import (
    ActivateRows,
    ArgmaxRows,
    NormRows,
    RotateAndAppend,
    emit_activation,
    emit_append,
    emit_argmax,
    emit_norm,
)
from qcut import jit

F16, BF16, F32, S8 = DType.F16, DType.BF16, DType.F32, DType.S8
WIDE = AttentionDecode(F16, F16, 128, 4, "sm_90a")
NORM = NormRows(F16, False, "sm_90a")
APPEND = RotateAndAppend(F16, F16, 128, True, "sm_90a")


def sources(arch: str) -> list[KernelSource]:
    heads = ((F16, F16, 128, 4), (F16, S8, 128, 4), (BF16, BF16, 64, 1), (F32, F32, 8, 2), (F32, F32, 256, 1))
    found = [emit_attention_decode(AttentionDecode.for_shape(*head, arch)) for head in heads]
    found.append(emit_attention_decode(AttentionDecode.for_shape(F16, F16, 256, 8, arch)))
    for x, layer, residual, quantized, k in (
        (F16, False, True, True, 4096),
        (BF16, True, False, False, 1280),
        (F32, False, True, False, 14336),
    ):
        found.append(emit_norm(NormRows.for_shape(x, layer, arch, k, residual=residual, quantized=quantized)))
    found.append(emit_norm(NormRows.for_shape(F16, True, arch, 77, residual=True, quantized=True, aligned=False)))
    for x, cache, head, rotary in (
        (F16, F16, 128, True),
        (BF16, S8, 256, True),
        (F32, F32, 8, True),
        (F16, S8, 64, False),
    ):
        found.append(emit_append(RotateAndAppend(x, cache, head, rotary, arch)))
    for x, kind, aligned in ((F16, "silu_mul", True), (BF16, "gelu_tanh", True), (F32, "silu_mul", False)):
        found.append(emit_activation(ActivateRows(kind, x, arch, aligned)))
    return [*found, *(emit_argmax(ArgmaxRows(x, arch)) for x in (F16, BF16, F32))]


def test_text_is_deterministic_and_names_are_unique() -> None:
    found = [*sources("sm_80"), *sources("sm_90a")]
    assert found == [*sources("sm_80"), *sources("sm_90a")]
    assert len({source.name for source in found}) == len(found)


def test_names_spell_the_kernel() -> None:
    assert WIDE.name == "qcut_attention_decode_sm90a_f16_f16_h128g4_w4u4"
    assert replace(NORM, residual=True, quantized=True).name == "qcut_norm_sm90a_f16_rms_r_q_t256v1"
    assert replace(NORM, layer=True, aligned=False).name == "qcut_norm_sm90a_f16_layer_t256v1_u"
    assert APPEND.name == "qcut_append_sm90a_f16_f16_h128_rope"
    assert ActivateRows("gelu_tanh", F16, "sm_90a", False).name == "qcut_gelu_tanh_sm90a_f16_u"
    assert ArgmaxRows(BF16, "sm_80").name == "qcut_argmax_sm80_bf16"
    assert replace(APPEND, cache=S8, rotary=False).name == "qcut_append_sm90a_f16_s8_h128"


@pytest.mark.parametrize("source", sources("sm_90a"), ids=lambda s: s.name)
def test_parameters_are_the_signature(source: KernelSource) -> None:
    match = re.search(re.escape(source.entry) + r"\(([^)]*)\)", source.text)
    assert match is not None
    kinds = {"int": "i32", "long long": "i64", "float": "f32"}
    found = []
    for argument in match.group(1).split(", "):
        kind, name = argument.rsplit(" ", 1)
        found.append((name, kinds.get(kind, "ptr")))
        assert (found[-1][1] == "ptr") == kind.endswith("*")
    assert found == [(p.name, p.kind) for p in source.params]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles_without_spills(arch: str) -> None:
    built = jit.build_many(sources(arch), progress=False)
    for source in sources(arch):
        binary = built[source.name]
        assert isinstance(binary, jit.Binary), binary
        resources = binary.resources
        assert resources is not None
        assert resources.spill_store_bytes == resources.spill_load_bytes == 0, source.name
        assert resources.registers * source.block <= 65_536, source.name
        assert resources.smem_bytes <= 49_152


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


def test_every_constraint_is_refused_below() -> None:
    assert [c.name for c in attention.CONSTRAINTS] == list(REFUSALS)
    assert [c.name for c in transformer.NORM_CONSTRAINTS] == ["x", "threads", "vectors"]
    assert [c.name for c in transformer.ROPE_CONSTRAINTS] == ["x", "cache", "head"]
    assert [c.name for c in transformer.ACTIVATION_CONSTRAINTS] == ["kind", "x"]
    assert [c.name for c in transformer.ARGMAX_CONSTRAINTS] == ["x"]


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
        (NORM, {"vectors": 5}, "vectors"),
        (APPEND, {"x": S8}, "x"),
        (APPEND, {"cache": BF16}, "cache"),
        (APPEND, {"head": 7}, "head"),
        (APPEND, {"head": 258}, "head"),
        (ArgmaxRows(F16, "sm_90a"), {"x": S8}, "x"),
        (ActivateRows("silu_mul", F16, "sm_90a"), {"x": S8}, "x"),
        (ActivateRows("silu_mul", F16, "sm_90a"), {"kind": "relu"}, "kind"),
    ],
)
def test_illegal_steps_are_refused_by_name(desc: Any, changes: dict[str, Any], name: str) -> None:
    with pytest.raises(EmitError, match=f"^qcut_[a-z0-9_]+: {name}: "):
        replace(desc, **changes)


def test_rows_that_no_cta_holds() -> None:
    with pytest.raises(EmitError, match="vectors: of a thread are 1 to 4"):
        NormRows.for_shape(F32, False, "sm_90a", 16385)
