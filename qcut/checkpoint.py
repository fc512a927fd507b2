"""Quantized models on disk: safetensors and ``qcut_config.json``, nothing that can execute."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qcut.config import scheme_from_json
from qcut.errors import CheckpointError, QcutError
from qcut.files import TensorFiles, open_tensors, plain_name, read_json, write_json
from qcut.linear import Linear
from qcut.modules import FusedActivation, is_linear, tensor_key, weight_nk

CONFIG_NAME = "qcut_config.json"
_FORMAT, _VERSION = "qcut", 1


def save(model: nn.Module, directory: str | Path, *, max_shard_bytes: int = 4 << 30, progress: bool = False) -> None:
    """Write a model, quantized or partly so, to a directory.

    The directory gets ``model-*.safetensors`` (several where the tensors exceed ``max_shard_bytes``; every parameter
    and buffer, also those outside the state dict; tied ones once) and ``qcut_config.json``: which layers are
    `qcut.Linear` with their schemes, which tensors are tied, which file holds what, and for a Hugging Face model its
    class and configuration. Such a model's ``config.json`` and ``generation_config.json`` are written too, for
    tokenizers and people. Other files, a tokenizer's for example, are left alone.

    Saving over an earlier checkpoint is safe: the new files have new names, and the rename of ``qcut_config.json``
    puts them in force all at once. Only then are the old ones deleted (`qcut.files`).

    Args:
        model: the model.
        directory: created if missing.
        max_shard_bytes: a file takes tensors until it holds this much.
        progress: show a progress bar.

    Raises:
        CheckpointError: the directory cannot be written, or a tensor is on the meta device.
    """
    directory = Path(directory)
    tensors, tied = _tensors(model)
    try:
        files = TensorFiles(directory, "model", CONFIG_NAME)
        try:
            weight_map: dict[str, str] = {}
            shard: dict[str, Tensor] = {}
            with tqdm(total=len(tensors), desc="save", unit="tensor", disable=not progress, leave=False) as bar:
                for names in _shards(tensors, max_shard_bytes):
                    shard = {name: tensors[name].detach().cpu().contiguous() for name in names}
                    weight_map |= dict.fromkeys(names, files.add(shard))
                    bar.update(len(names))
            huggingface = _huggingface(model)
            for key in ("config", "generation_config"):
                if huggingface.get(key) is not None:
                    write_json(directory / f"{key}.json", huggingface[key])
            files.commit(
                {
                    "format": _FORMAT,
                    "version": _VERSION,
                    "model_class": type(model).__name__,
                    "huggingface": huggingface or None,
                    "layers": {name: _describe(m) for name, m in model.named_modules() if isinstance(m, Linear)},
                    "fused": {n: m.activation for n, m in model.named_modules() if isinstance(m, FusedActivation)},
                    "tied": tied,
                    "weight_map": weight_map,
                }
            )
        except BaseException:
            files.abandon()
            raise
    except (OSError, ValueError, TypeError) as exc:
        raise CheckpointError(f"{directory}: cannot be written: {exc}") from exc


def _tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every parameter and buffer once, and the names of tied ones with the name they are stored under."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in _named_tensors(model):
        if tensor.is_meta:
            raise CheckpointError(f"{name}: the tensor is on the meta device and has no values to save")
        owner = seen.setdefault(tensor_key(tensor), name)
        if owner == name:
            tensors[name] = tensor
        else:
            tied[name] = owner
    return tensors, tied


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _shards(tensors: dict[str, Tensor], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def _describe(layer: Linear) -> dict[str, Any]:
    return {
        "scheme": layer.scheme.to_json(),
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "bias": layer.bias is not None,
        "activation": layer.activation,
    }


def _huggingface(model: nn.Module) -> dict[str, Any]:
    """Class and configuration of a model whose class transformers itself defines."""
    if not type(model).__module__.startswith("transformers.models."):
        return {}
    config: Any = model.config
    found = {"class": type(model).__name__, "config": json.loads(config.to_json_string(use_diff=False))}
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        found["generation_config"] = json.loads(generation.to_json_string())
    return found


def load(
    directory: str | Path,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: bool = True,
) -> nn.Module:
    """Read what `save` wrote and return the model, ready to run, in evaluation mode.

    The model is built on the meta device, without memory; its quantized layers are put in; names, shapes and dtypes
    of all tensors are checked against the files' headers; then tensors are read one at a time. At no moment does a
    second copy of the model, or a full-precision one, exist. No code of the checkpoint is run, and no pickle read.

    Args:
        directory: the checkpoint.
        model: for models that are not of a class in transformers: a function that builds the model (called on the
            meta device), or the model itself, which is filled and returned; what it holds is dropped.
        device: where the tensors shall be.
        dtype: what floating parameters are cast to; None keeps what was saved. Scales and biases of quantized layers
            are float32 always, buffers keep their dtype.
        progress: show a progress bar.

    Raises:
        CheckpointError: a file is missing, truncated or foreign; a tensor is missing, superfluous, or of a wrong shape
            or dtype (named); or the model cannot be built without ``model``. A model passed in is then incomplete
            only if reading fails after all checks have passed.
    """
    directory = Path(directory)
    path = directory / CONFIG_NAME
    data = read_json(path, CheckpointError)
    if data.get("format") != _FORMAT or data.get("version") != _VERSION:
        raise CheckpointError(
            f"{path}: found format {data.get('format')!r} version {data.get('version')!r}; "
            f"{_FORMAT!r} version {_VERSION} is needed"
        )
    layers, fused, tied, weight_map = (_mapping(data, key, path) for key in ("layers", "fused", "tied", "weight_map"))
    if not all(isinstance(value, str) for value in (*fused.values(), *tied.values(), *weight_map.values())):
        raise CheckpointError(f"{path}: 'fused', 'tied' and 'weight_map' hold names; something else was found")
    if not isinstance(model, nn.Module):
        with torch.device("meta"):
            model = _from_huggingface(data, path) if model is None else model()
    replacements = {name: _empty_layer(name, spec, model, path) for name, spec in layers.items()}
    activations = {name: _activation_parent(name, model, path) for name in fused}
    readers = {
        name: open_tensors(directory / plain_name(name, path, CheckpointError), CheckpointError)
        for name in sorted(set(weight_map.values()))
    }
    headers = _headers(readers, weight_map, path)
    wanted, exact = _expected(model, replacements)
    _check(wanted, exact, headers, tied, path)

    _insert(model, replacements)
    for name, parent in activations.items():
        parent._modules[name.rpartition(".")[2]] = FusedActivation(fused[name])
    held: dict[str, Tensor] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in tqdm(wanted, desc="load", unit="tensor", disable=not progress, leave=False):
        owner = tied.get(name, name)
        if owner not in held:
            is_parameter = isinstance(wanted[owner], nn.Parameter)
            tensor = readers[weight_map[owner]].get_tensor(owner)
            # clone: a tensor on the CPU would keep the file mapped.
            tensor = tensor.to(device, dtype if is_parameter and tensor.is_floating_point() else None, copy=True)
            held[owner] = nn.Parameter(tensor, wanted[owner].requires_grad) if is_parameter else tensor
        parent, _, key = name.rpartition(".")
        module = modules[parent]
        (module._parameters if key in module._parameters else module._buffers)[key] = held[owner]  # type: ignore[index]
    for module in modules.values():
        if isinstance(module, Linear):
            # Through the layer's own door, so that it reads its cached numbers from the new tensors.
            module.load_state_dict(dict(module.named_buffers()), assign=True)
    _no_meta_left(modules, path)
    return model.eval()


def _mapping(data: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    value = data.get(key)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: field {key!r}: found {type(value).__name__}, an object is needed")
    return value


def _from_huggingface(data: dict[str, Any], path: Path) -> nn.Module:
    """An empty model of a class that transformers itself defines; no code from elsewhere is considered."""
    info = data.get("huggingface")
    if not isinstance(info, dict):
        raise CheckpointError(
            f"{path}: the model is a {data.get('model_class')!r}, not a class of transformers; "
            "pass model=, a function that builds it"
        )
    try:
        import transformers
    except ImportError:
        raise CheckpointError(f"{path}: the model is a {info.get('class')!r}: pip install transformers") from None
    name, config = info.get("class"), info.get("config")
    cls: Any = getattr(transformers, name, None) if isinstance(name, str) and re.fullmatch(r"[A-Z]\w*", name) else None
    is_model: bool = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    if not is_model or not isinstance(config, dict):
        raise CheckpointError(f"{path}: found model class {name!r}; a model class of transformers is needed")
    try:
        model = cls(cls.config_class.from_dict(config))
        if info.get("generation_config") is not None:
            model.generation_config = transformers.GenerationConfig.from_dict(info["generation_config"])
        return model
    except Exception as exc:
        raise CheckpointError(f"{path}: {name} cannot be built from the saved configuration: {exc}") from exc


def _empty_layer(name: str, spec: Any, model: nn.Module, path: Path) -> Linear:
    """A quantized layer without memory, checked against the layer it replaces."""
    try:
        module = model.get_submodule(name)
        sizes = int(spec["in_features"]), int(spec["out_features"])
        layer = Linear.empty(
            *sizes, bool(spec["bias"]), scheme_from_json(spec["scheme"]), spec["activation"], device="meta", name=name
        )
    except (AttributeError, KeyError, TypeError, ValueError, QcutError) as exc:
        raise CheckpointError(f"{path}: layer {name!r}: {exc}") from exc
    if isinstance(module, Linear):
        found = module.in_features, module.out_features
    elif is_linear(module):
        n, k = weight_nk(module).shape
        found = k, n
    else:
        raise CheckpointError(f"{path}: layer {name!r}: the model has a {type(module).__name__} there, no linear layer")
    if found != sizes:
        raise CheckpointError(f"{path}: layer {name!r}: saved with (K, N) = {sizes}, the model has {found}")
    return layer


def _activation_parent(name: str, model: nn.Module, path: Path) -> nn.Module:
    """The module that holds an activation which a quantized layer has taken over."""
    try:
        activation = model.get_submodule(name)
    except AttributeError as exc:
        raise CheckpointError(f"{path}: fused activation {name!r}: {exc}") from exc
    if any(True for _ in activation.parameters()) or any(True for _ in activation.children()):
        raise CheckpointError(f"{path}: fused activation {name!r}: the model has a {type(activation).__name__} there")
    return model.get_submodule(name.rpartition(".")[0])


def _expected(model: nn.Module, replacements: dict[str, Linear]) -> tuple[dict[str, Tensor], set[str]]:
    """Every tensor the model will have, by every name, and which of them belong to quantized layers."""
    layers = {id(model.get_submodule(name)): layer for name, layer in replacements.items()}
    wanted: dict[str, Tensor] = {}
    quantized: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        layer = layers.get(id(module))
        held = (*module._parameters.items(), *module._buffers.items()) if layer is None else layer._buffers.items()
        tensors = {f"{name}.{key}" if name else key: t for key, t in held if t is not None}
        wanted |= tensors
        quantized |= set(tensors) if layer is not None else set()
    return wanted, quantized


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def _headers(
    readers: dict[str, Any], weight_map: dict[str, Any], path: Path
) -> dict[str, tuple[torch.dtype | None, list[int]]]:
    """Dtype and shape of every stored tensor; none of them is read."""
    for name, file in weight_map.items():
        if name not in set(readers[file].keys()):
            raise CheckpointError(f"{path.parent / file}: tensor {name!r} is not in it, but {path.name} says so")
    headers = {}
    for name, file in weight_map.items():
        view = readers[file].get_slice(name)
        headers[name] = _DTYPES.get(view.get_dtype()), list(view.get_shape())
    return headers


def _check(
    wanted: dict[str, Tensor],
    exact: set[str],
    headers: dict[str, tuple[torch.dtype | None, list[int]]],
    tied: dict[str, Any],
    path: Path,
) -> None:
    missing = [name for name in wanted if tied.get(name, name) not in headers]
    foreign = [name for name in (*headers, *tied) if name not in wanted]
    if missing or foreign:
        name = (missing or foreign)[0]
        raise CheckpointError(
            f"{path}: {len(missing)} tensors of the model are missing and {len(foreign)} do not belong to it; "
            f"the first is {name!r}"
        )
    for name, tensor in wanted.items():
        dtype, shape = headers[tied.get(name, name)]
        # Outside quantized layers floating tensors may be of any precision: a skeleton does not know which.
        free = name not in exact and tensor.is_floating_point()
        ok = dtype is not None and (dtype.is_floating_point if free else dtype == tensor.dtype)
        if list(tensor.shape) != shape or not ok:
            raise CheckpointError(
                f"{path}: tensor {name!r}: found {dtype} {shape}, {tensor.dtype} {list(tensor.shape)} is needed"
            )


def _insert(model: nn.Module, replacements: dict[str, Linear]) -> None:
    new = {id(model.get_submodule(name)): layer for name, layer in replacements.items()}
    for module in list(model.modules()):
        for key, child in module._modules.items():
            if child is not None and id(child) in new:
                module._modules[key] = new[id(child)]


def _no_meta_left(modules: dict[str, nn.Module], path: Path) -> None:
    for name, module in modules.items():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise CheckpointError(
                    f"{path}: {name}.{key} is a tensor that is no parameter or buffer, so no checkpoint holds it; "
                    "pass model=, built with its values"
                )
