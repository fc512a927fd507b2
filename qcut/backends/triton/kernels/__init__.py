"""Kernels in Triton's language. Importing a module imports triton."""
