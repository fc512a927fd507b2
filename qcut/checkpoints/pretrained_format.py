"""Reads what ``save_pretrained`` wrote of a quantized model, through transformers, in a class that is checked first."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import nn

from qcut.checkpoints import hub
from qcut.checkpoints.detect import QCUT, Detected, Options, headers_of, read_config, safetensors_files
from qcut.checkpoints.huggingface import check_class, plain_config, skeleton_model
from qcut.common import versions
from qcut.common.failures import failures_as
from qcut.errors import CheckpointError


def load(found: Detected, options: Options) -> nn.Module:
    """Read a model that qcut quantized and transformers wrote, from a folder or by its name on the hub.

    Arguments and errors as `qcut.load`. transformers shows its own progress, and the files have no digests.
    """
    device, dtype = options.device, options.dtype
    name = str(found.path)
    local = found.path.is_dir()
    on_disk = local or not hub.answers(name)
    transformers = versions.transformers()
    where = str(Path(name) / "config.json") if local else f"{name}: config.json"
    with failures_as(CheckpointError, f"{name}: cannot be read"):
        config = (
            read_config(Path(where))
            if local
            else transformers.PretrainedConfig.get_config_dict(name, local_files_only=on_disk)[0]
        )
        entry = config.pop("quantization_config", None)
        if not isinstance(entry, dict) or entry.get("quant_method") != QCUT:
            raise CheckpointError(f"{where}: found no quantization_config of qcut; quantize the float model")
        plain_config(config, where)
        names = config.get("architectures")
        class_name = names[0] if isinstance(names, list) and len(names) == 1 else names
        cls = check_class(class_name, where)
        if local:
            headers = headers_of(safetensors_files(found.path)).values()  # bound what the configuration may ask for
            skeleton_model(str(class_name), config, where, [header.shape for header in headers])
        made: Any = cls.from_pretrained(
            name,
            dtype=dtype or "auto",
            device_map={"": str(device)} if device.type != "cpu" else None,
            local_files_only=on_disk,
            use_safetensors=True,
            trust_remote_code=False,
        )
    return cast(nn.Module, made)
