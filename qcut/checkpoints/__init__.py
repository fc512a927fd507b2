"""Quantized models on disk, in qcut's format and in others'."""
