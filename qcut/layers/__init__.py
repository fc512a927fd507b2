"""Quantized modules in place of ``nn.Linear`` and ``nn.Embedding``."""
