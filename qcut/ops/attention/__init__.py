"""Attention over a cache of keys and values: decode, prefill, and the cache's checks."""
