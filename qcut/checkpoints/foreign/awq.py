"""AWQ checkpoints in the ``gemm`` version.

``qweight`` int32 ``[K, N / 8]`` and ``qzeros`` int32 ``[G, N / 8]``: 4 bits i of a word belong to the output channel
``[0, 2, 4, 6, 1, 3, 5, 7][i]`` of eight; ``scales`` ``[G, N]``: ``w[k, n] = scales[g, n] * (q[k, n] - z[g, n])``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qcut.checkpoints.foreign.making import integer_layer
from qcut.checkpoints.foreign.packing import unpack_words
from qcut.checkpoints.foreign.parts import FLOATS, Parts, Stored
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.base import Linear
from qcut.storage import schema

_CHANNELS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output channel, of eight, of each place in a word."""
_PLACES = [_CHANNELS.index(channel) for channel in range(8)]
_CONFIG = schema.record(
    {},
    {
        "bits": (schema.nothing_or(schema.integer(1, 64)), None),
        "w_bit": (schema.nothing_or(schema.integer(1, 64)), None),
        "group_size": (schema.nothing_or(schema.integer(-1)), None),
        "q_group_size": (schema.nothing_or(schema.integer(-1)), None),
        "version": (schema.text(), "gemm"),
        "format": (schema.nothing_or(schema.text()), None),
    },
    more=True,
)


class Awq:
    """The format as a checkpoint's ``quantization_config`` describes it.

    Args:
        config: the configuration, as JSON holds it.
        where: the file, for messages.

    Raises:
        CheckpointError: a field is missing, or holds what it cannot.
        UnsupportedError: bits or a version of the format that is not served (named).
    """

    def __init__(self, config: dict[str, Any], where: str) -> None:
        where = f"{where}: quantization_config"
        data = schema.conform(config, _CONFIG, where, CheckpointError)
        bits = data["bits"] or data["w_bit"] or 4
        size = data["group_size"] if data["group_size"] is not None else data["q_group_size"]
        size = 128 if size is None else size
        version = str(data["format"] or data["version"]).lower()
        if version != "gemm":
            raise UnsupportedError(f"{where}: version is {version!r}; gemm is served")
        if bits != 4:
            raise UnsupportedError(f"{where}: bits is {bits}; 4 are served")
        if size == 0:
            raise CheckpointError(f"{where}: group_size is 0; allowed: -1, or 1 and more")
        self._group_size = None if size == -1 else size

    def quantized(self, tensors: Mapping[str, Stored]) -> bool:
        """See `Format.quantized`."""
        return "qweight" in tensors

    def check(self, parts: Parts) -> None:
        """See `Format.check`."""
        n, k = parts.n, parts.k
        parts.only(("qweight", "qzeros", "scales", "bias"))
        parts.require_bias()
        if n % 8:
            raise parts.error("qweight", f"the layer is [N={n}, K={k}]; N is packed in multiples of 8")
        groups = -(-k // (self._group_size or k))
        parts.require("qweight", ("I32",), [k, n // 8])
        parts.require("qzeros", ("I32",), [groups, n // 8])
        parts.require("scales", FLOATS, [groups, n])

    def layer(self, parts: Parts) -> Linear:
        """See `Format.layer`."""
        q, zeros = (_unpack(parts.read(key)).t().contiguous() for key in ("qweight", "qzeros"))
        return integer_layer(parts, q, parts.read_scales("scales").t().contiguous(), zeros, self._group_size)


def _unpack(packed: Tensor) -> Tensor:
    """uint8 ``[A, 8 B]`` of int32 ``[A, B]``, channels in their order."""
    stored = unpack_words(packed, 4, 1).view(len(packed), -1, 8)
    return stored.index_select(2, torch.tensor(_PLACES)).flatten(1)
