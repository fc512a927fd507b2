"""Sampling: published random numbers, an oracle in Python's integers, and the statistics of what is drawn."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch

from qcut import sampling
from qcut.errors import ConfigError, DtypeError, ShapeError
from qcut.sampling import Sampling, argmax, philox, sample, uniform
from tests.oracles import F32, FLOATS, INF, NAN

# chi-square, upper tail of 1e-6, by degrees of freedom
CHI2 = {2: 27.631, 3: 30.665, 4: 33.377, 9: 44.811, 15: 56.492}

LOGITS_10 = torch.tensor([0.3, -1.0, 2.0, 0.3, -0.5, 1.5, 0.0, -2.0, 1.0, 0.7])


def rows(count: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + count)


def draws(logits: torch.Tensor, options: Sampling, count: int, by: str = "sequence") -> torch.Tensor:
    """``count`` draws from one row of logits, of as many sequences or positions."""
    index, zero = rows(count), torch.zeros(count, dtype=torch.int64)
    places = (index, zero) if by == "sequence" else (zero, index)
    return sample(logits.expand(count, -1), options, *places)


def chi_square(tokens: torch.Tensor, probabilities: dict[int, float]) -> float:
    counts = Counter(tokens.tolist())
    assert counts.keys() <= probabilities.keys(), "a token was drawn that was not kept"
    expected = {token: p * len(tokens) for token, p in probabilities.items()}
    assert min(expected.values()) > 5, "too few draws for the statistic"
    return sum((counts[token] - e) ** 2 / e for token, e in expected.items())


def softmax(logits: torch.Tensor, temperature: float, kept: list[int]) -> dict[int, float]:
    weights = {token: math.exp(float(logits[token]) / temperature) for token in kept}
    return {token: w / sum(weights.values()) for token, w in weights.items()}


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


def test_uniform_is_the_first_24_bits_of_position_and_sequence():
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
        ({"top_k": -1}, "top_k -1; allowed: an integer of at least 0"),
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


def test_rows_without_a_finite_largest_logit_give_their_argmax():
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


def test_top_p_keeps_the_shortest_prefix_at_its_boundary():
    four_equal = torch.zeros(4)
    for top_p, kept in ((0.25, 1), (0.25 + 2**-24, 2), (0.5, 2), (0.5 + 2**-26, 2), (0.75 + 2**-24, 4), (1.0, 4)):
        assert draws(four_equal, Sampling(1.0, top_p=top_p), 300).unique().tolist() == list(range(kept)), top_p


def logit_under(weight: int) -> float:
    """A float32 whose weight is the largest found of at most ``weight``."""
    steps = np.arange(-64, 65, dtype=np.float32) * np.spacing(F32(math.log(weight / 2**40)))
    d = torch.from_numpy(F32(math.log(weight / 2**40)) + steps)
    weights = sampling._weights(d)
    return d[weights.masked_fill(weights > weight, -1).argmax()].item()


def test_top_p_is_not_reached_half_a_unit_below():
    total = 2**42 // 3 + 1  # three quarters of it are 2**40 + 1/2
    second = logit_under(total - 2**40)
    third = logit_under(total - sum(sampling._weights(torch.tensor([0.0, second])).tolist()))
    logits = torch.tensor([0.0, second, third])
    assert sampling._weights(logits).sum().item() == total
    assert draws(logits, Sampling(1.0, top_p=0.75), 300).unique().tolist() == [0, 1]
    assert draws(logits, Sampling(1.0, top_p=0.75 - 2**-24), 300).unique().tolist() == [0]


def test_top_k_keeps_the_lowest_indices_of_equal_logits():
    logits = torch.tensor([0.0, 2.0, 1.0, -0.0, 1.0, 0.0, 1.0])
    assert draws(logits, Sampling(10.0, top_k=3), 300).unique().tolist() == [1, 2, 4]
    assert draws(logits, Sampling(10.0, top_k=6), 300).unique().tolist() == [0, 1, 2, 3, 4, 6]


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


def test_strides_and_gradients_of_the_logits_do_not_matter_and_inputs_stay():
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


GPU_OPTIONS = [Sampling(), Sampling(0.8, seed=1), Sampling(1.3, top_k=50, seed=2), Sampling(1.0, top_p=0.9, seed=3)]


@pytest.mark.gpu
@pytest.mark.parametrize("options", GPU_OPTIONS)
@pytest.mark.parametrize("vocabulary", [1, 1000, 50257, 262_144])
def test_the_gpu_draws_the_same_tokens(gpu, vocabulary, options):
    logits = torch.randn(32, vocabulary) * 3
    logits[::3] = logits[::3].round()
    logits[1, ::2], logits[2, ::2], logits[3] = NAN, -INF, NAN
    sequence, position = torch.randint(0, 2**32, (2, 32))
    got = sample(logits.to(gpu), options, sequence.to(gpu), position.to(gpu))
    assert got.device == gpu
    assert got.tolist() == sample(logits, options, sequence, position).tolist()


@pytest.mark.gpu
def test_the_gpu_has_the_same_weights(gpu):
    d = -torch.linspace(0, 40, 1_000_001)
    assert torch.equal(sampling._weights(d.to(gpu)).cpu(), sampling._weights(d))


@pytest.mark.gpu
@pytest.mark.parametrize("options", GPU_OPTIONS)
def test_a_graph_samples_what_its_inputs_hold_at_replay(gpu, options):
    logits, index = torch.zeros(4, 50257, device=gpu), torch.zeros(4, dtype=torch.int64, device=gpu)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sample(logits, options, index, index)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sample(logits, options, index, index)
    for _ in range(3):
        logits.copy_(torch.randn(4, 50257) * 3)
        index.copy_(torch.randint(0, 2**32, (4,)))
        got.fill_(-1)
        graph.replay()
        assert got.tolist() == sample(logits.cpu(), options, index.cpu(), index.cpu()).tolist()
