"""Writing llama2.c's checkpoints: bitwise, refusals, and failures that leave the old file."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qcut.checkpoints.formats.llama2c.files import load_llama2c, save_llama2c
from qcut.conversion.quantize import quantize
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.linear import Linear
from qcut.schemes import Codebook
from tests.support.llama2c_oracle import CASES, IDS, llama, logits_of, make, relative
from tests.support.zoo import tiny_hf

transformers = pytest.importorskip("transformers")
modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")


@pytest.mark.parametrize("case", CASES)
def test_round_trips_are_bitwise(case: str, tmp_path: Path):
    sizes = CASES[case]
    tensors = make(tmp_path / "a.bin", sizes)
    size = sizes.dim // sizes.n_heads
    angles = np.arange(sizes.seq_len)[:, None] * 10000.0 ** -(np.arange(0, size, 2) / size)
    save_llama2c(load_llama2c(tmp_path / "a.bin"), tmp_path / "b.bin")
    data, offset = (tmp_path / "b.bin").read_bytes(), 28
    assert data[:28] == struct.pack("<7i", *sizes)
    for name, tensor in tensors.items():
        found = np.frombuffer(data, "<f4", tensor.size, offset).reshape(tensor.shape)
        offset += tensor.nbytes
        if name.startswith("freq_cis"):
            wanted = np.cos(angles) if name == "freq_cis_real" else np.sin(angles)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)  # float32 angles of a few dozen radians
        else:
            assert found.tobytes() == tensor.tobytes(), name
    assert offset == len(data)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "b.bin"]


@pytest.mark.parametrize("tied", [True, False])
def test_models_of_transformers_come_back(tied: bool, tmp_path: Path):
    model = llama(tie_word_embeddings=tied)
    save_llama2c(model, tmp_path / "m.bin")
    again = load_llama2c(tmp_path / "m.bin")
    state = again.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(logits_of(again, IDS), logits_of(model, IDS))
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    save_llama2c(model.bfloat16(), tmp_path / "m.bin")
    halves = load_llama2c(tmp_path / "m.bin", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, halves[name]) for name, tensor in model.state_dict().items())


SCHEMES = {
    "w8a16": ("w8a16", None),
    "w8a16 and tables": ("w8a16", "w8a16"),
    "codebook4": (Codebook(group_size=16), None),
    "codebook4 and tables": (Codebook(group_size=16), Codebook(group_size=16)),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", SCHEMES)
def test_quantized_models_are_written_dequantized(kind: str, tied: bool, tmp_path: Path):
    scheme, tables = SCHEMES[kind]
    model = llama(tie_word_embeddings=tied, intermediate_size=48)
    before = logits_of(model, IDS)
    quantize(model, scheme, embeddings=tables, allow_growth=True, progress=False)
    assert isinstance(model.model.layers[0].self_attn.q_proj, Linear)
    save_llama2c(model, tmp_path / "m.bin")
    again = load_llama2c(tmp_path / "m.bin")
    wanted = logits_of(model, IDS)
    assert relative(before, wanted) > 1e-3
    assert relative(logits_of(again, IDS), wanted) < 1e-5
    assert again.config.tie_word_embeddings == tied
    weight = model.model.layers[1].mlp.down_proj.dequantized_weight()
    assert torch.equal(again.model.layers[1].mlp.down_proj.weight, weight)


def test_a_quantized_table_unties_a_float_classifier(tmp_path: Path):
    model = llama()
    source = model.lm_head
    quantize(model, "w8a16", embeddings="w8a16", progress=False)
    model.lm_head = source
    save_llama2c(model, tmp_path / "m.bin")
    again = load_llama2c(tmp_path / "m.bin")
    assert not again.config.tie_word_embeddings
    assert torch.equal(again.lm_head.weight, source.weight)
    assert torch.equal(again.model.embed_tokens.weight, model.model.embed_tokens.dequantized_weight())


class Adapted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class LlamaMLP(modeling_llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def changed(change: Callable[[Any], None], **settings: Any) -> Callable[[], Any]:
    def build() -> Any:
        model = llama(**settings)
        change(model)
        return model

    return build


def fuse(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.gate_proj = Linear.from_float(mlp.gate_proj, "w8a16", activation="silu")


def poison(model: Any) -> None:
    model.model.norm.weight.data[3] = torch.inf


def quantized(model: Any) -> Any:
    quantize(model, "w8a16", progress=False)
    return model


def odd_heads() -> Any:
    model = llama()
    model.config.hidden_size, model.config.head_dim = 28, 7  # transformers builds none
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "biases of attention": (lambda: llama(attention_bias=True), r"layers\.0\.self_attn\.q_proj'.*bias"),
    "biases of the mlp": (lambda: llama(mlp_bias=True), r"layers\.0\.mlp\.gate_proj' has a bias"),
    "bias of a tied classifier": (
        changed(lambda m: setattr(m.lm_head, "bias", nn.Parameter(torch.zeros(64)))),
        "'lm_head' has a bias",
    ),
    "bias of a quantized layer": (lambda: quantized(llama(attention_bias=True)), r"self_attn\.q_proj' has a bias"),
    "bias of a norm": (
        changed(lambda m: setattr(m.model.norm, "bias", nn.Parameter(torch.zeros(32)))),
        r"'model\.norm' has a bias",
    ),
    "another norm": (
        changed(lambda m: setattr(m.model, "norm", nn.LayerNorm(32, bias=False))),
        r"'model\.norm' is a LayerNorm; rms_final of llama2\.c is a LlamaRMSNorm",
    ),
    "wide heads": (lambda: llama(head_dim=16), "hidden_size 32, 4 heads of head_dim 16"),
    "odd heads": (odd_heads, "4 heads of head_dim 7"),
    "theta": (lambda: llama(rope_theta=5e5), "rope_theta is 500000.0 .* 10000.0 built in"),
    "scaled rope": (lambda: llama(rope_scaling={"rope_type": "linear", "factor": 2.0}), "rope_type is 'linear'"),
    "partial rope": (lambda: llama(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    "epsilon": (lambda: llama(rms_norm_eps=1e-6), "rms_norm_eps is 1e-06; llama2.c has 1e-05"),
    "activation": (lambda: llama(hidden_act="gelu"), "hidden_act is 'gelu'.* 'silu' built in"),
    "fused activation": (changed(fuse), r"mlp\.gate_proj' computes silu too; w1 of layer 0"),
    "GPT-2": (lambda: tiny_hf("gpt2"), "GPT2LMHeadModel: llama2.c holds"),
    "Gemma": (lambda: tiny_hf("gemma"), "GemmaForCausalLM: llama2.c holds"),
    "no transformers": (lambda: nn.Linear(4, 4), "Linear: llama2.c holds"),
    "adapter": (
        changed(lambda m: setattr(m.model.layers[1].self_attn, "o_proj", Adapted(32, 32, bias=False))),
        r"layers\.1\.self_attn\.o_proj' is a Adapted; wo of layer 1 of llama2\.c is a linear layer",
    ),
    "another mlp": (
        changed(lambda m: delattr(m.model.layers[0].mlp, "up_proj")),
        r"layers\.0\.mlp\.up_proj'.*llama2\.c has w3 of layer 0 there",
    ),
    "another table": (
        changed(lambda m: setattr(m.model, "embed_tokens", nn.Identity())),
        r"embed_tokens' is a Identity; token_embedding of llama2\.c is an embedding",
    ),
    "another activation": (
        changed(lambda m: setattr(m.model.layers[1].mlp, "act_fn", nn.ReLU())),
        r"layers\.1\.mlp\.act_fn' is a .*ReLU; llama2\.c has what transformers' Llama",
    ),
    "another code of a block": (
        changed(lambda m: setattr(m.model.layers[0].mlp, "__class__", LlamaMLP)),
        r"layers\.0\.mlp' is a tests.*LlamaMLP; llama2\.c has what transformers' Llama",
    ),
    "a forward of its own": (
        changed(lambda m: setattr(m.model.layers[0].mlp, "forward", torch.relu)),
        r"layers\.0\.mlp' is a .*LlamaMLP",
    ),
    "another size": (
        changed(lambda m: setattr(m, "lm_head", nn.Linear(32, 60, bias=False)), tie_word_embeddings=False),
        r"'lm_head' has a weight \[60, 32\]; the model's wcls is \[64, 32\]",
    ),
}
UNSTORABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "no memory": (changed(lambda m: m.to("meta")), r"'model\.embed_tokens'.*meta device"),
    "Inf": (changed(poison), r"'model\.norm': the weight holds NaN or Inf"),
}


@pytest.mark.parametrize("what", [*REFUSED, *UNSTORABLE])
def test_models_that_are_refused_leave_the_old_file(what: str, tmp_path: Path):
    build, message = (REFUSED | UNSTORABLE)[what]
    error = UnsupportedError if what in REFUSED else CheckpointError
    path = tmp_path / "m.bin"
    path.write_bytes(b"old")
    with pytest.raises(error, match=message):
        save_llama2c(build(), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_places_that_cannot_be_written(tmp_path: Path):
    for path in (tmp_path / "none" / "m.bin", tmp_path):
        with pytest.raises(CheckpointError, match=f"{path}: cannot be written"):
            save_llama2c(llama(), path)
    assert not list(tmp_path.iterdir())
