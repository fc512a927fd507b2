"""The codebook of pairs: signs, indices in two columns, the nearest pair, and the best under a metric."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qcut.errors import ConfigError, ShapeError
from qcut.numerics.codebook import layout, packing, pairs, products
from qcut.numerics.codebook.layout import Geometry
from qcut.numerics.codebook.quantizer import dequantize, quantize
from tests.support.oracles import normal

BOOK = pairs.codebook()


def test_index_bits_are_signs_and_a_point():
    assert BOOK.shape == (256, 2)
    assert (BOOK[:64] > 0).all()
    for index in range(256):
        signs = torch.tensor([-1.0 if index & 64 else 1.0, -1.0 if index & 128 else 1.0])
        assert torch.equal(BOOK[index], BOOK[index & 63] * signs)
    assert pairs.are_symmetric(BOOK)
    for place, number in ((3, 0.5), (200, 0.5), (0, float("nan")), (0, -1.0)):
        other = BOOK.clone()
        other[place, 0] = number
        assert not pairs.are_symmetric(other)


def test_a_packed_byte_is_an_index():
    joined = torch.arange(256, dtype=torch.uint8).view(4, 64)
    indices = pairs.split(joined)
    assert indices.shape == (4, 128)
    assert torch.equal(pairs.join(indices), joined)
    assert torch.equal(packing.pack(indices, 4), joined)
    assert torch.equal(pairs.look_up(BOOK, indices), BOOK[joined.long()].flatten(1))
    single = torch.linspace(-1, 1, 16)
    assert torch.equal(pairs.look_up(single, indices), single[indices.long()])


def test_the_nearest_of_all_pairs():
    points = 1.5 * normal(3000, 2)
    found = pairs.nearest(points, BOOK)
    distances = (points.double()[:, None] - BOOK.double()).square().sum(2)
    assert torch.equal(found.long(), distances.argmin(1))
    assert torch.equal(pairs.nearest(points.view(30, 100, 2), BOOK), found.view(30, 100))
    assert torch.equal(pairs.nearest(BOOK, BOOK), torch.arange(256, dtype=torch.uint8))


@pytest.mark.parametrize("spread", [0.05, 1.5, 40.0])
def test_squares_leave_out_no_point(spread: float):
    points = torch.cat((spread * normal(9000, 2), BOOK, (BOOK[:-1] + BOOK[1:]) / 2))
    book = BOOK if spread > 1 else pairs.with_signs(normal(64, 2, seed=7).abs() ** 3 + 1e-3)
    found = pairs.nearest(points, book)
    pieces = [pairs.nearest(part, book) for part in points.split(1000)]  # few are compared with all
    assert torch.equal(found, torch.cat(pieces))


def test_the_best_under_a_metric():
    wanted, scale = normal(500, 2), 0.2 + normal(500, 1, seed=2)[:, 0].abs()
    root = normal(500, 2, 2, seed=3)
    metric = root @ root.mT + 0.05 * torch.eye(2)
    given = torch.stack((metric[:, 0, 0], metric[:, 0, 1], metric[:, 1, 1]), 1)
    left = (wanted[:, None] - scale[:, None, None] * BOOK).double()
    errors = torch.einsum("rca,rab,rcb->rc", left, metric.double(), left)
    found = errors.gather(1, pairs.best(wanted, scale, given, BOOK)[:, None])[:, 0]
    # float32 may take the second best of two that are equal except for rounding.
    assert (found <= errors.amin(1) * (1 + 1e-4) + 1e-6).all()


def test_points_move_into_their_cells():
    points, start = 1.5 * normal(2000, 2), torch.randint(0, 256, (2000,), generator=torch.Generator().manual_seed(1))
    for share in (0.25, 0.9):
        moved = pairs.toward(start.to(torch.uint8), points, BOOK, share)
        assert torch.equal(pairs.nearest(moved, BOOK).long(), start)
        pair = BOOK[start]
        along = ((moved - pair) * (points - pair)).sum(1) / (points - pair).square().sum(1)
        torch.testing.assert_close(moved, pair + along[:, None] * (points - pair), rtol=0, atol=1e-5)
        # A point that is well inside stays.
        near = pair + 1e-3 * (points - pair)
        torch.testing.assert_close(pairs.toward(start.to(torch.uint8), near, BOOK, share), near, rtol=0, atol=1e-6)


def test_spacing():
    distances = (BOOK[:, None] - BOOK).norm(dim=2) + 9 * torch.eye(256)
    assert pairs.spacing(BOOK) == pytest.approx(float(distances.min()), rel=1e-5)


@pytest.mark.parametrize(("kind", "k", "group_size"), [("hadamard", 320, 128), ("qr", 200, 72), ("hadamard", 256, 256)])
def test_weights_lose_less_than_with_single_values(kind, k, group_size):
    weight = normal(200, k)
    weight[7] = 0
    options = {"group_size": group_size, "kind": kind}
    single, double = (quantize(weight, 4, in_pairs=in_pairs, **options) for in_pairs in (False, True))
    assert double.values.shape == (256, 2)
    errors = [(dequantize(q) - weight).square().mean() for q in (single, double)]
    assert 0.82 < errors[1] / errors[0] < 0.88
    assert not dequantize(double)[7].any()


def test_odd_groups_and_other_widths_are_refused():
    with pytest.raises(ConfigError, match=r"layer 'x': groups of 15 of 45 columns; pairs take even numbers"):
        quantize(normal(4, 45), group_size=15, kind="qr", in_pairs=True, layer="x")
    with pytest.raises(ConfigError, match=r"groups of 128 of 301 columns; pairs take even numbers"):
        quantize(normal(4, 301), kind="qr", in_pairs=True)
    with pytest.raises(ConfigError, match=r"layer 'x': pairs of 3 bits a value; allowed: 4"):
        quantize(normal(4, 32), 3, in_pairs=True, layer="x")
    q = quantize(normal(4, 32), in_pairs=True)
    q.indices[0, 0] = 16
    with pytest.raises(ShapeError, match=r"an index is 16; the codebook has 16 values"):
        dequantize(q)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int8_weights(group):
    """Integers of a factor in float16; the halves of the definition, one by one."""
    geometry = Geometry(256, group)
    indices = torch.randint(0, 16, (40, 256), generator=torch.Generator().manual_seed(group)).to(torch.uint8)
    norms = (normal(40, geometry.groups).abs() + 0.01).half()
    norms[3], norms[4, 0] = 0, 60000
    values = BOOK.half()
    packed = layout.pack_norms(norms, layout.row_exponents(norms), geometry)
    units, fold = layout.pack_units(indices, 4, geometry), layout.fold_scales(packed, values)
    q = layout.int8_weight(units, 4, packed, values, fold)[:40]
    relative = layout.unpack_norms(packed)[:40]
    factor = (relative.float() * fold[:40, None]).half().repeat_interleave(group, 1)
    # Kernels add 1.5 * 2**10 to the product and round once to float16, as NumPy does; torch would round to float32 too.
    sums = (pairs.look_up(values, indices).double() * factor.double() + 1536).numpy().astype(np.float16)
    assert torch.equal(q, torch.from_numpy(sums.astype(np.int32) - 1536).to(torch.int8))
    assert int(q.abs().amax()) <= 127
    assert int(q[5].abs().amax()) > 90
    assert not q[3].any()


def test_a_book_goes_to_kernels_without_signs():
    for dtype in (torch.float16, torch.bfloat16):
        book = products.pack_book(BOOK, dtype)
        assert len(book) == 64
        assert products.is_pair_book(book)
        assert torch.equal(products.unpack_book(book, dtype, torch.device("cpu")), BOOK.to(dtype))
        word = book[9] & 0xFFFFFFFF
        halves = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.uint16).view(dtype)
        assert torch.equal(halves, BOOK[9].to(dtype))
    assert not products.is_pair_book(products.pack_book(torch.linspace(-1, 1, 16), torch.float16))
