"""Everything that serves an operator on CUDA. Importing this module registers all of it."""

from qcut.cuda import activation, attention, codebook, embed, gemm, linear, next_token, norm, quantize

__all__ = [
    "activation",
    "attention",
    "codebook",
    "embed",
    "gemm",
    "linear",
    "next_token",
    "norm",
    "quantize",
]
