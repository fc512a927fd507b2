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
from qcut.checkpoints.formats.gguf.metadata import Metadata, architecture_of
from qcut.checkpoints.formats.gguf.tensors import Gguf, tensors_of, warn_of_floats
from qcut.checkpoints.formats.name_mapping import map_names
from qcut.checkpoints.formats.parts import Format, Parts, Stored
from qcut.checkpoints.huggingface import model_of, named_class, skeleton_model
from qcut.common.progress import with_progress
from qcut.common.safetensors import TensorFile
from qcut.errors import CheckpointError, ConfigError
from qcut.layers.quantized import QuantizedLayer
from qcut.numerics.checks import out_of_range

_CONFIG, _GENERATION = "config.json", "generation_config.json"


def load(found: Detected, options: Options) -> nn.Module:
    """Read a checkpoint of another library; arguments and errors as `qcut.load`, and the files have no digests.

    Names, shapes and dtypes of all tensors are checked against the model before any is read; then layers are made one
    at a time. Without ``dtype``, models of GGUF files become float16, though their norms are float32.

    Exactness: docs/foreign-checkpoints.md.
    """
    model, dtype, quantization = options.model, options.dtype, options.quantization
    with ExitStack() as stack:
        opened = _open(found, stack, exact=quantization is None)
        if not isinstance(model, nn.Module):
            model = _skeleton(found, opened) if model is None else model()
        if opened.file is not None:
            dtype = dtype or torch.float16
            if quantization is None:
                warn_of_floats(opened.file, dtype, stacklevel=4)
        _fill(model, opened, options._replace(dtype=dtype))
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
    file: GgufModel | None = None


def _open(found: Detected, stack: ExitStack, exact: bool = True) -> _Opened:
    where = str(found.path)
    if found.format != GGUF:
        config = read_config(found.path / _CONFIG)
        plain = {k: value for k, value in config.items() if k not in ("quantization_config", "compression_config")}
        return _Opened(where, plain, format_of(found.config, where), stored_in(safetensors_files(found.path), stack))
    file = stack.enter_context(GgufModel(found.path))
    architecture, stated = architecture_of(file), found.path.parent / _CONFIG
    metadata = Metadata(file, architecture, stated.exists())
    config = metadata.config
    if stated.exists():
        config = read_config(stated)
        config.pop("quantization_config", None)
        metadata.check(config, str(stated))
    return _Opened(where, config, Gguf(), tensors_of(file, architecture, metadata.config, exact), file)


def _skeleton(found: Detected, opened: _Opened) -> nn.Module:
    """The model, its parameters without memory, its buffers as its class computes them."""
    name = named_class(opened.config, opened.where)
    beside = (found.path if found.format != GGUF else found.path.parent) / _GENERATION
    generation = read_config(beside) if beside.exists() else None
    skeleton_model(name, opened.config, opened.where, [stored.shape for stored in opened.tensors.values()])
    with _parameters_on_meta():
        return model_of(name, opened.config, opened.where, tensors=len(opened.tensors), generation=generation)


def format_of(config: dict[str, Any], where: str, method: str | None = None) -> Format:
    """The format of quantized layers under a ``quantization_config``.

    Args:
        config: the configuration, as JSON holds it.
        where: the file or folder, for messages.
        method: its ``quant_method``, if it names none.

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


def _fill(model: nn.Module, opened: _Opened, options: Options) -> None:
    where, device, dtype = opened.where, options.device, options.dtype
    mapping = map_names(model, opened.format, opened.tensors, where)
    builder = Builder(model, device, dtype)
    quantizer = None if options.quantization is None else _quantizer(model, options.quantization, dtype)
    for names in with_progress(mapping.holders, "load", "tensor", shown=options.progress):
        tensor = mapping.rest[names[0]].read()
        wanted = quantizer and next((one for one in names if quantizer.param_needs_quantization(model, one)), None)
        if quantizer is None or wanted is None:
            builder.put(names, tensor, where, buffers=True)
            continue
        tensor = tensor.to(device, dtype)
        if problem := out_of_range(tensor):
            raise CheckpointError(f"{where}: tensor {wanted!r}: found {problem}; finite values are needed")
        quantizer.get_quantize_ops().convert({wanted: tensor})
        del tensor  # before the next one is read
    if quantizer is not None:
        quantizer.postprocess_model(model)
    new = mapping.build(device, dtype, options.progress)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and not isinstance(module, QuantizedLayer):
                module._buffers[key] = buffer.to(device)
    finish(model, new, dtype, Path(where))


def _quantizer(model: Any, config: Any, dtype: torch.dtype | None) -> Any:
    """What quantizes the weights of a model without memory as they are read: that of transformers' own loading."""
    from transformers import PreTrainedModel
    from transformers.quantizers.auto import AutoHfQuantizer

    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"quantization_config with a {type(model).__name__}; a model of transformers is needed")
    for parameter in model.parameters():  # the dtype of what is read
        parameter.data = parameter.data.to(dtype)
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.validate_environment()
    quantizer.preprocess_model(model)
    model.hf_quantizer = quantizer
    return quantizer
