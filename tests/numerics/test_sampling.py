"""Sampling: published random numbers, options, and tokens against an oracle in Python's integers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from qcut.errors import ConfigError, DtypeError, ShapeError
from qcut.numerics import sampling
from qcut.numerics.philox import philox, uniform
from qcut.numerics.sampling import Sampling, argmax, sample
from tests.numerics.draws import CHI2, chi_square, draws, rows
from tests.support.oracles import F32, FLOATS, INF, NAN

# ── random numbers ───────────────────────────────────────────────────────────────────────────────

KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox_oracle(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        high = [(0xD2511F53 * c[0]) >> 32, (0xCD9E8D57 * c[2]) >> 32]
        low = [0xD2511F53 * c[0] % 2**32, 0xCD9E8D57 * c[2] % 2**32]
        c = [high[1] ^ c[1] ^ k[0], low[1], high[0] ^ c[3] ^ k[1], low[0]]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    low, high = words(key)
    got = philox(torch.tensor(words(counter)), high << 32 | low)
    assert got.dtype is torch.int64
    assert got.tolist() == words(expected)
    assert philox_oracle(words(counter), words(key)) == words(expected)


def test_philox_of_many_counters_matches_whole_products():
    counters = torch.randint(0, 2**32, (5, 40, 4))
    counters[0] |= 0xFFFF0000  # carries from the low halves
    key = 0xFEDCBA98_76543210
    expected = [[philox_oracle(c, [0x76543210, 0xFEDCBA98]) for c in plane] for plane in counters.tolist()]
    assert philox(counters, key).tolist() == expected


def test_philox_takes_words_modulo_two_to_the_32():
    counters = torch.randint(0, 2**32, (8, 4))
    assert torch.equal(philox(counters - 2**32, 7), philox(counters, 7))
    assert torch.equal(philox(counters + 2**40, 7), philox(counters, 7))


def test_philox_refuses_other_counters():
    with pytest.raises(DtypeError, match=r"counter: found torch\.int32; allowed: torch\.int64"):
        philox(torch.zeros(4, dtype=torch.int32), 0)
    for shape in ((), (3,), (4, 5)):
        with pytest.raises(ShapeError, match=r"allowed: \[\.\.\., 4\]"):
            philox(torch.zeros(shape, dtype=torch.int64), 0)


def test_uniform_is_24_bits_of_the_philox_counter():
    assert uniform(0, torch.tensor(0), torch.tensor(0)).item() == 0x6627E8 / 2**24
    sequence, position = torch.randint(0, 2**32, (2, 6, 50))
    got = uniform(2**63 + 5, sequence, position)
    assert got.dtype is torch.float32
    assert got.shape == sequence.shape
    for s, p, u in zip(sequence.flatten().tolist(), position.flatten().tolist(), got.flatten().tolist(), strict=True):
        assert u == (philox_oracle([p, s, 0, 0], [5, 2**31])[0] >> 8) / 2**24


@pytest.mark.parametrize("by", ["seed", "sequence", "position"])
def test_uniform_fills_the_unit_interval(by):
    index, zero = rows(20000), torch.zeros(20000, dtype=torch.int64)
    if by == "seed":
        got = torch.cat([uniform(seed, zero[:1], zero[:1]) for seed in range(1000)])
    else:
        got = uniform(3, *((index, zero) if by == "sequence" else (zero, index)))
    assert got.min() >= 0
    assert got.max() < 1
    assert chi_square((got * 16).long(), dict.fromkeys(range(16), 1 / 16)) < CHI2[15]


# ── options ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, r"temperature -0\.5; allowed: 0 \(greedy\), or"),
        ({"temperature": INF}, "temperature inf; allowed"),
        ({"temperature": NAN}, "temperature nan; allowed"),
        ({"temperature": 1e-39}, "temperature 1e-39; allowed"),
        ({"temperature": 3.5e38}, r"temperature 3\.5e\+38; allowed"),
        ({"top_k": -1}, "top_k -1; allowed: an integer of 0 \\(keeps all\\) to 2147483647"),
        ({"top_k": 2.0}, r"top_k 2\.0; allowed"),
        ({"top_p": 0.0}, r"top_p 0\.0; allowed: 0 < top_p <= 1"),
        ({"top_p": 1.5}, r"top_p 1\.5; allowed"),
        ({"top_p": NAN}, "top_p nan; allowed"),
        ({"seed": -1}, r"seed -1; allowed: an integer in \[0, 2\*\*64\)"),
        ({"seed": 2**64}, "seed 18446744073709551616; allowed"),
        ({"seed": 1.0}, r"seed 1\.0; allowed"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_refused_seeds(seed):
    zero = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ConfigError, match="seed"):
        uniform(seed, zero, zero)
    with pytest.raises(ConfigError, match="seed"):
        philox(torch.zeros(4, dtype=torch.int64), seed)


def test_the_defaults_are_greedy_and_extremes_are_allowed():
    assert Sampling() == Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    assert Sampling().greedy
    assert Sampling(temperature=0).greedy
    largest = torch.finfo(torch.float32).max
    for options, reached in (
        (Sampling(2.0**-126), [1, 2]),
        (Sampling(largest), [0, 1, 2]),
        (Sampling(largest, top_p=5e-324, seed=2**64 - 1), [1]),
    ):
        assert not options.greedy
        assert draws(torch.tensor([-3.0, 1.0, 1.0, -INF]), options, 100).unique().tolist() == reached
    assert hash(Sampling(0.5)) == hash(Sampling(0.5))


@pytest.mark.parametrize("options", [Sampling(), Sampling(1.0)])
def test_refused_tensors(options):
    logits, good = torch.zeros(3, 5), rows(3)
    for bad in (torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.complex64)):
        with pytest.raises(DtypeError, match="logits: found"):
            sample(bad, options, good, good)
    for bad in (torch.zeros(5), torch.zeros(3, 0), torch.zeros(1, 3, 5), torch.zeros(1).expand(3, 2**22 + 1)):
        with pytest.raises(ShapeError, match=r"allowed: \[B, V\], V in \[1, 4194304\]"):
            sample(bad, options, good, good)
    for place, name in ((0, "sequence"), (1, "position")):
        for bad, error in ((good.int(), DtypeError), (rows(2), ShapeError), (good[:, None], ShapeError)):
            with pytest.raises(error, match=f"{name}: found"):
                sample(logits, options, *((bad, good) if place == 0 else (good, bad)))
    with pytest.raises(ShapeError, match="position: found"):
        uniform(0, good, rows(4))


# ── the largest logit ────────────────────────────────────────────────────────────────────────────

ROWS_AND_ARGMAX = [
    ([1.0, 3.0, 2.0, 3.0], 1),
    ([0.0, 0.0, 0.0, 0.0], 0),
    ([-1.0, -0.0, 0.0, -2.0], 1),
    ([NAN, -5.0, NAN, -4.0], 3),
    ([NAN, -INF, NAN, -INF], 1),
    ([NAN, NAN, NAN, NAN], 0),
    ([-INF, -INF, -INF, -INF], 0),
    ([NAN, 2.0, INF, INF], 2),
    ([-INF, -INF, -60000.0, -INF], 2),
]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_argmax_takes_the_lowest_index_and_no_nan(dtype):
    logits = torch.tensor([row for row, _ in ROWS_AND_ARGMAX], dtype=dtype)
    got = argmax(logits)
    assert got.dtype is torch.int64
    assert got.tolist() == [index for _, index in ROWS_AND_ARGMAX]
    index = rows(len(logits))
    assert torch.equal(sample(logits, Sampling(), index, index), got)
    for options in (Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-9), Sampling(1.0, top_k=3, top_p=1e-3)):
        assert torch.equal(sample(logits, options, index, index), got), options


def test_limits_of_the_options_are_the_argmax():
    logits = torch.randn(64, 777)
    index = rows(64)
    for options in (Sampling(1e-6), Sampling(2.0**-126), Sampling(5.0, top_k=1), Sampling(5.0, top_p=1e-4)):
        assert torch.equal(sample(logits, options, index, index), logits.argmax(1)), options


def test_infinite_largest_logit_gives_the_argmax():
    for row, index in ROWS_AND_ARGMAX:
        if not math.isfinite(row[index]):
            assert set(draws(torch.tensor(row), Sampling(3.0), 50).tolist()) == {index}, row


def test_no_rows_and_one_token():
    none = rows(0)
    for options in (Sampling(), Sampling(1.0, top_k=2, top_p=0.5)):
        assert sample(torch.zeros(0, 7), options, none, none).shape == (0,)
        assert sample(torch.tensor([[-3.0], [NAN]]), options, rows(2), rows(2)).tolist() == [0, 0]


# ── weights ──────────────────────────────────────────────────────────────────────────────────────


def test_weights_are_the_exponential_to_two_ulp():
    d = -torch.linspace(0, 40, 400_001)
    got = sampling._weights(d).numpy()
    exact = np.exp(d.double().numpy()) * 2.0**40
    ulp = 2.0 ** (np.floor(np.log2(exact)) - 23)
    assert (got <= exact + 2 * ulp).all()
    assert (got > exact - 2 * ulp - 1).all()  # the floor takes less than 1
    assert (np.diff(got) <= 0).all()
    assert got[0] == 2**40
    assert got[-1] == 0


def test_weights_of_nothing_probable_are_zero():
    assert sampling._weights(torch.tensor([-27.7, -28.0, -1e30, -INF])).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("total", [1, 2**24 - 1, 2**40, 2**58, 2**62 - 1, 2**62])
def test_shares_are_exact_quotients(total):
    for parts in (0, 1, 3, 2**23 + 1, 2**24 - 1, 2**24):
        exact = Fraction(total * parts, 2**24)
        for rounding, expected in ((0, math.floor(exact)), (2**24 - 1, math.ceil(exact))):
            for factor in (parts, torch.tensor([parts])):
                assert sampling._share(torch.tensor([total]), factor, rounding).item() == expected


# ── tokens, against an oracle in Python's integers ───────────────────────────────────────────────


def weight_oracle(d: F32) -> int:
    """exp, one numpy float32 operation at a time, and the fixed point by exact fractions."""
    if d < -28:
        return 0
    n = np.rint(d * F32(1 / math.log(2)))
    r = d - n * F32(float.fromhex("0x1.62e4p-1")) - n * F32(float.fromhex("0x1.7f7d1cp-20"))
    p = F32(0)
    for k in range(7, -1, -1):
        p = p * r + F32(1 / math.factorial(k))
    return math.floor(Fraction(float(p)) * Fraction(2) ** (40 + int(n)))


def sample_oracle(row: list[float], options: Sampling, sequence: int, position: int) -> int:
    logits = [-INF if math.isnan(x) else x for x in row]
    order = sorted(range(len(row)), key=lambda token: (-logits[token], token))
    order = order[: options.top_k or None]
    top = F32(logits[order[0]])
    weights = [weight_oracle((F32(logits[token]) - top) / F32(options.temperature)) for token in order]
    if options.top_p < 1:
        share = Fraction(round(Fraction(options.top_p) * 2**24), 2**24)
        kept = 1
        while sum(weights[:kept]) < share * sum(weights):
            kept += 1
        order, weights = order[:kept], weights[:kept]
    seed = [options.seed % 2**32, options.seed >> 32]
    u = Fraction(philox_oracle([position, sequence, 0, 0], seed)[0] >> 8, 2**24)
    cumulative = 0
    for token, weight in zip(order, weights, strict=True):
        cumulative += weight
        if cumulative > u * sum(weights):
            return token
    raise AssertionError("u is below 1")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "options",
    [
        Sampling(1.0, seed=1),
        Sampling(0.7, top_k=5, seed=2**63),
        Sampling(1.3, top_p=0.9, seed=2**40 + 3),
        Sampling(2.5, top_k=30, top_p=0.5, seed=4),
        Sampling(0.1, top_k=1000, top_p=0.999999, seed=5),
    ],
)
def test_tokens_match_the_oracle(dtype, options):
    logits = (torch.randn(60, 40) * torch.logspace(-2, 1.5, 60)[:, None]).to(dtype)
    logits[::3] = logits[::3].round()  # ties, and both zeros
    logits[::5, 1:30:4] = -INF
    logits[1::5, ::7] = NAN
    sequence, position = torch.randint(0, 2**32, (2, 60))
    got = sample(logits, options, sequence, position).tolist()
    places = zip(logits.tolist(), sequence.tolist(), position.tolist(), strict=True)
    assert got == [sample_oracle(row, options, s, p) for row, s, p in places]
    assert got != argmax(logits).tolist()


def test_top_p_keeps_the_shortest_sufficient_prefix():
    four_equal = torch.zeros(4)
    for top_p, kept in ((0.25, 1), (0.25 + 2**-24, 2), (0.5, 2), (0.5 + 2**-26, 2), (0.75 + 2**-24, 4), (1.0, 4)):
        assert draws(four_equal, Sampling(1.0, top_p=top_p), 300).unique().tolist() == list(range(kept)), top_p


def logit_under(weight: int) -> float:
    """The float32 logit with the largest weight of at most ``weight`` that was found."""
    steps = np.arange(-64, 65, dtype=np.float32) * np.spacing(F32(math.log(weight / 2**40)))
    d = torch.from_numpy(F32(math.log(weight / 2**40)) + steps)
    weights = sampling._weights(d)
    return d[weights.masked_fill(weights > weight, -1).argmax()].item()


def test_top_p_boundary_half_a_unit_below():
    total = 2**42 // 3 + 1  # three quarters of it are 2**40 + 1/2
    second = logit_under(total - 2**40)
    third = logit_under(total - sum(sampling._weights(torch.tensor([0.0, second])).tolist()))
    logits = torch.tensor([0.0, second, third])
    assert sampling._weights(logits).sum().item() == total
    assert draws(logits, Sampling(1.0, top_p=0.75), 300).unique().tolist() == [0, 1]
    assert draws(logits, Sampling(1.0, top_p=0.75 - 2**-24), 300).unique().tolist() == [0]


def test_top_k_of_equal_logits_keeps_lowest_indices():
    logits = torch.tensor([0.0, 2.0, 1.0, -0.0, 1.0, 0.0, 1.0])
    assert draws(logits, Sampling(10.0, top_k=3), 300).unique().tolist() == [1, 2, 4]
    assert draws(logits, Sampling(10.0, top_k=6), 300).unique().tolist() == [0, 1, 2, 3, 4, 6]
