"""GGUF files of a Llama, written with the gguf package and held against its own dequantization."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import qcut
from qcut.errors import CheckpointError, UnsupportedError
from tests.checkpoints.formats import samples

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


SCHEMES = {
    "Q4_0": "int4_g32_shifted",
    "Q5_0": "codebook4+4_g32_none_shifted",
    "Q8_0": "codebook4+4_g32_none_shifted",
}


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("tied", [False, True])
def test_blocks_are_the_packages(tmp_path: Path, kind: str, tied: bool) -> None:
    expected = write(tmp_path / "model.gguf", Type[kind], tied=tied)
    model = qcut.load(tmp_path / "model.gguf", dtype=torch.float32, progress=False)
    for name, module in samples.linears(expected).items():
        layer = model.get_submodule(name)
        assert layer.scheme.name == SCHEMES[kind]
        assert torch.equal(layer.dequantized_weight().double(), module.weight), name
    samples.assert_serves(model, expected, tmp_path / "saved")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", SCHEMES)
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


def scaled(*entries: tuple[str, str, Any]) -> Callable[[Any], None]:
    def put(out: Any) -> None:
        for key, kind, value in entries:
            getattr(out, f"add_{kind}")(key, value)

    return put


TYPE, FACTOR, OLD = "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scale_linear"


REFUSED: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "architecture": ("Q4_0", {"arch": "falcon"}, UnsupportedError, r"general.architecture is 'falcon'; llama, qwen2"),
    "yarn": (
        "Q4_0",
        {"metadata": scaled((TYPE, "string", "yarn"))},
        UnsupportedError,
        r"llama.rope.scaling.type 'yarn'.*config.json next to",
    ),
    "token outside of the vocabulary": (
        "F16",
        {"metadata": scaled(("tokenizer.ggml.eos_token_id", "uint32", 10**6))},
        CheckpointError,
        r"eos_token_id: found 1000000; allowed: 0 to",
    ),
    "adapter": (
        "F16",
        {"metadata": lambda out: out.add_type("adapter")},
        UnsupportedError,
        r"general.type is 'adapter'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_files_are_refused_by_name(tmp_path: Path, case: str) -> None:
    kind, options, error, message = REFUSED[case]
    write(tmp_path / "model.gguf", Type[kind], **options)
    with pytest.raises(error, match=message):
        qcut.load(tmp_path / "model.gguf", progress=False)


@pytest.mark.parametrize(
    ("kind", "factors", "rope"),
    [
        (None, {FACTOR: 4.0}, ("linear", 4.0)),
        (None, {OLD: 2.0}, ("linear", 2.0)),
        (None, {FACTOR: 8.0, OLD: 2.0}, ("linear", 8.0)),
        ("linear", {FACTOR: 3.0}, ("linear", 3.0)),
        ("linear", {}, ("default", None)),
        ("none", {FACTOR: 3.0}, ("default", None)),
        (None, {FACTOR: 1.0}, ("default", None)),
        (None, {FACTOR: 0.0}, ("default", None)),
    ],
)
def test_linear_scaling_is_llama_cpps(
    tmp_path: Path, kind: str | None, factors: dict[str, float], rope: tuple[str, float | None]
) -> None:
    entries = [
        *((key, "float32", value) for key, value in factors.items()),
        *([(TYPE, "string", kind)] if kind else []),
    ]
    expected = write(tmp_path / "model.gguf", Type.F16, metadata=scaled(*entries))
    model: Any = qcut.load(tmp_path / "model.gguf", dtype=torch.float32, progress=False)
    found = model.config.rope_parameters
    assert (found["rope_type"], found.get("factor")) == rope
    config = expected.config.to_dict() | {"rope_parameters": dict(found)}
    scaled_model = type(expected)(type(expected.config).from_dict(config))
    scaled_model.load_state_dict(expected.float().state_dict())
    assert torch.equal(model(samples.IDS).logits, scaled_model.eval()(samples.IDS).logits)


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("attention.causal", "bool", False),
        ("attention.clamp_kqv", "float32", 8.0),
        ("attention.layer_norm_epsilon", "float32", 1e-5),
        ("attention.scale", "float32", 0.5),
        ("attention.sliding_window", "uint32", 16),
        ("attention.temperature_scale", "float32", 0.1),
        ("attention.value_length", "uint32", 8),
        ("attn_logit_softcapping", "float32", 50.0),
        ("embedding_scale", "float32", 12.0),
        ("expert_used_count", "uint32", 2),
        ("final_logit_softcapping", "float32", 30.0),
        ("logit_scale", "float32", 0.0625),
        ("nextn_predict_layers", "uint32", 1),
        ("no_such_entry", "uint32", 1),
        ("pooling_type", "uint32", 1),
        ("residual_scale", "float32", 0.25),
        ("rope.dimension_sections", "array", [4, 4]),
        ("rope.scaling.attn_factor", "float32", 1.2),
        ("rope.scaling.yarn_ext_factor", "float32", 1.0),
        ("use_parallel_residual", "bool", True),
    ],
)
def test_entries_that_change_results_are_refused(tmp_path: Path, key: str, kind: str, value: Any) -> None:
    write(tmp_path / "model.gguf", Type.F16, metadata=scaled((f"llama.{key}", kind, value)))
    with pytest.raises(UnsupportedError, match=rf"metadata llama\.{key}|and values of 8 columns"):
        qcut.load(tmp_path / "model.gguf", progress=False)


def test_entries_that_change_nothing_are_read(tmp_path: Path) -> None:
    entries = [
        ("llama.attention.causal", "bool", True),
        ("llama.attention.scale", "float32", 0.25),
        ("llama.attention.value_length", "uint32", 16),
        ("llama.expert_count", "uint32", 0),
        ("llama.logit_scale", "float32", 1.0),
        ("llama.rope.scaling.original_context_length", "uint32", 64),
        ("llama.tensor_data_layout", "string", "Meta AI original pth"),
        ("general.finetune", "string", "chat"),
        ("somebody.quantized_by", "string", "a name"),
        ("quantize.imatrix.entries_count", "uint32", 9),
        ("tokenizer.ggml.add_bos_token", "bool", True),
        ("tokenizer.ggml.eos_token_id", "uint32", 2),
        ("tokenizer.ggml.eot_token_id", "uint32", 5),
    ]
    write(tmp_path / "model.gguf", Type.F16, metadata=scaled(*entries))
    model: Any = qcut.load(tmp_path / "model.gguf", progress=False)
    assert model.config.eos_token_id == [2, 5]


def split(path: Path, count: int = 3) -> list[Path]:
    """A model in several files, as llama.cpp's gguf-split writes them."""
    whole, parts = gguf.GGUFReader(str(path)), []
    size = -(-len(whole.tensors) // count)
    for i in range(count):
        parts.append(path.with_name(f"m-{i + 1:05}-of-{count:05}.gguf"))
        out = gguf.GGUFWriter(str(parts[-1]), "llama")
        if not i:
            for key, field in whole.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    value, kind = field.contents(), field.types[0]
                    out.add_key_value(key, value, kind, field.types[1] if len(field.types) > 1 else None)
        out.add_uint16("split.no", i)
        out.add_uint16("split.count", count)
        out.add_int32("split.tensors.count", len(whole.tensors))
        for tensor in whole.tensors[i * size : (i + 1) * size]:
            out.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()
    path.unlink()
    return parts


def test_any_file_of_several_reads_all(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", Type.Q4_0)
    expected = qcut.load(tmp_path / "model.gguf", progress=False)(samples.IDS).logits
    for path in (*split(tmp_path / "model.gguf"), tmp_path):
        assert torch.equal(qcut.load(path, progress=False)(samples.IDS).logits, expected)


def test_unrelated_gguf_files_in_one_folder_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", Type.Q4_0)
    first, second, third = split(tmp_path / "model.gguf")
    kept = third.read_bytes()
    third.unlink()
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003\.gguf: there is no such file"):
        qcut.load(first, progress=False)
    third.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003\.gguf: split\.no and split\.count are 1 and 3"):
        qcut.load(first, progress=False)
    third.write_bytes(kept)
    (tmp_path / "other.gguf").write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="found 4 GGUF files; name one of them"):
        qcut.load(tmp_path, progress=False)
    with pytest.raises(CheckpointError, match=r"other\.gguf: split\.no and split\.count are 0 and 3"):
        qcut.load(tmp_path / "other.gguf", progress=False)


def test_rope_factors_need_a_configuration_with_rope_scaling(tmp_path: Path) -> None:
    factors = numpy.full(8, 2.0, numpy.float32)
    expected = write(
        tmp_path / "model.gguf", Type.F16, metadata=lambda out: out.add_tensor("rope_freqs.weight", factors)
    )
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight: scaled rotations"):
        qcut.load(tmp_path / "model.gguf", progress=False)
    (tmp_path / "config.json").write_text(expected.config.to_json_string())
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight; config\.json has rotations of type 'default'"):
        qcut.load(tmp_path / "model.gguf", progress=False)


def test_configuration_beside_the_file_states_more(tmp_path: Path) -> None:
    expected = write(tmp_path / "model.gguf", Type.Q4_0, arch="llama")
    expected.config.rope_parameters = {**expected.config.rope_parameters, "rope_type": "linear", "factor": 2.0}
    (tmp_path / "config.json").write_text(expected.config.to_json_string())
    model: Any = qcut.load(tmp_path / "model.gguf", progress=False)
    assert model.config.rope_parameters["factor"] == 2.0


@pytest.mark.parametrize(
    ("changes", "entries", "text"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}, (), "head_count: found 4; .* has 8"),
        ({"num_key_value_heads": 1}, (), "head_count_kv: found 2"),
        ({"rms_norm_eps": 1e-2}, (), "layer_norm_rms_epsilon"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, (), "rope.freq_base"),
        ({"hidden_act": "gelu"}, (), "hidden_act: found 'silu'; .* has 'gelu'"),
        ({}, ((TYPE, "string", "yarn"),), "type 'yarn'; config.json has rotations of type 'default'"),
        ({}, ((FACTOR, "float32", 4.0),), "factor: found 4.0"),
        ({}, (("llama.logit_scale", "float32", 2.0),), "logit_scale: found 2.0"),
    ],
    ids=str,
)
def test_configuration_beside_the_file_states_nothing_else(
    changes: dict[str, Any], entries: tuple[Any, ...], text: str, tmp_path: Path
) -> None:
    expected = write(tmp_path / "model.gguf", Type.Q4_0, metadata=scaled(*entries))
    config = {**json.loads(expected.config.to_json_string()), **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((CheckpointError, UnsupportedError), match=text):
        qcut.load(tmp_path / "model.gguf", progress=False)


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
