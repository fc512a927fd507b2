"""Checkpoints of other libraries: found by their configuration or magic, and loaded as models with qcut layers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration

from qcut.checkpoints.builder import Builder, finish
from qcut.checkpoints.detect import (
    GGUF,
    METHODS,
    Detected,
    Options,
    imported,
    read_config,
    require_method,
    safetensors_files,
)
from qcut.checkpoints.formats.gguf.container import GgufModel
from qcut.checkpoints.formats.gguf.llama import Gguf, tensors_of
from qcut.checkpoints.formats.gguf.metadata import check_architecture, check_config, config_of
from qcut.checkpoints.formats.name_mapping import map_names
from qcut.checkpoints.formats.parts import Format, Parts, Stored
from qcut.checkpoints.huggingface import model_of, named_class
from qcut.common.safetensors import TensorFile
from qcut.errors import CheckpointError
from qcut.layers.quantized import QuantizedLayer

_CONFIG, _GENERATION = "config.json", "generation_config.json"


def load(found: Detected, options: Options) -> nn.Module:
    """Read a checkpoint of another library; arguments and errors as `qcut.load`, and the files have no digests.

    Names, shapes and dtypes of all tensors are checked against the model before any is read; then layers are made one
    at a time. Without ``dtype``, models of GGUF files, whose norms are float32, become float16.

    Exactness: docs/foreign-checkpoints.md.
    """
    model, device, dtype, progress, _ = options
    with ExitStack() as stack:
        opened = _open(found, stack)
        if not isinstance(model, nn.Module):
            model = _skeleton(found, opened) if model is None else model()
        if found.format == GGUF and dtype is None:
            dtype = torch.float16
        _fill(model, opened, torch.device(device), dtype, progress)
    return model


def check(found: Detected) -> None:
    """Do everything that loading does but read tensors: hold configuration and headers to the model.

    Raises:
        CheckpointError, UnsupportedError: see `qcut.load`; values of tensors are not looked at.
    """
    with ExitStack() as stack:
        opened = _open(found, stack)
        map_names(_skeleton(found, opened), opened.format, opened.tensors, opened.where)


@dataclass(frozen=True)
class _Opened:
    """A checkpoint's configuration and format, and its tensors by their names in the model."""

    where: str
    config: dict[str, Any]
    format: Format
    tensors: Mapping[str, Stored]


def _open(found: Detected, stack: ExitStack) -> _Opened:
    where = str(found.path)
    if found.format != GGUF:
        config = read_config(found.path / _CONFIG)
        plain = {k: value for k, value in config.items() if k not in ("quantization_config", "compression_config")}
        return _Opened(where, plain, format_of(found.config, where), stored_in(safetensors_files(found.path), stack))
    file = stack.enter_context(GgufModel(found.path))
    check_architecture(file.metadata, file.path)
    beside = found.path.parent / _CONFIG
    if beside.exists():
        config = read_config(beside)
        check_config(config, file.metadata, file.path)
    else:
        config = config_of(file.metadata, file.tensors, file.path)
    config.pop("quantization_config", None)
    return _Opened(where, config, Gguf(), tensors_of(file, config))


def _skeleton(found: Detected, opened: _Opened) -> nn.Module:
    """The model, its parameters without memory, its buffers as its class computes them."""
    name = named_class(opened.config, opened.where)
    beside = (found.path if found.format != GGUF else found.path.parent) / _GENERATION
    generation = read_config(beside) if beside.exists() else None
    with _parameters_on_meta():
        return model_of(name, opened.config, opened.where, tensors=len(opened.tensors), generation=generation)


def format_of(config: dict[str, Any], where: str, method: str | None = None) -> Format:
    """The format of quantized layers under a ``quantization_config``.

    Args:
        config: the configuration, as JSON holds it.
        where: the file or folder, for messages.
        method: its ``quant_method``, where it names none.

    Raises:
        UnsupportedError: a method that qcut does not read, or what of it cannot be served exactly (named).
        CheckpointError: a field is missing, or holds what it cannot.
    """
    form: Format = imported(METHODS[require_method({"quant_method": method, **config}, where)])(config, where)
    return form


def layer_of(
    form: Format, name: str, tensors: Mapping[str, Tensor], n: int, k: int, where: str = "tensors"
) -> QuantizedLayer:
    """The qcut layer of one layer's tensors, for loaders that bring their own files.

    Args:
        form: see `format_of`.
        name: of the layer.
        tensors: on the CPU, by the end of their names, behind that of the layer, such as ``weight_scale``.
        n: output channels of the model's layer.
        k: input channels.
        where: for messages.

    Raises:
        CheckpointError, UnsupportedError: see `Format`.
    """
    parts = Parts(name, where, n, k, {key: Stored.of(tensor) for key, tensor in tensors.items()})
    form.check(parts)
    return form.layer(parts)


def stored_in(files: Iterable[Path], stack: ExitStack) -> dict[str, Stored]:
    """The tensors of safetensors files, which stay open as long as the stack.

    Raises:
        CheckpointError: a file cannot be read or is damaged, or two have the same tensor.
    """
    tensors: dict[str, Stored] = {}
    for path in files:
        file = stack.enter_context(TensorFile(path, CheckpointError))
        for key in file.headers:
            if key in tensors:
                raise CheckpointError(f"{file.path}: tensor {key!r} is in another file too")
            tensors[key] = Stored.in_file(file, key)
    return tensors


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Have this thread's modules register parameters without memory; their buffers are computed."""
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    handle = registration.register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


def _fill(model: nn.Module, opened: _Opened, device: torch.device, dtype: torch.dtype | None, progress: bool) -> None:
    where = opened.where
    mapping = map_names(model, opened.format, opened.tensors, where)
    builder = Builder(model, device, dtype)
    for names in mapping.holders:
        builder.put(names, mapping.rest[names[0]].read(), where, buffers=True)
    new = mapping.build(device, dtype, progress)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and not isinstance(module, QuantizedLayer):
                module._buffers[key] = buffer.to(device)
    finish(model, new, dtype, Path(where))
