"""`qcut.ops.next_token` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.cuda.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, pdl, target
from qcut.cuda.streams import current_stream
from qcut.emitters.decoder.transformer import ArgmaxRows, emit_argmax
from qcut.ops.next_token import Advance, Argmax
from qcut.ops.registry import serves

_plans: PlanCache[LaunchPlan] = PlanCache()


@serves(Argmax)
def argmax(call: Argmax) -> Tensor:
    call.check()
    best = torch.empty(len(call.logits), dtype=torch.int64, device=call.logits.device)
    _launch(call.logits, (best,))
    return best


@serves(Advance)
def advance(call: Advance) -> None:
    call.check()
    _launch(call.logits, (call.tokens, call.positions, call.slots), call.context)


def _launch(logits: Tensor, written: tuple[Tensor, ...], *context: int) -> None:
    """Write the likeliest tokens, and with a context the places that follow."""
    if len(logits) == 0:
        return
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    dtype, device, advances = logits.dtype, logits.get_device(), bool(context)
    key = (dtype, advances, device)
    plan = _plans.get(key)
    if plan is None:

        def make() -> LaunchPlan:
            desc = ArgmaxRows(DTYPES[dtype], target(device).arch, advances)
            return LaunchSpec(emit_argmax(desc), desc.grid, pdl=pdl(device)).load(device)

        plan = _plans.make(key, make)
    pointers = (t.data_ptr() for t in (logits, *written))
    plan.launch(len(logits), (*pointers, logits.stride(0), logits.shape[1], *context), current_stream(device))
