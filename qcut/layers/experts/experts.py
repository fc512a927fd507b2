"""`Experts`: the experts of a mixture, in float or quantized, called as transformers calls its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from qcut.errors import DeviceError, DtypeError, RangeError, ShapeError, UnsupportedError, layer_prefix
from qcut.layers.experts.linear_stack import LinearStack
from qcut.layers.linear import Linear
from qcut.layers.tokens import MOST_PREPARED, Prepared
from qcut.models.guards import refuse_batching
from qcut.models.modules import ExpertsModule, dtype_name
from qcut.numerics.gating import Gating
from qcut.numerics.routing import MAX_EXPERTS, RouteTiles
from qcut.ops.paths import path_on

if TYPE_CHECKING:
    from typing_extensions import Self

Projection = LinearStack | nn.ModuleList
"""One projection of all experts: quantized in one stack, or a linear layer each."""


class RoutedResults(NamedTuple):
    """Results of routes, not added yet.

    Attributes:
        results: ``[T * k, H]``.
        weights: float32 ``[T, k]``.
        experts: int32 ``[T, k]``; routes of others than 0 to ``num_experts - 1`` have none.
        num_experts: number of experts.
    """

    results: Tensor
    weights: Tensor
    experts: Tensor
    num_experts: int


def summed(y: Tensor | RoutedResults) -> Tensor:
    """``[T, H]``: `torch.ops.qcut.sum_routes` of results, if they are not added."""
    return y if isinstance(y, Tensor) else torch.ops.qcut.sum_routes(*y, None)


class Experts(ExpertsModule):
    """``sum over a token's routes of weight * norm(down_e(gating(up_e(x))))``, e the route's expert.

    Args:
        up: E layers of H columns and 2 I rows, gate above up; of I rows without a gate.
        down: E layers of I columns and H rows.
        gating: what is between them.
        post_expert_norm: applied to an expert's result, before the route's weight; None for none.
        name: of the module, for error messages.
        identities: experts without weights, which return the token: E, E + 1 and so on.

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
        identities: int = 0,
    ) -> None:
        super().__init__()
        self.up, self.down, self.post_expert_norm = up, down, post_expert_norm
        self.gating, self.name, self.num_experts, self.identities = gating, name, count_of(up), identities
        self._sizes_without_kernels: set[int] = set()

    def with_projections(self, up: Projection, down: Projection) -> Self:
        """These experts with other layers."""
        made = type(self)(up, down, self.gating, self.post_expert_norm, self.name, self.identities)
        return made.train(self.training)

    def arguments(self, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Any, ...]:
        """What `forward` takes for tokens ``[T, H]``, the experts of each ``[T, k]`` and their weights."""
        return x, index, weights

    @property
    def stacks(self) -> tuple[LinearStack, LinearStack] | None:
        """``up`` and ``down``, if kernels may compute them by routes that are read on the device; else None."""
        up, down = self.up, self.down
        if self.identities or self.post_expert_norm is not None or self.num_experts > MAX_EXPERTS:
            return None
        return (up, down) if isinstance(up, LinearStack) and isinstance(down, LinearStack) else None

    def takes_prepared(self, like: Tensor) -> bool:
        """Whether `forward` reads tokens that the kernel before has prepared for ``up``, if it can be.

        Args:
            like: a tensor with the tokens' number, dtype and device.
        """
        return len(like) <= MOST_PREPARED and self.stacks is not None and _has_kernels(like.device)

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        prepared: Prepared | None = None,
    ) -> Tensor:
        """Applies to each token the experts that the router chose.

        Args:
            hidden_states: ``[T, H]``.
            top_k_index: the experts of each token, integers ``[T, k]``. An index beyond all experts is a route that
                another process computes; its weight is 0.
            top_k_weights: of each route, floating point ``[T, k]``.
            prepared: the same tokens, rotated or quantized as the layers of ``up`` take them, which kernels of experts
                read in place of ``hidden_states`` while an expert has few of them; or None.

        Returns:
            ``[T, H]`` of the tokens' dtype.

        Raises:
            ShapeError: shapes that do not fit together.
            DtypeError: indices that are no integers, or weights that are no floats.
            DeviceError: indices or weights on another device than the tokens.
            RangeError: an index below 0, or beyond all experts with a weight, or a weight that is NaN or infinite; on a
                GPU with kernels that read the routes, such routes add nothing, or what the weight makes of them.
            UnsupportedError: a CUDA graph or a program is captured, and the host must read the routes: on the CPU,
                and with layers or gatings that no kernel of experts computes.

        Exactness: products are those of the experts' layers; their results are multiplied by the weights and added in
        float32 in the order of the routes, and rounded once. Other tokens change nothing but what the layers' own
        products owe to their number of tokens, which integer products do not. Kernels round a gated SiLU before it is
        multiplied, as `torch.ops.qcut.silu_mul` does.
        """
        return summed(self.unsummed(hidden_states, top_k_index, top_k_weights, prepared))

    def unsummed(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, prepared: Prepared | None = None
    ) -> Tensor | RoutedResults:
        """As `forward`, without the sum if a kernel of its own would add the results of routes."""
        x, index, weights = hidden_states, top_k_index, top_k_weights
        self._check(x, index, weights)
        if x.is_meta:
            return torch.empty_like(x)
        if _has_kernels(x.device) and (y := self._by_kernels(x, index, weights, prepared)) is not None:
            return y
        refuse_capture(x, layer_prefix(self.name))
        refuse_batching(layer_prefix(self.name), x, index, weights)
        self._check_values(index, weights)
        routes, index = index.shape[1], index.long()
        order = index.reshape(-1).argsort(stable=True)
        counts = torch.bincount(index.reshape(-1).clamp(max=self.num_experts), minlength=self.num_experts + 1)
        parts, first = [], 0
        for e, count in enumerate(counts.tolist()[: self.num_experts]):
            if count:
                parts.append(self._expert(e, x[order[first : first + count] // routes]))
                first += count
        # Routes without an expert are last: those of other processes add nothing.
        last = x[order[first:] // routes]
        parts.append(last if self.identities else torch.zeros_like(last))
        results = torch.cat(parts)[order.argsort()].view(*index.shape, x.shape[1])
        return weighted_sum(results, weights).to(x.dtype)

    def _by_kernels(
        self, x: Tensor, index: Tensor, weights: Tensor, prepared: Prepared | None
    ) -> Tensor | RoutedResults | None:
        """The result, of routes that are read on the device; None if no kernels compute it."""
        stacks = self.stacks
        if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
            return None
        if stacks is None or not x.numel() or not index.numel():
            return None
        from qcut.backends.cuda.experts import tile_size

        experts, (tokens, top_k) = index.to(torch.int32), index.shape
        largest, without = min(stack.form.largest_tile for stack in stacks), self._sizes_without_kernels
        while (size := tile_size(tokens, top_k, self.num_experts, largest, x.get_device(), without)) is not None:
            try:
                return self._in_tiles(stacks, x, prepared, experts, weights.float(), size)
            except UnsupportedError:  # this GPU has no kernel for the layers' sizes
                without.add(size)
        return None

    def _in_tiles(
        self,
        stacks: tuple[LinearStack, LinearStack],
        x: Tensor,
        prepared: Prepared | None,
        experts: Tensor,
        weights: Tensor,
        size: int,
    ) -> Tensor | RoutedResults | None:
        """The experts' results, added if tiles have one route; None if no kernels compute the layers."""
        (up, down), gate = stacks, self.gating.gated_silu
        tiles = RouteTiles(experts.flatten(), None, experts.numel())
        if size > 1:
            tile_experts, tile_routes = torch.ops.qcut.sort_routes(experts, self.num_experts, size)
            tiles = RouteTiles(tile_experts, tile_routes, tiles.total)
        # Tokens in the order of tiles are gathered while they are rotated.
        hidden = up.routed(x if prepared is None or tiles.ordered else prepared, tiles, experts.shape[1])
        if hidden is None:
            return None
        tokens = self.gating(hidden) if gate is None else hidden
        if size == 1:
            return down.routed(tokens, tiles, 1, gate=gate, weights=weights)
        results = down.routed(tokens, tiles, 1, gate=gate)
        return None if results is None else RoutedResults(results, weights, experts, self.num_experts)

    def _expert(self, e: int, x: Tensor) -> Tensor:
        y = layer_of(self.down, e)(self.gating(layer_of(self.up, e)(x)))
        return cast(Tensor, y if self.post_expert_norm is None else self.post_expert_norm(y))

    def _check(self, x: Tensor, index: Tensor, weights: Tensor) -> None:
        where, columns = layer_prefix(self.name), columns_of(self.up)
        if x.ndim != 2 or index.ndim != 2 or index.shape != weights.shape or (len(index), columns) != x.shape:
            raise ShapeError(
                f"{where}tokens {list(x.shape)}, indices {list(index.shape)} and weights {list(weights.shape)}; "
                f"allowed: [T, {columns}], [T, k] and [T, k]"
            )
        if index.is_floating_point() or index.is_complex() or index.dtype is torch.bool:
            raise DtypeError(f"{where}indices are {dtype_name(index.dtype)}; allowed: integers")
        if not weights.is_floating_point():
            raise DtypeError(f"{where}weights are {dtype_name(weights.dtype)}; allowed: floating point")
        if not x.device == index.device == weights.device:
            raise DeviceError(
                f"{where}tokens are on {x.device}, indices on {index.device}, weights on {weights.device}; allowed: one"
            )

    def _check_values(self, index: Tensor, weights: Tensor) -> None:
        beyond = index >= self.num_experts + self.identities
        wrong = (index < 0) | (beyond & (weights != 0)) | ~weights.isfinite()
        if wrong.any():
            token, route = wrong.nonzero()[0].tolist()
            raise RangeError(
                f"{layer_prefix(self.name)}token {token}: found expert {int(index[token, route])} with weight "
                f"{float(weights[token, route])}; allowed: experts 0 to {self.num_experts + self.identities - 1} with "
                "finite weights, and larger indices with weight 0"
            )

    def extra_repr(self) -> str:
        """Number of experts and gating, for ``print(model)``."""
        return f"num_experts={self.num_experts}, gating={self.gating}"


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and path_on(device) == "cuda"


def refuse_capture(x: Tensor, where: str) -> None:
    """Refuse to be captured with tokens.

    Raises:
        UnsupportedError: by a CUDA graph, or by ``torch.export``.
    """
    if torch.compiler.is_exporting():
        raise UnsupportedError(f"{where}experts read their routes on the host; torch.export cannot trace that")
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(f"{where}experts read their routes on the host; no CUDA graph can capture that")


def weighted_sum(results: Tensor, weights: Tensor) -> Tensor:
    """Results of routes ``[T, k, H]`` times their weights ``[T, k]``, added in order: float32 ``[T, H]``."""
    total = torch.zeros(results.shape[0], results.shape[2], dtype=torch.float32, device=results.device)
    for route in range(weights.shape[1]):
        total += results[:, route].float() * weights[:, route, None].float()
    return total


def count_of(projection: Projection) -> int:
    """The number of experts."""
    return projection.experts if isinstance(projection, LinearStack) else len(projection)


def columns_of(projection: Projection) -> int:
    """Columns of every expert's layer."""
    one = projection if isinstance(projection, LinearStack) else cast(nn.Linear, projection[0])
    return one.in_features


def layer_of(projection: Projection, e: int) -> nn.Linear | Linear:
    """The layer of an expert."""
    return projection.expert(e) if isinstance(projection, LinearStack) else cast(nn.Linear, projection[e])
