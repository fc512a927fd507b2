"""Which codebooks give rows of one norm the same int8 values, and which are mirrored."""

from __future__ import annotations

import pytest
import torch

from qcut.numerics.codebook import layout, lloyd_max, pairs
from qcut.numerics.codebook.layout import Geometry
from qcut.numerics.codebook.products import has_one_table, is_mirrored_book, pack_book

GEOMETRY = Geometry(128, 128)


def tables(values: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """int8 ``[N, 16]``: the values of rows that each have one norm."""
    n = len(norms)
    indices = torch.arange(128, dtype=torch.uint8).remainder(16).expand(n, 128).contiguous()
    packed = layout.pack_norms(norms[:, None], layout.row_exponents(norms[:, None]), GEOMETRY)
    units = layout.pack_units(indices, 4, GEOMETRY)
    return layout.int8_weight(units, 4, packed, values, layout.fold_scales(packed, values))[:n, :16]


def test_one_table_serves_every_group_scale() -> None:
    every = torch.arange(0x0001, 0x7C00, 7, dtype=torch.int16).view(torch.float16)  # finite norms above 0
    books = [lloyd_max.codebook(4).half()]
    books += [torch.randn(16, generator=torch.Generator().manual_seed(seed)).half() for seed in range(6)]
    for book in books:
        assert has_one_table(book)
        found = tables(book, every)
        assert torch.equal(found, found[:1].expand_as(found))


def test_values_on_midpoints_have_no_single_table() -> None:
    assert not has_one_table(torch.arange(16.0) - 8)  # 4 · 127 / 8 = 63.5
    assert not has_one_table(torch.tensor([0.5, 127.0]))
    book = torch.tensor([*range(-7, 9)], dtype=torch.float16)
    norms = (torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 0.5).half()
    found = tables(book, norms)
    assert not torch.equal(found, found[:1].expand_as(found))  # what it is asked for


def changed(values: torch.Tensor, at: int, value: float) -> torch.Tensor:
    return values.index_fill(0, torch.tensor(at), value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mirrored_books_are_bitwise_symmetric(dtype: torch.dtype) -> None:
    book = lloyd_max.codebook(4)
    zeros = changed(changed(book, 7, -0.0), 8, 0.0)
    assert all(is_mirrored_book(pack_book(values, dtype)) for values in (book, zeros, book * 2.0**-20))
    others = [book.flip(0), book - 0.5, torch.arange(16.0) - 8, lloyd_max.codebook(3), pairs.codebook()]
    others += [changed(book, i, 2 * float(book[i])) for i in range(16)]
    others += [changed(zeros, 7, 0.0), changed(zeros, 8, -0.0), zeros.abs()]
    assert not any(is_mirrored_book(pack_book(values, dtype)) for values in others)
