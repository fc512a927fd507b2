"""The layers of a model under every scheme that a plan may choose, with what each costs and loses by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from qcut.common.progress import with_progress
from qcut.conversion.calibration.calibrate import Calibration
from qcut.conversion.calibration.second_order import expected_loss
from qcut.conversion.fitting import fitting_scheme
from qcut.conversion.planning.costs import CostModel, LayerSize
from qcut.conversion.planning.search import Choice, TiedLayers
from qcut.conversion.planning.sensitivity import Judge, Metric, as_loss, best_range, output_error
from qcut.conversion.tasks import moment_of
from qcut.errors import ConfigError
from qcut.layers.codebook import CodebookLinear
from qcut.layers.linear import Linear
from qcut.models.modules import tensor_key, weight_nk, weight_of
from qcut.numerics.codebook.fitting.curvature import Curvature
from qcut.numerics.codebook.quantizer import RotatedCodebook
from qcut.schemes import Float, Scheme, StaticRange

Passes = Mapping[tuple[str, str], Sequence[RotatedCodebook]]
"""Passes of codebook weights, by the scheme's name and the layer's."""
_STAYS = ""
"""The candidate's name for a group that no candidate serves."""


def groups_of(modules: Mapping[str, nn.Module], sets: Sequence[Sequence[str]]) -> list[TiedLayers]:
    """Layers that share a weight, or are in one of the sets, are one group; in the order of the layers."""
    owner = {name: name for name in modules}

    def root(name: str) -> str:
        while owner[name] != name:
            name = owner[name]
        return name

    first: dict[tuple[Any, ...], str] = {}
    pairs = [(first.setdefault(tensor_key(weight_of(module)), name), name) for name, module in modules.items()]
    pairs += [(names[0], name) for names in sets for name in names[1:]]
    order = {name: i for i, name in enumerate(modules)}
    for a, b in pairs:
        low, high = sorted((root(a), root(b)), key=order.__getitem__)
        owner[high] = low
    groups: dict[str, TiedLayers] = {}
    for name in modules:
        groups.setdefault(root(name), TiedLayers([])).names.append(name)
    return list(groups.values())


class Candidates:
    """Groups of layers under all candidates.

    Args:
        modules: the float layers by name.
        schemes: the candidates.
        sets: layers that the engine computes by one product where they have one scheme, which groups hold together.
        calibration: of the layers' inputs; None where no candidate and no measure needs it.
        moments: second moments of the layers' inputs, to fit codebooks to; None rounds to the nearest.
        passes: codebooks that are made already, by the scheme's name and the layer's.

    Attributes:
        groups: `TiedLayers`, with costs after `price`, and quantized layers after `quantize`.
        ranges: static range and its method, by layer that could use one.
        costs: by layer and scheme.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        schemes: Sequence[Scheme],
        sets: Sequence[Sequence[str]],
        calibration: Calibration | None,
        moments: Mapping[str, Tensor | Curvature] | None,
        passes: Passes,
    ) -> None:
        self._modules, self._calibration, self._moments, self._passes = modules, calibration, moments, passes
        self._rows = {name: sum(len(weight_nk(modules[n])) for n in names) for names in sets for name in names}
        self.groups = groups_of(modules, sets)
        self.ranges: dict[str, tuple[StaticRange, str]] = {}
        self.costs: dict[str, dict[str, float]] = {}
        self._named = [scheme.name for scheme in schemes]
        self._fits = [self._fitting(group, schemes) for group in self.groups]

    def price(self, cost: CostModel) -> None:
        """Give groups and layers their costs."""
        self.costs = {name: {} for name in self._modules}
        for group, fits in zip(self.groups, self._fits, strict=True):
            group.cost = {}
            for scheme in _distinct(fits):
                for name in group.names:
                    self.costs[name][scheme.name] = cost(self._size(name), scheme.name)
                group.cost[scheme.name] = sum(self.costs[name][scheme.name] for name in group.names)

    def quantize(self, progress: bool) -> None:
        """Quantize every group under every scheme that it can have."""
        both = zip(self.groups, self._fits, strict=True)
        for group, fits in with_progress(list(both), "quantize candidates", "layer", shown=progress):
            for scheme in _distinct(fits):
                group.sensitivity[scheme.name] = 0.0
                for name in () if scheme.is_float else group.names:
                    layer = self._layer(name, scheme)
                    for owner in group.quantized():
                        layer.tie_to(owner)
                    group.layers.setdefault(scheme.name, {})[name] = layer

    def measure(self, judge: Judge, max_batches: int | None) -> None:
        """Make sensitivities the model's loss with one group quantized."""
        pairs = [(group, scheme) for group in self.groups for scheme in group.layers]
        losses = judge.losses([group.layers[scheme] for group, scheme in pairs], "sensitivity", max_batches)
        for (group, scheme), loss in zip(pairs, losses, strict=True):
            group.sensitivity[scheme] = loss

    def measure_outputs(self) -> None:
        """Make sensitivities the relative error of the layers' own outputs."""
        self._by_output(lambda name, layer, sample: output_error(self._modules[name], layer, sample))

    def estimate(self, weights: Mapping[str, Tensor], metric: Metric) -> None:
        """Make sensitivities estimates of the model's loss, from the errors of the layers' own outputs.

        Args:
            weights: see `qcut.conversion.calibration.second_order.channel_weights`.
            metric: the one that the weights are of.
        """
        self._by_output(lambda name, layer, sample: expected_loss(self._modules[name], layer, sample, weights[name]))
        for group in self.groups:
            group.sensitivity = {scheme: as_loss(sum_, metric) for scheme, sum_ in group.sensitivity.items()}

    def _by_output(self, error: Callable[[str, Linear, Tensor], float]) -> None:
        assert self._calibration is not None
        for group in self.groups:
            for scheme, layers in group.layers.items():
                samples = ((name, layer, self._calibration.stats(name).sample) for name, layer in layers.items())
                group.sensitivity[scheme] = sum(error(*one) for one in samples)

    def uniform(self) -> dict[str, Choice]:
        """Every candidate that all groups can have, as a choice; a group that no candidate serves stays as it is."""
        choices = {}
        for name in self._named:
            schemes = [fits.get(name) or (Float() if _STAYS in fits else None) for fits in self._fits]
            names = tuple(scheme.name for scheme in schemes if scheme is not None)
            if len(names) == len(schemes):
                choices[name] = names
        return choices

    def _fitting(self, group: TiedLayers, schemes: Sequence[Scheme]) -> dict[str, Scheme]:
        """By candidate, the scheme that it means for a group. A group that would grow under all of them stays."""
        first = self._modules[group.names[0]]
        fits = {s.name: s if s.is_float else fitting_scheme(first, s).scheme for s in schemes}
        return {name: scheme for name, scheme in fits.items() if scheme is not None} or {_STAYS: Float()}

    def _layer(self, name: str, scheme: Scheme) -> Linear:
        module = self._modules[name]
        if made := self._passes.get((scheme.name, name)):
            layer = CodebookLinear.from_passes(made, module._parameters.get("bias"), scheme, name=name)
            if layer.scheme != scheme:
                raise ConfigError(f"layer {name!r}: passes are of {layer.scheme.name}; {scheme.name} is needed")
            layer.weight_dtype = weight_of(module).dtype
            return layer
        static_range = moment = None
        if scheme.needs_range:
            assert self._calibration is not None
            self.ranges[name] = best_range(module, scheme, name, self._calibration)
            static_range = self.ranges[name][0]
        if self._moments is not None and scheme.takes_second_moments:
            moment = moment_of(self._moments, name, module)
        return Linear.from_float(module, scheme, static_range=static_range, second_moment=moment, name=name)

    def _size(self, name: str) -> LayerSize:
        module = self._modules[name]
        n, k = weight_nk(module).shape
        if self._calibration is not None:
            self._calibration.check(name, k)
        parameters = [p for p in module._parameters.values() if p is not None]
        size = sum(p.nbytes for p in parameters)
        return LayerSize(name, n, k, len(parameters) > 1, size, self._rows.get(name, n))


def _distinct(fits: Mapping[str, Scheme]) -> list[Scheme]:
    return list(dict.fromkeys(fits.values()))
