"""The operators of layers as Triton kernels: for GPUs that qcut's CUDA kernels refuse, and wherever they are asked for."""
