"""One GPU: vLLM's layers compute what qcut's do, bit by bit, however their weights came."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.integrations.vllm.config import ServingConfig
from qcut.integrations.vllm.registration import RELEASES, SHORTHANDS, register
from tests.integrations.vllm import parallel
from tests.support import ROOT

KINDS = ("column", "merged", "qkv", "row")
SCHEMES = ("w8a8", "w8a16", "int16x8", "codebook4", "codebook4_int8", "codebook4+4", "codebook3", "codebook4_pairs")

LINES = 970
"""Of the whole plug-in, so that it stays a thin one. Almost half is of mixtures, which vLLM loads in its own way."""

pytestmark = pytest.mark.usefixtures("alone")


def linears(kind: str) -> list[nn.Linear]:
    made = []
    for weight, bias in parallel.weights(kind):
        module = nn.Linear(weight.shape[1], weight.shape[0])
        module.load_state_dict({"weight": weight, "bias": bias})
        made.append(module)
    return made


def expected(kind: str, scheme: str, **options: Any) -> Tensor:
    x = parallel.tokens()
    return torch.cat([qcut.Linear.from_float(m, scheme, **options)(x) for m in linears(kind)], 1)


def described(kind: str, layers: list[qcut.Linear]) -> dict[str, Any]:
    """What ``config.json`` says of them."""
    specs = {
        f"h.{part}": {
            "scheme": layer.scheme.to_json(),
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "bias": True,
            "activation": "none",
        }
        for part, layer in zip(parallel.PARTS[kind], layers, strict=True)
    }
    return {"quant_method": "qcut", "format_version": 1, "layers": specs}


def computed(kind: str, config: ServingConfig, tensors: list[dict[str, Tensor]]) -> Tensor:
    return parallel.layer(kind, config, tensors)(parallel.tokens())[0]


def floats(kind: str) -> list[dict[str, Tensor]]:
    return [{"weight": weight, "bias": bias} for weight, bias in parallel.weights(kind)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_float_weights_are_quantized_while_they_load(kind: str, scheme: str) -> None:
    config = ServingConfig({"quant_method": "qcut", "scheme": scheme})
    assert torch.equal(computed(kind, config, floats(kind)), expected(kind, scheme))


@pytest.mark.parametrize("scheme", [*SCHEMES, "w8a8_static"])
@pytest.mark.parametrize("kind", KINDS)
def test_stored_layers_are_read_as_they_are(kind: str, scheme: str) -> None:
    options = {"static_range": qcut.StaticRange(-4.0, 3.5)} if scheme == "w8a8_static" else {}
    layers = [qcut.Linear.from_float(module, scheme, **options) for module in linears(kind)]
    config = ServingConfig(described(kind, layers))
    states = [layer.state_dict() for layer in layers]
    assert torch.equal(computed(kind, config, states), expected(kind, scheme, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_int8_of_compressed_tensors_runs_on_qcuts_kernels(kind: str) -> None:
    layers = [qcut.Linear.from_float(module, "w8a8") for module in linears(kind)]
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"a": group}}
    states = [
        {"weight": layer.qweight[:, : parallel.K], "weight_scale": layer.weight_scale[:, None], "bias": layer.bias}
        for layer in layers
    ]
    assert ServingConfig.override_quantization_method(config, "qcut") == "qcut"
    assert ServingConfig.override_quantization_method(config, None) is None
    assert torch.equal(computed(kind, ServingConfig(config), states), expected(kind, "w8a8"))


def test_a_plan_gives_each_layer_its_scheme() -> None:
    def entry(scheme: str, n: int) -> dict[str, Any]:
        static = {"lo": -4.0, "hi": 3.5}
        return {"scheme": scheme, "in_features": parallel.K, "out_features": n, "static_range": static}

    layers = {f"h.{part}": entry("codebook4", 1) for part in "qkv"} | {"h.up": entry("w8a8_static", parallel.N)}
    numbers = {"budget": 1.0, "predicted": None, "measured": 0.0, "start": None}
    plan = {"format": "qcut-plan", "version": 1, "layers": layers, "metric": "m", "objective": "time", **numbers}
    asked = json.loads(json.dumps({"quant_method": "qcut", "scheme": plan}))
    assert torch.equal(computed("qkv", ServingConfig(asked), floats("qkv")), expected("qkv", "codebook4"))
    static = expected("column", "w8a8_static", static_range=qcut.StaticRange(-4.0, 3.5))
    assert torch.equal(computed("column", ServingConfig(asked), floats("column")), static)
    module = parallel.layer("row", ServingConfig(asked), floats("row"))
    assert module.weight.dtype is torch.float32  # not in the plan


def test_operator_is_opaque_and_chooses_at_run_time() -> None:
    config = ServingConfig({"quant_method": "qcut", "scheme": "codebook4"})
    module = parallel.layer("column", config, floats("column"))
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: module(x)[0] * 2, backend=backend, fullgraph=True, dynamic=True)
    for rows in (5, 3, 9):
        x = parallel.tokens(rows)
        assert torch.equal(compiled(x), module(x)[0] * 2)
    assert len(graphs) == 1
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [name for name in called if "qcut" in name] == ["qcut.served_linear.default"]


def engine_config(**options: Any) -> Any:
    """vLLM's configuration for the embedded model."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(str(ROOT / "models" / "gpt2-5m"), skip_tokenizer_init=True, **options).create_engine_config()


def test_compiled_graphs_are_kept_by_scheme() -> None:
    def key(scheme: str) -> str:
        asked = {"quantization_config": qcut.QcutConfig(scheme).to_dict()}
        return str(engine_config(quantization="qcut", hf_overrides=asked).compute_hash())

    assert len({key(scheme) for scheme in ("w8a8", "codebook4", "codebook4_g64")}) == 3


def test_a_moved_weight_is_not_served_with_another() -> None:
    module = parallel.layer("column", ServingConfig(), floats("column"))
    module.qcut_weight.data = module.qcut_weight.data.clone()
    with pytest.raises(qcut.errors.UnsupportedError, match="no longer where it was loaded"):
        module(parallel.tokens())


def test_what_stays_in_float_is_named(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    skipping = ServingConfig({"quant_method": "qcut", "scheme": "w8a8", "modules_to_not_convert": ["up"]})
    torch.testing.assert_close(computed("column", skipping, floats("column")), linears("column")[0](parallel.tokens()))
    with caplog.at_level("INFO", "vllm.qcut"):
        ParallelLMHead(64, parallel.K, quant_config=ServingConfig(), prefix="lm_head")
        gate = ReplicatedLinear(parallel.K, 1, quant_config=ServingConfig(), prefix="shared_expert_gate")
    assert "lm_head stays in float" in caplog.text
    assert "shared_expert_gate stays in float" in caplog.text
    assert gate.weight.dtype.is_floating_point


def test_the_plug_in_is_small() -> None:
    folder = ROOT / "qcut" / "integrations" / "vllm"
    assert sum(len(path.read_text().splitlines()) for path in folder.glob("*.py")) <= LINES


def test_names_of_methods() -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config

    register()
    register()
    assert get_quantization_config("qcut")().scheme == "w8a8"
    for scheme in SHORTHANDS:
        method = get_quantization_config(f"qcut-{scheme}")
        sent = pickle.loads(pickle.dumps(method()))  # as vLLM sends it to its processes
        assert (sent.get_name(), sent.scheme) == (f"qcut-{scheme}", scheme)
        assert torch.equal(computed("row", sent, floats("row")), expected("row", scheme))


@pytest.fixture(params=["0.25.1", "0.33.0", "1.26.0"])
def unserved(request: pytest.FixtureRequest) -> Iterator[str]:
    """A release of vLLM outside of those that are served."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.__version__", request.param)
        register()
        yield request.param
    register()


def test_models_on_other_releases_are_refused(unserved: str) -> None:
    asked = {"quantization_config": qcut.QcutConfig("codebook4").to_dict()}
    for options in ({"quantization": "qcut-int4"}, {"quantization": "qcut", "hf_overrides": asked}):
        with pytest.raises(qcut.errors.UnsupportedError) as caught:
            engine_config(**options)
        assert str(caught.value) == f"found vLLM {unserved}; allowed: {', '.join(RELEASES)}"
    assert engine_config().quant_config is None  # qcut is installed, and not requested


def _stored(kind: str, *schemes: str) -> Callable[[], Any]:
    def build() -> Any:
        layers = [qcut.Linear.from_float(m, s) for m, s in zip(linears(kind), schemes, strict=True)]
        return computed(kind, ServingConfig(described(kind, layers)), [layer.state_dict() for layer in layers])

    return build


def _other_codebook() -> Any:
    layers = [qcut.Linear.from_float(module, "codebook4") for module in linears("merged")]
    states = [dict(layer.state_dict()) for layer in layers]
    states[1]["codebook"] = states[1]["codebook"] * 2
    return computed("merged", ServingConfig(described("merged", layers)), states)


def _broken(key: str, value: float) -> Callable[[], Any]:
    def build() -> Any:
        made = qcut.Linear.from_float(linears("column")[0], "w8a8")
        state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
        state[key][3] = value
        return computed("column", ServingConfig(described("column", [made])), [state])

    return build


def _quantized_head() -> Any:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    made = described("column", [qcut.Linear.from_float(linears("column")[0], "w8a8")])
    config = ServingConfig({**made, "layers": {"lm_head": made["layers"]["h.up"]}})
    return ParallelLMHead(64, parallel.K, quant_config=config, prefix=".lm_head")  # as GPT-2 has it


def _with(**entries: Any) -> Callable[[], Any]:
    return lambda: ServingConfig({"quant_method": "qcut", **entries})


EMBEDDING = {"embeddings": {"wte": {"table": "wte.table", "dtype": "float16"}}}


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (_stored("merged", "w8a8", "codebook4"), "UnsupportedError", ["h.merged", "h.gate w8a8", "h.up codebook4"]),
        (_other_codebook, "CheckpointError", ["h.merged", "codebook is", "other values"]),
        (_broken("weight_scale", -1.0), "CheckpointError", ["h.up", "weight_scale", "-1"]),
        (_quantized_head, "UnsupportedError", ["'lm_head' is quantized"]),
        (_with(scheme="w9"), "ConfigError", ["w9"]),
        (_with(scheme="w8a8", embeddings="w8a8"), "UnsupportedError", ["embeddings", "w8a8"]),
        (_with(format_version=1, layers={}, **EMBEDDING), "UnsupportedError", ["embeddings", "wte"]),
        (_with(format_version=1, foreign={"quant_method": "gptq"}), "UnsupportedError", ["foreign"]),
        (_with(scheme="w8a8_static"), "ConfigError", ["w8a8_static", "calibration"]),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(build: Callable[[], Any], error: str, words: list[str]) -> None:
    with pytest.raises(getattr(qcut.errors, error)) as caught:
        build()
    assert all(word in str(caught.value) for word in words), caught.value
