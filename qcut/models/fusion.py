"""Activations that the linear layer before them computes, in float32, before the layer's result is rounded.

Nobody else may read what lies between the two. In an ``nn.Sequential`` that holds by construction: the container takes
the class `FusedSequential`. Its own ``forward`` calls the pair as one; code that calls the layer without the container
gets the layer without the activation. In transformers' GPT-2 the code shows it: nothing that a forward call reaches
mentions ``c_fc`` but the MLP itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from qcut.models.classes import activation_of, all_calls_are_watched, is_exactly, is_unwatched, library_class
from qcut.models.modules import Quantized, is_linear
from qcut.models.weight_sharing.functions import mentions
from qcut.models.weight_sharing.readers import class_checked


class FusedActivation(nn.Identity):
    """Takes the place of an activation that the linear layer before it always computes."""

    def __init__(self, activation: str = "none") -> None:
        super().__init__()
        self.activation = activation

    def extra_repr(self) -> str:
        """The activation's name, for ``print(model)``."""
        return self.activation


class FusedSequential(nn.Sequential):
    """An ``nn.Sequential`` with quantized layers that compute the activations behind them.

    A pair is called as one only if the container is called as a whole and nobody looks between: hooks on either,
    an adapter around the layer, or another module in a place lead to a call of each. The same holds for whoever
    indexes, slices or iterates the container.
    """

    _pairs: Mapping[str, tuple[Quantized, nn.Module]] = {}
    """By the key of a layer: the layer, and the activation behind it."""

    def forward(self, input: Any) -> Any:
        """As ``nn.Sequential``'s."""
        pairs = {} if all_calls_are_watched() else self._pairs
        computed: nn.Module | None = None
        children = [*self._modules.items()]
        for i, (key, module) in enumerate(children):
            if module is computed:
                computed = None
                continue
            pair = pairs.get(key)
            if pair is not None and self._calls_both(i, children, pair):
                input, computed = pair[0].forward_fused(input), pair[1]
                continue
            input = module(input)  # type: ignore[misc]
        return input

    @staticmethod
    def _calls_both(at: int, children: list[tuple[str, nn.Module]], pair: tuple[Quantized, nn.Module]) -> bool:
        """Whether the children from here on are the pair, and nobody looks at their calls."""
        in_place = children[at][1] is pair[0] and at + 1 < len(children) and children[at + 1][1] is pair[1]
        return in_place and is_unwatched(pair[0]) and is_unwatched(pair[1])

    def fused(self) -> Iterator[tuple[str, str]]:
        """The keys of activations that layers compute, and their names."""
        keys = [*self._modules]
        for key, (layer, activation) in self._pairs.items():
            after = keys.index(key) + 1 if self._modules.get(key) is layer else len(keys)
            if after < len(keys) and self._modules[keys[after]] is activation:
                yield keys[after], layer.activation


class Change(NamedTuple):
    """An assignment and its reverse; the reverse does no harm if the assignment was not made."""

    apply: Callable[[], None]
    undo: Callable[[], None]


def fuse(parent: nn.Module, key: str, layer: nn.Module | None, activation: str) -> Change:
    """What lets a quantized layer compute the activation behind it.

    Args:
        parent: of the activation.
        key: of the activation in the parent.
        layer: the quantized layer, which has that activation; of no effect outside of an ``nn.Sequential``.
        activation: its function's name in `qcut.schemes.ACTIVATIONS`.
    """
    children = parent._modules
    module = children[key]
    if not isinstance(parent, nn.Sequential):
        fused = FusedActivation(activation)
        return Change(lambda: children.__setitem__(key, fused), lambda: children.__setitem__(key, module))
    assert isinstance(layer, Quantized)
    assert module is not None
    before = key_before(parent, key)
    cls: Any = type(parent)
    pairs = dict(getattr(parent, "_pairs", {}))

    def apply() -> None:
        parent.__class__ = FusedSequential
        parent._pairs = {**getattr(parent, "_pairs", {}), before: (layer, module)}  # type: ignore[assignment]
        layer.apart = True

    def undo() -> None:
        parent.__class__ = cls
        vars(parent).pop("_pairs", None)
        if pairs:
            parent._pairs = pairs  # type: ignore[assignment]
        layer.apart = False

    return Change(apply, undo)


def unfuse(model: nn.Module) -> None:
    """Make every `FusedSequential` an ``nn.Sequential`` again, in which float layers take the quantized ones' place."""
    for module in model.modules():
        if isinstance(module, FusedSequential):
            vars(module).pop("_pairs", None)
            cls: Any = nn.Sequential
            module.__class__ = cls


def key_before(parent: nn.Module, key: str) -> str:
    """The key of the child before another; "" where that is the first."""
    keys = ["", *parent._modules]
    return keys[keys.index(key) - 1]


def fused_activations(model: nn.Module) -> dict[str, str]:
    """Activations that quantized layers compute: function by the name of the activation's module."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, FusedActivation):
            found[name] = module.activation
        elif isinstance(module, FusedSequential):
            found |= {f"{name}.{key}" if name else key: activation for key, activation in module.fused()}
    return found


def is_fusible_place(parent: nn.Module, key: str) -> bool:
    """Whether an activation in this place may be computed by the layer before it, as far as the parent's class goes."""
    if not isinstance(parent, nn.Sequential):
        return not isinstance(parent, (nn.ModuleList, nn.ModuleDict))
    return key_before(parent, key) != "" and (is_exactly(parent, nn.Sequential) or type(parent) is FusedSequential)


def fusible_activations(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Activations of torch and transformers that read only the result of one linear layer, by that layer's name.

    Two places are known: neighbours in a plain ``nn.Sequential``, and the MLP of GPT-2 (``c_fc``, then ``act``) where
    no other code that the model reaches reads ``c_fc``. A layer in two places has no activation of its own, and hooks
    on either of the two see what lies between them. A Sequential stays as it is if code checks its class.

    Returns:
        By layer name: the name of the activation module, and its function's name in `qcut.schemes.ACTIVATIONS`.
    """
    if all_calls_are_watched():
        return {}
    places: dict[int, int] = {}
    for module in model.modules():
        for child in module._modules.values():
            places[id(child)] = places.get(id(child), 0) + 1
    fusible = {}
    plain = [module for module in model.modules() if type(module) is nn.Sequential]
    checked = class_checked(model, plain, FusedSequential) if plain else {}
    for name, module in model.named_modules():
        for first, second in _pairs_of(module, model) if id(module) not in checked else ():
            layer, function = module._modules.get(first), module._modules.get(second)
            activation = activation_of(function)
            if layer is None or function is None or activation is None or not is_linear(layer):
                continue
            if places[id(layer)] == 1 and is_unwatched(layer) and is_unwatched(function):
                prefix = f"{name}." if name else ""
                fusible[prefix + first] = (prefix + second, activation)
    return fusible


def _pairs_of(module: nn.Module, model: nn.Module) -> list[tuple[str, str]]:
    """Children that may be a linear layer and its activation, called one after the other and by nobody else."""
    if is_exactly(module, nn.Sequential) or type(module) is FusedSequential:
        keys = list(module._modules)
        return list(pairwise(keys))
    if is_exactly(module, library_class("transformers.models.gpt2.modeling_gpt2", "GPT2MLP")):
        pair = ("c_fc", "act")
        return [] if mentions(model, pair, known=type(module)) else [pair]
    return []
