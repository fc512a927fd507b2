"""``from_pretrained(quantization_config=…)``: the same layers as `qcut.quantize`, and one float weight at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

import qcut
from qcut.errors import CheckpointError, ConfigError, DtypeError, QuantizationError
from qcut.layers.linear import Linear
from qcut.models.fusion import FusedActivation
from tests.integrations.transformers.support import IDS, folder_of, logits, opened, same, small
from tests.support.alive import watch_float_weights
from tests.support.architectures import tiny_model
from tests.support.files import write_tensors

SCHEMES = (
    "w8a8",
    "w8a8_rotated",
    "w8a16",
    "fp8",
    "fp8_blocks",
    "fp8_dynamic",
    "codebook4",
    "codebook2+3_g16",
    "codebook4_int8",
    "codebook4_g32_qr",
    "int4_g16",
    "nvfp4",
)


def loaded(kind: str, scheme: Any, tmp_path: Path, options: dict[str, Any], **given: Any) -> tuple[Any, Any]:
    """A model quantized while it loads, and read again once saved; both are what `qcut.quantize` makes."""
    folder = folder_of(kind, tmp_path)
    model, expected = (
        opened(folder, quantization_config=qcut.QcutConfig(scheme, **options), **given),
        opened(folder, **given),
    )
    qcut.quantize(expected, scheme, progress=False, **options)
    assert same(model, expected)
    assert not model.training
    model.save_pretrained(tmp_path / "out")
    again = opened(tmp_path / "out")
    assert same(again, expected)
    return model, again


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_loading_gives_what_quantize_gives(kind: str, scheme: str, tmp_path: Path) -> None:
    model, _ = loaded(kind, scheme, tmp_path, {})
    assert sum(isinstance(m, Linear) for m in model.modules()) == {"gpt2": 8, "llama": 14}[kind]
    assert any(isinstance(m, FusedActivation) for m in model.modules()) == (kind == "gpt2")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("embeddings", ["w8a16", "codebook4_g16"])
def test_tables_and_classifiers(kind: str, embeddings: str, tmp_path: Path) -> None:
    model, again = loaded(kind, "w8a8", tmp_path, {"embeddings": embeddings})
    assert isinstance(model.lm_head, Linear)
    assert isinstance(model.get_input_embeddings(), qcut.Embedding)
    assert model.get_input_embeddings().tied == (kind == "gpt2")
    assert (again.get_input_embeddings().linear is again.lm_head) == (kind == "gpt2")


def test_static_ranges_come_from_a_calibration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"w8a8_static.*needs calibration=qcut\.calibrate"):
        qcut.QcutConfig("w8a8_static")
    calibration = qcut.calibrate(small("gpt2"), [IDS], progress=False)
    loaded("gpt2", "w8a8_static", tmp_path, {"calibration": calibration})


@pytest.mark.parametrize(("kind", "embeddings"), [("gpt2", "w8a16"), ("llama", None), ("llama", "codebook4_g16")])
def test_the_proof_of_loading(kind: str, embeddings: str | None, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path)
    config = qcut.QcutConfig("w8a8", embeddings=embeddings, verify=IDS, report=True)
    report = opened(folder, quantization_config=config).hf_quantizer.report
    expected = qcut.quantize(opened(folder), "w8a8", embeddings=embeddings, verify=IDS, progress=False)
    assert (report.verified, report.held, report.unseen) == (expected.verified, expected.held, "")
    assert report.verified >= report.held > 0
    report = opened(folder, quantization_config=qcut.QcutConfig("w8a8", report=True)).hf_quantizer.report
    assert (report.verified, report.held) == (0, 0)


class Asking(LlamaForCausalLM):
    """Computes something else if a weight needs no gradient: a question that code reading does not find."""

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        out = super().forward(input_ids, **options)
        out.logits = out.logits * (1 + float(self.model.layers[0].mlp.up_proj.weight.requires_grad))
        return out


def test_a_model_that_differs_is_not_loaded(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path)
    Asking.from_pretrained(folder, quantization_config=qcut.QcutConfig("w8a8"))
    for verify in (IDS, True):
        with pytest.raises(QuantizationError, match=r"output is off the float model's by 50\.0%"):
            Asking.from_pretrained(folder, quantization_config=qcut.QcutConfig("w8a8", verify=verify))
    with pytest.raises(DtypeError, match="token ids are float32"):
        opened(folder, quantization_config=qcut.QcutConfig("w8a8", verify=torch.ones(1, 3)))


def test_codebooks_are_fitted_to_second_moments(tmp_path: Path) -> None:
    moments = qcut.collect_second_moments(small("llama"), [IDS], progress=False)
    loaded("llama", "codebook3", tmp_path, {"second_moments": moments})


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_plans_give_each_layer_its_scheme(kind: str, tmp_path: Path) -> None:
    candidates = ("w8a8_static", "w8a16", "fp16")
    plan = qcut.plan(small(kind), [IDS], budget=10.0, candidates=candidates, objective="memory", progress=False)
    names = list(plan.layers)
    for name, scheme in zip(names, ("w8a8_static", "codebook4_g16", "fp16", "w8a8"), strict=False):
        plan.layers[name].scheme = scheme
    model, _ = loaded(kind, plan, tmp_path, {})
    schemes = {name: m.scheme.name for name, m in model.named_modules() if isinstance(m, Linear)}
    assert [schemes.get(name) for name in names[:4]] == ["w8a8_static", "codebook4_g16", None, "w8a8"]


def test_which_layers(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path)
    config = qcut.QcutConfig("w8a8", include=["*_proj"], modules_to_not_convert=["o_proj", "layers.1.*"])
    model = opened(folder, quantization_config=config)
    found = {name for name, m in model.named_modules() if isinstance(m, Linear)}
    assert found == {
        *(f"model.layers.0.self_attn.{name}_proj" for name in "qkv"),
        *(f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")),
    }
    with pytest.raises(QuantizationError, match="'nothing' matches none"):
        opened(folder, quantization_config=qcut.QcutConfig("w8a8", include=["nothing"]))
    with pytest.raises(ConfigError, match="leaves every layer as it is"):
        qcut.QcutConfig("fp16")


def test_a_configuration_may_be_plain_data(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path)
    config = qcut.QcutConfig("codebook4_g16", embeddings="w8a16", modules_to_not_convert=["o_proj"], fuse=False)
    assert same(opened(folder, quantization_config=config.to_dict()), opened(folder, quantization_config=config))
    with pytest.raises(CheckpointError, match="bits"):
        opened(folder, quantization_config={"quant_method": "qcut", "scheme": "w8a8", "bits": 8})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    _, again = loaded("gpt2", "w8a16", tmp_path, {"embeddings": "w8a16"}, dtype=dtype)
    assert again.transformer.wte.dtype is dtype
    assert again.transformer.h[0].attn.c_attn.weight.dtype is dtype


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("embeddings", [None, "w8a16"])
def test_the_report_is_that_of_quantize(kind: str, embeddings: str | None, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path)
    options: dict[str, Any] = {"dtype": torch.float16}
    config = qcut.QcutConfig("codebook4_g16", embeddings=embeddings, modules_to_not_convert=["1.*"], report=True)
    report = opened(folder, quantization_config=config, **options).hf_quantizer.report
    expected = qcut.quantize(
        opened(folder, **options), "codebook4_g16", embeddings=embeddings, skip=["1.*"], progress=False
    )
    assert report == expected
    assert str(report) == str(expected)
    assert len(report.layers) >= 4
    assert report.skipped
    assert opened(folder, quantization_config=qcut.QcutConfig("w8a8")).hf_quantizer.report is None


def test_a_model_without_its_head(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path)
    model = opened(folder, quantization_config=qcut.QcutConfig("codebook4_g16"))
    model.save_pretrained(tmp_path / "out")
    base = AutoModel.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state)


def test_one_float_weight_is_alive_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight that reaches a layer is watched; when the next one comes, those before it must be gone."""
    folder = folder_of("llama", tmp_path)
    weights = watch_float_weights(monkeypatch)
    opened(folder, quantization_config=qcut.QcutConfig("w8a8"))
    assert len(weights.watched) == 14
    assert max(weights.alive) <= 1
    assert weights.now() == 0


_PEAK = """
import pathlib, re, sys
import torch
from transformers import AutoModelForCausalLM
import qcut
from qcut.layers.linear import Linear

def held():
    return int(re.search(r"RssAnon:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) << 10

peak = [0]
from_float = Linear.all_from_float.__func__

def watching(cls, *args):
    peak[0] = max(peak[0], held())
    return from_float(cls, *args)

Linear.all_from_float = classmethod(watching)
config = qcut.QcutConfig("w8a8", report=True)
AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/small", dtype=torch.float32, quantization_config=config)
before, peak[0] = held(), 0
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, quantization_config=config)
assert peak[0]
print(peak[0] - before, sum(t.nbytes for t in (*model.parameters(), *model.buffers())))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory of a process is read from Linux")
def test_holes_in_the_heap_are_given_back(tmp_path: Path) -> None:
    """Float32 weights of 12 MiB each, 336 MiB in all: what is resident when a layer is quantized is what was made."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8, "vocab_size": 128}
    for folder, layers in ((tmp_path, 8), (tmp_path / "small", 1)):
        with torch.device("meta"):
            model: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))
        model.to_empty(device="cpu").half()
        for parameter in model.parameters():
            parameter.data.copy_(torch.arange(parameter.shape[-1]) % 7 - 3)
        model.save_pretrained(folder)
    words = [sys.executable, "-c", _PEAK, str(tmp_path)]
    # glibc comes to such settings by itself, sooner or later: large tensors lie in the heap, which keeps what it has.
    heap = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    ended = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | heap)
    grown, made = map(int, ended.stdout.split())
    assert grown < made + 3 * 4 * 3072 * 1024


def test_a_weight_that_cannot_be_quantized_is_named(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"

    def rewritten(change: dict[str, Tensor | None]) -> Path:
        kept = {key: t for key, t in (tensors | change).items() if t is not None}
        write_tensors(folder / "model.safetensors", kept)
        return folder

    config = qcut.QcutConfig("w8a8")
    with pytest.raises(QuantizationError, match=r"model\.layers\.1\.mlp\.up_proj.*NaN"):
        opened(rewritten({name: torch.full_like(tensors[name], torch.nan)}), quantization_config=config)
    with pytest.raises(CheckpointError, match=rf"no tensor '{name}'"):
        opened(rewritten({name: None}), quantization_config=config)
    with pytest.raises(CheckpointError, match=rf"'{name}': found \[2, 3\], .*\[128, 64\]"):
        opened(rewritten({name: torch.ones(2, 3)}), quantization_config=config)


def test_tied_names_that_are_stored_twice(tmp_path: Path) -> None:
    folder = folder_of("gpt2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    table = tensors["transformer.wte.weight"]
    config = qcut.QcutConfig("w8a8", embeddings="w8a16")
    expected = opened(folder, quantization_config=config)
    write_tensors(folder / "model.safetensors", {**tensors, "lm_head.weight": table.clone()})
    assert same(opened(folder, quantization_config=config), expected)
    write_tensors(folder / "model.safetensors", {**tensors, "lm_head.weight": table + 1})
    with pytest.raises(CheckpointError, match=r"ties it to another.*two that differ"):
        opened(folder, quantization_config=config)
    del tensors["transformer.wte.weight"]
    write_tensors(folder / "model.safetensors", {**tensors, "lm_head.weight": table})
    assert same(opened(folder, quantization_config=config), expected)


def test_float_models_load_as_before(tmp_path: Path) -> None:
    folder = folder_of("gpt2", tmp_path)
    assert torch.equal(logits(opened(folder)), logits(small("gpt2")))
    assert not hasattr(opened(folder).config, "quantization_config")


def test_tables_tied_to_the_first_are_quantized(tmp_path: Path) -> None:
    model = tiny_model("Pop2PianoForConditionalGeneration")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, quantization_config=qcut.QcutConfig("w8a8", embeddings="w8a16"))
    qcut.quantize(model, "w8a8", embeddings="w8a16", progress=False)
    tables = [one.get_submodule(name) for one in (model, loaded) for name in ("shared", "encoder.embed_tokens")]
    assert all(isinstance(table, qcut.Embedding) for table in tables)
    assert all(torch.equal(tensor, loaded.state_dict()[key]) for key, tensor in model.state_dict().items())
