"""One GPU: vLLM's mixtures compute what qcut's experts do, bit by bit, however their weights came."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.checkpoints.expert_tensors import split
from qcut.checkpoints.marks import ADVICE
from qcut.integrations.vllm.config import ServingConfig
from qcut.integrations.vllm.experts import gating_of
from qcut.layers.experts.experts import Experts
from qcut.layers.experts.linear_stack import LinearStack
from qcut.numerics.gating import Gating
from tests.integrations.vllm import parallel

SCHEMES = ("w8a8", "w8a16", "int16x8", "codebook4", "codebook4_int8", "codebook4+4")
SILU = Gating("silu")
PIECES = {"up": ["gate_proj", "up_proj"], "down": ["down_proj"]}

pytestmark = pytest.mark.usefixtures("alone")


def stacks(scheme: str) -> dict[str, LinearStack]:
    """The projections of the mixture, quantized by `qcut.Linear`."""
    floats, made = parallel.expert_weights(), {}
    for part, pieces in PIECES.items():
        layers = []
        for e in range(parallel.EXPERTS):
            weight = torch.cat([floats[f"{e}.{piece}.weight"] for piece in pieces])
            module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            module.load_state_dict({"weight": weight})
            layers.append(qcut.Linear.from_float(module, scheme, name=part))
        made[part] = LinearStack.of(layers, f"{parallel.MIXTURE}.{part}")
    return made


def expected(scheme: str, gating: Gating = SILU) -> Tensor:
    x, weights, ids = parallel.routes()
    made = stacks(scheme)
    return Experts(made["up"], made["down"], gating)(x, ids, weights)


def asking(scheme: str, **more: Any) -> ServingConfig:
    return ServingConfig({"quant_method": "qcut", "scheme": scheme, **more})


def described(made: dict[str, LinearStack], **changed: Any) -> dict[str, Any]:
    """What ``config.json`` says of a mixture."""
    layers = {f"{parallel.MIXTURE}.{part}": stack.to_json() for part, stack in made.items()}
    mixture = {"count": parallel.EXPERTS, "gating": {"kind": "silu"}, "pieces": PIECES, **changed}
    return {"quant_method": "qcut", "format_version": 3, "layers": layers, "experts": {parallel.MIXTURE: mixture}}


def stored(made: dict[str, LinearStack]) -> dict[str, Tensor]:
    """The tensors of a folder of ``save_pretrained``, by the end of their names."""
    return {key: t for part, stack in made.items() for key, t in split(stack, PIECES[part], [*stack.stored()])}


def computed(config: ServingConfig, tensors: dict[str, Tensor], **options: Any) -> Tensor:
    routed = parallel.mixture(config, tensors, **options)
    y: Tensor = routed.quant_method.apply(routed, *parallel.routes())
    return y


@pytest.mark.parametrize("scheme", SCHEMES)
def test_float_experts_are_quantized_while_they_load(scheme: str) -> None:
    assert torch.equal(computed(asking(scheme), parallel.expert_weights()), expected(scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_stored_experts_are_read_as_they_are(scheme: str) -> None:
    made = stacks(scheme)
    assert torch.equal(computed(ServingConfig(described(made)), stored(made)), expected(scheme))


def test_a_mixture_may_lie_in_another_block() -> None:
    made, name = stacks("w8a8"), parallel.MIXTURE.replace("mlp", "block_sparse_moe")
    assert torch.equal(computed(ServingConfig(described(made)), stored(made), name=name), expected("w8a8"))


def test_marks_of_quantized_experts_are_left_out() -> None:
    mapper = ServingConfig(described(stacks("w8a8"))).get_cache_scale_mapper()
    other = parallel.MIXTURE.replace("mlp", "block_sparse_moe")
    marks = [f"{parallel.MIXTURE}.{key}" for key in ("0.gate_proj.weight", "gate_up_proj", ADVICE)] + [
        f"{other}.1.w1.weight"
    ]
    kept = [f"{parallel.MIXTURE}.0.gate_proj.qweight", "model.layers.0.mlp.gate.weight"]
    kept.append("model.layers.1.mlp.experts.0.gate_proj.weight")  # a mixture in float
    assert [name for name, _ in mapper.apply((name, torch.zeros(1)) for name in (*marks, *kept))] == kept


def test_int8_experts_of_compressed_tensors_are_served() -> None:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"a": group}}
    tensors = {}
    for key, tensor in stored(stacks("w8a8")).items():
        is_weight = key.endswith("qweight")
        tensors[key.replace("qweight", "weight")] = tensor if is_weight else tensor[:, None]
    assert torch.equal(computed(ServingConfig(config), tensors), expected("w8a8"))
    config["ignore"] = ["re:.*experts.2.up_proj"]
    with pytest.raises(qcut.errors.UnsupportedError, match=r"experts.0.gate_proj and .*experts.2.up_proj differ"):
        parallel.mixture(ServingConfig(config), tensors)


def test_a_plan_gives_each_projection_its_scheme() -> None:
    made = stacks("codebook4") | {"down": stacks("w8a8")["down"]}
    specs = {
        f"{parallel.MIXTURE}.{part}": {
            "scheme": stack.scheme.name,
            "in_features": stack.in_features,
            "out_features": stack.weight_rows,
        }
        for part, stack in made.items()
    }
    numbers = {"budget": 1.0, "predicted": None, "measured": 0.0, "start": None}
    plan = {"format": "qcut-plan", "version": 1, "layers": specs, "metric": "m", "objective": "time", **numbers}
    x, weights, ids = parallel.routes()
    whole = Experts(made["up"], made["down"], SILU)(x, ids, weights)
    assert torch.equal(
        computed(ServingConfig({"quant_method": "qcut", "scheme": plan}), parallel.expert_weights()), whole
    )


def test_experts_that_are_left_out_stay_in_float(caplog: pytest.LogCaptureFixture) -> None:
    routed = parallel.mixture(asking("w8a8"), parallel.expert_weights())
    for asked in ({"modules_to_not_convert": ["experts"]}, {"include": ["*.self_attn.*"]}):
        with caplog.at_level("INFO", "vllm.qcut"):
            assert asking("w8a8", **asked).get_quant_method(routed, parallel.MIXTURE) is None
        assert f"{parallel.MIXTURE} stays in float" in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    ("options", "gating"),
    [
        ({"swiglu_limit": 0.5}, Gating("silu", limit=0.5)),
        ({"activation": "gelu"}, Gating("gelu_erf")),
        ({"activation": "gelu_tanh"}, Gating("gelu_tanh")),
        (
            {"activation": "swigluoai_uninterleave", "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
            Gating("silu", alpha=1.702, limit=7.0, plus_one=True),
        ),
    ],
)
def test_activations_are_those_of_the_model(options: dict[str, Any], gating: Gating) -> None:
    found = computed(asking("w8a8"), parallel.expert_weights(), **options)
    assert torch.equal(found, expected("w8a8", gating))


def test_experts_without_a_gate_have_an_activation() -> None:
    def of(kind: str) -> Gating:
        none = dict.fromkeys(("swiglu_limit", "swiglu_alpha", "swiglu_beta"))
        return gating_of(SimpleNamespace(activation=SimpleNamespace(value=kind), **none), "h.experts")

    assert of("relu2_no_mul") == Gating("relu2", gated=False)
    assert of("silu_no_mul") == Gating("silu", gated=False)


def test_dummy_weights_leave_codebooks_as_they_are() -> None:
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    made = parallel.mixture_without_weights(asking("codebook4"))
    model = nn.ModuleList([made, parallel.unloaded("column", asking("codebook4"))])
    loader: Any = DummyModelLoader(LoadConfig(load_format="dummy"))
    loader.load_weights(model, None)
    experts, column = made.routed_experts.qcut, model[1].qcut
    book = stacks("codebook4")["up"].expert(0).codebook
    for layer in (*experts.up.layers, *experts.down.layers, column):
        assert torch.equal(layer.codebook, book)
    y = made.routed_experts.quant_method.apply(made.routed_experts, *parallel.routes())
    assert y.abs().max() > 0


def test_new_weights_for_served_experts_are_refused() -> None:
    routed = parallel.mixture(asking("w8a8"), parallel.expert_weights())
    for key in routed.quant_method.loaded:
        routed.register_parameter(key, nn.Parameter(torch.empty(1)))
    with pytest.raises(qcut.errors.UnsupportedError, match="start it anew"):
        routed.quant_method.process_weights_after_loading(routed)


def _online(scheme: str = "w8a8", **options: Any) -> Callable[[], Any]:
    asked = options.pop("asked", {})
    return lambda: parallel.mixture(asking(scheme, **asked), parallel.expert_weights(), **options)


def _balanced() -> Any:
    from vllm.config import get_current_vllm_config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_current_vllm_config().parallel_config, "enable_eplb", True)
        return _online()()


def _stored(change: Callable[[dict[str, Any], dict[str, Tensor]], None], **described_as: Any) -> Callable[[], Any]:
    def build() -> Any:
        made = stacks("codebook4")
        config, tensors = described(made, **described_as), stored(made)
        change(config, tensors)
        return parallel.mixture(ServingConfig(config), tensors)

    return build


def _nothing(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Leaves them as they are."""


def _without_down(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del config["layers"][f"{parallel.MIXTURE}.down"]


def _without_mixture(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del config["experts"]


def _without_a_tensor(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del tensors["3.up_proj.norms"]


def _another_codebook(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["2.up_proj.codebook"] = tensors["2.up_proj.codebook"] * 2


def _larger(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["1.down_proj.norms"] = torch.cat([tensors["1.down_proj.norms"]] * 2)


def _infinite(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["1.down_proj.norms"][0] = torch.inf


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (_online(has_bias=True), "UnsupportedError", ["mlp.experts", "biases"]),
        (_online(activation="swigluoai"), "UnsupportedError", ["mlp.experts", "swigluoai", "silu"]),
        (_online(swiglu_beta=0.5), "UnsupportedError", ["mlp.experts", "beta 0.5"]),
        (_online(activation="gelu", swiglu_limit=7.0), "UnsupportedError", ["gelu", "limit 7.0"]),
        (_online(apply_router_weight_on_input=True), "UnsupportedError", ["mlp.experts", "an expert's input"]),
        (_balanced, "UnsupportedError", ["mlp.experts", "--enable-eplb"]),
        (_online(asked={"include": ["*.experts.up"]}), "UnsupportedError", ["mlp.experts.up' is quantized"]),
        (_stored(_without_down), "UnsupportedError", ["mlp.experts.up' is quantized"]),
        (_stored(_without_mixture), "UnsupportedError", ["mlp.experts", "save_pretrained"]),
        (_stored(_nothing, pieces=None), "UnsupportedError", ["mlp.experts", "save_pretrained"]),
        (_stored(_nothing, gating={"kind": "relu"}), "CheckpointError", ["mlp.experts", "relu", "silu"]),
        (_stored(_nothing, count=8), "CheckpointError", ["mlp.experts", "4 experts", "8"]),
        (_stored(_without_a_tensor), "CheckpointError", ["mlp.experts", "norms of w3 of expert 3"]),
        (_stored(_another_codebook), "CheckpointError", ["codebook of w3 of expert 2", "other values"]),
        (_stored(_larger), "CheckpointError", ["norms of w2 of expert 1", "[256, 2]", "[128, 2]"]),
        (_stored(_infinite), "CheckpointError", ["mlp.experts.down.1", "norms"]),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(build: Callable[[], Any], error: str, words: list[str]) -> None:
    with pytest.raises(getattr(qcut.errors, error)) as caught:
        build()
    assert all(word in str(caught.value) for word in words), caught.value
