"""A set of architectures of transformers and torch, small and random; `tests.conversion.sweep` goes through all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.models.modules import tensor_key
from tests.support.architectures import check, inputs_of, tiny_model

transformers = pytest.importorskip("transformers")

DECODERS = (
    *("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM"),
    *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM", "FalconForCausalLM", "FalconH1ForCausalLM"),
    *("MambaForCausalLM", "Mamba2ForCausalLM", "OPTForCausalLM", "BloomForCausalLM", "GPTJForCausalLM"),
    *("GPTNeoXForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM"),
    *("Gemma3ForCausalLM", "Starcoder2ForCausalLM", "Olmo2ForCausalLM", "CohereForCausalLM", "StableLmForCausalLM"),
    *("RwkvForCausalLM", "MptForCausalLM", "DeepseekV3ForCausalLM", "JambaForCausalLM"),
)
OTHERS = (
    *("BertForMaskedLM", "RobertaForMaskedLM", "DebertaV2ForMaskedLM", "DebertaForMaskedLM", "DistilBertForMaskedLM"),
    *("XLNetLMHeadModel", "ElectraForMaskedLM", "T5ForConditionalGeneration", "BartForConditionalGeneration"),
    *("WhisperForConditionalGeneration", "ViTForImageClassification", "CLIPModel", "SiglipModel", "Wav2Vec2ForCTC"),
)


@pytest.mark.parametrize("name", [*DECODERS, *OTHERS])
def test_architecture(name: str) -> None:
    model = tiny_model(name)
    batch = inputs_of(model)
    assert batch is not None
    for scheme in ("w8a8", "codebook4"):
        outcome = check(model, batch, scheme)
        assert outcome.layers
        assert outcome.error > 0, "the output does not depend on what was quantized"


def report_of(name: str, scheme: str = "w8a8") -> Any:
    return qcut.quantize(tiny_model(name), scheme, progress=False)


@pytest.mark.parametrize(
    ("name", "kind", "least"),
    [
        ("WhisperForConditionalGeneration", "convolutions", 10),
        ("MambaForCausalLM", "linear layers", 30),
        ("GPT2LMHeadModel", "embeddings", 10),
        ("BertForMaskedLM", "norms", 0.3),
        ("MambaForCausalLM", "other", 2),
    ],
)
def test_the_report_says_what_stays(name: str, kind: str, least: float) -> None:
    report = report_of(name)
    assert least < report.percent[kind] < 100
    assert sum(report.percent.values()) == pytest.approx(100)
    last = str(report).splitlines()[-1]
    assert last.startswith(f"parameters: {report.percent['quantized']:.1f} % quantized; in float: ")
    assert f"{report.percent[kind]:.1f} % {kind}" in last
    assert report.to_json()["parameters"] == report.parameters


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("MambaForCausalLM", "backbone.layers.0.mixer.dt_proj", "MambaMixer reads its weight itself"),
        ("DebertaForMaskedLM", "deberta.encoder.layer.1.attention.self.in_proj", "DisentangledSelfAttention reads"),
        ("SiglipModel", "vision_model.head.attention.out_proj", "MultiheadAttention reads its weight itself"),
        ("GPT2LMHeadModel", "lm_head", "matched by skip"),
    ],
)
def test_reasons(name: str, layer: str, reason: str) -> None:
    report = report_of(name)
    assert report.skipped[layer].startswith(reason)
    assert reason in str(report)


class Wrapped(nn.Module):
    """A module of torch behind a projection, so that there is something to quantize."""

    def __init__(self, inner: nn.Module, inputs: int = 1) -> None:
        super().__init__()
        self.first, self.inner, self.inputs = nn.Linear(32, 32), inner, inputs

    def forward(self, x: Tensor) -> Any:
        return self.inner(*[self.first(x)] * self.inputs)


def _encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("inner", "inputs", "quantized"),
    [
        (lambda: _encoder_layer(dropout=0.0), 1, 1),
        (lambda: nn.TransformerEncoder(_encoder_layer(dropout=0.0), 2), 1, 1),
        (lambda: nn.TransformerDecoderLayer(32, 4, 64, batch_first=True, dropout=0.0), 2, 3),
        (lambda: nn.Transformer(32, 4, 1, 1, 64, batch_first=True, dropout=0.0), 2, 3),
        (lambda: nn.MultiheadAttention(32, 4, batch_first=True), 3, 1),
        (lambda: nn.AdaptiveLogSoftmaxWithLoss(32, 20, [4, 10]).head, 1, 2),
    ],
)
@pytest.mark.parametrize("scheme", ["w8a8", "w8a16"])
def test_modules_of_torch(inner: Any, inputs: int, quantized: int, scheme: str, train: bool) -> None:
    torch.manual_seed(0)
    model, x = Wrapped(inner(), inputs).train(train), torch.randn(2, 6, 32)

    def run() -> Tensor:
        with torch.no_grad():
            y = model(x)
        return y[0] if isinstance(y, tuple) else y

    want = run()
    total = sum({tensor_key(p): p.numel() for p in model.parameters()}.values())
    report = qcut.quantize(model, scheme, progress=False)
    assert len(report.layers) == quantized
    assert sum(report.parameters.values()) == total
    assert ((run() - want).norm() / want.norm()).item() < 0.05
