"""Rotated codebook weights in plain torch: levels, rotations, fits, layouts and products."""
