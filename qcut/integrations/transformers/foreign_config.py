"""`foreign_config`: what has ``from_pretrained`` give a checkpoint of another library as qcut layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qcut.checkpoints import hub
from qcut.checkpoints.detect import GGUF, PRETRAINED, QCUT, TURBOQUANT, detect, require_method, stated_quantization
from qcut.checkpoints.formats.reader import check, format_of
from qcut.checkpoints.huggingface import check_class, named_class, plain_config
from qcut.common import versions
from qcut.common.failures import failures_as
from qcut.errors import CheckpointError, UnsupportedError
from qcut.integrations.transformers.config import QcutConfig


def foreign_config(name: str | Path, **options: Any) -> Any:
    """The configuration of a model that another library quantized, which has transformers load it as qcut layers.

    ``AutoModelForCausalLM.from_pretrained(name, config=qcut.foreign_config(name))`` gives the layers of
    ``qcut.load(name)``, and ``save_pretrained`` then writes them as qcut's. It is ``config=`` because transformers
    takes no ``quantization_config=`` of another method than the checkpoint names.

    Args:
        name: a folder of a library that docs/foreign-checkpoints.md names, or its name on the hub.
        options: that ``from_pretrained`` of configurations takes, such as ``revision``, ``subfolder`` and ``token``;
            the model's ``from_pretrained`` needs the same ones.

    Returns:
        A configuration of transformers with a ``quantization_config`` that is a request to qcut.

    Raises:
        CheckpointError: the configuration is no other library's, or cannot be read; and, of a folder, what `qcut.load`
            finds in the headers of its files.
        UnsupportedError: a method, layer or file that cannot be served exactly, GGUF files among them; transformers is
            missing, or too old.

    Exactness: docs/foreign-checkpoints.md.
    """
    transformers = versions.transformers()
    path = Path(name, options.get("subfolder") or "")
    where = f"{name}: config.json"
    if path.exists():
        stored = detect(path)
        if stored is not None and stored.format == GGUF:
            raise UnsupportedError(
                f"{stored.path}: transformers leaves GGUF files to no other quantizer than its own; "
                f"qcut.load({str(name)!r}) reads them as qcut layers"
            )
        if stored is None or stored.format in (QCUT, PRETRAINED, TURBOQUANT):
            raise CheckpointError(f"{path}: {_NOT_FOREIGN}")
        where, found = str(path / "config.json"), stored.config
        require_method(found, where)
        check(stored)
    elif not hub.answers(str(name), **options):
        options = {**options, "local_files_only": True}
    with failures_as(CheckpointError, f"{where}: transformers cannot read it"):
        data, _ = transformers.PretrainedConfig.get_config_dict(name, **options)
        if not path.exists():
            stated = stated_quantization(data, where)
            if stated is None or stated["quant_method"] == QCUT:
                raise CheckpointError(f"{name}: {_NOT_FOREIGN}")
            format_of(stated, where)
            found = stated
        kind = named_class(data, where)
        plain_config({key: value for key, value in data.items() if key not in _QUANTIZATION}, where)
        config = check_class(kind, where).config_class.from_pretrained(name, **options)
    dtype = getattr(config, "dtype", None)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise CheckpointError(f"{where}: dtype is {dtype!r}; a floating dtype of torch is needed")
    if hasattr(config, "compression_config"):
        del config.compression_config
    config.quantization_config = QcutConfig.serving(found).to_dict()
    return config


_QUANTIZATION = ("quantization_config", "compression_config")
_NOT_FOREIGN = (
    "config.json names no quantization of another library; qcut.QcutConfig(scheme) quantizes float models, and models "
    "of qcut's need no configuration"
)
