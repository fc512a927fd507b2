"""Builds qcut layers of the integers, levels, scales and zero points that all formats come down to."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from qcut.checkpoints.formats.grid import Grid, Needs, RowScheme, stored_scales
from qcut.checkpoints.formats.parts import Parts
from qcut.errors import CheckpointError, QcutError, UnsupportedError
from qcut.layers.codebook import CodebookLinear
from qcut.layers.linear import Linear
from qcut.layers.shifted import ShiftedCodebookLinear
from qcut.numerics import float8
from qcut.numerics.codebook import float4
from qcut.numerics.codebook.quantizer import RotatedCodebook
from qcut.numerics.codebook.rotation import NO_ROTATION
from qcut.schemes import E2M1_GROUP, FP8, FP8_UNIT_ROWS, Codebook, ShiftedCodebook, padded_k, parse_scheme


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


def row_layer(parts: Parts, q: Tensor, scale: Tensor, scheme: RowScheme, input_scale: Tensor | None = None) -> Linear:
    """A layer of weights of a byte with a scale for each output channel, or of ``fp8_blocks``.

    Args:
        parts: name, sizes and bias of the layer.
        q: int8 ``[N, K]``, or float8_e4m3fn of FP8.
        scale: floating ``[N]``, or ``[ceil(N / 16), ceil(K / 128)]``, finite.
        scheme: dynamic W8A8, W8A16 or FP8.
        input_scale: float32 ``[1]``, of ``fp8_static``.

    Raises:
        CheckpointError: a scale below 0, or what the scheme does not allow.

    Exactness: weights and scales as given; what has the scale 0 becomes zeros with the scale 1.
    """
    bias = parts.read_bias()
    try:
        layer = Linear(parts.k, parts.n, bias is not None, scheme, device="meta", name=parts.name)
        padded = torch.zeros((parts.n, padded_k(parts.k)), dtype=torch.int8, device="cpu")
        padded[:, : parts.k] = q.view(torch.int8)
        scale = scale.to(torch.float32)
        empty = scale == 0
        padded[:, : parts.k].masked_fill_(float8.of_weights(empty, parts.n, parts.k), 0)
        scale = torch.where(empty, 1.0, scale)
        state = {"qweight": padded.view(q.dtype), "weight_scale": scale}
        state |= {} if input_scale is None else {"input_scale": input_scale, "col_scale": input_scale * scale}
        state |= {} if bias is None else {"bias": bias}
        if problem := layer.state_problem(state):
            raise CheckpointError(f"{parts.where}: layer {parts.name!r}: {problem[0]}: {problem[1]}")
        layer.load_state_dict(state, assign=True)
    except QcutError as exc:
        raise _placed(exc, parts) from exc
    return layer.eval()


def packed_layer(parts: Parts, q: Tensor, grid: Grid, needs: Needs | None = None) -> Linear:
    """A layer of integers: `integer_layer` of 4 bits, `byte_layer` of 8, `levels_layer` of 4 bits with levels.

    Args:
        parts: name, sizes and bias of the layer.
        q: uint8 ``[N, K]``, columns in the model's order.
        grid: what the integers stand for.
        needs: what the layer must hold besides what its grid needs.
    """
    if grid.order is not None:
        q = q[:, grid.order.long()]
    if grid.levels is not None:
        wide = (grid.needs() if needs is None else needs).wide
        size = grid.group_size or parts.k
        return levels_layer(parts, q, grid.levels, grid.scales, size, wide=wide, row_factor=grid.row_factor)
    return (integer_layer if grid.bits == 4 else byte_layer)(parts, q, grid, needs)


def integer_layer(parts: Parts, q: Tensor, grid: Grid, needs: Needs | None = None) -> Linear:
    """A layer of 4-bit integers: a codebook of 16 equal steps, the scale its norm.

    Zero points other than 8, and negative scales, for which integers count backwards, become offsets.

    Args:
        parts: name, sizes and bias of the layer.
        q: uint8 ``[N, K]``, 0 to 15, columns of a group side by side.
        grid: what the integers stand for.
        needs: see `packed_layer`.

    Exactness: ``dequantized_weight`` is exact where scales have 16 bits; with float32 scales it rounds to float32.
    """
    needs = grid.needs() if needs is None else needs
    zeros, size = grid.zeros(), grid.group_size or parts.k
    negative = grid.scales < 0
    if bool(negative.any()):
        columns = negative.repeat_interleave(size, 1)[:, : parts.k]
        q = torch.where(columns, 15 - q, q)
        zeros = torch.where(negative, 15 - zeros, zeros)
    norms = grid.scales.abs().to(torch.float32 if needs.wide else torch.float16)
    offsets = torch.where(norms == 0, 0, 8 - zeros).half() if needs.shifted else None
    book = RotatedCodebook(q, norms, torch.arange(-8.0, 8.0, dtype=torch.float32, device="cpu"), size, NO_ROTATION, 0)
    scheme = Codebook(group_size=grid.group_size, rotation="none", levels="steps")
    return codebook_layer(parts, [book], scheme, offsets, _order(parts, grid, needs))


def byte_layer(parts: Parts, u: Tensor, grid: Grid, needs: Needs | None = None) -> Linear:
    """A layer of weights of a byte: of the scheme of rows if a row has one scale, else two passes of integers.

    With ``u = 16 i + j`` and the codebook ``c[i] = i - 7.5``, ``16 c[i] + c[j] = u - 127.5``: the passes have the norms
    ``16 * scale`` and ``scale``. Of what is missing, ``127.5 - zero_point = 16 a + b``, a is a whole number and the
    first pass's offset, b the second's, less than 8.

    Args:
        parts: name, sizes and bias of the layer.
        u: uint8 ``[N, K]``, columns of a group side by side; of FP8 the bits of floats.
        grid: what the integers stand for.
        needs: see `packed_layer`.

    Raises:
        CheckpointError: a scale below 0.

    Exactness: that of `integer_layer`.
    """
    needs = grid.needs() if needs is None else needs
    if isinstance(grid.rows, FP8):
        scale = _unit_scales(parts, grid.scales) if grid.rows.blocks else grid.scales[:, 0]
        return row_layer(parts, u.view(float8.E4M3), scale, grid.rows, grid.input_scale)
    if not needs.shifted:
        return row_layer(parts, centred(u), grid.scales[:, 0], grid.rows)
    norms = grid.scales.to(torch.float32 if needs.wide else torch.float16)
    book, size = torch.arange(16, dtype=torch.float32, device="cpu") - 7.5, grid.group_size or parts.k
    passes = [
        RotatedCodebook(indices, part, book, size, NO_ROTATION, 0)
        for indices, part in ((u >> 4, norms * 16), (u & 15, norms))
    ]
    scheme = Codebook(group_size=grid.group_size, rotation="none", residual_bits=4)
    missing = 127.5 - grid.zeros()
    first = (missing / 16).round()
    offsets = torch.cat((first, missing - 16 * first), 1).half()
    return codebook_layer(parts, passes, scheme, offsets, _order(parts, grid, needs))


def _unit_scales(parts: Parts, scales: Tensor) -> Tensor:
    """Scales of each `FP8_UNIT_ROWS` rows of scales ``[N, G]``."""
    units = scales[::FP8_UNIT_ROWS]
    if len(at := (units.repeat_interleave(FP8_UNIT_ROWS, 0)[: parts.n] != scales).nonzero()):
        row = int(at[0, 0])
        raise UnsupportedError(
            f"{parts.where}: layer {parts.name!r}: rows {row - 1} and {row} have different scales; scales that each "
            f"{FP8_UNIT_ROWS} rows share are served of fp8_blocks"
        )
    return units


def _order(parts: Parts, grid: Grid, needs: Needs) -> Tensor | None:
    if not needs.ordered or grid.order is not None:
        return grid.order
    return torch.arange(parts.k, dtype=torch.int32, device="cpu")


def codebook_layer(
    parts: Parts,
    passes: list[RotatedCodebook],
    scheme: Codebook,
    offsets: Tensor | None = None,
    order: Tensor | None = None,
) -> Linear:
    """A layer of codebook indices and norms, with offsets and an order of the columns if they are given.

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
            levels=scheme.levels,
            shifted=offsets is not None,
            ordered=order is not None,
        )
        return ShiftedCodebookLinear.from_parts(passes, bias, own, offsets=offsets, order=order, name=parts.name)
    except QcutError as exc:
        raise _placed(exc, parts) from exc


def levels_layer(
    parts: Parts,
    indices: Tensor,
    levels: Tensor,
    scales: Tensor,
    group_size: int,
    key: str = "scales",
    wide: bool = False,
    row_factor: Tensor | None = None,
) -> Linear:
    """A layer of 4-bit indices into any 16 levels: ``w = scale * levels[index]``, as nf4 and fp4 have them.

    Args:
        parts: name, sizes and bias of the layer.
        indices: uint8 ``[N, K]``, 0 to 15.
        levels: float32 ``[16]``, finite, in any order; some may be equal.
        scales: floating ``[N, G]``, finite.
        group_size: columns of a group, which divides K.
        key: of the tensor with the scales, for messages.
        wide: whether norms are float32 also where float16 holds them.
        row_factor: float64 ``[N]``, by which scales of e4m3 are multiplied, of groups of e2m1 (NVFP4).

    Raises:
        UnsupportedError: a scale below 0 of a group that is not all 0.

    Exactness: that of `integer_layer`.
    """
    ascending, place = levels.unique(return_inverse=True)
    unused = ascending[-1] + torch.arange(1.0, 17.0 - len(ascending), dtype=torch.float32, device="cpu")
    indices = place.to(torch.uint8)[indices.int()]
    levels = torch.cat((ascending, unused))
    negative = scales.float() < 0
    if bool(negative.any()):
        # A group of zeros is what rounding of nested scales makes negative.
        zero = (levels[indices.int()].view(*scales.shape, group_size) == 0).all(2)
        if bool((negative & ~zero).any()):
            at = (negative & ~zero).nonzero()[0].tolist()
            raise UnsupportedError(
                f"{parts.where}: tensor {parts.full(key)!r}: found the scale {float(scales[tuple(at)])} at {at}; "
                "scales from 0 are served"
            )
        scales = scales.abs()
    if row_factor is not None:
        book = RotatedCodebook(indices, scales, levels, group_size, NO_ROTATION, 0, row_factor)
        return codebook_layer(parts, [book], cast(Codebook, parse_scheme("nvfp4")))
    norms = scales.to(torch.float32) if wide else stored_scales(scales)
    book = RotatedCodebook(indices, norms, levels, group_size, NO_ROTATION, 0)
    is_mxfp4 = (
        group_size == E2M1_GROUP
        and torch.equal(levels, float4.values(levels.device))
        and float4.are_powers_of_two(norms)
    )
    scheme = Codebook(group_size=group_size, rotation="none", levels="e2m1" if is_mxfp4 else "normal")
    return codebook_layer(parts, [book], scheme)


def column_order(parts: Parts, key: str, group_size: int | None) -> Tensor | None:
    """The order that puts the columns of each group side by side, or None if they are so already.

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
            f"{parts.where}: tensor {parts.full(key)!r}: found group {int(found[at])} at place {at} of the columns in "
            f"the order of their groups; allowed: groups of {size} columns; the last may have fewer"
        )
    return None if torch.equal(order, torch.arange(parts.k, dtype=torch.int64, device="cpu")) else order.to(torch.int32)


def _placed(exc: QcutError, parts: Parts) -> QcutError:
    """The same failure as one of the checkpoint, with file and layer."""
    if isinstance(exc, CheckpointError):
        return exc
    text = str(exc).removeprefix(f"layer {parts.name!r}: ")
    return CheckpointError(f"{parts.where}: layer {parts.name!r}: {text}")
