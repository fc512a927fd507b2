"""Implementations of the operators: CUDA kernels and Triton kernels. The reference is in `qcut.ops`."""
