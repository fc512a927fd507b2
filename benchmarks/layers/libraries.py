"""Linear layers of other libraries, made of a float16 ``nn.Linear`` on the GPU; `benchmarks.layers.peers` times them.

Versions they were written for: bitsandbytes 0.50.2, torchao 0.18.0, gemlite 0.6.0.post2, humming-kernels 0.1.19,
exllamav3 1.6.5, and the operators of vLLM 0.26: Marlin, Machete, and CUTLASS products of int8 and e4m3.

Weights of 4 bits have a scale for 128 columns, except bitsandbytes' (64) and exllamav3's, which are a trellis.
torchao's layers are compiled, as torchao recommends, with its settings of torch.compile. gemlite takes its own table of
tiles for the H100, the chip of an H200 too, and tunes the sizes that the table lacks.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as product

from benchmarks.layers import float8
from qcut.numerics.float8 import quantize_tokens_ref
from qcut.numerics.int8 import quantize_weight

Layer = Callable[[Tensor], Tensor]
GROUP = 128
"""Columns of a scale, of weights of 4 bits."""
COMPILED_SHAPES = 256
"""Shapes that ``torch.compile`` keeps code for; its default of 8 is less than a benchmark measures."""


class Kind(NamedTuple):
    """Weights, tokens and what both lose.

    Attributes:
        bits: of a stored weight.
        product_bits: of the operands of the tensor cores.
        tolerance: largest relative error of a whole result in float64, next to the float weight.
    """

    bits: int
    product_bits: int
    tolerance: float


# Of Gaussian data the largest of K values is about 4.5 standard deviations: a step of int8 is 4.5 / 127 of one, and its
# rounding error 1.0 % on each side. The largest of 128 is 2.8: a step of 4 bits is 2.8 / 7, and its error 11 %.
W8A8, W8A16, FP8 = Kind(8, 8, 0.03), Kind(8, 16, 0.03), Kind(8, 8, float8.TOLERANCE)
W4A16, W4A8 = Kind(4, 16, 0.15), Kind(4, 8, 0.15)
TRELLIS = Kind(4, 16, 0.03)
"""Next to the weight that the layer itself decodes; a single token is rounded to int8."""


@dataclass(frozen=True)
class Peer:
    """A layer of another library.

    Attributes:
        library: the name that tables give it.
        package: that Python imports.
        distribution: that has a version.
        kind: of its weights and products.
        build: makes the layer of a float16 ``nn.Linear``.
        dtype: of tokens and results.
        prepares: whether a first call compiles or tunes for seconds.
        weight: the float weight ``[N, K]`` that a layer decodes; None: the layer's error is that of quantization.
    """

    library: str
    package: str
    distribution: str
    kind: Kind
    build: Callable[[nn.Linear], Layer]
    dtype: torch.dtype = torch.float16
    prepares: bool = False
    weight: Callable[[Any], Tensor] | None = None

    def is_installed(self) -> bool:
        """Whether Python finds the package; it is not imported."""
        return importlib.util.find_spec(self.package) is not None

    def version(self) -> str:
        """The version of the installed distribution; "unknown" without its metadata."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"


def rounded4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """4-bit integers around 8, each to the nearest, and a scale for `GROUP` columns.

    Args:
        weight: ``[N, K]``, K a multiple of `GROUP`.

    Returns:
        uint8 ``[N, K]`` of 1 to 15, and float16 ``[N, K / GROUP]``.
    """
    n, k = weight.shape
    groups = weight.float().view(n, k // GROUP, GROUP)
    scale = (groups.abs().amax(2, keepdim=True) / 7).half()
    codes = (groups / scale.float()).round().clamp(-7, 7) + 8
    return codes.view(n, k).to(torch.uint8), scale.view(n, k // GROUP)


def packed4(codes: Tensor) -> Tensor:
    """int32 ``[K / 8, N]`` of codes uint8 ``[N, K]``: of eight columns the first is in the lowest bits."""
    n, k = codes.shape
    columns = codes.t().reshape(k // 8, 8, n).to(torch.int32)
    words = torch.zeros(k // 8, n, dtype=torch.int32, device=codes.device)
    for i in range(8):
        words |= columns[:, i] << 4 * i
    return words


# ── bitsandbytes ─────────────────────────────────────────────────────────────────────────────────


def _bitsandbytes(kind: str, **options: Any) -> Callable[[nn.Linear], Layer]:
    def build(linear: nn.Linear) -> Layer:
        from bitsandbytes import nn as layers

        n, k = linear.weight.shape
        layer: Any = getattr(layers, kind)(k, n, bias=linear.bias is not None, **options)
        # From the CPU: the move to the GPU quantizes.
        layer.load_state_dict({key: v.cpu() for key, v in linear.state_dict().items()})
        return layer.half().cuda().eval()

    return build


# ── torchao ──────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _compiled() -> Callable[[Tensor, Tensor], Tensor]:
    """One function for all copies of a weight, which are an argument: code is compiled once for each kind and size."""
    from torch import _dynamo

    _dynamo.config.recompile_limit = COMPILED_SHAPES
    _dynamo.config.automatic_dynamic_shapes = False  # else a second size makes code for any size of a weight
    return torch.compile(lambda x, weight: product(x, weight), fullgraph=True)


def _torchao(config: str, dtype: torch.dtype = torch.float16, **options: str | int) -> Callable[[nn.Linear], Layer]:
    def build(linear: nn.Linear) -> Layer:
        from torch import _dynamo
        from torchao import quantization

        made = {name: getattr(quantization, given)() if given == "PerRow" else given for name, given in options.items()}
        model = nn.Sequential(copy.deepcopy(linear).to(dtype))
        quantization.quantize_(model, getattr(quantization, config)(**made))
        weight: Any = model[0].weight

        def call(x: Tensor) -> Tensor:
            if len(x) > 1:  # code for any number of tokens
                _dynamo.maybe_mark_dynamic(x, 0)
            return _compiled()(x, weight)

        return call

    return build


_TINYGEMM: dict[str, str | int] = {"group_size": GROUP, "int4_packing_format": "tile_packed_to_4d"}
"""torch's own kernel of 4-bit integers; other formats of torchao need another package."""
_ROWS: dict[str, str | int] = {"granularity": "PerRow"}


# ── gemlite ──────────────────────────────────────────────────────────────────────────────────────

TUNED = "QCUT_BENCHMARK_TILES"
"""Environment variable: a folder of JSON files with tiles that gemlite has tuned."""


@functools.cache
def _gemlite_helpers() -> Any:
    import gemlite
    from gemlite import helper

    table = Path(gemlite.__file__).parent / "configs" / "h100.json"
    if "H200" in torch.cuda.get_device_name():
        gemlite.load_config(str(table))
    for path in sorted(Path(os.environ[TUNED]).glob("*.json")) if TUNED in os.environ else ():
        gemlite.load_config(str(path))
    return helper


def keep_tiles(name: str) -> None:
    """Write the tiles that gemlite has tuned in this process to a file of the folder that `TUNED` names."""
    if TUNED in os.environ:
        import gemlite

        gemlite.cache_config(str(Path(os.environ[TUNED]) / f"{name}.json"))


def _gemlite(helper: str) -> Callable[[nn.Linear], Layer]:
    def build(linear: nn.Linear) -> Layer:
        return getattr(_gemlite_helpers(), helper)(device="cuda:0").from_linear(copy.deepcopy(linear))

    return build


def _gemlite_w4a16(linear: nn.Linear) -> Layer:
    codes, scale = rounded4(linear.weight.detach())
    zeros = torch.full_like(scale, 8)
    return _gemlite_helpers().A16W4_HQQ_INT(device="cuda:0").from_weights(codes, scale, zeros)


# ── Humming ──────────────────────────────────────────────────────────────────────────────────────


def _humming(weight: dict[str, Any], activation: str) -> Callable[[nn.Linear], Layer]:
    def build(linear: nn.Linear) -> Layer:
        from humming.layer import HummingLayer

        n, k = linear.weight.shape
        layer: Any = HummingLayer(
            shape_n=n,
            shape_k=k,
            weight_config=dict(weight),
            input_config={"dtype": activation},
            torch_dtype=torch.float16,
        ).cuda()
        layer.load_from_unquantized(linear.weight.detach())
        layer.transform()
        return layer

    return build


# ── exllamav3 ────────────────────────────────────────────────────────────────────────────────────


class _Trellis:
    """A layer with random bits of a trellis: fitting them to a weight takes seconds, and their values no time."""

    def __init__(self, linear: nn.Linear) -> None:
        os.environ.setdefault("EXL3_EXPANDABLE_SEGMENTS", "0")  # else it changes torch's allocator for all
        from exllamav3.modules.quant.exl3 import LinearEXL3

        n, k = linear.weight.shape

        def signs(size: int) -> Tensor:
            return torch.randint(0, 2, (size,), device="cuda").half() * 2 - 1

        bits = torch.randint(-(2**15), 2**15, (k // 16, n // 16, 16 * 4), dtype=torch.int16, device="cuda")
        codebook = torch.tensor(0, dtype=torch.int32, device="cuda")  # its presence selects the default codebook
        self._layer: Any = LinearEXL3(None, k, n, suh=signs(k) * k**-0.5, svh=signs(n), trellis=bits, mul1=codebook)

    def dequantized(self) -> Tensor:
        """``[N, K]``."""
        return self._layer.get_weight_tensor().t()

    def __call__(self, x: Tensor) -> Tensor:
        return self._layer.forward(x, {})


# ── vLLM ─────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _vllm_ops() -> tuple[Any, int]:
    """vLLM's operators, and its number for 4-bit integers around 8: the library and one module, no more of vLLM."""
    from vllm.scalar_type import scalar_types

    importlib.import_module("vllm._C_stable_libtorch")
    return torch.ops._C, scalar_types.uint4b8.id


def _marlin(linear: nn.Linear) -> Layer:
    ops, kind = _vllm_ops()
    n, k = linear.weight.shape
    codes, scale = rounded4(linear.weight.detach())
    empty = torch.empty(0, dtype=torch.int32, device="cuda")
    weight = ops.gptq_marlin_repack(packed4(codes), empty, k, n, 4, False)
    order = [i + 8 * j for i in range(8) for j in range(8)]
    scales = scale.t().reshape(-1, 64)[:, order].reshape(k // GROUP, n).contiguous()
    workspace = torch.zeros(torch.cuda.get_device_properties(0).multi_processor_count, dtype=torch.int32, device="cuda")
    none = (None,) * 5

    def call(x: Tensor) -> Tensor:
        shape = (len(x), n, k)
        return ops.marlin_gemm(x, None, weight, None, scales, *none, workspace, kind, *shape, True, False, True, False)

    return call


def _machete(linear: nn.Linear) -> Layer:
    ops, kind = _vllm_ops()
    codes, scale = rounded4(linear.weight.detach())
    weight = ops.machete_prepack_B(packed4(codes).t().contiguous().t(), torch.float16, kind, torch.float16)
    scales = scale.t().contiguous()

    def call(x: Tensor) -> Tensor:
        return ops.machete_mm(x, weight, kind, None, scales, None, GROUP, None, None, None)

    return call


def _vllm_8_bits(dtype: torch.dtype) -> Callable[[nn.Linear], Layer]:
    def build(linear: nn.Linear) -> Layer:
        ops, _ = _vllm_ops()
        weight = linear.weight.detach()
        if dtype is torch.int8:
            codes, rows = quantize_weight(weight)
            quantize = ops.dynamic_scaled_int8_quant
        else:
            codes, rows = quantize_tokens_ref(weight, weight.shape[1])
            quantize = ops.dynamic_per_token_scaled_fp8_quant
        scale = rows[:, None].contiguous()

        def call(x: Tensor) -> Tensor:
            tokens = torch.empty_like(x, dtype=dtype)
            token_scale = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
            quantize(tokens, x, token_scale, None)
            y = torch.empty(len(x), len(codes), dtype=x.dtype, device=x.device)
            ops.cutlass_scaled_mm(y, tokens, codes.t(), token_scale, scale, None)
            return y

        return call

    return build


_BITSANDBYTES, _TORCHAO, _GEMLITE = ((name,) * 3 for name in ("bitsandbytes", "torchao", "gemlite"))
_HUMMING = ("Humming", "humming", "humming-kernels")
_HUMMING_INT4 = {"dtype": "int4", "group_size": GROUP}
_BF16 = torch.bfloat16

PEERS = {
    "bitsandbytes_int8": Peer(
        *_BITSANDBYTES, W8A8, _bitsandbytes("Linear8bitLt", has_fp16_weights=False, threshold=0.0)
    ),
    "bitsandbytes_nf4": Peer(
        *_BITSANDBYTES, W4A16, _bitsandbytes("Linear4bit", compute_dtype=torch.float16, quant_type="nf4")
    ),
    "torchao_w8a8": Peer(*_TORCHAO, W8A8, _torchao("Int8DynamicActivationInt8WeightConfig"), prepares=True),
    "torchao_w8a16": Peer(*_TORCHAO, W8A16, _torchao("Int8WeightOnlyConfig"), prepares=True),
    "torchao_w4a16": Peer(*_TORCHAO, W4A16, _torchao("Int4WeightOnlyConfig", _BF16, **_TINYGEMM), _BF16, prepares=True),
    "torchao_fp8": Peer(
        *_TORCHAO, FP8, _torchao("Float8DynamicActivationFloat8WeightConfig", _BF16, **_ROWS), _BF16, prepares=True
    ),
    "gemlite_w8a8": Peer(*_GEMLITE, W8A8, _gemlite("A8W8_int8_dynamic"), prepares=True),
    "gemlite_w8a16": Peer(*_GEMLITE, W8A16, _gemlite("A16W8"), prepares=True),
    "gemlite_w4a16": Peer(*_GEMLITE, W4A16, _gemlite_w4a16, prepares=True),
    "gemlite_fp8": Peer(*_GEMLITE, FP8, _gemlite("A8W8_fp8_dynamic"), prepares=True),
    "humming_w8a8": Peer(*_HUMMING, W8A8, _humming({"dtype": "int8"}, "int8"), prepares=True),
    "humming_w8a16": Peer(*_HUMMING, W8A16, _humming({"dtype": "int8"}, "float16"), prepares=True),
    "humming_w4a16": Peer(*_HUMMING, W4A16, _humming(_HUMMING_INT4, "float16"), prepares=True),
    "humming_w4a8": Peer(*_HUMMING, W4A8, _humming(_HUMMING_INT4, "int8"), prepares=True),
    "exllamav3_4bit": Peer(*("exllamav3",) * 3, TRELLIS, _Trellis, weight=_Trellis.dequantized),
    "vllm_marlin": Peer("Marlin", "vllm", "vllm", W4A16, _marlin, prepares=True),
    "vllm_machete": Peer("Machete", "vllm", "vllm", W4A16, _machete),
    "vllm_w8a8": Peer("vLLM", "vllm", "vllm", W8A8, _vllm_8_bits(torch.int8)),
    "vllm_fp8": Peer("vLLM", "vllm", "vllm", FP8, _vllm_8_bits(torch.float8_e4m3fn)),
    "torch_fp8": Peer(*("torch",) * 3, FP8, float8.TorchFloat8, _BF16, weight=float8.TorchFloat8.dequantized_weight),
}
"""Name of a method to the layer that it measures."""
