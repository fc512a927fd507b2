"""Directories of the turboquant-model package, read. `qcut.checkpoints.formats.turboquant.writer` writes them.

- ``turboquant_config.json``: `qcut.checkpoints.formats.turboquant.format.Config`.
- ``config.json``: the model's class, for transformers.
- ``model.safetensors``: ``codebook`` float32 ``[2**bits]`` of every first pass, and for each layer, the dots of its
  name turned into underscores: ``.indices`` uint8 ``[N, ceil(K / 2)]``, ``byte = idx[2j] | idx[2j + 1] << 4`` at any
  width; ``.norms`` float32 or float16 ``[N]`` for one group, else ``[N, G]``; ``.bias`` float32 ``[N]``; and of a
  residual pass ``.pass2_indices``, ``.pass2_norms`` and ``.pass2_codebook``.
- ``non_quantized.safetensors``: every other parameter, tied ones once, and every buffer.

A group shorter than the group size means here what the package's quantizer means by it, which normalizes by the
square root of its own columns; that package's layer multiplies by that of the group size. Seeds follow the strategy,
as its quantizer has them; its reader knows the seeds of ``different`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from qcut.checkpoints.formats.turboquant.format import Config, pass_seeds
from qcut.checkpoints.headers import TURBOQUANT_CONFIG, TURBOQUANT_TENSORS
from qcut.checkpoints.huggingface import causal_class, model_of
from qcut.checkpoints.skeleton import as_like, check_no_meta
from qcut.common.digests import bytes_digest
from qcut.common.progress import progress_bar
from qcut.common.reading import JSON_BYTES, parse_json, read_bounded
from qcut.common.safetensors_file import TENSOR_DTYPES, TensorFile
from qcut.common.safetensors_header import TensorHeader
from qcut.common.together import open_together
from qcut.errors import CheckpointError, ConfigError, QcutError, UnsupportedError
from qcut.layers.codebook import CodebookLinear
from qcut.layers.frozen import float_dtype
from qcut.layers.linear import state_dtype
from qcut.models.modules import is_linear, replace_modules
from qcut.numerics.checks import out_of_range
from qcut.numerics.codebook import packing
from qcut.numerics.codebook.quantizer import RotatedCodebook
from qcut.schemes import Codebook

MODEL_NAME = "config.json"
FILE_NAMES = (*TURBOQUANT_TENSORS, MODEL_NAME, TURBOQUANT_CONFIG)
PASS_PARTS = (("indices", "norms", "codebook"), ("pass2_indices", "pass2_norms", "pass2_codebook"))
_PARTS = {part for parts in PASS_PARTS for part in parts} - {"codebook"} | {"bias"}
_FLOATS = ("F16", "BF16", "F32", "F64")

Headers = Mapping[str, TensorHeader]
Opened = Mapping[str, tuple[Path, BinaryIO]]


def load(
    directory: str | Path,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: bool = True,
    verify: bool = True,
) -> nn.Module:
    """Read a directory and return the model, ready to run, in evaluation mode.

    The model is built on the meta device; names, shapes and dtypes of all tensors are checked against the files'
    headers before any is read, then they are read one at a time. No code of the directory is run, and no pickle read.
    The layers multiply by 16-bit activations (scheme ``codebook``, activation ``fp16``).

    Args:
        directory: with the files above.
        model: for models that are not causal language models of transformers: see `qcut.load`.
        device: where the tensors shall be.
        dtype: what floating parameters outside quantized layers are cast to; None keeps what was saved.
        progress: show a progress bar.
        verify: compare the digests that qcut's writer leaves in the files; see `qcut.load`.

    Raises:
        CheckpointError: a file is missing, truncated, damaged, a pickle, foreign or of another save; a tensor is
            missing, superfluous, of a wrong shape or dtype, or holds what cannot be (named); the model cannot be built,
            or two of its layers have the same name but for dots and underscores. A model passed in is then incomplete
            only if reading fails after all checks have passed.
        UnsupportedError: entropy coding, factored norms, quantized embeddings, or a key of the configuration that is
            not known (named).

    Exactness: indices, codebooks and norms as stored, bit by bit; norms of two passes in the wider of their dtypes.

    Source: docs/schemes.md, section 4.
    """
    directory = Path(directory)
    with ExitStack() as stack:
        opened = open_together(directory, FILE_NAMES, TURBOQUANT_CONFIG, CheckpointError)
        for _, file in opened.values():
            stack.enter_context(file)
        texts = {name: _text(opened, directory, name) for name in (TURBOQUANT_CONFIG, MODEL_NAME)}
        config = _read_config(texts[TURBOQUANT_CONFIG], directory / TURBOQUANT_CONFIG)
        quantized, others = (_open(opened, directory, name) for name in TURBOQUANT_TENSORS)
        _check_revision(quantized, others, texts, model is None, directory, verify)
        if not isinstance(model, nn.Module):
            count = len(quantized.headers) + len(others.headers)
            with torch.device("meta"):
                model = _skeleton(texts[MODEL_NAME], directory / MODEL_NAME, count) if model is None else model()
        names = _resolve(quantized.headers, model, quantized.path)
        linears = linear_layers(model)
        _require(quantized.headers, "codebook", ("F32",), [1 << config.bit_width], quantized.path)
        for stem, name in names.items():
            _check_layer(quantized.headers, stem, name, linears[name], config, quantized.path)
        rest = _check_rest(others.headers, model, set(names.values()), others.path)

        layers: dict[int, nn.Module] = {}
        with progress_bar(len(names) + len(rest), "load", "tensor", shown=progress) as advance:
            for index, (stem, name) in enumerate(names.items()):
                module = linears[name]
                layer = _read_layer(quantized, stem, name, module.in_features, config, index, device, verify)
                layers[id(module)] = layer.train(False)
                advance(1)
            replace_modules(model, layers)
            for stored, holders in rest.items():
                _fill(model, holders, others, stored, device, dtype, verify)
                advance(1)
    check_no_meta(dict(model.named_modules()), directory)
    state_dtype(model, dtype or float_dtype(model))
    return model.eval()


def _text(opened: Opened, directory: Path, name: str) -> bytes | None:
    """The contents of a JSON file, or None where there is none."""
    if name not in opened:
        return None
    path, file = opened[name]
    try:
        return read_bounded(file, JSON_BYTES, path, CheckpointError)
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be read: {exc.strerror or exc}") from exc


def _object(text: bytes | None, path: Path) -> dict[str, Any]:
    if text is None:
        raise CheckpointError(f"{path}: there is no such file")
    data = parse_json(text, path, CheckpointError)
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: found a JSON {type(data).__name__}, an object is needed")
    return data


def _read_config(text: bytes | None, path: Path) -> Config:
    data = _object(text, path)
    try:
        return Config.from_json(data)
    except ConfigError as exc:
        raise CheckpointError(f"{path}: {exc}") from exc
    except UnsupportedError as exc:
        raise UnsupportedError(f"{path}: {exc}") from exc


def _check_revision(
    quantized: TensorFile,
    others: TensorFile,
    texts: Mapping[str, bytes | None],
    builds: bool,
    directory: Path,
    verify: bool,
) -> None:
    """Refuse files of different saves. Files of the package say nothing of theirs."""
    revisions = [file.facts.get("revision", "") for file in (quantized, others)]
    if revisions[0] != revisions[1]:
        raise CheckpointError(
            f"{others.path}: of another save, {revisions[1] or 'none'!r}, than {quantized.path.name}, which is of "
            f"{revisions[0] or 'none'!r}"
        )
    if not verify or not quantized.facts:
        return
    written = quantized.facts["files"]
    for name, text in texts.items():
        if text is None or (name == MODEL_NAME and not builds):
            continue
        if bytes_digest(text) != written.get(name):
            raise CheckpointError(
                f"{directory / name}: damaged, changed, or of another save than {quantized.path.name}: found the "
                f"SHA-256 {bytes_digest(text)[:16]}…, {str(written.get(name))[:16]}… was written; verify=False reads "
                "what was changed by hand"
            )


def _skeleton(text: bytes | None, path: Path, tensors: int) -> nn.Module:
    """An empty causal language model of a class that transformers itself defines."""
    config = _object(text, path)
    try:
        return model_of(causal_class(config, str(path)), config, str(path), tensors=tensors)
    except CheckpointError as exc:
        raise CheckpointError(f"{exc}; or pass model=") from exc


def _open(opened: Opened, directory: Path, name: str) -> TensorFile:
    path = directory / name
    if name not in opened:
        beside = (directory / "layers", path.with_suffix(".pt"), directory / "codebook.pt")
        if pickles := [p.name for p in beside if p.exists()]:
            raise CheckpointError(
                f"{path}: there is no such file; {', '.join(pickles)} holds pickles, which are not read: save the "
                "model again with a version of turboquant-model that writes safetensors"
            )
        raise CheckpointError(f"{path}: there is no such file")
    where, file = opened[name]
    return TensorFile(where, CheckpointError, file)


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers that the package quantizes unless told to skip them: ``nn.Linear``, in the model's order."""
    return {name: m for name, m in model.named_modules() if name and isinstance(m, nn.Linear) and is_linear(m)}


def _resolve(headers: Headers, model: nn.Module, path: Path) -> dict[str, str]:
    """Name in the file → name in the model, in the model's order."""
    stems: set[str] = set()
    for name in headers:
        stem, _, part = name.partition(".")
        if name == "codebook":
            continue
        if part.startswith(("norms.", "indices_ec", "pass2_indices_ec", "qe_", "weight_")):
            raise UnsupportedError(f"{path}: tensor {name!r}: entropy coding, factored norms, embeddings are not read")
        if part not in _PARTS:
            raise CheckpointError(f"{path}: tensor {name!r} is none of the format's; parts are {sorted(_PARTS)}")
        stems.add(stem)
    names: dict[str, str] = {}
    for name in linear_layers(model):
        stem = name.replace(".", "_")
        if stem in stems:
            if stem in names:
                raise CheckpointError(f"{path}: {stem!r} may be {names[stem]!r} or {name!r}; names must be unambiguous")
            names[stem] = name
    if foreign := sorted(stems - names.keys()):
        raise CheckpointError(f"{path}: {len(foreign)} layers are none of the model's; the first is {foreign[0]!r}")
    return names


def _require(headers: Headers, name: str, dtypes: tuple[str, ...], shape: list[int], path: Path) -> None:
    if name not in headers:
        raise CheckpointError(f"{path}: tensor {name!r} is missing")
    dtype, stored_shape = headers[name].code, headers[name].shape
    if dtype not in dtypes or stored_shape != shape:
        raise CheckpointError(
            f"{path}: tensor {name!r}: found {dtype} {stored_shape}, {' or '.join(dtypes)} {shape} is needed"
        )


def _check_layer(headers: Headers, stem: str, name: str, module: nn.Linear, config: Config, path: Path) -> None:
    n, k = module.out_features, module.in_features
    groups = -(-k // (config.group_size or k))
    widths = (config.bit_width, config.residual_bit_width)
    for (indices, norms, values), bits in zip(PASS_PARTS, widths, strict=True):
        if bits is None:
            if extra := sorted(p for p in (indices, norms, values) if f"{stem}.{p}" in headers):
                raise CheckpointError(f"{path}: layer {name!r} has {extra}, but residual_bit_width is null")
            continue
        _require(headers, f"{stem}.{indices}", ("U8",), [n, -(-k // 2)], path)
        _require(headers, f"{stem}.{norms}", ("F32", "F16"), [n] if groups == 1 else [n, groups], path)
        if values != "codebook":
            _require(headers, f"{stem}.{values}", ("F32",), [1 << bits], path)
    bias = f"{stem}.bias"
    if module._parameters.get("bias") is not None:
        _require(headers, bias, ("F32", "F16", "BF16"), [n], path)
    elif bias in headers:
        raise CheckpointError(f"{path}: tensor {bias!r}: the model's layer has no bias")


def _check_rest(
    headers: Headers, model: nn.Module, layers: set[str], path: Path
) -> dict[str, list[tuple[str, Tensor]]]:
    """Name in the file → the names and tensors of the model that it fills: several where they are tied."""
    holders: dict[int, list[tuple[str, Tensor]]] = {}
    replaced = {id(model.get_submodule(name)) for name in layers}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if id(module) not in replaced:
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    holders.setdefault(id(tensor), []).append((f"{prefix}.{key}" if prefix else key, tensor))
    filled = {}
    missing = []
    for same in holders.values():
        stored = [name for name, _ in same if name in headers]
        if not stored:
            missing.append(same[0][0])
            continue
        tensor = same[0][1]
        exact = next((code for code, dtype in TENSOR_DTYPES.items() if dtype == tensor.dtype), "")
        _require(headers, stored[0], _FLOATS if tensor.is_floating_point() else (exact,), list(tensor.shape), path)
        filled[stored[0]] = same
    foreign = sorted(headers.keys() - filled.keys())
    if missing or foreign:
        raise CheckpointError(
            f"{path}: {len(missing)} tensors of the model are missing and {len(foreign)} do not belong to it; "
            f"the first is {(missing or foreign)[0]!r}"
        )
    return filled


def _read_layer(
    file: TensorFile, stem: str, name: str, k: int, config: Config, index: int, device: torch.device | str, verify: bool
) -> CodebookLinear:
    path = file.path
    size = config.group_size or k
    strategy: Any = config.rotation_strategy
    seeds = pass_seeds(config.seed, config.residual_seed, strategy, index)
    passes = []
    for parts, bits, seed in zip(PASS_PARTS, (config.bit_width, config.residual_bit_width), seeds, strict=True):
        if bits is None:
            continue
        names = [part if part == "codebook" else f"{stem}.{part}" for part in parts]
        stored, norms, values = (file.read(one, verify=verify) for one in names)
        indices = packing.unpack(stored, 4, k)
        if int(indices.max()) >= 1 << bits:
            raise CheckpointError(f"{path}: tensor {names[0]!r} has index {int(indices.max())}; {bits} bits hold less")
        if found := out_of_range(norms, 0.0):
            raise CheckpointError(f"{path}: tensor {names[1]!r}: found {found}; finite norms from 0 are needed")
        if out_of_range(values) or bool((values.diff() <= 0).any()):
            raise CheckpointError(f"{path}: tensor {names[2]!r}, a codebook, does not ascend: {values.tolist()}")
        kind: Any = config.rotation
        passes.append(RotatedCodebook(indices, norms.view(len(norms), -1), values, size, kind, seed))
    # A layer has norms of one dtype; the package may store halves for the first pass and floats for the second.
    dtype = torch.promote_types(passes[0].norms.dtype, passes[-1].norms.dtype)
    moved = [
        RotatedCodebook(p.indices.to(device), p.norms.to(device, dtype), p.values.to(device), size, p.rotation, p.seed)
        for p in passes
    ]
    bias = f"{stem}.bias"
    held = file.read(bias, verify=verify).to(device, torch.float32) if bias in file.headers else None
    if held is not None and (found := out_of_range(held)):
        raise CheckpointError(f"{path}: tensor {bias!r}: found {found}; finite values are needed")
    try:
        return CodebookLinear.from_passes(moved, held, layer_scheme(config, moved), name=name)
    except QcutError as exc:
        raise CheckpointError(f"{path}: layer {name!r}: {exc}") from exc


def layer_scheme(config: Config, passes: Sequence[RotatedCodebook]) -> Codebook:
    """The scheme of a layer with these passes, which may have seeds of their own."""
    return Codebook(
        bits=config.bit_width,
        residual_bits=config.residual_bit_width,
        group_size=config.group_size,
        rotation=passes[0].rotation,
        seed=passes[0].seed,
        residual_seed=passes[-1].seed if len(passes) > 1 else config.residual_seed,
        norm_dtype="fp32" if passes[0].norms.dtype is torch.float32 else "fp16",
    )


def _fill(
    model: nn.Module,
    holders: list[tuple[str, Tensor]],
    file: TensorFile,
    stored: str,
    device: torch.device | str,
    dtype: torch.dtype | None,
    verify: bool,
) -> None:
    new = as_like(file.read(stored, verify=verify), holders[0][1], device, dtype)
    is_parameter = isinstance(new, nn.Parameter)
    if is_parameter and (found := out_of_range(new.detach())):
        raise CheckpointError(f"{file.path}: tensor {stored!r}: found {found}; finite values are needed")
    for name, _ in holders:
        parent, _, key = name.rpartition(".")
        module = model.get_submodule(parent)
        (module._parameters if is_parameter else module._buffers)[key] = new  # type: ignore[assignment]
