"""`qcut.ops.next_token` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.backends.cuda.launch.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, pdl, target
from qcut.backends.cuda.launch.streams import current_stream
from qcut.emitters.decoder.accept import AcceptTokens
from qcut.emitters.decoder.argmax import PARTS, ArgmaxRows
from qcut.errors import DeviceError
from qcut.ops.next_token import AcceptOp, AdvanceOp, ArgmaxOp
from qcut.ops.registry import serves

SPLIT_BYTES = 128 << 10
"""Rows from so many bytes on are divided among a cluster's CTAs, if each CTA has a multiprocessor to itself: a single
one reads some 64 bytes a cycle, and a cluster's barriers take as long as reading half as much."""


@serves(ArgmaxOp)
def argmax(call: ArgmaxOp) -> Tensor:
    call.check()
    best = torch.empty(call.logits.shape[0], dtype=torch.int64, device=call.logits.device)
    _launch(call.logits, (best,))
    return best


@serves(AdvanceOp)
def advance(call: AdvanceOp) -> None:
    call.check()
    host_copy = _host_copy("advance", call.host_copy, call.turn)
    _launch(call.logits, (call.tokens, call.positions, call.slots), (call.context,), host_copy)


@serves(AcceptOp)
def accept(call: AcceptOp) -> None:
    call.check()
    host_copy = _host_copy("accept", call.host_copy, call.turn) or (0, 0, 0)
    (sequences, read), width, capacity = call.chosen.shape, len(call.tokens), call.text.shape[1]
    if sequences == 0:
        return
    device = call.chosen.get_device()
    state = call.chosen, call.tokens, call.counts, call.positions, call.slots, call.text, call.ends
    sizes = read, width, capacity, call.context, call.least if call.most else 1, call.most
    plan = _accept_plans[device,]
    plan.launch(sequences, (*(t.data_ptr() for t in state), *sizes, *host_copy), current_stream(device))


def _host_copy(op: str, host_copy: Tensor | None, turn: Tensor | None) -> tuple[int, ...]:
    """A kernel's arguments for the host's copy; none without one."""
    if host_copy is None or turn is None:
        return ()
    if not host_copy.is_pinned():
        raise DeviceError(f"qcut::{op}: host_copy is in memory that is not pinned; the GPU cannot write to it")
    return host_copy.data_ptr(), turn.data_ptr(), len(host_copy)


def _launch(
    logits: Tensor, written: tuple[Tensor, ...], context: tuple[int, ...] = (), host_copy: tuple[int, ...] = ()
) -> None:
    """Write the likeliest tokens and, if a context is given, their positions and slots; notify the host."""
    rows, columns = logits.shape
    if rows == 0:
        return
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    device = logits.get_device()
    gpu, parts = target(device), 1
    is_long = columns * logits.element_size() >= SPLIT_BYTES
    if is_long and gpu.exchanges_in_clusters and rows * PARTS <= gpu.sm_count:
        parts = PARTS
    key = (logits.dtype, bool(context), parts, bool(host_copy), device)
    plan = _plans[key]
    pointers = (t.data_ptr() for t in (logits, *written))
    plan.launch(rows, (*pointers, logits.stride(0), columns, *context, *host_copy), current_stream(device))


@PlanCache
def _plans(dtype: torch.dtype, advances: bool, parts: int, tells: bool, device: int) -> LaunchPlan:
    desc = ArgmaxRows(DTYPES[dtype], target(device).arch, advances, parts, tells)
    return LaunchSpec(desc.emit(), desc.grid, pdl=pdl(device)).load(device)


@PlanCache
def _accept_plans(device: int) -> LaunchPlan:
    desc = AcceptTokens(target(device).arch)
    return LaunchSpec(desc.emit(), desc.grid, pdl=pdl(device)).load(device)
