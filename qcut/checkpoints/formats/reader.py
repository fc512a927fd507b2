"""Checkpoints of other libraries: found by their configuration or magic, and loaded as models with qcut layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration

from qcut.checkpoints.formats.awq import Awq
from qcut.checkpoints.formats.bitsandbytes import BitsAndBytes
from qcut.checkpoints.formats.compressed_tensors import CompressedTensors
from qcut.checkpoints.formats.gguf.container import MAGIC, GgufModel, parts_of
from qcut.checkpoints.formats.gguf.llama import Gguf, tensors_of
from qcut.checkpoints.formats.gguf.metadata import check_architecture, check_config, config_of
from qcut.checkpoints.formats.gptq import Gptq
from qcut.checkpoints.formats.name_mapping import match
from qcut.checkpoints.formats.parts import Format, Parts, Stored
from qcut.checkpoints.headers import read_config, safetensors_files
from qcut.checkpoints.huggingface import causal_class, model_of
from qcut.checkpoints.skeleton import as_like, check_no_meta
from qcut.common.reading import open_regular, read_json, read_up_to
from qcut.common.safetensors_file import TensorFile
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.frozen import float_dtype
from qcut.layers.linear import Linear, state_dtype
from qcut.models.modules import replace_modules
from qcut.numerics.checks import out_of_range

_FORMATS: dict[str, Callable[[dict[str, Any], str], Format]] = {
    "compressed-tensors": CompressedTensors,
    "gptq": Gptq,
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
}
"""By ``quant_method``."""
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files that older writers put their configuration in, beside config.json."""
_OUR_OWN = "qcut"


@dataclass(frozen=True)
class _Opened:
    """What a checkpoint says, and its tensors by their names in the model."""

    where: str
    config: dict[str, Any]
    format: Format
    tensors: Mapping[str, Stored]


@dataclass(frozen=True)
class Reader:
    """A checkpoint of another library.

    Attributes:
        path: the folder, or the ``.gguf`` file.
        method: ``compressed-tensors``, ``gptq``, ``awq``, ``bitsandbytes`` or ``gguf``.
        config: ``quantization_config``; empty for ``gguf``.
    """

    path: Path
    method: str
    config: dict[str, Any]

    def format(self) -> Format:
        """How layers are stored.

        Raises:
            CheckpointError, UnsupportedError: see the formats.
        """
        return format_of(self.config, str(self.path), self.method)

    def load(
        self,
        *,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        progress: bool = True,
    ) -> nn.Module:
        """The model of transformers with qcut layers, ready to run, in evaluation mode.

        Names, shapes and dtypes of all tensors are checked against the model before any is read; then layers are made
        one at a time.

        Args:
            model: see `qcut.load`.
            device: where the tensors shall be.
            dtype: what floating parameters are cast to; None keeps what was saved, and takes float16 of GGUF files,
                whose norms are float32.
            progress: show a progress bar.

        Raises:
            CheckpointError: a file is missing, truncated or foreign; a tensor is missing, superfluous, of a wrong shape
                or dtype, or holds what cannot be (named).
            UnsupportedError: what cannot be served exactly (named).

        Exactness: docs/foreign-checkpoints.md.
        """
        with ExitStack() as stack:
            opened = self._open(stack)
            if not isinstance(model, nn.Module):
                model = self._skeleton(opened) if model is None else model()
            if self.method == "gguf" and dtype is None:
                dtype = torch.float16
            _fill(model, opened, torch.device(device), dtype, progress)
        state_dtype(model, dtype or float_dtype(model))
        return model.eval()

    def check(self) -> None:
        """Do everything that loading does but read tensors: hold configuration and headers to the model.

        Raises:
            CheckpointError, UnsupportedError: see `load`; values of tensors are not looked at.
        """
        with ExitStack() as stack:
            opened = self._open(stack)
            match(self._skeleton(opened), opened.format, opened.tensors, opened.where)

    @contextmanager
    def layers(self) -> Iterator[tuple[Format, dict[str, Stored]]]:
        """The format, and the tensors by the names that they have in a model of transformers, open for reading."""
        with ExitStack() as stack:
            opened = self._open(stack)
            yield opened.format, dict(opened.tensors)

    def _open(self, stack: ExitStack) -> _Opened:
        if self.method != "gguf":
            config = read_config(self.path / _CONFIG)
            plain = {
                key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")
            }
            return _Opened(str(self.path), plain, self.format(), stored_in(safetensors_files(self.path), stack))
        file = stack.enter_context(GgufModel(self.path))
        check_architecture(file.metadata, file.path)
        beside = self.path.parent / _CONFIG
        if beside.exists():
            config = read_config(beside)
            check_config(config, file.metadata, file.path)
        else:
            config = config_of(file.metadata, file.tensors, file.path)
        config.pop("quantization_config", None)
        return _Opened(str(self.path), config, Gguf(), tensors_of(file, config))

    def _skeleton(self, opened: _Opened) -> nn.Module:
        """The model, its parameters without memory, its buffers as its class computes them."""
        names = opened.config.get("architectures")
        name = names[0] if isinstance(names, list) and len(names) == 1 else causal_class(opened.config, opened.where)
        beside = (self.path if self.method != "gguf" else self.path.parent) / _GENERATION
        generation = read_config(beside) if beside.exists() else None
        with _parameters_on_meta():
            return model_of(name, opened.config, opened.where, tensors=len(opened.tensors), generation=generation)


def reader_of(path: str | Path) -> Reader | None:
    """The reader of a folder or file that another library quantized, or None where it is no such thing.

    Args:
        path: a folder with ``config.json``, whose ``quantization_config`` names the method; a ``.gguf`` file, one of
            several of a model too; or a folder with one such model and no safetensors.

    Raises:
        UnsupportedError: a method that qcut does not read (named).
        CheckpointError: ``config.json`` cannot be read.
    """
    path = Path(path)
    if path.is_file():
        with open_regular(path, CheckpointError) as file:
            is_gguf = read_up_to(file, len(MAGIC)) == MAGIC
        if not is_gguf and path.suffix == ".gguf":
            raise CheckpointError(f"{path}: not a GGUF file: it does not begin with GGUF")
        return Reader(path, "gguf", {}) if is_gguf else None
    if not path.is_dir():
        return None
    files = sorted(path.glob("*.gguf"))
    if files and not any(path.glob("*.safetensors")):
        if not set(files) <= set(parts_of(files[0])):
            raise CheckpointError(f"{path}: found {len(files)} GGUF files; name one of them")
        return reader_of(files[0])
    if not (path / _CONFIG).exists():
        return None
    config = read_config(path / _CONFIG)
    name = next((name for name in _BESIDE if (path / name).exists()), None)
    if name is not None and not _entry(config):
        beside = read_json(path / name, CheckpointError)
        config = {
            "quantization_config": {"quant_method": _BESIDE[name], **beside} if isinstance(beside, dict) else beside
        }
    found = stored_config(config, str(path / _CONFIG))
    return None if found is None else Reader(path, found["quant_method"], found)


def stored_config(config: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """The ``quantization_config`` of another library, its ``quant_method`` always named; None where there is none.

    Args:
        config: the model's configuration, as JSON holds it.
        where: its file, for messages.

    Raises:
        UnsupportedError: a method that qcut does not read (named).
        CheckpointError: it is no object.
    """
    found = _entry(config)
    if not found:
        return None
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: quantization_config is a {type(found).__name__}; an object is needed")
    method = found.get("quant_method")
    if method is None and ("load_in_4bit" in found or "load_in_8bit" in found):
        method = "bitsandbytes"
    if method == _OUR_OWN:
        return None
    if not isinstance(method, str) or method not in _FORMATS:
        raise UnsupportedError(
            f"{where}: quantization_config has the quant_method {str(method)[:80]!r}; "
            f"{', '.join(_FORMATS)} and GGUF files are read"
        )
    return {**found, "quant_method": method}


def _entry(config: Mapping[str, Any]) -> Any:
    return config.get("quantization_config") or config.get("compression_config")


def format_of(config: dict[str, Any], where: str, method: str | None = None) -> Format:
    """How a ``quantization_config`` says that layers are stored.

    Args:
        config: the configuration, as JSON holds it.
        where: the file or folder, for messages.
        method: its ``quant_method``, where it names none.

    Raises:
        UnsupportedError: a method that qcut does not read, or what of it cannot be served exactly (named).
        CheckpointError: a field is missing, or holds what it cannot.
    """
    method = config.get("quant_method", method)
    if not isinstance(method, str) or method not in _FORMATS:
        raise UnsupportedError(f"{where}: quant_method is {str(method)[:80]!r}; {', '.join(_FORMATS)} are read")
    return _FORMATS[method](config, where)


def layer_of(form: Format, name: str, tensors: Mapping[str, Tensor], n: int, k: int, where: str = "tensors") -> Linear:
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


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def stored_in(files: Iterable[Path], stack: ExitStack) -> dict[str, Stored]:
    """The tensors of safetensors files, which stay open as long as the stack.

    Raises:
        CheckpointError: a file cannot be read or is damaged, or two have the same tensor.
    """
    tensors: dict[str, Stored] = {}
    for path in files:
        file = stack.enter_context(TensorFile(path, CheckpointError))
        for key, header in file.headers.items():
            if key in tensors:
                raise CheckpointError(f"{file.path}: tensor {key!r} is in another file too")
            tensors[key] = Stored(header.code, tuple(header.shape), _reading(file, key))
    return tensors


def _reading(file: TensorFile, key: str) -> Callable[[], Tensor]:
    return lambda: file.read(key)


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


# ── the model ────────────────────────────────────────────────────────────────────────────────────


def _fill(model: nn.Module, opened: _Opened, device: torch.device, dtype: torch.dtype | None, progress: bool) -> None:
    where = opened.where
    matched = match(model, opened.format, opened.tensors, where)
    new = matched.make(device, dtype, progress)
    for names in matched.holders:
        like = _tensor(matched.modules, names[0])
        tensor = as_like(matched.rest[names[0]].read(), like, device, dtype)
        if tensor.is_floating_point() and (found := out_of_range(tensor.detach())):
            raise CheckpointError(f"{where}: tensor {names[0]!r}: found {found}; finite values are needed")
        for name in names:
            parent, _, key = name.rpartition(".")
            module = matched.modules[parent]
            (module._parameters if isinstance(tensor, nn.Parameter) else module._buffers)[key] = tensor  # type: ignore[assignment]
    replace_modules(model, new)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and not isinstance(module, Linear):
                module._buffers[key] = buffer.to(device)
    check_no_meta(dict(model.named_modules()), Path(where))


def _tensor(modules: Mapping[str, nn.Module], name: str) -> Tensor:
    parent, _, key = name.rpartition(".")
    module = modules[parent]
    held = module._parameters.get(key)
    tensor = held if held is not None else module._buffers[key]
    assert tensor is not None
    return tensor
