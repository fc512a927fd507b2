from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.errors import ConfigError, DtypeError, QuantizationError, ShapeError, UnsupportedError
from qcut.models.modules import forward
from qcut.models.selection import find_layers, linear_layers, matches, summary_of
from tests.support.zoo import tiny_hf, tiny_lm, token_batches


class Tokenizer:
    pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gpt2", r"the str 'gpt2'; load the model first, with transformers' from_pretrained, or with qcut\.load"),
        (Path("folder"), r"the PosixPath 'folder'; load the model first"),
        (np.zeros((2, 2)), "found a ndarray; an nn.Module"),
        (None, "found a NoneType"),
        (Tokenizer(), "a tokenizer or processor"),
        ({"weight": torch.ones(2)}, "a dict, such as a state dict; load it into a model first"),
        (nn.Linear, "the class Linear; pass an instance"),
        (torch.ones(2, 2), "found a Tensor"),
        (type("Pipeline", (), {"model": nn.Sequential()})(), r"a Pipeline; pass its model, \.model \(Sequential\)"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_model(given: Any, message: str) -> None:
    batches = token_batches()
    for call in (
        lambda: qcut.quantize(given, progress=False),
        lambda: qcut.calibrate(given, batches, progress=False),
        lambda: qcut.plan(given, batches, progress=False),
        lambda: qcut.collect_second_moments(given, batches, progress=False),
        lambda: qcut.smooth(given, qcut.Calibration({}, "minmax", 0.9999, [], {})),
    ):
        with pytest.raises(DtypeError, match=message):
            call()


def test_one_glob_may_be_a_string() -> None:
    chosen = [name for name in linear_layers(tiny_lm())[0] if name.endswith(".q")]
    assert list(find_layers(tiny_lm(), "*.q")) == chosen
    assert not {*chosen} & {*find_layers(tiny_lm(), skip="*.q")}
    report = qcut.quantize(tiny_lm(), skip=(glob for glob in ["*.q"]), allow_growth=True, progress=False)
    assert {name for name, reason in report.skipped.items() if reason == "matched by skip"} == {*chosen}
    assert [r.name for r in qcut.quantize(tiny_lm(), include="*.q", allow_growth=True, progress=False).layers] == chosen


@pytest.mark.parametrize("globs", [[1], [None], 3, ["*.q", b"x"]])
def test_globs_are_strings(globs: Any) -> None:
    for call in (
        lambda: qcut.quantize(tiny_lm(), include=globs, progress=False),
        lambda: qcut.quantize(tiny_lm(), skip=globs, progress=False),
        lambda: qcut.calibrate(tiny_lm(), token_batches(), skip=globs, progress=False),
        lambda: qcut.plan(tiny_lm(), token_batches(), include=globs, bits=8, progress=False),
    ):
        with pytest.raises(ConfigError, match="globs of module names"):
            call()


def test_torchscript_is_refused_by_name() -> None:
    model = nn.Sequential(torch.jit.trace(nn.Linear(8, 8), torch.randn(1, 8)), nn.Linear(8, 8))
    with pytest.raises(UnsupportedError, match="module '0' is TorchScript"):
        qcut.quantize(model, progress=False)


def refused(model: nn.Module, message: str, **options: Any) -> None:
    with pytest.raises(QuantizationError, match=message):
        qcut.quantize(model, progress=False, **options)
    with pytest.raises(QuantizationError, match=message):
        find_layers(model, options.get("include"), options.get("skip", ("lm_head",)))


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_why_there_is_nothing_to_do() -> None:
    model = tiny_lm()
    refused(model, r"no layer to work on: all 11 linear layers.* left out by skip=\('\*',\)", skip=("*",))
    qcut.quantize(model, skip=("lm_head", "blocks.1.*"), progress=False)
    refused(model, r"'\*\.0\.\*' matches only layers already quantized", include=["*.0.*"])
    qcut.quantize(model, progress=False)
    del model.lm_head
    refused(model, "TinyLM: already quantized: 10 layers, such as 'blocks.0.q', are qcut.Linear")
    refused(nn.Linear(16, 16), r"a bare Linear; use qcut\.Linear\.from_float\(layer, scheme\)")
    refused(nn.Embedding(16, 16), r"a bare Embedding; use qcut\.Embedding\.from_float")
    refused(qcut.Linear.from_float(nn.Linear(16, 16)), "already quantized, a bare qcut.Linear")
    refused(nn.Sequential(nn.Conv2d(3, 3, 3)), "it has no nn.Linear and no Conv1D of transformers")
    own = nn.Sequential(Own(16, 16), Own(16, 16))
    refused(own, r"its 2 linear layers stay in float: 0 and 1 others: a subclass with its own forward \(class .*Own\)")
    refused(nn.Sequential(own, nn.Linear(16, 16)), "'0.0' matches only layers that stay in float", include=["0.0"])
    refused(nn.Sequential(nn.Linear(16, 16)), "'x' matches none of its 1 linear layers, such as '0'", include=["x"])


def test_reasons_in_a_few_words() -> None:
    reasons = {"a": "x", "b": "y", "c": "x"}
    assert summary_of(reasons) == "a and 1 others: x; b: y"
    many = {str(i): f"reason {i}" for i in range(7)}
    assert summary_of(many).endswith("; and 3 other reasons")


class LoraLinear(nn.Module):
    """The structure of PEFT's LoRA layers."""

    def __init__(self, base_layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, bias=False)})
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            self.unmerge()
        y = self.base_layer(x)
        return y + self.lora_B["default"](self.lora_A["default"](x))

    def get_base_layer(self) -> nn.Module:
        return self.base_layer

    def unmerge(self) -> None:
        weight = self.get_base_layer().weight
        weight.data -= self.lora_B["default"].weight @ self.lora_A["default"].weight


class Kept(nn.Module):
    """The structure of PEFT's wrapper of modules that are trained as a whole."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(32, 64)})

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_to_save["default"](x)


def peft_model() -> nn.Module:
    model = tiny_lm()
    for block in model.blocks:
        block.q, block.up = LoraLinear(block.q), LoraLinear(block.up)
    model.lm_head = Kept(nn.Linear(32, 64, bias=False))
    return model.eval()


def test_adapters_are_never_quantized() -> None:
    model, ids = peft_model(), token_batches()[0]
    want = model(ids)
    layers, left = linear_layers(model)
    assert "blocks.0.q.base_layer" in layers
    assert {name.split(".")[-2] for name in left} == {"lora_A", "lora_B", "modules_to_save"}
    report = qcut.quantize(model, "w8a16", progress=False)
    assert isinstance(model.blocks[0].q.base_layer, qcut.Linear)
    assert type(model.blocks[0].q.lora_A["default"]) is nn.Linear
    assert report.skipped["blocks.0.q.lora_A.default"] == "part of an adapter (LoraLinear)"
    assert report.skipped["lm_head.original_module"] == "matched by skip"
    assert ((model(ids) - want).norm() / want.norm()).item() < 0.05
    model.blocks[0].q.merged = True
    with pytest.raises(
        qcut.errors.UnsupportedError, match=r"layer 'blocks\.0\.q\.base_layer': its weight is quantized"
    ):
        model(ids)


def test_modules_that_peft_defines() -> None:
    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp_head = nn.Sequential(nn.Linear(16, 16))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_model = nn.Sequential(nn.Linear(16, 16))
            self.prompt_encoder = Prompt()

    Prompt.__module__ = Model.__module__ = "peft.peft_model"
    layers, left = linear_layers(Model())
    assert set(layers) == {"base_model.0"}
    assert set(left) == {"prompt_encoder.mlp_head.0"}


def test_globs_go_by_the_place_of_an_adapter() -> None:
    assert matches("lm_head.base_layer", ["lm_head"])
    assert matches("model.lm_head.original_module", ["lm_head"])
    assert not matches("lm_head.lora_A", ["lm_head"])


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ("text", DtypeError, "found str; tokenize text first"),
        (["one", "two"], DtypeError, "found str; tokenize text first"),
        ({"input_ids": [[1, 2]]}, DtypeError, "found dict; a batch is a tensor"),
        (np.zeros((1, 4), np.int64), DtypeError, r"found ndarray; see torch\.from_numpy"),
        ({"input_ids": np.zeros((1, 4))}, DtypeError, r"found ndarray; see torch\.from_numpy"),
        (None, DtypeError, "found NoneType"),
        (7, DtypeError, "found int"),
        ([1, 2, 3], DtypeError, "found list"),
        (torch.rand(1, 4), DtypeError, "token ids are float32; int64 or int32 is needed"),
        ({"input_ids": torch.ones(1, 4, dtype=torch.bool)}, DtypeError, "token ids are bool"),
        (torch.full((1, 4), 64), ShapeError, "found token id 64; the model's table has 64 rows"),
        (torch.full((1, 4), -100), ShapeError, "found token id -100"),
        (
            {"text": torch.ones(1, 4, dtype=torch.int64)},
            ConfigError,
            r"LlamaForCausalLM fails on this batch \(int64 \[1, 4\]\): ValueError: .*input_ids",
        ),
    ],
)
@pytest.mark.parametrize("call", [qcut.calibrate, qcut.plan, qcut.collect_second_moments], ids=lambda f: f.__name__)
def test_wrong_batches(call: Any, batch: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(tiny_hf("llama"), [batch], progress=False)


def test_batches_of_plain_models() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    for batch, message in (
        ({"input_ids": torch.ones(1, 4)}, r"Sequential\.forward does not take this batch: missing"),
        (torch.ones(2, 16), r"fails on this batch \(float32 \[2, 16\]\): RuntimeError: "),
        (torch.ones(2, 32, dtype=torch.int64), r"fails on this batch \(int64 \[2, 32\]\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            qcut.calibrate(model, [batch], progress=False)


def test_right_batches() -> None:
    model, ids = tiny_hf("llama"), token_batches()[0]
    for batch in (ids, (ids,), [ids], {"input_ids": ids}, {"input_ids": ids.int(), "attention_mask": None}):
        assert forward(model, batch).logits.shape == (2, 16, 64)
    assert forward(model, {"inputs_embeds": torch.randn(1, 4, 32)}).logits.shape == (1, 4, 64)
