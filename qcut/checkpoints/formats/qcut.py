"""Quantized models on disk: safetensors and ``qcut_config.json``, nothing that can execute."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qcut.checkpoints import hub, pretrained_format
from qcut.checkpoints.description import (
    EMBEDDINGS,
    FUSED,
    LAYERS,
    TIED,
    Description,
    fill_layer,
    skeleton_of,
    tie_layers,
)
from qcut.checkpoints.formats.reader import reader_of
from qcut.checkpoints.formats.turboquant import reader as turboquant_reader
from qcut.checkpoints.headers import QCUT_CONFIG, check_layer_sizes, is_turboquant, read_headers, refuse_adapter
from qcut.checkpoints.marks import ADVICE, NO_FILE, mark
from qcut.checkpoints.quantization_config import quantization_config
from qcut.checkpoints.skeleton import (
    as_like,
    check_headers,
    check_no_meta,
    expected_tensors,
    from_huggingface,
)
from qcut.checkpoints.state import passing_buffers, stored_tensors
from qcut.checkpoints.tokenizers import copy_tokenizer
from qcut.common import schema
from qcut.common.progress import progress_bar, with_progress
from qcut.common.safetensors_file import TensorFile
from qcut.common.tensors import TensorFiles, read_index
from qcut.errors import CheckpointError
from qcut.layers.frozen import float_dtype
from qcut.layers.linear import Linear, state_dtype
from qcut.layers.stored import StateEntry
from qcut.models.listeners import announce
from qcut.models.modules import dtype_name
from qcut.numerics.checks import out_of_range
from qcut.numerics.plain_state import in_plain_state

_FORMAT, _VERSION = "qcut", 1
_SCHEMA = schema.record(
    {
        "layers": LAYERS,
        "fused": FUSED,
        "tied": TIED,
        "weight_map": schema.table(schema.text()),
    },
    {"embeddings": (EMBEDDINGS, {})},
    more=True,
)


def save(
    model: nn.Module,
    directory: str | Path,
    *,
    max_shard_bytes: int = 4 << 30,
    progress: bool = False,
    tokenizer: Any = None,
) -> None:
    """Write a model, quantized or partly so, to a directory.

    The directory gets ``model-*.safetensors`` (several where the tensors exceed ``max_shard_bytes``; every parameter
    and buffer, also those outside the state dict; tied ones once) and ``qcut_config.json``: which layers are
    `qcut.Linear` with their schemes, which tensors are tied, which file holds what, and for a Hugging Face model its
    class and configuration. Such a model's ``config.json``, ``generation_config.json`` and
    ``model.safetensors.index.json`` are written too, so that transformers' ``from_pretrained`` reads the same tensors.
    Other files are left alone.

    Saving over an earlier checkpoint is safe: the new files have new names, and the rename of ``qcut_config.json``
    puts them in force all at once. Only then are the old ones deleted (`qcut.common.tensors`).

    Args:
        model: the model.
        directory: created if missing.
        max_shard_bytes: a file takes tensors until it holds this much.
        progress: show a progress bar.
        tokenizer: of transformers, to be saved beside the model. With None, the files of the tokenizer that lies in the
            directory from which transformers loaded the model are copied, where they are not there yet.

    One process saves at a time; others wait, up to ten minutes. Processes that load meanwhile get the checkpoint that
    was in force when they began, whole, or the new one.

    Raises:
        CheckpointError: the directory cannot be written, another process does not end its save, a tensor is on the
            meta device, a module has extra state, a parameter holds NaN or Inf, an embedding is tied to a layer that is
            not in the model, or the
            directory has a ``model.safetensors``, which transformers would read in place of what is saved. The
            checkpoint that was there is then in force as before.

    Exactness: `load` gives back every tensor bit by bit.
    """
    directory = Path(directory)
    other = directory / "model.safetensors"
    if os.path.lexists(other) and _huggingface(model):
        raise CheckpointError(
            f"{other}: transformers would read this file in place of the model; save to another directory, or delete it"
        )
    tensors, tied = stored_tensors(model)
    for name, parameter in model.named_parameters():
        if found := out_of_range(parameter.detach()):
            raise CheckpointError(f"{directory}: tensor {name!r}: found {found}; finite parameters can be saved")
    try:
        with TensorFiles(directory, "model", QCUT_CONFIG) as files:
            huggingface = _huggingface(model)
            # transformers makes buffers outside the state dict itself, and would warn of those in files it reads.
            apart = passing_buffers(model) if huggingface else set()
            weight_map = _write_shards(files, tensors, apart, max_shard_bytes, progress)
            described = Description.of(model, tied)
            marks = mark(described.layers, described.embeddings) if huggingface else {}
            marked = dict.fromkeys(marks, files.add(marks)) if marks else {}
            files.commit(
                {
                    "format": _FORMAT,
                    "version": _VERSION,
                    "model_class": type(model).__name__,
                    "huggingface": huggingface or None,
                    **described._asdict(),
                    "weight_map": weight_map,
                },
                _beside(model, huggingface, tied, tensors, weight_map, marked),
            )
        copy_tokenizer(tokenizer, model, directory)
    except (OSError, ValueError, TypeError) as exc:
        if isinstance(exc, CheckpointError):
            raise
        raise CheckpointError(f"{directory}: cannot be written: {exc}") from exc


def _write_shards(
    files: TensorFiles, tensors: dict[str, StateEntry], passing: set[str], limit: int, progress: bool
) -> dict[str, str]:
    """Write the tensors, and return which file holds each; those outside the state dict have files of their own."""
    weight_map: dict[str, str] = {}
    kept = {name: tensor for name, tensor in tensors.items() if name not in passing}
    others = {name: tensor for name, tensor in tensors.items() if name in passing}
    with progress_bar(len(tensors), "save", "tensor", shown=progress) as advance:
        for names in (*_shards(kept, limit), *_shards(others, limit)):
            file = files.add({name: tensors[name].read().detach().cpu().contiguous() for name in names})
            weight_map |= dict.fromkeys(names, file)
            advance(len(names))
    return weight_map


def _shards(tensors: dict[str, StateEntry], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    if names:
        yield names


def _huggingface(model: nn.Module) -> dict[str, Any]:
    """Class and configuration of a model whose class transformers itself defines."""
    if not type(model).__module__.startswith("transformers.models."):
        return {}
    config: Any = model.config
    plain = json.loads(config.to_json_string(use_diff=False))
    for key in ("quantization_config", NO_FILE):  # of the last save, perhaps; what is in the model counts
        plain.pop(key, None)
    described = {"class": type(model).__name__, "config": plain | _loading_facts(model)}
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        described["generation_config"] = json.loads(generation.to_json_string())
    return described


def _loading_facts(model: nn.Module) -> dict[str, Any]:
    """What ``from_pretrained`` reads of a configuration: the class, and the dtype to load in."""
    floats = (dtype_name(p.dtype) for p in model.parameters() if p.is_floating_point())
    dtype = next(floats, None)
    return {"architectures": [type(model).__name__]} | ({} if dtype is None else {"dtype": dtype})


def _beside(
    model: nn.Module,
    huggingface: dict[str, Any],
    tied: dict[str, str],
    tensors: dict[str, StateEntry],
    weight_map: dict[str, str],
    marked: dict[str, str],
) -> dict[str, dict[str, Any]]:
    """The files by which transformers finds the same tensors, by name."""
    if not huggingface:
        return {}
    config = dict(huggingface["config"])
    entry = quantization_config(model, tied, QCUT_CONFIG)
    if entry["layers"]:
        config |= {"quantization_config": entry, NO_FILE: ADVICE}
    passing = passing_buffers(model)
    listed = {name: file for name, file in weight_map.items() if name not in passing}
    size = sum(tensors[name].nbytes for name in listed) + len(marked)
    index = {"metadata": {"total_size": size}, "weight_map": {**listed, **marked}}
    files = {"config.json": config, "model.safetensors.index.json": index}
    if "generation_config" in huggingface:
        files["generation_config.json"] = huggingface["generation_config"]
    return files


@in_plain_state
def load(
    directory: str | Path,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: bool = True,
    verify: bool = True,
) -> nn.Module:
    """Read a quantized model and return it, ready to run, in evaluation mode.

    Read are directories of `save`, of ``save_pretrained`` of a quantized model, and of other libraries; and models of
    the hub by name, where transformers finds them.

    The model is built on the meta device, without memory; its quantized layers are put in; names, shapes and dtypes
    of all tensors are checked against the files' headers; then tensors are read one at a time. At no moment does a
    second copy of the model, or a full-precision one, exist. What was saved with digests is compared with them, and the
    values of quantized layers are checked. No code of the checkpoint is run, and no pickle read. For directories with
    a ``turboquant_config.json`` and no ``qcut_config.json`` see `qcut.checkpoints.formats.turboquant.reader.load`. What
    ``save_pretrained`` wrote is read by transformers, with the same checks of names, shapes, dtypes and values.

    For checkpoints of compressed-tensors, GPTQ, AWQ and bitsandbytes, and GGUF files, see docs/foreign-checkpoints.md.

    Args:
        directory: the checkpoint, a folder or a ``.gguf`` file, or a name on the hub.
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
    name, directory = str(directory), Path(directory)
    path = directory / QCUT_CONFIG
    refuse_adapter(directory)
    if model is None and pretrained_format.is_saved(directory, QCUT_CONFIG):
        return pretrained_format.load(str(directory), device=device, dtype=dtype)
    if model is None and "/" in name and hub.is_name(name):
        return pretrained_format.load(name, device=device, dtype=dtype)
    if not path.exists() and (foreign := reader_of(directory)):
        return foreign.load(model=model, device=device, dtype=dtype, progress=progress)
    if not path.exists() and is_turboquant(directory):
        return turboquant_reader.load(
            directory, model=model, device=device, dtype=dtype, progress=progress, verify=verify
        )
    saved, files = read_index(path, CheckpointError, lambda data: _checked(data, path), verify=verify)
    with ExitStack() as opened:
        for file in files.values():
            opened.enter_context(file)
        check_layer_sizes(saved.described.layers, sum(file.size for file in files.values()), path)
        if not isinstance(model, nn.Module):
            with torch.device("meta"):
                model = from_huggingface(saved.data, path) if model is None else model()
        skeleton = skeleton_of(saved.described, model, dtype, path)
        wanted, exact = expected_tensors(model, skeleton.modules)
        check_headers(wanted, exact, read_headers(files, saved.weight_map, path), saved.tied, path)
        skeleton.put_into(model)
        _fill(model, wanted, saved, files, path, device=device, dtype=dtype, progress=progress, verify=verify)
    state_dtype(model, dtype or float_dtype(model))
    announce(model)
    return model.eval()


class _Index(NamedTuple):
    """``qcut_config.json``: the data as a whole, and the fields that every checkpoint has."""

    data: dict[str, Any]
    described: Description
    weight_map: dict[str, str]

    @property
    def tied(self) -> dict[str, str]:
        return self.described.tied


def _checked(data: dict[str, Any], path: Path) -> tuple[_Index, set[str]]:
    """The index, and the names of the data files."""
    if data.get("format") != _FORMAT or data.get("version") != _VERSION:
        raise CheckpointError(
            f"{path}: found format {data.get('format')!r} version {data.get('version')!r}; "
            f"{_FORMAT!r} version {_VERSION} is needed"
        )
    data = schema.conform(data, _SCHEMA, path, CheckpointError)
    described = Description(**{name: data[name] for name in Description._fields})
    return _Index(data, described, data["weight_map"]), set(data["weight_map"].values())


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
    tie_layers(modules, saved.tied)
    check_no_meta(modules, path)


def _load_layer(layer: Linear, state: dict[str, Tensor], name: str, saved: _Index, path: Path) -> None:
    if not any(t.is_meta for t in state.values()) and (problem := layer.state_problem(state)):
        key, what = problem
        tensor = f"{name}.{key}" if name else key
        where = path.parent / saved.weight_map[saved.tied.get(tensor, tensor)]
        raise CheckpointError(f"{where}: tensor {tensor!r}: {what}")
    fill_layer(layer, state, f"{path}: layer {name!r}")
