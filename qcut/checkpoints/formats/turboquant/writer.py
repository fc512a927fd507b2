"""Writes directories of the turboquant-model package, in the layout of `qcut.checkpoints.formats.turboquant.reader`."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qcut.checkpoints.description import failures_name, refuse_conv1d
from qcut.checkpoints.detect import TURBOQUANT_CONFIG, TURBOQUANT_TENSORS
from qcut.checkpoints.formats.turboquant.format import STRATEGIES, Config, pass_seeds, quantize
from qcut.checkpoints.formats.turboquant.reader import MODEL_NAME, PASS_PARTS, layer_scheme, linear_layers
from qcut.common.progress import with_progress
from qcut.common.safetensors import bytes_digest
from qcut.common.safetensors_writer import write_tensors
from qcut.common.together import replacing_together
from qcut.errors import CheckpointError, QuantizationError, UnsupportedError
from qcut.layers.codebook import CodebookLinear
from qcut.layers.embedding import Embedding
from qcut.layers.linear import Linear
from qcut.layers.quantized import FrozenWeight
from qcut.models.modules import replace_modules, weight_nk
from qcut.numerics.checks import out_of_range
from qcut.numerics.codebook import packing


def save_turboquant(model: nn.Module, directory: str | Path) -> None:
    """Write a model with layers quantized by a codebook as the turboquant-model package would.

    Indices, norms, codebooks and seeds are written as they are: what that package quantized comes back bit by bit, and
    what qcut quantized has qcut's codebook, which the files carry. For the package's own codebook and rounding see
    `quantize_model`. Linear layers in float go with the rest. The files hold neither fused activations, which the
    model's class has, nor whether activations are int8.

    All files are written under temporary names and put in force together (`qcut.common.together`): a crash leaves the
    old model or the new one. They carry digests and the name of the save, which `qcut.load` checks and other readers do
    not heed. One process saves at a time. Other files stay as they are. What goes into the files is in the CPU's memory
    as a whole: the format has one file for all layers.

    Args:
        model: at least one `qcut.Linear` of a codebook scheme.
        directory: created if missing.

    Raises:
        UnsupportedError: a layer of another scheme, of pairs, without a rotation, in place of transformers' ``Conv1D``
            (which the package does not replace), a quantized embedding, or layers that differ in width,
            groups, rotation, seeds or codebook, which this format has one of (the layer is named).
        CheckpointError: two layers' names differ only in dots and underscores; a tensor is on the meta device; a
            parameter holds NaN or Inf; or the directory cannot be written.

    Exactness: `qcut.load` gives back indices, norms and codebooks bit by bit.

    Source: docs/schemes.md, section 4.
    """
    directory = Path(directory)
    layers: dict[str, CodebookLinear] = {}
    for name, module in model.named_modules():
        if isinstance(module, Embedding):
            raise UnsupportedError(f"{name!r}: a quantized embedding; the format is written only with floating ones")
        if isinstance(module, CodebookLinear):
            layers[name] = module
        elif isinstance(module, Linear):
            raise UnsupportedError(f"layer {name!r} is {module.scheme.name}; the format has only codebook layers")
    if not layers:
        raise UnsupportedError(f"{type(model).__name__}: no layer of a codebook scheme; quantize the model first")
    stems: dict[str, str] = {}
    for name in layers:
        other = stems.setdefault(name.replace(".", "_"), name)
        if other != name:
            raise CheckpointError(f"{directory}: layers {other!r} and {name!r} would have the same name")
    refuse_conv1d(model, layers, "the package replaces only nn.Linear")
    config = _describe(model, layers)
    rest = _rest(model, layers)
    quantized, norm_codec = _quantized(layers, stems)
    texts: dict[str, bytes] = {}
    huggingface: Any = getattr(model, "config", None)
    if hasattr(huggingface, "to_json_string"):
        texts[MODEL_NAME] = huggingface.to_json_string(use_diff=True).encode()
    texts[TURBOQUANT_CONFIG] = json.dumps(replace(config, norm_codec=norm_codec).to_json(), indent=2).encode()
    facts = {"revision": secrets.token_hex(8), "files": {name: bytes_digest(text) for name, text in texts.items()}}
    names = (*TURBOQUANT_TENSORS, *texts)
    with failures_name(directory), replacing_together(directory, names, TURBOQUANT_CONFIG, CheckpointError) as files:
        for file, tensors in zip(files[:2], (quantized, rest), strict=True):
            write_tensors(file, tensors, facts)
        for file, text in zip(files[2:], texts.values(), strict=True):
            file.write(text)


def _describe(model: nn.Module, layers: dict[str, CodebookLinear]) -> Config:
    schemes = {name: layer.scheme for name, layer in layers.items()}
    first_name, first = next(iter(schemes.items()))
    for name, scheme in schemes.items():
        if scheme.rotation == "none":
            raise UnsupportedError(f"layer {name!r} is {scheme.name}; the format has only rotated layers: hadamard, qr")
        if scheme.pairs:
            raise UnsupportedError(f"layer {name!r} is {scheme.name}; the format has no codebook of pairs")
        for key in ("bits", "residual_bits", "group_size", "rotation"):
            if getattr(scheme, key) != getattr(first, key):
                raise UnsupportedError(
                    f"layer {name!r} has {key} {getattr(scheme, key)}, {first_name!r} has {getattr(first, key)}; the "
                    "format has one for all layers"
                )
    seeds = [scheme.seeds for scheme in schemes.values()]
    for strategy in STRATEGIES:
        expected = (pass_seeds(first.seed, first.residual_seed, strategy, i) for i in range(len(seeds)))
        if all(given == wanted[: len(given)] for given, wanted in zip(seeds, expected, strict=True)):
            break
    else:
        name, other = next((n, s.seeds) for n, s in schemes.items() if s.seeds != first.seeds)
        raise UnsupportedError(
            f"layer {name!r} has the seeds {other}, {first_name!r} has {first.seeds}; allowed: one seed for each pass "
            "in all layers, or those of the strategy 'per_layer'"
        )

    def skipped(word: str) -> bool:
        in_float = any(word in name.lower() for name in linear_layers(model))
        return in_float and not any(word in name.lower() for name in layers)

    return Config(
        bit_width=first.bits,
        group_size=first.group_size,
        seed=first.seed,
        skip_embeddings=skipped("embed"),
        skip_lm_head=skipped("lm_head"),
        residual_bit_width=first.residual_bits,
        residual_seed=first.residual_seed,
        rotation=first.rotation,
        rotation_strategy=strategy,
    )


def _quantized(layers: dict[str, CodebookLinear], stems: dict[str, str]) -> tuple[dict[str, Tensor], str]:
    """The tensors of the layers, and the ``norm_codec``: ``fp16`` where no norm of a first pass loses by it."""
    tensors: dict[str, Tensor] = {}
    first_norms = []
    for stem, name in stems.items():
        layer = layers[name]
        for i, q in enumerate(layer.passes):
            values = q.values.float().cpu()
            if i == 0 and not torch.equal(tensors.setdefault("codebook", values), values):
                raise UnsupportedError(f"layer {name!r} has a codebook of its own; the format has one for first passes")
            norms = q.norms.float().cpu()
            first_norms += [f"{stem}.{PASS_PARTS[i][1]}"] if i == 0 else []
            tensors[f"{stem}.{PASS_PARTS[i][0]}"] = packing.pack(q.indices.cpu(), 4)
            tensors[f"{stem}.{PASS_PARTS[i][1]}"] = norms[:, 0].contiguous() if norms.shape[1] == 1 else norms
            if i == 1:
                tensors[f"{stem}.{PASS_PARTS[i][2]}"] = values.clone()
        if layer.bias is not None:
            tensors[f"{stem}.bias"] = layer.bias.to("cpu", torch.float32, copy=True)
    halves = {name: tensors[name].half() for name in first_norms}
    if not all(torch.equal(half.float(), tensors[name]) for name, half in halves.items()):
        return tensors, "fp32"
    return tensors | halves, "fp16"


def _rest(model: nn.Module, layers: dict[str, CodebookLinear]) -> dict[str, Tensor]:
    inside = {id(buffer) for layer in layers.values() for buffer in layer.buffers()}
    floats = (item for item in model.named_parameters() if not isinstance(item[1], FrozenWeight))
    named = (*floats, *model.named_buffers())
    rest: dict[str, Tensor] = {}
    for name, tensor in named:
        if tensor.is_meta:
            raise CheckpointError(f"{name}: the tensor is on the meta device and has no values to save")
        if isinstance(tensor, nn.Parameter) and (found := out_of_range(tensor.detach())):
            raise CheckpointError(f"{name}: found {found}; finite parameters can be saved")
        if id(tensor) not in inside:
            rest[name] = tensor.detach().cpu().contiguous()
    return rest


def quantize_model(model: nn.Module, config: Config | None = None, *, progress: bool = True) -> None:
    """Replace the linear layers of a model as the turboquant-model package does, to its bits.

    Every ``nn.Linear``, the classifier included, except those that the configuration skips; see
    `qcut.checkpoints.formats.turboquant.format.quantize`. `qcut.quantize` has more schemes and better codebooks; this
    is for files that shall equal the package's.

    Args:
        model: on any device; changed in place once all layers are made.
        config: None takes the package's defaults.
        progress: show a progress bar.

    Raises:
        QuantizationError: NaN or Inf in a weight or bias, or no layer to quantize.
        ConfigError: a group that the rotation cannot take (layer named).
        DtypeError: a weight of another dtype than float16, bfloat16, float32 and float64.

    Exactness: see `qcut.checkpoints.formats.turboquant.format.quantize`.

    Source: the turboquant-model package, ``quantize_model``.
    """
    config = Config() if config is None else config
    words = [word for word, skip in (("embed", config.skip_embeddings), ("lm_head", config.skip_lm_head)) if skip]
    chosen = {n: m for n, m in linear_layers(model).items() if not any(word in n.lower() for word in words)}
    if not chosen:
        raise QuantizationError(f"{type(model).__name__}: no nn.Linear to quantize")
    made: dict[int, nn.Module] = {}
    for index, (name, module) in enumerate(with_progress(chosen.items(), "quantize", "layer", shown=progress)):
        passes = quantize(weight_nk(module), config, index, layer=name)
        bias = module._parameters.get("bias")
        held = None if bias is None else bias.detach().to(torch.float32, copy=True)
        if held is not None and not held.isfinite().all():
            raise QuantizationError("bias holds NaN or Inf; every value must be finite in float32", name)
        layer = CodebookLinear.from_passes(passes, held, layer_scheme(config, passes), name=name)
        made[id(module)] = layer.train(module.training)
    replace_modules(model, made)
