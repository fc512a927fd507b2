"""``torch.ops.qcut.embed_rows``: what a decoder's first layer reads, rows of a table and of positions.

    embed_rows(ids, table, scale, positions, position_table, dtype) -> y

y ``[R, N]`` of ``dtype`` (float16, bfloat16 or float32), by ids, int64 ``[R]``. The table ``[V, N]`` is of that dtype,
or int8 with scales, float32 ``[V]``: then a row is ``dtype(f32(table[i]) * scale[i])``. With positions, int32 ``[R]``,
and a table of theirs, ``[P, N]`` of that dtype, their rows are added, and the sum is rounded.

On the CPU an id or a position outside of its table is an IndexError. CUDA cannot tell without waiting for the device,
and reads the nearest row: nothing outside of a table is read.

Exactness: bitwise ``nn.Embedding``, or `qcut.Embedding` of int8, and the sum of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.errors import ConfigError, ShapeError
from qcut.numerics import int8 as numerics
from qcut.ops.checks import FLOAT_DTYPES, check_dtype, check_tensor
from qcut.ops.registry import define

OP = "embed_rows"


def _check(
    ids: Tensor,
    table: Tensor,
    scale: Tensor | None,
    positions: Tensor | None,
    position_table: Tensor | None,
    dtype: torch.dtype,
) -> None:
    check_dtype(OP, "dtype", dtype, FLOAT_DTYPES)
    check_dtype(OP, "ids", ids.dtype, (torch.int64,))
    if ids.dim() != 1:
        raise ShapeError(f"qcut::{OP}: ids have shape {list(ids.shape)}; allowed: [R]")
    _check_table("table", table, torch.int8 if scale is not None else dtype, ids)
    rows, columns = table.shape
    if scale is not None:
        check_tensor(OP, "scale", scale, (torch.float32,), (rows,), ids.device)
    if (positions is None) != (position_table is None):
        raise ConfigError(f"qcut::{OP}: positions and their table go together; give both or neither")
    if positions is not None and position_table is not None:
        check_tensor(OP, "positions", positions, (torch.int32,), (len(ids),), ids.device)
        _check_table("position_table", position_table, dtype, ids)
        check_tensor(OP, "position_table", position_table, (dtype,), (len(position_table), columns), ids.device)


def _check_table(name: str, table: Tensor, dtype: torch.dtype, ids: Tensor) -> None:
    check_dtype(OP, name, table.dtype, (dtype,))
    if table.dim() != 2 or table.numel() == 0:
        raise ShapeError(f"qcut::{OP}: {name} has shape {list(table.shape)}; allowed: [rows, N], neither of them 0")
    check_tensor(OP, name, table, (dtype,), tuple(table.shape), ids.device)


def _fake(
    ids: Tensor,
    table: Tensor,
    scale: Tensor | None,
    positions: Tensor | None,
    position_table: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return table.new_empty((ids.shape[0], table.shape[1]), dtype=dtype)


def _cpu(
    ids: Tensor,
    table: Tensor,
    scale: Tensor | None,
    positions: Tensor | None,
    position_table: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    y = table.index_select(0, ids)
    if scale is not None:
        y = numerics.dequantize_ref(y, scale.index_select(0, ids), dtype)
    if positions is not None and position_table is not None:
        y = y + position_table.index_select(0, positions)
    return y


define(
    "embed_rows(Tensor ids, Tensor table, Tensor? scale, Tensor? positions, Tensor? position_table, ScalarType dtype) "
    "-> Tensor",
    _check,
    _fake,
    _cpu,
    cuda="cuda.embed",
)
