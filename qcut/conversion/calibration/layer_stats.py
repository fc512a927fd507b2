"""What is known of a layer's input after calibration."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qcut.numerics.checks import out_of_range

PARTS = ("lo", "hi", "sample")
"""The tensors of `LayerStats`."""


@dataclass
class LayerStats:
    """Statistics of one layer's input ``[..., K]``, on the CPU in float32.

    Attributes:
        lo: ``[K]`` least value of every channel over all tokens.
        hi: ``[K]`` greatest value.
        sample: ``[R, K]`` tokens drawn uniformly without replacement; R is bounded.
        tokens: how many tokens were seen.
        borrowed: whether ``lo``, ``hi`` and ``sample`` are of other tokens too, as of an expert that saw few; see
            `qcut.conversion.calibration.few_tokens`.
    """

    lo: Tensor
    hi: Tensor
    sample: Tensor
    tokens: int
    borrowed: bool = False

    def problem(self) -> tuple[str, str] | None:
        """The first part that no observation gives, and what was found and is allowed; None if all can be."""
        for part in PARTS:
            if found := out_of_range(getattr(self, part)):
                return part, f"found {found}; finite values are allowed"
        if found := _first(self.hi < self.lo):
            return "hi", f"found less than lo in channel {found}; lo <= hi is needed"
        if not len(self.sample) or (len(self.sample) > self.tokens and not self.borrowed):
            return "sample", f"found {len(self.sample)} tokens of {self.tokens}; 1 to all are allowed"
        if found := _first((self.sample < self.lo) | (self.sample > self.hi)):
            return "sample", f"found a value outside of lo and hi at {found}"
        return None

    def divided(self, scale: Tensor) -> LayerStats:
        """Those of ``x / scale``, for a scale ``[K]``; exact if it is of powers of two."""
        scale = scale.to("cpu", torch.float32)
        return replace(self, lo=self.lo / scale, hi=self.hi / scale, sample=self.sample / scale)


def _first(wrong: Tensor) -> str | None:
    return str(wrong.nonzero()[0].tolist()) if wrong.any() else None
