"""The benchmark of codebooks' quality: what it makes of variants that are refined."""

from __future__ import annotations

import argparse
import copy

import pytest
import torch
from torch import nn

from benchmarks.codebook_quality import VARIANTS, divergence, is_refined, kind_of, refined
from qcut.models.modules import weight_nk
from qcut.models.selection import find_layers
from qcut.numerics.codebook.quantizer import dequantize, quantize

pytest.importorskip("transformers", reason="the benchmark needs the hf extra")


def test_what_variants_are_fitted_to() -> None:
    kinds = {name: (kind_of(name), is_refined(name)) for name in VARIANTS if "codebook3" in name}
    assert kinds == {
        "codebook3": ("", False),
        "codebook3_inputs": ("inputs", False),
        "codebook3_curvature": ("curvature", False),
        "codebook3_refined": ("curvature", True),
    }


@torch.no_grad()
def test_refined_weights_come_back_in_a_float_model() -> None:
    from tests.support.zoo import tiny_hf

    model = tiny_hf("gpt2").requires_grad_(False)
    for p in model.parameters():
        if p.dim() > 1:
            p *= 4.0
    layers = find_layers(model)
    made = {name: (quantize(weight_nk(module), 2),) for name, module in layers.items()}
    before = {name: weight_nk(module).clone() for name, module in layers.items()}
    windows = torch.randint(0, 64, (64, 24), generator=torch.Generator().manual_seed(0))
    args = argparse.Namespace(refine_batch=8, refine_steps=30, code_rates=[0.0, 3e-2])
    after, about = refined(model, made, windows, args, progress=False)
    assert all(type(after.get_submodule(name)) is nn.Linear for name in layers)
    assert all(torch.equal(weight_nk(module), before[name]) for name, module in layers.items())

    rounded = copy.deepcopy(model)
    for name in layers:
        weight_nk(rounded.get_submodule(name)).copy_(dequantize(made[name]))
    held = windows[-4:]  # a sixteenth, which the model was not tuned on
    assert about["divergence"] == pytest.approx(divergence(after, model, held), abs=1e-6)
    assert about["divergence_fitted"] == pytest.approx(divergence(rounded, model, held), rel=1e-3)
    assert divergence(after, model, held) < 0.9 * divergence(rounded, model, held)
    assert about["code_rate"] == 3e-2
