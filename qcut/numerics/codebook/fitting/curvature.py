"""How fast the loss grows with the error of a layer's weight: the metric in which `fit` fits a codebook."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Curvature:
    """The second derivative of the loss by a weight ``[N, K]``, as two factors: an error E costs ``tr(G E H E^T)``.

    Attributes:
        inputs: H, float32 ``[K, K]``: the mean of ``x^T x`` over the layer's inputs, each weighted by the squared
            length of the loss's derivative by its output.
        outputs: G, float32 ``[N, N]``: the mean of ``g^T g`` over the loss's derivatives by the layer's outputs; None
            if N is too large, and every row is fitted by itself.
    """

    inputs: Tensor
    outputs: Tensor | None

    def to(self, device: torch.device | str) -> Curvature:
        """The same on a device."""
        return Curvature(self.inputs.to(device), None if self.outputs is None else self.outputs.to(device))

    def divided(self, scale: Tensor) -> Curvature:
        """The curvature of the layer with inputs divided by ``scale [K]``."""
        inverse = 1 / scale.to(self.inputs.device, self.inputs.dtype)
        return Curvature(self.inputs * inverse[:, None] * inverse, self.outputs)


def as_curvature(moment: Tensor | Curvature) -> Curvature:
    """A second moment of inputs as the curvature of a squared error of the layer's outputs."""
    return moment if isinstance(moment, Curvature) else Curvature(moment, None)
