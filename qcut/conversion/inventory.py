"""Counts a model's parameters by what they are, for reports of what stays in float."""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd

from qcut.errors import QuantizationWarning
from qcut.layers.quantized import QuantizedLayer
from qcut.models.modules import ExpertsModule, expert_count, looks_linear, tensor_key
from qcut.models.selection import DEFAULT_SKIP, expert_stacks, matches

QUANTIZED, ALREADY = "quantized", "already quantized"

KINDS = (QUANTIZED, ALREADY, "embeddings", "experts", "convolutions", "linear layers", "norms", "other")
"""What a parameter can be. One that several modules share is of the first kind that any of them makes it.

Experts are the matrices of mixtures, open or in one parameter of three dimensions; linear layers are those that stay in
float; other is the rest: positions, gates, the packed projection of ``nn.MultiheadAttention``.
"""


def count_parameters(model: nn.Module, chosen: Container[int]) -> dict[str, int]:
    """Numbers of parameters by kind, in the order of `KINDS`, shared ones once, without kinds that the model lacks.

    Args:
        model: before it is changed, its experts open.
        chosen: ids of the modules that will be quantized.

    Returns:
        The sum of the numbers is that of the model's parameters, and of the weights and biases that are quantized
        already.
    """
    kinds: dict[tuple[Any, ...], tuple[int, int]] = {}
    inside: set[int] = set()
    of_experts = _inside_experts(model)
    for module in model.modules():
        if id(module) in inside:
            continue
        if isinstance(module, QuantizedLayer):
            kinds[tensor_key(next(module.buffers()))] = (KINDS.index(ALREADY), module.float_count)
            continue
        kind = QUANTIZED if id(module) in chosen else _kind(module, of_experts)
        # What a layer's weight is computed from, as in weight norm, is of the layer's kind.
        whole = kind in ("embeddings", "convolutions", "linear layers")
        if whole:
            inside |= {id(part) for part in module.modules()}
        for parameter in module.parameters(recurse=whole):
            key = tensor_key(parameter)
            kinds[key] = min(kinds.get(key, (len(KINDS), 0)), (KINDS.index(kind), parameter.numel()))
    counts = dict.fromkeys(KINDS, 0)
    for rank, count in kinds.values():
        counts[KINDS[rank]] += count
    return {kind: count for kind, count in counts.items() if count}


FEW_TOKENS = 256
"""Of an expert in calibration: of later tokens, one in a hundred has a value beyond the range of so many."""

EXPECTED_SHARE = 0.9
"""Of the parameters that a user expects to be quantized, the share from which on no warning is given."""
_BY_CHOICE = ("matched by skip", "not in include", "not in the plan")
_NAMED = 3  # names shown for a reason


class Coverage(NamedTuple):
    """How much is quantized of what a user expects to be: all outside of embeddings, classifiers, norms and ``skip``.

    Attributes:
        quantized: parameters.
        left: by reason, the names of the others and their parameters.
    """

    quantized: int
    left: dict[str, list[tuple[str, int]]]

    @property
    def expected(self) -> int:
        """Parameters that a user expects to be quantized."""
        return self.quantized + sum(count for group in self.left.values() for _, count in group)

    @property
    def share(self) -> float:
        """Of the expected parameters, the share that is quantized; 1 where none is expected."""
        return self.quantized / self.expected if self.expected else 1.0

    def __str__(self) -> str:
        reasons = []
        for reason, group in sorted(self.left.items(), key=lambda item: -sum(count for _, count in item[1])):
            names = ", ".join(name or "the model's own" for name, _ in group[:_NAMED])
            more = f" and {len(group) - _NAMED} more" if len(group) > _NAMED else ""
            reasons.append(f"{sum(count for _, count in group):,} in {names}{more} ({reason})")
        return (
            f"{self.share:.1%} of the {self.expected:,} parameters outside of embeddings, classifier and norms are "
            f"quantized. In float stay {'; '.join(reasons) or 'none'}. What is left in float on purpose is named by "
            "skip (modules_to_not_convert)"
        )


def coverage(model: nn.Module, chosen: Container[int], skipped: Mapping[str, str], skip: Iterable[str]) -> Coverage:
    """How much of a model is quantized of what a user expects to be.

    Args:
        model: before it is changed, its experts open.
        chosen: ids of the modules that will be quantized.
        skipped: layers and experts that stay in float, with the reason.
        skip: globs of modules to leave in float.
    """
    seen: set[tuple[Any, ...]] = set()
    quantized, left = 0, dict[str, list[tuple[str, int]]]()
    patterns = tuple(skip)
    chosen_first = sorted(model.named_modules(), key=lambda item: id(item[1]) not in chosen)  # they may share weights
    of_experts = _inside_experts(model)
    for name, module in chosen_first:
        fresh = [p for p in module._parameters.values() if p is not None and tensor_key(p) not in seen]
        seen |= {tensor_key(p) for p in fresh}
        count, kind = sum(p.numel() for p in fresh), _kind(module, of_experts)
        excluded = any(matches(part, patterns) for part in _parts(name))
        if id(module) in chosen or isinstance(module, QuantizedLayer):
            quantized += count
        elif count and kind not in ("embeddings", "norms") and not excluded:
            reason = skipped.get(name, kind)
            if reason not in _BY_CHOICE:
                left.setdefault(reason, []).append((name, count))
    return Coverage(quantized, left)


def warn_of_float(model: nn.Module, found: Coverage, stacklevel: int) -> None:
    """Warn where less than nine tenths of the expected parameters are quantized.

    Args:
        model: its class is named.
        found: its coverage.
        stacklevel: of the warning.
    """
    if found.share < EXPECTED_SHARE:
        warnings.warn(f"{type(model).__name__}: {found}", QuantizationWarning, stacklevel=stacklevel)


def warn_of_skip(model: nn.Module, skip: Iterable[str], stacklevel: int) -> None:
    """Warn of globs that leave nothing in float, such as the name of a module without weights of its own.

    Args:
        model: before it is changed, its experts open.
        skip: globs as the caller gave them; those of `DEFAULT_SKIP` may match nothing.
        stacklevel: of the warning.
    """
    stacks = expert_stacks(model)
    names = [name for name, module in model.named_modules() if module._parameters or module._buffers]
    for pattern in skip:
        if pattern not in DEFAULT_SKIP and not any(matches(name, [pattern], stacks) for name in names):
            inside = f"{pattern}.*"
            other = f"; {inside!r} does" if any(matches(name, [inside], stacks) for name in names) else ""
            warnings.warn(
                f"{type(model).__name__}: skip (modules_to_not_convert): {pattern!r} matches no layer{other}",
                QuantizationWarning,
                stacklevel=stacklevel,
            )


def _parts(name: str) -> Iterator[str]:
    """A module's name, and those of the modules that it is in."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _inside_experts(model: nn.Module) -> set[int]:
    """Ids of the linear layers that open experts are."""
    mixtures = [module for module in model.modules() if isinstance(module, ExpertsModule)]
    return {id(part) for module in mixtures for part in module.modules() if looks_linear(part)}


def _kind(module: nn.Module, of_experts: Container[int]) -> str:
    own = [p for p in module._parameters.values() if p is not None]
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embeddings"
    if isinstance(module, _ConvNd):
        return "convolutions"
    if looks_linear(module):
        return "experts" if id(module) in of_experts else "linear layers"
    if expert_count(module):
        return "experts"
    weight = module._parameters.get("weight")
    return "norms" if weight is not None and all(p.ndim == 1 for p in own) and not module._modules else "other"
