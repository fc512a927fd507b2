"""W8A8 models written as compressed-tensors checkpoints, for vLLM and others; read in `compressed_tensors`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qcut.checkpoints.description import failures_name, refuse_conv1d, shards
from qcut.common.safetensors_writer import write_tensors
from qcut.common.together import replacing_together
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.embedding import Embedding
from qcut.layers.int8 import Int8Linear
from qcut.layers.linear import Linear
from qcut.layers.quantized import float_dtype
from qcut.models.modules import dtype_name, looks_linear, tensor_key
from qcut.numerics.checks import out_of_range
from qcut.schemes import W8A8

_CONFIG, _GENERATION, _INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"
_WEIGHTS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "channel",
    "group_size": None,
    "dynamic": False,
    "observer": "memoryless_minmax",
}
_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "group_size": None, "dynamic": True}

Reading = tuple[int, Callable[[], Tensor]]
"""Bytes of a tensor, and what makes it."""


def save_compressed_tensors(model: nn.Module, directory: str | Path, *, max_shard_bytes: int = 4 << 30) -> None:
    """Write a W8A8 model as a compressed-tensors checkpoint, which vLLM and others read.

    It is ``int-quantized``: int8 weights with a scale for each output channel, tokens quantized as they come. The
    directory gets ``model.safetensors`` (or several files and their index), ``config.json`` with a
    ``quantization_config``, and ``generation_config.json``. Layers in float go in float, and are named under
    ``ignore``. Activations that qcut fused into layers are not written: the model's class has them. All files are put
    in force together.

    Args:
        model: of a class of transformers, at least one layer of it ``w8a8``.
        directory: created if missing. Other files, a tokenizer's for example, are left alone.
        max_shard_bytes: a file takes tensors until it holds this much.

    Raises:
        UnsupportedError: a layer of another scheme (named), in place of transformers' ``Conv1D``, or a quantized
            embedding; no layer of ``w8a8``; or a model of another class.
        CheckpointError: weights of another checkpoint are in the directory, a tensor is on the meta device or holds NaN
            or Inf, or the directory cannot be written.

    Exactness: weights and scales bit by bit; `qcut.load` gives back the same logits.

    Source: docs/foreign-checkpoints.md.
    """
    directory = Path(directory)
    if not type(model).__module__.startswith("transformers.models."):
        raise UnsupportedError(
            f"{type(model).__name__} is no class of transformers; the format is read only into those"
        )
    layers = _layers(model)
    tensors = dict(_tensors(model))
    files_of = list(shards({name: size for name, (size, _) in tensors.items()}, max_shard_bytes))
    count = len(files_of)
    names = [
        f"model-{i:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors" for i in range(1, count + 1)
    ]
    texts = _texts(model, layers)
    if count > 1:
        places = {tensor: file for file, shard in zip(names, files_of, strict=True) for tensor in shard}
        total = sum(size for size, _ in tensors.values())
        texts[_INDEX] = {"metadata": {"total_size": total}, "weight_map": places}
    _refuse_others(directory, {*names, *texts})
    with failures_name(directory), replacing_together(directory, (*names, *texts), _CONFIG, CheckpointError) as files:
        for file, shard in zip(files[:count], files_of, strict=True):
            write_tensors(file, {name: tensors[name][1]().detach().cpu().contiguous() for name in shard})
        for file, data in zip(files[count:], texts.values(), strict=True):
            file.write(json.dumps(data, indent=2).encode())


def _layers(model: nn.Module) -> dict[str, Int8Linear]:
    layers: dict[str, Int8Linear] = {}
    for name, module in model.named_modules():
        if isinstance(module, Embedding):
            raise UnsupportedError(f"{name!r}: a quantized embedding; the format is written only with floating ones")
        if not isinstance(module, Linear):
            continue
        if module.scheme != W8A8() or not isinstance(module, Int8Linear):
            raise UnsupportedError(f"layer {name!r} is {module.scheme.name}; only w8a8 is written in this format")
        layers[name] = module
    if not layers:
        raise UnsupportedError(f"{type(model).__name__}: no layer is w8a8; quantize the model first")
    refuse_conv1d(model, layers, "the format has only nn.Linear")
    return layers


def _tensors(model: nn.Module) -> Iterator[tuple[str, Reading]]:
    """Every tensor once by its first name: those of layers as the format has them, parameters, saved buffers."""
    seen: set[tuple[Any, ...]] = set()
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        if isinstance(module, Int8Linear):
            yield f"{start}weight", (module.out_features * module.in_features, partial(getattr, module, "codes"))
            yield f"{start}weight_scale", (4 * module.out_features, partial(_scale, module))
            if module.bias is not None:
                bias = _bias(module)
                yield f"{start}bias", (bias.nbytes, bias.detach)
            continue
        held: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
        for key, tensor in held.items():
            if tensor is None or key in module._non_persistent_buffers_set or tensor_key(tensor) in seen:
                continue
            seen.add(tensor_key(tensor))
            if tensor.is_meta:
                raise CheckpointError(f"{start}{key}: the tensor is on the meta device and has no values to save")
            if tensor.is_floating_point() and (found := out_of_range(tensor.detach())):
                raise CheckpointError(f"{start}{key}: found {found}; finite values can be saved")
            yield f"{start}{key}", (tensor.nbytes, tensor.detach)


def _scale(layer: Int8Linear) -> Tensor:
    return layer.weight_scale[:, None]


def _bias(layer: Int8Linear) -> Tensor:
    """The bias in the float weight's dtype, where that holds it."""
    assert layer.bias is not None
    short = layer.bias.to(layer.weight_dtype)
    return short if torch.equal(short.to(layer.bias.dtype), layer.bias) else layer.bias


def _texts(model: nn.Module, layers: dict[str, Int8Linear]) -> dict[str, Any]:
    config: Any = model.config
    described = json.loads(config.to_json_string(use_diff=False))
    floats = float_dtype(model)
    floating = [name for name, module in model.named_modules() if looks_linear(module) and name not in layers]
    described |= {
        "architectures": [type(model).__name__],
        "dtype": dtype_name(floats),
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "ignore": floating,
            "config_groups": {
                "group_0": {
                    "format": "int-quantized",
                    "targets": ["Linear"],
                    "weights": _WEIGHTS,
                    "input_activations": _TOKENS,
                    "output_activations": None,
                }
            },
        },
    }
    texts = {_CONFIG: described}
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        texts[_GENERATION] = json.loads(generation.to_json_string())
    return texts


def _refuse_others(directory: Path, own: set[str]) -> None:
    """Refuse a directory with weights of another checkpoint: readers would take them too, or in their place."""
    others = [*directory.glob("*.safetensors"), *directory.glob("qcut_config.json"), *directory.glob(_INDEX)]
    if foreign := sorted(path.name for path in others if path.name not in own):
        raise CheckpointError(f"{directory}: found {foreign[0]!r} of another checkpoint; give another directory")
