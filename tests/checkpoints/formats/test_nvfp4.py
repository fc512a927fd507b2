"""NVFP4 of compressed-tensors, held against that library's own compressor, and of ModelOpt, against its definition."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import qcut
from qcut.checkpoints.formats.floats.e2m1 import LEVELS, codes_of
from qcut.checkpoints.formats.reader import format_of, layer_of
from qcut.errors import CheckpointError, QcutError, UnsupportedError
from tests.checkpoints.formats import samples

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import NVFP4, NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

FIRST = "model.layers.0.self_attn.k_proj"
SCHEME = "nvfp4"
MODELOPT = {**samples.MODELOPT, "quant_algo": "NVFP4"}
TOKENS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
GROUPS = {"group_0": {"input_activations": TOKENS, "weights": TOKENS, "targets": ["Linear"]}}


def config(preset: dict[str, QuantizationArgs] = NVFP4A16, **changes: Any) -> dict[str, Any]:
    """A configuration as the library writes it."""
    group = {
        key: None if args is None else args.model_dump(mode="json", exclude_unset=True)
        for key, args in ((key, preset.get(key)) for key in ("weights", "input_activations"))
    }
    group["weights"] = {**(group["weights"] or {}), **changes}
    form = "nvfp4-pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"format": form, "targets": ["Linear"], **group}},
        "ignore": ["lm_head"],
    }


def compress(_: str, weight: Tensor) -> samples.Packed:
    """A layer as the library compresses it, and the library's own dequantization in float32."""
    args, weight = NVFP4A16["weights"], weight.float()
    whole, groups = generate_gparam(weight.amin(), weight.amax()), weight.view(len(weight), -1, 16)
    scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), args, global_scale=whole)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
    packed = NVFP4PackedCompressor.compress(state, scheme)
    values = LEVELS[codes_of(packed["weight_packed"]).int()]
    exact = dequantize(values, packed["weight_scale"].float(), args=args, global_scale=whole, dtype=torch.float32)
    back = NVFP4PackedCompressor.decompress(dict(packed), scheme)["weight"]
    assert torch.equal(exact.to(back.dtype), back)
    return packed, exact.double()


def with_token_scales(name: str, weight: Tensor) -> samples.Packed:
    packed, exact = compress(name, weight)
    return {**packed, "input_global_scale": torch.tensor([12.5])}, exact


def modelopt(*unused: str, dims: tuple[int, ...] = ()) -> Callable[[str, Tensor], samples.Packed]:
    """Layers as ModelOpt stores them: the layer's scale multiplies, and groups of zeros have other scales than 0."""

    def of(name: str, weight: Tensor) -> samples.Packed:
        groups = weight.float().view(len(weight), -1, 16)
        whole = groups.abs().amax() / (6.0 * 448.0)
        scales = groups.abs().amax(2) / (6.0 * whole)
        scales = torch.where(scales == 0, 1.0, scales).clamp(2.0**-9, 448).to(torch.float8_e4m3fn)
        step = scales.float() * whole
        place = ((groups / step[..., None]).abs()[..., None] - LEVELS[:8]).abs().argmin(-1)
        codes = (place + 8 * (groups < 0)).to(torch.uint8).flatten(1)
        exact = (LEVELS[codes.int()].view(groups.shape) * step[..., None]).flatten(1)
        stored = {"weight": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": scales}
        first = name.rsplit(".", 1)[-1][0]
        kept = {key: torch.tensor(0.25) for key in unused if key[0] in ("i", first)}
        return {**stored, "weight_scale_2": whole.reshape(dims), **kept}, exact.double()

    return of


CASES: dict[str, tuple[dict[str, Any], Callable[[str, Tensor], samples.Packed]]] = {
    "compressed-tensors": (config(), compress),
    "compressed-tensors, tokens": (config(NVFP4), with_token_scales),
    "modelopt": ({**MODELOPT, "config_groups": GROUPS}, modelopt("input_scale")),
    "modelopt, weights": ({**MODELOPT, "quant_algo": "W4A16_NVFP4", "group_size": 16}, modelopt(dims=(1,))),
    "modelopt, caches": (
        {**MODELOPT, "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
        modelopt("input_scale", "k_scale", "v_scale"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_writers(tmp_path: Path, case: str) -> None:
    samples.assert_weights(tmp_path, samples.write(tmp_path, *CASES[case]), SCHEME)


@samples.newer_experts
@pytest.mark.parametrize("case", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("family", samples.MIXTURES)
def test_experts_are_the_writers(tmp_path: Path, family: str, case: str) -> None:
    expected = samples.write_mixture(tmp_path, family, *CASES[case])
    samples.assert_expert_weights(tmp_path, expected, SCHEME)


def test_tensors_stay_as_they_are(tmp_path: Path) -> None:
    samples.write(tmp_path, *CASES["compressed-tensors"])
    layer = qcut.load(tmp_path, progress=False).get_submodule(FIRST)
    packed, _ = compress("", samples.llama().get_submodule(FIRST).weight.detach())
    assert torch.equal(layer.norms, packed["weight_scale"])
    assert torch.equal(layer.norm_scale.reciprocal().float(), packed["weight_global_scale"].expand(32))


def test_files_of_their_own_are_read(tmp_path: Path) -> None:
    """What ModelOpt writes into hf_quant_config.json."""
    expected = samples.write(tmp_path, *CASES["modelopt"])
    described = json.loads((tmp_path / "config.json").read_text())
    del described["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(described))
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_*"]}
    next_to = {"producer": samples.MODELOPT["producer"], "quantization": quantization}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(next_to))
    model = samples.loaded(tmp_path)
    for name, module in samples.linears(expected).items():
        assert torch.equal(model.get_submodule(name).dequantized_weight(), module.weight.float()), name


@pytest.mark.parametrize("case", ["compressed-tensors", "modelopt"])
def test_excluded_layers_stay_in_float(tmp_path: Path, case: str) -> None:
    described, pack = CASES[case]

    def some(name: str, weight: Tensor) -> samples.Packed:
        scale = {"k_scale": torch.tensor(0.5)} if case == "modelopt" and "k_proj" in name else {}  # of the cache
        return pack(name, weight) if "mlp" in name else ({"weight": weight.half(), **scale}, weight.double())

    expected = samples.write(tmp_path, described, some)
    model = samples.loaded(tmp_path)
    kinds = {type(model.get_submodule(name)).__name__ for name in samples.linears(expected)}
    assert kinds == {"CodebookLinear", "Linear"}
    samples.assert_serves(model, expected, tmp_path / "saved")


@pytest.mark.parametrize("divides", [True, False])
def test_scales_are_rounded_once(divides: bool) -> None:
    """Against products and quotients of float32 itself, over the e4m3 numbers and many scales of a layer."""
    form = format_of(*((config(), "here") if divides else (MODELOPT, "here")))
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    draws = torch.Generator().manual_seed(0)
    for _ in range(50):
        whole = torch.rand(1, generator=draws).add_(1) * 2.0 ** int(torch.randint(-90, 90, (1,), generator=draws))
        tensors = {"weight_scale": scales.view(1, -1), "weight_global_scale": whole}
        codes = torch.tensor([0x72, 0xF1] * 4, dtype=torch.uint8).repeat(126).view(1, -1)
        names = {"weight_packed": codes} if divides else {"weight": codes, "weight_scale_2": whole}
        if not divides:
            del tensors["weight_global_scale"]
        layer = layer_of(form, "one", {**tensors, **names}, 1, 126 * 16)
        scale = scales.float() / whole if divides else scales.float() * whole
        expected = LEVELS[codes_of(codes).int()] * scale.repeat_interleave(16)
        assert torch.equal(layer.dequantized_weight(), expected)


def put(key: str, value: float | Tensor, place: tuple[int, ...] | None = None) -> Callable[[dict[str, Tensor]], None]:
    """Sets a tensor of the first layer, or a place of it."""

    def edit(tensors: dict[str, Tensor]) -> None:
        name = f"{FIRST}.{key}"
        if place is None:
            tensors[name] = torch.as_tensor(value)
        else:
            tensors[name][place] = value

    return edit


def change(key: str, made: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({f"{FIRST}.{key}": made(tensors[f"{FIRST}.{key}"]).contiguous()})


WHOLE = "weight_global_scale"
BAD: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], type[QcutError], str]] = {
    "nan": (
        "compressed-tensors",
        put("weight_scale", float("nan"), (3, 1)),
        CheckpointError,
        r"k_proj.weight_scale': found nan at \[3, 1\]; finite values from 0",
    ),
    "negative": (
        "compressed-tensors",
        put("weight_scale", -2.0, (0, 0)),
        CheckpointError,
        r"found -2.0 at \[0, 0\]; finite values from 0",
    ),
    "no whole": (
        "compressed-tensors",
        lambda t: t.pop(f"{FIRST}.{WHOLE}"),
        CheckpointError,
        rf"{WHOLE}': is missing; needed: F32 \[1\] or \[\]",
    ),
    "whole 0": ("compressed-tensors", put(WHOLE, 0.0, (0,)), CheckpointError, f"{WHOLE}': found 0.0 at .* above 0"),
    "whole < 0": ("compressed-tensors", put(WHOLE, -4.0, (0,)), CheckpointError, f"{WHOLE}': found -4.0 at .* above 0"),
    "whole inf": ("compressed-tensors", put(WHOLE, float("inf"), (0,)), CheckpointError, f"{WHOLE}': found inf at"),
    "whole tiny": (
        "compressed-tensors",
        put(WHOLE, 2.0**-120, (0,)),
        UnsupportedError,
        rf"{WHOLE}': of the inverse, found 1.3.*e\+36 at \[0\]; 1.2e-35 to 8.31e\+34",
    ),
    "rows": (
        "compressed-tensors",
        put(WHOLE, torch.ones(32)),
        CheckpointError,
        rf"{WHOLE}': found F32 \[32\]; needed: F32 \[1\] or \[\]",
    ),
    "halves": (
        "compressed-tensors",
        change("weight_scale", Tensor.half),
        CheckpointError,
        r"weight_scale': found F16 \[32, 4\]; needed: F8_E4M3 \[32, 4\]",
    ),
    "groups": (
        "compressed-tensors",
        change("weight_scale", lambda s: s[:, 1:]),
        CheckpointError,
        r"found F8_E4M3 \[32, 3\]; needed: F8_E4M3 \[32, 4\]",
    ),
    "codes": (
        "compressed-tensors",
        change("weight_packed", lambda q: q[:, 1:]),
        CheckpointError,
        r"found U8 \[32, 31\]; needed: U8 \[32, 32\]",
    ),
    "others": (
        "compressed-tensors",
        put("weight_zero_point", torch.zeros(32, 4)),
        CheckpointError,
        "weight_zero_point': the format has none of that name",
    ),
    "modelopt, missing": (
        "modelopt",
        lambda t: t.pop(f"{FIRST}.weight_scale_2"),
        CheckpointError,
        "weight_scale_2': is missing",
    ),
    "modelopt, 0": ("modelopt", put("weight_scale_2", 0.0), CheckpointError, "weight_scale_2': found 0.0 at"),
    "modelopt, tokens": (
        "modelopt",
        put("pre_quant_scale", torch.ones(64)),
        CheckpointError,
        "pre_quant_scale': the format has none of that name",
    ),
    "modelopt, float8": (
        "modelopt",
        change("weight", lambda q: q.view(torch.float8_e4m3fn)),
        CheckpointError,
        "found F8_E4M3",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tensors_are_refused(tmp_path: Path, name: str) -> None:
    case, edit, error, text = BAD[name]
    samples.write(tmp_path, *CASES[case])
    samples.change(tmp_path, edit)
    samples.refused(tmp_path, error, text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"group_size": 32}, "'group_size': 32"),
        ({"num_bits": 8}, "'num_bits': 8"),
        ({"type": "int"}, "'type': 'int'"),
        ({"symmetric": False}, "'symmetric': False"),
        ({"strategy": "group"}, "'strategy': 'group'"),
        ({"actorder": "group"}, "actorder 'group'"),
    ],
)
def test_other_weights_are_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    samples.write(tmp_path, config(**changes), compress)
    samples.refused(tmp_path, UnsupportedError, f"weights are .*{text}.*nvfp4-pack-quantized is served of")


def test_integer_tokens_are_refused(tmp_path: Path) -> None:
    described = config(NVFP4)
    described["config_groups"]["group_0"]["input_activations"]["type"] = "int"
    samples.write(tmp_path, described, with_token_scales)
    samples.refused(tmp_path, UnsupportedError, "input_activations are int, dynamic local; none, or ones of type float")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"quant_algo": "NVFP4_AWQ"}, UnsupportedError, "quant_algo is 'NVFP4_AWQ'; FP8, .*NVFP4"),
        ({"quant_algo": "MIXED_PRECISION"}, UnsupportedError, "quant_algo is 'MIXED_PRECISION'"),
        ({"group_size": 32}, UnsupportedError, "group_size is 32; 16 is served of NVFP4"),
        ({"group_size": "all"}, CheckpointError, "group_size"),
        ({"quantization": {"group_size": 8}}, UnsupportedError, "group_size is 8; 16 is served of NVFP4"),
        (
            {"config_groups": {"group_0": {"weights": {**TOKENS, "group_size": 32}}}},
            UnsupportedError,
            "group_size is 32; 16 is served of NVFP4",
        ),
        ({"pre_quant_scale": True}, UnsupportedError, "the field 'pre_quant_scale' with 'True'"),
    ],
)
def test_other_configurations_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[QcutError], text: str
) -> None:
    samples.write(tmp_path, {**MODELOPT, **changes}, modelopt())
    samples.refused(tmp_path, error, text)


@samples.newer_experts
def test_mxfp4_and_nvfp4_share_no_stack(tmp_path: Path) -> None:
    both, mxfp4 = config(), samples.E2M1["config_groups"]["group_0"]
    targets = [r"re:.*experts\.1\..*"]
    both["config_groups"]["group_1"] = {**mxfp4, "format": samples.E2M1["format"], "targets": targets}
    samples.write_mixture(
        tmp_path,
        "mixtral",
        {**both, "format": "mixed-precision"},
        lambda name, w: samples.mxfp4(w) if "experts.1." in name else compress(name, w),
    )
    text = r"'.*experts\.1\.\w+' has 4 bits in groups of 32, .* and '.*experts\.0\.\w+' has 4 bits in groups of 16"
    samples.refused(tmp_path, UnsupportedError, text)


def test_rows_of_no_whole_groups_are_refused() -> None:
    form, (tensors, _) = format_of(config(), "here"), compress("", torch.randn(8, 48))
    with pytest.raises(
        UnsupportedError, match=r"here: layer 'one' has 40 columns; a multiple of 16 is served of NVFP4"
    ):
        layer_of(form, "one", tensors, 8, 40, "here")


def test_what_is_read_is_written_again(tmp_path: Path) -> None:
    samples.write(tmp_path / "first", *CASES["compressed-tensors"])
    model = qcut.load(tmp_path / "first", progress=False)
    qcut.save_compressed_tensors(model, tmp_path / "again")
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "again"))
    assert set(first) == set(again)
    for name, tensor in first.items():
        if name.endswith("weight_packed"):  # -0 is written as 0
            assert torch.equal(*(LEVELS[codes_of(packed).int()] for packed in (tensor, again[name]))), name
        else:
            assert torch.equal(tensor, again[name]), name


def test_scales_without_an_inverse_are_not_written(tmp_path: Path) -> None:
    samples.write(tmp_path / "first", *CASES["modelopt"])
    model = qcut.load(tmp_path / "first", progress=False)
    with pytest.raises(
        UnsupportedError, match=r"layer 'model.*': norm_scale is .*; allowed: the inverse of one float32"
    ):
        qcut.save_compressed_tensors(model, tmp_path / "again")
    assert not (tmp_path / "again").exists()
