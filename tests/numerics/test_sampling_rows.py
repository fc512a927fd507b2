"""Sampling by rows: settings of each row, penalties for the tokens before, log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from qcut.errors import ConfigError, ShapeError
from qcut.numerics.philox import key_words, philox, uniform
from qcut.numerics.sampling import Ban, History, Rows, Sampling, argmax, log_probabilities, penalized, sample
from tests.numerics.draws import CHI2, LOGITS_10, chi_square, draws, rows, softmax
from tests.support.oracles import INF, NAN

CPU = torch.device("cpu")
SETTINGS = (
    Sampling(),
    Sampling(1.0, seed=3),
    Sampling(0.7, top_k=5, seed=2**64 - 1),
    Sampling(1.3, top_p=0.8, seed=3),
    Sampling(0.9, min_p=0.2, seed=9),
    Sampling(2.0, top_k=7, top_p=0.9, min_p=0.05, seed=2**33 + 1),
)


# ── settings of each row ─────────────────────────────────────────────────────────────────────────


def test_rows_choose_as_they_would_alone() -> None:
    logits = torch.randn(len(SETTINGS), 50, generator=torch.Generator().manual_seed(1)) * 3
    logits[1, ::7] = NAN
    logits[2, 4] = -INF
    for position in range(40):
        sequences, positions = rows(len(SETTINGS)), torch.full((len(SETTINGS),), position)
        got = sample(logits, Rows.of(SETTINGS, CPU), sequences, positions)
        alone = [
            sample(row[None], each, sequences[i : i + 1], positions[i : i + 1])
            for i, (row, each) in enumerate(zip(logits, SETTINGS, strict=True))
        ]
        assert torch.equal(got, torch.cat(alone))


def test_greedy_rows_are_the_argmax() -> None:
    logits = torch.randn(3, 20)
    greedy = Rows.of([Sampling()] * 3, CPU)
    assert greedy.greedy
    assert torch.equal(sample(logits, greedy, rows(3), rows(3)), argmax(logits))
    assert sample(logits[:0], Rows.of([], CPU), rows(0), rows(0)).shape == (0,)


def test_keys_of_rows_are_keys() -> None:
    seeds = [0, 5, 2**32, 2**64 - 1]
    counters = torch.randint(0, 2**32, (4, 4))
    want = torch.stack([philox(counter, seed) for counter, seed in zip(counters, seeds, strict=True)])
    assert torch.equal(philox(counters, key_words(seeds, CPU)), want)
    want = torch.stack([uniform(seed, i, i) for seed, i in zip(seeds, rows(4), strict=True)])
    assert torch.equal(uniform(key_words(seeds, CPU), rows(4), rows(4)), want)
    with pytest.raises(ShapeError, match=r"key: found torch.int64 \(3, 2\); allowed: an integer, or int64 \(4, 2\)"):
        philox(counters, key_words(seeds[:3], CPU))
    with pytest.raises(ConfigError, match="seed -1"):
        key_words([0, -1], CPU)


def test_min_p_keeps_tokens_near_the_likeliest() -> None:
    p = softmax(LOGITS_10, 1.0, list(range(10)))
    kept = [token for token, share in p.items() if share >= 0.3 * p[2]]
    assert 2 < len(kept) < 9
    tokens = draws(LOGITS_10, Sampling(1.0, min_p=0.3, seed=21), 20000)
    assert chi_square(tokens, softmax(LOGITS_10, 1.0, kept)) < CHI2.get(len(kept) - 1, 44.811)
    assert draws(LOGITS_10, Sampling(1.0, min_p=1.0, seed=21), 50).unique().tolist() == [2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_p": -0.1}, r"min_p -0\.1; allowed: 0 \(keeps all\) to 1"),
        ({"min_p": NAN}, "min_p nan; allowed"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty 0\.0; allowed"),
        ({"repetition_penalty": INF}, "repetition_penalty inf; allowed"),
        ({"presence_penalty": NAN}, "presence_penalty nan; allowed: -100 to 100"),
        ({"frequency_penalty": 101.0}, r"frequency_penalty 101\.0; allowed"),
    ],
)
def test_refused_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)


# ── tokens before ────────────────────────────────────────────────────────────────────────────────


def penalized_oracle(row: list[float], options: Sampling, prompt: list[int], tokens: list[int]) -> list[np.float32]:
    """One row at a time, in numpy's float32."""
    found = []
    r, presence, frequency = map(
        np.float32, (options.repetition_penalty or 1, options.presence_penalty, options.frequency_penalty)
    )
    for token, value in enumerate(row):
        x, count = np.float32(value), tokens.count(token)
        if token in prompt or count:
            x = x / r if x > 0 else x * r
        x = x - frequency * np.float32(count)
        found.append(x - presence if count else x)
    return found


def test_penalties_are_the_oracles() -> None:
    generator = torch.Generator().manual_seed(2)
    options = [
        Sampling(repetition_penalty=1.3),
        Sampling(1.0, presence_penalty=0.7, frequency_penalty=-0.3),
        Sampling(repetition_penalty=0.6, presence_penalty=-1.1, frequency_penalty=0.37, seed=4),
        Sampling(),
    ]
    logits = torch.randn(4, 12, generator=generator) * 4
    prompts = torch.randint(12, (4, 3), generator=generator)
    tokens = torch.randint(12, (4, 6), generator=generator)
    history = History.empty(5, 12, CPU)
    history.start(1, torch.arange(12))  # a sequence that has left
    history.add(tokens[:, 0])
    for i, prompt in enumerate(prompts):
        history.start(i, prompt)
    for column in tokens.T:
        history.add(column)
    together = penalized(logits, Rows.of(options, CPU), history)
    for i, each in enumerate(options):
        want = penalized_oracle(logits[i].tolist(), each, prompts[i].tolist(), tokens[i].tolist())
        assert together[i].tolist() == [float(x) for x in want]
    history.move(2, 0)
    alone = penalized(logits[2:3], options[2], history)
    assert torch.equal(alone, together[2:3])
    got = sample(logits, Rows.of(options, CPU), rows(4), rows(4), history=History.empty(4, 12, CPU))
    assert torch.equal(got[3], argmax(logits)[3])


def test_penalties_need_the_tokens_before() -> None:
    with pytest.raises(ConfigError, match="penalties need the tokens before"):
        sample(torch.zeros(1, 4), Sampling(presence_penalty=1.0), rows(1), rows(1))


def test_a_penalty_moves_the_choice() -> None:
    logits, history = torch.tensor([[1.0, 0.9, -5.0]]), History.empty(1, 3, CPU)
    options = Sampling(frequency_penalty=0.06)
    found = []
    for _ in range(6):
        token = sample(logits, options, rows(1), rows(1), history)
        history.add(token)
        found.append(token.item())
    assert found == [0, 0, 1, 0, 1, 0]


# ── log-probabilities ────────────────────────────────────────────────────────────────────────────


def test_log_probabilities_are_of_the_softmax() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [-1.0, -INF, 3.0, 0.0]], dtype=torch.float16)
    found = log_probabilities(logits, torch.tensor([2, 0]), 3)
    assert found.tokens.tolist() == [[1, 3, 2], [2, 3, 0]]
    for i, row in enumerate(logits.double().tolist()):
        total = math.log(sum(math.exp(x) for x in row))
        assert found.chosen[i].item() == pytest.approx(row[[2, 0][i]] - total, abs=1e-6)
        want = [row[token] - total for token in found.tokens[i].tolist()]
        assert found.values[i].tolist() == pytest.approx(want, abs=1e-6)
    assert log_probabilities(logits, torch.tensor([2, 0]), 0).tokens.shape == (2, 0)


# ── biases ───────────────────────────────────────────────────────────────────────────────────────


def test_biases_are_added_before_penalties() -> None:
    logits, places = torch.randn(3, 9, generator=torch.Generator().manual_seed(3)), (rows(3), rows(3))
    options = [Sampling(logit_bias={4: 50.0}), Sampling(), Sampling(1.0, logit_bias={2: 100, 5: -100.0}, seed=1)]
    assert sample(logits, Rows.of(options, CPU), *places).tolist() == [4, int(logits[1].argmax()), 2]
    history = History.empty(3, 9, CPU)
    history.start(0, torch.tensor([4]))
    penalized_too = [Sampling(logit_bias={4: 50.0}, repetition_penalty=100.0), *options[1:]]
    assert int(sample(logits, Rows.of(penalized_too, CPU), *places, history)[0]) == int(
        (logits[0] + 50 * (torch.arange(9) == 4)).where(torch.arange(9) != 4, (logits[0, 4] + 50) / 100).argmax()
    )
    assert torch.equal(sample(logits, options[0], *places), torch.tensor([4] * 3))
    with pytest.raises(ConfigError, match="a bias for token 9; allowed: 0 to 8"):
        sample(logits, Sampling(logit_bias={9: 1.0}), *places)


def test_biased_draws_have_the_biased_probabilities() -> None:
    options = Sampling(1.0, seed=5, logit_bias={0: 2.0, 7: -1.5})
    biased = [x + {0: 2.0, 7: -1.5}.get(i, 0.0) for i, x in enumerate(LOGITS_10)]
    tokens = draws(LOGITS_10, options, 20000)
    want = softmax(biased, 1.0, list(range(10)))
    assert chi_square(tokens, want) < CHI2.get(9, 44.811)


def test_bans_end_at_their_position() -> None:
    logits = torch.arange(6.0).repeat(2, 1)
    bans = [(Ban((5,), 3), Ban((4,))), ()]
    rows_of = Rows.of([Sampling(), Sampling()], CPU, bans)
    found = [sample(logits, rows_of, rows(2), torch.full((2,), at)).tolist() for at in range(1, 5)]
    assert found == [[3, 5], [3, 5], [5, 5], [5, 5]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 2**63}, r"top_k 9223372036854775808; allowed: an integer of 0 \(keeps all\) to 2147483647"),
        ({"top_k": 10**5000}, "top_k an integer of 16610 bits"),
        ({"top_k": True}, "top_k True"),
        ({"top_k": 2.0}, r"top_k 2\.0"),
        ({"seed": 10**5000}, "seed an integer of 16610 bits"),
        ({"temperature": "1"}, "temperature '1'; allowed"),
        ({"temperature": 10**400}, "temperature an integer of"),
        ({"top_p": None}, "top_p None"),
        ({"presence_penalty": "x" * 500}, "presence_penalty 'x{59}; allowed"),
        ({"repetition_penalty": True}, "repetition_penalty True"),
        ({"logit_bias": [1, 2]}, r"logit_bias \[1, 2\]; allowed: numbers by token id"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias of token -1"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias of token '5'"),
        ({"logit_bias": {5: 101}}, "logit_bias of token 5 101; allowed: -100 to 100"),
        ({"logit_bias": {5: NAN}}, "logit_bias of token 5 nan"),
        ({"logit_bias": {5: None}}, "logit_bias of token 5 None"),
    ],
)
def test_numbers_outside_their_range_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)


def test_biases_are_a_copy() -> None:
    given = {3: 1.0}
    options = Sampling(logit_bias=given)
    given[10**6] = 2.0
    assert options.logit_bias == {3: 1.0}
    assert hash(options) == hash(Sampling(logit_bias={3: 2.0}))


def test_likeliest_tokens_are_those_of_a_stable_sort() -> None:
    logits = (torch.randn(6, 300, generator=torch.Generator().manual_seed(4)) * 2).round()
    logits[2] = 1.0
    logits[3, 7:] = -INF
    for top in (0, 1, 20, 300):
        found = log_probabilities(logits, torch.arange(6), top)
        order = logits.log_softmax(1).sort(dim=1, descending=True, stable=True)
        assert torch.equal(found.tokens, order.indices[:, :top])
        assert torch.equal(found.values, order.values[:, :top])
