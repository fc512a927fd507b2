"""Everything that serves an operator on CUDA. Importing this module registers all of it."""

from qcut.cuda import activation, gemm, linear, quantize

__all__ = ["activation", "gemm", "linear", "quantize"]
