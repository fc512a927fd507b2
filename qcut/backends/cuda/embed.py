"""`qcut.ops.embed` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.backends.cuda.launch.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, pdl, target
from qcut.backends.cuda.launch.streams import current_stream
from qcut.backends.cuda.operands import is_aligned
from qcut.emitters.decoder import embed as kernels
from qcut.emitters.decoder import embed_codebook as codebook_kernels
from qcut.errors import ShapeError
from qcut.numerics.codebook.layout import Geometry, unit_bytes
from qcut.numerics.codebook.rotation import NO_ROTATION
from qcut.ops.embed import EmbedCodebookOp, EmbedRowsOp
from qcut.ops.registry import serves

_MOST_ELEMENTS = 1 << 33
"""Threads are counted in 32 bits, and each has at least 4 elements of a row."""


@serves(EmbedRowsOp)
def embed_rows(call: EmbedRowsOp) -> Tensor:
    call.check()
    ids, dtype, device = call.ids, call.dtype, call.table.get_device()
    columns, rows = call.table.shape[1], ids.shape[0]
    y = torch.empty((rows, columns), dtype=dtype, device=call.table.device)
    zeroed = call.zeroed
    if rows == 0:
        if zeroed is not None:
            zeroed.zero_()
        return y
    _check_size("embed_rows", rows, columns)
    tables = [t if t.stride(1) == 1 else t.contiguous() for t in (call.table, call.position_table) if t is not None]
    vector = 16 // y.element_size()
    aligned = columns % vector == 0 and all(
        t.data_ptr() % (vector * t.element_size()) == 0 == t.stride(0) % vector for t in tables
    )
    key = (dtype, call.table.dtype, len(tables) == 2, aligned, zeroed is not None, columns, device)
    plan = _plans[key]
    scales = [] if call.scale is None else [call.scale.contiguous()]
    places = [] if call.positions is None else [call.positions.contiguous()]
    given = [ids.contiguous(), tables[0], *scales, *places, *tables[1:], y]
    strides, counts = (t.stride(0) for t in tables), (t.shape[0] for t in tables)
    args = (*(t.data_ptr() for t in given), *strides, *counts, rows, columns)
    if zeroed is not None:
        args = (*args, zeroed.data_ptr(), zeroed.numel())
    plan.launch(rows, args, current_stream(device))
    return y


@PlanCache
def _plans(
    dtype: torch.dtype, table: torch.dtype, positions: bool, aligned: bool, zeroes: bool, columns: int, device: int
) -> LaunchPlan:
    desc = kernels.EmbedRows(DTYPES[dtype], DTYPES[table], target(device).arch, positions, aligned, zeroes)
    source = desc.emit()
    return LaunchSpec(source, lambda m: desc.grid(m, columns), pdl=pdl(device)).load(device)


@serves(EmbedCodebookOp)
def embed_codebook(call: EmbedCodebookOp) -> Tensor:
    call.check()
    ids, k, zeroed, device = call.ids, call.k, call.zeroed, call.norms.get_device()
    rows, count = ids.shape[0], call.norms.shape[0]
    if target(device).ahead_of_time:  # there are no such kernels
        return call.by_torch()
    y = torch.empty((rows, k), dtype=call.dtype, device=call.norms.device)
    if rows == 0:
        if zeroed is not None:
            zeroed.zero_()
        return y
    _check_size("embed_codebook", rows, k)
    geometry, rotates = Geometry(k, call.group_size, call.kind), call.kind != NO_ROTATION
    group, in_pairs = geometry.full if rotates else 0, call.codebooks[0].dim() == 2
    bits = tuple(call.bits) * (len(call.seeds) // len(call.bits))
    options = (in_pairs, call.positions is not None, zeroed is not None)
    key = (call.dtype, call.norms.dtype, bits, group, *options, k, device)
    plan = _codebook_plans[key]
    sets = [(units.contiguous(), book.contiguous()) for units, book in zip(call.units, call.codebooks, strict=True)]
    weights: list[int] = []
    for p, width in enumerate(bits):
        units, book = sets[p if len(sets) > 1 else 0]
        first = 0 if len(sets) > 1 else p * geometry.units * unit_bytes(width)
        weights += units.data_ptr() + first, book.data_ptr(), units.shape[1] * unit_bytes(width)
    given = [call.norms.contiguous(), *[call.operands.contiguous()] * rotates]
    tables = [] if call.position_table is None else [_in_vectors(call.position_table)]
    places = [] if call.positions is None else [call.positions.contiguous()]
    given = [*given, *places, *tables, y]
    strides, counts = (t.stride(0) for t in tables), (t.shape[0] for t in tables)
    ids = ids.contiguous()
    args = (ids.data_ptr(), *weights, *(t.data_ptr() for t in given), *strides, count, *counts)
    args = (*args, rows, k, geometry.k_padded, geometry.full)
    if zeroed is not None:
        args = (*args, zeroed.data_ptr(), zeroed.numel())
    plan.launch(rows, args, current_stream(device))
    return y


@PlanCache
def _codebook_plans(
    dtype: torch.dtype,
    norms: torch.dtype,
    bits: tuple[int, ...],
    group: int,
    in_pairs: bool,
    places: bool,
    zeroes: bool,
    k: int,
    device: int,
) -> LaunchPlan:
    arch = target(device).arch
    desc = codebook_kernels.EmbedCodebook(DTYPES[dtype], DTYPES[norms], bits, group, arch, in_pairs, places, zeroes)
    source = desc.emit()
    return LaunchSpec(source, lambda m: desc.grid(m, k), pdl=pdl(device)).load(device)


def _in_vectors(table: Tensor) -> Tensor:
    """The table if its rows start at multiples of 16 bytes, else a copy; rows have a multiple of 32 columns."""
    in_place = table.stride(1) == 1 and table.stride(0) * table.element_size() % 16 == 0 and is_aligned(table)
    return table if in_place else table.clone(memory_format=torch.contiguous_format)


def _check_size(op: str, rows: int, columns: int) -> None:
    if rows * columns >= _MOST_ELEMENTS:
        raise ShapeError(f"qcut::{op}: {rows} ids of {columns} columns; allowed: below 2**33 elements")
