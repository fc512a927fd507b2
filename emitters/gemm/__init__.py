"""Products of many tokens with int8 weights."""
