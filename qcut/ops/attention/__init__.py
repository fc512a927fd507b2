"""Attention over a cache of keys and values: decode, prefill, and the cache's checks."""

from qcut.ops.registry import import_modules

import_modules(__name__)
