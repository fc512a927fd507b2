"""`Experts`: the experts of a mixture, in float or quantized, called as transformers calls its own."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from qcut.errors import DtypeError, RangeError, ShapeError, UnsupportedError, layer_prefix
from qcut.layers.experts.linear_stack import LinearStack
from qcut.layers.linear import Linear
from qcut.models.modules import ExpertsModule, dtype_name
from qcut.numerics.gating import Gating

Projection = LinearStack | nn.ModuleList
"""One projection of all experts: quantized in one stack, or a linear layer each."""


class Experts(ExpertsModule):
    """``sum over a token's routes of weight * norm(down_e(gating(up_e(x))))``, e the route's expert.

    Args:
        up: E layers of H columns and 2 I rows, gate above up; of I rows without a gate.
        down: E layers of I columns and H rows.
        gating: what is between them.
        post_expert_norm: applied to an expert's result, before the route's weight; None for none.
        name: of the module, for error messages.

    Attributes:
        num_experts: E.
    """

    def __init__(
        self,
        up: Projection,
        down: Projection,
        gating: Gating,
        post_expert_norm: nn.Module | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.up, self.down, self.post_expert_norm = up, down, post_expert_norm
        self.gating, self.name, self.num_experts = gating, name, count_of(up)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Applies to each token the experts that the router chose.

        Args:
            hidden_states: ``[T, H]``.
            top_k_index: the experts of each token, integers ``[T, k]``. An index of E or more is a route that another
                process computes; its weight is 0.
            top_k_weights: of each route, floating point ``[T, k]``.

        Returns:
            ``[T, H]`` of the tokens' dtype.

        Raises:
            ShapeError: shapes that do not fit together.
            DtypeError: indices that are no integers, or weights that are no floats.
            RangeError: an index below 0, or of E or more with a weight, or a weight that is NaN or infinite.
            UnsupportedError: a CUDA graph is captured, in which no host can read the routes.

        Exactness: products are those of the experts' layers; their results are multiplied by the weights and added in
        float32 in the order of the routes, and rounded once. Nothing depends on the other tokens.
        """
        x, index, weights = hidden_states, top_k_index, top_k_weights
        self._check(x, index, weights)
        routes = index.shape[1]
        order = index.reshape(-1).argsort(stable=True)
        counts = torch.bincount(index.reshape(-1).clamp(max=self.num_experts), minlength=self.num_experts + 1)
        parts, first = [], 0
        for e, count in enumerate(counts.tolist()[: self.num_experts]):
            if count:
                parts.append(self._expert(e, x[order[first : first + count] // routes]))
                first += count
        # Routes of other processes are last in the order, and add nothing.
        parts.append(x.new_zeros(len(order) - first, x.shape[1]))
        results = torch.cat(parts)[order.argsort()].view(*index.shape, x.shape[1])
        return weighted_sum(results, weights).to(x.dtype)

    def _expert(self, e: int, x: Tensor) -> Tensor:
        y = layer_of(self.down, e)(self.gating(layer_of(self.up, e)(x)))
        return cast(Tensor, y if self.post_expert_norm is None else self.post_expert_norm(y))

    def _check(self, x: Tensor, index: Tensor, weights: Tensor) -> None:
        where = layer_prefix(self.name)
        if x.ndim != 2 or index.ndim != 2 or index.shape != weights.shape or len(index) != len(x):
            raise ShapeError(
                f"{where}tokens {list(x.shape)}, indices {list(index.shape)} and weights {list(weights.shape)}; "
                "allowed: [T, H], [T, k] and [T, k]"
            )
        if index.is_floating_point() or index.is_complex() or index.dtype is torch.bool:
            raise DtypeError(f"{where}indices are {dtype_name(index.dtype)}; allowed: integers")
        if not weights.is_floating_point():
            raise DtypeError(f"{where}weights are {dtype_name(weights.dtype)}; allowed: floating point")
        if torch.compiler.is_compiling() or index.is_meta:
            return
        if index.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(f"{where}experts read their routes on the host; no CUDA graph can capture that")
        wrong = (index < 0) | ((index >= self.num_experts) & (weights != 0)) | ~weights.isfinite()
        if wrong.any():
            token, route = wrong.nonzero()[0].tolist()
            raise RangeError(
                f"{where}token {token}: found expert {int(index[token, route])} with weight "
                f"{float(weights[token, route])}; allowed: experts 0 to {self.num_experts - 1} with finite weights, "
                "and larger indices with weight 0"
            )

    def extra_repr(self) -> str:
        """Number of experts and gating, for ``print(model)``."""
        return f"num_experts={self.num_experts}, gating={self.gating}"


def weighted_sum(results: Tensor, weights: Tensor) -> Tensor:
    """Results of routes ``[T, k, H]`` times their weights ``[T, k]``, added in order: float32 ``[T, H]``."""
    total = torch.zeros(results.shape[0], results.shape[2], dtype=torch.float32, device=results.device)
    for route in range(weights.shape[1]):
        total += results[:, route].float() * weights[:, route, None].float()
    return total


def count_of(projection: Projection) -> int:
    """The number of experts."""
    return projection.experts if isinstance(projection, LinearStack) else len(projection)


def layer_of(projection: Projection, e: int) -> nn.Linear | Linear:
    """The layer of an expert."""
    return projection.expert(e) if isinstance(projection, LinearStack) else cast(nn.Linear, projection[e])
