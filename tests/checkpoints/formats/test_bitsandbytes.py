"""bitsandbytes checkpoints, held against that library's own dequantization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut.errors import CheckpointError, UnsupportedError
from tests.checkpoints.formats import samples

pytest.importorskip("bitsandbytes")

from bitsandbytes import functional

FIRST = "model.layers.0.self_attn.q_proj"
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}


def four(weight: Tensor, kind: str = "nf4", nested: bool = False, size: int = 64) -> samples.Packed:
    packed, state = functional.quantize_4bit(weight, blocksize=size, compress_statistics=nested, quant_type=kind)
    back = functional.dequantize_4bit(packed, state).float()
    return {"weight": packed, **{f"weight.{key}": t for key, t in state.as_dict(packed=True).items()}}, back


def eight(weight: Tensor) -> samples.Packed:
    q, scale, _ = functional.int8_vectorwise_quant(weight.half())
    tensors = {"weight": q, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, functional.int8_vectorwise_dequant(q, scale)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_4_bit_levels_are_those_of_bitsandbytes(tmp_path: Path, kind: str, nested: bool) -> None:
    expected = samples.write(tmp_path, FOUR, lambda _, w: four(w, kind, nested))
    model = samples.loaded(tmp_path)
    for name, module in samples.linears(expected).items():
        layer = model.get_submodule(name)
        # Scales that were largest magnitudes of float16 weights are float16, nested ones are not.
        assert layer.scheme.name == "codebook4_g64_none" + "_fp32norms" * nested
        assert torch.equal(layer.dequantized_weight().double(), module.weight), name
    samples.assert_serves(model, expected, tmp_path / "saved")


def test_rows_of_zeros(tmp_path: Path) -> None:
    def pack(name: str, weight: Tensor) -> samples.Packed:
        weight = weight.clone()
        weight[3] = 0
        return four(weight, nested=True)

    expected = samples.write(tmp_path, FOUR, pack)
    layer = samples.loaded(tmp_path).get_submodule(FIRST)
    assert torch.equal(layer.dequantized_weight().double(), expected.get_submodule(FIRST).weight)


@pytest.mark.parametrize(("threshold", "scheme"), [(6.0, "w8a16"), (0.0, "w8a8")])
def test_int8(tmp_path: Path, threshold: float, scheme: str) -> None:
    def pack(name: str, weight: Tensor) -> samples.Packed:
        weight = weight.clone()
        weight[5] = 0
        return eight(weight)

    expected = samples.write(tmp_path, {**EIGHT, "llm_int8_threshold": threshold}, pack)
    model = samples.loaded(tmp_path)
    for name, module in samples.linears(expected).items():
        layer = model.get_submodule(name)
        assert layer.scheme.name == scheme
        # That library multiplies by the float32 nearest to 1 / 127, after the scale: three roundings against two.
        difference = (layer.dequantized_weight() - module.weight.float()).abs()
        assert bool((difference <= module.weight.float().abs() * 2.0**-22).all()), name


def rewritten(tensor: Tensor, **changes: Any) -> Tensor:
    state = {**json.loads(bytes(tensor.numpy())), **changes}
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


STATE = f"{FIRST}.weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("key", "edit", "text"),
    [
        (STATE, lambda t: rewritten(t, shape=[32, 128]), r"found the shape \[32, 128\]; the model needs \[64, 64\]"),
        (STATE, lambda t: rewritten(t, blocksize=128), "blocks of 128 run over the ends of rows of 64"),
        (STATE, lambda t: rewritten(t, blocksize=32), "weight.absmax': found F32 .64.; needed"),
        (STATE, lambda t: rewritten(t, quant_type="nf3"), "found 'nf3'"),
        (STATE, lambda t: t[:-3], "not readable as JSON"),
        (f"{FIRST}.weight", lambda t: t[:-1], "needed: 2048 bytes"),
        (f"{FIRST}.weight.quant_map", lambda t: t[:15], "quant_map': found F32 .15."),
        (f"{FIRST}.weight.absmax", lambda t: t.half(), "weight.absmax': found F16"),
        (f"{FIRST}.weight.absmax", lambda t: -t, "found the scale -.*; scales from 0"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, key: str, edit: Any, text: str) -> None:
    samples.write(tmp_path, FOUR, lambda _, w: four(w))
    samples.change(tmp_path, lambda t: t.update({key: edit(t[key]).clone()}))
    samples.refused(tmp_path, (CheckpointError, UnsupportedError), text)


def test_other_orders_of_int8_are_refused(tmp_path: Path) -> None:
    samples.write(tmp_path, EIGHT, lambda _, w: eight(w))
    samples.change(tmp_path, lambda t: t[f"{FIRST}.weight_format"].fill_(2))
    samples.refused(tmp_path, UnsupportedError, "weight_format': found 2; 0, plain rows")
