"""Quantized modules in place of ``nn.Linear`` and ``nn.Embedding``.

Importing this package imports its modules: `qcut.layers.linear.Linear` finds the class of a scheme in a table that they
fill.
"""

from qcut.ops.registry import import_modules

import_modules(__name__)
