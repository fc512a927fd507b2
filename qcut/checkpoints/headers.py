"""What the files of a checkpoint say before any tensor is read: configurations and headers. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qcut.common import schema
from qcut.common.reading import JSON_BYTES, check_extent, read_bytes, read_json
from qcut.common.safetensors_header import HeaderFile, TensorHeader, plain_name
from qcut.errors import CheckpointError

QCUT_CONFIG = "qcut_config.json"
"""The file by which a folder of `qcut.save` is known."""
TURBOQUANT_CONFIG = "turboquant_config.json"
"""The file by which a folder of the turboquant-model package is known."""
TURBOQUANT_TENSORS = ("model.safetensors", "non_quantized.safetensors")
"""That package's files with tensors: of quantized layers, and of the rest."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file that transformers reads of a folder, and the one by which it finds several, where that is missing."""
_INDEX_FIELDS = schema.record({"weight_map": schema.table(schema.text())}, more=True)


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration of transformers, which may hold Infinity and whole numbers of any size.

    Raises:
        CheckpointError: the file is missing, not JSON, or no object; or it holds NaN.
    """

    def refuse_nan(text: str) -> float:
        if text == "NaN":
            raise CheckpointError(f"{path}: found NaN")
        return float(text)

    data = read_bytes(path, JSON_BYTES, CheckpointError)
    check_extent(data, path, CheckpointError)
    try:
        config = json.loads(data, parse_constant=refuse_nan)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: found a JSON {type(config).__name__}, an object is needed")
    return config


def refuse_adapter(folder: Path) -> None:
    """Refuse the files of an adapter beside a model: transformers applies them unasked, and other readers do not.

    Raises:
        CheckpointError: there are such files (named).
    """
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"):
        if (folder / name).exists() and (folder / "config.json").exists():
            raise CheckpointError(
                f"{folder / name}: an adapter beside a model; allowed: the model in a folder of its own, over which "
                "PeftModel.from_pretrained(model, folder) loads the adapter, or the two merged and saved anew"
            )


def weight_map(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, by the index of a folder of transformers; None where transformers reads no index.

    Raises:
        CheckpointError: the index cannot be read, or names a file that is not beside it.
    """
    path = folder / INDEX
    if not path.exists() or (folder / SINGLE).exists():
        return None
    places = schema.conform(read_json(path, CheckpointError), _INDEX_FIELDS, path, CheckpointError)["weight_map"]
    return {name: plain_name(file, path, CheckpointError) for name, file in places.items()}


def safetensors_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers reads of a folder, or all where it reads none.

    Raises:
        CheckpointError: there are none; or see `weight_map`.
    """
    places = weight_map(folder)
    if places is None and (folder / SINGLE).exists():
        return [folder / SINGLE]
    names = {path.name for path in folder.glob("*.safetensors")} if places is None else set(places.values())
    if not names:
        raise CheckpointError(f"{folder}: there are no safetensors files; pickles are not read")
    return [folder / name for name in sorted(names)]


def check_layer_sizes(layers: Mapping[str, Mapping[str, Any]], stored_bytes: int, path: Path) -> None:
    """Hold the sizes of quantized layers to what is stored: two bits a weight at least.

    Raises:
        CheckpointError: a layer has more weights than the files can hold.
    """
    for name, spec in layers.items():
        n, k = spec["out_features"], spec["in_features"]
        if n * k > 4 * stored_bytes:
            raise CheckpointError(
                f"{path}: layer {name!r}: saved with (K, N) = {k, n}; the data files have {stored_bytes} bytes"
            )


def read_headers(files: Mapping[str, HeaderFile], weight_map: Mapping[str, str], path: Path) -> dict[str, TensorHeader]:
    """What the data files' headers say of every stored tensor.

    Args:
        files: by name.
        weight_map: the file of each tensor.
        path: where the map stands, for messages.

    Raises:
        CheckpointError: a file lacks a tensor.
    """
    for name, file in weight_map.items():
        if name not in files[file].headers:
            raise CheckpointError(f"{path.parent / file}: tensor {name!r} is not in it, but {path.name} says so")
    return {name: files[file].headers[name] for name, file in weight_map.items()}
