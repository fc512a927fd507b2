"""Checkpoints of compressed-tensors, read in the layouts of `reader.LAYOUTS`, and written from W8A8 models."""
