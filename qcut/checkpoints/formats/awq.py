"""AWQ checkpoints in the ``gemm`` version.

``qweight`` int32 ``[K, N / 8]`` and ``qzeros`` int32 ``[G, N / 8]``: bits 4i to 4i + 3 of an int32 belong to the output
channel ``[0, 2, 4, 6, 1, 3, 5, 7][i]`` of eight; ``scales`` ``[G, N]``:
``w[k, n] = scales[g, n] * (q[k, n] - z[g, n])``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qcut.checkpoints.formats.build import unpack_int32
from qcut.checkpoints.formats.packed_int32 import HISTORY, PackedInt32
from qcut.checkpoints.formats.parts import refuse_others
from qcut.common import schema
from qcut.errors import CheckpointError, UnsupportedError

_CHANNELS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output channel, of eight, of each nibble of an int32."""
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
        "pack_dtype": (schema.nothing_or(schema.text(choices=("int32",))), None),
        "method": (schema.nothing_or(schema.text(choices=("awq",))), None),
    },
    more=True,
)
_FIELDS = (
    *("bits", "w_bit", "group_size", "q_group_size", "version", "format", "checkpoint_format", "pack_dtype", "sym"),
    "method",
)


class Awq(PackedInt32):
    """Reads AWQ layers; see `Format`."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        where = f"{where}: quantization_config"
        data = schema.conform(config, _CONFIG, where, CheckpointError)
        refuse_others(config, {*_FIELDS, *HISTORY}, where)
        bits = data["bits"] or data["w_bit"] or 4
        size = data["group_size"] if data["group_size"] is not None else data["q_group_size"]
        size = 128 if size is None else size
        version = str(data["format"] or data.get("checkpoint_format") or data["version"]).lower()
        if version != "gemm":
            raise UnsupportedError(f"{where}: version is {version!r}; gemm is served")
        super().__init__(bits, (4,), size, False, where)

    def _integers(self, qweight: Tensor) -> Tensor:
        stored = unpack_int32(qweight, 4, 1).view(len(qweight), -1, 8)
        return stored.index_select(2, torch.tensor(_PLACES, dtype=torch.int64, device="cpu")).flatten(1)

    def _zero_points(self, qzeros: Tensor) -> Tensor:
        return self._integers(qzeros)
