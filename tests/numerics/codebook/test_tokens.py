"""Rotated tokens: the reference against the definition and in products with weights, and the kernels' operands."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from qcut.errors import ConfigError, DtypeError, ShapeError
from qcut.numerics.codebook import rotation
from qcut.numerics.codebook.layout import Geometry, from_blocks, to_blocks
from qcut.numerics.codebook.tokens import operands, rotate_tokens
from qcut.numerics.int8 import quantize_per_token_ref

SEEDS = (42, 1042)


def tokens(m: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m + k)).to(dtype)


def test_factors_are_powers_of_two_apart():
    """What lets a kernel make a short group's factor of the full group's, and `rotation.rotate`'s own of that."""

    def single(value: float) -> float:
        return struct.unpack("f", struct.pack("f", value))[0]

    for log in range(15):
        d = 2**log
        assert single(math.sqrt(d) / d) == single(d**-0.5)
        for last in (2**j for j in range(log)):
            assert single(math.sqrt(d) / last) == single(math.sqrt(d) / d) * (d // last)


@pytest.mark.parametrize(("k", "group"), [(128, 128), (96, 64), (1280, 1024), (40, 16), (64, 4096), (129, 128)])
def test_hadamard_is_the_rotation_of_each_group(k: int, group: int):
    x = tokens(5, k)
    geometry = Geometry(k, group)
    rows, scale = rotate_tokens(x, "hadamard", group, SEEDS, torch.float32)
    assert scale is None
    assert rows.shape == (5, 2 * geometry.k_padded)
    used = torch.zeros(geometry.k_padded, dtype=torch.bool)
    for number, seed in enumerate(SEEDS):
        for first, d in rotation.groups(k, geometry.full):
            place = first // geometry.full * geometry.padded_group
            used[place : place + d] = True
            # Bitwise: a short group's factor differs by a power of two.
            expected = rotation.rotate(x[:, first : first + d], "hadamard", seed + first)
            if d != geometry.full:
                double = rotation.walsh_hadamard(x[:, first : first + d].double() * rotation.signs(d, seed + first))
                expected = double * (math.sqrt(geometry.full) / d)
                tolerance = 2.0**-20 * expected.abs().max()
                piece = rows[:, number * geometry.k_padded + place :][:, :d]
                assert bool(((piece.double() - expected).abs() <= tolerance).all())
            else:
                assert torch.equal(rows[:, number * geometry.k_padded + place :][:, :d], expected)
    assert not bool(rows.view(5, 2, -1)[:, :, ~used].any())


@pytest.mark.parametrize("kind", ["hadamard", "qr"])
@pytest.mark.parametrize(("k", "group"), [(96, 64), (320, 128)])
def test_products_divide_by_one_root(kind: str, k: int, group: int):
    """``sum_g norm / sqrt(d_g) (x_g Pi_g^T) c_g`` is the product of rotated tokens over ``sqrt(d)``."""
    geometry = Geometry(k, group)
    x, c = tokens(3, k).double(), tokens(2, k).double()
    wanted = torch.zeros(3, 2, dtype=torch.float64)
    for first, d in rotation.groups(k, group):
        columns = slice(first, first + d)
        wanted += rotation.rotate(x[:, columns], kind, 42 + first) @ c[:, columns].t() / d**0.5
    rows, _ = rotate_tokens(x.float(), kind, group, (42,), torch.float32)
    padded = torch.zeros(2, geometry.k_padded, dtype=torch.float64)
    padded[:, geometry.columns()] = c
    got = rows.double() @ padded.t() / group**0.5
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_residual_stages_share_one_quantized_row():
    x = tokens(6, 320, torch.float16)
    x[1] = 0
    x[2, 7] = float("nan")
    x[3, 300] = float("inf")
    rows, _ = rotate_tokens(x, "hadamard", 64, SEEDS, torch.float32)
    q, scale = rotate_tokens(x, "hadamard", 64, SEEDS, torch.int8)
    expected, expected_scale = quantize_per_token_ref(rows, rows.shape[1])
    assert torch.equal(q, expected)
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)
    assert scale is not None
    assert scale.isnan().tolist() == [False, False, True, True, False, False]
    assert scale[1] == 1
    assert not bool(q[2:4].any())


@pytest.mark.parametrize(("dtype", "out"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)])
def test_sixteen_bits_round_once(dtype: torch.dtype, out: torch.dtype):
    x = tokens(4, 200, dtype)
    for kind in ("qr", "none"):
        rows, _ = rotate_tokens(x, kind, 96, (1,), torch.float32)
        got, _ = rotate_tokens(x, kind, 96, (1,), out)
        assert torch.equal(got, rows.to(out))
    assert torch.equal(rows[:, Geometry(200, 96).columns()], x.float())


def test_rows_become_blocks_and_come_back():
    for out in (torch.float16, torch.int8):
        rows, _ = rotate_tokens(tokens(11, 200, torch.float16), "qr", 96, SEEDS, out)
        assert torch.equal(from_blocks(to_blocks(rows), 11), rows)


def test_sign_bits_follow_memory():
    k, group = 136, 32
    words = operands("hadamard", group, k, SEEDS, torch.float16)
    assert (words.dtype, tuple(words.shape)) == (torch.int32, (2, 8))
    bits = (words[:, :, None] >> torch.arange(32) & 1).flatten(1)
    for number, seed in enumerate(SEEDS):
        for first in range(0, k, group):
            d = min(group, k - first)
            assert torch.equal(1 - 2 * bits[number, first : first + d].float(), rotation.signs(d, seed + first))
        assert not bool(bits[number, k:].any())
    small = operands("hadamard", 4, 8, SEEDS, torch.float16)
    assert bool((small.view(2, -1) >> 4 == 0).all())  # groups of 4 lie 32 columns apart


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matrices_hold_the_factor(dtype: torch.dtype):
    k, group = 100, 37
    matrices = operands("qr", group, k, SEEDS, dtype)
    assert (matrices.dtype, tuple(matrices.shape)) == (dtype, (2, 3, 48, 48))
    for number, seed in enumerate(SEEDS):
        for g, (first, d) in enumerate(rotation.groups(k, group)):
            exact = rotation.haar(d, seed + first).double() * math.sqrt(group / d)
            assert torch.equal(matrices[number, g, :d, :d], exact.to(dtype))
            beyond = matrices[number, g].clone()
            beyond[:d, :d] = 0
            assert not bool(beyond.any())


def test_no_rotation_reads_nothing():
    assert operands("none", 128, 256, (0,), torch.float16).numel() == 0


def test_no_tokens():
    rows, scale = rotate_tokens(torch.empty(0, 64), "hadamard", 64, (1,), torch.float16)
    assert rows.shape == (0, 128)
    assert scale is None


def test_refusals():
    x = tokens(2, 96)
    with pytest.raises(ShapeError, match="tokens are"):
        rotate_tokens(x[0], "none", 96, (0,), torch.float16)
    with pytest.raises(DtypeError, match="float64"):
        rotate_tokens(x.double(), "none", 96, (0,), torch.float16)
    with pytest.raises(DtypeError, match="int16"):
        rotate_tokens(x, "none", 96, (0,), torch.int16)
    with pytest.raises(ConfigError, match="powers of two"):
        rotate_tokens(x, "hadamard", 96, (0,), torch.float16)
    with pytest.raises(ConfigError, match="rotation 'dct'"):
        rotate_tokens(x, "dct", 96, (0,), torch.float16)
    with pytest.raises(ConfigError, match="no seeds"):
        operands("qr", 96, 96, (), torch.float16)
    with pytest.raises(DtypeError, match=r"matrices of torch\.float32"):
        operands("qr", 96, 96, (0,), torch.float32)
