"""Building, loading and launching the kernels that serve an operator on CUDA."""
