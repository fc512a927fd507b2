"""Builds qcut layers of the integers, levels, scales and zero points that all formats come down to."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.checkpoints.formats.parts import Parts
from qcut.errors import CheckpointError, QcutError, UnsupportedError
from qcut.layers.codebook import CodebookLinear
from qcut.layers.linear import Linear
from qcut.layers.shifted import ShiftedCodebookLinear
from qcut.numerics.codebook.quantizer import RotatedCodebook
from qcut.numerics.codebook.rotation import NO_ROTATION
from qcut.schemes import W8A8, W8A16, Codebook, ShiftedCodebook, padded_k


def unpack_int32(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack integers of 4 or 8 bits from int32, the lowest bits first.

    Args:
        packed: int32 ``[A, B]``.
        bits: 4 or 8.
        dim: along which integers are packed: 0 or 1.

    Returns:
        uint8 ``[A * 32 / bits, B]`` or ``[A, B * 32 / bits]``.
    """
    rows = (packed.t() if dim == 0 else packed).contiguous().view(torch.uint8)  # little-endian
    q = rows if bits == 8 else torch.stack((rows & 15, rows >> 4), -1).flatten(-2)
    return q.t() if dim == 0 else q


def centred(q: Tensor) -> Tensor:
    """int8 of unsigned bytes: ``q - 128``."""
    return (q ^ 0x80).view(torch.int8)


def int8_layer(parts: Parts, q: Tensor, scale: Tensor, scheme: W8A8 | W8A16) -> Linear:
    """A layer of int8 weights with a scale for each output channel.

    Args:
        parts: name, sizes and bias of the layer.
        q: int8 ``[N, K]``.
        scale: floating ``[N]``, finite.
        scheme: dynamic W8A8, or W8A16.

    Raises:
        CheckpointError: a scale below 0, or what the scheme does not allow.

    Exactness: weights and scales as given; a row whose scale is 0 becomes zeros with the scale 1.
    """
    bias = parts.read_bias()
    try:
        layer = Linear(parts.k, parts.n, bias is not None, scheme, device="meta", name=parts.name)
        padded = torch.zeros((parts.n, padded_k(parts.k)), dtype=torch.int8, device="cpu")
        padded[:, : parts.k] = q
        scale = scale.to(torch.float32)
        empty = scale == 0
        padded[empty] = 0
        state = {"qweight": padded, "weight_scale": torch.where(empty, 1.0, scale)}
        state |= {} if bias is None else {"bias": bias}
        if problem := layer.state_problem(state):
            raise CheckpointError(f"{parts.where}: layer {parts.name!r}: {problem[0]}: {problem[1]}")
        layer.load_state_dict(state, assign=True)
    except QcutError as exc:
        raise _placed(exc, parts) from exc
    return layer.eval()


def packed_layer(
    parts: Parts,
    bits: int,
    q: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    group_size: int | None,
    order: Tensor | None,
) -> Linear:
    """`integer_layer` of 4 bits or `byte_layer` of 8, of columns in the model's order.

    Args:
        parts: name, sizes and bias of the layer.
        bits: 4 or 8.
        q: uint8 ``[N, K]``, columns in the model's order.
        scales: see `integer_layer`, as what follows.
        zero_points: integers ``[N, G]``; None: half of ``2**bits`` everywhere.
        group_size: columns of a group; None: whole rows.
        order: of `column_order`.
    """
    if order is not None:
        q = q[:, order.long()]
    make = integer_layer if bits == 4 else byte_layer
    return make(parts, q, scales, zero_points, group_size, order)


def integer_layer(
    parts: Parts,
    q: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    group_size: int | None,
    order: Tensor | None = None,
) -> Linear:
    """A layer of 4-bit integers, ``w = scale * (q - zero_point)``: a codebook of 16 equal steps, the scale its norm.

    Zero points other than 8, and negative scales, for which integers count backwards, become offsets.

    Args:
        parts: name, sizes and bias of the layer.
        q: uint8 ``[N, K]``, 0 to 15, columns of a group side by side.
        scales: floating ``[N, G]``, finite.
        zero_points: integers ``[N, G]``; None: 8 everywhere.
        group_size: columns of a group; None: whole rows.
        order: int32 ``[K]``: column j of q multiplies column ``order[j]`` of x; None: column j.

    Exactness: ``dequantized_weight`` is exact where scales have 16 bits; with float32 scales it rounds to float32.
    """
    norms = stored_scales(scales)
    zeros = (
        torch.full(norms.shape, 8, dtype=torch.int32, device="cpu")
        if zero_points is None
        else zero_points.to(torch.int32)
    )
    negative = norms < 0
    if bool(negative.any()):
        size = parts.k if group_size is None else group_size
        columns = negative.repeat_interleave(size, 1)[:, : parts.k]
        q = torch.where(columns, 15 - q, q)
        zeros = torch.where(negative, 15 - zeros, zeros)
        norms = norms.abs()
    symmetric = bool(((zeros == 8) | (norms == 0)).all())
    offsets = None if symmetric else torch.where(norms == 0, 0, 8 - zeros).half()
    book = RotatedCodebook(
        q, norms, torch.arange(-8.0, 8.0, dtype=torch.float32, device="cpu"), group_size or parts.k, NO_ROTATION, 0
    )
    scheme = Codebook(group_size=group_size, rotation="none", uniform=True)
    return codebook_layer(parts, [book], scheme, offsets, order)


def byte_layer(
    parts: Parts,
    u: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    group_size: int | None,
    order: Tensor | None = None,
) -> Linear:
    """A layer of 8-bit integers, ``w = scale * (u - zero_point)``: W8A16 where a row has one scale, else two passes.

    With ``u = 16 i + j`` and the codebook ``c[i] = i - 7.5``, ``16 c[i] + c[j] = u - 127.5``: the passes have the norms
    ``16 * scale`` and ``scale``. Of what is missing, ``127.5 - zero_point = 16 a + b``, a is a whole number and the
    first pass's offset, b the second's, less than 8.

    Args:
        parts: name, sizes and bias of the layer.
        u: uint8 ``[N, K]``, columns of a group side by side.
        scales: floating ``[N, G]``, finite.
        zero_points: integers ``[N, G]``; None: 128 everywhere.
        group_size: columns of a group; None: whole rows.
        order: see `integer_layer`.

    Raises:
        CheckpointError: a scale below 0.

    Exactness: that of `integer_layer`.
    """
    zeros = (
        torch.full(scales.shape, 128, dtype=torch.int32, device="cpu")
        if zero_points is None
        else zero_points.to(torch.int32)
    )
    if scales.shape[1] == 1 and bool((zeros == 128).all()):
        return int8_layer(parts, centred(u), scales[:, 0], W8A16())
    norms = stored_scales(scales)
    if norms.dtype is torch.float16 and float(norms.abs().max()) * 16 > torch.finfo(torch.float16).max:
        norms = norms.float()
    book, size = torch.arange(16, dtype=torch.float32, device="cpu") - 7.5, group_size or parts.k
    passes = [
        RotatedCodebook(indices, part, book, size, NO_ROTATION, 0)
        for indices, part in ((u >> 4, norms * 16), (u & 15, norms))
    ]
    scheme = Codebook(group_size=group_size, rotation="none", residual_bits=4)
    missing = 127.5 - zeros
    first = (missing / 16).round()
    return codebook_layer(parts, passes, scheme, torch.cat((first, missing - 16 * first), 1).half(), order)


def codebook_layer(
    parts: Parts,
    passes: list[RotatedCodebook],
    scheme: Codebook,
    offsets: Tensor | None = None,
    order: Tensor | None = None,
) -> Linear:
    """A layer of codebook indices and norms, with offsets and an order of the columns where they are given.

    Args:
        parts: name, sizes and bias of the layer.
        passes: one, or two of one codebook.
        scheme: what the passes do not state.
        offsets: float16 ``[N, passes * G]``.
        order: int32 ``[K]``.
    """
    bias = parts.read_bias()
    try:
        if offsets is None and order is None:
            return CodebookLinear.from_passes(passes, bias, scheme, name=parts.name)
        own = ShiftedCodebook(
            residual_bits=scheme.residual_bits,
            group_size=scheme.group_size,
            uniform=scheme.uniform,
            shifted=offsets is not None,
            ordered=order is not None,
        )
        return ShiftedCodebookLinear.from_parts(passes, bias, own, offsets=offsets, order=order, name=parts.name)
    except QcutError as exc:
        raise _placed(exc, parts) from exc


def levels_layer(parts: Parts, indices: Tensor, levels: Tensor, scales: Tensor, group_size: int, key: str) -> Linear:
    """A layer of 4-bit indices into any 16 levels: ``w = scale * levels[index]``, as nf4 and fp4 have them.

    Args:
        parts: name, sizes and bias of the layer.
        indices: uint8 ``[N, K]``, 0 to 15.
        levels: float32 ``[16]``, finite, in any order; some may be equal.
        scales: floating ``[N, G]``, finite.
        group_size: columns of a group, which divides K.
        key: of the tensor with the scales, for messages.

    Raises:
        UnsupportedError: a scale below 0 of a group that is not all 0.

    Exactness: that of `integer_layer`.
    """
    ascending, place = levels.unique(return_inverse=True)
    unused = ascending[-1] + torch.arange(1.0, 17.0 - len(ascending), dtype=torch.float32, device="cpu")
    indices = place.to(torch.uint8)[indices.int()]
    levels = torch.cat((ascending, unused))
    negative = scales < 0
    if bool(negative.any()):
        # A group of zeros is what rounding of nested scales makes negative.
        zero = (levels[indices.int()].view(*scales.shape, group_size) == 0).all(2)
        if bool((negative & ~zero).any()):
            at = (negative & ~zero).nonzero()[0].tolist()
            raise UnsupportedError(
                f"{parts.where}: tensor '{parts.name}.{key}': found the scale {float(scales[tuple(at)])} at {at}; "
                "scales from 0 are served"
            )
        scales = scales.abs()
    book = RotatedCodebook(indices, stored_scales(scales), levels, group_size, NO_ROTATION, 0)
    return codebook_layer(parts, [book], Codebook(group_size=group_size, rotation="none"))


def stored_scales(scales: Tensor) -> Tensor:
    """Scales as norms: in float16 where that holds them exactly, else in float32."""
    halves = scales.to(torch.float16)
    wide = scales.to(torch.float32)
    return halves if torch.equal(halves.float(), wide) else wide


def column_order(parts: Parts, key: str, group_size: int | None) -> Tensor | None:
    """The order that puts the columns of each group side by side, or None where they are so already.

    Args:
        parts: of the layer.
        key: of a tensor that may be missing: integers ``[K]``, the group of each column.
        group_size: columns of a group; None: all.

    Returns:
        int32 ``[K]``, or None.

    Raises:
        UnsupportedError: a group has more or fewer columns than the others.
    """
    if key not in parts.tensors:
        return None
    groups = parts.read(key)
    size = group_size or parts.k
    order = torch.argsort(groups, stable=True)
    expected = torch.arange(parts.k, dtype=torch.int64, device="cpu") // size
    found = groups[order]
    if not torch.equal(found.long(), expected):
        at = int((found != expected).nonzero()[0])
        raise UnsupportedError(
            f"{parts.where}: tensor '{parts.name}.{key}': found group {int(found[at])} at place {at} of the columns in "
            f"the order of their groups; groups of {size} columns, the last of which may have fewer, are served"
        )
    return None if torch.equal(order, torch.arange(parts.k, dtype=torch.int64, device="cpu")) else order.to(torch.int32)


def _placed(exc: QcutError, parts: Parts) -> QcutError:
    """The same failure as one of the checkpoint, with file and layer."""
    if isinstance(exc, CheckpointError):
        return exc
    text = str(exc).removeprefix(f"layer {parts.name!r}: ")
    return CheckpointError(f"{parts.where}: layer {parts.name!r}: {text}")
