"""GGUF files of every family that the engine runs, in mixtures of K-quants, held to transformers' models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import qcut
from qcut.errors import CheckpointError, QcutError, QuantizationWarning, UnsupportedError
from qcut.layers.quantized import QuantizedLayer
from tests.checkpoints.formats import samples
from tests.checkpoints.formats.gguf.written import FAMILIES, IDS, Type, mixture_of, small_model, write

pytestmark = pytest.mark.filterwarnings("ignore::qcut.errors.QuantizationWarning")
PATH = "model.gguf"


def loaded(folder: Path, **options: Any) -> Any:
    return qcut.load(folder / PATH, dtype=torch.float32, progress=False, **options)


def assert_same(model: Any, expected: Any) -> None:
    """Check that a float model has the class and, bit by bit, the tensors and logits of another."""
    assert type(model) is type(expected)
    found, wanted = model.state_dict(), expected.state_dict()
    assert list(found) == list(wanted)
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected(IDS).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_has_the_weights_and_logits(tmp_path: Path, family: str) -> None:
    expected = write(tmp_path / PATH, family)
    assert_same(loaded(tmp_path), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_continues_as_transformers_does(tmp_path: Path, family: str) -> None:
    expected = write(tmp_path / PATH, family)
    prompt = IDS[0].tolist()
    wanted = expected.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=8, do_sample=False)[0, 9:]
    made = qcut.Engine(loaded(tmp_path)).generate([prompt], max_new_tokens=8, stop=[2])
    assert made[0].tokens == wanted.tolist()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "starcoder2"])
def test_transformers_reads_the_same_file_alike(tmp_path: Path, family: str) -> None:
    write(tmp_path / PATH, family)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=PATH, dtype=torch.float32).eval()
    assert_same(loaded(tmp_path), expected)


KINDS = ("Q2_K", "Q3_K", "Q5_K", "IQ4_XS", "IQ4_NL", "Q4_1", "Q5_1")


@pytest.mark.parametrize("kind", KINDS)
def test_other_types_have_the_same_values(tmp_path: Path, kind: str) -> None:
    def types(name: str, values: Any) -> Any:
        return mixture_of(name, values, attention=Type[kind], values=Type.Q5_K, table=Type.F16)

    expected = write(tmp_path / PATH, "llama", types)
    assert_same(loaded(tmp_path), expected)


def test_floats_are_named_by_a_warning(tmp_path: Path) -> None:
    write(tmp_path / PATH, "llama")
    with pytest.warns(QuantizationWarning, match=r"16 tensors of the types Q4_K, Q6_K, .* torch\.float16: 0\.00241 GB"):
        model = qcut.load(tmp_path / PATH, progress=False)
    assert model.dtype == torch.float16


SCHEMES = {
    "Q4_0": "int4_g32_shifted",
    "Q5_0": "codebook4+4_g32_none_shifted",
    "Q8_0": "codebook4+4_g32_none_shifted",
    "MXFP4": "mxfp4",
}
OF_EXPERTS = ("gpt_oss", "granitemoe", "ernie4_5_moe", "hunyuan_v1_moe")
NEWER = [pytest.param(family, marks=samples.newer_experts) for family in OF_EXPERTS]


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "mixtral", *NEWER, "gemma2", "phi3", "gpt2", "gpt_neox"])
def test_exact_types_stay_quantized(tmp_path: Path, family: str, kind: str) -> None:
    def types(name: str, values: Any) -> Any:
        return mixture_of(name, values, attention=Type[kind], values=Type.Q6_K, table=Type[kind])

    expected = write(tmp_path / PATH, family, types)
    model = loaded(tmp_path)
    made = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}
    assert {layer.scheme.name for layer in made.values()} == {SCHEMES[kind]}
    for name, layer in made.items():
        module = expected.get_submodule(name.removesuffix(".table").removesuffix(".up"))
        weight = module.gate_up_proj if name.endswith("experts.up") else module.weight
        weight = weight.t() if type(module).__name__ == "Conv1D" else weight
        if family == "gpt_oss" and "experts" in name:  # rows of gate and up take turns
            weight = torch.cat((weight.mT[:, ::2], weight.mT[:, 1::2]), 1)
        assert torch.equal(layer.dequantized_weight(), weight), name
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-3, atol=1e-3)


def factors_of(rope: dict[str, Any]) -> Any:
    """What llama.cpp divides each frequency by, of transformers' frequencies."""
    frequencies = small_model("llama", rope_parameters=rope).model.rotary_emb.inv_freq
    plain = small_model("llama", rope_parameters={"rope_type": "default", "rope_theta": rope["rope_theta"]})
    return (plain.model.rotary_emb.inv_freq / frequencies).numpy()


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN_ENTRIES = {
    "rope.scaling.type": ("string", "yarn"),
    "rope.scaling.factor": ("float32", 4.0),
    "rope.scaling.original_context_length": ("uint32", 16),
}
LONG, SHORT = [1.0 + i / 8 for i in range(24)], [1.0 + i / 64 for i in range(24)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "long_factor": LONG,
    "short_factor": SHORT,
    "original_max_position_embeddings": 8,
}
LONG_ENTRIES = {
    "rope.scaling.original_context_length": ("uint32", 8),
    "rope.scaling.attn_factor": ("float32", 2**0.5),  # of a context 8 times as long: sqrt(1 + ln 8 / ln 8)
}
LONG_TENSORS = {
    "rope_factors_long.weight": torch.tensor(LONG).numpy(),
    "rope_factors_short.weight": torch.tensor(SHORT).numpy(),
}


def test_scaling_of_llama3_is_recognised(tmp_path: Path) -> None:
    for factor in (8.0, 32.0):
        rope = {**LLAMA3, "factor": factor}
        extra = {"rope_freqs.weight": factors_of(rope)}
        expected = write(tmp_path / PATH, "llama", extra=extra, rope_parameters=rope)
        assert_same(loaded(tmp_path), expected)
    others = {**LLAMA3, "original_max_position_embeddings": 4096}
    write(tmp_path / PATH, "llama", extra={"rope_freqs.weight": factors_of(others)}, rope_parameters=others)
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight: scaled rotations; put the model's config\.json"):
        loaded(tmp_path)


def test_factors_that_cannot_be_are_refused(tmp_path: Path) -> None:
    right = factors_of(LLAMA3)
    for factors, entries, message in (
        (right[:-1], {}, r"'rope_freqs\.weight': found F32 \[31\]; F32 \[32\], at most \[4096\], is needed"),
        (right.astype("float16"), {}, r"found F16 \[32\]; F32 \[32\]"),
        (0 * right, {}, r"'rope_freqs\.weight': found 0\.0; finite factors above 0"),
        (right, YARN_ENTRIES, r"rope_freqs\.weight: scaled rotations; put"),
    ):
        write(tmp_path / PATH, "llama", extra={"rope_freqs.weight": factors}, entries=entries, rope_parameters=LLAMA3)
        with pytest.raises(QcutError, match=message):
            loaded(tmp_path)
    write(tmp_path / PATH, "phi3", entries=LONG_ENTRIES, extra={"rope_factors_long.weight": torch.ones(24).numpy()})
    with pytest.raises(UnsupportedError, match=r"rope_factors_long\.weight: scaled rotations"):
        loaded(tmp_path)


def test_yarn_is_read(tmp_path: Path) -> None:
    expected = write(tmp_path / PATH, "qwen3", entries=YARN_ENTRIES, rope_parameters=YARN)
    assert_same(loaded(tmp_path), expected)


def test_factors_by_length_are_read(tmp_path: Path) -> None:
    given: dict[str, Any] = {"entries": LONG_ENTRIES, "extra": LONG_TENSORS}
    changes = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8}
    expected = write(tmp_path / PATH, "phi3", **given, **changes)
    assert_same(loaded(tmp_path), expected)
    given["entries"] = {**LONG_ENTRIES, "rope.scaling.attn_factor": ("float32", 1.5)}
    write(tmp_path / PATH, "phi3", **given, **changes)
    with pytest.raises(UnsupportedError, match=r"phi3\.rope\.scaling\.attn_factor: found 1\.5; allowed: 1\.41421"):
        loaded(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_configuration_next_to_the_file_is_compared(tmp_path: Path, family: str) -> None:
    expected = write(tmp_path / PATH, family)
    config = json.loads(expected.config.to_json_string(use_diff=False))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert_same(loaded(tmp_path), expected)
    for key in ("num_attention_heads", "n_head"):
        if key in config:
            path.write_text(json.dumps({**config, key: 2 * config[key]}))
            with pytest.raises(CheckpointError, match=r"attention\.head_count: found 4; config\.json next to it has 8"):
                loaded(tmp_path)
    path.write_text(json.dumps({**config, "model_type": "falcon", "architectures": ["FalconForCausalLM"]}))
    with pytest.raises(QcutError, match=r"config\.json next to it has the model_type 'falcon'; allowed: "):
        loaded(tmp_path)


OTHERWISE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "no factors": (
        "granitemoe",
        dict.fromkeys(("attention.scale", "embedding_scale", "residual_scale")),
        {"attention_multiplier": 0.125, "embedding_multiplier": 1.0, "residual_multiplier": 1.0},
    ),
    "no shared experts": (
        "ernie4_5_moe",
        {"expert_shared_count": ("uint32", 0), "expert_shared_feed_forward_length": None},
        {"moe_num_shared_experts": 0},
    ),
    "experts in every second layer": (
        "ernie4_5_moe",
        {"interleave_moe_layer_step": ("uint32", 2), "leading_dense_block_count": ("uint32", 0)},
        {"moe_layer_interval": 2, "moe_layer_start_index": 0},
    ),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_entries_of_mixtures_are_read(tmp_path: Path, case: str) -> None:
    family, entries, changes = OTHERWISE[case]
    expected = write(tmp_path / PATH, family, entries=entries, **changes)
    assert_same(loaded(tmp_path), expected)


def test_configuration_may_have_lists_of_layers(tmp_path: Path) -> None:
    expected = write(tmp_path / PATH, "hunyuan_v1_moe")
    config = json.loads(expected.config.to_json_string(use_diff=False))
    for topk in ([2, 2], [2, 1]):
        (tmp_path / "config.json").write_text(json.dumps({**config, "moe_topk": topk}))
        if topk[1] == 2:
            assert_same(loaded(tmp_path), expected)
    with pytest.raises(CheckpointError, match=r"expert_used_count: found 2; config\.json next to it has a list of 2"):
        loaded(tmp_path)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a window that is not the family's": (
        "qwen2",
        {"attention.sliding_window": ("uint32", 6)},
        "sliding_window: found 6",
    ),
    "another pattern of windows": ("gemma3_text", {"attention.sliding_window_pattern": ("uint32", 4)}, "allowed: 6"),
    "another gate of experts": ("qwen3_moe", {"expert_gating_func": ("uint32", 2)}, "expert_gating_func: found 2"),
    "experts' weights not normalized": ("mixtral", {"expert_weights_norm": ("bool", False)}, "allowed: True"),
    "scaled experts": ("qwen2_moe", {"expert_weights_scale": ("float32", 2.5)}, "expert_weights_scale: found 2.5"),
    "more experts than any model's": ("qwen3_moe", {"expert_count": ("uint32", 1 << 17)}, "found 131072; .* 65536"),
    "no number of experts": ("qwen3_moe", {"expert_count": None}, "expert_count: found None"),
    "other experts than tensors": (
        "qwen3_moe",
        {"expert_count": ("uint32", 4)},
        r"\[3, 256, 256\]; needed: \[4, N, K\]",
    ),
    "a part of each head": ("qwen3", {"rope.dimension_count": ("uint32", 64)}, "64 of 128 dimensions"),
    "grouped heads": ("gpt_neox", {"attention.head_count_kv": ("uint32", 2)}, "head_count_kv: found 2.*allowed: 4"),
    "heads of other sizes": ("gpt2", {"attention.key_length": ("uint32", 32)}, "key_length: found 32; allowed: 64"),
    "heads that do not divide": (
        "gpt_neox",
        {"attention.head_count": ("uint32", 7)},
        "key_length|768 rows for 7 heads",
    ),
    "a number for each layer": (
        "llama",
        {"feed_forward_length": ("array", [512, 512])},
        "found a list of 2; an int above 0",
    ),
    "truth that is a number": ("gpt_neox", {"use_parallel_residual": ("uint32", 1)}, "found 1; a bool is needed"),
    "no rotation": ("granitemoe", {"rope.scaling.finetuned": ("bool", False)}, "found False.*allowed: True"),
    "no scale of logits": ("granitemoe", {"logit_scale": None}, "logit_scale: found None; a float above 0"),
    "shared experts": ("granitemoe", {"expert_shared_feed_forward_length": ("uint32", 256)}, "found 256.*allowed: 0"),
    "many shared experts": ("hunyuan_v1_moe", {"expert_shared_count": ("uint32", 2)}, "found 2.*allowed: 1"),
    "a number below 0": ("ernie4_5_moe", {"expert_shared_count": ("int32", -1)}, "found -1; an int from 0"),
    "other dense layers": (
        "ernie4_5_moe",
        {"leading_dense_block_count": ("uint32", 0)},
        "3 tensors belong to no layer",
    ),
    "softcapping of zero": ("gemma2", {"attn_logit_softcapping": ("float32", 0.0)}, "found 0.0; a float above 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_entries_of_families_are_refused(tmp_path: Path, case: str) -> None:
    family, entries, message = REFUSED[case]
    write(tmp_path / PATH, family, entries=entries)
    with pytest.raises(QcutError, match=message) as caught:
        loaded(tmp_path)
    assert str(tmp_path / PATH) in str(caught.value)


def test_tensors_of_other_families_are_refused(tmp_path: Path) -> None:
    write(tmp_path / PATH, "qwen2", extra={"blk.0.attn_q_norm.weight": torch.ones(64).numpy()})
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.0\.attn_q_norm\.weight' is none of .* 'qwen2'"):
        loaded(tmp_path)
