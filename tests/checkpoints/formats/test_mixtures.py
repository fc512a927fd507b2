"""Mixtures of other libraries, an expert's tensors each: stacks hold the writer's weights exactly, or are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

import qcut
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.experts.experts import Experts
from qcut.layers.experts.linear_stack import LinearStack
from qcut.models.modules import has_stacked_weights
from tests.checkpoints.formats import samples
from tests.checkpoints.formats.samples import AWQ, GPTQ, PACKED
from tests.support.architectures import tiny_model

pytestmark = samples.newer_experts
Pack = Callable[[str, Tensor], samples.Packed | None]
EXPERTS = "model.layers.0.mlp.experts"
"""Of qwen3_moe."""


def awq(_: str, weight: Tensor) -> samples.Packed:
    return samples.awq(weight, 32)


def gptq(_: str, weight: Tensor) -> samples.Packed:
    return samples.gptq(weight, size=32)


def packed(_: str, weight: Tensor) -> samples.Packed:
    return samples.compressed_tensors(weight, 32)


def expert_of(name: str) -> int:
    """The number of the expert that a stored layer is of; -1 of other layers."""
    number = name.rpartition(".")[0].rpartition(".")[2]
    return int(number) if ".experts." in name and "shared" not in name else -1


def of_expert(expert: int, one: Pack, others: Pack) -> Pack:
    """Pack the layers of one expert in another way than all others."""
    return lambda name, weight: (one if expert_of(name) == expert else others)(name, weight)


def ordered(name: str, weight: Tensor) -> samples.Packed:
    """Columns of each expert in an order of its own, which its gate and its up share."""
    generator = torch.Generator().manual_seed(expert_of(name) + 1)
    return samples.gptq(weight, size=32, order=torch.randperm(weight.shape[1], generator=generator))


def biased(name: str, weight: Tensor) -> samples.Packed:
    tensors, exact = awq(name, weight)
    return {**tensors, "bias": torch.arange(len(weight)).half() + expert_of(name)}, exact


def in_bfloat16(factor: float) -> Pack:
    """Scales in bfloat16, times a power of two, which float16 may not hold."""

    def pack(name: str, weight: Tensor) -> samples.Packed:
        tensors, exact = awq(name, weight)
        scales = tensors["scales"].bfloat16() * factor
        old, new = (t.double().t().repeat_interleave(32, 1) for t in (tensors["scales"], scales))
        return {**tensors, "scales": scales}, (exact / old).round() * new

    return pack


def assert_weights(model: Any, expected: Any, scheme: str) -> None:
    """Stacks of a scheme have exactly the expected weights."""
    modules = samples.expert_modules(expected)
    assert modules
    for name, module in modules.items():
        experts = model.get_submodule(name)
        assert isinstance(experts, Experts)
        assert not experts.training
        for stack, weight in ((experts.up, module.gate_up_proj), (experts.down, module.down_proj)):
            assert isinstance(stack, LinearStack)
            assert stack.scheme.name == scheme
            assert stack.name == f"{name}.{'up' if stack is experts.up else 'down'}"
            assert torch.equal(stack.dequantized_weight().double(), weight), name


def forced_routes(module: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens with routes: every expert; one for all, so that nobody chose others; one token; none."""
    experts, hidden = module.down_proj.shape[0], module.down_proj.shape[1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, hidden, generator=generator)
    weights = torch.rand(9, experts, generator=generator)
    every = torch.arange(experts).expand(9, experts)
    last = torch.full((9, 1), experts - 1)
    return [
        (x, every, weights),
        (x, last, weights[:, :1]),
        (x[:1], every[:1], weights[:1]),
        (x[:0], last[:0], last[:0].float()),
    ]


@pytest.mark.parametrize("family", samples.MIXTURES)
@pytest.mark.parametrize(("config", "pack"), [(AWQ, awq), (GPTQ, gptq), (PACKED, packed)])
def test_experts_are_restacked_exactly(tmp_path: Path, family: str, config: dict[str, Any], pack: Pack) -> None:
    expected = samples.write_mixture(tmp_path, family, config, pack)
    model = samples.loaded(tmp_path)
    assert_weights(model, expected, "int4_g32_shifted")
    for name, module in samples.linears(expected).items():
        assert torch.equal(model.get_submodule(name).dequantized_weight().double(), module.weight), name
    with torch.no_grad():
        for name, module in samples.expert_modules(expected).items():
            for x, index, weights in forced_routes(module):
                found = model.get_submodule(name)(x, index, weights)
                wanted = module(x.double(), index, weights.double())
                torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4 * float(module.down_proj.max()))
    samples.assert_serves(model, expected, tmp_path / "saved")
    again = qcut.load(tmp_path / "saved", progress=False).state_dict()
    state = model.state_dict()
    assert list(again) == list(state)
    assert all(torch.equal(again[key], state[key]) for key in state)


UNLIKE: dict[str, tuple[dict[str, Any], Pack, str]] = {
    "one expert symmetric": (
        GPTQ,
        of_expert(1, lambda _, w: samples.gptq(w, size=32, symmetric=True), gptq),
        "int4_g32_shifted",
    ),
    "all symmetric": (GPTQ, lambda _, w: samples.gptq(w, size=32, symmetric=True), "int4_g32"),
    "one expert with scales of float32": (
        AWQ,
        of_expert(2, in_bfloat16(2.0**-18), awq),
        "int4_g32_fp32norms_shifted",
    ),
    "orders of columns": ({**GPTQ, "desc_act": True}, ordered, "int4_g32_shifted_ordered"),
    "one expert in order": ({**GPTQ, "desc_act": True}, of_expert(0, gptq, ordered), "int4_g32_shifted_ordered"),
    "8 bits in groups": (
        {**GPTQ, "bits": 8},
        lambda _, w: samples.gptq(w, size=32, bits=8),
        "codebook4+4_g32_none_shifted",
    ),
    "8 bits in rows": (
        {**GPTQ, "bits": 8, "group_size": -1},
        lambda _, w: samples.gptq(w, size=w.shape[1], bits=8, symmetric=True),
        "w8a16",
    ),
    "8 bits in rows, one expert with zero points": (
        {**GPTQ, "bits": 8, "group_size": -1},
        of_expert(
            3,
            lambda _, w: samples.gptq(w, size=w.shape[1], bits=8),
            lambda _, w: samples.gptq(w, size=w.shape[1], bits=8, symmetric=True),
        ),
        "codebook4+4_rows_none_shifted",
    ),
    "an expert of zeros": (PACKED, of_expert(1, lambda _, w: packed("", w * 0), packed), "int4_g32_shifted"),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_unlike_experts_are_one_stack(tmp_path: Path, kind: str) -> None:
    config, pack, scheme = UNLIKE[kind]
    expected = samples.write_mixture(tmp_path, "qwen3_moe", config, pack)
    model = samples.loaded(tmp_path)
    assert_weights(model, expected, scheme)
    with torch.no_grad():
        logits = model(samples.IDS).logits
        qcut.save(model, tmp_path / "saved")
        assert torch.equal(qcut.load(tmp_path / "saved", progress=False)(samples.IDS).logits, logits)
        module = samples.expert_modules(expected)[EXPERTS]
        x, index, weights = forced_routes(module)[0]
        wanted = module(x.double(), index, weights.double())
        found = model.get_submodule(EXPERTS)(x, index, weights).double()
        assert float((found - wanted).norm() / wanted.norm()) < 1e-4


def test_biases_of_gate_and_up_are_joined(tmp_path: Path) -> None:
    samples.write_mixture(tmp_path, "mixtral", AWQ, biased)
    model = samples.loaded(tmp_path)
    for experts in samples.expert_modules(model).values():
        for stack in (experts.up, experts.down):
            rows = torch.arange(64.0).repeat(stack.out_features // 64)
            assert torch.equal(stack.bias, torch.stack([rows + e for e in range(3)]))


@pytest.mark.parametrize("left", ["experts", "down_proj", "gate_proj.*up_proj"])
def test_projections_in_float_stay_so(tmp_path: Path, left: str) -> None:
    keys = left.split(".*")

    def pack(name: str, weight: Tensor) -> samples.Packed | None:
        in_float = expert_of(name) >= 0 and (left == "experts" or name.rpartition(".")[2] in keys)
        return None if in_float else awq(name, weight)

    expected = samples.write_mixture(tmp_path, "qwen3_moe", {**AWQ, "modules_to_not_convert": keys}, pack)
    model = samples.loaded(tmp_path)
    experts = model.get_submodule(EXPERTS)
    assert isinstance(experts, Experts) == (left != "experts")
    for part, key in (("up", "gate_up_proj"), ("down", "down_proj")):
        wanted = getattr(expected.get_submodule(EXPERTS), key)
        if left == "experts":
            found = getattr(experts, key)
        elif isinstance(getattr(experts, part), LinearStack):
            assert not re.search(left, key)
            found = getattr(experts, part).dequantized_weight()
        else:
            found = torch.stack([layer.weight for layer in getattr(experts, part)])
        assert torch.equal(found.double(), wanted)
    samples.assert_serves(model, expected, tmp_path / "saved")


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], object]:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return edit


def copied(old: str, new: str) -> Callable[[dict[str, Tensor]], object]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors.update({name.replace(old, new): t.clone() for name, t in tensors.items() if old in name})

    return edit


def dropped(part: str) -> Callable[[dict[str, Tensor]], object]:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return edit


REFUSED: dict[str, tuple[Callable[[dict[str, Tensor]], object], type[qcut.QcutError], str]] = {
    "an expert is missing": (
        dropped("experts.2."),
        CheckpointError,
        r"1 of the 4 layers of '.*experts\.down_proj' are missing; the first is 'down_proj' of expert 2",
    ),
    "a gate is missing": (
        dropped("experts.1.gate_proj"),
        CheckpointError,
        r"1 of the 8 layers of '.*gate_up_proj' are missing; the first is 'gate_proj' of expert 1",
    ),
    "all gates are missing": (
        dropped("gate_proj"),
        CheckpointError,
        r"4 of the 8 layers of '.*gate_up_proj' are missing; the first is part 1 of 2 of expert 0",
    ),
    "integers are missing": (
        dropped("experts.1.down_proj.qweight"),
        CheckpointError,
        r"experts\.1\.down_proj\.q?\w+': the format has none",
    ),
    "all of down are missing": (
        lambda tensors: [dropped(f"experts.{e}.down_proj")(tensors) for e in range(4)],
        CheckpointError,
        r"1 tensors of the model are missing and 0 do not .* is 'model.layers.0.mlp.experts.down_proj'",
    ),
    "one expert too many": (
        copied("experts.3.", "experts.4."),
        CheckpointError,
        r"experts\.4\.down_proj.*: the model has experts 0 to 3",
    ),
    "an expert of a large number": (
        renamed("experts.3.", "experts.99999999."),
        CheckpointError,
        r"experts\.99999999\..*: the model has experts 0 to 3",
    ),
    "a number of thousands of digits": (
        copied("experts.3.", f"experts.{'9' * 3000}."),
        CheckpointError,
        "9 tensors belong to no layer",
    ),
    "a number with a leading zero": (copied("experts.3.", "experts.03."), CheckpointError, "belong to no layer"),
    "another convention besides": (
        copied("experts.3.gate_proj", "experts.3.w1"),
        CheckpointError,
        "belong to no layer",
    ),
    "a stack besides": (
        lambda tensors: tensors.update({f"{EXPERTS}.down_proj": torch.zeros(4, 64, 64).half()}),
        CheckpointError,
        r"'.*experts\.0\.down_proj\.\w+' and '.*experts\.down_proj' are the same experts'",
    ),
    "a shape": (
        lambda tensors: tensors.update({f"{EXPERTS}.1.up_proj.scales": torch.ones(2, 63).half()}),
        CheckpointError,
        r"experts\.1\.up_proj\.scales': found F16 \[2, 63\]; needed: .*\[2, 64\]",
    ),
    "an infinite scale": (
        lambda tensors: tensors.update({f"{EXPERTS}.1.up_proj.scales": torch.full((2, 64), float("inf")).half()}),
        CheckpointError,
        r"experts\.1\.up_proj\.scales': found inf",
    ),
    "a tensor of another format": (
        lambda tensors: tensors.update({f"{EXPERTS}.1.up_proj.SCB": torch.ones(64)}),
        CheckpointError,
        r"experts\.1\.up_proj\.SCB': the format has none of that name",
    ),
    "one bias": (
        lambda tensors: tensors.update({f"{EXPERTS}.1.up_proj.bias": torch.ones(64)}),
        CheckpointError,
        r"experts\.0\.gate_proj\.bias': is missing; '.*experts\.1\.up_proj' has one",
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("mixture")
    samples.write_mixture(folder, "qwen3_moe", AWQ, awq)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_that_are_refused(tmp_path: Path, kind: str) -> None:
    edit, error, text = REFUSED[kind]
    samples.write_mixture(tmp_path, "qwen3_moe", AWQ, awq)
    samples.change(tmp_path, edit)
    samples.refused(tmp_path, error, text)


def test_one_expert_in_float_is_refused(tmp_path: Path) -> None:
    pack = of_expert(2, lambda _, __: None, awq)
    samples.write_mixture(tmp_path, "qwen3_moe", {**AWQ, "modules_to_not_convert": ["experts.2"]}, pack)
    text = r"layer '.*experts\.\d\.down_proj' is quantized, and '.*experts\.2\.down_proj' is in float; allowed: all exp"
    samples.refused(tmp_path, UnsupportedError, text)


def test_a_gate_in_float_is_refused(tmp_path: Path) -> None:
    samples.write_mixture(tmp_path, "mixtral", AWQ, lambda name, w: None if ".w1" in name else awq(name, w))
    samples.refused(tmp_path, UnsupportedError, r"experts\.\d\.w3' is quantized, and '.*w1' is in float")


def test_gate_and_up_in_two_orders_are_refused(tmp_path: Path) -> None:
    def pack(name: str, weight: Tensor) -> samples.Packed:
        generator = torch.Generator().manual_seed(len(name))
        return samples.gptq(weight, size=32, order=torch.randperm(weight.shape[1], generator=generator))

    samples.write_mixture(tmp_path, "qwen3_moe", {**GPTQ, "desc_act": True}, pack)
    text = r"layers '.*experts\.0\.gate_proj' and '.*experts\.0\.up_proj': found columns sorted in two orders"
    samples.refused(tmp_path, UnsupportedError, text)


def test_wrong_groups_of_one_expert_are_refused(tmp_path: Path) -> None:
    samples.write_mixture(tmp_path, "qwen3_moe", GPTQ, gptq)
    name = f"{EXPERTS}.2.up_proj.g_idx"
    samples.change(tmp_path, lambda tensors: tensors.update({name: torch.zeros(64, dtype=torch.int32)}))
    samples.refused(tmp_path, UnsupportedError, r"experts\.2\.up_proj\.g_idx': found group 0 at place 32")


def test_names_of_two_conventions_are_refused(tmp_path: Path) -> None:
    samples.write_mixture(tmp_path, "mixtral", AWQ, awq)
    samples.change(tmp_path, copied("0.block_sparse_moe.experts.1.w1", "0.mlp.experts.1.w1"))
    text = (
        r"tensors '.*block_sparse_moe\.experts\.1\.w1\.\w+' and '.*mlp\.experts\.1\.w1\.\w+' are both '.*mlp.*' of the"
    )
    samples.refused(tmp_path, CheckpointError, text)


def test_names_of_the_model_are_read(tmp_path: Path) -> None:
    samples.write_mixture(tmp_path, "mixtral", AWQ, awq)
    expected = samples.loaded(tmp_path).state_dict()
    samples.change(tmp_path, renamed("block_sparse_moe", "mlp"))
    found = samples.loaded(tmp_path).state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_quantized_routers_are_refused(tmp_path: Path) -> None:
    samples.write_mixture(tmp_path, "qwen3_moe", AWQ, awq)
    tensors, _ = awq("", torch.randn(8, 64))
    router = "model.layers.0.mlp.gate"

    def edit(held: dict[str, Tensor]) -> None:
        del held[f"{router}.weight"]
        held.update({f"{router}.{key}": t.contiguous() for key, t in tensors.items()})

    samples.change(tmp_path, edit)
    samples.refused(tmp_path, CheckpointError, rf"layer '{router}' has quantized tensors; .* no linear layer")


def test_experts_of_bitsandbytes_are_refused(tmp_path: Path) -> None:
    from tests.checkpoints.formats.test_bitsandbytes import FOUR, four

    samples.write_mixture(tmp_path, "qwen3_moe", FOUR, lambda _, weight: four(weight))
    samples.refused(
        tmp_path, UnsupportedError, r"experts\.0\.\w+' is an expert's; allowed: experts in float, or of GPTQ"
    )


@pytest.mark.parametrize("experts", [0, 1, 3, 5])
def test_another_number_of_experts_is_refused(tmp_path: Path, experts: int) -> None:
    samples.write_mixture(tmp_path, "qwen3_moe", AWQ, awq)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_local_experts": experts}))
    texts = {0: "belong to no layer", 5: "'down_proj' of expert 4"}
    samples.refused(tmp_path, CheckpointError, texts.get(experts, f"the model has experts 0 to {experts - 1}"))


def test_experts_of_no_width_are_refused(tmp_path: Path) -> None:
    samples.write_mixture(tmp_path, "qwen3_moe", AWQ, awq)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "moe_intermediate_size": 0}))
    samples.refused(tmp_path, UnsupportedError, "has weights that are no matrices")


def test_an_experts_tensors_in_several_files(tmp_path: Path, written: dict[str, Tensor]) -> None:
    samples.write_mixture(tmp_path, "qwen3_moe", AWQ, awq)
    whole = samples.loaded(tmp_path).state_dict()
    (tmp_path / "model.safetensors").unlink()
    names = sorted(written, reverse=True)
    parts = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, own in parts.items():
        save_file({name: written[name] for name in own}, tmp_path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = samples.loaded(tmp_path).state_dict()
    assert all(torch.equal(found[key], whole[key]) for key in whole)


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}])
def test_transformers_finds_nothing_missing_or_superfluous(tmp_path: Path, device_map: Any) -> None:
    pytest.importorskip("accelerate")
    samples.write_mixture(tmp_path, "mixtral", AWQ, awq)
    model, info = samples.served(tmp_path, dtype=torch.float16, device_map=device_map, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    stacks = [module for module in model.modules() if isinstance(module, LinearStack)]
    assert len(stacks) == 4
    assert {stack.weight_dtype for stack in stacks} == {torch.float16}
    assert model(samples.IDS).logits.dtype is torch.float16


def test_the_base_of_a_mixture(tmp_path: Path) -> None:
    samples.write_mixture(tmp_path, "mixtral", GPTQ, gptq)
    base = AutoModel.from_pretrained(tmp_path, config=qcut.foreign_config(tmp_path))
    whole = samples.served(tmp_path)
    with torch.no_grad():
        found, wanted = base(samples.IDS).last_hidden_state, whole.model(samples.IDS).last_hidden_state
    assert torch.equal(found, wanted)


FAMILIES = (
    "AfmoeForCausalLM",
    "DeepseekV4ForCausalLM",
    "FlexOlmoForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "JambaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "NemotronHForCausalLM",
    "OlmoeForCausalLM",
    "PhimoeForCausalLM",
    "Qwen2MoeForCausalLM",
)
"""Of each way that hubs call experts' tensors: what transformers renames and merges is its own to say."""


@pytest.mark.parametrize("name", FAMILIES)
def test_names_of_other_families(tmp_path: Path, name: str) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path / "float")
    quantized, exact = {}, {}
    for key, weight in load_file(tmp_path / "float" / "model.safetensors").items():
        quantized[key] = exact[key] = weight
        if re.search(r"\.experts\.\d+\.\w+\.weight$", key):
            packed, values = samples.awq(quantized.pop(key), 32)
            quantized |= {f"{key.removesuffix('.weight')}.{end}": t for end, t in packed.items()}
            exact[key] = values.float()
    config = json.loads((tmp_path / "float" / "config.json").read_text())
    for folder, tensors in (("theirs", quantized), ("exact", exact)):
        samples.save(tmp_path / folder, tensors)
        stated = {"quantization_config": AWQ} if folder == "theirs" else {}
        (tmp_path / folder / "config.json").write_text(json.dumps({**config, **stated}))
    expected = type(model).from_pretrained(tmp_path / "exact", dtype=torch.float32)
    found = samples.loaded(tmp_path / "theirs")
    assert not any(has_stacked_weights(m) for n, m in found.named_modules() if n.endswith("experts"))
    count = 0
    for place, experts in found.named_modules():
        if isinstance(experts, Experts):
            module = expected.get_submodule(place)
            up = module.gate_up_proj if module.has_gate else module.up_proj
            assert torch.equal(experts.up.dequantized_weight(), up)
            assert torch.equal(experts.down.dequantized_weight(), module.down_proj)
            count += 1
    assert count
    with torch.no_grad():
        logits, wanted = found(samples.IDS + 2).logits, expected(samples.IDS + 2).logits
        assert float((logits - wanted).norm() / wanted.norm()) < 1e-5
