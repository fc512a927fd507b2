"""How layers of qcut's schemes are written in compressed-tensors: the arguments of their group, and their tensors.

`integers` and `floats` say how the tensors lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from qcut.checkpoints.formats.floats.e2m1 import BIAS, LEVELS
from qcut.errors import UnsupportedError
from qcut.layers.quantized import StateEntry
from qcut.numerics.codebook import float4
from qcut.schemes import E2M1_GROUP, FP8, NVFP4_GROUP, W8A8, W8A16, Codebook, Scheme

Stored = Mapping[str, StateEntry]
"""Tensors of a layer's state dict."""

SERVED = (
    "w8a8, w8a16, fp8, fp8_dynamic, fp8_static, int4 in groups that divide the columns, mxfp4 and nvfp4 are written"
)
_BYTES = {"num_bits": 8, "symmetric": True, "group_size": None}
_TOKENS = {
    "int": {**_BYTES, "type": "int", "strategy": "token", "dynamic": True},
    "float": {**_BYTES, "type": "float", "strategy": "token", "dynamic": True},
    "static": {**_BYTES, "type": "float", "strategy": "tensor", "dynamic": False},
}


@dataclass(frozen=True)
class Written:
    """How layers of one kind are written.

    Attributes:
        format: a key of `reader.LAYOUTS`.
        bits: of a weight.
        group_size: columns that have a scale; None: whole rows.
        type: ``int`` or ``float``.
        tokens: stay as they are (``none``), become int8 (``int``) or e4m3 (``float``) each by its largest magnitude, or
            e4m3 with one scale for all (``static``).
        tensors: of a layer's state, N and K. Raises `UnsupportedError` of values that have no place in the format.
        global_scale: whether the layer has a scale that divides those of groups, which are e4m3.
    """

    format: str
    bits: int
    tensors: Callable[[Stored, int, int], dict[str, StateEntry]]
    group_size: int | None = None
    type: str = "int"
    tokens: Literal["none", "int", "float", "static"] = "none"
    global_scale: bool = False

    def group(self, targets: list[str]) -> dict[str, Any]:
        """The group of a ``quantization_config`` with such layers."""
        weights = {
            "num_bits": self.bits,
            "type": self.type,
            "symmetric": True,
            "strategy": "channel" if self.group_size is None else "tensor_group" if self.global_scale else "group",
            "group_size": self.group_size,
            "dynamic": False,
            "observer": "memoryless_minmax",
        }
        if self.global_scale:
            weights |= dict.fromkeys(("scale_dtype", "zp_dtype"), "torch.float8_e4m3fn")
        tokens = _TOKENS.get(self.tokens)
        described = {"weights": weights, "input_activations": tokens, "output_activations": None}
        return {"format": self.format, "targets": targets, **described}


def written_as(scheme: Scheme, k: int, name: str) -> Written:
    """How a layer of K columns is written.

    Raises:
        UnsupportedError: its scheme has no place in the format (named).
    """
    if scheme == W8A8():
        return Written("int-quantized", 8, _bytes, tokens="int")
    if scheme == W8A16():
        return Written("pack-quantized", 8, _packed_bytes)
    if isinstance(scheme, FP8) and not scheme.blocks:
        kinds: dict[str, Literal["none", "float", "static"]] = {"float": "none", "dynamic": "float", "static": "static"}
        return Written("float-quantized", 8, _bytes, type="float", tokens=kinds[scheme.tokens])
    if type(scheme) is Codebook and scheme.activation == "fp16":
        size = min(scheme.group_columns(k), k)
        if scheme.levels == "steps" and scheme.bits == 4 and k % size == 0:
            return Written("pack-quantized", 4, _packed_steps, None if size == k else size)
        if scheme.norm_dtype == "e4m3" and k % NVFP4_GROUP == 0:
            form = "nvfp4-pack-quantized"
            return Written(form, 4, _globally_scaled_floats, NVFP4_GROUP, "float", global_scale=True)
        if scheme.levels == "e2m1" and scheme.norm_dtype != "e4m3" and k % E2M1_GROUP == 0:
            return Written("mxfp4-pack-quantized", 4, _packed_floats, E2M1_GROUP, "float")
    raise UnsupportedError(f"layer {name!r} is {scheme.name} with {k} columns; only {SERVED} in this format")


def _made(
    stored: Stored, key: str, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[Tensor], Tensor]
) -> StateEntry:
    entry = stored[key]
    return StateEntry(shape, dtype, (*entry.identity, shape, dtype), lambda: make(entry.read()))


def _bytes(stored: Stored, n: int, k: int) -> dict[str, StateEntry]:
    weight = _made(stored, "qweight", (n, k), stored["qweight"].dtype, lambda q: q[:, :k])
    given = {"input_scale": stored["input_scale"]} if "input_scale" in stored else {}
    return {"weight": weight, "weight_scale": _row_scale(stored, n), **given}


def _packed_bytes(stored: Stored, n: int, k: int) -> dict[str, StateEntry]:
    packed = _made(stored, "qweight", (n, -(-k // 4)), torch.int32, lambda q: words(q[:, :k].view(torch.uint8) ^ 0x80))
    return {"weight_packed": packed, "weight_scale": _row_scale(stored, n), "weight_shape": _shape(n, k)}


def _packed_steps(stored: Stored, n: int, k: int) -> dict[str, StateEntry]:
    packed = _made(stored, "indices", (n, -(-k // 8)), torch.int32, words)  # an index is the integer, plus 8
    return {"weight_packed": packed, "weight_scale": stored["norms"], "weight_shape": _shape(n, k)}


def _packed_floats(stored: Stored, n: int, k: int) -> dict[str, StateEntry]:
    def packed(indices: Tensor) -> Tensor:
        # A group with scale 0 has only codes 0: no power of two is 0.
        used = (stored["norms"].read() > 0).repeat_interleave(E2M1_GROUP // 2, 1).to(indices.device)
        return torch.where(used, _byte_codes().to(indices.device)[indices.long()], 0)

    def exponents(norms: Tensor) -> Tensor:
        found = torch.frexp(norms.float())[1] - 1 + BIAS
        return torch.where(norms > 0, found, 0).to(torch.uint8)

    return {
        "weight_packed": _made(stored, "indices", (n, k // 2), torch.uint8, packed),
        "weight_scale": _made(stored, "norms", (n, k // E2M1_GROUP), torch.uint8, exponents),
    }


def _globally_scaled_floats(stored: Stored, n: int, k: int) -> dict[str, StateEntry]:
    factor = stored["norm_scale"].read()
    scale = factor[:1].reciprocal().float()
    if not bool((scale.double().reciprocal() == factor).all()):
        raise UnsupportedError(
            f"norm_scale is {float(factor.min())} to {float(factor.max())}; allowed: the inverse of one float32 number "
            "for all rows, which the format stores"
        )
    return {
        "weight_packed": _made(
            stored, "indices", (n, k // 2), torch.uint8, lambda q: _byte_codes().to(q.device)[q.long()]
        ),
        "weight_scale": stored["norms"],
        "weight_global_scale": _made(stored, "norm_scale", (1,), torch.float32, lambda _: scale),
    }


def _byte_codes() -> Tensor:
    """Two codes uint8 ``[256]`` for two indices in a byte."""
    codes = (float4.values("cpu")[:, None] == LEVELS).int().argmax(1)  # the index that is never used has any
    both = torch.arange(256, dtype=torch.int64, device="cpu")
    return (codes[both & 15] | codes[both >> 4] << 4).to(torch.uint8)


def _row_scale(stored: Stored, n: int) -> StateEntry:
    return _made(stored, "weight_scale", (n, 1), torch.float32, lambda scale: scale[:, None])


def _shape(n: int, k: int) -> StateEntry:
    return StateEntry((2,), torch.int64, ("shape", n, k), partial(torch.tensor, [n, k], device="cpu"))


def words(packed: Tensor) -> Tensor:
    """int32 ``[N, ceil(B / 4)]`` of bytes uint8 ``[N, B]``, the first in the lowest bits; missing bytes are 0."""
    return torch.nn.functional.pad(packed, (0, -packed.shape[1] % 4)).contiguous().view(torch.int32)
