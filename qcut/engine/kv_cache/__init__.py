"""The KV cache: its layers, sliding-window rings, the prefix cache, and the calibration of 4-bit keys."""
