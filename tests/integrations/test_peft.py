"""PEFT's LoRA over quantized layers: wrapped, trained, saved, loaded, and never merged."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.common import progress
from qcut.errors import UnsupportedError
from qcut.integrations import peft as lora
from qcut.layers.linear import Linear
from qcut.models.modules import is_conv1d
from tests.integrations.transformers.mixtures import quantized_mixture
from tests.support.zoo import tiny_hf

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("Could not find a config file", "fan_in_fan_out", "`is_gradient_checkpointing`")
]

TARGETS = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj", "down_proj"]}
IDS = torch.arange(24).view(2, 12) * 7 % 60


def config(kind: str = "llama", **changes: Any) -> Any:
    return peft.LoraConfig(**{"target_modules": TARGETS[kind], "r": 4, "task_type": "CAUSAL_LM"} | changes)


def quantized(kind: str = "llama", scheme: str = "codebook4_g16", **options: Any) -> Any:
    model = tiny_hf(kind)
    qcut.quantize(model, scheme, allow_growth=True, progress=False, **options)
    qcut.enable_input_gradients(model)
    return model


def adapted(model: Any, kind: str = "llama", **changes: Any) -> Any:
    """The model with adapters that already do something."""
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, config(kind, **changes))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return wrapped


def dequantized(model: nn.Module) -> Any:
    """A copy with float layers of the same weights in place of the quantized ones."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for key, layer in parent._modules.items():
            if isinstance(layer, Linear):
                made = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
                made.weight = nn.Parameter(layer.dequantized_weight(), requires_grad=False)
                if layer.bias is not None:
                    made.bias = nn.Parameter(layer.bias.clone(), requires_grad=False)
                parent._modules[key] = made
    return model


def gradients(model: Any) -> dict[str, Tensor]:
    model(input_ids=IDS, labels=IDS).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in found.values())
    return found


@pytest.mark.parametrize("kind", TARGETS)
def test_adapter_gradients_match_the_dequantized_model(kind: str) -> None:
    # Codebooks in float32 quantize no activation: both models compute the same, in sums of another order. The model is
    # a chain of some 20 sums of at most 64 float32 products, and its gradients one of as many.
    model = adapted(quantized(kind, "codebook4_g16", fuse=False), kind)
    assert sum(isinstance(m, Linear) for m in model.modules()) > 6
    want, found = gradients(dequantized(model)), gradients(model)
    assert found.keys() == want.keys()
    assert {name.split(".")[-3] for name in found} == {"lora_A", "lora_B"}
    for name, gradient in found.items():
        assert (gradient - want[name]).norm() <= 40 * 64 * 2.0**-24 * want[name].norm(), name


def trained(model: Any, steps: int = 8) -> list[float]:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 2e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("scheme", ["w8a8", "w8a16", "codebook4_g16_int8"])
def test_the_loss_falls_as_with_float_weights(kind: str, scheme: str) -> None:
    model = quantized(kind, scheme)
    before = {key: t.clone() for key, t in model.state_dict().items()}
    losses, theirs = (trained(adapted(one, kind)) for one in (model, tiny_hf(kind)))
    fall, their_fall = losses[0] - losses[-1], theirs[0] - theirs[-1]
    assert their_fall > 0.15
    assert abs(fall - their_fall) < 0.2 * their_fall
    after = {key.replace("base_layer.", ""): t for key, t in model.state_dict().items() if "lora_" not in key}
    assert after.keys() == before.keys()
    assert all(torch.equal(t, before[key]) for key, t in after.items())


def test_backward_without_input_gradients_names_the_function() -> None:
    model = quantized()
    qcut.disable_input_gradients(model)
    with pytest.raises(UnsupportedError, match=r"layer 'model.layers.\d.*enable_input_gradients\(model\)"):
        trained(adapted(model))


def test_adapters_alone_are_saved_and_come_back(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = adapted(quantized())
    with torch.no_grad():
        want = model(input_ids=IDS).logits
    model.save_pretrained(tmp_path)
    keys = set(load_file(tmp_path / "adapter_model.safetensors"))
    assert len(keys) == 2 * 2 * 3
    assert all("lora_" in key for key in keys)
    back = peft.PeftModel.from_pretrained(quantized(), tmp_path)
    with torch.no_grad():
        assert torch.equal(back(input_ids=IDS).logits, want)
        with back.disable_adapter():
            assert torch.equal(back(input_ids=IDS).logits, quantized()(input_ids=IDS).logits)
    assert type(pickle.loads(pickle.dumps(back))) is type(back)


def test_all_linear_excludes_tables_and_the_classifier() -> None:
    model = quantized("llama", embeddings="w8a16")
    wrapped = adapted(model, target_modules="all-linear")
    over = {name for name, m in wrapped.named_modules() if isinstance(getattr(m, "base_layer", None), Linear)}
    assert len(over) == 14
    assert not any("lm_head" in name or "embed" in name for name in over)
    trained(wrapped, 1)
    wrapped.add_adapter("second", config(target_modules="all-linear"))
    again = {name for name, m in wrapped.named_modules() if "second" in getattr(m, "lora_A", ())}
    assert again == over


@pytest.mark.parametrize("first", ["quantize", "peft"])
def test_merging_is_refused_and_done_in_float(first: str) -> None:
    if first == "quantize":
        model = adapted(quantized())
    else:
        model = adapted(tiny_hf("llama"))
        qcut.quantize(model, "codebook4_g16", allow_growth=True, progress=False)
        qcut.enable_input_gradients(model)
        assert not any(isinstance(m, Linear) for name, m in model.named_modules() if "lora_" in name)
        trained(model, 1)
    refusal = {
        "quantize": r"layer '.*_proj.*': an adapter cannot be merged into a quantized weight \(codebook4_g16\)",
        "peft": r"layer '.*_proj.*': its weight is quantized, .* merge adapters before",
    }[first]
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(UnsupportedError, match=refusal):
            merge()
    floats = dequantized(model)
    with torch.no_grad():
        want, logits = floats(input_ids=IDS).logits, model(input_ids=IDS).logits
        merged = floats.merge_and_unload()
        assert torch.allclose(merged(input_ids=IDS).logits, want, atol=1e-5)
        assert torch.equal(model(input_ids=IDS).logits, logits)


def test_a_part_of_a_layer_is_refused() -> None:
    model = quantized()
    model.get_submodule("model.layers.0.self_attn.v_proj").parts = 2
    with pytest.raises(UnsupportedError, match=r"v_proj': an adapter: the process has one of 2 parts"):
        adapted(model)


def test_layers_with_a_fused_activation_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"c_fc': it computes its activation \(gelu_tanh\).*fuse=False"):
        adapted(quantized("gpt2"), "gpt2", target_modules=["c_fc"])
    trained(adapted(quantized("gpt2", fuse=False), "gpt2", target_modules=["c_fc"]), 1)


@pytest.mark.parametrize("changes", [{"use_dora": True}, *({"init_lora_weights": w} for w in ("pissa", "olora"))])
def test_adapters_initialized_from_the_weight_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="its weight is quantized"):
        adapted(quantized(), **changes)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_and_preparation_for_few_bits(reentrant: bool) -> None:
    model = quantized()
    want = gradients(adapted(copy.deepcopy(model)))
    prepared = peft.prepare_model_for_kbit_training(model)
    prepared.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    prepared.enable_input_require_grads()
    wrapped = adapted(prepared).train()
    found = gradients(wrapped)
    assert found.keys() == want.keys()
    assert all(torch.equal(gradient, want[name]) for name, gradient in found.items())


def test_half_precision() -> None:
    model = quantized().to(torch.bfloat16)
    wrapped = adapted(model)
    assert {p.dtype for p in wrapped.parameters() if p.requires_grad} <= {torch.float32, torch.bfloat16}
    losses = trained(wrapped)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("scheme", ["w8a8", "codebook4_g16"])
def test_float_and_quantized_model_take_the_same_adapter(scheme: str, tmp_path: Path) -> None:
    """Adapters of a Conv1D lie as those of the quantized layer do."""
    model = adapted(tiny_hf("gpt2"), "gpt2", fan_in_fan_out=True)
    assert any(is_conv1d(m) for m in model.modules())
    model.save_pretrained(tmp_path)
    back = peft.PeftModel.from_pretrained(quantized("gpt2", scheme), tmp_path)
    get: Callable[[Any], dict[str, Tensor]] = peft.get_peft_model_state_dict
    assert get(back).keys() == get(model).keys()
    assert all(torch.equal(t, get(model)[key]) for key, t in get(back).items())
    back.save_pretrained(tmp_path / "again")
    again = peft.PeftModel.from_pretrained(tiny_hf("gpt2"), tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_the_example_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from examples import lora as example

    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    for name, value in {"WINDOWS": 1, "ROWS": 1, "LENGTH": 16, "EPOCH": 1}.items():
        monkeypatch.setattr(example, name, value)
    plot = ["--plot", str(tmp_path / "losses.png")] if find_spec("matplotlib") else []
    losses = example.main(["w8a8", "--steps", "4", *plot])
    assert losses.keys() == {"float", "w8a8"}
    assert all(of[-1] < of[0] for of in losses.values())
    # The first step's adapters are zero: what differs is the quantized weight.
    assert abs(losses["w8a8"][0] - losses["float"][0]) < 0.05 * losses["float"][0]
    said = capsys.readouterr()
    assert "w8a8" in said.out.splitlines()[0]
    assert len(said.out.splitlines()) == 5 + len(plot) // 2
    assert "float: step 1 of 4, " in said.err
    assert "w8a8: step 1 of 4, " in said.err
    assert (tmp_path / "losses.png").exists() == bool(plot)


def test_one_function_of_peft_is_replaced_and_once() -> None:
    tuners, model = peft.tuners.tuners_utils, peft.tuners.lora.model
    name = "_maybe_include_all_linear_layers"
    plain = getattr(tuners, name).of_peft
    assert plain.__module__ == tuners.__name__
    lora.register(tuners)
    assert getattr(tuners, name).of_peft is plain
    for owner in (model.LoraModel, tuners.BaseTuner, peft.tuners.lora.layer.Linear, peft.LoraConfig):
        codes = [f.__code__ for f in vars(owner).values() if hasattr(f, "__code__")]
        assert codes
        assert not any(code.co_filename == lora.__file__ for code in codes)
    floats = config()
    peft.get_peft_model(tiny_hf("llama"), floats)
    assert floats._custom_modules is None


@pytest.mark.parametrize("takes", ["peft_config, model, more", None])
def test_unknown_all_linear_function_of_peft_is_refused(takes: str | None) -> None:
    """As PEFT is imported in a process of its own, the other one stands in its file."""
    source = Path(peft.tuners.tuners_utils.__file__).read_text()
    head = "def _maybe_include_all_linear_layers(peft_config: PeftConfig, model: nn.Module)"
    assert head in source
    name = head if takes else "_maybe_include_all_linear_layers"
    other = source.replace(name, f"def _maybe_include_all_linear_layers({takes})" if takes else "_another")
    module = ModuleType("peft.tuners.tuners_utils")
    module.__dict__["__package__"] = "peft.tuners"
    exec(compile(other, peft.tuners.tuners_utils.__file__, "exec"), module.__dict__)
    lora.register(module)
    refusal = (
        r"need _maybe_include_all_linear_layers\(peft_config, model\) of PEFT, which peft 0.18 to 0.21 have; in peft "
        + re.escape(f"{peft.__version__} it {f'takes ({takes})' if takes else 'is missing'}")
    )

    class Tuner(module.BaseTuner):  # type: ignore[misc, name-defined]
        inject_adapter = _create_and_replace = _mark_only_adapters_as_trainable = lambda *_, **__: None
        _prepare_adapter_config = disable_adapter_layers = enable_adapter_layers = lambda *_, **__: None

    with pytest.raises(UnsupportedError, match=refusal):
        Tuner(quantized(), config(), "default")
    assert Tuner(tiny_hf("llama"), config(), "default").peft_config


def test_another_door_of_peft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(peft.LoraConfig, "_register_custom_module")
    with pytest.raises(UnsupportedError, match=r"need _register_custom_module\(self, mapping\) of PEFT.* is missing"):
        adapted(quantized())
    adapted(tiny_hf("llama"))


def test_second_adapter_joins_a_model_quantized_after_wrapping() -> None:
    model = peft.get_peft_model(tiny_hf("llama"), config(target_modules=["q_proj"]))
    qcut.quantize(model, "w8a16", allow_growth=True, progress=False)
    model.add_adapter("second", config(target_modules=["q_proj", "down_proj"]))
    over = {name.rpartition(".")[2] for name, m in model.named_modules() if "second" in getattr(m, "lora_A", ())}
    assert over == {"q_proj", "down_proj"}


def test_adapters_are_injected_without_a_model_of_peft() -> None:
    from peft import PeftMixedModel, inject_adapter_in_model

    injected = inject_adapter_in_model(config(), quantized())
    assert sum(isinstance(m, lora.wrapper_class()) for m in injected.modules()) == 6
    mixed = PeftMixedModel(quantized(), config())
    assert sum(isinstance(m, lora.wrapper_class()) for m in mixed.modules()) == 6


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_adapters_train_beside_frozen_experts(targets: Any, tmp_path: Path) -> None:
    model = quantized_mixture()
    frozen = copy.deepcopy(model.state_dict())
    qcut.enable_input_gradients(model)
    wrapped = adapted(model, target_modules=targets)
    trained = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    assert not any("experts" in name for name in trained)
    wrapped(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for name, p in trained.items() if "self_attn" in name)
    torch.optim.SGD(trained.values(), lr=0.1).step()
    wrapped.eval().save_pretrained(tmp_path)
    again = quantized_mixture()
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in again.state_dict().items())
    loaded = peft.PeftModel.from_pretrained(again, tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, wrapped(IDS).logits)
        assert not torch.equal(loaded(IDS).logits, quantized_mixture()(IDS).logits)
