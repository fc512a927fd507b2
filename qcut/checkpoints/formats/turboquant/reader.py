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
as its quantizer has them; its reader knows only the seeds of ``different``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from qcut.checkpoints.builder import Builder, finish
from qcut.checkpoints.detect import TURBOQUANT_CONFIG, TURBOQUANT_TENSORS, Detected, Options
from qcut.checkpoints.formats.name_mapping import place_tensors
from qcut.checkpoints.formats.parts import FLOATS, Parts, Stored
from qcut.checkpoints.formats.turboquant.format import Config, pass_seeds
from qcut.checkpoints.huggingface import causal_class, model_of
from qcut.common.progress import progress_bar
from qcut.common.safetensors import TensorFile, TensorHeader, bytes_digest
from qcut.common.schema import JSON_BYTES, parse_json, read_bounded
from qcut.common.together import open_together
from qcut.errors import CheckpointError, ConfigError, QcutError, UnsupportedError
from qcut.layers.codebook import CodebookLinear
from qcut.models.modules import is_linear
from qcut.numerics.checks import out_of_range
from qcut.numerics.codebook import packing
from qcut.numerics.codebook.quantizer import RotatedCodebook
from qcut.schemes import Codebook

MODEL_NAME = "config.json"
FILE_NAMES = (*TURBOQUANT_TENSORS, MODEL_NAME, TURBOQUANT_CONFIG)
PASS_PARTS = (("indices", "norms", "codebook"), ("pass2_indices", "pass2_norms", "pass2_codebook"))
_PARTS = {part for parts in PASS_PARTS for part in parts} - {"codebook"} | {"bias"}

Headers = Mapping[str, TensorHeader]
Opened = Mapping[str, tuple[Path, BinaryIO]]


def load(found: Detected, options: Options) -> nn.Module:
    """Read a folder of the turboquant-model package, or of qcut's writer of its format; arguments as `qcut.load`.

    The layers multiply by 16-bit activations (scheme ``codebook``, activation ``fp16``).

    Raises:
        CheckpointError: as `qcut.load`; a file is a pickle, or of another save; or two of the model's layers have the
            same name except dots and underscores.
        UnsupportedError: entropy coding, factored norms, quantized embeddings, or a key of the configuration that is
            not known (named).

    Exactness: indices, codebooks and norms as stored, bit by bit; norms of two passes in the wider of their dtypes.

    Source: docs/schemes.md, section 4.
    """
    model, device, dtype, progress, verify, _ = options
    directory = found.path
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
        linears = linear_layers(model)
        stored = {name: Stored.in_file(quantized, name, verify) for name in quantized.headers}
        names = _resolve(quantized.headers, model, quantized.path)
        Parts("", quantized.path, 0, 0, stored).require("codebook", ("F32",), [1 << config.bit_width])
        layers = _layers(stored, names, linears, quantized.path)
        for name, parts in layers.items():
            _check_layer(parts, name, linears[name], config)
        replaced = {id(linears[name]) for name in layers}
        everywhere = {name for name, m in model.named_modules(remove_duplicate=False) if id(m) in replaced}
        rest = {name: Stored.in_file(others, name, verify) for name in others.headers}
        holders = place_tensors(model, everywhere, rest, others.path, computes=False)
        builder = Builder(model, device, dtype)
        new: dict[int, nn.Module] = {}
        with progress_bar(len(layers) + len(holders), "load", "tensor", shown=progress) as advance:
            for index, (name, parts) in enumerate(layers.items()):
                new[id(linears[name])] = _read_layer(parts, name, config, index, device).train(False)
                advance(1)
            for same in holders:
                builder.put(same, rest[same[0]].read(), others.path)
                advance(1)
    finish(model, new, dtype, directory)
    return model


def _text(opened: Opened, directory: Path, name: str) -> bytes | None:
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
    """Refuse files of different saves. Files of the package state none."""
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
    """The layers that the package quantizes unless they are skipped: ``nn.Linear``, in the model's order."""
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


def _layers(
    stored: Mapping[str, Stored], names: Mapping[str, str], linears: Mapping[str, nn.Linear], path: Path
) -> dict[str, Parts]:
    """What the file holds of each layer, with the codebook that all share, by the layer's name in the model."""
    shared = {"codebook": stored["codebook"]}
    own: dict[str, dict[str, Stored]] = {stem: dict(shared) for stem in names}
    for full, tensor in stored.items():
        stem, _, key = full.partition(".")
        if key:
            own[stem][key] = tensor
    sizes = {stem: (linears[name].out_features, linears[name].in_features) for stem, name in names.items()}
    return {name: Parts(stem, path, *sizes[stem], own[stem]) for stem, name in names.items()}


def _check_layer(parts: Parts, name: str, module: nn.Linear, config: Config) -> None:
    n, k = parts.n, parts.k
    groups = -(-k // (config.group_size or k))
    widths = (config.bit_width, config.residual_bit_width)
    for (indices, norms, values), bits in zip(PASS_PARTS, widths, strict=True):
        if bits is None:
            if extra := sorted(p for p in (indices, norms, values) if p in parts.tensors):
                raise CheckpointError(f"{parts.where}: layer {name!r} has {extra}, but residual_bit_width is null")
            continue
        parts.require(indices, ("U8",), [n, -(-k // 2)])
        parts.require(norms, ("F32", "F16"), [n] if groups == 1 else [n, groups])
        parts.require(values, ("F32",), [1 << bits])
    if module._parameters.get("bias") is not None:
        parts.require("bias", FLOATS, [n])
    elif "bias" in parts.tensors:
        raise parts.error("bias", "the model's layer has no bias")


def _read_layer(parts: Parts, name: str, config: Config, index: int, device: torch.device | str) -> CodebookLinear:
    size = config.group_size or parts.k
    strategy: Any = config.rotation_strategy
    seeds = pass_seeds(config.seed, config.residual_seed, strategy, index)
    passes = []
    for keys, bits, seed in zip(PASS_PARTS, (config.bit_width, config.residual_bit_width), seeds, strict=True):
        if bits is None:
            continue
        indices = packing.unpack(parts.read(keys[0]), 4, parts.k)
        if int(indices.max()) >= 1 << bits:
            raise parts.error(keys[0], f"found the index {int(indices.max())}; {bits} bits hold less")
        norms, values = parts.read_scales(keys[1], 0.0), parts.read(keys[2])
        if out_of_range(values) or bool((values.diff() <= 0).any()):
            owner = replace(parts, name="") if keys[2] == "codebook" else parts
            raise owner.error(keys[2], f"a codebook, does not ascend: {values.tolist()}")
        kind: Any = config.rotation
        passes.append(RotatedCodebook(indices, norms.view(len(norms), -1), values, size, kind, seed))
    # A layer has norms of one dtype; the package may store halves for the first pass and floats for the second.
    dtype = torch.promote_types(passes[0].norms.dtype, passes[-1].norms.dtype)
    moved = [
        RotatedCodebook(p.indices.to(device), p.norms.to(device, dtype), p.values.to(device), size, p.rotation, p.seed)
        for p in passes
    ]
    bias = parts.read_bias()
    try:
        held = None if bias is None else bias.to(device)
        return CodebookLinear.from_passes(moved, held, layer_scheme(config, moved), name=name)
    except QcutError as exc:
        raise CheckpointError(f"{parts.where}: layer {name!r}: {exc}") from exc


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
