"""Recognises a checkpoint by its files, before any model is built or tensor is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qcut.checkpoints.headers import QCUT_CONFIG, TURBOQUANT_CONFIG, read_config
from qcut.common.reading import open_regular, read_json, read_up_to
from qcut.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import nn

PRETRAINED, GGUF, TURBOQUANT, QCUT = "pretrained", "gguf", "turboquant-model", "qcut"
METHODS = {
    "compressed-tensors": "qcut.checkpoints.formats.compressed_tensors.CompressedTensors",
    "gptq": "qcut.checkpoints.formats.gptq.Gptq",
    "awq": "qcut.checkpoints.formats.awq.Awq",
    "bitsandbytes": "qcut.checkpoints.formats.bitsandbytes.BitsAndBytes",
}
"""By ``quant_method`` of another library, the `qcut.checkpoints.formats.parts.Format` that reads its layers."""
READERS = {
    QCUT: "qcut.checkpoints.formats.qcut",
    PRETRAINED: "qcut.checkpoints.pretrained_format",
    TURBOQUANT: "qcut.checkpoints.formats.turboquant.reader",
    **dict.fromkeys((GGUF, *METHODS), "qcut.checkpoints.formats.reader"),
}
"""By format, the module whose ``load`` takes what was detected, and `Options`."""
GGUF_MAGIC = b"GGUF"
_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files that older writers put their configuration in, beside config.json."""


class Options(NamedTuple):
    """The arguments of `qcut.load` apart from the checkpoint."""

    model: nn.Module | Callable[[], nn.Module] | None
    device: torch.device
    dtype: torch.dtype | None
    progress: bool
    verify: bool


class Detected(NamedTuple):
    """A checkpoint with quantized layers.

    Attributes:
        format: a key of `READERS`, or a ``quant_method`` that nobody reads.
        path: the folder, or the ``.gguf`` file.
        config: ``quantization_config``, where there is one.
    """

    format: str
    path: Path
    config: dict[str, Any]

    @property
    def lacks_index(self) -> bool:
        """Whether `qcut.save` wrote the folder, and its index is gone."""
        return self.format == PRETRAINED and self.config.get("index") == QCUT_CONFIG


def detect(path: str | Path) -> Detected | None:
    """Recognise a folder or file; the first of `RECOGNISERS` that knows it decides.

    Args:
        path: a folder; or a ``.gguf`` file, one of several of a model too.

    Returns:
        What it is; None for a model in float, and for what is no checkpoint.

    Raises:
        CheckpointError: ``config.json`` cannot be read, a ``.gguf`` file is none, or there are several models.
    """
    path = Path(path)
    return next((found for recognise in RECOGNISERS if (found := recognise(path)) is not None), None)


def stated_quantization(config: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """The ``quantization_config`` of a model's configuration, its ``quant_method`` filled in; None where there is none.

    Args:
        config: as JSON holds it.
        where: its file, for messages.

    Raises:
        CheckpointError: it is no object.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: quantization_config is a {type(found).__name__}; an object is needed")
    method = found.get("quant_method")
    if method is None and ("load_in_4bit" in found or "load_in_8bit" in found):
        method = "bitsandbytes"
    return {**found, "quant_method": method}


def require_method(config: Mapping[str, Any], where: str) -> str:
    """The ``quant_method`` of another library.

    Raises:
        UnsupportedError: one that qcut does not read (named).
    """
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise UnsupportedError(
            f"{where}: quantization_config has the quant_method {str(method)[:80]!r}; "
            f"{', '.join(METHODS)} and GGUF files are read"
        )
    return method


def _qcut(path: Path) -> Detected | None:
    return Detected(QCUT, path, {}) if (path / QCUT_CONFIG).exists() else None


def _gguf(path: Path) -> Detected | None:
    if path.is_file():
        with open_regular(path, CheckpointError) as file:
            is_gguf = read_up_to(file, len(GGUF_MAGIC)) == GGUF_MAGIC
        if not is_gguf and path.suffix == ".gguf":
            raise CheckpointError(f"{path}: not a GGUF file: it does not begin with GGUF")
        return Detected(GGUF, path, {}) if is_gguf else None
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if not files or any(path.glob("*.safetensors")):
        return None
    from qcut.checkpoints.formats.gguf.container import parts_of

    if not set(files) <= set(parts_of(files[0])):
        raise CheckpointError(f"{path}: found {len(files)} GGUF files; name one of them")
    return _gguf(files[0])


def _configured(path: Path) -> Detected | None:
    """A folder whose ``config.json``, or an older file beside it, names the method."""
    where = path / "config.json"
    if not where.exists():
        return None
    config = read_config(where)
    found = stated_quantization(config, str(where))
    name = next((name for name in _BESIDE if (path / name).exists()), None)
    if found is None and name is not None:
        beside = read_json(path / name, CheckpointError)
        found = {"quant_method": _BESIDE[name], **beside}
    if found is None:
        return None
    method = str(found["quant_method"])
    return Detected(PRETRAINED if method == QCUT else method, path, found)


def _turboquant(path: Path) -> Detected | None:
    from qcut.common.together import record_path

    known = (path / TURBOQUANT_CONFIG).is_file() or record_path(path, TURBOQUANT_CONFIG).is_file()
    return Detected(TURBOQUANT, path, {}) if known else None


RECOGNISERS: list[Callable[[Path], Detected | None]] = [_qcut, _gguf, _configured, _turboquant]
