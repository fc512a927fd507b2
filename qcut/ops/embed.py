"""The input of a decoder's first layer: rows of the table of tokens and of the table of positions."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from qcut.errors import ConfigError, ShapeError
from qcut.numerics import int8
from qcut.ops.checks import F32, FLOAT_DTYPES, S32, check_dtype, check_indices, check_tensor
from qcut.ops.registry import MUTATED, operator

_OP = "embed_rows"


@operator(_OP, returns="Tensor")
class EmbedRows(NamedTuple):
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
        ids, table, scale = self.ids, self.table, self.scale
        check_dtype(_OP, "dtype", self.dtype, FLOAT_DTYPES)
        check_dtype(_OP, "ids", ids.dtype, (torch.int64,))
        if ids.dim() != 1:
            raise ShapeError(f"qcut::{_OP}: ids have shape {list(ids.shape)}; allowed: [R]")
        _check_table("table", table, torch.int8 if scale is not None else self.dtype, ids.device)
        rows, columns = table.shape
        if scale is not None:
            check_tensor(_OP, "scale", scale, F32, (rows,), ids.device)
        positions, places = self.positions, self.position_table
        if (positions is None) != (places is None):
            raise ConfigError(f"qcut::{_OP}: positions and their table go together; give both or neither")
        if positions is not None and places is not None:
            check_tensor(_OP, "positions", positions, S32, ids.shape, ids.device)
            _check_table("position_table", places, self.dtype, ids.device)
            check_tensor(_OP, "position_table", places, (self.dtype,), (places.shape[0], columns), ids.device)
        if self.zeroed is not None:
            check_tensor(_OP, "zeroed", self.zeroed, F32, self.zeroed.shape, ids.device)
            if not self.zeroed.is_contiguous():
                raise ShapeError(f"qcut::{_OP}: zeroed has strides {list(self.zeroed.stride())}; allowed: contiguous")

    def fake(self) -> Tensor:
        return self.table.new_empty((self.ids.shape[0], self.table.shape[1]), dtype=self.dtype)

    def cpu(self) -> Tensor:
        check_indices(f"qcut::{_OP}", "ids", self.ids, len(self.table))
        if self.positions is not None and self.position_table is not None:
            check_indices(f"qcut::{_OP}", "positions", self.positions, len(self.position_table))
        y = self.table.index_select(0, self.ids)
        if self.scale is not None:
            y = int8.dequantize_ref(y, self.scale.index_select(0, self.ids), self.dtype)
        if self.positions is not None and self.position_table is not None:
            y = y + self.position_table.index_select(0, self.positions)
        if self.zeroed is not None:
            self.zeroed.zero_()
        return y


def _check_table(name: str, table: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    check_dtype(_OP, name, table.dtype, (dtype,))
    if table.dim() != 2 or table.numel() == 0:
        raise ShapeError(f"qcut::{_OP}: {name} has shape {list(table.shape)}; allowed: [rows, N], neither of them 0")
    check_tensor(_OP, name, table, (dtype,), table.shape, device)
