"""The operators on CUDA: choosing, loading and launching kernels."""
