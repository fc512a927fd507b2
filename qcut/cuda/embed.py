"""`qcut.ops.embed` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.cuda.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, pdl, target
from qcut.cuda.streams import current_stream
from qcut.emitters.decoder import embed as kernels
from qcut.errors import ShapeError
from qcut.ops.embed import EmbedRows
from qcut.ops.registry import serves

_MOST_ELEMENTS = 1 << 33
"""Threads are counted in 32 bits, and each has at least 4 elements of a row."""

_plans: PlanCache[LaunchPlan] = PlanCache()


@serves(EmbedRows)
def embed_rows(call: EmbedRows) -> Tensor:
    call.check()
    ids, dtype, device = call.ids, call.dtype, call.table.get_device()
    columns, rows = call.table.shape[1], ids.shape[0]
    y = torch.empty((rows, columns), dtype=dtype, device=call.table.device)
    zeroed = call.zeroed
    if rows == 0:
        if zeroed is not None:
            zeroed.zero_()
        return y
    if rows * columns >= _MOST_ELEMENTS:
        raise ShapeError(f"qcut::embed_rows: {rows} ids of {columns} columns; allowed: below 2**33 elements")
    tables = [t if t.stride(1) == 1 else t.contiguous() for t in (call.table, call.position_table) if t is not None]
    vector = 16 // y.element_size()
    aligned = columns % vector == 0 and all(
        t.data_ptr() % (vector * t.element_size()) == 0 == t.stride(0) % vector for t in tables
    )
    key = (dtype, call.table.dtype, len(tables) == 2, aligned, zeroed is not None, columns, device)
    plan = _plans.get(key) or _plans.make(key, lambda: _plan(*key))
    scales = [] if call.scale is None else [call.scale.contiguous()]
    places = [] if call.positions is None else [call.positions.contiguous()]
    given = [ids.contiguous(), tables[0], *scales, *places, *tables[1:], y]
    strides, counts = (t.stride(0) for t in tables), (t.shape[0] for t in tables)
    args = (*(t.data_ptr() for t in given), *strides, *counts, rows, columns)
    if zeroed is not None:
        args = (*args, zeroed.data_ptr(), zeroed.numel())
    plan.launch(rows, args, current_stream(device))
    return y


def _plan(
    dtype: torch.dtype, table: torch.dtype, positions: bool, aligned: bool, zeroes: bool, columns: int, device: int
) -> LaunchPlan:
    desc = kernels.EmbedRows(DTYPES[dtype], DTYPES[table], target(device).arch, positions, aligned, zeroes)
    source = kernels.emit_embed(desc)
    return LaunchSpec(source, lambda m: desc.grid(m, columns), pdl=pdl(device)).load(device)
