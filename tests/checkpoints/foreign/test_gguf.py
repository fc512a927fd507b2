"""GGUF files of a Llama, written with the gguf package and held against its own dequantization."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qcut
from qcut.errors import CheckpointError, UnsupportedError
from tests.checkpoints.foreign import samples

gguf = pytest.importorskip("gguf")
Type = gguf.GGMLQuantizationType

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
HEADS = {"q_proj": 4, "k_proj": 2}


def pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows in llama.cpp's order: the two elements of a head that rotate together are neighbours."""
    n, k = weight.shape
    return weight.reshape(heads, 2, n // heads // 2, k).swapaxes(1, 2).reshape(n, k)


def halves(weight: Tensor, heads: int) -> Tensor:
    n, k = weight.shape
    return weight.reshape(heads, n // heads // 2, 2, k).swapaxes(1, 2).reshape(n, k)


def write(path: Path, kind: Any, *, tied: bool = False, table: Any = Type.F16, arch: str = "llama",
          metadata: Callable[[Any], object] | None = None) -> Any:  # fmt: skip
    """Write a Llama, and return the float64 model that the gguf package dequantizes it to."""
    model = samples.llama(tie_word_embeddings=tied, rope_theta=30000.0)
    out = gguf.GGUFWriter(str(path), arch)
    out.add_block_count(2)
    out.add_context_length(64)
    out.add_embedding_length(samples.HIDDEN)
    out.add_feed_forward_length(samples.MLP)
    out.add_head_count(4)
    out.add_head_count_kv(2)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_freq_base(30000.0)
    out.add_rope_dimension_count(16)
    out.add_tokenizer_model("gpt2")
    out.add_token_list([f"t{i}" for i in range(samples.VOCABULARY)])
    if metadata:
        metadata(out)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module, _, key = name.rpartition(".")
            if module in OTHERS:
                new = f"{OTHERS[module]}.{key}"
            else:
                _, _, layer, rest = module.split(".", 3)
                new = f"blk.{layer}.{NAMES[rest]}.{key}"
            heads = HEADS.get(module.rpartition(".")[2])
            weight = parameter if heads is None else pairs(parameter, heads)
            type_ = Type.F32 if weight.dim() == 1 else table if module in OTHERS else kind
            data = gguf.quants.quantize(weight.numpy(), type_)
            out.add_tensor(new, data, raw_dtype=type_)
            back = torch.from_numpy(gguf.quants.dequantize(data, type_).copy()).view(parameter.shape)
            parameter.copy_(back if heads is None else halves(back, heads))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return model.double()


@pytest.mark.parametrize(("kind", "scheme"), [("Q4_0", "int4_g32_shifted"), ("Q8_0", "codebook4+4_g32_none_shifted")])
@pytest.mark.parametrize("tied", [False, True])
def test_blocks_are_the_packages(tmp_path: Path, kind: str, scheme: str, tied: bool) -> None:
    expected = write(tmp_path / "model.gguf", Type[kind], tied=tied)
    model = qcut.load(tmp_path / "model.gguf", dtype=torch.float32, progress=False)
    for name, module in samples.linears(expected).items():
        layer = model.get_submodule(name)
        assert layer.scheme.name == scheme
        assert torch.equal(layer.dequantized_weight().double(), module.weight), name
    samples.assert_serves(model, expected, tmp_path / "saved")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_quantized_tables_of_tokens(tmp_path: Path, kind: str, tied: bool) -> None:
    expected = write(tmp_path / "model.gguf", Type[kind], tied=tied, table=Type[kind])
    model = qcut.load(tmp_path, dtype=torch.float32, progress=False)  # the folder's only GGUF file
    table = model.get_submodule("model.embed_tokens")
    assert isinstance(table, qcut.Embedding)
    assert (table.linear is model.get_submodule("lm_head")) == tied
    assert torch.equal(table(samples.IDS).double(), expected.get_submodule("model.embed_tokens")(samples.IDS))
    samples.assert_serves(model, expected, tmp_path / "saved")


def test_floats_stay_floats(tmp_path: Path) -> None:
    expected = write(tmp_path / "model.gguf", Type.F16)
    model = qcut.load(tmp_path / "model.gguf", dtype=torch.float32, progress=False)
    assert torch.equal(model.get_submodule("lm_head").weight.double(), expected.lm_head.weight)
    assert torch.equal(model(samples.IDS).logits, expected.float()(samples.IDS).logits)


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0"])
def test_other_types_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "model.gguf", Type[kind])
    with pytest.raises(UnsupportedError, match=rf"tensor 'blk.0.attn_q.weight' is of the type {kind}; F32, F16, Q4_0"):
        qcut.load(tmp_path / "model.gguf", progress=False)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", Type.Q4_0, arch="gemma")
    with pytest.raises(UnsupportedError, match=r"general.architecture is 'gemma'; llama"):
        qcut.load(tmp_path / "model.gguf", progress=False)


def test_scaled_rotations_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", Type.Q4_0, metadata=lambda out: out.add_rope_scaling_type(gguf.RopeScalingType.YARN))
    with pytest.raises(UnsupportedError, match=r"llama.rope.scaling.type 'yarn'.*config.json beside"):
        qcut.load(tmp_path / "model.gguf", progress=False)


def test_a_configuration_beside_the_file_wins(tmp_path: Path) -> None:
    expected = write(tmp_path / "model.gguf", Type.Q4_0, arch="llama")
    expected.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(expected.config.to_json_string())
    model: Any = qcut.load(tmp_path / "model.gguf", progress=False)
    assert model.config.rope_parameters["factor"] == 2.0


@pytest.mark.parametrize("kept", [3, 20, 400, 5000, -1])
def test_truncated_files_are_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.gguf"
    write(path, Type.Q4_0)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.gguf: (not a GGUF|truncated|tensor)"):
        qcut.load(path, progress=False)


def test_changed_headers_are_refused_or_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, Type.Q4_0)
    data = path.read_bytes()
    draws = torch.Generator().manual_seed(0)
    for _ in range(60):
        at = int(torch.randint(4, 3000, (), generator=draws))
        value = int(torch.randint(0, 256, (), generator=draws))
        path.write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
        with contextlib.suppress(CheckpointError, UnsupportedError):
            qcut.load(path, progress=False)
