"""Floats of 8 and 4 bits of compressed-tensors.

- ``float-quantized``: ``weight`` e4m3 ``[N, K]``, ``weight_scale`` ``[N, 1]``, or ``[1]`` for one scale of a layer, or
  ``[N / rows, K / columns]`` for one of a block; ``input_scale`` ``[1]``, if tokens are quantized with one scale.
- ``mxfp4-pack-quantized``: ``weight_packed`` uint8 ``[N, K / 2]``, two e2m1 along K, the first in the low half;
  ``weight_scale`` uint8 ``[N, K / 32]``, the exponent of a power of two for each 32 columns, plus 127.
- ``nvfp4-pack-quantized``: ``weight_packed`` as above; ``weight_scale`` e4m3 ``[N, K / 16]``, divided by
  ``weight_global_scale`` float32 ``[1]``; ``input_global_scale`` of tokens that the writer would quantize.
"""

from __future__ import annotations

from typing import Any, Literal

from qcut.checkpoints.formats.floats.e2m1 import Mxfp4Layout, Nvfp4Layout
from qcut.checkpoints.formats.floats.e4m3 import INPUT_SCALE, E4m3Layout
from qcut.errors import UnsupportedError
from qcut.schemes import E2M1_GROUP, NVFP4_GROUP, W8A8, W8A16

_ROWS = "allowed: int-quantized, with a scale for each row"

_WEIGHTS = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": E2M1_GROUP}
_GLOBALLY_SCALED = {**_WEIGHTS, "strategy": "tensor_group", "group_size": NVFP4_GROUP}


class FloatQuantized(E4m3Layout):
    """e4m3 weights with a scale for each row, each block, or the layer; see `Layout`.

    Tokens are e4m3 with a scale each, or one that is stored. Those that the writer would quantize in another way, or
    next to weights in blocks, stay in 16 bits.
    """

    name = "float-quantized"

    def __init__(self, weights: dict[str, Any], tokens: dict[str, Any] | None, where: str) -> None:
        found = {key: weights[key] for key in ("num_bits", "type", "symmetric", "strategy")}
        strategy, block = found.pop("strategy"), weights["block_structure"] or ()
        wanted = {"num_bits": 8, "type": "float", "symmetric": True}
        shared = {"tensor": (None, None), "channel": (1, None), "block": tuple(block)}.get(strategy, ())
        if found != wanted or len(shared) != 2:
            raise UnsupportedError(
                f"{where}: weights are {found} with the strategy {str(strategy)[:80]!r}; {self.name} is served of "
                f"{wanted} with the strategies tensor, channel, and block of two numbers"
            )
        _check_float_tokens(tokens, self.name, where, static=True)
        kind = "float" if strategy == "block" else _tokens_of(tokens)
        unused = () if kind == "static" else (INPUT_SCALE,)
        super().__init__("weight_scale", *shared, tokens=kind, unused=unused)

    def row_scheme(self, where: str) -> W8A8 | W8A16:
        """See `Layout.row_scheme`."""
        raise UnsupportedError(f"{where} has floats of 8 bits; {_ROWS}")


class Mxfp4Packed(Mxfp4Layout):
    """e2m1 weights with a power of two for each 32 columns; see `Layout`.

    Tokens that the writer would quantize to floats while it computes stay in 16 bits.
    """

    name = "mxfp4-pack-quantized"
    packed, scales = "weight_packed", "weight_scale"

    def __init__(self, weights: dict[str, Any], tokens: dict[str, Any] | None, where: str) -> None:
        if weights["strategy"] is None:
            weights = {**weights, "strategy": "group"}
        _check_float_weights(weights, _WEIGHTS, self.name, where)
        _check_float_tokens(tokens, self.name, where)

    def row_scheme(self, where: str) -> W8A8 | W8A16:
        """See `Layout.row_scheme`."""
        raise UnsupportedError(f"{where} has floats of 4 bits; {_ROWS}")


class Nvfp4Packed(Nvfp4Layout):
    """e2m1 weights with an e4m3 scale for each 16 columns and a scale of the layer; see `Layout`.

    Tokens that the writer would quantize to floats stay in 16 bits.
    """

    name = "nvfp4-pack-quantized"

    def __init__(self, weights: dict[str, Any], tokens: dict[str, Any] | None, where: str) -> None:
        _check_float_weights(weights, _GLOBALLY_SCALED, self.name, where)
        _check_float_tokens(tokens, self.name, where, static=True)
        super().__init__("weight_packed", "weight_global_scale", divides=True, unused=("input_global_scale",))

    def row_scheme(self, where: str) -> W8A8 | W8A16:
        """See `Layout.row_scheme`."""
        raise UnsupportedError(f"{where} has floats of 4 bits; {_ROWS}")


def _tokens_of(tokens: dict[str, Any] | None) -> Literal["float", "dynamic", "static"]:
    """What layers with a scale for each row make of tokens, see `FP8`."""
    if tokens is None or (tokens["num_bits"], tokens["symmetric"]) != (8, True):
        return "float"
    strategy = tokens["strategy"] or ("tensor" if tokens["group_size"] is None else None)  # the library's default
    if strategy == "token" and tokens["dynamic"] is True:
        return "dynamic"
    return "static" if strategy == "tensor" and tokens["dynamic"] is False else "float"


def _check_float_weights(weights: dict[str, Any], served: dict[str, Any], name: str, where: str) -> None:
    """Refuse other weights of 4 bits than those served."""
    found = {key: weights[key] for key in served}
    if found != served or str(weights["actorder"]).lower() not in ("none", "false"):
        raise UnsupportedError(
            f"{where}: weights are {found} with actorder {str(weights['actorder'])[:80]!r}; {name} is served of "
            f"{served} without one"
        )


def _check_float_tokens(tokens: dict[str, Any] | None, name: str, where: str, *, static: bool = False) -> None:
    """Refuse tokens that the writer would quantize otherwise than to floats, or with scales that are stored."""
    if tokens is None or (tokens["type"] == "float" and (static or tokens["dynamic"] is True)):
        return
    kinds = "ones" if static else "dynamic ones"
    raise UnsupportedError(
        f"{where}: input_activations are {tokens['type']}, dynamic {tokens['dynamic']}; none, or {kinds} of type "
        f"float, which stay in 16 bits, are served of {name}"
    )
