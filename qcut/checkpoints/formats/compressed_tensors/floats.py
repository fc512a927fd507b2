"""4-bit floats of compressed-tensors.

- ``mxfp4-pack-quantized``: ``weight_packed`` uint8 ``[N, K / 2]``, two e2m1 along K, the first in the low half;
  ``weight_scale`` uint8 ``[N, K / 32]``, the exponent of a power of two for each 32 columns, plus 127.
"""

from __future__ import annotations

from typing import Any

from qcut.checkpoints.formats.e2m1 import Mxfp4Layout
from qcut.errors import UnsupportedError
from qcut.schemes import E2M1_GROUP, W8A8, W8A16

_WEIGHTS = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": E2M1_GROUP}


class Mxfp4Packed(Mxfp4Layout):
    """e2m1 weights with a power of two for each 32 columns; see `Layout`.

    Tokens that the writer would quantize to floats while it computes stay in 16 bits.
    """

    name = "mxfp4-pack-quantized"
    packed, scales = "weight_packed", "weight_scale"

    def __init__(self, weights: dict[str, Any], tokens: dict[str, Any] | None, where: str) -> None:
        found = {key: weights[key] for key in _WEIGHTS}
        if found["strategy"] is None:
            found["strategy"] = "group"
        if found != _WEIGHTS or str(weights["actorder"]).lower() not in ("none", "false"):
            raise UnsupportedError(
                f"{where}: weights are {found} with actorder {str(weights['actorder'])[:80]!r}; {self.name} is served "
                f"of {_WEIGHTS} without one"
            )
        if tokens is not None and (tokens["type"], tokens["dynamic"]) != ("float", True):
            raise UnsupportedError(
                f"{where}: input_activations are {tokens['type']}, dynamic {tokens['dynamic']}; none, or dynamic ones "
                f"of type float, which stay in 16 bits, are served of {self.name}"
            )

    def row_scheme(self, where: str) -> W8A8 | W8A16:
        """See `Layout.row_scheme`."""
        raise UnsupportedError(f"{where} has floats of 4 bits; allowed: int-quantized, with a scale for each row")
