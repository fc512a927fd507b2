"""Commands for developers of kernels: ``qcut tune``, ``qcut precompile``, ``qcut gemm``."""
