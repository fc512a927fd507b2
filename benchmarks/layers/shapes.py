"""The shapes every benchmark measures: tokens M, out_features N, in_features K."""

from __future__ import annotations

from dataclasses import dataclass

SQUARES = (1024, 2048, 4096, 8192)
LAYERS_NK = ((1280, 1280), (3840, 1280), (5120, 1280), (1280, 5120), (4096, 4096), (14336, 4096), (4096, 14336))
"""(N, K) of GPT-2 Large's four linear layers, then of an 8B Llama's."""
TOKENS = (16, 64, 256, 1024, 4096)
GPT2_LARGE_NK = LAYERS_NK[:4]
GPT2_LARGE_TOKENS = (4096, 8192)
CLAIM_MIN_TOKENS = 64
"""The GEMM figures are stated over the shapes with at least this many tokens."""


@dataclass(frozen=True, order=True)
class Shape:
    """One product ``[M, K] x [N, K]^T``."""

    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        """``MxNxK``."""
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def ops(self) -> float:
        """Multiplications and additions, each counted once."""
        return 2.0 * self.m * self.n * self.k

    def bytes_moved(self, a_bits: int, b_bits: int, d_bits: int) -> float:
        """Bytes of A, B and D when each is read or written once."""
        return (self.m * self.k * a_bits + self.n * self.k * b_bits + self.m * self.n * d_bits) / 8


def gemm_shapes(quick: bool = False) -> list[Shape]:
    """Squares, then every layer at every M; ``quick`` keeps five that span the range."""
    if quick:
        return [
            Shape(2048, 2048, 2048),
            Shape(16, 4096, 4096),
            Shape(64, 14336, 4096),
            Shape(1024, 5120, 1280),
            Shape(4096, 4096, 14336),
        ]
    every = [Shape(n, n, n) for n in SQUARES] + [Shape(m, n, k) for n, k in LAYERS_NK for m in TOKENS]
    return list(dict.fromkeys(every))  # 4096 cubed is both a square and a layer


def linear_shapes(quick: bool = False) -> list[Shape]:
    """GPT-2 Large's four layers at prompt length first, then layers from one token to 4,096."""
    if quick:
        return [Shape(4096, 14336, 4096), Shape(4096, 5120, 1280), Shape(16, 4096, 4096)]
    prompts = [Shape(4096, 14336, 4096)] + [Shape(m, n, k) for n, k in GPT2_LARGE_NK for m in GPT2_LARGE_TOKENS]
    layers = [(1280, 1280), (5120, 1280), (4096, 4096), (14336, 4096), (4096, 14336)]
    rest = [Shape(m, n, k) for n, k in layers for m in (1, 16, 64, 1024, 4096)]
    return prompts + [s for s in rest if s not in prompts]
