"""``quantization_config``: what a transformers ``config.json`` says of a model that qcut quantized."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from qcut.checkpoints.description import EMBEDDINGS, FUSED, LAYERS, TIED, Description
from qcut.checkpoints.headers import read_config
from qcut.common import schema
from qcut.errors import CheckpointError
from qcut.layers.linear import Linear

QUANT_METHOD = "qcut"
FORMAT_VERSION = 2
"""Version 1 had no `qcut.checkpoints.marks`."""
READ_VERSIONS = (1, FORMAT_VERSION)
_SCHEMA = schema.record(
    {"quant_method": schema.anything(), "format_version": schema.anything(), "layers": LAYERS},
    {
        "embeddings": (EMBEDDINGS, {}),
        "fused": (FUSED, {}),
        "tied": (TIED, {}),
        "index": (schema.nothing_or(schema.text()), None),
    },
)


def quantization_config(model: nn.Module, tied: Mapping[str, str], index: str | None = None) -> dict[str, Any]:
    """The entry of ``config.json`` for a model.

    Args:
        model: with quantized layers.
        tied: tensors that are stored under another name; those of quantized layers are noted, the rest is known to the
            model's class.
        index: file beside ``config.json`` that belongs to it, or None.

    Raises:
        CheckpointError: an embedding is tied to a layer that is not in the model.
    """
    layers = {name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, Linear)}
    own = {name: owner for name, owner in tied.items() if name.rpartition(".")[0] in layers}
    described = Description.of(model, own)._asdict()
    return {"quant_method": QUANT_METHOD, "format_version": FORMAT_VERSION, **described, "index": index}


def description_of(data: Mapping[str, Any], where: str) -> Description:
    """Read an entry that `quantization_config` made.

    Raises:
        CheckpointError: it is of another method, of a newer version, or has unknown keys or values of a wrong type
            (named).
    """
    if data.get("quant_method") != QUANT_METHOD or data.get("format_version") not in READ_VERSIONS:
        raise CheckpointError(
            f"{where}: found quant_method {data.get('quant_method')!r}, format_version "
            f"{data.get('format_version')!r}; {QUANT_METHOD!r} and one of {READ_VERSIONS} are needed"
        )
    checked = schema.conform(dict(data), _SCHEMA, where, CheckpointError)
    return Description(**{name: checked[name] for name in Description._fields})


def entry_of(folder: Path) -> dict[str, Any] | None:
    """The ``quantization_config`` of a folder's ``config.json``, where it is one of qcut's; None otherwise.

    Raises:
        CheckpointError: the file is not readable JSON, or no object.
    """
    path = folder / "config.json"
    if not path.exists():
        return None
    entry = read_config(path).get("quantization_config")
    return entry if isinstance(entry, dict) and entry.get("quant_method") == QUANT_METHOD else None
