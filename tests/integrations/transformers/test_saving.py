"""``save_pretrained`` of quantized models, and `qcut.save` and `qcut.load` of the same folders."""

from __future__ import annotations

import copy
import json
import pickle
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.core_model_loading import Chunk, WeightConverter

import qcut
from qcut.checkpoints.pretrained import load_pretrained
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.linear import Linear
from tests.integrations.transformers.support import IDS, folder_of, hub_of, logits, opened, quantized, same, small
from tests.support.architectures import tiny_model


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, "a")))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("embeddings", [None, "codebook4_g16"])
def test_all_ways_to_write_and_read_one_model(kind: str, embeddings: str | None, tmp_path: Path) -> None:
    model = quantized(kind, embeddings=embeddings)
    for written in (tmp_path / "transformers", tmp_path / "qcut"):
        model.save_pretrained(written) if written.name == "transformers" else qcut.save(model, written)
        again, loaded = opened(written), qcut.load(written, progress=False)
        assert same(again, model)
        assert same(loaded, model)
        for one in (again, loaded):
            one.save_pretrained(tmp_path / "third")
            assert same(opened(tmp_path / "third"), model)
            shutil.rmtree(tmp_path / "third")
            qcut.save(one, tmp_path / "third")
            assert same(qcut.load(tmp_path / "third", progress=False), model)
            shutil.rmtree(tmp_path / "third")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_copies_save_too(kind: str, tmp_path: Path) -> None:
    model = quantized(kind)
    for i, one in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        one.save_pretrained(tmp_path / str(i))
        assert same(opened(tmp_path / str(i)), model)


def test_shards_are_as_small_as_asked(tmp_path: Path) -> None:
    model = quantized("llama", "w8a8")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    sizes = [sum(t.nbytes for t in load_file(path).values()) for path in tmp_path.glob("*.safetensors")]
    assert len(sizes) > 3
    largest = max(p.nbytes for p in (*model.parameters(), *model.buffers()))
    assert max(sizes) <= max(20_000, largest)
    assert same(opened(tmp_path), model)
    assert same(qcut.load(tmp_path, progress=False), model)


def test_saved_folder_is_small_and_describes_itself(tmp_path: Path) -> None:
    model = quantized("llama", "codebook4")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    weight = model.model.layers[0].mlp.up_proj
    assert stored["model.layers.0.mlp.up_proj.indices"].nbytes == weight.in_features * weight.out_features // 2
    assert stored["model.layers.0.mlp.up_proj.weight"].nbytes == 1  # a mark
    entry = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert entry["quant_method"] == "qcut"
    assert entry["format_version"] == 2
    assert entry["layers"]["model.layers.0.mlp.up_proj"]["scheme"]["bits"] == 4


def test_saving_describes_layers_changed_after_loading(tmp_path: Path) -> None:
    model = opened(folder_of("llama", tmp_path), quantization_config=qcut.QcutConfig("w8a8", include=["q_proj"]))
    qcut.quantize(model, "w8a16", include=["up_proj"], progress=False)
    model.save_pretrained(tmp_path / "out")
    again = opened(tmp_path / "out")
    assert same(again, model)
    assert {m.scheme.name for m in again.modules() if isinstance(m, Linear)} == {"w8a8", "w8a16"}


def test_parts_save_themselves(tmp_path: Path) -> None:
    model = quantized("llama")
    model.model.save_pretrained(tmp_path)
    part = AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(part(IDS).last_hidden_state, model.model(IDS).last_hidden_state)


def test_a_state_dict_beside_the_model_is_refused(tmp_path: Path) -> None:
    model = quantized()
    with pytest.raises(UnsupportedError, match=r"state_dict=.*says nothing of schemes.*save_pretrained\(directory\)"):
        model.save_pretrained(tmp_path, state_dict=model.state_dict())
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_wrappers_way_of_saving_is_refused(tmp_path: Path) -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.inner = model

        def save_pretrained(self, directory: Path) -> None:
            torch.save(self.state_dict(), directory / "model.bin")

    with pytest.raises(UnsupportedError, match="save_pretrained cannot"):
        Wrapper(quantized()).save_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "MixtralForCausalLM",  # experts, which are stored one by one
        "GPTNeoXForCausalLM",  # a classifier that is stored under another name
        "ViTForImageClassification",  # modules that are
        "LlavaForConditionalGeneration",
        "T5ForConditionalGeneration",  # tables that two stacks share
    ],
)
def test_models_stored_under_other_names_round_trip(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path / "float")
    expected = type(model).from_pretrained(tmp_path / "float")
    qcut.quantize(expected, "w8a8", progress=False)
    config = qcut.QcutConfig("w8a8")
    made = type(model).from_pretrained(tmp_path / "float", quantization_config=config)
    made.save_pretrained(tmp_path / "out")
    qcut.save(made, tmp_path / "saved")
    want = expected.state_dict()
    for one in (made, *(type(model).from_pretrained(tmp_path / folder) for folder in ("out", "saved"))):
        state = one.state_dict()
        assert list(state) == list(want)
        assert all(torch.equal(state[key], want[key]) for key in want)


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    model = quantized()
    qcut.save(model, tmp_path / "given", tokenizer=tokenizer())
    assert (tmp_path / "given" / "tokenizer.json").exists()
    folder = folder_of("gpt2", tmp_path)
    tokenizer().save_pretrained(folder)
    known = opened(folder, quantization_config=qcut.QcutConfig("w8a8"))
    qcut.save(known, tmp_path / "known")
    assert (tmp_path / "known" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "known" / "config.json").read_text())["model_type"] == "gpt2"
    with pytest.raises(CheckpointError, match="tokenizer: found a str"):
        qcut.save(model, tmp_path / "wrong", tokenizer="gpt2")


def test_tokenizer_is_copied_whole(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path)
    model = opened(folder, quantization_config=qcut.QcutConfig("w8a8"))
    tokenizer().save_pretrained(folder)
    (folder / "merges.txt").write_bytes(bytes(2 << 20))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # as on a disk that is full
    try:
        with pytest.raises(CheckpointError, match="cannot be copied"):
            qcut.save(model, tmp_path / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    qcut.save(model, tmp_path / "saved")
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt"):
        assert (tmp_path / "saved" / name).read_bytes() == (folder / name).read_bytes()


def test_the_commands_read_what_transformers_wrote(tmp_path: Path) -> None:
    model = quantized("llama", "w8a8")
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_pretrained(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    tokenizer().save_pretrained(tmp_path)
    loaded, _ = load_pretrained(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert same(loaded, model)


def test_one_folder_holds_one_model(tmp_path: Path) -> None:
    first, second = quantized("gpt2", "w8a8"), quantized("gpt2", "w8a16")
    first.save_pretrained(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: transformers would read this file"):
        qcut.save(second, tmp_path / "a")
    assert same(qcut.load(tmp_path / "a", progress=False), first)
    qcut.save(first, tmp_path / "b")
    second.save_pretrained(tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"does not name qcut_config\.json.*have both written"):
        qcut.load(tmp_path / "b", progress=False)
    assert same(opened(tmp_path / "b"), second)
    qcut.save(first, tmp_path / "c")
    qcut.save(second, tmp_path / "c")
    assert same(qcut.load(tmp_path / "c", progress=False), second)
    assert same(opened(tmp_path / "c"), second)


def test_a_model_saved_in_another_dtype_keeps_it(tmp_path: Path) -> None:
    model = quantized("gpt2").half()
    for i, save in enumerate((model.save_pretrained, lambda folder: qcut.save(model, folder))):
        save(tmp_path / str(i))
        assert same(opened(tmp_path / str(i)), model)


def test_load_takes_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("llama")
    model.save_pretrained(hub_of(tmp_path, monkeypatch))
    monkeypatch.chdir(tmp_path)
    assert same(qcut.load("someone/small"), model)
    with pytest.raises(CheckpointError, match="nobody/nothing: not a directory here"):
        qcut.load("nobody/nothing")


def test_dequantizing_gives_the_class_its_own_modules_back(tmp_path: Path) -> None:
    for kind in ("gpt2", "llama"):
        for embeddings in (None, "w8a16"):
            model = quantized(kind, "w8a16", embeddings=embeddings)
            want = logits(model)
            plain = small(kind)
            assert model.dequantize() is model
            assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]
            torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
            folder = tmp_path / f"{kind}-{embeddings}"
            model.save_pretrained(folder)
            assert "quantization_config" not in json.loads((folder / "config.json").read_text())
            assert same(opened(folder), model)


class Kept(LlamaForCausalLM):
    """A Llama with a parameter that transformers keeps in float32."""

    _keep_in_fp32_modules_strict = ("input_layernorm",)


def test_parameters_kept_in_float32_change_no_dtype(tmp_path: Path) -> None:
    model = small("llama").to(torch.bfloat16)
    qcut.quantize(model, "w8a8", embeddings="w8a16", progress=False)
    model.save_pretrained(tmp_path)
    again = Kept.from_pretrained(tmp_path, dtype="auto")
    assert again.model.layers[0].input_layernorm.weight.dtype is torch.float32
    assert again.model.embed_tokens.dtype is again.model.layers[0].mlp.up_proj.weight.dtype is torch.bfloat16
    assert again.dtype is torch.bfloat16


def test_quantized_tensors_are_not_converted(tmp_path: Path) -> None:
    model = small("llama")
    parts = [f"self_attn.{key}_proj" for key in "qkv"]
    model._weight_conversions = [WeightConverter("wqkv", parts, operations=[Chunk(dim=0)])]
    qcut.quantize(model, "w8a8", progress=False)
    with pytest.raises(UnsupportedError, match="save_original_format=False"):
        model.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())
    model.save_pretrained(tmp_path, save_original_format=False)
    assert torch.equal(logits(opened(tmp_path)), logits(model))
