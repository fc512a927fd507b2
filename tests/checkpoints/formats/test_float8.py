"""8-bit floats of transformers, FBGEMM and NVIDIA's Model Optimizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import qcut
from qcut.errors import CheckpointError, QcutError, UnsupportedError
from tests.checkpoints.formats import samples

FIRST = "model.layers.0.self_attn.k_proj"
MODELOPT, FBGEMM, PRODUCER = samples.MODELOPT, samples.FBGEMM, {"producer": samples.MODELOPT["producer"]}
ROWS = {**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}


def finegrained(block: tuple[int, int] | None, **changes: Any) -> dict[str, Any]:
    return {**FineGrainedFP8Config(weight_block_size=block).to_dict(), **changes}


def by_definition(rows: bool, *unused: str) -> Callable[[str, Tensor], samples.Packed]:
    """Weights with a scale for each row or for the layer, and scales of tokens and caches."""

    def of(name: str, weight: Tensor) -> samples.Packed:
        packed, exact = samples.float8(weight, rows=rows)
        scales = {key: samples.input_scale(name) for key in unused if key[0] in ("i", name.rsplit(".", 1)[1][0])}
        return packed | scales, exact

    return of


def of_blocks(_: str, weight: Tensor) -> samples.Packed:
    """As ModelOpt stores blocks of 128 rows and columns; a single one has no dimensions."""
    n, k = weight.shape
    blocks = weight.float().view(n // 128, 128, k // 128, 128)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    q = (blocks / scale).to(torch.float8_e4m3fn)
    exact = (q.double() * scale.double()).view(n, k)
    return {"weight": q.view(n, k), "weight_scale": scale.squeeze() if scale.numel() == 1 else scale}, exact


def of_fbgemm(name: str, weight: Tensor) -> samples.Packed:
    tensors, exact = by_definition(rows=True)(name, weight)
    return tensors | {"weight_scale": tensors["weight_scale"][:, None], "input_scale_ub": torch.tensor([1200.0])}, exact


def by_transformers(block: tuple[int, int] | None, **unused: Tensor) -> Callable[[str, Tensor], samples.Packed]:
    """Weights as transformers' own operation quantizes them; those that blocks do not divide stay in float."""
    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(weight_block_size=block))
    dequantize = getattr(Fp8Dequantize(quantizer), "_dequantize_one", None)  # of newer versions

    def of(_: str, weight: Tensor) -> samples.Packed:
        rows, columns = block or weight.shape
        if weight.shape[0] % rows or weight.shape[1] % columns:
            return {"weight": weight.half()}, weight.half().double()
        q, scale = Fp8Quantize(quantizer).convert({"layer.weight": [weight.float()]}).values()
        exact = q.double() * scale.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        assert dequantize is None or torch.equal(dequantize(q, scale, torch.float32), exact.float())
        kept = {key: tensor.clone() for key, tensor in unused.items()}
        return {"weight": q, "weight_scale_inv": scale, **kept}, exact

    return of


TOKENS = {"activation_scale": torch.tensor(0.5)}
CASES: dict[str, tuple[dict[str, Any], Callable[[str, Tensor], samples.Packed]]] = {
    "modelopt": (MODELOPT, by_definition(False, "input_scale")),
    "modelopt, weights": (MODELOPT, by_definition(False)),
    "modelopt, caches": (
        {**MODELOPT, "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
        by_definition(False, "input_scale", "k_scale", "v_scale"),
    ),
    "modelopt, rows": (ROWS, by_definition(rows=True)),
    "fbgemm": (FBGEMM, of_fbgemm),
    "transformers": (finegrained(None), by_transformers(None)),
    "transformers, static": (finegrained(None, activation_scheme="static"), by_transformers(None, **TOKENS)),
}


SCHEMES: dict[str, tuple[str, samples.Tokens]] = {
    "modelopt": ("fp8_static", samples.static_tokens),
    "modelopt, caches": ("fp8_static", samples.static_tokens),
    "modelopt, rows": ("fp8_dynamic", samples.dynamic_tokens),
}
"""For cases with quantized tokens, the scheme and what the writer makes of tokens; for others fp8."""


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_writers(tmp_path: Path, case: str) -> None:
    config, pack = CASES[case]
    expected = samples.write(tmp_path, config, pack)
    samples.assert_weights(tmp_path, expected, *SCHEMES.get(case, ("fp8", None)))


def test_layers_of_modelopt_without_input_scales(tmp_path: Path) -> None:
    samples.write(tmp_path, *CASES["modelopt"])
    samples.change(tmp_path, lambda t: t.pop(f"{FIRST}.input_scale"))
    model = samples.loaded(tmp_path)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, qcut.Linear)}
    assert layers.pop(FIRST).scheme.name == "fp8"
    assert {layer.scheme.name for layer in layers.values()} == {"fp8_static"}


@samples.newer_experts
@pytest.mark.parametrize("case", ["modelopt", "modelopt, rows", "transformers"])
@pytest.mark.parametrize("family", samples.MIXTURES)
def test_experts_are_the_writers(tmp_path: Path, family: str, case: str) -> None:
    config, pack = CASES[case]
    expected = samples.write_mixture(tmp_path, family, config, pack)
    samples.assert_expert_weights(tmp_path, expected, "fp8", SCHEMES.get(case, ("", None))[1])


def test_layers_in_float_are_among_blocks(tmp_path: Path) -> None:
    block = (128, 128)
    expected = samples.write(tmp_path, finegrained(block), by_transformers(block), hidden_size=128)
    model = samples.loaded(tmp_path)
    for name, module in samples.linears(expected).items():
        layer = model.get_submodule(name)
        weight = layer.weight.float() if type(layer) is nn.Linear else layer.dequantized_weight()
        assert torch.equal(weight, module.weight.float()), name
    kinds = {type(model.get_submodule(name)).__name__ for name in samples.linears(expected)}
    assert kinds == {"Float8Linear", "Linear"}
    samples.assert_serves(model, expected, tmp_path / "saved")


def assert_blocks(folder: Path, expected: Any, columns: int) -> None:
    model = samples.loaded(folder)
    for name, module in samples.linears(expected).items():
        layer = model.get_submodule(name)
        assert layer.scheme.name == ("fp8" if layer.in_features <= columns else "fp8_blocks")
        assert torch.equal(layer.dequantized_weight(), module.weight.float()), name
    samples.assert_serves(model, expected, folder / "saved")


@pytest.mark.parametrize("block", [(16, 128), (64, 128), (32, 256)])
def test_blocks_are_those_of_transformers(tmp_path: Path, block: tuple[int, int]) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    expected = samples.write(tmp_path, finegrained(block), by_transformers(block), **sizes)
    assert_blocks(tmp_path, expected, block[1])


def test_blocks_are_those_of_modelopt(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 128}
    expected = samples.write(tmp_path, {**MODELOPT, "quant_algo": "fp8_pb_wo"}, of_blocks, **sizes)
    assert_blocks(tmp_path, expected, 128)


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ((32, 32), "has 256 columns with a scale for each 32; one for a multiple of 128 columns"),
        ((8, 128), "rows 7 and 8 have different scales; scales that each 16 rows share"),
    ],
)
def test_other_blocks_are_refused(tmp_path: Path, block: tuple[int, int], text: str) -> None:
    samples.write(tmp_path, finegrained(block), by_transformers(block), intermediate_size=256)
    samples.refused(tmp_path, UnsupportedError, text)


@pytest.mark.parametrize("own_file", [True, False])
def test_older_configurations_of_modelopt(tmp_path: Path, own_file: bool) -> None:
    """Those without a ``quant_method``, and those in a file of their own."""
    expected = samples.write(tmp_path, MODELOPT, by_definition(False, "input_scale"))
    config = json.loads((tmp_path / "config.json").read_text())
    stated = config.pop("quantization_config")
    if own_file:
        quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({**PRODUCER, "quantization": quantization}))
    else:
        del stated["quant_method"]
        config["quantization_config"] = stated
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = samples.loaded(tmp_path)
    for name, module in samples.linears(expected).items():
        assert torch.equal(model.get_submodule(name).dequantized_weight(), module.weight.float()), name


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        (
            {**MODELOPT, "quant_algo": "MXFP8"},
            UnsupportedError,
            "quant_algo is 'MXFP8'; FP8, FP8_PER_CHANNEL_PER_TOKEN",
        ),
        ({**MODELOPT, "quant_algo": None}, UnsupportedError, "quant_algo is 'None'"),
        ({**MODELOPT, "quant_algo": 8}, CheckpointError, "quant_algo"),
        ({**MODELOPT, "pre_quant_scale": True}, UnsupportedError, "the field 'pre_quant_scale' with 'True'"),
        ({**MODELOPT, "quantization": {"awq_block_size": 8}}, UnsupportedError, "the field 'awq_block_size' with '8'"),
        ({**FBGEMM, "rotation": "hadamard"}, UnsupportedError, "the field 'rotation'"),
        (finegrained(None, scale_fmt="ue8m0"), UnsupportedError, "scale_fmt is 'ue8m0'; float is served"),
        (finegrained(None, expert_dtype="fp4"), UnsupportedError, "expert_dtype is 'fp4'; fp8 is served"),
        (finegrained(None, fmt="e5m2"), UnsupportedError, "fmt is 'e5m2'; e4m3 is served"),
        (finegrained(None, weight_block_size=[128]), CheckpointError, "weight_block_size has 1 numbers"),
        (finegrained(None, weight_block_size=[128, 0]), CheckpointError, "weight_block_size"),
        (finegrained(None, weight_block_size="all"), CheckpointError, "weight_block_size"),
    ],
)
def test_other_configurations_are_refused(
    tmp_path: Path, config: dict[str, Any], error: type[QcutError], text: str
) -> None:
    samples.write(tmp_path, config, by_definition(rows=False))
    samples.refused(tmp_path, error, text)


def changed(key: str, edit: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{FIRST}.{key}"] = edit(tensors[f"{FIRST}.{key}"]).contiguous()

    return change


@pytest.mark.parametrize(
    ("case", "edit", "text"),
    [
        ("modelopt", changed("weight_scale", lambda s: s.repeat(32)), r"found F32 \[32\]; needed: .* \[1\] or \[\]"),
        ("modelopt, rows", changed("weight_scale", lambda s: s[1:]), r"found F32 \[31\]; needed"),
        (
            "modelopt",
            changed("input_scale", lambda s: s.repeat(2)),
            r"input_scale': found F32 \[2\]; needed: .* \[1\] or",
        ),
        (
            "modelopt",
            changed("input_scale", lambda s: s * 0),
            r"input_scale': found 0.0 at \[\]; finite values from 1.17",
        ),
        ("fbgemm", changed("weight_scale", lambda s: s[:, :0]), r"found F32 \[32, 0\]; needed"),
        ("transformers", changed("weight_scale_inv", lambda s: s * float("inf")), "weight_scale_inv': found inf"),
        ("transformers", changed("weight_scale_inv", lambda s: -s), "found -.*; values above 0"),
        ("transformers", changed("weight", lambda w: w.to(torch.float16)), "found F16"),
        ("transformers", lambda t: t.update({f"{FIRST}.input_scale": torch.ones(1)}), "input_scale': the format has"),
        ("fbgemm", lambda t: t.pop(f"{FIRST}.weight"), f"{FIRST}.*weight"),
    ],
)
def test_bad_tensors_are_refused(
    tmp_path: Path, case: str, edit: Callable[[dict[str, Tensor]], object], text: str
) -> None:
    samples.write(tmp_path, *CASES[case])
    samples.change(tmp_path, edit)
    samples.refused(tmp_path, CheckpointError, text)
