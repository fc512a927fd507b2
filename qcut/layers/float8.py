"""Linear layers with weights in 8-bit floats, and tokens of 16 bits or in 8-bit floats too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from qcut.errors import QuantizationError
from qcut.layers.int8 import MOST_SCALE, CalibratedLinear, W8A16Linear
from qcut.layers.linear import Known, Linear
from qcut.numerics import float8, int16
from qcut.numerics.checks import out_of_range
from qcut.schemes import FP8, FP8_BLOCK, FP8_UNIT_ROWS, StaticRange, padded_k

if TYPE_CHECKING:
    pass

_DYNAMIC = torch.ops.qcut.fp8_dynamic_linear.early_read
_STATIC = torch.ops.qcut.fp8_static_linear.early_read


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


class Float8TokensLinear(Float8Linear, schemes=[FP8(tokens="dynamic")]):
    """A layer that quantizes each token to e4m3 by the token's own largest magnitude; sums are float32.

    Exactness: that of `qcut.numerics.float8.dynamic_linear_ref` on the CPU, of ``qcut::fp8_dynamic_linear`` on CUDA.
    """

    routed = Linear.routed  # no kernel of experts takes e4m3 tokens

    def quantized_tokens(self, x: Tensor) -> Tensor:
        """See `Linear.quantized_tokens`."""
        q, scale = float8.quantize_tokens_ref(x, x.shape[1])
        return q.float() * scale[:, None]

    def _product(self, x: Tensor) -> Tensor:
        b = self._buffers
        return _DYNAMIC(x, b["qweight"], b["weight_scale"], b["bias"], self.activation)


class Float8StaticLinear(CalibratedLinear, Float8TokensLinear, schemes=[FP8(tokens="static")]):
    """A layer that quantizes all tokens to e4m3 with one calibrated scale; sums are float32.

    Attributes:
        col_scale: float32 ``[N]``, ``input_scale * weight_scale`` rounded.
        input_scale: float32 ``[1]``, from 2**-126 on.

    Exactness: that of `qcut.numerics.float8.static_linear_ref` on the CPU, of ``qcut::fp8_static_linear`` on CUDA.
    """

    def _read_qparams(self) -> float:
        scale: float = super()._read_qparams()
        if scale < int16.SMALLEST_SCALE:
            raise QuantizationError(f"input_scale is {scale}; allowed: {int16.SMALLEST_SCALE} and more", self.name)
        return scale

    def _set_range(self, static_range: StaticRange, device: torch.device) -> float:
        scale = float8.static_scale(static_range.lo, static_range.hi)
        self.input_scale = torch.full((1,), scale, dtype=torch.float32, device=device)
        return scale

    def quantized_tokens(self, x: Tensor) -> Tensor:
        """See `Linear.quantized_tokens`."""
        return float8.quantize_tensor_ref(x, self.input_qparams, x.shape[1]).float() * self.input_qparams

    def _product(self, x: Tensor) -> Tensor:
        b = self._buffers
        return _STATIC(x, b["qweight"], b["col_scale"], b["bias"], self.input_qparams, self.activation)
