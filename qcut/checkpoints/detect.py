"""`qcut.load`: recognises a checkpoint by its files, before any model is built or tensor is read, and reads it.

Importing this module imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qcut.common import schema
from qcut.common.safetensors import TensorFile, TensorHeader, plain_name
from qcut.common.schema import JSON_BYTES, check_extent, open_regular, read_bytes, read_json, read_up_to
from qcut.errors import CheckpointError, ConfigError, DtypeError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import nn

QCUT_CONFIG = "qcut_config.json"
"""The file by which a folder of `qcut.save` is known."""
TURBOQUANT_CONFIG = "turboquant_config.json"
"""The file by which a folder of the turboquant-model package is known."""
TURBOQUANT_TENSORS = ("model.safetensors", "non_quantized.safetensors")
"""That package's files with tensors: of quantized layers, and of the rest."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file that transformers reads of a folder, and the index by which it finds several if that file is missing."""
_INDEX_FIELDS = schema.record({"weight_map": schema.table(schema.text())}, more=True)
PRETRAINED, GGUF, TURBOQUANT, QCUT = "pretrained", "gguf", "turboquant-model", "qcut"
METHODS = {
    "compressed-tensors": "qcut.checkpoints.formats.compressed_tensors.reader.CompressedTensors",
    "gptq": "qcut.checkpoints.formats.gptq.Gptq",
    "awq": "qcut.checkpoints.formats.awq.Awq",
    "bitsandbytes": "qcut.checkpoints.formats.bitsandbytes.BitsAndBytes",
    "mxfp4": "qcut.checkpoints.formats.floats.mxfp4.Mxfp4",
    "fp8": "qcut.checkpoints.formats.floats.finegrained.FinegrainedFp8",
    "fbgemm_fp8": "qcut.checkpoints.formats.floats.fbgemm.FbgemmFp8",
    "modelopt": "qcut.checkpoints.formats.floats.modelopt.model_opt",
}
"""By ``quant_method`` of another library, the `qcut.checkpoints.formats.parts.Format` that reads its layers."""
READERS = {
    QCUT: "qcut.checkpoints.formats.qcut.load",
    PRETRAINED: "qcut.checkpoints.pretrained_format.load",
    TURBOQUANT: "qcut.checkpoints.formats.turboquant.reader.load",
    **dict.fromkeys((GGUF, *METHODS), "qcut.checkpoints.formats.reader.load"),
}
"""By format, the function that loads what was detected, with `Options`."""
GGUF_MAGIC = b"GGUF"
_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files next to config.json that older writers put their configuration in."""


class Options(NamedTuple):
    """The arguments of `qcut.load` apart from the checkpoint."""

    model: nn.Module | Callable[[], nn.Module] | None
    device: torch.device
    dtype: torch.dtype | None
    progress: bool
    verify: bool
    quantization: Any = None


class Detected(NamedTuple):
    """A checkpoint with quantized layers.

    Attributes:
        format: a key of `READERS`, or a ``quant_method`` that nobody reads.
        path: the folder, or the ``.gguf`` file.
        config: ``quantization_config``, if there is one.
    """

    format: str
    path: Path
    config: dict[str, Any]

    @property
    def lacks_index(self) -> bool:
        """Whether `qcut.save` wrote the folder, and its index is gone."""
        return self.format == PRETRAINED and self.config.get("index") == QCUT_CONFIG


def load(
    directory: str | Path,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: bool = True,
    verify: bool = True,
    quantization_config: Any = None,
) -> nn.Module:
    """Read a quantized model and return it, ready to run, in evaluation mode.

    Read are directories of `save`, of ``save_pretrained`` of a quantized model, and of other libraries; and models of
    the hub by name, where transformers finds them.

    The model is built on the meta device, without memory; its quantized layers are put in; names, shapes and dtypes
    of all tensors are checked against the files' headers; then tensors are read one at a time. At no moment does a
    second copy of the model, or a full-precision one, exist. What was saved with digests is compared with them, and the
    values of quantized layers are checked. No code of the checkpoint is run, and no pickle read. For directories with
    a ``turboquant_config.json`` and no ``qcut_config.json`` see `qcut.checkpoints.formats.turboquant.reader.load`. What
    ``save_pretrained`` wrote is read by transformers, with the same checks of names, shapes, dtypes and values.

    For checkpoints of other libraries, and GGUF files, see docs/foreign-checkpoints.md.

    Args:
        directory: the checkpoint, a folder or a ``.gguf`` file, or a name on the hub.
        model: for models that are not of a class in transformers: a function that builds the model (called on the
            meta device), or the model itself, which is filled and returned; what it holds is dropped.
        device: where the tensors shall be.
        dtype: what floating parameters are cast to, and quantized embeddings return; None keeps what was saved. Scales
            and biases of quantized layers are float32 always, buffers keep their dtype.
        progress: show a progress bar.
        verify: compare digests. False saves the time (a SHA-256 of every byte) and reads files that were changed by
            hand.
        quantization_config: of GGUF files, a `qcut.QcutConfig`: all tensors are dequantized, cast to ``dtype``, and
            quantized by it while they are read, one at a time. None keeps the types that a scheme holds exactly, and
            makes floats of the others, with a warning.

    Raises:
        ConfigError: ``quantization_config`` with something else than a GGUF file, or of another kind.
        QuantizationError: see `qcut.quantize`, with ``quantization_config``.
        DtypeError: a path or a model of another type.
        DeviceError: there is no such device, or it has no memory.
        CheckpointError: a file is missing, truncated, damaged or foreign; a tensor is missing, superfluous, of a wrong
            shape or dtype, or holds what quantizing never gives (named); or the model cannot be built without
            ``model``. A model passed in is then incomplete only if reading fails after all checks have passed.
        UnsupportedError: what qcut does not read of another library's format (named).

    Exactness: tensors come back bit by bit, except for a cast to ``dtype``.
    """
    from qcut.models.modules import device_with_memory
    from qcut.numerics.plain_state import outside_modes

    path = path_of(directory)
    name = str(directory)
    refuse_adapter(path)
    found = detect(path)
    if found is None and model is None and "/" in name:
        from qcut.checkpoints import hub

        if hub.is_name(name):
            found = Detected(PRETRAINED, path, {})
    if found is None or found.lacks_index or (found.format == PRETRAINED and model is not None):
        found = Detected(QCUT, path, {})
    if found.format not in READERS:
        require_method(found.config, str(path / "config.json"))
    method = getattr(quantization_config, "quant_method", None)
    if quantization_config is not None and (found.format, method) != (GGUF, QCUT):
        raise ConfigError(
            f"{path}: quantization_config is a {type(quantization_config).__name__}, and the checkpoint of "
            f"{found.format}; allowed: a qcut.QcutConfig, with a GGUF file"
        )
    read: Callable[[Detected, Options], nn.Module] = imported(READERS[found.format])
    with outside_modes():
        options = Options(model, device_with_memory(device), dtype, progress, verify, quantization_config)
        return read(found, options).eval()


def path_of(directory: Any) -> Path:
    """The path that a caller gives for a checkpoint.

    Raises:
        DtypeError: it is no text and no path.
    """
    if not isinstance(directory, str | os.PathLike):
        raise DtypeError(f"directory: found {type(directory).__name__}; a path is needed")
    return Path(directory)


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
    """The ``quantization_config`` of a model's configuration, its ``quant_method`` filled in; None if there is none.

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
    if method is None and "quant_algo" in found:
        method = "modelopt"
    return {**found, "quant_method": method}


def imported(place: str) -> Any:
    """What a dotted name of a registry stands for; its module is imported when it is first asked for."""
    module, _, name = place.rpartition(".")
    return getattr(import_module(module), name)


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
    """A folder with a ``config.json``, or an older file next to it, that names the method."""
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
    """Refuse a folder with a model and an adapter: transformers applies adapters unasked, other readers do not.

    Raises:
        CheckpointError: there are such files (named).
    """
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"):
        if (folder / name).exists() and (folder / "config.json").exists():
            raise CheckpointError(
                f"{folder / name}: an adapter next to a model; allowed: the model in a folder of its own, over which "
                "PeftModel.from_pretrained(model, folder) loads the adapter, or the two merged and saved anew"
            )


def weight_map(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, by the index of a folder of transformers; None if transformers reads no index.

    Raises:
        CheckpointError: the index cannot be read, or names a file outside its folder.
    """
    path = folder / INDEX
    if not path.exists() or (folder / SINGLE).exists():
        return None
    places = schema.conform(read_json(path, CheckpointError), _INDEX_FIELDS, path, CheckpointError)["weight_map"]
    return {name: plain_name(file, path, CheckpointError) for name, file in places.items()}


def safetensors_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers reads of a folder, or all if it reads none.

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


def headers_of(files: Iterable[Path]) -> dict[str, TensorHeader]:
    """The headers of all tensors in safetensors files.

    Raises:
        CheckpointError: a file is damaged.
    """
    headers: dict[str, TensorHeader] = {}
    for path in files:
        with TensorFile(path, CheckpointError) as file:
            headers |= file.headers
    return headers


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


def read_headers(files: Mapping[str, TensorFile], weight_map: Mapping[str, str], path: Path) -> dict[str, TensorHeader]:
    """The data files' headers of all stored tensors.

    Args:
        files: by name.
        weight_map: the file of each tensor.
        path: where the map stands, for messages.

    Raises:
        CheckpointError: a file lacks a tensor.
    """
    for name, file in weight_map.items():
        if name not in files[file].headers:
            raise CheckpointError(f"{path.parent / file}: tensor {name!r} is not in it, but {path.name} lists it")
    return {name: files[file].headers[name] for name, file in weight_map.items()}
