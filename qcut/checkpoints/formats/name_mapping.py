"""Holds the headers of another library's checkpoint to the model that they are for, and makes its quantized layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qcut.checkpoints.description import passing_buffers
from qcut.checkpoints.formats.experts.names import ExpertNames, full_name
from qcut.checkpoints.formats.experts.stacks import StoredStack, build_experts, take_experts
from qcut.checkpoints.formats.gguf.tensors import Gguf
from qcut.checkpoints.formats.parts import FLOATS, CacheFormat, Format, Parts, Stored, names_in_files
from qcut.common.progress import with_progress
from qcut.common.safetensors import torch_dtype
from qcut.errors import CheckpointError
from qcut.layers.embedding import Embedding, is_table
from qcut.layers.linear import Linear
from qcut.models.modules import is_linear, weight_nk


@dataclass(frozen=True)
class NameMapping:
    """A checkpoint with a place in a model for every tensor.

    Attributes:
        where: the file or folder, for messages.
        format: how layers are stored.
        modules: the model's, by every name.
        layers: what is stored of each quantized layer, by name.
        tied: modules without tensors of their own, with the quantized layer that each is tied to.
        tables: which of both are tables of tokens; the others are linear layers.
        rest: stored tensors outside quantized layers.
        holders: names of each tensor of the rest in the model, tied ones together, one that is stored first.
        stacks: quantized projections of mixtures' experts.
    """

    where: str
    format: Format
    modules: Mapping[str, nn.Module]
    layers: Mapping[str, Parts]
    tied: Mapping[str, str]
    tables: Collection[str]
    rest: Mapping[str, Stored]
    holders: list[list[str]]
    stacks: Sequence[StoredStack]

    def build(self, device: torch.device, dtype: torch.dtype | None, progress: bool) -> dict[int, nn.Module]:
        """Read the quantized layers, one after another. The model has all other tensors.

        Args:
            device: where they shall be.
            dtype: of what embeddings give; None: float16.
            progress: show a progress bar.

        Returns:
            What takes the place of the model's modules, by their id.

        Raises:
            CheckpointError, UnsupportedError: see `Format.layer`; or tensors that are tied differ (named).
        """
        for names in self.holders:
            first, *others = (name for name in names if name in self.rest)
            for other in others:
                if not torch.equal(self.rest[first].read(), self.rest[other].read()):
                    raise CheckpointError(
                        f"{self.where}: tensors {first!r} and {other!r} differ, and the configuration ties them; "
                        "allowed: tie_word_embeddings false in config.json"
                    )
        made: dict[str, Linear] = {}
        new: dict[int, nn.Module] = {}
        for name in with_progress(self.layers, "load", "layer", shown=progress):
            made[name] = self.format.layer(self.layers[name]).to(device)
            layer = made[name]
            new[id(self.modules[name])] = Embedding(layer, dtype or torch.float16) if name in self.tables else layer
        for other, name in self.tied.items():
            table = other if other in self.tables else name
            new[id(self.modules[other])] = made[name]
            new[id(self.modules[table])] = Embedding.tied_to(made[name], dtype or torch.float16)
        mixtures: dict[str, list[StoredStack]] = {}
        for stack in self.stacks:
            mixtures.setdefault(stack.experts, []).append(stack)
        for name in with_progress(mixtures, "load", "mixture", shown=progress):
            module = self.modules[name]
            new[id(module)] = build_experts(module, mixtures[name], self.format, device, self.where)
        return new


def map_names(model: nn.Module, form: Format, tensors: Mapping[str, Stored], where: str) -> NameMapping:
    """Find the place of every stored tensor, and hold its header to the model. No tensor is read.

    Args:
        model: its parameters may be without memory; tied ones are one parameter.
        form: how layers are stored.
        tensors: by name.
        where: the file or folder, for messages.

    Raises:
        CheckpointError: a tensor is missing, superfluous, or of a wrong shape or dtype (named); no layer is quantized.
        UnsupportedError: a layer cannot be served exactly.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    names = ExpertNames(model, where)
    stored_as = _stored_names(model, modules, names, tensors, where)
    renamed = {name: tensors[stored] for name, stored in stored_as.items()}
    stacks, tensors = take_experts(model, form, names, _without_computed(model, renamed), stored_as, where)
    layers: dict[str, Parts] = {}
    rest: dict[str, Stored] = {}
    passed = form.cache_scales if isinstance(form, CacheFormat) else ()
    for name, own in _by_module(model, modules, tensors, where).items():
        if not form.quantized(own):
            kept = {key: stored for key, stored in own.items() if "weight" not in own or key not in passed}
            rest |= {f"{name}.{key}" if name else key: stored for key, stored in kept.items()}
            continue
        sizes, others = _sizes(modules[name], name, where), names_in_files(own)
        layers[name] = Parts(name, where, *sizes, own, other_names=others)
        form.check(layers[name])
        if getattr(modules[name], "bias", None) is not None:
            layers[name].require("bias", FLOATS, [layers[name].n])
    if not layers and not stacks and not isinstance(form, Gguf):
        raise CheckpointError(f"{where}: config.json has a quantization_config, and no layer has quantized tensors")
    replaced = {f"{stack.experts}.{key}" for stack in stacks for key in stack.replaced}
    holders = place_tensors(model, layers, rest, where, replaced=replaced)
    tied = _tied(modules, layers, rest)
    tables = {name for name in (*layers, *tied) if not is_linear(modules[name])}
    return NameMapping(where, form, modules, layers, tied, tables, rest, holders, stacks)


def _stored_names(
    model: nn.Module, modules: Mapping[str, nn.Module], names: ExpertNames, tensors: Mapping[str, Stored], where: str
) -> dict[str, str]:
    """The names of tensors in the files, by those that transformers gives them if the model has such a place.

    Raises:
        CheckpointError: two tensors have one name.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    stored_as: dict[str, str] = {}
    for stored in tensors:
        name = names.renamed(stored)
        if name != stored:
            place = names.place(name)
            of_expert = place is not None and full_name(place.parameter, parameters, model) is not None
            if not of_expert and _home(model, modules, name) is None:
                name = stored
        if name in stored_as:
            raise CheckpointError(
                f"{where}: tensors {stored_as[name]!r} and {stored!r} are both {name!r} of the model; allowed: one"
            )
        stored_as[name] = stored
    return stored_as


def _without_computed(model: nn.Module, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors without those that the model computes itself or does not have, which every reader ignores.

    These are buffers that are no part of the state, names that the model's class ignores, and a few more that older
    versions of transformers stored.
    """
    computed = passing_buffers(model)
    wanted = {*dict(model.named_parameters(remove_duplicate=False)), *_persistent(model, computed)}
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    base = getattr(model, "base_model_prefix", "")

    def passed(name: str, stored: Stored) -> bool:
        names = (name, f"{base}.{name}") if base else (name,)
        if any(one in wanted for one in names):
            return False
        if any(one in computed for one in names) or _COMPUTED.search(name) or any(p.search(name) for p in ignored):
            return True
        return bool(_MASK.search(name)) and len(stored.shape) == 4 and stored.shape[2] == stored.shape[3]

    return {name: stored for name, stored in tensors.items() if not passed(name, stored)}


_COMPUTED = re.compile(
    r"(?:^|\.)(?:rotary_emb\.(?:original_)?inv_freq|rotary_emb\._?(?:cos|sin)_cached|\w*(?:attn|attention)\.masked_bias|"
    r"embeddings\.position_ids)$"
)
_MASK = re.compile(r"(?:^|\.)\w*(?:attn|attention)\.bias$")
"""A causal mask ``[1, 1, n, n]`` goes by the name of a bias."""


def _persistent(model: nn.Module, computed: set[str]) -> set[str]:
    return {name for name, _ in model.named_buffers(remove_duplicate=False)} - computed


def _by_module(
    model: nn.Module, modules: Mapping[str, nn.Module], tensors: Mapping[str, Stored], where: str
) -> dict[str, dict[str, Stored]]:
    """Tensors by the module that their names begin with, and by the rest of their names."""
    grouped: dict[str, dict[str, Stored]] = {}
    foreign = []
    for name, stored in tensors.items():
        home = _home(model, modules, name)
        if home is None:
            foreign.append(name)
        else:
            grouped.setdefault(home[0], {})[home[1]] = stored
    if foreign:
        raise CheckpointError(
            f"{where}: {len(foreign)} tensors belong to no layer of {type(model).__name__}; the first is {foreign[0]!r}"
        )
    return grouped


def _home(model: nn.Module, modules: Mapping[str, nn.Module], name: str) -> tuple[str, str] | None:
    """The module that a tensor belongs to, and the rest of its name; None if there is no such module."""
    base = getattr(model, "base_model_prefix", "")
    for full in (name, f"{base}.{name}" if base else name):
        head = full.rpartition(".")[0]
        while head and head not in modules:
            head = head.rpartition(".")[0]
        key = full[len(head) + 1 :]
        if head and (key in _own(modules[head]) or not modules[head]._modules):
            return head, key
    return None


def _own(module: nn.Module) -> set[str]:
    return {*module._parameters, *module._buffers}


def _sizes(module: nn.Module, name: str, where: str) -> tuple[int, int]:
    if is_linear(module):
        n, k = weight_nk(module).shape
        return n, k
    if isinstance(module, nn.Embedding) and is_table(module):
        return module.num_embeddings, module.embedding_dim
    raise CheckpointError(
        f"{where}: layer {name!r} has quantized tensors; the model has a {type(module).__name__} there, no linear layer"
    )


def place_tensors(
    model: nn.Module,
    layers: Collection[str],
    rest: Mapping[str, Stored],
    where: object,
    *,
    computes: bool = True,
    replaced: Collection[str] = (),
) -> list[list[str]]:
    """Find the place of each stored tensor outside quantized layers, and hold its header to the model.

    Args:
        model: tied tensors are one tensor.
        layers: every name of quantized layers.
        rest: the stored tensors.
        where: for messages.
        computes: buffers that are not stored are computed, and other tensors are tied to quantized layers; with False,
            every tensor has to be stored, once.
        replaced: tensors of the model that quantized experts take the place of.

    Returns:
        Names of each stored tensor in the model, tied ones together, one that is stored first.

    Raises:
        CheckpointError: a tensor is missing, superfluous, or of a wrong shape or dtype (named).
    """
    same: dict[int, list[str]] = {}
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    passing = passing_buffers(model) if computes else set()
    computed = {name for name, _ in model.named_buffers(remove_duplicate=False)} if computes else set()
    tensors |= {name: t for name, t in model.named_buffers(remove_duplicate=False) if name not in passing}
    for name, tensor in tensors.items():
        same.setdefault(id(tensor), []).append(name)
    missing, filled, wanted = [], [], set()
    for names in same.values():
        kept = [name for name in names if name.rpartition(".")[0] not in layers and name not in replaced]
        if not kept or (computes and len(kept) < len(names) and not any(name in rest for name in kept)):
            continue  # of a quantized layer, or tied to one
        found = [name for name in kept if name in rest]
        wanted |= set(kept if computes else found[:1])
        if not found:
            missing += [name for name in kept[:1] if name not in computed]
            continue
        tensor = tensors[kept[0]]
        for name in found:
            stored = rest[name]
            dtype = torch_dtype(stored.code)
            ok = stored.code in (*FLOATS, "F64") if tensor.is_floating_point() else dtype == tensor.dtype
            if not ok or list(stored.shape) != list(tensor.shape):
                raise CheckpointError(
                    f"{where}: tensor {name!r}: found {stored.code} {list(stored.shape)}; {tensor.dtype} "
                    f"{list(tensor.shape)} is needed"
                )
        filled.append([found[0], *(name for name in kept if name != found[0])])
    foreign = [name for name in rest if name not in wanted]
    if missing or foreign:
        raise CheckpointError(
            f"{where}: {len(missing)} tensors of the model are missing and {len(foreign)} do not belong to it; "
            f"the first is {(missing or foreign)[0]!r}"
        )
    return filled


def _tied(modules: Mapping[str, nn.Module], layers: Mapping[str, Parts], rest: Mapping[str, Stored]) -> dict[str, str]:
    """The classifier or table of tokens that is tied to a quantized one and is not stored, with that one's name."""
    owners = {id(module._parameters.get("weight")): name for name, module in modules.items() if name in layers}
    quantized = {id(modules[name]) for name in layers}
    tied = {}
    for other, module in modules.items():
        weight = module._parameters.get("weight")
        name = owners.get(id(weight))
        if weight is None or name is None or id(module) in quantized or f"{other}.weight" in rest:
            continue
        if is_table(module) or (is_linear(module) and not is_linear(modules[name])):
            tied[other] = name
    return tied
