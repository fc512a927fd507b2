"""Operands of products that take part in a norm, and what they must return, in float64 where sums are float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qcut.config import padded_k
from qcut.numerics import int8 as numerics
from qcut.numerics.folded_norms import column_sums

EPS = 1e-5


@dataclass
class Operands:
    """A norm and a layer behind it.

    Attributes:
        x: rows ``[M, K]``.
        gain: the norm's weight ``[K]``.
        shift: the norm's bias ``[K]``; None: an RMSNorm.
        qweight, weight_scale, bias: the layer's.
    """

    x: Tensor
    gain: Tensor
    shift: Tensor | None
    qweight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    @property
    def absmax(self) -> Tensor:
        """What the product before the norm notes."""
        return (self.x.float() * self.gain.float()).abs().amax(1)

    def given(self, activation: str = "none") -> tuple[Any, ...]:
        """Arguments of ``normed_linear``."""
        sums, bias = None, self.bias
        if self.shift is not None:
            sums = column_sums(self.qweight, self.weight_scale, self.gain)
            added = column_sums(self.qweight, self.weight_scale, self.shift)
            bias = added if bias is None else bias + added
        return self.x, self.absmax, self.gain, sums, EPS, self.qweight, self.weight_scale, bias, activation

    def exact(self) -> tuple[Tensor, Tensor]:
        """The result without activation, in float64 behind the quantized rows, and what its error is measured by."""
        q, scale = numerics.quantize_by_absmax_ref(
            self.x.float() * self.gain.float(), self.absmax, self.qweight.shape[1]
        )
        x, scale = self.x.double(), scale.double()[:, None]
        mean = x.mean(1, keepdim=True) if self.shift is not None else torch.zeros_like(scale)
        inverse = (x.square().mean(1, keepdim=True) - mean**2 + EPS).rsqrt()
        weight = self.qweight.double() * self.weight_scale.double()[:, None]
        product = q.double() @ weight.t() * scale * inverse
        gains = weight[:, : self.x.shape[1]]
        y, size = product, product.abs()
        if self.shift is not None:
            moved = mean * inverse * (gains @ self.gain.double())
            added = gains @ self.shift.double()
            y, size = y - moved + added, size + moved.abs() + added.abs()
        if self.bias is not None:
            y, size = y + self.bias.double(), size + self.bias.double().abs()
        return y, size


def operands(
    m: int, n: int, k: int, *, layer: bool, dtype: torch.dtype = torch.float16, bias: bool = True, device: str = "cpu"
) -> Operands:
    """Random ones, on the same values on every device; rows have a mean."""
    generator = torch.Generator().manual_seed(m * n + k)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight = torch.zeros(n, padded_k(k), dtype=torch.int8)
    weight[:, :k] = torch.randint(-127, 128, (n, k), generator=generator).to(torch.int8)
    x, gain = (random(m, k) * 3 + 0.5).to(dtype), (1 + 0.2 * random(k)).to(dtype)
    shift = (0.1 * random(k)).to(dtype) if layer else None
    tensors = x, gain, shift, weight, random(n).abs() / 100 + 1e-3, random(n) if bias else None
    return Operands(*(None if t is None else t.to(device) for t in tensors))  # type: ignore[arg-type]


def check(got: Tensor, of: Operands) -> None:
    """Compare a result without activation with `Operands.exact`.

    Sums of K terms, the root, and a handful of roundings of float32 are within ``(K + 64) * 2**-23`` of the terms'
    sizes; the variance of rows whose deviation is six times their mean loses no digit. Then a rounding of D's type.
    """
    want, size = of.exact()
    unit = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}[got.dtype]
    bound = (of.x.shape[1] + 64) * 2.0**-23 * size + unit * want.abs() + 2.0**-24
    assert ((got.double() - want).abs() <= bound).all(), ((got.double() - want).abs() - bound).max()
