"""Models that stay mostly in float are warned of, with what stays and why; others are not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import qcut
from qcut.errors import QuantizationWarning
from qcut.layers.experts.linear_stack import LinearStack


def mixture() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, num_experts=4, **sizes, **heads)).eval()


def warned(act: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(w.message) for w in caught if issubclass(w.category, QuantizationWarning)]


def test_mixtures_give_no_warning() -> None:
    model = mixture()
    assert not warned(lambda: qcut.quantize(model, "w8a8", progress=False))
    assert any(isinstance(module, LinearStack) for module in model.modules())


def test_mixture_names_experts_that_stay() -> None:
    model = mixture()
    model.model.layers[0].mlp.experts.register_forward_hook(lambda *_: None)
    (made,) = warned(lambda: qcut.quantize(model, "w8a8", progress=False))
    assert "model.layers.0.mlp.experts" in made
    assert "has hooks, or a forward of its own" in made
    assert "%" in made


def test_layers_skipped_on_purpose_give_no_warning() -> None:
    skip = ["lm_head", "*.experts", "*.gate"]
    assert not warned(lambda: qcut.quantize(mixture(), "w8a8", skip=skip, progress=False))
    assert not warned(lambda: qcut.quantize(mixture(), "w8a8", include=["*.q_proj"], progress=False))


def test_dense_models_give_no_warning() -> None:
    net = nn.Sequential(nn.Embedding(900, 64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    assert not warned(lambda: qcut.quantize(net, "w8a8", progress=False))


def test_layers_that_stay_have_their_reason() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).relu() * x.amax()

    net = nn.Sequential(nn.Linear(64, 64), Scaled(64, 64), nn.Conv1d(64, 64, 1))
    (message,) = warned(lambda: qcut.quantize(net, "w8a8", progress=False))
    assert "its own forward" in message
    assert "convolutions" in message
    assert message.startswith("Sequential: 33.")


@pytest.mark.parametrize("skip", ["model.layers.0", "*.gate_up_proj", "*.Q_PROJ"])
@pytest.mark.parametrize("loads", [False, True])
def test_globs_that_skip_nothing_are_reported(skip: str, loads: bool, tmp_path: Path) -> None:
    globs = ["lm_head", "*.v_proj", "*.input_layernorm", "*.experts", skip]
    if loads:
        mixture().save_pretrained(tmp_path)
        config = qcut.QcutConfig("w8a8", modules_to_not_convert=globs)
        (message,) = warned(lambda: Qwen3MoeForCausalLM.from_pretrained(tmp_path, quantization_config=config))
    else:
        (message,) = warned(lambda: qcut.quantize(mixture(), "w8a8", skip=globs, progress=False))
    assert f"skip (modules_to_not_convert): {skip!r} matches no layer" in message
    assert ("'model.layers.0.*' does" in message) == (skip == "model.layers.0")
