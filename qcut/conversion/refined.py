"""What `qcut.refine` tunes of a quantized model: real numbers for codes, and copies of norms and vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcut.layers.codebook import CodebookLinear
from qcut.models.fusion import Change
from qcut.numerics.codebook import lloyd_max, pairs, rotation
from qcut.numerics.codebook.quantizer import RotatedCodebook, dequantize, nearest_indices, stored_norms
from qcut.numerics.hadamard import walsh_hadamard

_EDGE = 0.25  # a number starts this share of the way from the border of its codebook value's interval to the value
_DENSE = 1024  # Hadamard groups up to here are turned by one product with a matrix
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda v: v,
    "relu": F.relu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "silu": F.silu,
}


class RefinedLayer:
    """A codebook layer's weight as a function of what is tuned.

    Args:
        layer: left as it is.
        weight: the float weight ``[N, K]`` that the layer stands for, or None if it is unknown.
        codes: tune the codes too.

    Attributes:
        growth: float32 ``[N, G]``: norms are multiplied by 1 + growth.
        bias: float32 ``[N]``, or None if the layer has none.
        spacing: the least distance of two codebook values, or of two pairs.
        numbers: float32 ``[N, K]``, in units of their scale: the nearest codebook values count. None without codes.
    """

    def __init__(self, layer: CodebookLinear, weight: Tensor | None, codes: bool) -> None:
        *before, q = layer.passes
        self.q, self.activation = q, "none" if layer.apart else layer.activation
        self.bias = None if layer.bias is None else layer.bias.detach().clone().requires_grad_(True)
        self.fixed = dequantize(before) if before else None
        device, k = q.indices.device, q.indices.shape[1]
        self.parts = rotation.groups(k, q.group_size)
        self.scales = q.norms.float() * torch.tensor(
            [d**-0.5 for _, d in self.parts], device=device, dtype=torch.float32
        )
        self.spacing = pairs.spacing(q.values) if pairs.are_pairs(q.values) else float(q.values.diff().min())
        self.back = rotation.back_operands(k, q.rotation, q.group_size, q.seed, device)
        d = self.parts[0][1]
        dense = q.rotation == "hadamard" and k % d == 0 and d <= _DENSE
        self.turn = walsh_hadamard(torch.eye(d, device=device, dtype=torch.float32)) if dense else None
        self.growth = torch.zeros(q.norms.shape, device=device, requires_grad=True, dtype=torch.float32)
        self.numbers = self._start(weight).requires_grad_(True) if codes else None
        self.values = None if codes else pairs.look_up(q.values, q.indices)

    @property
    def scales_and_bias(self) -> list[Tensor]:
        """The tuned tensors except ``numbers``."""
        return [self.growth] if self.bias is None else [self.growth, self.bias]

    def product(self, x: Tensor) -> Tensor:
        """The layer's forward pass, differentiable by what is tuned."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _ACTIVATIONS[self.activation](F.linear(x, self._weight().to(x.dtype), bias))

    @torch.no_grad()
    def result(self, name: str) -> RotatedCodebook:
        """The tuned pass, as it is stored.

        Raises:
            QuantizationError: a norm is beyond its dtype.
        """
        q = self.q
        norms = stored_norms((q.norms.float() * (1 + self.growth)).clamp_min(0), q.norms.dtype, name)
        return replace(
            q, norms=norms, indices=q.indices if self.numbers is None else nearest_indices(self.numbers, q.values)
        )

    @torch.no_grad()
    def _start(self, weight: Tensor | None) -> Tensor:
        """The float weight's own numbers, kept within the intervals of the chosen values; else these values."""
        q = self.q
        chosen = pairs.look_up(q.values, q.indices)
        if weight is None or weight.shape != chosen.shape:
            return chosen
        left = weight.float() if self.fixed is None else weight.float() - self.fixed
        rotated = rotation.rotate_groups(left, q.rotation, q.group_size, q.seed)
        exact = rotated / rotation.per_column(torch.where(self.scales > 0, self.scales, 1.0), self.parts)
        if pairs.are_pairs(q.values):
            exact = exact.unflatten(1, (-1, 2))
            return pairs.toward(pairs.join(q.indices), exact, q.values, 1 - _EDGE).flatten(1)
        far = torch.full((1,), torch.inf, device=chosen.device, dtype=torch.float32)
        borders = lloyd_max.boundaries(q.values)
        low, high = torch.cat((-far, borders)), torch.cat((borders, far))
        low, high = (q.values + (1 - _EDGE) * (border - q.values) for border in (low, high))
        at = q.indices.int()
        return torch.clamp(exact, low[at], high[at])

    def _values(self) -> Tensor:
        """The codebook values ``[N, K]``; derivatives by them are derivatives by the numbers."""
        if self.numbers is None:
            assert self.values is not None
            return self.values
        numbers = self.numbers.detach()
        return self.numbers + (pairs.look_up(self.q.values, nearest_indices(numbers, self.q.values)) - numbers)

    def _weight(self) -> Tensor:
        values, scales = self._values(), self.scales * (1 + self.growth)
        if self.turn is not None:
            groups = values.unflatten(1, (-1, len(self.turn))) * scales[..., None]
            weight = (groups @ self.turn).flatten(1) * self.back[0]
        else:
            values = values * rotation.per_column(scales, self.parts)
            weight = rotation.rotate_groups_back_by(values, self.q.rotation, self.parts[0][1], self.back)
        return weight if self.fixed is None else weight + self.fixed


class Vectors:
    """The parameters of one dimension of a model, in float32 while they are tuned.

    Attributes:
        masters: float32 copies, one for each parameter.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters: list[nn.Parameter] = []
        self.masters: list[Tensor] = []
        self.holders: list[tuple[nn.Module, str, int]] = []
        known: dict[int, int] = {}
        for module in model.modules():
            for key, p in module._parameters.items():
                if p is None or p.dim() != 1 or not p.is_floating_point():
                    continue
                if id(p) not in known:
                    known[id(p)] = len(self.parameters)
                    self.parameters.append(p)
                    self.masters.append(p.detach().to(torch.float32, copy=True).requires_grad_(True))
                self.holders.append((module, key, known[id(p)]))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model compute with the masters, in its own types."""
        now = [master.to(p.dtype) for master, p in zip(self.masters, self.parameters, strict=True)]
        for module, key, i in self.holders:
            module._parameters[key] = now[i]  # type: ignore[assignment]
        try:
            yield
        finally:
            for module, key, i in self.holders:
                module._parameters[key] = self.parameters[i]

    def change(self) -> Change:
        """Puts the masters' values in the model's parameters."""
        before = [p.detach().clone() for p in self.parameters]
        return Change(partial(self._store, self.masters), partial(self._store, before))

    @torch.no_grad()
    def _store(self, values: list[Tensor]) -> None:
        for value, p in zip(values, self.parameters, strict=True):
            p.copy_(value)
