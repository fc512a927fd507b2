"""Refinement of mixtures: codes of experts are tuned in their stacks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import qcut
from qcut.conversion.refine import refine
from qcut.errors import ConfigError, QcutError
from tests.support.mixtures import KINDS, NEVER, mixture_batches, tiny_mixture

STACK = "model.layers.0.mlp.experts.down"


@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_experts_are_tuned(kind: str) -> None:
    model = tiny_mixture(kind)
    quantized = copy.deepcopy(model)
    qcut.quantize(quantized, "codebook3", progress=False)
    modules, before = dict(quantized.named_modules()), copy.deepcopy(quantized)
    done = refine(
        quantized, model, mixture_batches(), steps=24, layers=["*.mlp.experts"], code_rate=0.05, progress=False
    )
    assert sum(done.losses[-3:]) < sum(done.losses[:3])
    assert done.changed > 0
    replaced = {name for name, module in quantized.named_modules() if module is not modules[name]}
    assert replaced == {f"model.layers.{i}.mlp.experts.{key}" for i in range(2) for key in ("up", "down")}
    new, old = quantized.get_submodule(STACK), before.get_submodule(STACK)
    kept = [torch.equal(a, b) for a, b in zip(_weights(new), _weights(old), strict=True)]
    assert not any(kept[: NEVER[0]])
    assert all(kept[e] for e in NEVER) or kind == "GptOss"  # its router has a bias, which is tuned
    ids = mixture_batches()[0]
    with torch.no_grad():
        far = [_divergence(m(ids).logits, model(ids).logits) for m in (quantized, before)]
    assert far[0] < far[1]


def _weights(stack: Any) -> list[torch.Tensor]:
    return list(stack.dequantized_weight())


def _divergence(found: torch.Tensor, wanted: torch.Tensor) -> float:
    p = wanted.log_softmax(-1)
    return float((p.exp() * (p - found.log_softmax(-1))).sum())


def test_model_is_restored_where_refining_fails() -> None:
    model = tiny_mixture()
    quantized = copy.deepcopy(model)
    qcut.quantize(quantized, "codebook3", progress=False)
    modules, state = dict(quantized.named_modules()), copy.deepcopy(quantized.state_dict())
    with pytest.raises(QcutError, match="verify"):
        refine(quantized, model, mixture_batches(), steps=8, rate=5.0, code_rate=5.0, progress=False)
    with pytest.raises(ConfigError, match="found no untied layer"):
        refine(quantized, model, mixture_batches(), layers=["*.sideways"], progress=False)
    assert dict(quantized.named_modules()) == modules
    assert all(torch.equal(tensor, state[key]) for key, tensor in quantized.state_dict().items())
