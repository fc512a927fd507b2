"""Activations that a quantized layer takes over: found, fused, kept on disk."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


class Body(nn.Module):
    """Two layers with an activation between, and a function that calls them."""

    def __init__(self, body: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32), nn.GELU())
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


class Adds(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = x + layer(x)
        return x


READERS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "indexed": lambda m, x: m.net[1](m.net[0](x)) + m.net[0](x),
    "iterated": lambda m, x: functools.reduce(lambda h, layer: h + layer(h), m.net, x),
    "sliced": lambda m, x: m.net[:1](x) - m.net[1:](m.net[:1](x)),
    "by name": lambda m, x: m.get_submodule("net.2")(x) + m.net(x),
    "whole and part": lambda m, x: m.net(x) * m.net[0](x),
}


@torch.no_grad()
def off(model: nn.Module, scheme: str = "int16x8", **options: Any) -> float:
    """How far the quantized model's result is from the float one's."""
    x = torch.randn(16, 32)
    other = copy.deepcopy(model)
    qcut.quantize(other, scheme, progress=False, **options)
    return ((other(x) - model(x)).norm() / model(x).norm()).item()


@pytest.mark.parametrize("reader", READERS)
def test_readers_between_see_the_layer_alone(reader):
    assert off(Body(READERS[reader]).eval()) < 0.03


CONTAINERS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "type": lambda m, x: m.net(x) * (1 if type(m.net) is nn.Sequential else 3),
    "name": lambda m, x: m.net(x) * (1 if m.net.__class__.__name__ == "Sequential" else 3),
    "table": lambda m, x: m.net(x) * {nn.Sequential: 1.0}.get(type(m.net), 3.0),
    "text": lambda m, x: m.net(x) * (1 if repr(m.net).startswith("Sequential(") else 3),
    "harmless": lambda m, x: m.net(x) if isinstance(m.net, nn.Sequential) else x,
}


@pytest.mark.parametrize("reader", CONTAINERS)
def test_sequentials_whose_class_code_asks_for_stay(reader):
    model = Body(CONTAINERS[reader]).eval()
    assert bool(fusible_activations(model)) == (reader == "harmless")
    assert off(model) < 0.03


def test_sequentials_of_ones_own_are_called_as_written():
    assert off(Adds(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()).eval()) < 0.03


def test_layer_of_two_sequentials_has_both_activations():
    one = nn.Linear(32, 32)
    model = Body(lambda m, x: m.net(x) - m.more(x))
    model.net, model.more = nn.Sequential(one, nn.ReLU()), nn.Sequential(one, nn.Sigmoid())
    assert off(model.eval()) < 0.03


@torch.no_grad()
def test_outside_calls_and_later_hooks_get_unfused_layer():
    model = sequential(nn.SiLU())
    x = torch.randn(5, 32)
    want, between = model(x), model[0](x)
    qcut.quantize(model, "int16x8", progress=False)
    seen = []
    for part in (model[0], model[:1], next(iter(model))):
        torch.testing.assert_close(part(x), between, rtol=0, atol=0.05)
    handle = model[0].register_forward_hook(lambda module, args, y: seen.append(y))
    torch.testing.assert_close(model(x), want, rtol=0, atol=0.05)
    torch.testing.assert_close(seen[0], between, rtol=0, atol=0.05)
    handle.remove()
    model.insert(1, nn.Tanh())
    torch.testing.assert_close(model(x), model[3](nn.functional.silu(between.tanh())), rtol=0, atol=0.05)


class ReLU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() ** 2


class SiLU(nn.SiLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


def patched() -> nn.Module:
    module = nn.ReLU()
    module.forward = lambda x: x.tanh()  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize("make", [ReLU, SiLU, patched])
def test_activations_of_ones_own_stay(make):
    model = sequential(make())
    assert off(model) < 0.03
    assert not fusible_activations(model)


def test_class_whose_forward_was_replaced_is_not_fused(monkeypatch):
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x.sin())
    assert not fusible_activations(sequential(nn.ReLU()))


@pytest.mark.parametrize(("name", "module"), [("relu", nn.ReLU()), ("silu", nn.SiLU()), ("gelu", nn.GELU())])
def test_replaced_function_of_torch_is_not_fused(name, module, monkeypatch):
    model = nn.Sequential(nn.Linear(64, 64), module)
    assert len(fusible_activations(model)) == 1
    monkeypatch.setattr(nn.functional, name, lambda x, **_: x.sin())
    assert not fusible_activations(model)


def test_gpt2_that_reads_projection_is_not_fused():
    class Block(transformers.models.gpt2.modeling_gpt2.GPT2Block):
        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(hidden_states, *args, **kwargs) + self.mlp.c_fc(hidden_states)[..., :32]

    model = gpt2()
    model.transformer.h[0].__class__ = Block
    assert not fusible_activations(model)
    hooked = gpt2()
    hooked.transformer.h[1].mlp.c_fc.register_forward_hook(lambda module, args, y: y * 2)
    assert list(fusible_activations(hooked)) == ["transformer.h.0.mlp.c_fc"]


@torch.no_grad()
def test_fused_sequentials_are_copied_saved_and_compiled(tmp_path: Path):
    model, x = Body(lambda m, x: m.net(x)), torch.randn(4, 32)
    model.__dict__.pop("body")
    model = model.net.eval()
    qcut.quantize(model, "w8a8", progress=False)
    want = model(x)
    qcut.save(model, tmp_path)
    again = qcut.load(
        tmp_path,
        model=lambda: nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32), nn.GELU()),
        progress=False,
    )
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (again, copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert dict(other.fused()) == {"1": "silu", "3": "gelu_erf"}
        assert torch.equal(other(x), want)
        assert torch.equal(other[0](x), model[0](x))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), want)


def test_checkpoint_of_an_own_sequential_is_not_fused(tmp_path: Path):
    qcut.quantize(model := sequential(nn.ReLU()), "w8a8", progress=False)
    qcut.save(model, tmp_path)
    build = lambda: Adds(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))  # noqa: E731
    with pytest.raises(CheckpointError, match=r"fused activation '1': a Adds does not call"):
        qcut.load(tmp_path, model=build, progress=False)
