"""The input of a decoder's first layer: rows of the table of tokens and of the table of positions."""

from __future__ import annotations

from typing import Annotated, NamedTuple, cast

import torch
from torch import Tensor

from qcut.errors import ConfigError, ShapeError
from qcut.numerics import int8
from qcut.numerics.codebook import layout, rotation
from qcut.numerics.codebook.layout import Geometry
from qcut.numerics.codebook.lookup import look_up_rows
from qcut.numerics.codebook.quantizer import NORM_DTYPES
from qcut.ops.checks import F32, FLOAT_DTYPES, S32, check_dtype, check_indices, check_tensor
from qcut.ops.codebook import can_rotate, check_set
from qcut.ops.registry import MUTATED, operator

_COLUMNS = 32
"""A kernel that gathers rows of a codebook weight needs a number of columns that is a multiple of this."""


@operator("embed_rows", returns="Tensor")
class EmbedRowsOp(NamedTuple):
    """Rows of a table by id, with the rows of a table of positions added to them.

    rne rounds to the nearest value of ``dtype``::

        y[r] = table[ids[r]]                              a table of dtype
        y[r] = rne(f32(table[ids[r]]) * scale[ids[r]])    a table of int8
        y[r] = rne(y[r] + position_table[positions[r]])   with positions

    Args:
        ids: int64 ``[R]``.
        table: ``[V, N]`` of ``dtype``, or of int8 with a scale; V and N at least 1.
        scale: float32 ``[V]`` of an int8 table, else None.
        positions: int32 ``[R]``; None: nothing is added.
        position_table: ``[P, N]`` of ``dtype`` where there are positions, else None; P at least 1.
        dtype: float16, bfloat16 or float32.
        zeroed: float32 of any shape, contiguous, to which zeros are written: the largest magnitudes of rows, which
            later operators raise; None: nothing is.

    Returns:
        y ``[R, N]`` of ``dtype``, contiguous.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above.
        ConfigError: positions without their table, or a table without positions.
        RangeError: an id or a position is outside of its table, on the CPU. A CUDA kernel reads the nearest row
            instead, since an error would have to wait for the device; memory outside of a table is never read.

    Exactness: bitwise ``nn.Embedding``, or `qcut.Embedding` of int8, and the sum of two.
    """

    ids: Tensor
    table: Tensor
    scale: Tensor | None
    positions: Tensor | None
    position_table: Tensor | None
    dtype: torch.dtype
    zeroed: Annotated[Tensor | None, MUTATED] = None

    def check(self) -> None:
        op, ids, table, scale = "embed_rows", self.ids, self.table, self.scale
        _check_ids(op, ids, self.dtype)
        _check_table(op, "table", table, torch.int8 if scale is not None else self.dtype, ids.device)
        rows, columns = table.shape
        if scale is not None:
            check_tensor(op, "scale", scale, F32, (rows,), ids.device)
        _check_others(op, self, columns)

    def fake(self) -> Tensor:
        return self.table.new_empty((self.ids.shape[0], self.table.shape[1]), dtype=self.dtype)

    def cpu(self) -> Tensor:
        check_indices("qcut::embed_rows", "ids", self.ids, len(self.table))
        y = self.table.index_select(0, self.ids)
        if self.scale is not None:
            y = int8.dequantize_ref(y, self.scale.index_select(0, self.ids), self.dtype)
        return _with_others("embed_rows", self, y)


def can_embed(kind: str, group_size: int, k: int) -> bool:
    """Whether `EmbedCodebookOp` reads a weight: one that `can_rotate` names, or unrotated in groups without padding."""
    geometry = Geometry(k, group_size, kind)
    in_order = kind == rotation.NO_ROTATION and geometry.padded_group == geometry.full and k % _COLUMNS == 0
    return in_order or can_rotate(kind, group_size, k)


@operator("embed_codebook", returns="Tensor")
class EmbedCodebookOp(NamedTuple):
    """Rows of a codebook weight by id, rotated back, with the rows of a table of positions added to them.

    rne rounds to the nearest value of ``dtype``; the sum is of passes, H the butterflies of a group of d columns::

        w = sum (H(codebook[indices[ids[r]]]) * sign / sqrt(d)) * (norm[ids[r]] / sqrt(d))    hadamard
        w = sum codebook[indices[ids[r]]] * norm[ids[r]]                                      none
        y[r] = rne(w)
        y[r] = rne(y[r] + position_table[positions[r]])                                       with positions

    Args:
        ids: int64 ``[R]``.
        units: of each set, indices, uint8 ``[T, U, unit_bytes(bits)]``, T tiles of 16 rows, U units of 128 columns.
            Passes of one width are one set along U, passes of two widths are two.
        norms: float16 or float32 ``[V, passes * groups]``, as they were quantized; V at least 1.
        codebooks: of each set, float32 ``[2**bits]``, or pairs, ``[256, 2]``, with 4 bits and one pass.
        bits: of each set, the bits of an index: 2, 3 or 4.
        kind: ``hadamard`` or ``none``.
        group_size: columns of a group; K or more takes whole rows. With ``hadamard``, 32, 64 or 128 that divide K, or K
            where K is one of those; with ``none``, 16, 32, 64 or a multiple of 128.
        seeds: one for each pass, 1 or 2. The CPU makes signs of them; a kernel reads ``operands``.
        k: columns, a multiple of 32.
        operands: int32 ``[passes, Kp / 32]``, Kp the padded columns of a pass, signs of the Hadamard rotation, as
            `qcut.numerics.codebook.tokens.operands` makes them.
        positions: int32 ``[R]``; None: nothing is added.
        position_table: ``[P, K]`` of ``dtype`` where there are positions, else None; P at least 1.
        dtype: float16, bfloat16 or float32.
        zeroed: float32 of any shape, contiguous, to which zeros are written, as for `EmbedRowsOp`; None: nothing is.

    Returns:
        y ``[R, K]`` of ``dtype``, contiguous.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above.
        ConfigError: lists of other lengths, another kind or group, another number of bits or of passes, pairs in two
            passes; positions without their table, or a table without positions.
        RangeError: an id or a position is outside of its table, on the CPU. A CUDA kernel reads the nearest row
            instead, as for `EmbedRowsOp`.

    Exactness: bitwise `qcut.Embedding` of a codebook, and the sum of that and ``nn.Embedding``; the same on every
    device. Butterflies and products are float32, each rounded.
    """

    ids: Tensor
    units: list[Tensor]
    norms: Tensor
    codebooks: list[Tensor]
    bits: list[int]
    kind: str
    group_size: int
    seeds: list[int]
    k: int
    operands: Tensor
    positions: Tensor | None
    position_table: Tensor | None
    dtype: torch.dtype
    zeroed: Annotated[Tensor | None, MUTATED] = None

    def check(self) -> None:
        op, k, passes, device = "embed_codebook", self.k, len(self.seeds), self.ids.device
        _check_ids(op, self.ids, self.dtype)
        if not can_embed(self.kind, self.group_size, k):
            raise ConfigError(
                f"qcut::{op}: kind {self.kind!r} in groups of {self.group_size} of {k} columns; allowed: 'hadamard' in "
                "whole groups of 32, 64 or 128, 'none' in groups of 16, 32, 64 or a multiple of 128, of columns that "
                f"are a multiple of {_COLUMNS}"
            )
        if passes not in (1, 2):
            raise ConfigError(f"qcut::{op}: {passes} seeds; allowed: one for each pass, 1 or 2")
        sets = len(self.units)
        if sets not in (1, passes) or any(len(part) != sets for part in (self.codebooks, self.bits)):
            raise ConfigError(f"qcut::{op}: {sets} sets of weights and {passes} passes; one of each, or one of all")
        geometry, norms = Geometry(k, self.group_size, self.kind), self.norms
        rows = norms.shape[0] if norms.dim() == 2 else 0
        if not rows:
            raise ShapeError(f"qcut::{op}: norms have shape {list(norms.shape)}; allowed: [V, passes * groups], V >= 1")
        check_tensor(op, "norms", norms, NORM_DTYPES, (rows, passes * geometry.groups), device)
        tiles, units_k = layout.row_tiles(rows), passes // sets * geometry.units
        for units, codebook, bits in zip(self.units, self.codebooks, self.bits, strict=True):
            if check_set(op, units, codebook, bits, tiles, units_k, device) and passes > 1:
                raise ConfigError(f"qcut::{op}: pairs in {passes} passes; allowed: 1")
        if self.kind == "hadamard":
            shape = passes, geometry.k_padded // 32
            check_tensor(op, "operands", self.operands, (torch.int32,), shape, device)
        _check_others(op, self, k)

    def fake(self) -> Tensor:
        return self.norms.new_empty((self.ids.shape[0], self.k), dtype=self.dtype)

    def cpu(self) -> Tensor:
        check_indices("qcut::embed_codebook", "ids", self.ids, len(self.norms))
        return _with_others("embed_codebook", self, self._rows(self.ids))

    def by_torch(self) -> Tensor:
        """The result in plain torch on a GPU, where an index beyond a table reads the table's nearest row."""
        y = self._rows(self.ids.clamp(0, len(self.norms) - 1))
        if self.positions is not None and self.position_table is not None:
            y = y + self.position_table.index_select(0, self.positions.clamp(0, len(self.position_table) - 1))
        if self.zeroed is not None:
            self.zeroed.zero_()
        return y

    def _rows(self, ids: Tensor) -> Tensor:
        kind = cast(rotation.Kind, self.kind)
        weight = self.units, self.norms, self.codebooks, self.bits, kind, self.group_size, self.seeds, self.k
        return look_up_rows(ids, *weight).to(self.dtype)


def _check_ids(op: str, ids: Tensor, dtype: torch.dtype) -> None:
    check_dtype(op, "dtype", dtype, FLOAT_DTYPES)
    check_dtype(op, "ids", ids.dtype, (torch.int64,))
    if ids.dim() != 1:
        raise ShapeError(f"qcut::{op}: ids have shape {list(ids.shape)}; allowed: [R]")


def _check_table(op: str, name: str, table: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    check_dtype(op, name, table.dtype, (dtype,))
    if table.dim() != 2 or table.numel() == 0:
        raise ShapeError(f"qcut::{op}: {name} has shape {list(table.shape)}; allowed: [rows, N], neither of them 0")
    check_tensor(op, name, table, (dtype,), table.shape, device)


def _check_others(op: str, call: EmbedRowsOp | EmbedCodebookOp, columns: int) -> None:
    """Check positions, their table and the memory to be zeroed."""
    ids, positions, places, zeroed = call.ids, call.positions, call.position_table, call.zeroed
    if (positions is None) != (places is None):
        raise ConfigError(f"qcut::{op}: positions and their table go together; give both or neither")
    if positions is not None and places is not None:
        check_tensor(op, "positions", positions, S32, ids.shape, ids.device)
        _check_table(op, "position_table", places, call.dtype, ids.device)
        check_tensor(op, "position_table", places, (call.dtype,), (places.shape[0], columns), ids.device)
    if zeroed is not None:
        check_tensor(op, "zeroed", zeroed, F32, zeroed.shape, ids.device)
        if not zeroed.is_contiguous():
            raise ShapeError(f"qcut::{op}: zeroed has strides {list(zeroed.stride())}; allowed: contiguous")


def _with_others(op: str, call: EmbedRowsOp | EmbedCodebookOp, y: Tensor) -> Tensor:
    """Rows with those of positions added, on the CPU; zeros are written, too."""
    if call.positions is not None and call.position_table is not None:
        check_indices(f"qcut::{op}", "positions", call.positions, len(call.position_table))
        y = y + call.position_table.index_select(0, call.positions)
    if call.zeroed is not None:
        call.zeroed.zero_()
    return y
