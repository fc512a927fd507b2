"""Configurations of checkpoints: what may reach transformers, and how large a model they may ask for."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
import torch
from torch import nn

from qcut.checkpoints.huggingface import causal_model, model_of, plain_config
from qcut.errors import CheckpointError
from tests.support.zoo import tiny_hf

transformers = pytest.importorskip("transformers")

FILE = "folder/qcut_config.json"


def config_of(kind: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(tiny_hf(kind).config.to_json_string(use_diff=False))
    return config


def changed(config: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    inner = config
    *parents, last = dotted.split(".")
    for key in parents:
        inner = inner.setdefault(key, {})
    inner[last] = value
    return config


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("_attn_implementation", "org/kernel", "eager, sdpa"),
        ("attn_implementation", "kernels-community/flash-attn3@main:f", "eager, sdpa"),
        ("_attn_implementation_internal", "flash_attention_2", "eager, sdpa"),
        ("attn_implementation", {"text_config": "org/kernel"}, "eager, sdpa"),
        ("attn_implementation", ["eager"], "eager, sdpa"),
        ("text_config.attn_implementation", "org/kernel", "eager, sdpa"),
        ("vision_config.deep.backbone", "resnet50", "loaded from elsewhere; allowed: none"),
        ("use_pretrained_backbone", True, "loaded from elsewhere; allowed: none"),
        ("use_timm_backbone", 1, "loaded from elsewhere; allowed: none"),
        ("backbone_config.model_type", "timm_wrapper", "a model of another library"),
        ("quantization_config", {"quant_method": "awq"}, "loaded from elsewhere; allowed: none"),
        ("use_kernels", True, "loaded from elsewhere; allowed: none"),
        ("n_layer", 10**9, "at most 65536"),
        ("encoder.num_hidden_layers", -(10**9), "at most 65536"),
        ("num_labels", 10**12, "at most 65536"),
        ("vocab_size", 2**40, "at most 16777216"),
        ("n_positions", [1, 10**5000], "at most 16777216"),
    ],
)
def test_what_is_refused_is_named(key: str, value: Any, allowed: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        model_of("GPT2LMHeadModel", changed(config_of("gpt2"), key, value), FILE)
    assert str(refused.value).startswith(f"{FILE}: config.{key}")
    assert allowed in str(refused.value)
    assert len(str(refused.value)) < 300


def test_what_matters_to_loading_alone_is_dropped_everywhere() -> None:
    foreign = {"auto_map": {"AutoModel": "org/code--file.Class"}, "trust_remote_code": True, "custom_generate": "org/x"}
    config = {**config_of("llama"), **foreign, "_name_or_path": "/etc", "more": {**foreign, "layers": [foreign]}}
    plain = plain_config(config, FILE)
    assert plain["more"] == {"layers": [{}]}
    assert not set(foreign) & set(plain)
    assert plain["hidden_size"] == 32
    with torch.device("meta"):
        model = model_of("LlamaForCausalLM", config, FILE, generation={"max_length": 7, **foreign})
    assert model.config._name_or_path == ""
    assert not set(foreign) & set(vars(model.generation_config))
    assert model.generation_config.max_length == 7


@pytest.mark.parametrize("value", [None, False, {}, "eager", "sdpa"])
def test_empty_and_harmless_values_pass(value: Any) -> None:
    keys = ("attn_implementation",) if isinstance(value, str) else ("backbone", "quantization_config", "use_kernels")
    with torch.device("meta"):
        assert model_of("GPT2LMHeadModel", config_of("gpt2") | dict.fromkeys(keys, value), FILE)


@pytest.mark.parametrize(
    "name",
    ["DetrForObjectDetection", "PreTrainedModel", "AutoModelForCausalLM", "pipeline", "Trainer", "os", "", None, ["x"]],
)
def test_other_classes_are_refused(name: Any) -> None:
    with pytest.raises(CheckpointError, match="a model class of transformers is needed"):
        model_of(name, config_of("gpt2"), FILE)


@pytest.mark.parametrize(
    "name",
    [
        "GPT2LMHeadModel",
        "LlamaForSequenceClassification",
        "BertModel",
        "BertForMaskedLM",
        "DistilBertForTokenClassification",
        "T5ForConditionalGeneration",
        "T5EncoderModel",
        "WhisperForConditionalGeneration",
        "ViTForImageClassification",
        "CLIPModel",
        "Wav2Vec2ForCTC",
        "MixtralForCausalLM",
    ],
)
def test_usual_classes_are_built(name: str) -> None:
    config = json.loads(getattr(transformers, name).config_class().to_json_string(use_diff=False))
    with torch.device("meta"):
        assert type(model_of(name, config, FILE)).__name__ == name


def test_number_of_modules_is_bounded_by_stored_tensors() -> None:
    start = time.perf_counter()
    for layers in (5_000, 60_000):
        with torch.device("meta"), pytest.raises(CheckpointError, match=r"more than 1344 modules and tensors"):
            model_of("GPT2LMHeadModel", config_of("gpt2") | {"n_layer": layers}, FILE, tensors=40)
    assert time.perf_counter() - start < 20
    nn.ModuleList(nn.Linear(1, 1) for _ in range(2_000))  # the bound is gone with the block


def test_the_bound_is_of_the_thread_that_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    built = []
    config, attention = config_of("gpt2"), transformers.models.gpt2.modeling_gpt2.GPT2Attention
    make = attention.__init__

    def watched(self: Any, *args: Any, **options: Any) -> None:
        with ThreadPoolExecutor(1) as other:
            built.append(other.submit(lambda: len([nn.Linear(1, 1) for _ in range(3_000)])).result())
        make(self, *args, **options)

    monkeypatch.setattr(attention, "__init__", watched)
    with torch.device("meta"):
        model_of("GPT2LMHeadModel", config, FILE, tensors=40)
    assert built == [3_000, 3_000]


@pytest.mark.parametrize("key", ["n_layer", "n_head", "n_embd", "vocab_size", "activation_function", "dtype"])
def test_values_of_any_type_load_or_are_refused(key: str) -> None:
    config = config_of("gpt2")
    for value in ("a", -1, None, [], {}, 1.5, True, 10**6):
        with torch.device("meta"), contextlib.suppress(CheckpointError):
            model_of("GPT2LMHeadModel", config | {key: value}, FILE, tensors=40)


def test_nesting_ends_somewhere() -> None:
    config: Any = {}
    for _ in range(900):
        config = {"a": [config]}
    with pytest.raises(CheckpointError, match="is nested more than 16 deep"):
        plain_config(config, FILE)


def test_causal_models_are_found_by_their_type() -> None:
    assert type(causal_model(config_of("llama"), FILE)).__name__ == "LlamaForCausalLM"
    for kind in ("clip", "nothing", None, ["gpt2"]):
        with pytest.raises(CheckpointError, match="no causal language model"):
            causal_model({"model_type": kind}, FILE)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("output_hidden_states", 2.5, "true or false"),
        ("return_dict", None, "true or false"),
        ("use_cache", "yes", "true or false"),
        ("layer_norm_epsilon", -0.5, "finite numbers from 0"),
        ("layer_norm_epsilon", "x", "finite numbers from 0"),
        ("sliding_window", 2.5, "null, or whole numbers from 0"),
        ("sliding_window", [4], "null, or whole numbers from 0"),
        ("n_head", -1, "whole numbers from 1"),
        ("n_head", 0, "whole numbers from 1"),
        ("n_layer", -3, "whole numbers from 0"),
    ],
)
def test_values_that_fail_in_the_first_forward(key: str, value: Any, allowed: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{key} is .*; allowed: {allowed}"):
        model_of("GPT2LMHeadModel", config_of("gpt2") | {key: value}, FILE, tensors=40)


ODD: list[Any] = [0, -1, 3, 2.5, "x", None, [], {}, 10**30]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_odd_values_are_refused_or_run(kind: str) -> None:
    model = tiny_hf(kind)
    state, ids = model.state_dict(), torch.tensor([[1, 2, 3]])
    config, outcomes = config_of(kind), {"refused": 0, "runs": 0}
    for key in (*config, "sliding_window"):
        for value in ODD:
            try:
                made: Any = model_of(type(model).__name__, config | {key: value}, FILE, tensors=len(state)).eval()
            except CheckpointError:
                outcomes["refused"] += 1
                continue
            if all(t.shape == made.state_dict()[name].shape for name, t in state.items() if name in made.state_dict()):
                made.load_state_dict(state, strict=False)
                assert torch.isfinite(made(ids, return_dict=True).logits).all(), (key, value)
                outcomes["runs"] += 1
    assert min(outcomes.values()) > 50
