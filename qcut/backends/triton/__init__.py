"""The operators of layers as Triton kernels: for GPUs without qcut's CUDA kernels, and on request."""
