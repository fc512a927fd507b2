"""Int8 (and NF4) linear layers of other installed libraries.

Each builder turns a float16 ``nn.Linear`` on the GPU into that library's layer. Versions the builders
were written for: bitsandbytes 0.50.2, torchao 0.18.0, gemlite 0.6.0.post2, humming-kernels 0.1.19.

torchao's layers are compiled, as torchao recommends: an eager call copies or converts the weight, and a CUDA
graph cannot hold the eager W8A8 layer. gemlite tunes its kernels, and torch.compile the int8 product, for every
new shape, which takes minutes without a warm cache.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Layer = Callable[[Tensor], Tensor]
Builder = Callable[[nn.Linear], Layer]

COMPILED_SHAPES = 256
"""Shapes that ``torch.compile`` keeps code for; its default of 8 is less than a benchmark measures."""


def _bitsandbytes_int8(linear: nn.Linear) -> Layer:
    import bitsandbytes as bnb

    n, k = linear.weight.shape
    layer: Any = bnb.nn.Linear8bitLt(k, n, bias=True, has_fp16_weights=False, threshold=0.0)
    # From the CPU: the move to the GPU quantizes.
    layer.load_state_dict({key: v.cpu() for key, v in linear.state_dict().items()})
    return layer.half().cuda().eval()  # type: ignore[no-any-return]


def _bitsandbytes_nf4(linear: nn.Linear) -> Layer:
    import bitsandbytes as bnb

    n, k = linear.weight.shape
    layer: Any = bnb.nn.Linear4bit(k, n, bias=True, compute_dtype=torch.float16, quant_type="nf4")
    layer.load_state_dict({key: v.cpu() for key, v in linear.state_dict().items()})
    return layer.half().cuda().eval()  # type: ignore[no-any-return]


def _torchao(config: str) -> Builder:
    def build(linear: nn.Linear) -> Layer:
        from torch import _dynamo
        from torchao import quantization

        _dynamo.config.recompile_limit = COMPILED_SHAPES
        model = nn.Sequential(copy.deepcopy(linear))
        quantization.quantize_(model, getattr(quantization, config)())
        return torch.compile(model, dynamic=False, fullgraph=True)  # type: ignore[return-value]

    return build


def _gemlite(helper: str) -> Builder:
    def build(linear: nn.Linear) -> Layer:
        from gemlite import helper as helpers

        return getattr(helpers, helper)(device="cuda:0").from_linear(copy.deepcopy(linear))  # type: ignore[no-any-return]

    return build


def _humming(activation: str) -> Builder:
    def build(linear: nn.Linear) -> Layer:
        from humming.layer import HummingLayer

        n, k = linear.weight.shape
        layer: Any = HummingLayer(
            shape_n=n,
            shape_k=k,
            weight_config={"dtype": "int8"},
            input_config={"dtype": activation},
            torch_dtype=torch.float16,
        ).cuda()
        layer.load_from_unquantized(linear.weight.detach())
        layer.transform()
        return layer  # type: ignore[no-any-return]

    return build


PEERS: dict[str, tuple[str, Builder, bool]] = {
    "bitsandbytes_int8": ("bitsandbytes", _bitsandbytes_int8, True),
    "bitsandbytes_nf4": ("bitsandbytes", _bitsandbytes_nf4, True),
    "torchao_w8a8": ("torchao", _torchao("Int8DynamicActivationInt8WeightConfig"), True),
    "torchao_w8a16": ("torchao", _torchao("Int8WeightOnlyConfig"), True),
    "gemlite_w8a8": ("gemlite", _gemlite("A8W8_int8_dynamic"), True),
    "gemlite_w8a16": ("gemlite", _gemlite("A16W8"), True),
    "humming_w8a8": ("humming", _humming("int8"), False),
    "humming_w8a16": ("humming", _humming("float16"), False),
}
"""Name → (package, builder, whether it adds the bias: Humming's is left out, in its favour)."""


def installed() -> dict[str, tuple[Builder, bool]]:
    """The peers with an installed package."""
    return {
        name: (build, bias)
        for name, (package, build, bias) in PEERS.items()
        if importlib.util.find_spec(package) is not None
    }
