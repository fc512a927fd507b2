"""`Float8Linear`: the `qcut.Linear` of weights in 8-bit floats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from qcut.layers.int8 import MOST_SCALE, W8A16Linear
from qcut.layers.linear import Known, Linear
from qcut.numerics import float8
from qcut.numerics.checks import out_of_range
from qcut.schemes import FP8, FP8_BLOCK, FP8_UNIT_ROWS, padded_k


class Float8Linear(W8A16Linear, schemes=[FP8]):
    """A layer with weights of e4m3 that become 16-bit floats in registers, and tokens in their own 16-bit type.

    Attributes:
        qweight: float8_e4m3fn ``[N, padded_k(K)]``, finite, zero padded.
        weight_scale: float32 ``[N]``, or of ``fp8_blocks`` for each 16 rows and 128 columns,
            ``[ceil(N / 16), ceil(K / 128)]``.

    Exactness: that of `qcut.numerics.int8.w8a16_linear_ref`.
    """

    def dequantized_weight(self) -> Tensor:
        """float32 ``[N, K]``: `qcut.numerics.float8.dequantize`."""
        return float8.dequantize(self.codes, self.weight_scale)

    def rows(self, ids: Tensor) -> Tensor:
        """See `Linear.rows`; bitwise the rows of `dequantized_weight`."""
        picked = self.codes.view(torch.int8).index_select(0, ids).view(float8.E4M3)
        if self.weight_scale.dim() == 1:
            return float8.dequantize(picked, self.weight_scale[ids])
        scales = self.weight_scale[ids // FP8_UNIT_ROWS].repeat_interleave(FP8_BLOCK, 1)
        return picked.float() * scales[:, : self.in_features]

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
        n, k = self.out_features, self.in_features
        scheme = cast(FP8, self.scheme)
        return {
            "qweight": torch.empty((n, padded_k(k)), dtype=float8.E4M3, device=device),
            "weight_scale": torch.empty(scheme.scale_shape(n, k), dtype=torch.float32, device=device),
        }

    def _quantize(self, weight: Tensor, known: Known) -> None:
        self._refuse_second_moment(known)
        if cast(FP8, self.scheme).blocks:
            q, self.weight_scale = float8.quantize_blocks(weight, layer=self.name)
        else:
            q, self.weight_scale = float8.quantize_weight(weight, row_absmax=known.row_absmax, layer=self.name)
        self.qweight = q.new_zeros(self.qweight.shape)
        self.qweight[:, : self.in_features] = q
