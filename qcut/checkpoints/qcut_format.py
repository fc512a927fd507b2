"""Quantized models on disk: safetensors and ``qcut_config.json``, nothing that can execute."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qcut.checkpoints.foreign.reader import reader_of
from qcut.checkpoints.skeleton import (
    activation_parent,
    as_like,
    check_headers,
    check_layer_sizes,
    check_no_meta,
    empty_embedding,
    empty_layer,
    expected_tensors,
    from_huggingface,
    read_headers,
)
from qcut.checkpoints.turboquant import reader as turboquant_reader
from qcut.config import ACTIVATIONS
from qcut.errors import CheckpointError
from qcut.layers.base import Linear, state_dtype
from qcut.layers.embedding import Embedding
from qcut.layers.stored import StateEntry
from qcut.models.modules import WEIGHT_DTYPES, FusedActivation, dtype_name, replace_modules
from qcut.numerics.checks import out_of_range
from qcut.process.progress import progress_bar, with_progress
from qcut.storage import schema
from qcut.storage.safetensors_file import TensorFile
from qcut.storage.tensors import TensorFiles, read_index

CONFIG_NAME = "qcut_config.json"
_FORMAT, _VERSION = "qcut", 1
_LAYER = schema.record(
    {
        "scheme": schema.anything(),
        "in_features": schema.integer(1),
        "out_features": schema.integer(1),
        "bias": schema.boolean(),
        "activation": schema.text(choices=ACTIVATIONS),
    }
)
_EMBEDDING = schema.record({"table": schema.text(), "dtype": schema.text(choices=[*map(dtype_name, WEIGHT_DTYPES)])})
_SCHEMA = schema.record(
    {
        "layers": schema.table(_LAYER),
        "fused": schema.table(schema.text(choices=ACTIVATIONS)),
        "tied": schema.table(schema.text()),
        "weight_map": schema.table(schema.text()),
    },
    {"embeddings": (schema.table(_EMBEDDING), {})},
    more=True,
)


def save(model: nn.Module, directory: str | Path, *, max_shard_bytes: int = 4 << 30, progress: bool = False) -> None:
    """Write a model, quantized or partly so, to a directory.

    The directory gets ``model-*.safetensors`` (several where the tensors exceed ``max_shard_bytes``; every parameter
    and buffer, also those outside the state dict; tied ones once) and ``qcut_config.json``: which layers are
    `qcut.Linear` with their schemes, which tensors are tied, which file holds what, and for a Hugging Face model its
    class and configuration. Such a model's ``config.json`` and ``generation_config.json`` are written too, for
    tokenizers and people. Other files, a tokenizer's for example, are left alone.

    Saving over an earlier checkpoint is safe: the new files have new names, and the rename of ``qcut_config.json``
    puts them in force all at once. Only then are the old ones deleted (`qcut.storage.tensors`).

    Args:
        model: the model.
        directory: created if missing.
        max_shard_bytes: a file takes tensors until it holds this much.
        progress: show a progress bar.

    One process saves at a time; others wait, up to ten minutes. Processes that load meanwhile get the checkpoint that
    was in force when they began, whole, or the new one.

    Raises:
        CheckpointError: the directory cannot be written, another process does not end its save, a tensor is on the
            meta device, a parameter holds NaN or Inf, or an embedding is tied to a layer that is not in the model. The
            checkpoint that was there is then in force as before.

    Exactness: `load` gives back every tensor bit by bit.
    """
    directory = Path(directory)
    tensors, tied = _tensors(model)
    for name, parameter in model.named_parameters():
        if found := out_of_range(parameter.detach()):
            raise CheckpointError(f"{directory}: tensor {name!r}: found {found}; finite parameters can be saved")
    try:
        with TensorFiles(directory, "model", CONFIG_NAME) as files:
            weight_map = _write_shards(files, tensors, max_shard_bytes, progress)
            huggingface = _huggingface(model)
            described = {f"{key}.json": huggingface.get(key) for key in ("config", "generation_config")}
            files.commit(
                {
                    "format": _FORMAT,
                    "version": _VERSION,
                    "model_class": type(model).__name__,
                    "huggingface": huggingface or None,
                    "layers": {name: _describe(m) for name, m in model.named_modules() if isinstance(m, Linear)},
                    "embeddings": _embeddings(model),
                    "fused": {n: m.activation for n, m in model.named_modules() if isinstance(m, FusedActivation)},
                    "tied": tied,
                    "weight_map": weight_map,
                },
                {name: data for name, data in described.items() if data is not None},
            )
    except (OSError, ValueError, TypeError) as exc:
        if isinstance(exc, CheckpointError):
            raise
        raise CheckpointError(f"{directory}: cannot be written: {exc}") from exc


def _write_shards(files: TensorFiles, tensors: dict[str, StateEntry], limit: int, progress: bool) -> dict[str, str]:
    """Write the tensors, and return which file holds each."""
    weight_map: dict[str, str] = {}
    with progress_bar(len(tensors), "save", "tensor", shown=progress) as advance:
        for names in _shards(tensors, limit):
            file = files.add({name: tensors[name].read().detach().cpu().contiguous() for name in names})
            weight_map |= dict.fromkeys(names, file)
            advance(len(names))
    return weight_map


def _tensors(model: nn.Module) -> tuple[dict[str, StateEntry], dict[str, str]]:
    """Every parameter and buffer once, and the names of tied ones with the name they are stored under."""
    tensors: dict[str, StateEntry] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in _named_tensors(model):
        owner = seen.setdefault(tensor.identity, name)
        if owner == name:
            tensors[name] = tensor
        else:
            tied[name] = owner
    return tensors, tied


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, StateEntry]]:
    """Parameters first, then buffers, those of quantized layers as the layers store them."""
    modules = [(f"{name}." if name else "", m) for name, m in model.named_modules(remove_duplicate=False)]
    for prefix, module in modules:
        yield from ((prefix + key, tensor) for key, tensor in _plain(module._parameters, prefix).items())
    for prefix, module in modules:
        stored = _plain(module._buffers, prefix)
        stored = module.stored() if isinstance(module, Linear) else stored
        yield from ((prefix + key, tensor) for key, tensor in stored.items())


def _plain(tensors: Mapping[str, Tensor | None], prefix: str) -> dict[str, StateEntry]:
    held = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    for key, tensor in held.items():
        if tensor.is_meta:
            raise CheckpointError(f"{prefix}{key}: the tensor is on the meta device and has no values to save")
    return {key: StateEntry.of(tensor) for key, tensor in held.items()}


def _shards(tensors: dict[str, StateEntry], limit: int) -> Iterator[list[str]]:
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


def _embeddings(model: nn.Module) -> dict[str, dict[str, str]]:
    """The layer that each quantized embedding reads, its own or the classifier's, and the dtype it returns."""
    layers = {id(m): name for name, m in model.named_modules() if isinstance(m, Linear)}
    described = {}
    for name, module in model.named_modules():
        if isinstance(module, Embedding):
            if id(module.linear) not in layers:
                raise CheckpointError(f"{name}: the embedding is tied to a layer that is not in the model")
            dtype = str(module.dtype).removeprefix("torch.")
            described[name] = {"table": layers[id(module.linear)], "dtype": dtype}
    return described


def _huggingface(model: nn.Module) -> dict[str, Any]:
    """Class and configuration of a model whose class transformers itself defines."""
    if not type(model).__module__.startswith("transformers.models."):
        return {}
    config: Any = model.config
    described = {"class": type(model).__name__, "config": json.loads(config.to_json_string(use_diff=False))}
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        described["generation_config"] = json.loads(generation.to_json_string())
    return described


def load(
    directory: str | Path,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: bool = True,
    verify: bool = True,
) -> nn.Module:
    """Read what `save`, or another library, wrote and return the model, ready to run, in evaluation mode.

    The model is built on the meta device, without memory; its quantized layers are put in; names, shapes and dtypes
    of all tensors are checked against the files' headers; then tensors are read one at a time. At no moment does a
    second copy of the model, or a full-precision one, exist. What was saved with digests is compared with them, and the
    values of quantized layers are checked. No code of the checkpoint is run, and no pickle read. For directories with
    a ``turboquant_config.json`` and no ``qcut_config.json`` see `qcut.checkpoints.turboquant.reader.load`; for those of
    compressed-tensors, GPTQ, AWQ and bitsandbytes, and GGUF files, see docs/foreign-checkpoints.md.

    Args:
        directory: the checkpoint; a folder, or a ``.gguf`` file.
        model: for models that are not of a class in transformers: a function that builds the model (called on the
            meta device), or the model itself, which is filled and returned; what it holds is dropped.
        device: where the tensors shall be.
        dtype: what floating parameters are cast to, and quantized embeddings return; None keeps what was saved. Scales
            and biases of quantized layers are float32 always, buffers keep their dtype.
        progress: show a progress bar.
        verify: compare digests. False saves the time (a SHA-256 of every byte) and reads files that were changed by
            hand.

    Raises:
        CheckpointError: a file is missing, truncated, damaged or foreign; a tensor is missing, superfluous, of a wrong
            shape or dtype, or holds what quantizing never gives (named); or the model cannot be built without
            ``model``. A model passed in is then incomplete only if reading fails after all checks have passed.
        UnsupportedError: what qcut does not read of another library's format (named).

    Exactness: tensors come back bit by bit, but for ``dtype``.
    """
    directory = Path(directory)
    path = directory / CONFIG_NAME
    if not path.exists() and (foreign := reader_of(directory)):
        return foreign.load(model=model, device=device, dtype=dtype, progress=progress)
    if not path.exists() and turboquant_reader.is_turboquant(directory):
        return turboquant_reader.load(
            directory, model=model, device=device, dtype=dtype, progress=progress, verify=verify
        )
    saved, files = read_index(path, CheckpointError, lambda data: _checked(data, path), verify=verify)
    with ExitStack() as opened:
        for file in files.values():
            opened.enter_context(file)
        check_layer_sizes(saved.layers, sum(file.size for file in files.values()), path)
        if not isinstance(model, nn.Module):
            with torch.device("meta"):
                model = from_huggingface(saved.data, path) if model is None else model()
        skeleton = _prepare(saved, model, dtype, path)
        wanted, exact = expected_tensors(model, skeleton.modules)
        check_headers(wanted, exact, read_headers(files, saved.weight_map, path), saved.tied, path)
        skeleton.put_into(model)
        _fill(model, wanted, saved, files, path, device=device, dtype=dtype, progress=progress, verify=verify)
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    state_dtype(model, dtype or next(floats, torch.float32))
    return model.eval()


class _Index(NamedTuple):
    """``qcut_config.json``: the data as a whole, and the fields that every checkpoint has."""

    data: dict[str, Any]
    layers: dict[str, Any]
    embeddings: dict[str, Any]
    fused: dict[str, str]
    tied: dict[str, str]
    weight_map: dict[str, str]


def _checked(data: dict[str, Any], path: Path) -> tuple[_Index, set[str]]:
    """The index, and the names of the data files."""
    if data.get("format") != _FORMAT or data.get("version") != _VERSION:
        raise CheckpointError(
            f"{path}: found format {data.get('format')!r} version {data.get('version')!r}; "
            f"{_FORMAT!r} version {_VERSION} is needed"
        )
    data = schema.conform(data, _SCHEMA, path, CheckpointError)
    fields = {name: data[name] for name in _Index._fields if name != "data"}
    return _Index(data, **fields), set(data["weight_map"].values())


class _Skeleton(NamedTuple):
    """Modules that take the place of a model's: quantized layers and embeddings, and activations that layers apply."""

    modules: dict[str, nn.Module]
    activations: dict[str, tuple[nn.Module, str]]
    """The parent of each activation's module, and the activation's name."""

    def put_into(self, model: nn.Module) -> None:
        replace_modules(model, {id(model.get_submodule(name)): new for name, new in self.modules.items()})
        for name, (parent, activation) in self.activations.items():
            parent._modules[name.rpartition(".")[2]] = FusedActivation(activation)


def _prepare(saved: _Index, model: nn.Module, dtype: torch.dtype | None, path: Path) -> _Skeleton:
    """Quantized modules without memory, checked against those of the model that they replace."""
    own_tables = {f"{name}.table": name for name in saved.embeddings}
    linears = {name: empty_layer(name, spec, model, own_tables.get(name), path) for name, spec in saved.layers.items()}
    modules: dict[str, nn.Module] = {name: layer for name, layer in linears.items() if name not in own_tables}
    for name, spec in saved.embeddings.items():
        modules[name] = empty_embedding(name, spec, linears, model, dtype, path)
    parents = {name: activation_parent(name, model, path) for name in saved.fused}
    return _Skeleton(modules, {name: (parent, saved.fused[name]) for name, parent in parents.items()})


def _fill(
    model: nn.Module,
    wanted: dict[str, Tensor],
    saved: _Index,
    files: dict[str, TensorFile],
    path: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None,
    progress: bool,
    verify: bool,
) -> None:
    """Read the tensors one at a time into the modules of the model, tied ones once."""
    held: dict[str, Tensor] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    owners = set(saved.tied.values())
    state: dict[str, dict[str, Tensor]] = {}
    for name in with_progress(wanted, "load", "tensor", shown=progress):
        owner = saved.tied.get(name, name)
        tensor = held.get(owner)
        if tensor is None:
            read = files[saved.weight_map[owner]].read(owner, verify=verify)
            tensor = as_like(read, wanted[owner], device, dtype)
            if isinstance(tensor, nn.Parameter) and (found := out_of_range(tensor.detach())):
                where = path.parent / saved.weight_map[owner]
                raise CheckpointError(f"{where}: tensor {owner!r}: found {found}; finite values are needed")
            if owner in owners:
                held[owner] = tensor
        parent, _, key = name.rpartition(".")
        module = modules[parent]
        if isinstance(module, Linear):
            part = state.setdefault(parent, {})
            part[key] = tensor
            if part.keys() == module.stored().keys():
                # Through the layer's own door, which may lay tensors out anew; and now, so that no others pile up.
                _load_layer(module, state.pop(parent), parent, saved, path)
        else:
            (module._parameters if key in module._parameters else module._buffers)[key] = tensor  # type: ignore[index]
    for layer, other in _tied_layers(modules, saved.tied):
        layer.tie_to(other)
    check_no_meta(modules, path)


def _load_layer(layer: Linear, state: dict[str, Tensor], name: str, saved: _Index, path: Path) -> None:
    if not any(t.is_meta for t in state.values()) and (problem := layer.state_problem(state)):
        key, what = problem
        tensor = f"{name}.{key}" if name else key
        where = path.parent / saved.weight_map[saved.tied.get(tensor, tensor)]
        raise CheckpointError(f"{where}: tensor {tensor!r}: {what}")
    try:
        layer.load_state_dict(state, assign=True)
    except RuntimeError as exc:
        raise CheckpointError(f"{path}: layer {name!r}: {exc}") from exc


def _tied_layers(modules: dict[str, nn.Module], tied: dict[str, str]) -> list[tuple[Linear, Linear]]:
    """Quantized layers that share stored tensors with another, and the other."""
    pairs = {}
    for name, owner in tied.items():
        layer, other = (modules.get(full.rpartition(".")[0]) for full in (name, owner))
        if layer is not other and isinstance(layer, Linear) and isinstance(other, Linear):
            pairs[id(layer)] = layer, other
    return list(pairs.values())
