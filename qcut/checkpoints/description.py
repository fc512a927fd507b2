"""What a checkpoint holds of a model: a description of its quantized modules, and its tensors, each once.

The description is in qcut's own index, and in ``config.json``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qcut.common import schema
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.embedding import Embedding
from qcut.layers.parallel import refuse_parts
from qcut.layers.quantized import QuantizedLayer, StateEntry, quantized_layers
from qcut.models.fusion import fused_activations
from qcut.models.modules import WEIGHT_DTYPES, ExpertsModule, dtype_name, has_extra_state, is_conv1d
from qcut.schemes import ACTIVATIONS

_MOST_EXPERTS = 1 << 16
_LAYER = schema.record(
    {
        "scheme": schema.anything(),
        "in_features": schema.integer(1),
        "out_features": schema.integer(1),
        "bias": schema.boolean(),
        "activation": schema.text(choices=ACTIVATIONS),
    },
    {"experts": (schema.nothing_or(schema.integer(1, _MOST_EXPERTS)), None)},
)
_PIECES = schema.items(schema.text(), most=2)
_EXPERTS = schema.record(
    {"count": schema.integer(1, _MOST_EXPERTS), "gating": schema.anything()},
    {"pieces": (schema.nothing_or(schema.record({"up": _PIECES, "down": _PIECES})), None)},
)
_EMBEDDING = schema.record({"table": schema.text(), "dtype": schema.text(choices=[*map(dtype_name, WEIGHT_DTYPES)])})

LAYERS = schema.table(_LAYER)
EMBEDDINGS = schema.table(_EMBEDDING)
FUSED = schema.table(schema.text(choices=ACTIVATIONS))
TIED = schema.table(schema.text())
EXPERTS = schema.table(_EXPERTS)

QUANT_METHOD = "qcut"
FORMAT_VERSION, EXPERTS_VERSION = 2, 3
"""Of a model without and with quantized experts. Version 1 had no `qcut.checkpoints.marks`."""
READ_VERSIONS = (1, FORMAT_VERSION, EXPERTS_VERSION)
_CONFIG = schema.record(
    {"quant_method": schema.anything(), "format_version": schema.anything(), "layers": LAYERS},
    {
        "embeddings": (EMBEDDINGS, {}),
        "fused": (FUSED, {}),
        "tied": (TIED, {}),
        "experts": (EXPERTS, {}),
        "index": (schema.nothing_or(schema.text()), None),
    },
)


class Description(NamedTuple):
    """A model's quantized modules as plain data.

    Attributes:
        layers: by name, the scheme, sizes, bias and activation of each `qcut.Linear`, and of each `LinearStack`.
        embeddings: by name, the layer that each `qcut.Embedding` reads, its own or the classifier's, and its dtype.
        fused: activations that layers compute, by the name of the activation's module.
        tied: tensors that are stored under another name, with that name.
        experts: by name, the number and the gating of each `Experts` with a `LinearStack`; and where the tensors of
            each expert are stored by themselves, the names of its pieces by projection, see
            `qcut.checkpoints.expert_tensors`.
    """

    layers: dict[str, Any]
    embeddings: dict[str, Any]
    fused: dict[str, str]
    tied: dict[str, str]
    experts: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, tied: Mapping[str, str]) -> Description:
        """Describe a model.

        Raises:
            CheckpointError: an embedding is tied to a layer that is not in the model.
        """
        layers = {name: layer.to_json() for name, layer in quantized_layers(model).items()}
        return cls(layers, _embeddings(model), fused_activations(model), dict(tied), _experts(model))


def _embeddings(model: nn.Module) -> dict[str, dict[str, str]]:
    layers = {id(layer): name for name, layer in quantized_layers(model).items()}
    described = {}
    for name, module in model.named_modules():
        if isinstance(module, Embedding):
            if id(module.linear) not in layers:
                raise CheckpointError(f"{name}: the embedding is tied to a layer that is not in the model")
            described[name] = {"table": layers[id(module.linear)], "dtype": dtype_name(module.dtype)}
    return described


def _experts(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        name: {"count": module.num_experts, "gating": module.gating.to_json()}
        for name, module in model.named_modules()
        if isinstance(module, ExpertsModule) and any(isinstance(part, QuantizedLayer) for part in module.children())
    }


def quantization_config(model: nn.Module, tied: Mapping[str, str], index: str | None = None) -> dict[str, Any]:
    """The entry of ``config.json`` for a model.

    Args:
        model: with quantized layers.
        tied: tensors that are stored under another name; those of quantized layers are noted, the rest is known to the
            model's class.
        index: file next to ``config.json`` that belongs to it, or None.

    Raises:
        CheckpointError: an embedding is tied to a layer that is not in the model.
    """
    layers = quantized_layers(model, remove_duplicate=False)
    own = {name: owner for name, owner in tied.items() if name.rpartition(".")[0] in layers}
    described = Description.of(model, own)._asdict()
    if not described["experts"]:
        del described["experts"]
    version = EXPERTS_VERSION if described.get("experts") else FORMAT_VERSION
    return {"quant_method": QUANT_METHOD, "format_version": version, **described, "index": index}


def description_of(data: Mapping[str, Any], where: str) -> Description:
    """Read an entry that `quantization_config` made.

    Raises:
        CheckpointError: it is of another method, of a newer version, or has unknown keys or values of a wrong type
            (named).
    """
    if data.get("quant_method") != QUANT_METHOD or data.get("format_version") not in READ_VERSIONS:
        raise CheckpointError(
            f"{where}: found quant_method {data.get('quant_method')!r}, format_version "
            f"{data.get('format_version')!r}; {QUANT_METHOD!r} and one of {READ_VERSIONS} are needed"
        )
    checked = schema.conform(dict(data), _CONFIG, where, CheckpointError)
    return Description(**{name: checked[name] for name in Description._fields})


def stored_tensors(model: nn.Module) -> tuple[dict[str, StateEntry], dict[str, str]]:
    """Every parameter and buffer once, and the names of tied ones with the name they are stored under.

    Raises:
        CheckpointError: a tensor outside quantized layers is on the meta device, or a module has extra state (named).
        UnsupportedError: a layer is a part of one that is cut across processes (named).
    """
    refuse_parts(model, "saving")
    for name, module in model.named_modules():
        if has_extra_state(module):
            raise CheckpointError(
                f"module {name!r} ({type(module).__name__}) has extra state (get_extra_state), which files of tensors "
                "do not hold; keep it in a buffer, or in a file of your own"
            )
    tensors: dict[str, StateEntry] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in _named_tensors(model):
        owner = seen.setdefault(tensor.identity, name)
        if owner == name:
            tensors[name] = tensor
        else:
            tied[name] = owner
    return tensors, tied


def shared_modules(model: nn.Module) -> dict[str, str]:
    """Modules with tensors that are in a model more than once: each other name of theirs, and the first."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules(remove_duplicate=False):
        if name.startswith(inside) and inside:
            continue
        owner = first.setdefault(id(module), name)
        if owner != name and any(True for _ in (*module.parameters(), *module.buffers())):
            shared[name] = owner
            inside += (f"{name}.",)
    return shared


def refuse_own_ties(model: Any, tied: Mapping[str, str]) -> None:
    """Refuse modules and float tensors that a model of transformers shares, and its class does not.

    transformers makes a new model of the class, and fills what is stored; of quantized layers, qcut knows the ties.

    Args:
        model: with quantized layers.
        tied: tensors that are stored under another name.

    Raises:
        CheckpointError: there is one (both names are in the message).
    """
    if not type(model).__module__.startswith("transformers.models."):
        return
    layers, known = quantized_layers(model, remove_duplicate=False), getattr(model, "all_tied_weights_keys", {})
    passing = passing_buffers(model)
    tensors = {name: owner for name, owner in tied.items() if name.rpartition(".")[0] not in layers}
    pairs = shared_modules(model) | {n: o for n, o in tensors.items() if n not in passing and known.get(n) != o}
    if not pairs:
        return
    with torch.device("meta"):
        plain: nn.Module = type(model)(model.config)
    parts = (plain.named_modules, plain.named_parameters, plain.named_buffers)
    held = {name: id(part) for named in parts for name, part in named(remove_duplicate=False)}
    for name, owner in pairs.items():
        if held.get(name) != held.get(owner):
            raise CheckpointError(
                f"{name!r} and {owner!r} are one in this model, and two in any other {type(model).__name__}, as which "
                "transformers would load it; allowed: qcut.save, or a copy in each place"
            )


def refuse_conv1d(model: nn.Module, names: Iterable[str], allowed: str) -> None:
    """Refuse quantized layers (named) in place of transformers' ``Conv1D``, with what a format holds."""
    if not type(model).__module__.startswith("transformers.models."):
        return
    with torch.device("meta"):
        plain = type(model)(model.config)  # type: ignore[call-arg]
    for name in names:
        if is_conv1d(plain.get_submodule(name)):
            raise UnsupportedError(f"layer {name!r} is a Conv1D in transformers; {allowed}")


@contextmanager
def failures_name(directory: Path) -> Iterator[None]:
    """Turn what fails while a block writes into a directory into a CheckpointError that names the directory."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError, TypeError) as exc:
        raise CheckpointError(f"{directory}: cannot be written: {exc}") from exc


def passing_buffers(model: nn.Module) -> set[str]:
    """Names of the buffers that are not part of the state dict."""
    modules = model.named_modules(remove_duplicate=False)
    return {f"{name}.{key}" if name else key for name, m in modules for key in m._non_persistent_buffers_set}


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, StateEntry]]:
    """Parameters first, then buffers, those of quantized layers as the layers store them."""
    modules = [(f"{name}." if name else "", m) for name, m in model.named_modules(remove_duplicate=False)]
    for prefix, module in modules:
        if not isinstance(module, QuantizedLayer):
            yield from ((prefix + key, tensor) for key, tensor in _plain(module._parameters, prefix).items())
    for prefix, module in modules:
        stored = module.stored() if isinstance(module, QuantizedLayer) else _plain(module._buffers, prefix)
        yield from ((prefix + key, tensor) for key, tensor in stored.items())


def _plain(tensors: Mapping[str, Tensor | None], prefix: str) -> dict[str, StateEntry]:
    held = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    for key, tensor in held.items():
        if tensor.is_meta:
            raise CheckpointError(f"{prefix}{key}: the tensor is on the meta device and has no values to save")
    return {key: StateEntry.of(tensor) for key, tensor in held.items()}


def shards(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Names of tensors by file, in order: a file takes tensors until their bytes would exceed the limit."""
    names: list[str] = []
    held = 0
    for name, size in sizes.items():
        if names and held + size > limit:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    if names:
        yield names
