"""Refinement of a float16 model on the device."""

from __future__ import annotations

import copy

import torch
from torch import nn

import qcut
from tests.support.zoo import tiny_hf


def test_a_float16_model_comes_nearer_to_its_reference():
    reference = tiny_hf("llama").requires_grad_(False)
    for p in reference.parameters():
        if p.dim() > 1:
            p *= 4.0
    reference = reference.half().cuda()
    model = copy.deepcopy(reference)
    qcut.quantize(model, "codebook2", allow_growth=True, progress=False)
    batches = [torch.randint(0, 64, (8, 24), generator=torch.Generator().manual_seed(i)) for i in range(21)]
    held = batches.pop().cuda()

    @torch.no_grad()
    def divergence() -> float:
        with qcut.execution_path("reference"):
            found, wanted = (m(held).logits.float().log_softmax(-1) for m in (model, reference))
        return float(nn.functional.kl_div(found, wanted, reduction="batchmean", log_target=True))

    before = divergence()
    report = qcut.refine(model, reference, batches, steps=40, code_rate=3e-2, progress=False)
    assert report.losses[-1] < report.losses[0]
    assert divergence() < 0.8 * before
    assert {p.dtype for p in model.parameters()} == {torch.float16}
