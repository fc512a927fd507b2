"""GGUF files that are quantized while they are read: what `qcut.quantize` makes of the dequantized model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qcut
from qcut.errors import CheckpointError, ConfigError, QuantizationWarning
from qcut.layers.linear import Linear
from tests.checkpoints.formats import samples
from tests.checkpoints.formats.gguf.written import IDS, Type, gguf, mixture_of, small_model, write
from tests.cli.commands import DEMO, answer
from tests.support.alive import watch_float_weights

PATH = "model.gguf"


def quantized(folder: Path, *given: Any, dtype: torch.dtype = torch.float16, **options: Any) -> Any:
    config = qcut.QcutConfig(*given, **options)
    return qcut.load(folder / PATH, dtype=dtype, progress=False, quantization_config=config)


def assert_same(model: nn.Module, other: nn.Module) -> None:
    """Check that two models have the same schemes and tensors, bit by bit."""
    found, wanted = model.state_dict(), other.state_dict()
    assert list(found) == list(wanted)
    assert all(found[key].dtype == wanted[key].dtype and torch.equal(found[key], wanted[key]) for key in wanted)
    schemes = [
        {name: layer.scheme.name for name, layer in one.named_modules() if isinstance(layer, Linear)}
        for one in (model, other)
    ]
    assert schemes[0] == schemes[1] != {}


SCHEMES = {
    "llama": ("codebook4", None),
    "qwen2": ("int4_g32", "w8a16"),  # the table of tokens is the classifier's
    "qwen3_moe": ("w8a8", None),
    "mixtral": ("codebook4", None),
    "gemma3_text": ("w8a16", None),
    "phi3": ("fp8", None),
    "gpt2": ("w8a8", "w8a16"),
    "gpt_oss": ("mxfp4", None),
    "gpt_neox": ("mxfp4", None),
}


@pytest.mark.filterwarnings("ignore::qcut.errors.QuantizationWarning")
@pytest.mark.parametrize("family", SCHEMES)
def test_layers_are_those_of_quantize(tmp_path: Path, family: str) -> None:
    scheme, embeddings = SCHEMES[family]
    write(tmp_path / PATH, family)
    expected = qcut.load(tmp_path / PATH, progress=False)
    qcut.quantize(expected, scheme, embeddings=embeddings, progress=False)
    assert_same(quantized(tmp_path, scheme, embeddings=embeddings), expected)


@pytest.mark.filterwarnings("ignore::qcut.errors.QuantizationWarning")
@pytest.mark.filterwarnings("error:.*tensors of the types:qcut.errors.QuantizationWarning")
def test_exact_types_are_quantized_anew(tmp_path: Path) -> None:
    expected = write(tmp_path / PATH, "llama", lambda name, values: exact(name, values))
    model = quantized(tmp_path, "w8a16", dtype=torch.float32)
    qcut.quantize(expected, "w8a16", progress=False)
    assert_same(model, expected)
    qcut.save(model, tmp_path / "saved")
    again: Any = qcut.load(tmp_path / "saved", progress=False)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def exact(name: str, values: Any) -> Any:
    return mixture_of(name, values, attention=Type.Q4_0, values=Type.Q5_0, table=Type.Q8_0)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_one_float_weight_is_alive(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / PATH, family)
    weights = watch_float_weights(monkeypatch)
    quantized(tmp_path, "w8a16", embeddings="w8a16")
    assert len(weights.watched) == {"llama": 16, "qwen2": 15}[family]  # a classifier of its own, or the table's
    assert max(weights.alive) == 0


def test_report_and_proof_of_a_file(tmp_path: Path) -> None:
    write(tmp_path / PATH, "llama")
    model = quantized(tmp_path, "w8a16", report=True, verify=True, dtype=torch.float32)
    report = model.hf_quantizer.report
    assert len(report.layers) == 14
    assert report.held
    assert all(0 < layer.weight_error < 0.01 for layer in report.layers)


def test_configuration_has_to_be_a_request(tmp_path: Path) -> None:
    write(tmp_path / PATH, "llama")
    with pytest.raises(ConfigError, match=r"quantization_config is a str.*; allowed: a qcut"):
        qcut.load(tmp_path / PATH, progress=False, quantization_config="codebook4")
    samples.CHECKPOINTS["gptq"](tmp_path / "gptq")
    with pytest.raises(ConfigError, match=r"checkpoint of gptq; allowed: .* with a GGUF file"):
        qcut.load(tmp_path / "gptq", progress=False, quantization_config=qcut.QcutConfig("w8a16"))
    own, whole = nn.Module(), small_model("llama")
    own.model, own.lm_head = whole.model, whole.lm_head
    with pytest.raises(ConfigError, match="quantization_config with a Module; a model of transformers"):
        qcut.load(tmp_path / PATH, progress=False, model=own, quantization_config=qcut.QcutConfig("w8a16"))


def test_values_beyond_the_dtype_are_refused(tmp_path: Path) -> None:
    write(tmp_path / PATH, "llama")
    data = bytearray((tmp_path / PATH).read_bytes())
    tensors = gguf.GGUFReader(str(tmp_path / PATH)).tensors
    start = next(int(one.data_offset) for one in tensors if one.name == "blk.0.attn_q.weight")
    data[start : start + 2] = torch.tensor([60000.0]).half().view(torch.uint8).numpy().tobytes()
    (tmp_path / PATH).write_bytes(data)
    message = rf"{PATH}: tensor 'model\.layers\.0\.self_attn\.q_proj\.weight': found -?inf at .*; finite values"
    with pytest.raises(CheckpointError, match=message):
        quantized(tmp_path, "w8a16")
    with pytest.raises(CheckpointError, match=message), pytest.warns(QuantizationWarning):
        qcut.load(tmp_path / PATH, progress=False)


def test_command_quantizes_a_file_while_reading(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    folder.mkdir()
    write(folder / PATH, "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, folder / name)
    made = answer(capfd, "quantize", folder, "--scheme", "codebook4", "--dtype", "float16", "--out", out)
    assert made["schemes"] == {"codebook4": 14}
    assert_same(qcut.load(out, progress=False), quantized(folder, "codebook4"))
