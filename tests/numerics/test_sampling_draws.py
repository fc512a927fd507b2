"""Sampling: the statistics of what is drawn, and what a draw depends on."""

from __future__ import annotations

import math

import pytest
import torch

from qcut.numerics import sampling
from qcut.numerics.sampling import Sampling, sample, uniform
from tests.numerics.draws import CHI2, LOGITS_10, chi_square, draws, rows, softmax
from tests.support.oracles import FLOATS, NAN

# ── tokens, by their statistics ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("by", ["sequence", "position"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 4.0])
def test_tokens_follow_the_softmax(temperature, by):
    tokens = draws(LOGITS_10, Sampling(temperature, seed=11), 20000, by)
    assert chi_square(tokens, softmax(LOGITS_10, temperature, list(range(10)))) < CHI2[9]


def test_the_statistic_tells_temperatures_apart():
    tokens = draws(LOGITS_10, Sampling(1.0, seed=11), 20000)
    assert chi_square(tokens, softmax(LOGITS_10, 1.1, list(range(10)))) > CHI2[9]


def test_tokens_follow_the_softmax_of_the_top_k():
    tokens = draws(LOGITS_10, Sampling(0.8, top_k=5, seed=12), 20000)
    assert chi_square(tokens, softmax(LOGITS_10, 0.8, [2, 5, 8, 9, 0])) < CHI2[4]


def test_tokens_follow_the_softmax_of_the_top_p():
    p = softmax(LOGITS_10, 1.0, list(range(10)))
    assert p[2] + p[5] + p[8] < 0.76 < p[2] + p[5] + p[8] + p[9]
    tokens = draws(LOGITS_10, Sampling(1.0, top_p=0.76, seed=13), 20000)
    assert chi_square(tokens, softmax(LOGITS_10, 1.0, [2, 5, 8, 9])) < CHI2[3]


def test_top_p_is_of_what_top_k_keeps():
    p = softmax(LOGITS_10, 1.0, [2, 5, 8, 9])
    assert p[2] + p[5] < 0.75 < p[2] + p[5] + p[8]
    tokens = draws(LOGITS_10, Sampling(1.0, top_k=4, top_p=0.75, seed=14), 20000)
    assert chi_square(tokens, softmax(LOGITS_10, 1.0, [2, 5, 8])) < CHI2[2]


def test_every_token_of_a_uniform_distribution_is_reached():
    tokens = draws(torch.full((16,), -7.5), Sampling(0.9), 2000)
    assert chi_square(tokens, dict.fromkeys(range(16), 1 / 16)) < CHI2[15]
    assert tokens.unique().tolist() == list(range(16))


@pytest.mark.parametrize("vocabulary", [262_144, 200_003])
def test_a_large_vocabulary_of_equal_logits(vocabulary):
    logits = torch.full((1, vocabulary), 11.0).expand(24, -1)
    index = rows(24)
    got = sample(logits, Sampling(1.0, seed=9), index, index)
    u = uniform(9, index, index).double()
    assert torch.equal(got, (u * vocabulary).floor().long())
    assert got.max() > vocabulary * 0.8
    half = sample(logits, Sampling(1.0, top_p=0.5, seed=9), index, index)
    assert torch.equal(half, (u * math.ceil(vocabulary / 2)).floor().long())


def test_the_largest_vocabulary_does_not_overflow():
    logits = torch.zeros(1, sampling.MAX_VOCABULARY)
    for position in range(2):
        place = torch.tensor([0]), torch.tensor([position])
        got = sample(logits, Sampling(1.0), *place)
        assert got.item() == math.floor(uniform(0, *place).item() * 2**22)


# ── reproducible ─────────────────────────────────────────────────────────────────────────────────


def test_seeds_sequences_and_positions_reproduce_and_differ():
    logits, options = torch.randn(1, 50).expand(200, -1), Sampling(2.0, seed=5)
    index, zero = rows(200), torch.zeros(200, dtype=torch.int64)
    one = sample(logits, options, index, zero)
    torch.manual_seed(99)
    assert torch.equal(sample(logits, options, index, zero), one)
    for other in (
        sample(logits, Sampling(2.0, seed=6), index, zero),
        sample(logits, Sampling(2.0, seed=5 + 2**32), index, zero),
        sample(logits, options, index + 200, zero),
        sample(logits, options, index, zero + 1),
        sample(logits, options, zero, index),
    ):
        assert (other != one).sum() > 100


@pytest.mark.parametrize("options", [Sampling(1.5, seed=3), Sampling(1.0, top_k=20, top_p=0.8, seed=3)])
def test_a_row_does_not_depend_on_its_batch(options):
    logits = torch.randn(33, 1001)
    sequence, position = torch.randint(0, 1000, (2, 33))
    whole = sample(logits, options, sequence, position)
    order = torch.randperm(33)
    assert torch.equal(sample(logits[order], options, sequence[order], position[order]), whole[order])
    for row in range(33):
        part = slice(row, row + 1)
        assert torch.equal(sample(logits[part], options, sequence[part], position[part]), whole[part])


def test_logits_may_be_strided_and_stay_unchanged():
    logits, index, options = torch.randn(9, 130), rows(9), Sampling(1.5, top_k=50)
    expected = sample(logits, options, index, index)
    strided = torch.full((130, 18), NAN)[:, ::2].t()
    strided.copy_(logits)
    before = strided.clone()
    assert torch.equal(sample(strided, options, index, index), expected)
    assert torch.equal(strided, before)
    got = sample(logits.clone().requires_grad_(), options, index, index)
    assert torch.equal(got, expected)
    assert not got.requires_grad


@pytest.mark.parametrize("dtype", FLOATS)
def test_half_precision_logits_are_sampled_as_their_float32(dtype):
    logits, index = (torch.randn(100, 64) * 4).to(dtype), rows(100)
    for options in (Sampling(), Sampling(1.0, top_p=0.95, seed=8)):
        assert torch.equal(sample(logits, options, index, index), sample(logits.float(), options, index, index))


def test_nothing_is_read_on_the_host():
    """The meta device has no values: reading one, or a shape that depends on one, raises."""
    logits, index = torch.empty(3, 50, device="meta"), torch.empty(3, dtype=torch.int64, device="meta")
    for options in (Sampling(), Sampling(1.0), Sampling(0.5, top_k=7, top_p=0.9)):
        assert sample(logits, options, index, index).shape == (3,)
