"""Activations that a quantized layer takes over: found, fused, kept on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import qcut
from qcut.errors import CheckpointError
from qcut.models.fusion import FusedActivation, FusedSequential, fusible_activations

transformers = pytest.importorskip("transformers")


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=64)
    return transformers.GPT2LMHeadModel(config).eval()


def sequential(activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 48), activation, nn.Linear(48, 16)).eval()


def test_gpt2_mlps_are_found():
    found = fusible_activations(gpt2())
    assert found == {f"transformer.h.{i}.mlp.c_fc": (f"transformer.h.{i}.mlp.act", "gelu_tanh") for i in (0, 1)}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.ReLU(), "relu"),
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu_erf"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
    ],
)
def test_neighbours_in_a_sequential_compute_the_same(module, name):
    x = torch.randn(5, 32)
    apart, fused = sequential(module), sequential(module)
    fused.load_state_dict(apart.state_dict())
    qcut.quantize(apart, "w8a16", fuse=False, progress=False)
    qcut.quantize(fused, "w8a16", progress=False)
    assert apart[0].activation == "none"
    assert fused[0].activation == name
    assert isinstance(fused, FusedSequential)
    assert dict(fused.fused()) == {"1": name}
    torch.testing.assert_close(fused(x), apart(x), rtol=0, atol=2e-6)


@pytest.mark.parametrize("module", [nn.Tanh(), nn.Dropout(), nn.LeakyReLU()])
def test_other_functions_stay(module):
    model = sequential(module)
    qcut.quantize(model, "w8a8", progress=False)
    assert model[1] is module
    assert model[0].activation == "none"


def test_a_layer_left_in_float_keeps_its_activation():
    model = sequential(nn.ReLU())
    qcut.quantize(model, "w8a8", skip=("0",), progress=False)
    assert isinstance(model[1], nn.ReLU)


@torch.no_grad()
def test_checkpoint_remembers_what_was_fused(tmp_path: Path):
    model, ids = gpt2(), torch.arange(8)[None]
    qcut.quantize(model, "w8a8", progress=False)
    qcut.save(model, tmp_path)
    again = qcut.load(tmp_path, progress=False)
    assert isinstance(again.transformer.h[1].mlp.act, FusedActivation)
    assert torch.equal(again(ids).logits, model(ids).logits)
    config = tmp_path / "qcut_config.json"
    config.write_text(config.read_text().replace("h.1.mlp.act", "h.1.mlp.c_proj"))
    with pytest.raises(CheckpointError, match=r"fused activation 'transformer.h.1.mlp.c_proj'"):
        qcut.load(tmp_path, progress=False, verify=False)
