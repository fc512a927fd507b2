"""Parts of a layer on several devices: how its stored tensors are cut, and the layer of one part.

A part has some of the output channels, or some of the input channels. The first kind computes what the whole layer
computes for its channels: bitwise where products are of int8; other kernels are chosen by size, and may add in another
order. Results of the second kind add up to the whole layer's result. Where tokens become int8, each part has the scale
of its own columns, and so other roundings than the whole layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from qcut.errors import CheckpointError, UnsupportedError, layer_prefix
from qcut.layers.linear import Linear
from qcut.layers.quantized import quantized_layers
from qcut.numerics.int8 import colsum_ref
from qcut.schemes import FP8, Codebook, Scheme, W8A8Rotated

CUT = {
    **dict.fromkeys(("weight_scale", "col_scale", "colsum", "norm_scale"), (0,)),
    **dict.fromkeys(("qweight", "weight", "indices", "norms", "residual_indices", "residual_norms", "offsets"), (0, 1)),
}
"""Dimensions along which parts cut a stored tensor: 0 is that of output channels, 1 of input channels. The tensors
that are not here are one for the whole layer."""


def part_scheme(scheme: Scheme, first: int, k: int, name: str | None = None) -> Scheme:
    """The scheme of some of a layer's input channels: a group's rotation is seeded by its place in the whole layer.

    Args:
        scheme: of the whole layer.
        first: the first input channel of the part.
        k: input channels of the part.
        name: of the layer, for messages.

    Raises:
        UnsupportedError: the part ends inside a group or a byte, or its columns are in an order of the whole layer's.
    """
    if isinstance(scheme, FP8) and scheme.blocks:
        raise UnsupportedError(f"layer {name!r}: {scheme.name} in parts of {k} input channels; allowed: whole layers")
    if not isinstance(scheme, Codebook | W8A8Rotated):
        return scheme
    size, bits = scheme.group_size, scheme.widths if isinstance(scheme, Codebook) else ()
    whole = size is not None and not k % size and not first % size and not any(k * b % 8 for b in bits)
    if not whole or getattr(scheme, "ordered", False):
        raise UnsupportedError(
            f"layer {name!r}: {scheme.name} in parts of {k} input channels, groups of {size or 'whole rows'}; allowed: "
            "parts of whole groups and bytes, so fewer devices or smaller groups"
        )
    if isinstance(scheme, W8A8Rotated):
        return replace(scheme, seed=scheme.seed + first)
    return replace(scheme, seed=scheme.seed + first, residual_seed=scheme.residual_seed + first)


def part_shapes(scheme: Scheme, n: int, k: int, name: str | None = None) -> dict[str, tuple[list[int], torch.dtype]]:
    """Shape and dtype of each stored tensor of some of a layer's input channels, by key, without bias.

    Args:
        scheme: `part_scheme`.
        n: output channels.
        k: input channels of the part.
        name: of the layer, for messages.
    """
    entries = Linear(k, n, False, scheme, device="meta", name=name).stored()
    # The padding of whole rows is not that of parts.
    return {key: ([n, k] if key == "qweight" else list(entry.shape), entry.dtype) for key, entry in entries.items()}


def part_layer(scheme: Scheme, n: int, k: int, tensors: Mapping[str, Tensor], name: str | None = None) -> Linear:
    """The layer of a part, in evaluation mode.

    Args:
        scheme: that of the whole layer, or `part_scheme`.
        n: output channels.
        k: input channels.
        tensors: as `part_shapes` says; ``qweight`` may be padded, and ``colsum`` may be that of whole rows.
        name: of the layer, for messages.

    Raises:
        CheckpointError: values that quantizing never gives.

    Exactness: holds the tensors as they are.
    """
    layer, state = Linear(k, n, False, scheme, device="meta", name=name), dict(tensors)
    if "qweight" in state:
        padding = layer.stored()["qweight"].shape[1] - state["qweight"].shape[1]
        state["qweight"] = nn.functional.pad(state["qweight"], (0, padding))
        if "colsum" in state:
            state["colsum"] = colsum_ref(state["qweight"])
    if problem := layer.state_problem(state):
        raise CheckpointError(f"layer {name!r}: {problem[0]}: {problem[1]}")
    try:
        layer.load_state_dict(state, assign=True)
    except RuntimeError as exc:
        raise CheckpointError(f"layer {name!r}: {exc}") from exc
    return layer.eval()


def refuse_parts(model: nn.Module, what: str) -> None:
    """Refuse what needs whole layers.

    Args:
        model: any module.
        what: was asked for, for the message.

    Raises:
        UnsupportedError: a layer is a part of one that is cut across processes (named).
    """
    for layer in quantized_layers(model).values():
        if layer.parts > 1:
            raise UnsupportedError(
                f"{layer_prefix(layer.name)}{what}: the process has one of {layer.parts} parts of the layer; "
                "allowed: a model that was loaded in one process"
            )
