"""What a folder with a model holds, read only from its files' headers: no model is built, no weight is read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qcut.checkpoints.detect import (
    INDEX,
    PRETRAINED,
    QCUT,
    QCUT_CONFIG,
    TURBOQUANT,
    TURBOQUANT_CONFIG,
    TURBOQUANT_TENSORS,
    check_layer_sizes,
    detect,
    read_config,
    read_headers,
    safetensors_files,
    weight_map,
)
from qcut.checkpoints.expert_tensors import pieces_of
from qcut.checkpoints.marks import expert_marks_among, marks_among
from qcut.common import schema
from qcut.common.safetensors import TensorFile, TensorHeader, plain_name
from qcut.common.schema import read_json
from qcut.errors import CheckpointError, ConfigError
from qcut.schemes import parse_scheme, scheme_from_json

_PACKED = ("I8", "U8", "I32", "U32", "F8_E4M3", "F8_E5M2")
_LAYER = schema.record(
    {"scheme": schema.anything(), "in_features": schema.integer(1), "out_features": schema.integer(1)}, more=True
)
_TABLES = schema.table(schema.record({"table": schema.text()}, more=True))
_EXPERTS = schema.table(
    schema.record({}, {"pieces": (schema.nothing_or(schema.table(schema.items(schema.text()))), None)}, more=True)
)
_LAYERS, _NAMES = schema.table(_LAYER), schema.table(schema.text())


@dataclass(frozen=True)
class StoredLayer:
    """A quantized layer in a folder.

    Attributes:
        name: the layer.
        scheme: its scheme, or the name of another library's method.
        out_features: N; None if another library's format does not state it.
        in_features: K; None if another library's format does not state it.
        nbytes: bytes of its tensors that are stored under its own name.
        tied_to: the layer that stores its tensors, or None.
        experts: whether it is a projection of all experts of a mixture; their rows count together.
    """

    name: str
    scheme: str
    out_features: int | None
    in_features: int | None
    nbytes: int
    tied_to: str | None = None
    experts: bool = False

    @property
    def weights(self) -> int | None:
        """N times K, or None."""
        return None if self.out_features is None or self.in_features is None else self.out_features * self.in_features

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of all that the layer stores, over its weights; None if the weights lie elsewhere or are unknown."""
        return None if self.weights is None or self.tied_to else 8 * self.nbytes / self.weights


@dataclass(frozen=True)
class StoredTensor:
    """A tensor outside of quantized layers.

    Attributes:
        name: of the tensor.
        code: its dtype, as safetensors spells it: F32, F16, BF16, …
        shape: of the tensor.
        nbytes: its bytes.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def is_float(self) -> bool:
        """Whether the values are floating-point numbers."""
        return "F" in self.code


@dataclass(frozen=True)
class Contents:
    """What a folder holds.

    Attributes:
        directory: the folder.
        format: who wrote it: ``qcut``, ``turboquant-model``, ``transformers``, or the name of another method.
        model: class of the model, or its type; empty if nothing states it.
        layers: quantized layers.
        tensors: all tensors outside of them.
        files: bytes of the files with the model's tensors, by name.
    """

    directory: Path
    format: str
    model: str
    layers: tuple[StoredLayer, ...]
    tensors: tuple[StoredTensor, ...]
    files: dict[str, int]

    @cached_property
    def float_parameters(self) -> int:
        """Floating-point values outside of quantized layers."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors if tensor.is_float)

    @cached_property
    def parameters(self) -> int | None:
        """Floating-point values and quantized weights, shared ones once; None if a layer's size is not known."""
        weights = [layer.weights for layer in self.layers if layer.tied_to is None]
        known = [count for count in weights if count is not None]
        return None if len(known) < len(weights) else self.float_parameters + sum(known)

    @cached_property
    def percent_float(self) -> float | None:
        """Of the parameters, the per cent that is in floating point."""
        return None if not self.parameters else 100 * self.float_parameters / self.parameters

    @cached_property
    def percent_experts(self) -> float | None:
        """Of the parameters, the per cent that are quantized weights of experts."""
        weights = sum(layer.weights or 0 for layer in self.layers if layer.experts)
        return None if not self.parameters else 100 * weights / self.parameters


def contents(directory: str | Path) -> Contents:
    """Read the headers and the configuration of a folder.

    Args:
        directory: written by qcut, by transformers or by another library, with safetensors files.

    Raises:
        CheckpointError: no folder, or no safetensors files in it; a file is missing, truncated or foreign; a
            configuration that cannot be read; or a layer that has no tensors, or more weights than the files hold
            (named).
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: not a directory")
    found = detect(directory)
    form = "transformers" if found is None else found.format
    with ExitStack() as opened:
        if form == QCUT:
            path = directory / QCUT_CONFIG
            index = read_json(path, CheckpointError)
            where = schema.conform(index.get("weight_map"), _NAMES, path, CheckpointError)
            files = _open(directory, {plain_name(file, path, CheckpointError) for file in where.values()}, opened)
            headers = read_headers(files, where, path)
            layers, modules = _own_layers(index, headers, files, path)
            return _contents(directory, form, str(index.get("model_class") or ""), layers, headers, files, modules)
        model = _model_name(_config(directory))
        if form == TURBOQUANT:
            files, headers = _all_of(directory, TURBOQUANT_TENSORS, opened)
            layers = _turboquant_layers(directory, headers)
            return _contents(directory, form, model, layers, headers, files)
        files, headers = _headers(directory, opened)
        layers = []
        modules = set()
        if form == PRETRAINED and found is not None:
            form = QCUT
            files, headers = _without_marks(files, headers, bool(found.config.get("experts")))
            layers, modules = _own_layers(found.config, headers, files, directory / "config.json")
        elif found is not None:
            layers = _packed_layers(form, headers)
        return _contents(directory, form, model, layers, headers, files, modules)


def _config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    return read_config(path) if path.exists() else {}


def _model_name(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else config.get("model_type")
    return first if isinstance(first, str) else ""


def _headers(directory: Path, opened: ExitStack) -> tuple[dict[str, TensorFile], dict[str, TensorHeader]]:
    names = [path.name for path in safetensors_files(directory)]
    if (where := weight_map(directory)) is None:
        return _all_of(directory, names, opened)
    files = _open(directory, names, opened)
    return files, read_headers(files, where, directory / INDEX)


def _all_of(
    directory: Path, names: Iterable[str], opened: ExitStack
) -> tuple[dict[str, TensorFile], dict[str, TensorHeader]]:
    files = _open(directory, names, opened)
    return files, {name: header for file in files.values() for name, header in file.headers.items()}


def _open(directory: Path, names: Iterable[str], opened: ExitStack) -> dict[str, TensorFile]:
    return {name: opened.enter_context(TensorFile(directory / name, CheckpointError)) for name in sorted(names)}


def _without_marks(
    files: Mapping[str, TensorFile], headers: Mapping[str, TensorHeader], experts: bool
) -> tuple[dict[str, TensorFile], dict[str, TensorHeader]]:
    """The model's tensors, and the files with any of them."""
    marks = marks_among(headers) | (expert_marks_among(headers) if experts else set())
    kept = {name: header for name, header in headers.items() if name not in marks}
    return {name: file for name, file in files.items() if kept.keys() & file.headers.keys()}, kept


def _own_layers(
    index: Mapping[str, Any], headers: Mapping[str, TensorHeader], files: Mapping[str, TensorFile], path: Path
) -> tuple[list[StoredLayer], set[str]]:
    """The quantized layers, and the modules that give the stored tensors their names."""
    specs = schema.conform(index.get("layers", {}), _LAYERS, path, CheckpointError)
    check_layer_sizes(specs, sum(file.size for file in files.values()), path)
    tied = schema.conform(index.get("tied", {}), _NAMES, path, CheckpointError)
    owners = {name.rpartition(".")[0]: owner.rpartition(".")[0] for name, owner in tied.items()}
    stored = _by_module(headers)
    pieces = _pieces(index, stored, path)
    layers, own = [], set(specs)
    for name, spec in specs.items():
        try:
            given = spec["scheme"]
            scheme = parse_scheme(given) if isinstance(given, str) else scheme_from_json(given)
        except ConfigError as error:
            raise CheckpointError(f"{path}: layer {name!r}: {error}") from error
        modules = pieces.get(name) or ([name] if name in stored else _renamed(name, stored.keys() - specs.keys()))
        own.update(modules)
        nbytes = sum(header.nbytes for module in modules for header in stored.get(module, {}).values())
        owner = None if nbytes else owners.get(name)
        if not nbytes and owner not in specs:
            raise CheckpointError(f"{path}: layer {name!r}: the files have no tensors of it")
        sizes = spec["out_features"], spec["in_features"]
        layers.append(StoredLayer(name, scheme.name, *sizes, nbytes, owner, bool(spec.get("experts"))))
    return layers + _tied_tables(index, {layer.name: layer for layer in layers}, path), own


def _pieces(index: Mapping[str, Any], stored: Iterable[str], path: Path) -> dict[str, list[str]]:
    """The modules of a stack's pieces, by the stack's name, for stacks with the tensors of each expert stored apart.

    A family's checkpoints may have another name for what the experts are in; the numbers in the names are the same.
    """
    experts = schema.conform(index.get("experts", {}), _EXPERTS, path, CheckpointError)
    places: dict[tuple[str, ...], str] = {}
    found: dict[str, list[str]] = {}
    for stack, names in pieces_of(experts, path).items():
        found[stack] = []
        places |= {(*_numbers(stack), name): stack for name in names}
    for module in stored:
        outer, _, name = module.rpartition(".")
        outer, _, number = outer.rpartition(".")
        place = places.get((*_numbers(outer), name))
        if place is not None and number.isdigit():
            found[place].append(module)
    return found


def _renamed(name: str, stored: Iterable[str]) -> list[str]:
    """The stored module that a layer is under another outer name, if there is one: from the first number on, as named.

    A family's checkpoints may have another name for what all layers are in.
    """
    inner = re.search(r"\.\d+\..+", name)
    found = [] if inner is None else [module for module in stored if module.endswith(inner[0])]
    return found if len(found) == 1 else []


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.split(".") if part.isdigit())


def _tied_tables(index: Mapping[str, Any], layers: Mapping[str, StoredLayer], path: Path) -> list[StoredLayer]:
    """Quantized embeddings that read a layer's weight; one with a table of its own is a layer already."""
    specs = schema.conform(index.get("embeddings", {}), _TABLES, path, CheckpointError)
    tied = {name: layers[spec["table"]] for name, spec in specs.items() if spec["table"] in layers}
    return [
        StoredLayer(name, layer.scheme, layer.out_features, layer.in_features, 0, layer.name)
        for name, layer in tied.items()
        if layer.name != f"{name}.table"
    ]


def _turboquant_layers(directory: Path, headers: Mapping[str, TensorHeader]) -> list[StoredLayer]:
    """The layers of the turboquant-model package; their indices take half a byte at any width."""
    config = read_json(directory / TURBOQUANT_CONFIG, CheckpointError)
    widths = (config.get("bit_width"), config.get("residual_bit_width"))
    scheme = "codebook" + "+".join(str(bits) for bits in widths if bits)
    layers = []
    for name, parts in _by_module(headers).items():
        shape = parts["indices"].shape if "indices" in parts else []
        if len(shape) == 2:
            nbytes = sum(header.nbytes for header in parts.values())
            layers.append(StoredLayer(name, scheme, shape[0], 2 * shape[1], nbytes))
    return layers


def _packed_layers(method: str, headers: Mapping[str, TensorHeader]) -> list[StoredLayer]:
    """The modules that another library's method has packed, in whatever layout."""
    layers = []
    for name, parts in _by_module(headers).items():
        if any(header.code in _PACKED and len(header.shape) >= 2 for header in parts.values()):
            nbytes = sum(header.nbytes for header in parts.values())
            plain = parts.get("weight")
            whole = plain is not None and len(plain.shape) == 2 and plain.code == "I8"
            n, k = plain.shape if whole and plain is not None else (None, None)
            layers.append(StoredLayer(name, method, n, k, nbytes))
    return layers


def _by_module(headers: Mapping[str, TensorHeader]) -> dict[str, dict[str, TensorHeader]]:
    modules: dict[str, dict[str, TensorHeader]] = {}
    for name, header in headers.items():
        module, _, key = name.rpartition(".")
        modules.setdefault(module, {})[key] = header
    return modules


def _contents(
    directory: Path,
    form: str,
    model: str,
    layers: list[StoredLayer],
    headers: Mapping[str, TensorHeader],
    files: Mapping[str, TensorFile],
    own: Iterable[str] = (),
) -> Contents:
    quantized = {*own, *(layer.name for layer in layers)}
    tensors = tuple(_outside(quantized, headers))
    return Contents(directory, form, model, tuple(layers), tensors, {name: file.size for name, file in files.items()})


def _outside(quantized: set[str], headers: Mapping[str, TensorHeader]) -> Iterator[StoredTensor]:
    for name, header in headers.items():
        if name.rpartition(".")[0] not in quantized:
            yield StoredTensor(name, header.code, tuple(header.shape), header.nbytes)
