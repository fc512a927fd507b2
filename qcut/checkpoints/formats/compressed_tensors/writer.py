"""Quantized models written as compressed-tensors checkpoints, for vLLM and others; read in `compressed_tensors`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qcut.checkpoints.description import failures_name, passing_buffers, refuse_conv1d, shards, stored_tensors
from qcut.checkpoints.expert_tensors import hub_names, stored_pieces
from qcut.checkpoints.formats.compressed_tensors.written import SERVED, Stored, Written, written_as
from qcut.checkpoints.formats.experts.names import ExpertNames
from qcut.common.progress import progress_bar
from qcut.common.safetensors_writer import write_tensors
from qcut.common.together import replacing_together
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.embedding import Embedding
from qcut.layers.experts.experts import Experts
from qcut.layers.experts.linear_stack import LinearStack
from qcut.layers.linear import Linear
from qcut.layers.quantized import QuantizedLayer, StateEntry, float_dtype
from qcut.models.modules import ExpertsModule, dtype_name
from qcut.numerics.checks import out_of_range

_CONFIG, _GENERATION, _INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"


def save_compressed_tensors(
    model: nn.Module, directory: str | Path, *, max_shard_bytes: int = 4 << 30, progress: bool = False
) -> None:
    """Write a quantized model as a compressed-tensors checkpoint, which vLLM and others read.

    Layers of ``w8a8`` are written as ``int-quantized``, those of ``fp8``, ``fp8_dynamic`` and ``fp8_static`` as
    ``float-quantized``, those of ``w8a16`` and ``int4`` as ``pack-quantized`` integers of 8 and 4 bits, and those of
    ``mxfp4`` and ``nvfp4`` as ``mxfp4-pack-quantized`` and ``nvfp4-pack-quantized``; a model may have several of them.
    Experts of a mixture are written one by one, under the names that checkpoints of the family have. The directory gets
    ``model.safetensors`` (or several files and their index), ``config.json`` with a ``quantization_config``, and
    ``generation_config.json``. Layers in float go in float, and are named under ``ignore``. Activations that qcut fused
    into layers are not written: the model's class has them. All files are put in force together.

    Args:
        model: of a class of transformers, at least one layer of it quantized.
        directory: created if missing. Other files, a tokenizer's for example, stay as they are.
        max_shard_bytes: a file takes tensors until it holds this much.
        progress: show a progress bar.

    Raises:
        UnsupportedError: a layer of another scheme, in place of transformers' ``Conv1D``, with groups that do not
            divide its columns, or of ``nvfp4`` with scales of rows that have no common float32 inverse (named); a
            quantized embedding; experts in float, or of a family that has no layer for each expert in its checkpoints;
            no quantized layer; or a model of another class.
        CheckpointError: weights of another checkpoint are in the directory, a tensor is on the meta device or holds NaN
            or Inf, or the directory cannot be written.

    Exactness: integers, floats and scales bit by bit; `qcut.load` gives back the same logits, except that it reads
    experts of ``fp8_dynamic`` and ``fp8_static`` as ``fp8``, where tokens keep 16 bits.

    Source: docs/foreign-checkpoints.md.
    """
    directory = Path(directory)
    if not type(model).__module__.startswith("transformers.models."):
        raise UnsupportedError(
            f"{type(model).__name__} is no class of transformers; the format is read only into those"
        )
    found = _contents(model, str(directory))
    if not found.layers:
        raise UnsupportedError(f"{type(model).__name__}: no layer is quantized; {SERVED} in this format")
    files_of = list(shards({name: entry.nbytes for name, entry in found.tensors.items()}, max_shard_bytes))
    count = len(files_of)
    names = [
        f"model-{i:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors" for i in range(1, count + 1)
    ]
    texts = _texts(model, found)
    if count > 1:
        places = {tensor: file for file, shard in zip(names, files_of, strict=True) for tensor in shard}
        total = sum(entry.nbytes for entry in found.tensors.values())
        texts[_INDEX] = {"metadata": {"total_size": total}, "weight_map": places}
    _refuse_others(directory, {*names, *texts})
    with (
        failures_name(directory),
        replacing_together(directory, (*names, *texts), _CONFIG, CheckpointError) as files,
        progress_bar(len(found.tensors), "save", "tensor", shown=progress) as advance,
    ):
        for file, shard in zip(files[:count], files_of, strict=True):
            write_tensors(file, {name: found.tensors[name].read().detach().cpu().contiguous() for name in shard})
            advance(len(shard))
        for file, data in zip(files[count:], texts.values(), strict=True):
            file.write(json.dumps(data, indent=2).encode())


@dataclass
class _Contents:
    """What is written of a model.

    Attributes:
        tensors: by the names of files.
        layers: how each quantized layer is written.
        floating: names of modules with a weight in float that other readers may take for a linear layer's.
    """

    tensors: dict[str, StateEntry] = field(default_factory=dict)
    layers: dict[str, Written] = field(default_factory=dict)
    floating: list[str] = field(default_factory=list)

    def add_layer(self, name: str, like: Linear, stored: Stored) -> None:
        """Add a layer with these tensors; ``like`` has its scheme and sizes."""
        n, k = next(iter(stored.values())).shape[0], like.in_features
        written = self.layers[name] = written_as(like.scheme, k, name)
        try:
            tensors = written.tensors(stored, n, k)
        except UnsupportedError as error:
            raise UnsupportedError(f"layer {name!r}: {error}") from None
        self.tensors |= {f"{name}.{key}": entry for key, entry in tensors.items()}
        if "bias" in stored:
            self.tensors[f"{name}.bias"] = StateEntry.of(_short(stored["bias"].read(), like.weight_dtype))


def _contents(model: nn.Module, where: str) -> _Contents:
    """Every tensor once by its first name: those of layers as the format has them, parameters, saved buffers."""
    found, names, modules = _Contents(), ExpertNames(model, where), dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, Embedding):
            raise UnsupportedError(f"{name!r}: a quantized embedding; the format is written only with floating ones")
        if isinstance(module, ExpertsModule):
            _add_experts(found, module, name, model, names)
        elif isinstance(module, Linear):
            found.add_layer(names.stored(name), module, module.stored())
        elif isinstance(module, QuantizedLayer) and not isinstance(module, LinearStack):
            raise UnsupportedError(f"layer {name!r} is a {type(module).__name__}; only {SERVED} in this format")
        elif _looks_linear(module):
            found.floating.append(names.stored(name))
    quantized = [name for name, module in modules.items() if isinstance(module, Linear)]
    refuse_conv1d(model, quantized, "the format has only nn.Linear")
    passing = passing_buffers(model)
    for name, entry in stored_tensors(model)[0].items():
        owner = name.rpartition(".")[0]
        if name in passing or isinstance(modules.get(owner), QuantizedLayer):
            continue
        if names.is_merged(name):
            raise UnsupportedError(f"experts {owner!r} are in float; quantize them, too, to write them")
        if problem := out_of_range(entry.read().detach()):
            raise CheckpointError(f"{name}: found {problem}; finite values can be saved")
        found.tensors[names.stored(name)] = entry
    return found


def _add_experts(found: _Contents, experts: ExpertsModule, name: str, model: nn.Module, names: ExpertNames) -> None:
    """Add every expert's layers."""
    stacks = {part: module for part, module in experts.named_children() if isinstance(module, LinearStack)}
    plain = isinstance(experts, Experts) and not experts.identities and experts.post_expert_norm is None
    if not plain or len(stacks) < 2:
        raise UnsupportedError(
            f"experts {name!r} are not all quantized, or do more than their layers; {SERVED} in this format"
        )
    for part, pieces in hub_names(model, experts.gating.gated).items():
        if names.place(f"{name}.0.{pieces[0]}.weight") is None:
            raise UnsupportedError(
                f"experts {name!r}: checkpoints of {type(model).__name__} have no layer for each expert; other "
                "mixtures are written in this format"
            )
        for label, stored in stored_pieces(stacks[part], pieces):
            found.add_layer(names.stored(f"{name}.{label}"), stacks[part].form, stored)


def _looks_linear(module: nn.Module) -> bool:
    """Whether a module has a matrix that multiplies tokens, a router's among them."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def _short(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias in the float weight's dtype, if that dtype holds it."""
    short = bias.to(dtype)
    return short if torch.equal(short.to(bias.dtype), bias) else bias


def _groups(layers: dict[str, Written]) -> dict[str, Any]:
    """The groups of a ``quantization_config``: the largest has all linear layers that no other names."""
    by_kind: dict[Written, list[str]] = {}
    for name, written in layers.items():
        by_kind.setdefault(written, []).append(name)
    first, *others = sorted(by_kind, key=lambda kind: -len(by_kind[kind]))
    targets = {first: ["Linear"], **{kind: by_kind[kind] for kind in others}}
    return {f"group_{i}": kind.group(found) for i, (kind, found) in enumerate(targets.items())}


def _texts(model: nn.Module, found: _Contents) -> dict[str, Any]:
    config: Any = model.config
    described = json.loads(config.to_json_string(use_diff=False))
    groups = _groups(found.layers)
    formats = {group["format"] for group in groups.values()}
    described |= {
        "architectures": [type(model).__name__],
        "dtype": dtype_name(float_dtype(model)),
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "ignore": found.floating,
            "config_groups": groups,
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
