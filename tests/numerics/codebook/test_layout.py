"""The memory layout of packed weights, bit by bit, and single rows out of it."""

from __future__ import annotations

import pytest
import torch

from qcut.errors import ConfigError, ShapeError
from qcut.numerics.codebook.layout import Geometry, pack_norms, pack_units, unpack_norms, unpack_rows, unpack_units


def index_in(unit: list[int], bits: int, row: int, column: int) -> int:
    """An index out of the bytes of a unit, by the description of the layout: ``mma.m16n8k16``'s first operand."""
    g, upper_row = row % 8, row // 8
    word, right_half, t, odd = column // 16, column % 16 // 8, column % 8 // 2, column % 2
    byte_of_word, lane = right_half + 2 * upper_row, 4 * g + t
    if bits == 4:
        return unit[512 * (word // 4) + 16 * lane + 4 * (word % 4) + byte_of_word] >> 4 * odd & 15
    index = unit[16 * lane + 4 * (word // 2) + byte_of_word] >> 4 * odd + 2 * (word % 2) & 3
    if bits == 3:
        index |= (unit[512 + 8 * lane + 4 * (word // 4) + byte_of_word] >> 4 * odd + word % 4 & 1) << 2
    return index


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_units_are_as_described(bits: int):
    indices = torch.randint(0, 1 << bits, (16, 128), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    units = pack_units(indices, bits, Geometry(128, 128))
    assert not units[1:].any()
    unit = units[0, 0].tolist()
    assert [[index_in(unit, bits, r, c) for c in range(128)] for r in range(16)] == indices.tolist()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_all_rows_and_single_rows_come_back(bits: int):
    generator = torch.Generator().manual_seed(bits)
    for size in (16, 64, 100, 300):
        geometry = Geometry(300, size)
        indices = torch.randint(0, 1 << bits, (70, 300), generator=generator).to(torch.uint8)
        units = pack_units(indices, bits, geometry)
        assert torch.equal(unpack_units(units, bits, 70, geometry), indices)
        for rows in (
            torch.randperm(70, generator=generator),
            torch.tensor([3, 3]),
            torch.tensor([], dtype=torch.int64),
        ):
            unpacked = unpack_rows(units, bits, rows)
            assert unpacked.shape == (len(rows), geometry.k_padded)
            assert torch.equal(unpacked[:, geometry.columns()], indices[rows])


@pytest.mark.parametrize(
    ("k", "group", "kind", "slot", "padded"),
    [
        (300, 16, "none", 16, 16),
        (300, 5, "none", 16, 16),
        (12, 128, "none", 16, 16),
        (300, 17, "none", 32, 32),
        (300, 128, "none", 128, 128),
        (300, 16, "hadamard", 32, 32),
        (300, 16, "qr", 32, 32),
    ],
)
def test_slots_of_groups_with_and_without_rotation(k: int, group: int, kind: str, slot: int, padded: int):
    geometry = Geometry(k, group, kind)
    assert (geometry.slot, geometry.padded_group) == (slot, padded)
    last = -(-(k - (geometry.groups - 1) * geometry.full) // slot) * slot
    assert geometry.k_padded == -(-((geometry.groups - 1) * padded + last) // 128) * 128


@pytest.mark.parametrize("group", [5, 16])
def test_slots_of_sixteen_columns_come_back(group: int):
    generator = torch.Generator().manual_seed(group)
    geometry = Geometry(300, group, "none")
    assert geometry.in_order == (group == 16)
    indices = torch.randint(0, 16, (70, 300), generator=generator).to(torch.uint8)
    assert torch.equal(unpack_units(pack_units(indices, 4, geometry), 4, 70, geometry), indices)
    norms = torch.rand(70, geometry.groups, generator=generator).half()
    packed = pack_norms(norms, torch.ones(70), geometry)
    assert packed.shape == (8, geometry.units, 8, 8, 2)
    rows = unpack_norms(packed)[:70].repeat_interleave(16, 1)[:, geometry.columns()]
    assert torch.equal(rows, norms.repeat_interleave(group, 1)[:, :300])


def test_refusals():
    geometry = Geometry(300, 64)
    with pytest.raises(ConfigError, match="indices of 5 bits; allowed: 2, 3, 4"):
        pack_units(torch.zeros(1, 300, dtype=torch.uint8), 5, geometry)
    with pytest.raises(ShapeError, match="indices have 299 columns; the geometry has 300"):
        pack_units(torch.zeros(1, 299, dtype=torch.uint8), 4, geometry)
    with pytest.raises(ShapeError, match=r"units have shape \[4, 3, 512\]; allowed: \[4, 3, 1024\]"):
        unpack_units(torch.zeros(4, 3, 512, dtype=torch.uint8), 4, 5, geometry)
    with pytest.raises(ConfigError, match="K is 0"):
        Geometry(0, 1)
