"""Products with rotated codebook weights, and the rotation of their tokens."""
