"""Rotations against Sylvester's matrix, products that they keep, and themselves on single groups."""

from __future__ import annotations

import pytest
import torch

from qcut.errors import ConfigError
from qcut.numerics.codebook import rotation
from tests.support.oracles import normal


def test_walsh_hadamard_is_sylvesters_matrix():
    matrix = torch.ones(1, 1)
    for d in (1, 2, 4, 8, 16, 32, 64, 128):
        x = torch.randint(-8, 9, (3, d), generator=torch.Generator().manual_seed(d)).float()
        assert torch.equal(rotation.walsh_hadamard(x), x @ matrix)
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))


@pytest.mark.parametrize("kind", rotation.KINDS)
def test_rotations_keep_products_and_come_back(kind: rotation.Kind):
    x, w = normal(5, 64).double(), normal(7, 64, seed=1).double()
    rotated = rotation.rotate(x, kind, 3)
    torch.testing.assert_close(rotated @ rotation.rotate(w, kind, 3).t(), x @ w.t(), rtol=0, atol=2e-5)
    torch.testing.assert_close(rotation.rotate_back(rotated, kind, 3), x, rtol=0, atol=5e-6)
    assert not torch.equal(rotated, rotation.rotate(x, kind, 4))


@pytest.mark.parametrize(("kind", "k", "group_size"), [("hadamard", 320, 128), ("qr", 300, 128), ("hadamard", 64, 999)])
def test_groups_rotate_as_they_do_alone(kind: rotation.Kind, k: int, group_size: int):
    x = normal(5, k)
    for together, alone in (
        (rotation.rotate_groups, rotation.rotate),
        (rotation.rotate_groups_back, rotation.rotate_back),
    ):
        parts = [alone(x[:, f : f + d], kind, 9 + f) for f, d in rotation.groups(k, group_size)]
        assert torch.equal(together(x, kind, group_size, 9), torch.cat(parts, 1))


@pytest.mark.parametrize("kind", ["hadamard", "qr", "none"])
def test_rotating_back_by_operands_made_before(kind: rotation.Kind):
    for k, group_size in ((320, 128), (96, 64), (256, 64), (64, 999)) if kind == "hadamard" else ((300, 128), (80, 80)):
        x = normal(5, k)
        operands = rotation.back_operands(k, kind, group_size, 9)
        back = rotation.rotate_groups_back_by(x, kind, group_size, operands)
        if kind == "none":
            assert back is x
            continue
        expected = rotation.rotate_groups_back(x, kind, group_size, 9)
        torch.testing.assert_close(back, expected, rtol=0, atol=0 if kind == "hadamard" else 2e-6)
        assert torch.equal(rotation.rotate_groups_back_by(x[:0], kind, group_size, operands), x[:0])


def test_haar_matrices_are_kept_within_their_budget(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rotation, "_haar_cache", {})
    monkeypatch.setattr(rotation, "_HAAR_BYTES", 3 * 4 * 16**2)
    kept = [rotation.haar(16, seed) for seed in range(3)]
    assert rotation.haar(16, 0) is kept[0]
    rotation.haar(16, 3)  # pushes out 1, the one not used for longest
    assert list(rotation._haar_cache) == [(16, 2), (16, 0), (16, 3)]
    assert torch.equal(rotation.haar(16, 1), kept[1])
    assert rotation.haar(64, 0).shape == (64, 64)  # over the budget by itself
    assert list(rotation._haar_cache) == [(64, 0)]


def test_rotations_refuse():
    with pytest.raises(ConfigError, match="Hadamard rotation of 96 columns; allowed: powers of two"):
        rotation.rotate(torch.zeros(1, 96), "hadamard", 0)
    with pytest.raises(ConfigError, match="rotation 'givens'"):
        rotation.rotate(torch.zeros(1, 2), "givens", 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="group_size is 0"):
        rotation.groups(8, 0)
