"""Builds the model that a checkpoint fills, without memory, and fills it, whatever the checkpoint's format.

A skeleton holds the quantized modules that qcut's own formats describe. Headers of the files are checked against the
model before any tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from qcut.checkpoints.description import Description, passing_buffers
from qcut.common.safetensors import TensorHeader, torch_dtype
from qcut.errors import CheckpointError, QcutError
from qcut.layers.embedding import Embedding, is_table
from qcut.layers.experts.opening import PROJECTIONS
from qcut.layers.linear import Linear
from qcut.layers.quantized import QuantizedLayer, float_dtype, set_weight_dtype
from qcut.models.fusion import fuse, is_fusible_place, key_before
from qcut.models.modules import is_linear, replace_modules, weight_nk
from qcut.numerics.checks import out_of_range
from qcut.numerics.plain_state import outside_modes

if TYPE_CHECKING:
    from qcut.layers.experts.experts import Experts
    from qcut.layers.experts.linear_stack import LinearStack

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Skeleton(NamedTuple):
    """Modules that take the place of a model's: quantized layers and embeddings, and activations that layers apply.

    Attributes:
        layers: every quantized layer by name, tables of embeddings included.
        modules: what replaces modules of the model: layers, and embeddings with their tables.
        activations: the parent of each activation's module, and the activation's name.
    """

    layers: dict[str, QuantizedLayer]
    modules: dict[str, nn.Module]
    activations: dict[str, tuple[nn.Module, str]]

    def put_into(self, model: nn.Module) -> None:
        """Replace the model's modules; see `replace_modules`."""
        replace_modules(model, {id(model.get_submodule(name)): new for name, new in self.modules.items()})
        for name, (parent, activation) in self.activations.items():
            key = name.rpartition(".")[2]
            fuse(parent, key, parent._modules.get(key_before(parent, key)), activation).apply()


def skeleton_of(saved: Description, model: nn.Module, dtype: torch.dtype | None, path: Path) -> Skeleton:
    """Quantized modules without memory, checked against those of the model that they replace.

    Args:
        saved: the description.
        model: what it describes, in float.
        dtype: that embeddings return; None takes theirs.
        path: the file that holds the description, for messages.

    Raises:
        CheckpointError: a layer, embedding or activation is not in the model, or of another size.
    """
    own_tables = {f"{name}.table": name for name in saved.embeddings}
    modules: dict[str, nn.Module] = {name: _open(name, spec, model, path) for name, spec in saved.experts.items()}
    projections = {f"{name}.{part}": modules[name] for name in saved.experts for part in PROJECTIONS}
    layers: dict[str, QuantizedLayer] = {}
    for name, spec in saved.layers.items():
        if name in projections:
            layers[name] = _empty_stack(name, spec, projections[name], path)
            setattr(projections[name], name.rpartition(".")[2], layers[name])
        else:
            layers[name] = _empty_layer(name, spec, model, own_tables.get(name), path)
            if name not in own_tables:
                modules[name] = layers[name]
    for name, spec in saved.embeddings.items():
        modules[name] = _empty_embedding(name, spec, layers, model, dtype, path)
    parents = {name: _activation_parent(name, model, saved.layers, path) for name in saved.fused}
    return Skeleton(layers, modules, {name: (parent, saved.fused[name]) for name, parent in parents.items()})


def _open(name: str, spec: Any, model: nn.Module, path: Path) -> Experts:
    """The experts of a model, in float and open, held to what is saved of them."""
    from qcut.layers.experts.weights import open_experts
    from qcut.numerics.gating import Gating

    try:
        made = open_experts(model.get_submodule(name), name)
        gating = Gating.from_json(spec["gating"], f"{path}: experts {name!r}")
    except (AttributeError, QcutError) as exc:
        raise CheckpointError(f"{path}: experts {name!r}: {exc}") from exc
    if isinstance(made, str):
        raise CheckpointError(f"{path}: experts {name!r}: {made}")
    if (made.num_experts, made.gating) != (spec["count"], gating):
        raise CheckpointError(
            f"{path}: experts {name!r}: saved are {spec['count']} with {gating}, the model has {made.num_experts} with "
            f"{made.gating}"
        )
    return made


def _empty_stack(name: str, spec: Any, experts: nn.Module, path: Path) -> LinearStack:
    """A stack without memory, checked against the float layers it replaces."""
    from qcut.layers.experts.experts import layer_of
    from qcut.layers.experts.linear_stack import LinearStack

    try:
        stack = LinearStack.from_json(spec, name)
    except (KeyError, TypeError, ValueError, QcutError) as exc:
        raise CheckpointError(f"{path}: layer {name!r}: {exc}") from exc
    one = layer_of(getattr(experts, name.rpartition(".")[2]), 0)
    present = getattr(experts, "num_experts", 0), one.in_features, one.out_features, one.bias is not None
    saved = stack.experts, stack.in_features, stack.out_features, stack.bias is not None
    if saved != present:
        raise CheckpointError(f"{path}: layer {name!r}: saved with (E, K, N, bias) = {saved}, the model has {present}")
    return stack


def _empty_layer(name: str, spec: Any, model: nn.Module, table_of: str | None, path: Path) -> Linear:
    """A quantized layer without memory, checked against the layer it replaces, or the embedding it is to be part of."""
    try:
        module = model.get_submodule(name if table_of is None else table_of)
        layer = Linear.from_json(spec, name)
    except (AttributeError, KeyError, TypeError, ValueError, QcutError) as exc:
        raise CheckpointError(f"{path}: layer {name!r}: {exc}") from exc
    if isinstance(module, Linear):
        present = module.in_features, module.out_features
    elif table_of is not None and isinstance(module, (Embedding, nn.Embedding)):
        present = module.embedding_dim, module.num_embeddings
    elif is_linear(module):
        n, k = weight_nk(module).shape
        present = k, n
    else:
        raise CheckpointError(f"{path}: layer {name!r}: the model has a {type(module).__name__} there, no linear layer")
    sizes = layer.in_features, layer.out_features
    if present != sizes:
        raise CheckpointError(f"{path}: layer {name!r}: saved with (K, N) = {sizes}, the model has {present}")
    return layer


def _empty_embedding(
    name: str, spec: Any, linears: Mapping[str, QuantizedLayer], model: nn.Module, dtype: torch.dtype | None, path: Path
) -> Embedding:
    """A quantized embedding, its own table or another layer in it, checked against the embedding it replaces."""
    try:
        module = model.get_submodule(name)
        table = linears[spec["table"]]
        if not isinstance(table, Linear):
            raise CheckpointError("its table is of experts")
        stored = getattr(torch, spec["dtype"])
        embedding = Embedding(table, dtype or stored, tied=spec["table"] != f"{name}.table")
    except (AttributeError, KeyError, TypeError, QcutError) as exc:
        raise CheckpointError(f"{path}: embedding {name!r}: {exc}") from exc
    if not isinstance(module, (Embedding, nn.Embedding)) or not (isinstance(module, Embedding) or is_table(module)):
        raise CheckpointError(f"{path}: embedding {name!r}: the model has a {type(module).__name__} there")
    saved, present = (table.in_features, table.out_features), (module.embedding_dim, module.num_embeddings)
    if saved != present:
        raise CheckpointError(
            f"{path}: embedding {name!r}: saved with (columns, rows) = {saved}, the model has {present}"
        )
    return embedding


def _activation_parent(name: str, model: nn.Module, layers: Mapping[str, Any], path: Path) -> nn.Module:
    """The module that holds an activation which a quantized layer has taken over.

    Args:
        name: of the activation.
        model: that holds it.
        layers: what is saved of the quantized layers, by name.
        path: for messages.

    Raises:
        CheckpointError: there is no activation, or none that a layer may take over.
    """
    try:
        activation = model.get_submodule(name)
    except AttributeError as exc:
        raise CheckpointError(f"{path}: fused activation {name!r}: {exc}") from exc
    if any(True for _ in activation.parameters()) or any(True for _ in activation.children()):
        raise CheckpointError(f"{path}: fused activation {name!r}: the model has a {type(activation).__name__} there")
    outer, _, key = name.rpartition(".")
    parent = model.get_submodule(outer)
    if not is_fusible_place(parent, key):
        raise CheckpointError(
            f"{path}: fused activation {name!r}: a {type(parent).__name__} does not call the layer before it and the "
            "activation as one; quantize the model anew"
        )
    if isinstance(parent, nn.Sequential):
        before = f"{outer}.{key_before(parent, key)}".removeprefix(".")
        if before not in layers:
            raise CheckpointError(f"{path}: fused activation {name!r}: layer {before!r} before it is not quantized")
    return parent


def share_modules(model: nn.Module, shared: Mapping[str, str], path: Path) -> None:
    """Let modules be in several places of a model, as they were in the one that was saved.

    Args:
        model: what the checkpoint describes, in float.
        shared: by the name of a place, the name of the module's first one.
        path: the file that states it, for messages.

    Raises:
        CheckpointError: the model has no such places, or modules of other classes in them (both are named).
    """
    for name, owner in shared.items():
        try:
            places = [model.get_submodule(place) for place in (name, owner)]
        except AttributeError as exc:
            raise CheckpointError(f"{path}: shared module {name!r}, {owner!r}: {exc}") from exc
        old, new = places
        if old is not new:
            classes, wanted = ([(key, type(part)) for key, part in one.named_modules()] for one in places)
            if classes != wanted:  # as many parts, so that no module can get into itself
                raise CheckpointError(
                    f"{path}: {name!r} and {owner!r} were one module, and are modules of different parts in the model"
                )
            parent, _, key = name.rpartition(".")
            model.get_submodule(parent)._modules[key] = new


def expected_tensors(model: nn.Module, replacements: dict[str, nn.Module]) -> tuple[dict[str, Tensor], set[str]]:
    """Every tensor the model will have, by every name, and which of them belong to quantized layers."""
    replaced = {name: model.get_submodule(name) for name in replacements}
    new = {id(replaced[name]): module for name, module in replacements.items()}
    inside = {id(part) for old in replaced.values() for part in old.modules()} - new.keys()
    wanted: dict[str, Tensor] = {}
    quantized: set[str] = set()
    for name, old in model.named_modules(remove_duplicate=False):
        if id(old) in inside:
            continue
        parts = new[id(old)].named_modules(prefix=name) if id(old) in new else [(name, old)]
        for prefix, module in parts:
            held: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
            if id(old) in new and isinstance(module, QuantizedLayer):
                held = {key: stored.read() for key, stored in module.stored().items()}  # on the meta device: no memory
            tensors = {f"{prefix}.{key}" if prefix else key: t for key, t in held.items() if t is not None}
            wanted |= tensors
            quantized |= set(tensors) if isinstance(module, QuantizedLayer) else set()
    return wanted, quantized


def check_headers(
    wanted: dict[str, Tensor],
    exact: set[str],
    headers: Mapping[str, TensorHeader],
    tied: dict[str, Any],
    path: Path,
) -> None:
    """Hold the files' headers to the model.

    Args:
        wanted: every tensor of the model, by every name.
        exact: names of tensors that must have the model's dtype; others may have any floating dtype if the model's is
            one.
        headers: of the stored tensors.
        tied: names that are stored under another.
        path: for error messages.

    Raises:
        CheckpointError: a tensor is missing, superfluous, or of a wrong shape or dtype (named).
    """
    missing = [name for name in wanted if tied.get(name, name) not in headers]
    foreign = [name for name in (*headers, *tied) if name not in wanted]
    if missing or foreign:
        name = (missing or foreign)[0]
        raise CheckpointError(
            f"{path}: {len(missing)} tensors of the model are missing and {len(foreign)} do not belong to it; "
            f"the first is {name!r}"
        )
    for name, tensor in wanted.items():
        header = headers[tied.get(name, name)]
        dtype, shape = torch_dtype(header.code), header.shape
        # Outside quantized layers floating tensors may be of any precision: a skeleton does not know which.
        free = name not in exact and tensor.is_floating_point()
        ok = dtype in _FLOATS if free else dtype == tensor.dtype
        if list(tensor.shape) != shape or not ok:
            raise CheckpointError(
                f"{path}: tensor {name!r}: found {dtype} {shape}, {tensor.dtype} {list(tensor.shape)} is needed"
            )


def check_kinds(model: nn.Module, codes: Mapping[str, str], where: object) -> None:
    """Hold dtypes of stored tensors to a float model that transformers fills, which casts whatever is there.

    Args:
        model: its tensors may be on the meta device.
        codes: of the stored tensors' dtypes, as safetensors names them; by name, with or without the prefix of the
            model's base.
        where: for messages.

    Raises:
        CheckpointError: a floating tensor is stored in another dtype than float64, float32, float16 or bfloat16, or
            another one in another dtype than its own (named).
    """
    base = f"{getattr(model, 'base_model_prefix', '')}."
    by_name = {name.removeprefix(base): code for name, code in codes.items()}
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for name in passing_buffers(model):
        tensors.pop(name, None)
    for name, tensor in tensors.items():
        code = by_name.get(name.removeprefix(base))
        stored = torch_dtype(code) if code is not None else tensor.dtype
        if stored in _FLOATS if tensor.dtype in _FLOATS else stored == tensor.dtype:
            continue
        wanted = "a floating dtype of 16, 32 or 64 bits" if tensor.dtype in _FLOATS else str(tensor.dtype)
        raise CheckpointError(f"{where}: tensor {name!r}: found {code}; {wanted} is needed")


class Builder:
    """Puts tensors into a model one at a time, so that no second copy of the model exists.

    Args:
        model: with the modules that the tensors are for; tensors may be on the meta device.
        device: where the tensors shall be.
        dtype: what floating parameters are cast to; None keeps theirs.

    Attributes:
        modules: of the model, by every name.
    """

    def __init__(self, model: nn.Module, device: torch.device | str, dtype: torch.dtype | None) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.device, self.dtype = device, dtype

    def place(self, name: str) -> tuple[nn.Module, str]:
        """The module that holds a tensor, and the tensor's own name in it."""
        parent, _, key = name.rpartition(".")
        return self.modules[parent], key

    def put(self, names: Sequence[str], tensor: Tensor, where: object, *, buffers: bool = False) -> None:
        """Put one tensor under all its names, tied ones together.

        Args:
            names: in the model; the first one's parameter or buffer decides what the tensor becomes.
            tensor: as it was read.
            where: its file, for messages.
            buffers: check the values of floating buffers too.

        Raises:
            CheckpointError: a value is NaN or Inf.
        """
        module, key = self.place(names[0])
        held = module._parameters.get(key)
        like: Tensor | None = module._buffers[key] if held is None else held
        assert like is not None
        new = as_like(tensor, like, self.device, self.dtype)
        checked = isinstance(new, nn.Parameter) or (buffers and new.is_floating_point())
        if checked and (found := out_of_range(new.detach())):
            raise CheckpointError(f"{where}: tensor {names[0]!r}: found {found}; finite values are needed")
        for name in names:
            module, key = self.place(name)
            (module._parameters if isinstance(new, nn.Parameter) else module._buffers)[key] = new  # type: ignore[assignment]


def finish(model: nn.Module, new: dict[int, nn.Module], dtype: torch.dtype | None, path: Path) -> None:
    """Put quantized modules in place, by the id of those that they replace; other tensors are there already."""
    replace_modules(model, new)
    check_no_meta(dict(model.named_modules(remove_duplicate=False)), path)
    set_weight_dtype(model, dtype or float_dtype(model))


def as_like(
    tensor: Tensor, like: Tensor, device: torch.device | str, dtype: torch.dtype | None
) -> Tensor | nn.Parameter:
    """A tensor that was read, as the tensor that it takes the place of: a parameter, cast to the dtype, or a buffer."""
    is_parameter = isinstance(like, nn.Parameter)
    tensor = tensor.to(device, dtype if is_parameter and tensor.is_floating_point() else None)
    return nn.Parameter(tensor, like.requires_grad) if is_parameter else tensor


@outside_modes()
def fill_layer(
    layer: QuantizedLayer,
    state: Mapping[str, Tensor],
    name: str,
    where: object,
    files: Mapping[str, object] | None = None,
) -> None:
    """Give a layer the tensors of its state dict; the layer may lay them out anew.

    Args:
        layer: a quantized layer.
        state: every tensor that the layer stores.
        name: of the layer.
        where: the checkpoint, for messages.
        files: the file of each tensor, for messages, if they differ from the checkpoint.

    Raises:
        CheckpointError: a value that quantizing never gives (file and tensor are named), or what the layer refuses.
    """
    if not any(t.is_meta for t in state.values()) and (problem := layer.state_problem(state)):
        key, what = problem
        tensor = f"{name}.{key}" if name else key
        raise CheckpointError(f"{(files or {}).get(key, where)}: tensor {tensor!r}: {what}")
    try:
        layer.load_state_dict(state, assign=True)
    except RuntimeError as exc:
        raise CheckpointError(f"{where}: layer {name!r}: {exc}") from exc


def tie_layers(modules: Mapping[str, nn.Module], tied: Mapping[str, str]) -> None:
    """Let quantized layers hold another layer's tensors if they were stored under that layer's name."""
    pairs = {}
    for name, owner in tied.items():
        layer, other = (modules.get(full.rpartition(".")[0]) for full in (name, owner))
        if layer is not other and isinstance(layer, QuantizedLayer) and isinstance(other, QuantizedLayer):
            pairs[id(layer)] = layer, other
    for layer, other in pairs.values():
        layer.tie_to(other)


def check_no_meta(modules: Mapping[str, nn.Module], path: Path) -> None:
    """Check that no module holds a tensor on the meta device outside its parameters and buffers.

    Raises:
        CheckpointError: one does.
    """
    for name, module in modules.items():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise CheckpointError(
                    f"{path}: {name}.{key} is a tensor that is no parameter or buffer, so no checkpoint holds it; "
                    "pass model=, built with its values"
                )
