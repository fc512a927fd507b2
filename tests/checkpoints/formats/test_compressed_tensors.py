"""compressed-tensors checkpoints, held against that library's own compressors and against integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import qcut
from qcut.errors import CheckpointError, UnsupportedError
from qcut.schemes import parse_scheme
from tests.checkpoints.formats import samples
from tests.support.oracles import F32, token_oracle

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

FIRST = "model.layers.0.self_attn.q_proj"
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def group(form: str, weights: dict[str, Any], tokens: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"format": form, "targets": ["Linear"], "weights": weights, "input_activations": tokens}


def config(form: str, weights: dict[str, Any], tokens: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group(form, weights, tokens)},
        "ignore": ["lm_head"],
    }


def args_of(weights: dict[str, Any]) -> QuantizationArgs:
    return QuantizationArgs(**weights)


def compress(
    weight: Tensor, weights: dict[str, Any], dtype: torch.dtype = torch.float16, *, packs: bool = False
) -> samples.Packed:
    """A layer as the library compresses it, and the library's own decompression."""
    weight, args = weight.to(dtype), args_of(weights)
    size = weights.get("group_size") or weight.shape[1]
    groups = weight.view(len(weight), -1, size)
    scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    packs = packs or weights["num_bits"] == 4
    compressor = PackedQuantizationCompressor if packs else IntQuantizationCompressor
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    packed = compressor.compress(state, scheme)
    if not args.symmetric:
        assert "weight_zero_point" in packed
    return packed, compressor.decompress(dict(packed), scheme)["weight"]


def int4(symmetric: bool, size: int | None) -> dict[str, Any]:
    strategy = "channel" if size is None else "group"
    return {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": size}


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None, "dynamic": False}


def reload(model: nn.Module, folder: Path) -> None:
    """A save and a load change no bit."""
    logits = model(samples.IDS).logits
    qcut.save(model, folder / "saved")
    assert torch.equal(qcut.load(folder / "saved", progress=False)(samples.IDS).logits, logits)


def int64_linear(q: Tensor, scale: Tensor) -> Any:
    """int8 products by integers of 64 bits: tokens by their largest magnitude, then two float32 factors."""

    def forward(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        tokens, row_scale = token_oracle(rows)
        acc = (tokens.long() @ q.long().T).numpy().astype(F32)
        y = acc * row_scale.numpy()[:, None] * scale.float().reshape(-1).numpy()
        return torch.from_numpy(y).view(*x.shape[:-1], -1)

    return forward


def test_int_quantized_is_w8a8_bit_for_bit(tmp_path: Path) -> None:
    stored: dict[str, dict[str, Tensor]] = {}

    def pack(name: str, weight: Tensor) -> samples.Packed:
        packed, back = compress(weight, INT8)
        stored[name] = packed
        return packed, back

    expected = samples.write(tmp_path, config("int-quantized", INT8, TOKENS), pack).float()
    model = samples.loaded(tmp_path)
    assert min(int(packed["weight"].min()) for packed in stored.values()) == -128  # that library's range
    for name, packed in stored.items():
        layer = model.get_submodule(name)
        assert layer.scheme == qcut.W8A8()
        assert torch.equal(layer.codes, packed["weight"])
        assert torch.equal(layer.weight_scale, packed["weight_scale"].float().reshape(-1))
        expected.get_submodule(name).forward = int64_linear(packed["weight"], packed["weight_scale"])
    with torch.no_grad():
        assert torch.equal(model(samples.IDS).logits, expected(samples.IDS).logits)
        reload(model, tmp_path)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [32, 64, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packed_integers_are_the_librarys(
    tmp_path: Path, symmetric: bool, size: int | None, dtype: torch.dtype
) -> None:
    weights = int4(symmetric, size)
    expected = samples.write(tmp_path, config("pack-quantized", weights), lambda _, w: compress(w, weights, dtype))
    model = samples.loaded(tmp_path)
    for name, module in samples.linears(expected).items():
        layer = model.get_submodule(name)
        # That library rounds to the type of its scales, once.
        assert torch.equal(layer.dequantized_weight().to(dtype).double(), module.weight), name
        assert layer.scheme.name.endswith("_shifted") != symmetric
    with torch.no_grad():
        reload(model, tmp_path)


@pytest.mark.parametrize(
    ("form", "weights", "scheme"),
    [
        ("int-quantized", INT8, "w8a16"),
        ("pack-quantized", {**int4(False, 32), "num_bits": 8}, "codebook4+4_g32_none_shifted"),
    ],
)
def test_8_bits_without_int8_tokens(tmp_path: Path, form: str, weights: dict[str, Any], scheme: str) -> None:
    packs = form == "pack-quantized"
    expected = samples.write(tmp_path, config(form, weights), lambda _, w: compress(w, weights, packs=packs))
    layer = samples.loaded(tmp_path).get_submodule(FIRST)
    assert layer.scheme == parse_scheme(scheme)
    assert torch.equal(layer.dequantized_weight().half().double(), expected.get_submodule(FIRST).weight)


def test_columns_sorted_by_activation(tmp_path: Path) -> None:
    weights = int4(False, 32)

    def pack(name: str, weight: Tensor) -> samples.Packed:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(len(name)))
        packed, back = compress(weight[:, order], weights)
        q = unpack_from_int32(packed["weight_packed"], 4, weight.shape)
        unsorted, exact, groups = (
            torch.empty_like(q),
            torch.empty_like(back),
            torch.empty(len(order), dtype=torch.int32),
        )
        unsorted[:, order], exact[:, order] = q, back
        groups[order] = torch.arange(len(order), dtype=torch.int32) // 32
        return {**packed, "weight_packed": pack_to_int32(unsorted, 4), "weight_g_idx": groups}, exact

    expected = samples.write(tmp_path, config("pack-quantized", weights), pack)
    layer = samples.loaded(tmp_path).get_submodule(FIRST)
    assert layer.scheme.name == "int4_g32_shifted_ordered"
    assert torch.equal(layer.dequantized_weight().half().double(), expected.get_submodule(FIRST).weight)


@pytest.mark.parametrize("family", samples.MIXTURES)
@pytest.mark.parametrize(
    ("form", "weights", "scheme"),
    [
        ("pack-quantized", int4(True, 32), "int4_g32"),
        ("pack-quantized", int4(False, 32), "int4_g32_shifted"),
        ("pack-quantized", int4(True, None), "int4_rows"),
        ("int-quantized", INT8, "w8a16"),
        ("int-quantized", {**INT8, "strategy": "tensor"}, "w8a16"),
    ],
)
@samples.newer_experts
def test_experts_are_the_librarys(tmp_path: Path, family: str, form: str, weights: dict[str, Any], scheme: str) -> None:
    if weights["strategy"] == "tensor":

        def pack(_: str, weight: Tensor) -> samples.Packed:
            scale = (weight.abs().max() / 127).half().reshape(1)
            q = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
            return {"weight": q, "weight_scale": scale}, q.double() * scale.double()

    else:

        def pack(_: str, weight: Tensor) -> samples.Packed:
            return compress(weight, weights)

    expected = samples.write_mixture(tmp_path, family, config(form, weights), pack)
    model = samples.loaded(tmp_path)
    for name, module in samples.expert_modules(expected).items():
        experts = model.get_submodule(name)
        for stack, weight in ((experts.up, module.gate_up_proj), (experts.down, module.down_proj)):
            assert stack.scheme == parse_scheme(scheme)
            found = stack.dequantized_weight().double()
            # That library rounds to the type of its scales, once.
            assert torch.equal(found if weights["strategy"] == "tensor" else found.half().double(), weight)
    with torch.no_grad():
        reload(model, tmp_path)


@pytest.mark.parametrize("family", samples.MIXTURES)
@samples.newer_experts
def test_int8_experts_are_w8a8_bit_for_bit(tmp_path: Path, family: str) -> None:
    stored: dict[str, dict[str, Tensor]] = {}

    def pack(name: str, weight: Tensor) -> samples.Packed:
        packed, back = compress(weight, INT8)
        stored[name] = packed
        return packed, back

    expected = samples.write_mixture(tmp_path, family, config("int-quantized", INT8, TOKENS), pack)
    model = samples.loaded(tmp_path)
    gate, up, down = samples.EXPERT_NAMES.get(family, ("gate_proj", "up_proj", "down_proj"))
    for name, module in samples.expert_modules(expected).items():
        experts = model.get_submodule(name)
        place = name.replace(".mlp.", ".block_sparse_moe.") if gate == "w1" else name
        for e in range(len(module.down_proj)):
            rows = [stored[f"{place}.{e}.{key}"] for key in (gate, up, down)]
            q, scale = (torch.cat([row[key] for row in rows[:2]]) for key in ("weight", "weight_scale"))
            assert torch.equal(experts.up.expert(e).codes, q)
            assert torch.equal(experts.up.expert(e).weight_scale, scale.float()[:, 0])
            assert torch.equal(experts.down.expert(e).codes, rows[2]["weight"])
            x = torch.randn(5, samples.HIDDEN)
            halves = int64_linear(q, scale)(x).chunk(2, -1)
            inner = nn.functional.silu(halves[0]) * halves[1]
            wanted = int64_linear(rows[2]["weight"], rows[2]["weight_scale"])(inner) * 0.75
            found = experts(x, torch.full((5, 1), e), torch.full((5, 1), 0.75))
            # silu's last bit may move a token's integers by one step of 127
            assert float((found - wanted).norm()) <= 2e-3 * float(wanted.norm())
            assert torch.equal(experts.up.expert(e)(x), torch.cat(halves, -1))
    with torch.no_grad():
        reload(model, tmp_path)


@samples.newer_experts
def test_experts_of_several_groups(tmp_path: Path) -> None:
    four = int4(True, 32)

    def pack(name: str, weight: Tensor) -> samples.Packed:
        return compress(weight, four if ".experts." in name else INT8)

    both = config("int-quantized", INT8, TOKENS)
    groups = both["config_groups"]
    groups["group_1"] = {**group("pack-quantized", four), "targets": [r"re:.*block_sparse_moe.experts.*w[12]$"]}
    groups["group_2"] = {**group("pack-quantized", four), "targets": [r"re:.*block_sparse_moe.experts.*w3$"]}
    samples.write_mixture(tmp_path, "mixtral", {**both, "format": "mixed-precision"}, pack)
    model = qcut.load(tmp_path, progress=False)
    assert model.get_submodule("model.layers.1.mlp.experts").up.scheme.name == "int4_g32"
    assert model.get_submodule(FIRST).scheme.name == "w8a8"


@pytest.mark.parametrize("target", [r"re:.*block_sparse_moe\.experts", r"re:.*mlp\.experts"])
@samples.newer_experts
def test_experts_by_either_name(tmp_path: Path, target: str) -> None:
    both = config("int-quantized", INT8, TOKENS)
    both["config_groups"]["group_1"] = {**group("int-quantized", INT8), "targets": [target]}
    samples.write_mixture(tmp_path, "mixtral", both, lambda name, weight: compress(weight, INT8))
    model = qcut.load(tmp_path, progress=False)
    assert model.get_submodule("model.layers.1.mlp.experts").up.scheme.name == "w8a16"
    assert model.get_submodule(FIRST).scheme.name == "w8a8"


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("experts.1.", r"'.*experts\.1\.\w+' has .*scheme w8a16, and '.*experts\.0\.\w+' has 4 bits in groups of 32"),
        ("w1", r"'.*experts\.0\.w3' has 4 bits .*, and '.*experts\.0\.w1' has 8 bits in groups of 64"),
    ],
)
@samples.newer_experts
def test_experts_of_two_forms_are_refused(tmp_path: Path, target: str, text: str) -> None:
    four = int4(True, 32)
    both = config("pack-quantized", four)
    both["config_groups"]["group_1"] = {**group("int-quantized", INT8), "targets": [f"re:.*{target}"]}
    samples.write_mixture(
        tmp_path,
        "mixtral",
        {**both, "format": "mixed-precision"},
        lambda name, w: compress(w, INT8 if f"experts.{target}" in name or target in name else four),
    )
    samples.refused(tmp_path, UnsupportedError, text)


def test_groups_by_name_and_pattern(tmp_path: Path) -> None:
    four = int4(True, 32)

    def pack(name: str, weight: Tensor) -> samples.Packed:
        return compress(weight, four if "mlp" in name else INT8)

    both = config("int-quantized", INT8, TOKENS)
    both["config_groups"]["group_1"] = {**group("pack-quantized", four), "targets": ["re:.*mlp.*"]}
    samples.write(tmp_path, {**both, "format": "mixed-precision"}, pack)
    model = qcut.load(tmp_path, progress=False)
    assert model.get_submodule("model.layers.1.mlp.up_proj").scheme.name == "int4_g32"
    assert model.get_submodule(FIRST).scheme.name == "w8a8"


@pytest.mark.parametrize("target", ["re:layers.*mlp", r"re:model\.layers.*mlp", "layers.1.mlp.up_proj"])
def test_targets_by_either_name(tmp_path: Path, target: str) -> None:
    both = config("int-quantized", INT8, TOKENS)
    both["config_groups"]["group_1"] = {**group("int-quantized", INT8), "targets": [target]}
    samples.write(tmp_path, both, lambda name, weight: compress(weight, INT8))
    tensors = load_file(tmp_path / "model.safetensors")
    samples.save(tmp_path, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    model = qcut.load(tmp_path, progress=False)
    assert model.get_submodule("model.layers.1.mlp.up_proj").scheme.name == "w8a16"
    assert model.get_submodule(FIRST).scheme.name == "w8a8"


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda g: g["weights"].update(num_bits=3), "weights are int of 3 bits"),
        (lambda g: g["weights"].update(type="float"), "weights are float of 4 bits"),
        (lambda g: g["weights"].update(dynamic=True), "weights are dynamic"),
        (lambda g: g["weights"].update(strategy="block"), "strategy 'block'"),
        (lambda g: g["weights"].update(group_size=0), "groups of 0"),
        (lambda g: g["weights"].update(group_size=64), r"weight_scale': found F16 .*, 4.; needed: .*, 2."),
        (lambda g: g["weights"].update(symmetric=False), "weight_zero_point': is missing"),
        (lambda g: g.update(input_activations=TOKENS), "input_activations are"),
        (lambda g: g.update(output_activations=TOKENS), "output_activations are"),
        (lambda g: g.update(format="mxfp8-quantized"), "format is 'mxfp8-quantized'"),
        (lambda g: g.update(targets=["re:("]), "is no pattern"),
        (lambda g: g.update(targets=["re:(.|m)*x"]), "has 1 repetitions; 5 are read, none of a group"),
        (lambda g: g.update(targets=["re:" + ".*" * 40 + "x"]), "has 40 repetitions"),
        (lambda g: g.update(targets=["re:" + "(?:.|.)" * 40 + "#"]), "can be tried in 1.1e\\+12 ways"),
        (lambda g: g.update(targets=["re:" + "a?" * 2000 + "#"]), "can be tried in inf ways"),
        (lambda g: g.update(targets=["Conv2d"]), "no group has it as target"),
        (lambda g: g.pop("targets"), "field 'targets' is missing"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, edit: Any, text: str) -> None:
    samples.write(tmp_path, config("pack-quantized", int4(True, 32)), lambda _, w: compress(w, int4(True, 32)))
    samples.change_config(tmp_path, lambda c: edit(c["config_groups"]["group_0"]))
    samples.refused(tmp_path, (CheckpointError, UnsupportedError), text)


def test_static_tokens_are_refused(tmp_path: Path) -> None:
    static = {**TOKENS, "dynamic": False, "strategy": "tensor"}
    samples.write(tmp_path, config("int-quantized", INT8, static), lambda _, w: compress(w, INT8))
    samples.refused(tmp_path, UnsupportedError, r"input_activations are .*'dynamic': False")


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("weight_shape", torch.tensor([64, 65]), r"found \[64, 65\]; the model needs \[64, 64\]"),
        ("weight_packed", torch.zeros(64, 9, dtype=torch.int32), "weight_packed': found I32"),
        ("weight_scale", torch.full((64, 2), float("inf")), "weight_scale': found inf"),
        ("weight_g_idx", torch.zeros(64, dtype=torch.int32), "weight_g_idx': found group 0 at place 32"),
        ("weight_zero_point", torch.zeros(64, 2, dtype=torch.int8), "weight_zero_point': the format has none"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, key: str, value: Tensor, text: str) -> None:
    samples.write(tmp_path, config("pack-quantized", int4(True, 32)), lambda _, w: compress(w, int4(True, 32)))
    samples.change(tmp_path, lambda t: t.update({f"{FIRST}.{key}": value}))
    samples.refused(tmp_path, (CheckpointError, UnsupportedError), text)
