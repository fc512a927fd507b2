"""From a float model to a quantized one: ranges, plans, the replacement itself."""
