"""Stacks of a mixture's experts: their stored tensors, held to the model, and the `Experts` that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qcut.checkpoints.formats.experts.layers import IntegerFormat, expert_layers
from qcut.checkpoints.formats.experts.names import ExpertNames, Place, full_name
from qcut.checkpoints.formats.experts.whole import turned, whole_stacks
from qcut.checkpoints.formats.parts import FLOATS, Format, Parts, Stored, names_in_files
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.experts.experts import Experts
from qcut.layers.experts.families import expert_weights
from qcut.layers.experts.linear_stack import LinearStack
from qcut.layers.experts.weights import experts_of

_PROJECTIONS = {"gate_up_proj": "up", "up_proj": "up", "down_proj": "down"}
"""By the parameter of transformers' experts, the projection of `Experts`."""


@dataclass(frozen=True)
class StoredStack:
    """One projection of a mixture's experts, all of them quantized.

    Attributes:
        experts: name of the model's module.
        projection: ``up`` or ``down``.
        replaced: parameters that the module then lacks, by their names in it; without memory.
        layers: of each expert, what is stored of its rows, from above.
    """

    experts: str
    projection: str
    replaced: Mapping[str, nn.Parameter]
    layers: Sequence[Sequence[Parts]]

    def built(self, form: Format) -> LinearStack:
        """Read the stack, on the CPU.

        Raises:
            CheckpointError, UnsupportedError: see `expert_layers`.
        """
        assert isinstance(form, IntegerFormat)
        return LinearStack.of(list(expert_layers(form, self.layers)), f"{self.experts}.{self.projection}")


def build_experts(
    module: nn.Module, stacks: Sequence[StoredStack], form: Format, device: torch.device, where: str
) -> Experts:
    """The experts that take the place of a module, a projection without a stack in the memory of the module.

    Args:
        module: of the model, with all tensors that are not quantized.
        stacks: one or two projections.
        form: how they are stored.
        device: where they shall be.
        where: for messages.

    Raises:
        CheckpointError, UnsupportedError: see `expert_layers`.
    """
    name = stacks[0].experts
    for stack in stacks:
        for key, parameter in stack.replaced.items():
            module.__dict__.pop(key, None)
            module._parameters[key] = parameter
    weights = expert_weights(module)
    if isinstance(weights, str):
        raise CheckpointError(f"{where}: experts {name!r}: {weights}")
    made = experts_of(weights, name)
    for stack in stacks:
        setattr(made, stack.projection, stack.built(form).to(device))
    return made.eval()


def take_experts(
    model: nn.Module,
    form: Format,
    names: ExpertNames,
    tensors: Mapping[str, Stored],
    stored_as: Mapping[str, str],
    where: str,
) -> tuple[list[StoredStack], dict[str, Stored]]:
    """Find the tensors that are stored for each expert, and hold their headers to the model.

    Args:
        model: its parameters may be without memory.
        form: how quantized layers are stored.
        names: of the model.
        tensors: by the names that `ExpertNames.renamed` gives them.
        stored_as: their names in the files.
        where: the file or folder, for messages.

    Returns:
        Quantized projections; and all other tensors, with those of float experts stacked under the parameter's name.

    Raises:
        CheckpointError: an expert is missing, or is none of the model's; a tensor is missing, superfluous, or of a
            wrong shape or dtype (named).
        UnsupportedError: experts that qcut does not know, that are partly in float, or that are not of integers.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, _Found] = {}
    rest: dict[str, Stored] = {}
    whole = whole_stacks(model, form, tensors, where)
    stacks = [_stack(model, one.parameter, form, one.layers, where, whole=True) for one in whole]
    taken = {name for one in whole for name in one.tensors}
    tensors = {name: stored for name, stored in tensors.items() if name not in taken}
    for name, stored in tensors.items():
        place = names.place(name)
        parameter = place and full_name(place.parameter, parameters, model)
        if place is None or parameter is None or parameters[parameter].ndim != 3:
            rest[name] = stored
            continue
        one = found.setdefault(parameter, _Found(parameter, parameters[parameter].shape, place.parts, where))
        one.add(place, stored, name, stored_as.get(name, name))
    for parameter, one in found.items():
        if parameter in rest:
            raise CheckpointError(
                f"{where}: tensors {one.first!r} and {stored_as.get(parameter, parameter)!r} are the same experts'; "
                "allowed: experts one by one, or in one tensor"
            )
        layers = one.layers()
        kinds: dict[bool, str] = {}
        for own in (own for parts in layers for own in parts):
            quantized = form.quantized(own.tensors)
            kinds.setdefault(quantized, own.name)
            if not quantized:
                own.only(("weight",))
        if len(kinds) > 1:
            raise UnsupportedError(
                f"{where}: layer {kinds[True]!r} is quantized, and {kinds[False]!r} is in float; allowed: all experts "
                "of a projection in one form, since they are one stack"
            )
        if True in kinds:
            stacks.append(_stack(model, parameter, form, layers, where))
        else:
            rest[parameter] = _float_stack(layers)
    return stacks, rest


class _Found:
    """The tensors that are stored of one parameter's experts.

    Args:
        parameter: of the model.
        shape: its shape, ``[E, N, K]``.
        parts: layers that are joined to an expert's N rows.
        where: for messages.

    Attributes:
        first: the first tensor's name in the files.
    """

    def __init__(self, parameter: str, shape: Sequence[int], parts: int, where: str) -> None:
        self._parameter, self._parts, self._where = parameter, parts, where
        self._experts, rows, self._k = shape
        self._n = rows // parts
        self._tensors: dict[tuple[int, int], dict[str, Stored]] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._renamed: dict[tuple[int, int], str] = {}
        self.first = ""

    def add(self, place: Place, stored: Stored, renamed: str, name: str) -> None:
        """Add a tensor, by its name in the files and the one that `ExpertNames.renamed` gives it.

        Raises:
            CheckpointError: the model has no such expert.
        """
        layer, key = (place.expert, place.part), place.key
        if place.expert >= self._experts:
            raise CheckpointError(f"{self._where}: tensor {name!r}: the model has experts 0 to {self._experts - 1}")
        self.first = self.first or name
        self._tensors.setdefault(layer, {})[key] = stored
        self._names[layer], self._renamed[layer] = (one.removesuffix(f".{key}") for one in (name, renamed))

    def layers(self) -> list[list[Parts]]:
        """What is stored of each expert.

        Raises:
            CheckpointError: there is nothing of one.
        """
        count = self._experts * self._parts
        if (missing := count - len(self._tensors)) > 0:
            expert, part = next(
                (e, p) for e in range(self._experts) for p in range(self._parts) if (e, p) not in self._tensors
            )
            like = next((name for (_, p), name in self._names.items() if p == part), None)
            what = f"part {part + 1} of {self._parts}" if like is None else repr(like.rpartition(".")[2])
            raise CheckpointError(
                f"{self._where}: {missing} of the {count} layers of {self._parameter!r} are missing; the first is "
                f"{what} of expert {expert}"
            )
        return [[self._layer((e, p)) for p in range(self._parts)] for e in range(self._experts)]

    def _layer(self, layer: tuple[int, int]) -> Parts:
        tensors = self._tensors[layer]
        others = (self._renamed[layer], *names_in_files(tensors))
        return Parts(self._names[layer], self._where, self._n, self._k, tensors, other_names=others)


def _stack(
    model: nn.Module, parameter: str, form: Format, layers: list[list[Parts]], where: str, whole: bool = False
) -> StoredStack:
    name, _, key = parameter.rpartition(".")
    module = model.get_submodule(name)
    if not isinstance(form, IntegerFormat):
        raise UnsupportedError(
            f"{where}: layer {layers[0][0].name!r} is an expert's; allowed: experts in float, or of GPTQ, AWQ or "
            "compressed-tensors"
        )
    why = expert_weights(module)
    if not isinstance(why, str) and not whole and turned(module):
        why = f"{type(module).__name__} does not have gate above up in its rows"
    if isinstance(why, str):
        raise UnsupportedError(f"{where}: experts {name!r} have quantized tensors; {why}")
    replaced = {key: module._parameters[key], f"{key}_bias": module._parameters.get(f"{key}_bias")}
    biased = replaced[f"{key}_bias"] is not None or "bias" in layers[0][0].tensors
    for one in (one for parts in layers for one in parts):
        form.check(one)
        if biased:
            one.require("bias", FLOATS, [one.n])
        elif "bias" in one.tensors:
            raise layers[0][0].error("bias", f"is missing; {one.name!r} has one")
    held = {key: parameter for key, parameter in replaced.items() if parameter is not None}
    return StoredStack(name, _PROJECTIONS[key], held, layers)


def _float_stack(layers: list[list[Parts]]) -> Stored:
    """The tensor of float experts, read one by one."""
    code = (layers[0][0].tensors["weight"].code,)
    for one in (one for parts in layers for one in parts):
        one.require("weight", code, [one.n, one.k])
    rows = sum(one.n for one in layers[0])

    def read() -> Tensor:
        made: Tensor | None = None
        for i, parts in enumerate(layers):
            one = torch.cat([one.read("weight") for one in parts])
            made = one.new_empty((len(layers), *one.shape)) if made is None else made
            made[i] = one
        assert made is not None
        return made

    return Stored(code[0], (len(layers), rows, layers[0][0].k), read)
