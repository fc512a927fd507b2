"""Log-probabilities of tokens, for those who asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from qcut.engine.token_ids import is_whole
from qcut.errors import ConfigError, shown
from qcut.numerics.sampling import log_probabilities

MOST_TOP = 20
"""Most tokens that are listed with one."""


@dataclass(frozen=True)
class LogProbability:
    """Of a token by the model, before temperature and penalties.

    Attributes:
        chosen: of the token.
        top: the likeliest tokens and theirs, the likeliest first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


def check_top(top: object, vocabulary: int, name: str = "top") -> None:
    """Check how many of the likeliest tokens are asked for.

    Raises:
        ConfigError: below 0, beyond `MOST_TOP` or the vocabulary, or another kind.
    """
    limit = min(MOST_TOP, vocabulary)
    if top is not None and (not is_whole(top) or not 0 <= top <= limit):  # type: ignore[operator]
        raise ConfigError(f"{name} is {shown(top)}; allowed: 0 to {limit}, or None")


def likelihoods(logits: Tensor, tokens: Tensor, wanted: Sequence[int | None]) -> list[LogProbability | None]:
    """Log-probabilities of the tokens of some rows, and of their likeliest ones; waits for the device.

    Args:
        logits: ``[B, V]``.
        tokens: int64 ``[B]``.
        wanted: how many of the likeliest each row wants; None: nothing.

    Returns:
        One for each row that wants some, None for the others; empty where none does.
    """
    if all(top is None for top in wanted):
        return []
    most = max(top for top in wanted if top is not None)
    chosen, ids, values = (part.tolist() for part in log_probabilities(logits, tokens, most))
    return [
        None if top is None else LogProbability(chosen[i], tuple(zip(ids[i][:top], values[i][:top], strict=True)))
        for i, top in enumerate(wanted)
    ]
