"""CUDA implementation of `qcut.ops.embed`, imported at the first CUDA call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qcut.cuda import plans as launch_plans
from qcut.cuda.plans import DTYPES, LaunchPlan, target
from qcut.emitters.core.arch import architecture
from qcut.emitters.decoder.embed import EmbedRows, emit_embed
from qcut.ops import embed as embed_ops

_plans: dict[tuple[Any, ...], LaunchPlan] = {}
_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream


def embed_rows(
    ids: Tensor,
    table: Tensor,
    scale: Tensor | None,
    positions: Tensor | None,
    position_table: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    embed_ops._check(ids, table, scale, positions, position_table, dtype)
    columns, rows, device = table.shape[1], len(ids), table.get_device()
    y = torch.empty((rows, columns), dtype=dtype, device=table.device)
    if rows == 0:
        return y
    tables = [t if t.stride(1) == 1 else t.contiguous() for t in (table, position_table) if t is not None]
    vector = 16 // y.element_size()
    aligned = columns % vector == 0 and all(
        t.data_ptr() % (vector * t.element_size()) == 0 == t.stride(0) % vector for t in tables
    )
    key = (dtype, table.dtype, len(tables), aligned, columns, device)
    plan = _plans.get(key)
    if plan is None:
        arch = target(device).arch
        desc = EmbedRows(DTYPES[dtype], DTYPES[table.dtype], arch, len(tables) == 2, aligned)
        kernel = launch_plans.load(emit_embed(desc), device)
        plan = _plans[key] = LaunchPlan(kernel, lambda m: desc.grid(m, columns), pdl=architecture(arch).pdl)
    scales = [] if scale is None else [scale.contiguous()]
    places = [] if positions is None else [positions.contiguous()]
    given = [ids.contiguous(), tables[0], *scales, *places, *tables[1:], y]
    strides, counts = (t.stride(0) for t in tables), (len(t) for t in tables)
    plan.launch(rows, (*(t.data_ptr() for t in given), *strides, *counts, rows, columns), _stream(device))
    return y
