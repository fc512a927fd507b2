"""Packed indices against one long number, bit by bit."""

from __future__ import annotations

import pytest
import torch

from qcut.errors import ConfigError, DtypeError, ShapeError
from qcut.numerics.codebook.packing import BITS, pack, packed_bytes, unpack


@pytest.mark.parametrize("bits", BITS)
def test_packing_is_bitwise_and_comes_back(bits: int):
    for k in (1, 7, 8, 9, 64, 129):
        indices = torch.randint(0, 1 << bits, (3, k), generator=torch.Generator().manual_seed(k)).to(torch.uint8)
        packed = pack(indices, bits)
        assert packed.shape == (3, packed_bytes(k, bits))
        for row, expected in zip(packed.tolist(), indices.tolist(), strict=True):
            number = sum(index << (bits * i) for i, index in enumerate(expected))
            assert bytes(row) == number.to_bytes(len(row), "little")
        assert torch.equal(unpack(packed, bits, k), indices)


def test_refusals():
    with pytest.raises(ShapeError, match="an index is 4; 2 bits hold 0 to 3"):
        pack(torch.tensor([4], dtype=torch.uint8), 2)
    with pytest.raises(DtypeError, match="indices are int64"):
        pack(torch.tensor([1]), 2)
    with pytest.raises(ShapeError, match="2 bytes a row; 3 indices of 3 bits take 3"):
        unpack(torch.zeros(2, dtype=torch.uint8), 3, 3)
    with pytest.raises(ConfigError, match="indices of 1 bits; allowed: 2, 3, 4"):
        pack(torch.zeros(1, dtype=torch.uint8), 1)
