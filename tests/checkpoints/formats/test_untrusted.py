"""Configurations and tensors of other libraries with values that nobody expects: qcut's own errors, or a layer."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from qcut.checkpoints.formats.reader import format_of, layer_of
from qcut.errors import CheckpointError, UnsupportedError
from tests.checkpoints.formats import samples

VALUES: list[Any] = [None, True, -1, 0, 3, 10**12, 2.5, "", "x", [], ["re:["], {}, {"num_bits": 4}, [[]]]
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq", "pack_dtype": "int32"},
    "awq": {"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "bitsandbytes": {"load_in_4bit": True, "load_in_8bit": False, "llm_int8_threshold": 6.0},
    "compressed-tensors": {
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "config_groups": {"a": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
    },
}


def places(data: Any) -> Iterator[tuple[Any, ...]]:
    """Ways to every value within."""
    for key, value in data.items() if isinstance(data, dict) else ():
        yield (key,)
        yield from ((key, *rest) for rest in places(value))


@pytest.mark.parametrize("method", CONFIGS)
def test_configurations(method: str) -> None:
    format_of(CONFIGS[method], "c", method)
    for way in places(CONFIGS[method]):
        for value in VALUES:
            config = copy.deepcopy(CONFIGS[method])
            at = config
            for key in way[:-1]:
                at = at[key]
            at[way[-1]] = value
            with contextlib.suppress(CheckpointError, UnsupportedError):
                format_of(config, "c", method)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_tensors(method: str) -> None:
    form = format_of(CONFIGS[method], "c", method)
    weight = torch.randn(64, 64)
    packed, _ = samples.gptq(weight, size=32) if method == "gptq" else samples.awq(weight, 32)
    layer_of(form, "l", packed, 64, 64)
    for key, tensor in packed.items():
        others = [
            tensor[:1],
            tensor[None],
            tensor.flatten(),
            tensor[..., :0],
            torch.tensor(1.0),
            tensor.t().contiguous(),
        ]
        others += [tensor.to(dtype) for dtype in (torch.float64, torch.int8, torch.bool, torch.complex64, torch.uint16)]
        for other in others:
            if other.shape == tensor.shape and other.dtype == tensor.dtype:
                continue
            with pytest.raises(CheckpointError, match=f"tensors: tensor 'l.{key}': found"):
                layer_of(form, "l", {**packed, key: other}, 64, 64)
        with contextlib.suppress(CheckpointError, UnsupportedError):
            layer_of(form, "l", {**packed, key: torch.full_like(tensor, -1)}, 64, 64)
