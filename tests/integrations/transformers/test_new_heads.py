"""Models of other classes around a quantized base, and models without a float parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BartConfig,
    BartForCausalLM,
    BertConfig,
    OlmoConfig,
    OlmoForCausalLM,
)

import qcut
from qcut.errors import CheckpointError, UnsupportedError
from tests.integrations.transformers.support import IDS, logits, opened, quantized, small
from tests.support.files import rewrite

OPTIONS: list[dict[str, Any]] = [{}, {"embeddings": "w8a16"}, {"skip": []}]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_new_head_on_a_quantized_base(kind: str, options: dict[str, Any], own: bool, tmp_path: Path) -> None:
    model = quantized(kind, "w8a8", **options)
    qcut.save(model, tmp_path) if own else model.save_pretrained(tmp_path)
    hidden = model.base_model(IDS)[0]
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(IDS)[0], hidden)
    for cls in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
        made = cls.from_pretrained(tmp_path, num_labels=3)
        found = made(IDS, output_hidden_states=True)
        assert found.logits.shape[-1] == 3
        assert torch.equal(found.hidden_states[-1], hidden)
        made.save_pretrained(tmp_path / "head")
        assert torch.equal(cls.from_pretrained(tmp_path / "head")(IDS).logits, found.logits)


def test_base_tensors_may_not_be_missing(tmp_path: Path) -> None:
    quantized("llama", "w8a8").save_pretrained(tmp_path)
    rewrite(tmp_path / "model.safetensors", lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)


@pytest.mark.parametrize("saved", ["BertForMaskedLM", "BertForSequenceClassification"])
def test_pooler_may_be_new_or_left_out(saved: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = getattr(transformers, saved)(BertConfig(vocab_size=64, **sizes)).eval()
    qcut.quantize(model, "w8a8", skip=["classifier"], progress=False)
    model.save_pretrained(tmp_path)
    hidden = model.base_model(IDS)[0]
    for cls in (AutoModel, AutoModelForSequenceClassification, AutoModelForMaskedLM):
        made = cls.from_pretrained(tmp_path)
        assert torch.equal(made.base_model(IDS)[0], hidden)


def test_other_encoder_is_not_made_up(tmp_path: Path) -> None:
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64}
    model = BartForCausalLM(BartConfig(vocab_size=64, **sizes))
    qcut.quantize(model, "w8a8", progress=False)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"encoder\..* is missing"):
        AutoModel.from_pretrained(tmp_path)


def without_parameters(dtype: torch.dtype) -> OlmoForCausalLM:
    if Version(transformers.__version__) < Version("5.5"):
        pytest.skip("before 5.5, transformers refuses its own default of OLMo")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = OlmoConfig(vocab_size=64, eos_token_id=2, pad_token_id=0, **sizes)
    model = OlmoForCausalLM._from_config(config, dtype=dtype).eval()
    count = model.num_parameters()
    qcut.quantize(model, "w8a8", embeddings="w8a16", progress=False)
    assert not [p for p in model.parameters() if p.nbytes]
    assert model.num_parameters() == count
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_without_a_float_parameter(dtype: torch.dtype, tmp_path: Path) -> None:
    model = without_parameters(dtype)
    assert (model.device, model.dtype, model.model.dtype) == (torch.device("cpu"), dtype, dtype)
    wanted = model.generate(IDS, max_new_tokens=3, do_sample=False)
    model.tie_weights()
    model.save_pretrained(tmp_path / "transformers")
    qcut.save(model, tmp_path / "qcut")
    for again in (opened(tmp_path / "transformers"), opened(tmp_path / "qcut"), qcut.load(tmp_path / "qcut")):
        assert (again.device.type, again.dtype) == ("cpu", dtype)
        assert torch.equal(logits(again), logits(model))
        assert torch.equal(again.generate(IDS, max_new_tokens=3, do_sample=False), wanted)


@pytest.mark.parametrize("embeddings", [None, "w8a16"])
def test_weights_can_be_tied_again(embeddings: str | None) -> None:
    model = small("gpt2")
    count = model.num_parameters()
    qcut.quantize(model, "codebook4_g16", embeddings=embeddings, progress=False)
    wanted, names = logits(model), list(model.state_dict())
    model.tie_weights()
    assert torch.equal(logits(model), wanted)
    assert list(model.state_dict()) == names
    assert model.num_parameters() == count


def test_other_weights_cannot_be_assigned() -> None:
    model = quantized("llama", "w8a8", skip=[])
    with pytest.raises(UnsupportedError, match="lm_head"):
        model.lm_head.weight = model.get_input_embeddings().weight
