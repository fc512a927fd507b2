"""The embedded GPT-2 quantized on the CPU and on CUDA: equal integers, close logits."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.models.evaluation import language_reference
from tests.gpu.support.oracles import DEVICE, assert_same
from tests.support import ROOT

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("prebuilt")
CHECKPOINT = ROOT / "models" / "gpt2-5m"
SCHEMES = ("w8a8", "w8a8_static", "w8a16")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """The checkpoint on the CPU in float16, as it is stored."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, local_files_only=True)
    return loaded.half().eval()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    """Four windows of tokens of the language reference that every CPython carries."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)
    text = language_reference()[:40_000]
    return torch.tensor(tokenizer(text)["input_ids"][: 4 * 128]).view(4, 128)


@pytest.fixture(scope="module", params=SCHEMES)
def pair(request: pytest.FixtureRequest, model: nn.Module, ids: Tensor) -> tuple[nn.Module, nn.Module]:
    """The same model quantized on the CPU, and quantized on the GPU."""
    calibration = None
    if request.param == "w8a8_static":
        calibration = qcut.calibrate(model, [ids], progress=False)
    cpu, gpu = copy.deepcopy(model), copy.deepcopy(model).to(DEVICE)
    for each in (cpu, gpu):
        qcut.quantize(each, request.param, calibration=calibration, prebuild=(512,), progress=False)
    return cpu, gpu


def layers(model: nn.Module) -> dict[str, qcut.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, qcut.Linear)}


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids.to(next(model.parameters()).device)).logits.float().cpu()


def test_quantized_weights_are_bitwise_equal(pair: tuple[nn.Module, nn.Module]) -> None:
    cpu, gpu = map(layers, pair)
    assert len(cpu) == 16
    assert cpu.keys() == gpu.keys()
    for name, layer in cpu.items():
        for key, value in layer.state_dict().items():
            assert_same(gpu[name].state_dict()[key].cpu(), value)


def test_every_layer_agrees_on_the_models_own_activations(pair: tuple[nn.Module, nn.Module], ids: Tensor) -> None:
    cpu, gpu = pair
    calls: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        layer.register_forward_hook(lambda _, args, out, name=name: calls.update({name: (args[0], out)}))
        for name, layer in layers(cpu).items()
    ]
    logits(cpu, ids[:1])
    for hook in hooks:
        hook.remove()
    assert len(calls) == 16
    for name, layer in layers(gpu).items():
        x, expected = calls[name]
        with torch.no_grad():
            got = layer(x.to(DEVICE)).cpu()
        # Sums in another order, or another exponential, turn a rounding to float16 here and there.
        if layer.scheme.name == "w8a16" or layer.activation != "none":
            assert (got.double() - expected.double()).norm() <= 2.0**-11 * expected.double().norm()
        else:
            assert_same(got, expected)


def test_logits_are_close(pair: tuple[nn.Module, nn.Module], ids: Tensor) -> None:
    """Attention and norms differ in float16's last bits, which turns an int8 rounding here and there."""
    a, b = (logits(m, ids) for m in pair)
    assert ((a - b).norm() / a.norm()).item() < 2e-2
    assert (a.argmax(-1) == b.argmax(-1)).float().mean().item() > 0.96


def test_quantized_model_stays_near_the_float_model(
    pair: tuple[nn.Module, nn.Module], model: nn.Module, ids: Tensor
) -> None:
    reference, got = logits(model, ids), logits(pair[1], ids)
    targets = ids[:, 1:].flatten()
    loss, quantized = (nn.functional.cross_entropy(x[:, :-1].flatten(0, 1), targets).item() for x in (reference, got))
    assert abs(quantized - loss) < 0.03


def test_saved_on_the_gpu_and_loaded_again(pair: tuple[nn.Module, nn.Module], ids: Tensor, tmp_path: Path) -> None:
    qcut.save(pair[1], tmp_path / "model")
    before = logits(pair[1], ids)
    assert_same(logits(qcut.load(tmp_path / "model", device=DEVICE), ids), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_model_generates(model: nn.Module, ids: Tensor, dtype: torch.dtype) -> None:
    half = copy.deepcopy(model).to(DEVICE, dtype)
    qcut.quantize(half, "w8a8", prebuild=(128,), progress=False)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        first, second = (half.generate(ids[:2, :64].to(DEVICE), **options) for _ in range(2))
    assert first.shape == (2, 80)
    assert torch.equal(first, second)
