"""`Float8Linear`: the `qcut.Linear` of weights in 8-bit floats."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qcut.layers.int8 import MOST_SCALE, W8A16Linear
from qcut.layers.linear import Known, Linear
from qcut.numerics import float8
from qcut.numerics.checks import out_of_range
from qcut.numerics.int8 import dequantize_ref
from qcut.schemes import FP8, padded_k


class Float8Linear(W8A16Linear, schemes=[FP8()]):
    """A layer with weights of e4m3 that become 16-bit floats in registers, and tokens in their own 16-bit type.

    Attributes:
        qweight: float8_e4m3fn ``[N, padded_k(K)]``, finite, zero padded.
        weight_scale: float32 ``[N]``.

    Exactness: that of `qcut.numerics.int8.w8a16_linear_ref`.
    """

    def rows(self, ids: Tensor) -> Tensor:
        """See `Linear.rows`; bitwise the rows of `dequantized_weight`."""
        picked = self.codes.view(torch.int8).index_select(0, ids).view(float8.E4M3)
        return dequantize_ref(picked, self.weight_scale[ids])

    def state_problem(self, state: Mapping[str, Tensor]) -> tuple[str, str] | None:
        """See `Linear.state_problem`: finite weights, zero padding, and scales above 0."""
        q = state["qweight"]
        if found := out_of_range(q[:, : self.in_features]):
            return "qweight", f"found {found}; finite values are allowed"
        if found := out_of_range(q[:, self.in_features :], 0, 0):
            return "qweight", f"found {found} of the padding; 0 is allowed"
        if found := out_of_range(state["weight_scale"], 0.0, MOST_SCALE, above=True):
            return "weight_scale", f"found {found}; values above 0, up to {MOST_SCALE:.3g}, are allowed"
        return Linear.state_problem(self, state)

    def table(self, dtype: torch.dtype) -> None:  # type: ignore[override]
        """See `Linear.table`: no operator gathers rows."""

    def _empty_buffers(self, device: torch.device | str | None) -> dict[str, Tensor | None]:
        shape = (self.out_features, padded_k(self.in_features))
        return super()._empty_buffers(device) | {"qweight": torch.empty(shape, dtype=float8.E4M3, device=device)}

    def _quantize(self, weight: Tensor, known: Known) -> None:
        self._refuse_second_moment(known)
        q, self.weight_scale = float8.quantize_weight(weight, row_absmax=known.row_absmax, layer=self.name)
        self.qweight = q.new_zeros(self.qweight.shape)
        self.qweight[:, : self.in_features] = q
