"""The proof that a quantized model is put together as the float one, and computes what its scheme says."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.conversion.verification import Recording, check_layer, excerpt, vocabulary_tokens
from qcut.errors import QuantizationError
from tests.support.zoo import inject_outliers, same, snapshot, tiny_hf, tiny_lm, token_batches

SCHEMES = (
    "w8a8",
    "w8a16",
    "fp8",
    "fp8_blocks",
    "fp8_dynamic",
    "int16x8",
    "codebook4",
    "codebook2",
    "codebook3_int8",
    "codebook4+4",
    "int4",
    "nvfp4",
)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "plain"])
def test_right_models_pass(kind: str, scheme: str) -> None:
    model = tiny_lm() if kind == "plain" else tiny_hf(kind)
    report = qcut.quantize(model, scheme, verify=token_batches()[0], allow_growth=True, progress=False)
    assert report.verified == len(report.layers)
    assert f"verified: {report.verified} calls" in str(report)


def test_calibrated_models_are_verified_by_default() -> None:
    model = tiny_lm()
    calibration = qcut.calibrate(model, token_batches(), progress=False)
    assert calibration.batch.shape == (1, 16)
    inject_outliers(model.blocks[0].ln1, [model.blocks[0].q, model.blocks[0].v])
    calibration = qcut.calibrate(model, token_batches(), progress=False)
    other = copy.deepcopy(model)
    assert qcut.quantize(model, "w8a8_static", calibration=calibration, smooth=0.5, progress=False).verified == 10
    assert qcut.quantize(other, "w8a8", calibration=calibration, verify=False, progress=False).verified == 0


@pytest.mark.parametrize("scheme", ["w8a8", "codebook2"])
def test_structure_that_differs_is_refused_and_undone(scheme: str) -> None:
    model, x = tiny_lm(), token_batches()[0]
    before = snapshot(model)
    recording = Recording(model, x, {"blocks.0.up": model.blocks[0].up, "blocks.1.up": model.blocks[1].up}, 1e9)
    other = copy.deepcopy(model)
    qcut.quantize(other, scheme, include=["*.up"], allow_growth=True, progress=False)
    layers = {f"blocks.{i}.up": other.blocks[i].up for i in (0, 1)}
    with torch.no_grad():
        other.blocks[1].ln2.weight.mul_(2)
    with pytest.raises(QuantizationError, match=r"layer 'blocks.1.up': verify: its input in call 1"):
        recording.check(other, layers, {})
    assert same(before, snapshot(model))


def test_lost_calls_and_lost_activations_are_named() -> None:
    x = torch.randn(4, 32)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh()).eval()
    layers = {"0": model[0], "2": model[2]}
    recording = Recording(model, x, layers, 1e9)
    recording.check(model, layers, {})
    without = nn.Sequential(model[0], nn.Identity(), model[2], model[3])
    with pytest.raises(QuantizationError, match="layer '2': verify: its input in call 1"):
        recording.check(without, layers, {})
    with pytest.raises(QuantizationError, match="layer '2': verify: the quantized model does not call it"):
        recording.check(model[:2], layers, {})
    with pytest.raises(QuantizationError, match=r"layer '2': verify: the quantized model calls it where .* calls 0"):
        recording.check(model[1:], layers, {})
    with pytest.raises(QuantizationError, match="the model's output is off"):
        recording.check(model[:3], layers, {})


class Reads(nn.Module):
    """Goes another way where a weight is no leaf of the graph: a question that no answer of a layer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * (1 + float(self.a.weight.requires_grad)))


def test_failed_proof_leaves_the_model_as_it_was() -> None:
    model, x = Reads().eval(), torch.randn(4, 32)
    before, want = snapshot(model), model(x)
    for scheme in ("w8a8", "codebook2"):
        with pytest.raises(QuantizationError, match=r"layer 'b': verify: its input in call 1 is 50\.0% off"):
            qcut.quantize(model, scheme, verify=x, progress=False)
    assert same(before, snapshot(model))
    assert torch.equal(model(x), want)


@pytest.mark.parametrize(
    "scheme", ["w8a8", "w8a16", "fp8", "fp8_blocks", "int16x8", "codebook4", "codebook4_int8", "nvfp4"]
)
def test_layer_of_another_weight_or_activation_is_named(scheme: str) -> None:
    float_layer, x = nn.Linear(64, 48), torch.randn(16, 64)
    layer = qcut.Linear.from_float(float_layer, scheme, activation="relu", name="up")
    check_layer("up", float_layer, layer, x, 0.0)
    kept, layer.activation = layer.dequantized_weight, "none"
    wanted = layer(x)
    layer.activation = "relu"
    layer._product = lambda x: wanted * 1.5  # type: ignore[method-assign]
    with pytest.raises(QuantizationError, match="layer 'up': verify: its result is"):
        check_layer("up", float_layer, layer, x, 0.0)
    del layer._product
    error = (kept() - nn.Linear(64, 48).weight).norm() / float_layer.weight.norm()
    with pytest.raises(QuantizationError, match=f"layer 'up': verify: the {scheme} weight is"):
        check_layer("up", float_layer, layer, x, error.item())


def test_state_and_random_numbers_are_as_before() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.calls = nn.Linear(32, 32), 0
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen += 1
            x.mul_(2)
            return self.a(x) * self.calls + torch.rand(())

    model, x = Counting(), torch.randn(4, 32)
    copied, state = x.clone(), torch.get_rng_state()
    assert qcut.quantize(model, "w8a8", verify=x, progress=False).verified == 1
    assert model.calls == 0
    assert model.seen == 0
    assert torch.equal(x, copied)
    assert torch.equal(torch.get_rng_state(), state)


def test_excerpt_is_one_short_sequence_of_ids() -> None:
    ids = torch.zeros(4, 100, dtype=torch.int64)
    assert excerpt(ids).shape == (1, 64)
    assert {key: tuple(v.shape) for key, v in excerpt({"input_ids": ids, "attention_mask": ids}).items()} == {
        "input_ids": (1, 64),
        "attention_mask": (1, 64),
    }
    image = torch.zeros(2, 3, 8, 8)
    assert excerpt(image).shape == image.shape


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_tokens_of_the_vocabulary_are_a_batch(name: str) -> None:
    model = tiny_hf(name)
    ids = vocabulary_tokens(model)["input_ids"]
    assert ids.dtype == torch.int64
    assert 0 <= int(ids.min()) < int(ids.max()) < model.config.vocab_size
    assert ids.unique().numel() == ids.numel() == 16
    report = qcut.quantize(model, "w8a8", verify=True, allow_growth=True, progress=False)
    assert report.verified == report.held == len(report.layers)
    assert report.unseen == ""


def test_layers_alone_are_held_without_an_input() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    report = qcut.quantize(model, "w8a8", verify=True, progress=False)
    assert (report.verified, report.held) == (0, 2)
    assert "2 layers against their float weights; the model as a whole was not: qcut knows no input" in str(report)
    assert qcut.quantize(nn.Sequential(nn.Linear(32, 32)), "w8a8", progress=False).held == 0


class Masked(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.mm(self.mask, self.a(x)))


@pytest.mark.parametrize("kind", ["expanded", "sparse", "inference"])
def test_buffers_that_cannot_be_written_pass(kind: str) -> None:
    with torch.inference_mode(kind == "inference"):
        mask = torch.ones(4, 4)
    mask = {"expanded": torch.ones(1, 4).expand(4, 4), "sparse": torch.eye(4).to_sparse(), "inference": mask}[kind]
    report = qcut.quantize(Masked(mask), "w8a16", verify=torch.randn(4, 32), allow_growth=True, progress=False)
    assert report.verified == 2


def test_compiled_models_are_run_as_written() -> None:
    x = torch.randn(4, 32)
    model = torch.compile(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), backend="eager")
    with torch.no_grad():
        model(x)
    calibration = qcut.calibrate(model, [x], progress=False)
    report = qcut.quantize(model, "w8a8", calibration=calibration, allow_growth=True, progress=False)
    assert report.verified == 2
    assert torch.isfinite(model(x)).all()


def test_float_layers_that_compute_something_else_are_named() -> None:
    layer = nn.Linear(32, 32)
    object.__setattr__(layer, "_parameters", Doubling(layer._parameters))
    with pytest.raises(QuantizationError, match=r"layer '0': verify: the float layer's result is .* off x @ W.T \+ b"):
        qcut.quantize(nn.Sequential(layer), "w8a16", verify=torch.randn(4, 32), allow_growth=True, progress=False)


class Doubling(dict[str, Tensor]):
    """Parameters that are others where a module's own code reads them."""

    def __getitem__(self, key: str) -> Tensor:
        value = super().__getitem__(key)
        return value * 2 if sys._getframe(2).f_code.co_name == "forward" else value
