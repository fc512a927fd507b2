"""Reads quantized models in qcut's own format: safetensors and ``qcut_config.json``, nothing that can execute."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qcut.checkpoints.builder import (
    Builder,
    check_headers,
    check_no_meta,
    expected_tensors,
    fill_layer,
    share_modules,
    skeleton_of,
    tie_layers,
)
from qcut.checkpoints.description import EMBEDDINGS, EXPERTS, FUSED, LAYERS, TIED, Description
from qcut.checkpoints.detect import QCUT, QCUT_CONFIG, Detected, Options, check_layer_sizes, read_config, read_headers
from qcut.common import schema
from qcut.common.hooks import notify_quantized
from qcut.common.progress import progress_bar
from qcut.common.safetensors import TensorFile, read_index
from qcut.errors import CheckpointError, DtypeError
from qcut.layers.quantized import QuantizedLayer, float_dtype, set_weight_dtype

FORMAT, VERSION, EXPERTS_VERSION = "qcut", 1, 2
"""A model with quantized experts has the second version."""
_SCHEMA = schema.record(
    {
        "layers": LAYERS,
        "fused": FUSED,
        "tied": TIED,
        "weight_map": schema.table(schema.text()),
    },
    {"embeddings": (EMBEDDINGS, {}), "experts": (EXPERTS, {}), "shared": (TIED, {})},
    more=True,
)


def load(found: Detected, options: Options) -> nn.Module:
    """Read a folder of `qcut.save`; arguments and errors as `qcut.load`."""
    model, device, dtype, progress, verify, _ = options
    path = found.path / QCUT_CONFIG
    if model is None:
        _refuse_two_writers(found.path)
    saved, files = read_index(path, CheckpointError, lambda data: _checked(data, path), verify=verify)
    with ExitStack() as opened:
        for file in files.values():
            opened.enter_context(file)
        check_layer_sizes(saved.described.layers, sum(file.size for file in files.values()), path)
        if not isinstance(model, nn.Module):
            if model is not None and not callable(model):
                raise DtypeError(
                    f"model: found {type(model).__name__}; a function that makes the model is needed, or the model"
                )
            with torch.device("meta"):
                model = _from_huggingface(saved.data, path) if model is None else model()
        share_modules(model, saved.data["shared"], path)
        skeleton = skeleton_of(saved.described, model, dtype, path)
        wanted, exact = expected_tensors(model, skeleton.modules)
        tied = saved.described.tied
        check_headers(wanted, exact, read_headers(files, saved.weight_map, path), tied, path)
        skeleton.put_into(model)
        builder = Builder(model, device, dtype)
        with progress_bar(len(wanted), "load", "tensor", shown=progress) as advance:
            _fill(builder, wanted, saved, files, path, verify, advance)
        tie_layers(builder.modules, tied)
        check_no_meta(builder.modules, path)
    set_weight_dtype(model, dtype or float_dtype(model))
    notify_quantized(model)
    return model


def _refuse_two_writers(folder: Path) -> None:
    try:
        config = read_config(folder / "config.json")
    except CheckpointError:
        return
    entry = config.get("quantization_config")
    if not isinstance(entry, dict) or entry.get("quant_method") != QCUT:
        return
    if entry.get("index") != QCUT_CONFIG and os.path.lexists(folder / QCUT_CONFIG):
        raise CheckpointError(
            f"{folder}: config.json describes quantized layers and does not name {QCUT_CONFIG}, which is there: "
            "qcut.save and save_pretrained have both written here; from_pretrained reads config.json's model"
        )


class _Index(NamedTuple):
    """``qcut_config.json``: the data as a whole, and the fields that every checkpoint has."""

    data: dict[str, Any]
    described: Description
    weight_map: dict[str, str]


def _checked(data: dict[str, Any], path: Path) -> tuple[_Index, set[str]]:
    if data.get("format") != FORMAT or data.get("version") not in (VERSION, EXPERTS_VERSION):
        raise CheckpointError(
            f"{path}: found format {data.get('format')!r} version {data.get('version')!r}; "
            f"{FORMAT!r} version {VERSION} or {EXPERTS_VERSION} is needed"
        )
    data = schema.conform(data, _SCHEMA, path, CheckpointError)
    described = Description(**{name: data[name] for name in Description._fields})
    return _Index(data, described, data["weight_map"]), set(data["weight_map"].values())


def _from_huggingface(data: dict[str, Any], path: Path) -> nn.Module:
    """An empty model of a class that transformers itself defines; no code from elsewhere is considered."""
    from qcut.checkpoints.huggingface import model_of

    info = data.get("huggingface")
    if not isinstance(info, dict):
        raise CheckpointError(
            f"{path}: the model is a {data.get('model_class')!r}, not a class of transformers; "
            "pass model=, a function that builds it"
        )
    names = sum(len(data[key]) for key in ("weight_map", "tied") if isinstance(data.get(key), dict))
    return model_of(
        info.get("class"), info.get("config"), str(path), tensors=names, generation=info.get("generation_config")
    )


def _fill(
    builder: Builder,
    wanted: dict[str, Tensor],
    saved: _Index,
    files: dict[str, TensorFile],
    path: Path,
    verify: bool,
    advance: Callable[[int], object],
) -> None:
    """Read the tensors one at a time, tied ones once, and each layer's when the last of them is there."""
    names_of: dict[str, list[str]] = {}
    for name in wanted:
        names_of.setdefault(saved.described.tied.get(name, name), []).append(name)
    states: dict[str, dict[str, Tensor]] = {}
    for owner, names in names_of.items():
        tensor = files[saved.weight_map[owner]].read(owner, verify=verify)
        plain = [name for name in names if not isinstance(builder.place(name)[0], QuantizedLayer)]
        if plain:
            builder.put(sorted(plain, key=owner.__ne__), tensor, path.parent / saved.weight_map[owner])
        if len(plain) < len(names):
            tensor = tensor.to(builder.device)
        for name in (name for name in names if name not in plain):
            layer, key = builder.place(name)
            assert isinstance(layer, QuantizedLayer)
            parent = name.rpartition(".")[0]
            state = states.setdefault(parent, {})
            state[key] = tensor
            if state.keys() == layer.stored().keys():  # and now, so that no others pile up
                stored = {key: saved.described.tied.get(full, full) for key, full in _full(parent, state).items()}
                where = {key: path.parent / saved.weight_map[owner] for key, owner in stored.items()}
                fill_layer(layer, states.pop(parent), parent, path, where)
        advance(len(names))


def _full(module: str, state: dict[str, Tensor]) -> dict[str, str]:
    return {key: f"{module}.{key}" if module else key for key in state}
