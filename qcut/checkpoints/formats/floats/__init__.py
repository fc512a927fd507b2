"""Weights of 8-bit and 4-bit floats."""
