"""Mixtures of experts: saved and loaded through transformers, each expert by itself, and made float again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import qcut
from qcut.checkpoints.contents import contents
from qcut.errors import UnsupportedError
from qcut.integrations.transformers.stored import StoredLoading
from qcut.layers.experts.experts import Experts
from qcut.layers.experts.opening import opened as laid_open
from tests.integrations.transformers.mixtures import FAMILIES, mixture, quantized_mixture
from tests.integrations.transformers.support import IDS, logits, opened, same
from tests.support.files import rewrite

SCHEMES = (
    "w8a8",
    "w8a8_rotated",
    "w8a16",
    "fp8",
    "fp8_blocks",
    "int16x8",
    "int4",
    "codebook3",
    "codebook4+4_int8",
    "codebook4_pairs",
    "codebook4_rows",
    "nvfp4",
)
EXPERTS = "model.layers.1.mlp.experts"


def names_in(folder: Path) -> dict[str, str]:
    """The file of each stored tensor."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path.name)
    return found


def experts_of(model: Any) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


@pytest.mark.parametrize("family", FAMILIES)
def test_mixtures_round_trip_in_shards(family: str, tmp_path: Path) -> None:
    model = quantized_mixture(family, "w8a8" if family in ("Mixtral", "GptOss") else "codebook4_g32")
    assert experts_of(model)
    model.save_pretrained(tmp_path / "first", max_shard_size="20KB")
    again = opened(tmp_path / "first")
    assert same(again, model)
    assert same(qcut.load(tmp_path / "first", progress=False), model)
    again.save_pretrained(tmp_path / "again", save_original_format=False)
    assert same(opened(tmp_path / "again"), model)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_of_each_scheme_round_trip(scheme: str, tmp_path: Path) -> None:
    model = quantized_mixture(scheme=scheme)
    model.save_pretrained(tmp_path)
    assert same(opened(tmp_path), model)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "GptOss"])
def test_transformers_reads_stacks_of_save(family: str, tmp_path: Path) -> None:
    model = quantized_mixture(family)
    qcut.save(model, tmp_path / "saved")
    read = opened(tmp_path / "saved")
    assert same(read, model)
    qcut.save(read, tmp_path / "again")
    assert same(qcut.load(tmp_path / "again", progress=False), model)


def test_names_are_those_of_the_hub(tmp_path: Path) -> None:
    quantized_mixture("Mixtral", "w8a8").save_pretrained(tmp_path, max_shard_size="3KB")
    files = names_in(tmp_path)
    experts = "model.layers.1.block_sparse_moe.experts"
    keys = [f"{experts}.{e}.{piece}.qweight" for e in range(4) for piece in ("w1", "w2", "w3")]
    assert files.keys() >= set(keys)
    assert len({files[key] for key in keys[:3]}) > 1
    with safe_open(tmp_path / files[keys[0]], "pt") as file:
        assert file.get_slice(keys[0]).get_shape() == [32, 64]


def test_state_dict_of_stacks_is_loaded(tmp_path: Path) -> None:
    model = quantized_mixture("Mixtral")
    model.save_pretrained(tmp_path)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    config = AutoConfig.from_pretrained(tmp_path)
    assert same(type(model).from_pretrained(None, config=config, state_dict=state), model)


def test_one_projection_in_float_round_trips(tmp_path: Path) -> None:
    model = quantized_mixture(scheme="w8a8", skip=["*.experts.down.*", "lm_head"])
    assert isinstance(experts_of(model)[0].down, torch.nn.ModuleList)
    model.save_pretrained(tmp_path / "transformers")
    qcut.save(model, tmp_path / "saved")
    for folder in ("transformers", "saved"):
        assert same(opened(tmp_path / folder), model)
        assert same(qcut.load(tmp_path / folder, progress=False), model)


def test_base_of_a_mixture_is_loaded(tmp_path: Path) -> None:
    model = quantized_mixture("Mixtral")
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    base.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        expected = model.model(IDS).last_hidden_state
        assert torch.equal(base(IDS).last_hidden_state, expected)
        assert torch.equal(AutoModel.from_pretrained(tmp_path / "base")(IDS).last_hidden_state, expected)


@pytest.mark.parametrize("family", ["Qwen3Moe", "GraniteMoe", "NemotronH"])
def test_transformers_alone_refuses_experts(family: str, tmp_path: Path) -> None:
    model = quantized_mixture(family, "w8a8", include=["*.experts.*"])
    model.save_pretrained(tmp_path)
    rewrite(tmp_path / "config.json", lambda data: data.pop("quantization_config"))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_contents_count_experts(family: str, tmp_path: Path) -> None:
    model = quantized_mixture(family, "w8a8")
    model.save_pretrained(tmp_path / "pieces")
    qcut.save(model, tmp_path / "stacks")
    pieces, stacks = contents(tmp_path / "pieces"), contents(tmp_path / "stacks")
    layers = sorted(pieces.layers, key=lambda layer: layer.name)
    assert layers == sorted(stacks.layers, key=lambda layer: layer.name)
    if family == "Mixtral":  # others have biases of quantized layers, which are no weights, or float buffers
        assert pieces.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert pieces.percent_experts == pytest.approx(stacks.percent_experts, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_dequantized_experts_are_of_their_class(family: str, tmp_path: Path) -> None:
    plain, model = mixture(family), quantized_mixture(family)
    with laid_open(model):
        layers = {name: m for name, m in model.named_modules() if isinstance(m, qcut.Linear)}
    want = {name: layer.dequantized_weight() for name, layer in layers.items()}
    model = model.dequantize()
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert {k: t.shape for k, t in model.state_dict().items()} == {k: t.shape for k, t in plain.state_dict().items()}
    with laid_open(model) as mixtures:
        assert not mixtures.left
        assert all(torch.equal(model.get_submodule(name).weight, weight) for name, weight in want.items())
        names = {name: m for name, m in model.named_modules() if name in want and m.bias is not None}
        assert all(torch.equal(m.bias, layers[name].bias) for name, m in names.items())
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(opened(tmp_path)), logits(model))


@pytest.mark.parametrize("cache", [None, "static"])
def test_quantized_mixtures_generate(cache: str | None) -> None:
    model = quantized_mixture(scheme="w8a8")
    tokens = model.generate(IDS, max_new_tokens=4, do_sample=False, cache_implementation=cache, eos_token_id=None)
    expected = IDS
    for _ in range(4):
        expected = torch.cat([expected, logits(model, expected)[:, -1:].argmax(-1)], 1)
    assert torch.equal(tokens, expected)


def test_mixtures_change_dtype_and_place(tmp_path: Path) -> None:
    model = quantized_mixture(scheme="w8a8")
    model.save_pretrained(tmp_path)
    half = opened(tmp_path, dtype=torch.float16, device_map="cpu")
    moved = model.half().to("cpu").state_dict()
    assert all(torch.equal(tensor, moved[key]) for key, tensor in half.state_dict().items())
    assert logits(half).dtype is logits(model).dtype is torch.float16


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_input_gradients_go_through_experts(family: str) -> None:
    model = quantized_mixture(family, "w8a16")
    experts = experts_of(model)[0]
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    index, weights = torch.tensor([[0, 1], [1, 2], [2, 0]] * 2), torch.rand(6, 2)
    with pytest.raises(UnsupportedError, match=r"experts\.down\.\d': .*enable_input_gradients"):
        experts(x, index, weights).sum().backward()
    plain = x.detach().clone().requires_grad_()
    qcut.enable_input_gradients(model)
    y = experts(x, index, weights)
    y.square().sum().backward()
    with torch.no_grad():
        assert torch.equal(experts(x, index, weights), y)
    dequantized = next(m for m in model.dequantize().modules() if type(m).__name__.endswith("Experts"))
    dequantized(plain, index, weights).square().sum().backward()
    assert x.grad is not None
    assert plain.grad is not None
    assert (x.grad - plain.grad).norm() <= 1e-3 * plain.grad.norm()


def test_experts_are_not_cut_across_processes(tmp_path: Path) -> None:
    model = quantized_mixture()
    model.save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    parallel: Any = SimpleNamespace(size=2)
    with pytest.raises(UnsupportedError, match=r"experts: tp_size=2 for quantized experts.*one process"):
        StoredLoading(mixture(), described, [tmp_path / "model.safetensors"], parallel)
