"""Measuring kernels on the GPU: timing, baselines, the search for tiles."""
