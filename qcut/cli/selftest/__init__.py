"""``qcut doctor --selftest``: every family of kernels once on the user's GPU, beside the CPU's reference."""
