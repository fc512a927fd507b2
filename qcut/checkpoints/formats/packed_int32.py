"""What GPTQ and AWQ have in common: ``qweight`` and ``qzeros`` in words of 32 bits, ``scales`` of groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from qcut.checkpoints.formats.build import column_order, packed_layer
from qcut.checkpoints.formats.parts import FLOATS, Format, Parts, Stored
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.linear import Linear


class Words(Format):
    """Layers of ``w[k, n] = scales[g, n] * (q[k, n] - z[g, n])``, all but how integers lie in words.

    Args:
        bits: of an integer.
        served: the bits that the format is served with.
        group_size: rows of K that share a scale; -1: all.
        along_k: whether qweight is packed along K, and may be sorted: ``g_idx`` is the group of each row.
        where: the configuration, for messages.

    Raises:
        CheckpointError: groups of no columns.
        UnsupportedError: other bits.
    """

    def __init__(self, bits: int, served: tuple[int, ...], group_size: int, along_k: bool, where: str) -> None:
        if bits not in served:
            raise UnsupportedError(f"{where}: bits is {bits}; {' and '.join(map(str, served))} are served")
        if group_size == 0:
            raise CheckpointError(f"{where}: group_size is 0; allowed: -1, or 1 and more")
        self._bits, self._along_k = bits, along_k
        self._group_size = None if group_size == -1 else group_size

    @abstractmethod
    def _integers(self, qweight: Tensor) -> Tensor:
        """uint8 ``[K, N]``."""

    @abstractmethod
    def _zero_points(self, qzeros: Tensor) -> Tensor:
        """Integers ``[G, N]``."""

    def quantized(self, tensors: Mapping[str, Stored]) -> bool:
        """See `Format.quantized`."""
        return "qweight" in tensors

    def check(self, parts: Parts) -> None:
        """See `Format.check`."""
        n, k, per_word = parts.n, parts.k, 32 // self._bits
        parts.only(("qweight", "qzeros", "scales", *["g_idx"] * self._along_k, "bias"))
        parts.require_bias()
        if n % per_word or (self._along_k and k % per_word):
            packed = "N and K are" if self._along_k else "N is"
            raise parts.error("qweight", f"the layer is [N={n}, K={k}]; {packed} packed in multiples of {per_word}")
        groups = -(-k // (self._group_size or k))
        parts.require("qweight", ("I32",), [k // per_word, n] if self._along_k else [k, n // per_word])
        parts.require("qzeros", ("I32",), [groups, n // per_word])
        parts.require("scales", FLOATS, [groups, n])
        if "g_idx" in parts.tensors:
            parts.require("g_idx", ("I32", "I64"), [k])

    def layer(self, parts: Parts) -> Linear:
        """See `Format.layer`."""
        return packed_layer(
            parts,
            self._bits,
            self._integers(parts.read("qweight")).t().contiguous(),
            parts.read_scales("scales").t().contiguous(),
            self._zero_points(parts.read("qzeros")).t().contiguous(),
            self._group_size,
            column_order(parts, "g_idx", self._group_size),
        )
