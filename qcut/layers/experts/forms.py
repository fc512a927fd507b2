"""Experts that are called in another way than transformers' interface calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qcut.errors import ShapeError, layer_prefix
from qcut.layers.experts.experts import Experts, columns_of, layer_of, refuse_capture


class DenseExperts(Experts):
    """Llama 4's: every expert gets all tokens, each multiplied by its weight, which is 0 if the expert was not chosen.

    An expert computes the tokens that are not zero; without a bias, the result of the others is 0.
    """

    def arguments(self, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Any, ...]:
        """See `Experts.arguments`."""
        scores = torch.zeros(len(x), self.num_experts, dtype=weights.dtype, device=x.device)
        return ((x * scores.scatter(1, index, weights).t()[..., None]).flatten(0, 1),)

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Applies the experts.

        Args:
            hidden_states: ``[E * T, H]``, the T tokens of the first expert first.

        Returns:
            ``[E * T, H]`` of the tokens' dtype.

        Raises:
            ShapeError: another shape.
            UnsupportedError: see `Experts.forward`.

        Exactness: that of the experts' layers.
        """
        x, where, columns = hidden_states, layer_prefix(self.name), columns_of(self.up)
        refuse_capture(x, where)
        if x.ndim != 2 or x.shape[1] != columns or len(x) % self.num_experts:
            raise ShapeError(f"{where}tokens have shape {list(x.shape)}; allowed: [{self.num_experts} * T, {columns}]")
        y = torch.zeros_like(x)
        if x.is_meta:
            return y
        tokens = len(x) // self.num_experts
        rows = (x != 0).any(1).nonzero()[:, 0]
        counts = torch.bincount(rows // max(1, tokens), minlength=self.num_experts).tolist()
        for e, chosen in enumerate(rows.split(counts)):
            if len(chosen):
                y[chosen] = self._expert(e, x[chosen])
        return y


class BatchedExperts(Experts):
    """DBRX's: tokens come, and results go, in a batch of sequences."""

    def arguments(self, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Any, ...]:
        """See `Experts.arguments`."""
        return x[None], index, weights

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Applies the experts to tokens ``[B, S, H]``, with B * S rows of routes; otherwise as `Experts.forward`."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return super().forward(flat, top_k_index, top_k_weights).view(hidden_states.shape)


class SharedExperts(Experts):
    """Inkling's: every expert computes every token."""

    def arguments(self, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Any, ...]:
        """See `Experts.arguments`."""
        return x, torch.zeros(len(x), self.num_experts, dtype=weights.dtype, device=x.device).scatter(1, index, weights)

    def forward(self, hidden_states: Tensor, gammas: Tensor) -> Tensor:  # type: ignore[override]
        """Applies the experts to tokens ``[..., H]``, with weights ``[..., E]``; otherwise as `Experts.forward`."""
        x, weights = hidden_states.reshape(-1, hidden_states.shape[-1]), gammas.reshape(-1, self.num_experts)
        index = torch.arange(self.num_experts, dtype=torch.int64, device=x.device).expand(weights.shape)
        return super().forward(x, index, weights).view(hidden_states.shape)


class ParallelExperts(Experts):
    """JetMoE's: one projection, ``up``, for tokens in the order of their experts; there are no layers of ``down``.

    Routes, gates and sums are the business of the module around, in its MLP as in its attention.
    """

    def arguments(self, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Any, ...]:
        """See `Experts.arguments`."""
        order = index.flatten().argsort(stable=True)
        return x[order // index.shape[1]], torch.bincount(index.flatten(), minlength=self.num_experts).tolist()

    def forward(self, inputs: Tensor, expert_size: Sequence[int]) -> Tensor:  # type: ignore[override]
        """Applies the experts.

        Args:
            inputs: ``[R, H]``, those of the first expert first.
            expert_size: numbers of rows of the E experts.

        Returns:
            ``[R, N]`` of the inputs' dtype.

        Raises:
            ShapeError: sizes of another number of experts, or of rows.

        Exactness: that of the experts' layers.
        """
        refuse_capture(inputs, layer_prefix(self.name))
        if len(expert_size) != self.num_experts or inputs.shape[0] != sum(expert_size):
            raise ShapeError(
                f"{layer_prefix(self.name)}{len(inputs)} rows and sizes {list(expert_size)}; allowed: sizes of "
                f"{self.num_experts} experts, which add up to the rows"
            )
        parts = inputs.split(list(expert_size))
        results = [layer_of(self.up, e)(part) for e, part in enumerate(parts) if len(part)]
        return torch.cat(results) if results else inputs.new_zeros(0, layer_of(self.up, 0).out_features)
