"""The KV cache, allocated once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from qcut.engine.kv_cache.ring_cache import Ring
from qcut.errors import ConfigError, UnsupportedError
from qcut.numerics import int4

KVDtype = Literal["auto", "int8", "int4", "int8/int4"]
KV_DTYPES: tuple[KVDtype, ...] = ("auto", "int8", "int4", "int8/int4")
_STORED = {"int8": torch.int8, "int4": torch.uint8}
Memory = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Keys, values, and the scales of keys and values, None unless keys and values are compressed."""


class KVCache:
    """Keys and values ``[batch, kv_heads, context, head_size]`` of every layer, with fewer positions in a ring.

    ``int8`` keeps, for each token and head, ``q = rne(x / scale)`` with ``scale = max|x| / 127`` (1 where that is 0;
    NaN, and q = 0, where x holds NaN or Inf): `qcut.numerics.int8.quantize_per_token_ref` of its ``head_size``
    elements. Attention reads ``q * scale`` in the activations' dtype, in prefill and decode.

    ``int4`` keeps two codes in a byte and a word of 16 bits for each token and head: `qcut.numerics.int4`. Keys and
    values are rotated before they are rounded; attention rotates queries as keys, and its results back. Keys are
    rounded by a calibration (`set_calibration`).

    Args:
        layers: number of layers.
        batch: number of sequences.
        kv_heads: key heads of a token.
        context: tokens of a sequence.
        head_size: elements of a key.
        dtype: dtype of activations.
        device: device of the memory.
        kv_dtype: ``auto`` keeps keys and values in the activations' dtype, ``int8`` and ``int4`` quantize them,
            ``int8/int4`` keys and values each in its own way.
        rings: of each layer, None for a layer without; empty: no layer has a ring. The last of ``context`` positions
            is then for padding.

    Attributes:
        needs_calibration: whether keys have 4 bits.
        companion: a cache of another decoder with the same sequences; its sequences are copied with these; or None.

    Raises:
        ConfigError: another ``kv_dtype``; or 4 bits for a head of another size than `qcut.numerics.int4.HEADS`, or, on
            a GPU, for float32 activations.
        UnsupportedError: the GPU has no kernel for heads of this size in such a cache.
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
        rings: Sequence[Ring | None] = (),
    ) -> None:
        kinds = _kinds(kv_dtype, head_size, dtype, device)
        self._rings, self._context = tuple(rings) or (None,) * layers, context - 1
        self._written = [0] * batch
        # Layers with the same ring, or with none, lie in one tensor of each kind, in which a layer's are contiguous.
        self._parts: dict[Ring | None, Memory] = {}
        for ring in dict.fromkeys(self._rings):
            shape = (self._rings.count(ring), batch, kv_heads, context if ring is None else ring.rows)
            rows = [_rows(kind, shape, head_size, dtype, device) for kind in kinds]
            scales = [_scales(kind, shape, device) for kind in kinds]
            self._parts[ring] = rows[0], rows[1], scales[0], scales[1]
        # Views are made once: making a view takes longer than the kernel that reads it.
        self._layers: list[Memory] = []
        for i, ring in enumerate(self._rings):
            at = self._rings[:i].count(ring)
            self._layers.append(tuple(None if t is None else t[at] for t in self._parts[ring]))  # type: ignore[arg-type]

        self.companion: KVCache | None = None
        self.kv_dtype: KVDtype = kv_dtype
        self._device, self.needs_calibration = device, kinds[0] == "int4"
        self._calibration: list[Tensor | None] = [None] * layers

    def set_calibration(self, layers: list[Tensor]) -> None:
        """Round keys by each layer's `qcut.numerics.int4.guide_of`; before any key is appended."""
        self._calibration = [layer.to(self._device) for layer in layers]

    def calibration(self, index: int) -> Tensor | None:
        """How a layer's keys are rounded; None: each code is the nearest."""
        return self._calibration[index]

    def share_calibration(self, other: KVCache) -> None:
        """Round keys as another cache of the same layers."""
        self._calibration = other._calibration

    def ring(self, index: int) -> int:
        """Most tokens of a sequence if a layer has a ring; 0 without one."""
        return 0 if self._rings[index] is None else self._context

    def wrote(self, slot: int, first: int, end: int) -> None:
        """Note that tokens ``first`` to ``end - 1`` of a sequence are written; token 0 begins a new one."""
        self._written[slot] = max(end, self._written[slot] if first else 0)

    def least(self, slot: int) -> int:
        """The fewest tokens, other than 0, after which a sequence can go on; see `Ring.least`."""
        return max((ring.least(self._written[slot]) for ring in self._parts if ring is not None), default=0)

    def copy_sequence(self, source: KVCache, source_slot: int, slot: int, first: int, end: int) -> None:
        """Copy a sequence of ``end`` tokens, from this cache or another of its kind, to a slot with its first tokens.

        Rings are copied whole.
        """
        for (ring, ours), theirs in zip(self._parts.items(), source._parts.values(), strict=True):
            span = slice(first, end) if ring is None else slice(min(end, ring.rows))
            for to, given in zip(ours, theirs, strict=True):
                if to is not None and given is not None:
                    to[:, slot, :, span] = given[:, source_slot, :, span]
        self._written[slot] = source._written[source_slot]
        if self.companion is not None and source.companion is not None:
            self.companion.copy_sequence(source.companion, source_slot, slot, first, end)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales together, and of the companion's."""
        more = 0 if self.companion is None else self.companion.nbytes
        return more + sum(part.nbytes for parts in self._parts.values() for part in parts if part is not None)

    def layer(self, index: int) -> Memory:
        """A layer's memory: keys, values ``[batch, kv_heads, rows, D]`` and, of compressed ones, their scales."""
        return self._layers[index]


def _kinds(kv_dtype: KVDtype, head_size: int, dtype: torch.dtype, device: torch.device) -> tuple[str, str]:
    """How keys and values are stored; raises as `KVCache`."""
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(f"kv_cache is {kv_dtype!r}; allowed: {', '.join(KV_DTYPES)}")
    keys, _, values = kv_dtype.partition("/")
    kinds = keys, values or keys
    if "int4" in kinds:
        int4.check_head(head_size)
        if device.type == "cuda" and dtype not in (torch.float16, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"kv_cache is {kv_dtype!r} of a {name} model; allowed on a GPU: float16 and bfloat16 models"
            )
    if device.type == "cuda":
        from qcut.backends.cuda.attention import check_cache

        of_keys, of_values = (_STORED.get(kind, dtype) for kind in kinds)
        number = torch.empty(0, dtype=dtype, device=device).get_device()
        try:
            check_cache(dtype, of_keys, of_values, head_size, number)
        except UnsupportedError as error:
            raise UnsupportedError(f"kv_cache is {kv_dtype!r} for heads of {head_size} columns: {error}") from error
    return kinds


def _rows(kind: str, shape: tuple[int, ...], head: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    columns = head // 2 if kind == "int4" else head
    return torch.zeros((*shape, columns), dtype=_STORED.get(kind, dtype), device=device)


def _scales(kind: str, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    stored = {"int8": torch.float32, "int4": torch.int16}.get(kind)
    if stored is None:
        return None
    layers, *sizes = shape
    count = math.prod(sizes)
    padded = -(-count // 8) * 8  # each layer's words start at 16 bytes
    return torch.zeros((layers, padded), dtype=stored, device=device)[:, :count].view(shape)
