"""Chooses the next token from logits, in plain torch: the definition that a kernel equals token for token.

A draw depends only on the seed, the sequence and the position. The exponential is written as float32 operations, each
rounded by itself, and its results are made integers, so that sums are exact in every order. Tokens are therefore the
same on every device and in every batch, except under ``torch.compile``, which contracts float operations. No function
reads a tensor on the host, so that a CUDA graph can capture each function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qcut.errors import ConfigError, DtypeError, ShapeError, shown
from qcut.numerics.philox import check_places, check_seed, key_words, uniform

MAX_VOCABULARY = 1 << 22
"""Most logits in a row: 2**22 weights of at most 2**40 add up to 2**62, which int64 holds."""

_MASK24 = 0xFF_FFFF
_ONE = 1 << 24
"""1 as a fraction of 24 bits."""
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 2.0**-126, float.fromhex("0x1.fffffep+127")  # float32's normal numbers

_MOST_PENALTY = _MOST_BIAS = 100
_MOST_TOP_K = 2**31 - 1
_ALWAYS = 2**62

_LOG2_E = float.fromhex("0x1.715476p+0")
_LN_2_HIGH = float.fromhex("0x1.62e4p-1")  # 15 bits: its products with whole numbers up to 40 are exact
_LN_2_LOW = float.fromhex("0x1.7f7d1cp-20")
_EXP_TERMS = tuple(1 / math.factorial(k) for k in range(7, -1, -1))


@dataclass(frozen=True)
class Sampling:
    """The settings by which a token is chosen.

    Attributes:
        temperature: divisor of the logits, a positive normal number of float32; 0 always chooses the largest logit.
        top_k: number of largest logits to draw from, in [0, 2**31); 0 keeps all.
        top_p: the draw is from the fewest likeliest tokens with probabilities that sum to this or more, in (0, 1],
            rounded to 24 bits; 1 keeps all.
        seed: key of the random draws, in [0, 2**64).
        min_p: the draw is from tokens at least this many times as likely as the likeliest, in [0, 1], rounded to 24
            bits; 0 keeps all.
        repetition_penalty: logits of tokens that the prompt or the continuation holds are divided by it if they are
            positive, and multiplied if they are negative; a positive normal number of float32, 1 for none. None: that
            of the model's generation settings if an engine samples; 1 elsewhere.
        presence_penalty: subtracted from logits of tokens that the continuation holds; -100 to 100.
        frequency_penalty: the same, as often as the continuation holds the token.
        logit_bias: added to the logits of single tokens, before penalties: -100 to 100 by token id.

    Raises:
        ConfigError: a value is no number, or lies outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        temperature, repetition = self.temperature, self.repetition_penalty
        if not _within(temperature, _MIN_TEMPERATURE, _MAX_TEMPERATURE) and not _within(temperature, 0, 0):
            raise _refused("temperature", temperature, "0 (greedy), or 2**-126 to float32's largest")
        if not _is_integer(self.top_k) or not 0 <= self.top_k <= _MOST_TOP_K:
            raise _refused("top_k", self.top_k, f"an integer of 0 (keeps all) to {_MOST_TOP_K}")
        if not _within(self.top_p, 0, 1) or self.top_p == 0:
            raise _refused("top_p", self.top_p, "0 < top_p <= 1 (1 keeps all)")
        check_seed(self.seed)
        if not _within(self.min_p, 0, 1):
            raise _refused("min_p", self.min_p, "0 (keeps all) to 1")
        if repetition is not None and not _within(repetition, _MIN_TEMPERATURE, _MAX_TEMPERATURE):
            raise _refused("repetition_penalty", repetition, "2**-126 to float32's largest (1 is none)")
        for name in ("presence_penalty", "frequency_penalty"):
            if not _within(getattr(self, name), -_MOST_PENALTY, _MOST_PENALTY):
                raise _refused(name, getattr(self, name), f"-{_MOST_PENALTY} to {_MOST_PENALTY}")
        if not isinstance(self.logit_bias, Mapping):
            raise _refused("logit_bias", self.logit_bias, "numbers by token id")
        for token, bias in self.logit_bias.items():
            if not _is_integer(token) or not 0 <= token < MAX_VOCABULARY:
                raise _refused("logit_bias", token, "ids of tokens", " of token")
            if not _within(bias, -_MOST_BIAS, _MOST_BIAS):
                raise _refused("logit_bias", bias, f"-{_MOST_BIAS} to {_MOST_BIAS}", f" of token {token}")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # whoever gave it may change it

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is chosen, without a draw."""
        return self.temperature == 0

    @property
    def penalizes(self) -> bool:
        """Whether the choice depends on the tokens before."""
        repetition = self.repetition_penalty not in (None, 1)
        return repetition or self.presence_penalty != 0 or self.frequency_penalty != 0


class Ban(NamedTuple):
    """Tokens that a row does not choose, at first or at all.

    Attributes:
        tokens: their ids.
        until: the position from which on they may be chosen; None: never.
    """

    tokens: tuple[int, ...]
    until: int | None = None


class Biases(NamedTuple):
    """What is added to single logits: entry e to that of ``tokens[e]`` in row ``rows[e]`` before position ``until[e]``.

    Attributes:
        rows: int64 ``[E]``.
        tokens: int64 ``[E]``.
        until: int64 ``[E]``.
        values: float32 ``[E]``; -Inf for a token that is not to be chosen.
        largest: of ``tokens``.
    """

    rows: Tensor
    tokens: Tensor
    until: Tensor
    values: Tensor
    largest: int

    def add(self, logits: Tensor, position: Tensor) -> Tensor:
        """Logits ``[B, V]`` of rows at positions int64 ``[B]``, as float32, with what is added.

        Raises:
            ConfigError: a token beyond V.
        """
        if self.largest >= logits.shape[1]:
            raise ConfigError(f"a bias for token {self.largest}; allowed: 0 to {logits.shape[1] - 1}")
        values = self.values.masked_fill(position[self.rows] >= self.until, 0)
        return logits.detach().to(torch.float32, copy=True).index_put_((self.rows, self.tokens), values, True)


class Rows(NamedTuple):
    """The settings of several rows, on the device of their logits.

    Attributes:
        settings: of each row.
        floats: float32 ``[B, 4]``: temperature, and the penalties of repetition, presence and frequency.
        wholes: int64 ``[B, 3]``: ``top_k``, or `MAX_VOCABULARY` where it keeps all; ``top_p`` and ``min_p`` in 24 bits.
        keys: of the draws, int64 ``[B, 2]``.
        takes_largest: bool ``[B]``, of greedy rows.
        biases: of all rows; None: nothing is added.
    """

    settings: tuple[Sampling, ...]
    floats: Tensor
    wholes: Tensor
    keys: Tensor
    takes_largest: Tensor
    biases: Biases | None = None

    @classmethod
    def of(cls, settings: Sequence[Sampling], device: torch.device, bans: Sequence[Sequence[Ban]] = ()) -> Rows:
        """The settings of rows, one each, on a device, without waiting, and each row's bans, if there are any."""
        entries = [
            (row, token, _ALWAYS, value)
            for row, each in enumerate(settings)
            for token, value in each.logit_bias.items()
        ]
        # A token's entries are added up, and to -Inf in every order: bans of two kinds do no harm.
        entries += [
            (row, token, _ALWAYS if ban.until is None else ban.until, -math.inf)
            for row, each in enumerate(bans)
            for ban in each
            for token in ban.tokens
        ]
        biases = None
        if entries:
            *places, values = zip(*entries, strict=True)
            where = torch.tensor(places, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
            added = torch.tensor(values, dtype=torch.float32, device="cpu").to(device, non_blocking=True)
            rows, tokens, until = where.unbind()
            biases = Biases(rows, tokens, until, added, max(places[1]))
        host = (
            torch.tensor([_float_values(s) for s in settings], dtype=torch.float32, device="cpu").view(-1, 4),
            torch.tensor([_whole_values(s) for s in settings], dtype=torch.int64, device="cpu").view(-1, 3),
            key_words([s.seed for s in settings], torch.device("cpu")),
            torch.tensor([s.greedy for s in settings], dtype=torch.bool, device="cpu"),
        )
        floats, wholes, keys, takes_largest = (part.to(device, non_blocking=True) for part in host)
        return cls(tuple(settings), floats, wholes, keys, takes_largest, biases)

    @property
    def greedy(self) -> bool:
        """Whether all rows take their largest logit."""
        return all(s.greedy for s in self.settings)

    @property
    def penalizes(self) -> bool:
        """Whether the choice of some row depends on the tokens before."""
        return any(s.penalizes for s in self.settings)


@dataclass(frozen=True)
class History:
    """The tokens before, by which penalties go.

    Attributes:
        prompt: bool ``[B, V]``, whether the row's prompt holds the token.
        counts: int32 ``[B, V]``, how often the row's continuation does.
    """

    prompt: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, rows: int, vocabulary: int, device: torch.device) -> History:
        """No tokens before."""
        counts = torch.zeros(rows, vocabulary, dtype=torch.int32, device=device)
        return cls(counts.bool(), counts)

    def of(self, first: int, count: int) -> History:
        """The tokens before of some rows."""
        rows = slice(first, first + count)
        return History(self.prompt[rows], self.counts[rows])

    def start(self, row: int, prompt: Tensor) -> None:
        """Begin a row anew, after a prompt of ids int64 ``[T]``."""
        self.prompt[row].zero_()
        self.counts[row].zero_()
        self.prompt[row].index_fill_(0, prompt.to(self.prompt.device, non_blocking=True), True)

    def add(self, tokens: Tensor) -> None:
        """Count the next token of each of the first n rows, int64 ``[n]`` on the device."""
        counts = self.counts[: len(tokens)]
        counts.scatter_add_(1, tokens[:, None], torch.ones_like(tokens, dtype=torch.int32)[:, None])

    def move(self, source: int, target: int) -> None:
        """Copy a row onto another."""
        self.prompt[target] = self.prompt[source]
        self.counts[target] = self.counts[source]


def argmax(logits: Tensor) -> Tensor:
    """The index of each row's largest logit: of equal logits (-0 and 0 too) the first. NaN is never the largest.

    A row of only NaN gives index 0.

    Args:
        logits: ``[B, V]`` of any floating-point dtype, compared as float32; B may be 0, V is 1 to 2**22.

    Returns:
        int64 ``[B]``, on the device of the logits.

    Raises:
        DtypeError, ShapeError: the logits are not as above.

    Exactness: bitwise.
    """
    if not logits.is_floating_point():
        raise DtypeError(f"logits: found {logits.dtype}; allowed: a floating-point dtype")
    if logits.ndim != 2 or not 1 <= logits.shape[1] <= MAX_VOCABULARY:
        raise ShapeError(f"logits: found shape {tuple(logits.shape)}; allowed: [B, V], V in [1, {MAX_VOCABULARY}]")
    x, columns = logits.detach().float(), logits.shape[1]
    largest = x.masked_fill(x.isnan(), -math.inf).amax(1, keepdim=True)
    # torch's own argmax prefers NaN. In a row of only NaN no element equals the largest: `columns` becomes 0.
    return (
        torch.arange(columns, device=x.device, dtype=torch.int64).masked_fill(x != largest, columns).amin(1) % columns
    )


def penalized(logits: Tensor, settings: Sampling | Rows, history: History) -> Tensor:
    """Logits less penalties for the tokens before.

    ``x = f32(logit)``. Where the prompt or the continuation holds the token, ``x / repetition_penalty`` if x is
    positive, ``x * repetition_penalty`` otherwise. Then ``x - frequency_penalty * count``, and ``x - presence_penalty``
    where the count is not 0. Every operation is one of float32, rounded by itself.

    Args:
        logits: ``[B, V]`` of any floating-point dtype.
        settings: of all rows, or of each.
        history: of at least B rows; the first B count.

    Returns:
        float32 ``[B, V]``.

    Exactness: bitwise.
    """
    _, repetition, presence, frequency = _floats(settings, logits)
    n = len(logits)
    counts = history.counts[:n]
    held = counts > 0
    x = logits.detach().float()
    x = torch.where(held | history.prompt[:n], torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - frequency * counts
    return torch.where(held, x - presence, x)


def only_allowed(logits: Tensor, masks: Tensor) -> Tensor:
    """Logits with -Inf for tokens that are not allowed.

    Args:
        logits: ``[B, V]`` of any floating-point dtype.
        masks: int32 ``[B, W]`` on the same device, W at least V / 32; bit v % 32 of word v // 32 says whether token v
            is allowed.

    Returns:
        ``[B, V]`` of the same dtype, a copy.

    Exactness: bitwise.
    """
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=masks.device)
    barred = (masks.view(torch.uint8)[:, :, None] & bits == 0).flatten(1)[:, : logits.shape[1]]
    return logits.detach().masked_fill(barred, -math.inf)


def sample(
    logits: Tensor, sampling: Sampling | Rows, sequence: Tensor, position: Tensor, history: History | None = None
) -> Tensor:
    """Chooses a token for each row: `argmax` where the sampling is greedy, a draw otherwise.

    1. ``x = f32(logit)``, plus its bias, `penalized` if there is a history, -Inf if that is NaN. Sort x in
       descending order, equals (-0 and 0 too) by lower index.
    2. Keep the first ``top_k``. ``m`` is the first of them.
    3. ``d = (x - m) / f32(temperature)``: a float32 subtraction, then a float32 division.
    4. ``w = floor(exp(d) * 2**40)`` in int64, of ``max(d, -28)``. exp is float32: ``n = rne(d * 0x1.715476p+0)``,
       ``r = (d - n * 0x1.62e4p-1) - n * 0x1.7f7d1cp-20``, and p is the Taylor polynomial of exp to r**7, by Horner's
       rule from ``f32(1 / 7!)`` down: ``p = p * r + f32(1 / k!)``. Every operation is rounded by itself, none is
       contracted. ``w = int64(p * 2**40) >> -n``, and -28 gives 0.
    5. ``w`` under ``rne(min_p * 2**24) * 2**16`` becomes 0: the likeliest token has 2**40.
    6. ``c[i] = w[0] + ... + w[i]`` in int64, and ``T`` is the last.
    7. Where ``top_p < 1``, keep the shortest prefix with ``c[i] >= ceil(P * T / 2**24)``, at least one token, where
       ``P = rne(top_p * 2**24)``. ``T`` becomes its sum. Quotients are exact until they are rounded.
    8. ``u = 2**24 * uniform(seed, sequence, position)``. The token is the first with ``c[i] > floor(u * T / 2**24)``.

    A weight of 0 is never chosen, so neither are -Inf and NaN. A row gives its `argmax` if its largest logit is not
    finite (all -Inf or NaN, or a +Inf). Probabilities are exact to about 2**-24, the step of u.

    Args:
        logits: ``[B, V]`` of any floating-point dtype; B may be 0, V is 1 to 2**22.
        sampling: of all rows, or of each; a top_k above V keeps all.
        sequence: int64 ``[B]`` on the same device, as `uniform` takes it.
        position: int64 ``[B]`` on the same device, as `uniform` takes it.
        history: of at least B rows, by which penalties go; None: there are none.

    Returns:
        int64 ``[B]``, on the device of the logits.

    Raises:
        DeviceError, DtypeError, ShapeError: a tensor is not as above.
        ConfigError: penalties without a history, or a bias for a token beyond V.

    Exactness: bitwise, in every batch the same. Before its floor, w is within 2 float32 ulp of ``exp(d) * 2**40``; what
    follows is exact.
    """
    if isinstance(sampling, Sampling) and sampling.logit_bias:
        sampling = Rows.of([sampling] * len(logits), logits.device)
    if isinstance(sampling, Rows) and sampling.biases is not None:
        check_places(sequence, position, logits.shape[:1], logits.device)
        logits = sampling.biases.add(logits, position)
    if sampling.penalizes:
        if history is None:
            raise ConfigError("penalties need the tokens before; allowed: a history, or settings without penalties")
        logits = penalized(logits, sampling, history)
    best = argmax(logits)
    check_places(sequence, position, best.shape, best.device)
    if sampling.greedy:
        return best
    given = (sampling,) if isinstance(sampling, Sampling) else sampling.settings
    temperature, *_ = _floats(sampling, logits)
    top_k, top_p, min_p = _wholes(sampling, logits)
    x = logits.detach().float() + 0.0  # -0 becomes 0, since a sort may compare bits
    x, token = x.masked_fill_(x.isnan(), -math.inf).sort(dim=1, descending=True, stable=True)
    most = max(s.top_k or MAX_VOCABULARY for s in given)
    x, token = x[:, :most], token[:, :most]
    finite = x[:, :1].isfinite()
    weights = _weights((x - x[:, :1]).masked_fill_(~finite, 0.0) / temperature)
    if len({s.top_k for s in given}) > 1:
        weights.masked_fill_(torch.arange(x.shape[1], device=x.device, dtype=torch.int64) >= top_k, 0)
    if any(s.min_p for s in given):
        weights.masked_fill_(weights < min_p << 16, 0)
    sums = weights.cumsum(1)
    total = sums[:, -1:]
    if any(s.top_p < 1 for s in given):
        needed = _share(total, top_p, rounding=_MASK24)
        total = sums.gather(1, (sums < needed).sum(1, keepdim=True))
    key = sampling.seed if isinstance(sampling, Sampling) else sampling.keys
    u = (uniform(key, sequence, position) * 2.0**24).long()[:, None]
    rank = (sums <= _share(total, u)).sum(1, keepdim=True)
    drawn = torch.where(finite, token.gather(1, rank), best[:, None]).squeeze(1)
    return drawn if isinstance(sampling, Sampling) else torch.where(sampling.takes_largest, best, drawn)


class LogProbabilities(NamedTuple):
    """Log-probabilities by the model, before temperature and penalties.

    Attributes:
        chosen: of the token that was chosen, float32 ``[B]``.
        tokens: the likeliest tokens, int64 ``[B, top]``; of equals the first.
        values: theirs, float32 ``[B, top]``, falling.
    """

    chosen: Tensor
    tokens: Tensor
    values: Tensor


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> LogProbabilities:
    """Log-probabilities of chosen tokens and of the likeliest ones.

    Args:
        logits: ``[B, V]`` of any floating-point dtype.
        tokens: int64 ``[B]``.
        top: number of the likeliest, 0 to V.

    Exactness: float32 ``log_softmax`` of torch.
    """
    values = logits.detach().float().log_softmax(1)
    # Numbers with the order of (value, first index): topk takes any of equals, and a sort takes all.
    bits = (values + 0.0).view(torch.int32)
    keys = (bits ^ (bits >> 31 & 0x7FFF_FFFF)).long() << 32
    ids = keys.sub_(torch.arange(values.shape[1], dtype=torch.int64, device=values.device)).topk(top, dim=1).indices
    return LogProbabilities(values.gather(1, tokens[:, None]).squeeze(1), ids, values.gather(1, ids))


def _within(value: Any, least: float, most: float) -> bool:
    """Whether a value is a number of a range; NaN is none."""
    return not isinstance(value, bool) and isinstance(value, Real) and bool(least <= value <= most)  # type: ignore


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refused(name: str, value: Any, allowed: str, part: str = "") -> ConfigError:
    return ConfigError(f"{name}{part} {shown(value)}; allowed: {allowed}", name)


def _floats(settings: Sampling | Rows, logits: Tensor) -> list[Tensor]:
    """Columns ``[1 or B, 1]`` in the order of `Rows.floats`. CUDA would divide by reciprocals of Python's scalars."""
    if isinstance(settings, Rows):
        return list(settings.floats[:, :, None].unbind(1))
    return [torch.full((1, 1), value, dtype=torch.float32, device=logits.device) for value in _float_values(settings)]


def _wholes(settings: Sampling | Rows, logits: Tensor) -> list[Tensor]:
    """Columns ``[1 or B, 1]`` in the order of `Rows.wholes`."""
    if isinstance(settings, Rows):
        return list(settings.wholes[:, :, None].unbind(1))
    return [torch.full((1, 1), value, dtype=torch.int64, device=logits.device) for value in _whole_values(settings)]


def _float_values(settings: Sampling) -> tuple[float, ...]:
    repetition = 1.0 if settings.repetition_penalty is None else settings.repetition_penalty
    return settings.temperature or 1.0, repetition, settings.presence_penalty, settings.frequency_penalty


def _whole_values(settings: Sampling) -> tuple[int, ...]:
    return settings.top_k or MAX_VOCABULARY, _fraction(settings.top_p), _fraction(settings.min_p)


def _fraction(value: float) -> int:
    """In 24 bits."""
    return round(value * _ONE)


def _weights(d: Tensor) -> Tensor:
    """Step 4 of `sample`: ``floor(exp(d) * 2**40)`` in int64, of float32 d at most 0."""
    d = d.clamp(min=-28.0)
    n = (d * _LOG2_E).round_()
    r = (d - n * _LN_2_HIGH).sub_(n * _LN_2_LOW)
    p = torch.full_like(r, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        p.mul_(r).add_(term)
    return p.mul_(2.0**40).long() >> n.neg_().long()


def _share(total: Tensor, parts: Tensor | int, rounding: int = 0) -> Tensor:
    """``(parts * total + rounding) >> 24`` of total in [0, 2**62], parts in [0, 2**24] and rounding under 2**24."""
    # total = high * 2**24 + low: high * parts is at most total, low * parts under 2**48. Neither overflows.
    return (total >> 24) * parts + (((total & _MASK24) * parts + rounding) >> 24)
