"""Reads what ``save_pretrained`` wrote of a quantized model, through transformers, in a class that is checked first."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from qcut.checkpoints import hub
from qcut.checkpoints.headers import read_config, safetensors_files
from qcut.checkpoints.huggingface import check_class, model_of, plain_config
from qcut.checkpoints.quantization_config import QUANT_METHOD, entry_of
from qcut.common import versions
from qcut.common.safetensors_file import TensorFile
from qcut.errors import CheckpointError, QcutError


def is_saved(folder: Path, index: str) -> bool:
    """Whether ``save_pretrained`` wrote the folder's model.

    Args:
        folder: any path.
        index: the file that `qcut.save` writes; a configuration that names it is `qcut.save`'s own.

    Raises:
        CheckpointError: both have written into the folder.
    """
    try:
        entry = entry_of(folder)
    except CheckpointError:
        return False
    if entry is None or entry.get("index") == index:
        return False
    if os.path.lexists(folder / index):
        raise CheckpointError(
            f"{folder}: config.json describes quantized layers and does not name {index}, which is there: qcut.save "
            "and save_pretrained have both written here; from_pretrained reads config.json's model"
        )
    return True


def _stored_tensors(folder: Path) -> int:
    """Number of tensors in a folder's safetensors files."""
    count = 0
    for path in safetensors_files(folder):
        with TensorFile(path, CheckpointError) as file:
            count += len(file.headers)
    return count


def load(name: str, *, device: torch.device | str, dtype: torch.dtype | None) -> nn.Module:
    """Read a model that qcut quantized and transformers wrote.

    Args:
        name: a directory, or a model of the hub.
        device: of the model.
        dtype: of floating parameters; None takes the one it was saved with.

    Raises:
        CheckpointError: transformers cannot read it, or it is no model of qcut's; or its configuration names code or
            weights from elsewhere, or a class that transformers does not have.
        UnsupportedError: transformers is missing, or too old.
    """
    local = Path(name).is_dir()
    on_disk = local or not hub.answers(name)
    transformers = versions.transformers()
    where = str(Path(name) / "config.json") if local else f"{name}: config.json"
    try:
        config = (
            read_config(Path(where))
            if local
            else transformers.PretrainedConfig.get_config_dict(name, local_files_only=on_disk)[0]
        )
        entry = config.pop("quantization_config", None)
        if not isinstance(entry, dict) or entry.get("quant_method") != QUANT_METHOD:
            raise CheckpointError(f"{where}: found no quantization_config of qcut; quantize the float model")
        plain_config(config, where)
        names = config.get("architectures")
        class_name = names[0] if isinstance(names, list) and len(names) == 1 else names
        cls = check_class(class_name, where)
        if local:
            with torch.device("meta"):  # within bounds that the files bear out
                model_of(class_name, config, where, tensors=_stored_tensors(Path(name)))
        model: Any = cls.from_pretrained(
            name,
            dtype=dtype or "auto",
            device_map={"": str(device)} if torch.device(device).type != "cpu" else None,
            local_files_only=on_disk,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except QcutError:
        raise
    except Exception as error:  # transformers, safetensors and the hub have dozens of kinds
        text = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{name}: cannot be read: {text[:600]}") from error
    return cast(nn.Module, model.eval())
