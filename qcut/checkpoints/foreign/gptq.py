"""GPTQ checkpoints, of AutoGPTQ and its successors.

``qweight`` int32 ``[K / 8, N]`` (``[K / 4, N]`` of 8 bits), packed along K; ``qzeros`` int32 ``[G, N / 8]``, packed
along N, z - 1 (of 0 all bits) in the first version of the format and z in the second; ``scales`` ``[G, N]``; ``g_idx``
int32 ``[K]``, the group of each column: ``w[k, n] = scales[g, n] * (q[k, n] - z[g, n])``, ``g = g_idx[k]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qcut.checkpoints.foreign.making import by_order, byte_layer, integer_layer
from qcut.checkpoints.foreign.packing import unpack_words
from qcut.checkpoints.foreign.parts import FLOATS, Parts, Stored
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.base import Linear
from qcut.storage import schema

_CONFIG = schema.record(
    {"bits": schema.integer(1, 64)},
    {
        "group_size": (schema.integer(-1), 128),
        "checkpoint_format": (schema.nothing_or(schema.text()), None),
        "format": (schema.nothing_or(schema.text()), None),
        "is_marlin_format": (schema.anything(), None),
        "pack_dtype": (schema.nothing_or(schema.text()), "int32"),
        "dynamic": (schema.anything(), None),
        "sym": (schema.boolean(), False),
    },
    more=True,
)
_VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""What is added to stored zero points, by ``checkpoint_format``."""


class Gptq:
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
        self._bits, size = data["bits"], data["group_size"]
        version = data["checkpoint_format"] or data["format"] or "gptq"
        if version not in _VERSIONS or data["is_marlin_format"]:
            found = "marlin" if data["is_marlin_format"] else version
            raise UnsupportedError(f"{where}: checkpoint_format is {found!r}; {', '.join(_VERSIONS)} are served")
        if self._bits not in (4, 8):
            raise UnsupportedError(f"{where}: bits is {self._bits}; 4 and 8 are served")
        if data["pack_dtype"] not in (None, "int32"):
            raise UnsupportedError(f"{where}: pack_dtype is {data['pack_dtype']!r}; int32 is read")
        if data["dynamic"]:
            raise UnsupportedError(
                f"{where}: dynamic is {str(data['dynamic'])[:80]}; one setting for all layers is read"
            )
        if size == 0:
            raise CheckpointError(f"{where}: group_size is 0; allowed: -1, or 1 and more")
        self._group_size = None if size == -1 else size
        self._added = _VERSIONS[version]
        # Some writers call the second version the first; the zero point of symmetric weights tells.
        self._symmetric = data["sym"]

    def quantized(self, tensors: Mapping[str, Stored]) -> bool:
        """See `Format.quantized`."""
        return "qweight" in tensors

    def check(self, parts: Parts) -> None:
        """See `Format.check`."""
        n, k, per_word = parts.n, parts.k, 32 // self._bits
        parts.only(("qweight", "qzeros", "scales", "g_idx", "bias"))
        parts.require_bias()
        if k % per_word or n % per_word:
            raise parts.error("qweight", f"the layer is [N={n}, K={k}]; multiples of {per_word} are packed")
        groups = -(-k // (self._group_size or k))
        parts.require("qweight", ("I32",), [k // per_word, n])
        parts.require("qzeros", ("I32",), [groups, n // per_word])
        parts.require("scales", FLOATS, [groups, n])
        if "g_idx" in parts.tensors:
            parts.require("g_idx", ("I32", "I64"), [k])

    def layer(self, parts: Parts) -> Linear:
        """See `Format.layer`."""
        q = unpack_words(parts.read("qweight"), self._bits, 0).t().contiguous()
        zeros = unpack_words(parts.read("qzeros"), self._bits, 1).t().int()
        if not (self._symmetric and bool((zeros == 1 << self._bits - 1).all())):
            # Zero points are below 2**bits: one of 0, less 1, is stored as all bits.
            zeros = zeros + self._added & (1 << self._bits) - 1
        scales = parts.read_scales("scales").t().contiguous()
        order = None
        if "g_idx" in parts.tensors:
            try:
                order = by_order(parts.read("g_idx"), self._group_size)
            except ValueError as exc:
                raise UnsupportedError(f"{parts.where}: tensor '{parts.name}.g_idx': {exc}") from None
        if order is not None:
            q = q[:, order.long()]
        make = integer_layer if self._bits == 4 else byte_layer
        return make(parts, q, scales, zeros, self._group_size, order)
