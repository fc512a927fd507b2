"""`qcut.ops.next_token` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.cuda.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, pdl, target
from qcut.cuda.streams import current_stream
from qcut.emitters.decoder.argmax import ArgmaxRows, emit_argmax
from qcut.ops.next_token import Advance, Argmax
from qcut.ops.registry import serves

_plans: PlanCache[LaunchPlan] = PlanCache()


@serves(Argmax)
def argmax(call: Argmax) -> Tensor:
    call.check()
    best = torch.empty(call.logits.shape[0], dtype=torch.int64, device=call.logits.device)
    _launch(call.logits, (best,))
    return best


@serves(Advance)
def advance(call: Advance) -> None:
    call.check()
    _launch(call.logits, (call.tokens, call.positions, call.slots), call.context)


def _launch(logits: Tensor, written: tuple[Tensor, ...], *context: int) -> None:
    """Write the likeliest tokens and, where a context is given, their positions and slots."""
    rows, columns = logits.shape
    if rows == 0:
        return
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    device = logits.get_device()
    key = (logits.dtype, bool(context), device)
    plan = _plans.get(key) or _plans.make(key, lambda: _plan(*key))
    pointers = (t.data_ptr() for t in (logits, *written))
    plan.launch(rows, (*pointers, logits.stride(0), columns, *context), current_stream(device))


def _plan(dtype: torch.dtype, advances: bool, device: int) -> LaunchPlan:
    desc = ArgmaxRows(DTYPES[dtype], target(device).arch, advances)
    return LaunchSpec(emit_argmax(desc), desc.grid, pdl=pdl(device)).load(device)
