"""Draws from logits, and how they are held against a distribution."""

from __future__ import annotations

import math
from collections import Counter

import torch

from qcut.numerics.sampling import Sampling, sample

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
