"""Quantized modules in place of ``nn.Linear`` and ``nn.Embedding``.

The imports register the layers: `qcut.layers.base.Linear` finds the class of a scheme in a table that they fill.
"""

from qcut.layers import codebook, int8

__all__ = ["codebook", "int8"]
