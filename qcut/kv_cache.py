"""Keys and values of the tokens so far, in memory that is allocated once."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from qcut import numerics
from qcut.errors import ConfigError

KVDtype = Literal["auto", "int8"]
KV_DTYPES: tuple[KVDtype, ...] = ("auto", "int8")


class KVCache:
    """Keys and values ``[batch, kv_heads, context, head_size]`` of every layer.

    ``int8`` keeps, for each token and head, ``q = rne(x / scale)`` with ``scale = max|x| / 127`` (1 where that is 0;
    NaN, and q = 0, where x holds NaN or Inf): `qcut.numerics.quantize_per_token_ref` of its ``head_size`` elements.
    What attention reads is ``q * scale`` in the activations' dtype, for prompts as for single tokens.

    Args:
        layers: of the model.
        batch: sequences.
        kv_heads: of a token.
        context: tokens of a sequence.
        head_size: elements of a key.
        dtype: of activations.
        device: of the memory.
        kind: ``auto`` keeps activations as they are, ``int8`` quantizes them.

    Raises:
        ConfigError: another kind.
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
        kind: KVDtype = "auto",
    ) -> None:
        if kind not in KV_DTYPES:
            raise ConfigError(f"kv_cache is {kind!r}; allowed: {', '.join(KV_DTYPES)}")
        self.kind, self.dtype, self.context = kind, dtype, context
        shape = (layers, 2, batch, kv_heads, context)
        stored = torch.int8 if kind == "int8" else dtype
        self._values = torch.zeros((*shape, head_size), dtype=stored, device=device)
        self._scales = torch.zeros(shape, dtype=torch.float32, device=device) if kind == "int8" else None

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self._values.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def write_prompt(self, layer: int, keys: Tensor, values: Tensor, first: int = 0) -> None:
        """Store ``[B, kv_heads, T, D]`` as the first T tokens of B sequences, from the ``first`` on."""
        batch, tokens = slice(first, first + len(keys)), keys.shape[2]
        for i, x in enumerate((keys, values)):
            stored, scale = self._stored(x)
            _copy(self._values[layer, i, batch, :, :tokens], stored)
            if self._scales is not None and scale is not None:
                self._scales[layer, i, batch, :, :tokens] = scale

    def layer(self, index: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """A layer's memory: keys, values ``[batch, kv_heads, context, D]`` and, of int8, their scales."""
        keys, values = self._values[index]
        return (keys, values, None, None) if self._scales is None else (keys, values, *self._scales[index])

    def read(self, layer: int, batch: int, tokens: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values ``[batch, kv_heads, tokens, D]`` in the activations' dtype, from sequence ``first`` on."""
        sequences = slice(first, first + batch)
        kept = self._values[layer, :, sequences, :, :tokens]
        if self._scales is not None:
            scales = self._scales[layer, :, sequences, :, :tokens, None]
            kept = (kept.float() * scales).to(self.dtype)
        return kept[0], kept[1]

    def _stored(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._scales is None:
            return x, None
        rows = x.reshape(-1, x.shape[-1]).float()
        q, scale = numerics.quantize_per_token_ref(rows, rows.shape[1])
        return q.view(x.shape), scale.view(x.shape[:-1])


def _copy(to: Tensor, x: Tensor) -> None:
    """``to.copy_(x)``, sixteen bytes at a time where both allow it: strided rows are copied element by element."""
    count = 16 // x.itemsize
    views = [t for t in (to, x) if t.stride(-1) == 1 and not (t.storage_offset() | t.shape[-1]) % count]
    if x.dtype is to.dtype and len(views) == 2 and not any(n % count for t in views for n in t.stride()[:-1]):
        to, x = (t.view(torch.complex128) for t in views)
    to.copy_(x)
