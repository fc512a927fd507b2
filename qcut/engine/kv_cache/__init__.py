"""The cache of keys and values, and what is kept in it: prefixes, windows, the ranges of 4-bit keys."""
