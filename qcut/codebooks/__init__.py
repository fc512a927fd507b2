"""Rotated codebook weights: levels, rotations, fits, layouts and products, as plain torch."""
