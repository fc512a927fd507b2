"""Whether few tokens stream past int8 weights, and with which tile."""

from __future__ import annotations

from typing import NamedTuple

from qcut.dispatch import closed
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import choose
from qcut.emitters.families import INT8_STREAM
from qcut.emitters.gemm.problem import K_MAX, GemmProblem
from qcut.emitters.stream import w8a8
from qcut.emitters.stream.w8a8 import Tokens, W8A8Problem, W8A8Tile

_MOST_TOKENS = 16
"""Int8 tokens up to which streaming is faster than the tiled kernels with weights of any size."""
_SMALL_WEIGHTS = 2 << 20
"""Bytes of weights up to which it is for as many tokens as the kernel takes."""


class FewTokens(NamedTuple):
    """The kernel of ``int8_stream`` for a product of few tokens.

    Attributes:
        problem: its types, tokens and epilogue.
        tile: its tile.
        ns: time in ns that the model expects.
    """

    problem: W8A8Problem
    tile: W8A8Tile
    ns: float


def few_tokens(
    problem: GemmProblem,
    m: int,
    n: int,
    k: int,
    target: Target,
    tokens: Tokens = "none",
    *,
    aligned: bool = True,
    absmax: bool = False,
) -> FewTokens | None:
    """The kernel that streams int8 weights past m tokens, or None where it cannot, or where tiled kernels are faster.

    Args:
        problem: of the product, whose tokens are int8.
        m: rows of D.
        n: columns of D.
        k: summed over, with the operands' padding where tokens are int8.
        target: the GPU.
        tokens: how tokens are given and quantized, see `qcut.emitters.stream.w8a8`.
        aligned: whether rows of tokens start at multiples of 16 bytes.
        absmax: whether the kernel also computes the largest magnitude of each row of its result.
    """
    if problem.layouts != "tnt" or problem.alignment_k % 16 or m > most_tokens(n, k):
        return None
    few = W8A8Problem(tokens, problem.epilogue.out, problem.epilogue, aligned, absmax)
    if closed.holds(problem, target) and not closed.covers(few):
        return None
    if not w8a8.is_legal(few, m, k, target.arch):
        return None
    n, k, like = closed.bounded(n, k, target, known=closed.is_usual(few))
    found = choose((INT8_STREAM.name,), few, m, n, min(k, K_MAX), like)
    return None if found is None else FewTokens(few, *found[1:])


def most_tokens(n: int, k: int) -> int:
    """Tokens up to which streaming weights ``[n, k]`` is faster than the tiled kernels."""
    return w8a8.MAX_TOKENS if n * k <= _SMALL_WEIGHTS else _MOST_TOKENS
