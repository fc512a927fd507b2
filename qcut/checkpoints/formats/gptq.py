"""GPTQ checkpoints, of AutoGPTQ and its successors.

``qweight`` int32 ``[K / 8, N]`` (``[K / 4, N]`` of 8 bits), packed along K; ``qzeros`` int32 ``[G, N / 8]``, packed
along N, z - 1 (of 0 all bits) in the first version of the format and z in the second; ``scales`` ``[G, N]``; ``g_idx``
int32 ``[K]``, the group of each column: ``w[k, n] = scales[g, n] * (q[k, n] - z[g, n])``, ``g = g_idx[k]``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qcut.checkpoints.formats.build import unpack_int32
from qcut.checkpoints.formats.packed_int32 import HISTORY, PackedInt32
from qcut.checkpoints.formats.parts import Parts, refuse_others
from qcut.common import schema
from qcut.errors import CheckpointError, UnsupportedError

_OPTIONAL = {
    "group_size": (schema.integer(-1), 128),
    "checkpoint_format": (schema.nothing_or(schema.text()), None),
    "format": (schema.nothing_or(schema.text()), None),
    "is_marlin_format": (schema.anything(), None),
    "pack_dtype": (schema.nothing_or(schema.text()), "int32"),
    "dynamic": (schema.anything(), None),
    "sym": (schema.boolean(), False),
    "desc_act": (schema.nothing_or(schema.boolean()), None),
    "method": (schema.nothing_or(schema.text(choices=("gptq",))), None),
}
_CONFIG = schema.record({"bits": schema.integer(1, 64)}, _OPTIONAL, more=True)
_VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""What is added to stored zero points, by ``checkpoint_format``."""


class Gptq(PackedInt32):
    """Reads GPTQ layers; see `Format`."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        where = f"{where}: quantization_config"
        data = schema.conform(config, _CONFIG, where, CheckpointError)
        refuse_others(config, {"bits", *_OPTIONAL, *HISTORY}, where)
        version = data["checkpoint_format"] or data["format"] or "gptq"
        if version not in _VERSIONS or data["is_marlin_format"]:
            found = "marlin" if data["is_marlin_format"] else version
            raise UnsupportedError(f"{where}: checkpoint_format is {found!r}; {', '.join(_VERSIONS)} are served")
        if data["pack_dtype"] not in (None, "int32"):
            raise UnsupportedError(f"{where}: pack_dtype is {data['pack_dtype']!r}; int32 is read")
        if data["dynamic"]:
            raise UnsupportedError(
                f"{where}: dynamic is {str(data['dynamic'])[:80]}; one setting for all layers is read"
            )
        super().__init__(data["bits"], (4, 8), data["group_size"], True, where)
        self._added = _VERSIONS[version]
        # Some writers call the second version the first; zero points of symmetric weights show which it is.
        self._symmetric, self._sorted = data["sym"], bool(data["desc_act"])

    def check(self, parts: Parts) -> None:
        """See `Format.check`."""
        super().check(parts)
        if self._sorted and self._group_size is not None and "g_idx" not in parts.tensors:
            raise parts.error("g_idx", "is missing; needed: the group of each column, since desc_act is true")

    def _integers(self, qweight: Tensor) -> Tensor:
        return unpack_int32(qweight, self._bits, 0)

    def _zero_points(self, qzeros: Tensor) -> Tensor:
        stored = unpack_int32(qzeros, self._bits, 1).int()
        if self._symmetric and bool((stored == 1 << self._bits - 1).all()):
            return stored
        # Zero points are below 2**bits: one of 0, less 1, is stored as all bits.
        return stored + self._added & (1 << self._bits) - 1
