"""Statistics of experts that saw few tokens, from the tokens of the others.

What the router sends to an expert in calibration is a part of what it sends later. A range of a few tokens would let
later ones saturate: it is widened here to what the expert computes of the other experts' tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qcut.conversion.calibration.layer_stats import LayerStats
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
        lo, hi = torch.stack([s.lo for s in seen]).amin(0), torch.stack([s.hi for s in seen]).amax(0)
        rows = torch.cat([s.sample for s in seen])
        rows = rows[:: -(-len(rows) // _ROWS)]
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


def _with(own: LayerStats | None, lo: Tensor, hi: Tensor, rows: Tensor) -> LayerStats:
    """An expert's own statistics, and others."""
    if own is None:
        return LayerStats(lo, hi, rows, 0, borrowed=True)
    sample = torch.cat([own.sample, rows])
    return LayerStats(torch.minimum(lo, own.lo), torch.maximum(hi, own.hi), sample, own.tokens, borrowed=True)
