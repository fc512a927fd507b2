"""The cache of keys and values of earlier tokens, allocated once."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from qcut.errors import ConfigError

KVDtype = Literal["auto", "int8"]
KV_DTYPES: tuple[KVDtype, ...] = ("auto", "int8")
Memory = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Keys, values, and the scales of keys and values, None unless the cache is int8."""


class KVCache:
    """Keys and values ``[batch, kv_heads, context, head_size]`` of every layer.

    ``int8`` keeps, for each token and head, ``q = rne(x / scale)`` with ``scale = max|x| / 127`` (1 where that is 0;
    NaN, and q = 0, where x holds NaN or Inf): `qcut.numerics.int8.quantize_per_token_ref` of its ``head_size``
    elements. Attention reads ``q * scale`` in the activations' dtype, for prompts as for single tokens.

    Args:
        layers: number of layers.
        batch: number of sequences.
        kv_heads: key heads of a token.
        context: tokens of a sequence.
        head_size: elements of a key.
        dtype: dtype of activations.
        device: device of the memory.
        kv_dtype: ``auto`` keeps keys and values in the activations' dtype, ``int8`` quantizes them.

    Raises:
        ConfigError: another ``kv_dtype``.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        context: int,
        head_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: KVDtype = "auto",
    ) -> None:
        if kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_cache is {kv_dtype!r}; allowed: {', '.join(KV_DTYPES)}")
        shape = (layers, 2, batch, kv_heads, context)
        stored = torch.int8 if kv_dtype == "int8" else dtype
        self._values = torch.zeros((*shape, head_size), dtype=stored, device=device)
        self._scales = torch.zeros(shape, dtype=torch.float32, device=device) if kv_dtype == "int8" else None
        # Views are made once: making a view takes longer than the kernel that reads it.
        scales = [(None, None)] * layers if self._scales is None else [(s[0], s[1]) for s in self._scales]
        self._layers: list[Memory] = [(v[0], v[1], *s) for v, s in zip(self._values, scales, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales together."""
        return self._values.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def layer(self, index: int) -> Memory:
        """A layer's memory: keys, values ``[batch, kv_heads, context, D]`` and, of int8, their scales."""
        return self._layers[index]
