"""The kernel of codebooks' embeddings as text and as a binary: names, parameters, refusals, widths of access."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qcut.emitters.core.source import DType, EmitError
from qcut.emitters.decoder.embed_codebook import CONSTRAINTS, EmbedCodebook, emit_embed_codebook
from tests.support.compiled import build, in_turns
from tests.support.sass import instructions

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32
DESC = EmbedCodebook(F16, F16, (4,), 128, "sm_90a")


def descs(arch: str) -> list[EmbedCodebook]:
    """Every type, number of bits, group and option once at least."""
    first = EmbedCodebook(F16, F16, (4,), 128, arch)
    return [
        first,
        replace(first, places=True, zeroes=True),
        replace(first, pairs=True, x=BF16),
        replace(first, bits=(3,), group=64, norms=F32),
        replace(first, bits=(2,), group=32, x=F32, places=True),
        replace(first, bits=(4, 4), zeroes=True),
        replace(first, bits=(3, 2), group=0, x=F32, places=True),
    ]


def test_names_spell_the_kernel() -> None:
    assert DESC.name == "qcut_embed_codebook_sm90a_f16_b4_h128_nf16"
    assert replace(DESC, pairs=True, places=True).name == "qcut_embed_codebook_sm90a_f16_b4_pairs_h128_nf16_p"
    assert replace(DESC, bits=(4, 2), group=0, norms=F32, zeroes=True).name == (
        "qcut_embed_codebook_sm90a_f16_b42_nf32_z"
    )
    found = [*map(emit_embed_codebook, [*descs("sm_80"), *descs("sm_90a")])]
    assert found == [*map(emit_embed_codebook, [*descs("sm_80"), *descs("sm_90a")])]
    assert len({source.name for source in found}) == len(found)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_indices_are_read_alone_and_results_are_stored_whole(arch: str) -> None:
    texts = in_turns(lambda arch: [*map(emit_embed_codebook, descs(arch))], arch)
    by_name = {desc.name: desc for desc in descs(arch)}
    for source, binary in zip(texts, build(*texts), strict=True):
        desc = by_name[source.name]
        resources = binary.resources
        assert resources is not None
        assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0, desc.name
        assert resources.registers <= 64, desc.name
        assert resources.smem_bytes == (2048 if desc.pairs else 64 * len(desc.bits)), desc.name
        found = instructions(binary.cubin)
        stores = {name for name in found if name.startswith("STG")}
        assert {"128" in name for name in stores} == {True, not desc.zeroes}, desc.name
        assert any(name.startswith("SHFL") for name in found) == (desc.group > 16), desc.name
        assert not any(name.startswith("LDL") for name in found), desc.name


@pytest.mark.parametrize("k", [32, 160, 1280, 4096])
@pytest.mark.parametrize("rows", [1, 77, 8192])
def test_every_column_has_a_thread(k: int, rows: int) -> None:
    x, y, z = DESC.grid(rows, k)
    assert (x - 1) * DESC.block < rows * k // 16 <= x * DESC.block
    assert y == z == 1


@pytest.mark.parametrize(
    "changes",
    [{"x": DType.S8}, {"norms": BF16}, {"bits": (4, 4, 4)}, {"group": 16}, {"pairs": True, "bits": (4, 4)}],
    ids=[c.name for c in CONSTRAINTS],
)
def test_illegal_kernels_are_refused_by_name(changes: dict[str, Any], request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    with pytest.raises(EmitError, match=f"^qcut_embed_codebook_[a-z0-9_]+: {name}: "):
        replace(DESC, **changes)
