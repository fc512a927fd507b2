"""Statistics of experts that saw few tokens, from the tokens of the others.

What the router sends to an expert in calibration is a part of what it sends later. A range of a few tokens would let
later ones saturate: it is widened here to what the expert computes of the other experts' tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from qcut.conversion.calibration.layer_stats import LayerStats
from qcut.conversion.calibration.observers import LayerObserver, Place, input_hooks, run_observed
from qcut.conversion.inventory import FEW_TOKENS
from qcut.layers.experts.opening import Opened
from qcut.models.modules import Quantized, as_given, float_linear

_ROWS = 1024
"""Tokens of a mixture that an expert is applied to, at most."""


def lend(stats: Mapping[str, LayerStats], mixtures: Opened) -> dict[str, LayerStats]:
    """Statistics of layers, those of experts with fewer than `FEW_TOKENS` with tokens of the mixture.

    Inputs of ``up`` are the tokens themselves: the least and greatest values are those of all experts. Inputs of
    ``down`` mean something else to each expert: the values are those of what this expert's ``up`` makes of a sample of
    all tokens, and its own.

    Args:
        stats: of all layers that saw a token; of a mixture, of both projections or of none.
        mixtures: the model's experts, which are open.

    Exactness: deterministic.
    """
    found = dict(stats)
    for name, names in mixtures.members(stats).items():
        experts = mixtures.experts[name]
        ups, downs = names[: experts.num_experts], names[experts.num_experts :]
        few = [e for e, up in enumerate(ups) if up not in stats or stats[up].tokens < FEW_TOKENS]
        seen = [stats[up] for up in ups if up in stats]
        if not few or not seen:
            continue
        lo, hi, rows = _of_all(seen)
        for e in few:
            found[ups[e]] = _with(stats.get(ups[e]), lo, hi, rows)
            if not downs:  # experts of one projection
                continue
            inside = _result(experts.up[e], rows, experts)  # type: ignore[index]
            found[downs[e]] = _with(stats.get(downs[e]), inside.amin(0), inside.amax(0), inside)
    return found


@torch.no_grad()
def _result(up: nn.Module, rows: Tensor, experts: nn.Module) -> Tensor:
    y = up(as_given(rows, up)) if isinstance(up, Quantized) else float_linear(up, rows)
    return experts.gating(y).float().cpu()  # type: ignore[operator, no-any-return]


def _of_all(seen: Sequence[LayerStats]) -> tuple[Tensor, Tensor, Tensor]:
    """Least and greatest values of all experts' tokens, and a sample of the tokens."""
    rows = torch.cat([one.sample for one in seen])
    ends = torch.stack([one.lo for one in seen]).amin(0), torch.stack([one.hi for one in seen]).amax(0)
    return *ends, rows[:: -(-len(rows) // _ROWS)]


def _with(own: LayerStats | None, lo: Tensor, hi: Tensor, rows: Tensor) -> LayerStats:
    """An expert's own statistics, and others."""
    if own is None:
        return LayerStats(lo, hi, rows, 0, borrowed=True)
    sample = torch.cat([own.sample, rows])
    return LayerStats(torch.minimum(lo, own.lo), torch.maximum(hi, own.hi), sample, own.tokens, borrowed=True)


class ExpertInputs:
    """What experts that are modules are called on; `lend` applies those of few tokens to the tokens of the others.

    Args:
        model: while it is calibrated.
        experts: names of experts by that of their container; see `qcut.models.selection.expert_modules`.
        sample_size: values that are kept of the experts of a container, in eight tokens of each at least.
        seed: of the sample.
    """

    def __init__(self, model: nn.Module, experts: Mapping[str, Sequence[str]], sample_size: int, seed: int) -> None:
        self.model, self.experts, self.seed = model, experts, seed
        self.values = {name: sample_size // len(names) for names in experts.values() for name in names}
        self.seen: dict[str, LayerObserver] = {}
        self.shapes: dict[str, tuple[int, torch.dtype]] = {}
        """Of an expert's input, the number of dimensions, and the dtype."""

    def hooks(self) -> Iterator[Place]:
        """Hooks for `run_observed`."""
        return input_hooks({name: self.model.get_submodule(name) for name in self.values}, self._observe)

    def _observe(self, name: str, x: object) -> None:
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1:
            k = x.shape[-1]
            one = self.seen.setdefault(name, LayerObserver(name, max(self.values[name] // k, 8), k, self.seed))
            self.shapes[name] = x.dim(), x.dtype
            with torch._C.DisableTorchFunction():
                one(x, 0)

    def lend(self, stats: Mapping[str, LayerStats], chosen: Collection[str]) -> dict[str, LayerStats]:
        """Statistics of layers, those of experts with fewer than `FEW_TOKENS` with tokens of the other experts.

        A layer that reads what its expert is called on has the least and greatest values of all experts' tokens; one
        inside has those of what its own expert makes of a sample of these, and its own. An expert that fails on tokens
        of others keeps its own statistics.

        Args:
            stats: of all layers that saw a token.
            chosen: names of layers that statistics are wanted of.
        """
        found = dict(stats)
        for names in self.experts.values():
            layers = {name: [layer for layer in chosen if layer.startswith(f"{name}.")] for name in names}
            few = [
                name
                for name in names
                if any(layer not in stats or stats[layer].tokens < FEW_TOKENS for layer in layers[name])
            ]
            seen = {name: one.stats() for name in names if (one := self.seen.get(name)) is not None and one.tokens}
            if not few or len({len(one.lo) for one in seen.values()}) != 1:
                continue
            lo, hi, rows = _of_all([*seen.values()])
            dims, dtype = self.shapes[next(iter(seen))]
            given = rows.to(dtype).view(*[1] * (dims - 2), *rows.shape)
            for name in few:
                for layer, x in self._read_by(name, layers[name], given).items():
                    whole = torch.equal(x, rows)
                    ends = (lo, hi) if whole else (x.amin(0), x.amax(0))
                    found[layer] = _with(stats.get(layer), *ends, x)
        return found

    @torch.no_grad()
    def _read_by(self, name: str, layers: Sequence[str], given: Tensor) -> dict[str, Tensor]:
        """What the layers of an expert read where it is called on these tokens; none if that fails."""
        read: dict[str, list[Tensor]] = {}

        def observe(layer: str, x: Tensor) -> None:
            read.setdefault(layer, []).append(x.detach().reshape(-1, x.shape[-1]).float().cpu())

        hooks = input_hooks({layer: self.model.get_submodule(layer) for layer in layers}, observe)
        try:
            run_observed(self.model, [given], hooks, self.model.get_submodule(name), "calibrate", False)
        except Exception:  # what a foreign module raises is not known
            return {}
        whole = {layer: torch.cat(parts) for layer, parts in read.items()}
        return {layer: x for layer, x in whole.items() if len(x) and bool(x.isfinite().all())}
