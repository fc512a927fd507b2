"""Log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from qcut.common.numbers import is_whole
from qcut.errors import ConfigError, shown
from qcut.numerics.sampling import log_probabilities

MOST_TOP = 20
"""Most tokens that are listed with one."""


@dataclass(frozen=True)
class LogProbability:
    """Log-probability of a token by the model, before temperature and penalties.

    Attributes:
        chosen: of the token.
        top: the likeliest tokens with their log-probabilities, the likeliest first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


def check_top(top: object, vocabulary: int, name: str = "top") -> None:
    """Check the number of likeliest tokens.

    Raises:
        ConfigError: below 0, beyond `MOST_TOP` or the vocabulary, or another kind.
    """
    limit = min(MOST_TOP, vocabulary)
    if top is not None and (not is_whole(top) or not 0 <= top <= limit):  # type: ignore[operator]
        raise ConfigError(f"{name} is {shown(top)}; allowed: 0 to {limit}, or None", name)


def likelihoods(logits: Tensor, tokens: Tensor, tops: Sequence[int | None]) -> list[LogProbability | None]:
    """Log-probabilities of the tokens of some sequences, and of the likeliest ones; waits for the device.

    Args:
        logits: ``[B, V]``.
        tokens: int64 ``[B]``.
        tops: number of the likeliest tokens for each sequence; None: no log-probabilities for it.

    Returns:
        One for each sequence; empty if no sequence needs any.
    """
    if all(top is None for top in tops):
        return []
    most = max(top for top in tops if top is not None)
    chosen, ids, values = (part.tolist() for part in log_probabilities(logits, tokens, most))
    return [
        None if top is None else LogProbability(chosen[i], tuple(zip(ids[i][:top], values[i][:top], strict=True)))
        for i, top in enumerate(tops)
    ]
