"""Writes quantized models in qcut's own format, which `qcut.checkpoints.formats.qcut` reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from qcut.checkpoints.description import (
    Description,
    failures_name,
    passing_buffers,
    quantization_config,
    shards,
    shared_modules,
    stored_tensors,
)
from qcut.checkpoints.detect import QCUT_CONFIG, path_of
from qcut.common.progress import progress_bar
from qcut.common.safetensors_writer import TensorFiles
from qcut.errors import CheckpointError
from qcut.layers.quantized import StateEntry
from qcut.models.modules import dtype_name
from qcut.models.selection import check_model
from qcut.numerics.checks import out_of_range

FORMAT, VERSION, EXPERTS_VERSION = "qcut", 1, 2


def save(
    model: nn.Module,
    directory: str | Path,
    *,
    max_shard_bytes: int = 4 << 30,
    progress: bool = False,
    tokenizer: Any = None,
) -> None:
    """Write a model, quantized or partly so, to a directory.

    The directory gets ``model-*.safetensors`` (several if the tensors exceed ``max_shard_bytes``; every parameter
    and buffer, also those outside the state dict; tied ones once) and ``qcut_config.json``: which layers are
    `qcut.Linear` with their schemes, which tensors are tied and which modules are shared, which file holds what, and
    for a Hugging Face model its class and configuration. Such a model's ``config.json``, ``generation_config.json`` and
    ``model.safetensors.index.json`` are written too, so that transformers' ``from_pretrained`` reads the same tensors,
    unless modules are shared that are not in the class. Other files stay as they are.

    Saving over an earlier checkpoint is safe: the new files have new names, and the rename of ``qcut_config.json``
    puts them in force all at once. Only then are the old ones deleted (`qcut.common.safetensors_writer`).

    Args:
        model: the model.
        directory: created if missing.
        max_shard_bytes: a file takes tensors until it holds this much.
        progress: show a progress bar.
        tokenizer: of transformers, to be saved next to the model. With None, the tokenizer's files are copied from the
            directory that transformers loaded the model from, except those that exist already.

    One process saves at a time; others wait, up to ten minutes. Processes that load meanwhile get the checkpoint that
    was in force when they began, whole, or the new one.

    Raises:
        DtypeError: the model is no ``nn.Module``, or the directory no path.
        CheckpointError: the directory cannot be written, another process does not end its save, a tensor is on the
            meta device, a module has extra state, a parameter holds NaN or Inf, an embedding is tied to a layer that is
            not in the model, or the
            directory has a ``model.safetensors``, which transformers would read in place of what is saved. The
            checkpoint that was there is then in force as before.

    Exactness: `load` gives back every tensor bit by bit.
    """
    check_model(model)
    directory = path_of(directory)
    other = directory / "model.safetensors"
    if os.path.lexists(other) and _huggingface(model):
        raise CheckpointError(
            f"{other}: transformers would read this file in place of the model; save to another directory, or delete it"
        )
    tensors, tied = stored_tensors(model)
    for name, parameter in model.named_parameters():
        if found := out_of_range(parameter.detach()):
            raise CheckpointError(f"{directory}: tensor {name!r}: found {found}; finite parameters can be saved")
    with failures_name(directory):
        with TensorFiles(directory, "model", QCUT_CONFIG) as files:
            huggingface = _huggingface(model)
            # transformers makes buffers outside the state dict itself, and would warn of those in files it reads.
            apart = passing_buffers(model) if huggingface else set()
            weight_map = _write_shards(files, tensors, apart, max_shard_bytes, progress)
            described, shared = Description.of(model, tied), shared_modules(model)
            marked: dict[str, str] = {}
            mark_bytes = 0
            if huggingface:
                from qcut.checkpoints.marks import mark

                marks = mark(described.layers, described.embeddings, described.experts)
                marked = dict.fromkeys(marks, files.add(marks)) if marks else {}
                mark_bytes = sum(tensor.nbytes for tensor in marks.values())
            files.commit(
                {
                    "format": FORMAT,
                    "version": EXPERTS_VERSION if described.experts else VERSION,
                    "model_class": type(model).__name__,
                    "huggingface": huggingface or None,
                    **{key: value for key, value in described._asdict().items() if key != "experts" or value},
                    **({"shared": shared} if shared else {}),
                    "weight_map": weight_map,
                },
                _beside(model, huggingface, tied, tensors, weight_map, marked, mark_bytes),
            )
        if tokenizer is not None or hasattr(model, "config"):
            from qcut.checkpoints.tokenizers import copy_tokenizer

            copy_tokenizer(tokenizer, model, directory)


def _write_shards(
    files: TensorFiles, tensors: dict[str, StateEntry], passing: set[str], limit: int, progress: bool
) -> dict[str, str]:
    """Write the tensors, and return which file holds each; those outside the state dict have files of their own."""
    weight_map: dict[str, str] = {}
    kept = {name: tensor.nbytes for name, tensor in tensors.items() if name not in passing}
    others = {name: tensor.nbytes for name, tensor in tensors.items() if name in passing}
    with progress_bar(len(tensors), "save", "tensor", shown=progress) as advance:
        for names in (*shards(kept, limit), *shards(others, limit)):
            file = files.add({name: tensors[name].read().detach().cpu().contiguous() for name in names})
            weight_map |= dict.fromkeys(names, file)
            advance(len(names))
    return weight_map


def _huggingface(model: nn.Module) -> dict[str, Any]:
    """Class and configuration of a model, if transformers itself defines the class."""
    if not type(model).__module__.startswith("transformers.models."):
        return {}
    from qcut.checkpoints.marks import NO_FILE

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
    mark_bytes: int,
) -> dict[str, dict[str, Any]]:
    """The files by which transformers finds the same tensors, by name."""
    if not huggingface:
        return {}
    from qcut.checkpoints.marks import ADVICE, NO_FILE

    config = dict(huggingface["config"])
    entry = quantization_config(model, tied, QCUT_CONFIG)
    if entry["layers"]:
        config |= {"quantization_config": entry, NO_FILE: ADVICE}
    passing = passing_buffers(model)
    listed = {name: file for name, file in weight_map.items() if name not in passing}
    size = sum(tensors[name].nbytes for name in listed) + mark_bytes
    index = {"metadata": {"total_size": size}, "weight_map": {**listed, **marked}}
    files = {"config.json": config, "model.safetensors.index.json": index}
    if "generation_config" in huggingface:
        files["generation_config.json"] = huggingface["generation_config"]
    return files
