from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qcut
from qcut.errors import UnsupportedError
from tests.support.zoo import tiny_hf, tiny_lm, token_batches

SCHEMES = ("w8a8", "w8a16", "codebook4", "codebook4+4_qr")


def layer(scheme: str = "w8a8") -> qcut.Linear:
    return qcut.Linear.from_float(nn.Linear(32, 16), scheme, name="h.0.proj")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_weight_says_what_it_is(scheme: str) -> None:
    weight = layer(scheme).weight
    assert isinstance(weight, Tensor)
    assert (weight.dtype, weight.device.type, weight.shape, weight.ndim) == (torch.float32, "cpu", (16, 32), 2)
    assert (weight.size(0), weight.numel(), weight.is_cuda, weight.requires_grad) == (16, 512, False, False)
    assert weight.is_floating_point()
    assert (weight.itemsize, weight.element_size(), weight.nbytes) == (4, 4, 2048)
    assert len(weight) == 16
    assert "quantized weight [16, 32]" in repr(weight)
    assert not hasattr(weight, "quant_state")


READS: dict[str, Any] = {
    "linear": lambda w: F.linear(torch.randn(2, 32), w),
    "linear in its dtype": lambda w: F.linear(torch.ones(2, 32, dtype=torch.int8), w),
    "product": lambda w: torch.randn(2, 32) @ w.T,
    "float": lambda w: w.float(),
    "cast": lambda w: w.to(torch.float16),
    "view": lambda w: w.view(-1),
    "chunk": lambda w: w.chunk(2),
    "index": lambda w: w[0],
    "data": lambda w: w.data,
    "write": lambda w: w.normal_(),
    "set": lambda w: w.__setitem__(0, 1.0),
    "copy": lambda w: torch.empty(16, 32).copy_(w),
    "item": lambda w: w.sum().item(),
    "list": lambda w: w.tolist(),
    "numpy": lambda w: w.numpy(),
    "cat": lambda w: torch.cat([torch.ones(1, 32, dtype=torch.int8), w]),
    "detach": lambda w: w.detach(),
    "out": lambda w: torch.add(torch.ones(16, 32), 1, out=w),
    "parameter": lambda w: nn.Parameter(w, requires_grad=False),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "attention": lambda w: F.multi_head_attention_forward(
        *[torch.randn(3, 2, 32)] * 3, 32, 2, torch.randn(96, 32), None, None, None, False, 0.0, w, None
    ),
}


def test_weight_has_dtype_of_float_weight(tmp_path: Path) -> None:
    half = qcut.Linear.from_float(nn.Linear(32, 16).half())
    assert half.weight.dtype is copy.deepcopy(half).weight.dtype is torch.float16
    assert half.bfloat16().weight.dtype is half.to("cpu").weight.dtype is torch.bfloat16
    assert half.to("meta").weight.device.type == "meta"
    model = tiny_hf("llama").half()
    qcut.quantize(model, progress=False)
    qcut.save(model, tmp_path)
    for dtype in (None, torch.bfloat16):
        back = qcut.load(tmp_path, dtype=dtype, progress=False)
        assert back.model.layers[0].mlp.up_proj.weight.dtype is (dtype or torch.float16)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("scheme", ["w8a8", "codebook4"])
def test_reading_its_values_names_the_layer(read: str, scheme: str) -> None:
    with pytest.raises(UnsupportedError, match=r"layer 'h\.0\.proj': its weight is quantized"):
        READS[read](layer(scheme).weight)


def test_the_embedding_and_a_layer_without_a_name() -> None:
    with pytest.raises(UnsupportedError, match=r"^its weight is quantized"):
        qcut.Embedding.from_float(nn.Embedding(8, 16), "w8a16").weight.float()


def test_compiled_code_reads_what_the_weight_is() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wo = layer("w8a16")

        def forward(self, x: Tensor) -> Tensor:
            if isinstance(self.wo.weight, Tensor) and x.dtype != self.wo.weight.dtype != torch.int8:
                x = x.to(self.wo.weight.dtype)
            return self.wo(x)

    model, x = Casts(), torch.randn(2, 32).half()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert model(x).dtype is torch.float32
    assert torch.equal(compiled(x), model(x))


def quantized(scheme: str = "w8a8") -> Any:
    model = tiny_hf("llama")
    qcut.quantize(model, scheme, progress=False)
    return model


def by_hand() -> Any:
    model = tiny_hf("llama")
    model.model.layers[1].mlp.up_proj = qcut.Linear.from_float(model.model.layers[1].mlp.up_proj)
    return model


def table_alone() -> Any:
    model = tiny_hf("gpt2")
    model.transformer.wpe = qcut.Embedding.from_float(model.transformer.wpe)
    return model


def refused(function: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"save_pretrained cannot.*qcut\.save\(model, directory\)"):
        function(*args, **kwargs)


@pytest.mark.parametrize("made", [by_hand, table_alone], ids=lambda f: f.__name__)
def test_save_pretrained_is_refused(made: Any, tmp_path: Path) -> None:
    model = made()
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        refused(one.save_pretrained, tmp_path / "out")
        assert not list((tmp_path / "out").glob("*.safetensors"))
    state = model.state_dict()
    torch.save(state, io.BytesIO())
    model.load_state_dict(state)
    qcut.save(model, tmp_path / "again")
    tiny_hf("llama").save_pretrained(tmp_path / "float")
    assert list((tmp_path / "float").glob("*.safetensors"))


def test_so_are_parts_pipelines_and_wrappers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import TextGenerationPipeline
    from transformers.utils import hub

    model = by_hand()
    refused(model.model.save_pretrained, tmp_path)
    for name in ("hf_api", "create_repo", "create_and_tag_model_card"):
        monkeypatch.setattr(hub, name, MagicMock(), raising=False)
    refused(model.push_to_hub, "nobody/nothing")

    pipeline = object.__new__(TextGenerationPipeline)
    pipeline.model, pipeline.tokenizer, pipeline.feature_extractor, pipeline.image_processor = model, None, None, None
    refused(pipeline.save_pretrained, tmp_path)

    class Wrapper(nn.Module):
        """Keeps the adapters of a state dict, as PEFT's models do."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.base_model = model

        def save_pretrained(self, directory: Path) -> None:
            torch.save({k: v for k, v in self.state_dict().items() if "lora" in k}, directory / "adapter.bin")

    refused(Wrapper(model).save_pretrained, tmp_path)


def test_models_of_any_kind_keep_their_state_dict() -> None:
    model = tiny_lm()
    want = qcut.quantize(model, "codebook4_g16", progress=False)
    assert want.layers
    ids = token_batches()[0]
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(ids), model(ids))


@pytest.mark.parametrize("strict", [True, False])
def test_float_weights_are_not_loaded(strict: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    qcut.quantize(model, "w8a8", progress=False)
    with pytest.raises(UnsupportedError, match=r"layer '0': its weight is quantized, and a float one is loaded"):
        model.load_state_dict(state, strict=strict)
