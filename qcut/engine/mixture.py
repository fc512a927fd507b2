"""Mixtures of experts as parts of a decoder: a router, the experts that it chooses, and those that all tokens pass."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn

from qcut.engine.decoder import MLP, Activations, Branch, PreparedTokens, project
from qcut.layers.experts.experts import Experts, summed
from qcut.layers.stacking import Stacker


@dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen by their logits, and weighted: options of `torch.ops.qcut.route`.

    Attributes:
        scores: "softmax" of all logits; "logits": the logits, weights are the softmax of those chosen.
        top_k: experts of a token.
        renormalize: whether weights are divided by their sum.
        min_sum: least sum that they are divided by.
    """

    scores: Literal["softmax", "logits"]
    top_k: int
    renormalize: bool = False
    min_sum: float = 0.0


@dataclass(frozen=True)
class Router:
    """Chooses experts of tokens.

    Attributes:
        gate: has the weight ``[E, H]`` that makes logits of tokens.
        routing: how experts are chosen.
        bias: ``[1, E]``, added to the scores that choose, and not to weights; or None.
        logits_bias: ``[E]``, added to the logits; or None, as with ``by_layer``, where the layer adds its own.
        in_float32: whether logits are computed in float32, instead of in the type of the weight.
        by_layer: whether ``gate`` is called for logits, a linear layer that is quantized or has an adapter.
    """

    gate: nn.Module
    routing: Routing
    bias: Tensor | None = None
    in_float32: bool = False
    by_layer: bool = False
    logits_bias: Tensor | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 ``[M, k]`` and experts int32 ``[M, k]`` of tokens ``[M, H]``.

        Exactness: weights stay in float32, which models of 16 bits may round to their own dtype.
        """
        bias = None if self.bias is None else self.bias.flatten().float()
        weight, options = cast(Tensor, self.gate.weight), asdict(self.routing)
        dtype = torch.float32 if self.in_float32 else weight.dtype
        if self.by_layer:
            chosen = torch.ops.qcut.route(self.gate(x.float() if dtype is torch.float32 else x), bias, **options)
        else:
            chosen = torch.ops.qcut.linear_route.early_read(
                x, weight, dtype, bias, **options, logits_bias=self.logits_bias
            )
        return cast(tuple[Tensor, Tensor], chosen)


@dataclass(frozen=True)
class SharedExperts:
    """Experts that all tokens pass.

    Attributes:
        mlp: computes their result.
        gate: one column; its sigmoid multiplies the result; or None.
    """

    mlp: MLP
    gate: nn.Module | None = None

    def __call__(self, x: Activations, absmax: Tensor | None) -> Tensor:
        """``[M, H]`` of tokens ``[M, H]``; for ``absmax`` see `MLP`."""
        y = self.mlp(x, absmax)
        return y if self.gate is None else torch.sigmoid(project(self.gate, x)) * y


@dataclass(frozen=True)
class Mixture:
    """The experts that a router chooses, weighted and added, and shared experts. A `FeedForward`.

    Attributes:
        router: chooses experts.
        experts: the experts that it chooses from.
        shared: experts of all tokens, or None.
    """

    router: Router
    experts: Experts
    shared: SharedExperts | None = None

    @property
    def readers(self) -> tuple[Experts]:
        """See `FeedForward`: the experts; the router reads plain tokens next to them."""
        return (self.experts,)

    def __call__(self, x: Activations, absmax: Tensor | None) -> Branch:
        """``[M, H]`` of tokens ``[M, H]`` in floating point, or of `PreparedTokens`; for ``absmax`` see `MLP`."""
        tokens, prepared = (x.x, x.prepared) if isinstance(x, PreparedTokens) else (cast(Tensor, x), None)
        weights, experts = self.router(tokens)
        y = self.experts.unsummed(tokens, experts, weights, prepared)
        return y if self.shared is None else summed(y) + self.shared(x, absmax)

    def takes_absmax(self, tokens: int) -> bool:
        """See `FeedForward`."""
        return self.shared is not None and self.shared.mlp.takes_absmax(tokens)

    def stacked(self, stacker: Stacker) -> Mixture:
        """See `FeedForward`."""
        if self.shared is None:
            return self
        return replace(self, shared=replace(self.shared, mlp=self.shared.mlp.stacked(stacker)))
