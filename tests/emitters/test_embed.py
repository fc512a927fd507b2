"""The kernel of embeddings as text and as a binary: names, parameters, refusals, widths of access."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qcut.emitters.core.source import DType, EmitError
from qcut.emitters.decoder.embed import CONSTRAINTS, EmbedRows, emit_embed
from tests.support.compiled import build, in_turns
from tests.support.sass import instructions

F16, BF16, F32, S8 = DType.F16, DType.BF16, DType.F32, DType.S8
DESC = EmbedRows(F16, F16, "sm_90a")


def descs(arch: str) -> list[EmbedRows]:
    types = [(x, table) for x in (F16, BF16, F32) for table in (x, S8)]
    return [
        EmbedRows(*t, arch, places, aligned, places)
        for t in types
        for places in (False, True)
        for aligned in (False, True)
    ]


def test_names_spell_the_kernel() -> None:
    assert DESC.name == "qcut_embed_sm90a_f16_f16"
    assert replace(DESC, table=S8, places=True, aligned=False).name == "qcut_embed_sm90a_f16_s8_p_u"
    assert replace(DESC, zeroes=True).name == "qcut_embed_sm90a_f16_f16_z"
    found = [*map(emit_embed, [*descs("sm_80"), *descs("sm_90a")])]
    assert found == [*map(emit_embed, [*descs("sm_80"), *descs("sm_90a")])]
    assert len({source.name for source in found}) == len(found)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_aligned_rows_move_sixteen_bytes_at_a_time(arch: str) -> None:
    by_name = {desc.name: desc for desc in descs(arch)}
    texts = in_turns(lambda arch: [emit_embed(desc) for desc in descs(arch)], arch)
    for source, binary in zip(texts, build(*texts), strict=True):
        desc = by_name[source.name]
        resources = binary.resources
        assert resources is not None
        assert resources.spill_store_bytes == resources.spill_load_bytes == resources.smem_bytes == 0, desc.name
        assert resources.registers <= 64, desc.name
        found = instructions(binary.cubin)
        stores = {name for name in found if name.startswith("STG")}
        if desc.aligned:
            assert {"128" in name for name in stores} == {True, not desc.zeroes}, desc.name
            assert not any(name.startswith(("LDG.E.U16", "LDG.E.U8", "LDG.E.S8")) for name in found), desc.name
        if arch == "sm_90a":
            assert "ACQBULK" in found, desc.name  # griddepcontrol.wait


@pytest.mark.parametrize("k", [1, 33, 172, 1280, 4096])
@pytest.mark.parametrize("rows", [1, 77, 8192])
def test_every_element_has_a_thread(k: int, rows: int) -> None:
    for desc in (DESC, EmbedRows(F32, S8, "sm_90a")):
        x, y, z = desc.grid(rows, k)
        threads = rows * -(-k // (128 // desc.x.bits))
        assert (x - 1) * desc.block < threads <= x * desc.block
        assert y == z == 1


@pytest.mark.parametrize("changes", [{"x": S8, "table": S8}, {"table": BF16}], ids=[c.name for c in CONSTRAINTS])
def test_illegal_kernels_are_refused_by_name(changes: dict[str, Any], request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    with pytest.raises(EmitError, match=f"^qcut_embed_[a-z0-9_]+: {name}: "):
        replace(DESC, **changes)
