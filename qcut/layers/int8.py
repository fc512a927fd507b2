"""Linear layers with int8 weights: dynamic and static W8A8, W8A16, and int16 tokens (16×8)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

import qcut.ops.linear  # noqa: F401  (registers its operators)
from qcut.errors import ConfigError, QuantizationError, layer_prefix
from qcut.layers.embedding import Table
from qcut.layers.host_values import Reading
from qcut.layers.linear import Known, Linear, Stacked, gated
from qcut.numerics import int8 as numerics
from qcut.numerics import int16
from qcut.numerics.checks import first_difference, out_of_range
from qcut.numerics.int16 import TOKENS_PER_BLOCK
from qcut.schemes import K_MAX, K_MAX_ZERO_POINT, W8A8, W8A16, Int16x8, Scheme, StaticRange, padded_k

if TYPE_CHECKING:
    from typing_extensions import Self

    from qcut.backends.cuda.launch.prebuild import LayerCall
    from qcut.layers.tokens import Prepared
    from qcut.numerics.gating import GatedSilu
    from qcut.numerics.routing import RouteTiles

_W8A8 = torch.ops.qcut.w8a8_linear.early_read
_INT8 = torch.ops.qcut.int8_linear.early_read
_WITH_ABSMAX = torch.ops.qcut.noted_linear.early_read
_W8A8_STATIC = torch.ops.qcut.w8a8_static_linear.early_read
_W8A16 = torch.ops.qcut.w8a16_linear.early_read
_INT16X8 = torch.ops.qcut.int16x8_linear.early_read
_INT16X8_STATIC = torch.ops.qcut.int16x8_static_linear.early_read

_LEAST_NORMAL = 2.0**-126
MOST_SCALE = torch.finfo(torch.float32).max / 127 * (1 + 2**-23)
"""The scale of the largest float32, which may be rounded up."""


class Int8Linear(Linear):
    """A layer with an int8 weight and a float32 scale for each output channel.

    Attributes:
        qweight: int8 ``[N, padded_k(K)]``, zero padded.
        weight_scale: float32 ``[N]``.
        least_code: the least integer that a weight may be. Quantizing gives -127 and more; other libraries' weights
            have -128 too, which sums of `qcut.schemes.K_MAX` columns take, and those with a zero point do not.
    """

    qweight: Tensor
    weight_scale: Tensor
    least_code: ClassVar[int] = -128

    def table(self, dtype: torch.dtype) -> Table | None:
        """See `Linear.table`."""
        return Table(self.codes, self.weight_scale, dtype)

    @property
    def codes(self) -> Tensor:
        """int8 ``[N, K]``: ``qweight`` without its padding, a view."""
        return self.qweight[:, : self.in_features]

    def dequantized_weight(self) -> Tensor:
        """float32 ``[N, K]``: ``f32(q[n, k]) * weight_scale[n]``."""
        return numerics.dequantize_ref(self.codes, self.weight_scale)

    def rows(self, ids: Tensor) -> Tensor:
        """See `Linear.rows`; bitwise the rows of `dequantized_weight`."""
        return numerics.dequantize_ref(self.codes.index_select(0, ids), self.weight_scale[ids])

    @classmethod
    def cuda_calls(
        cls, scheme: Scheme, *, dtype: torch.dtype, rows: int, n: int, k: int, bias: bool, activation: str
    ) -> Sequence[LayerCall]:
        """See `Linear.cuda_calls`; rows of tokens are taken to lie one behind another."""
        from qcut.backends.cuda.launch.plans import m_bucket
        from qcut.backends.cuda.linear import LinearLayer

        aligned = k * dtype.itemsize % 16 == 0
        return [LinearLayer(scheme.name, dtype, m_bucket(rows), n, k, bias, activation, aligned)]

    def state_problem(self, state: Mapping[str, Tensor]) -> tuple[str, str] | None:
        """See `Linear.state_problem`: weights from `least_code` to 127, zero padding, and scales above 0."""
        q = state["qweight"]
        if found := out_of_range(q[:, : self.in_features], self.least_code, 127):
            return "qweight", f"found {found}; {self.least_code} to 127 are allowed"
        if found := out_of_range(q[:, self.in_features :], 0, 0):
            return "qweight", f"found {found} of the padding; 0 is allowed"
        if found := out_of_range(state["weight_scale"], 0.0, MOST_SCALE, above=True):
            return "weight_scale", f"found {found}; values above 0, up to {MOST_SCALE:.3g}, are allowed"
        return super().state_problem(state)

    def _get_name(self) -> str:
        return "Linear"  # the representation shows the scheme, which the class name would repeat

    def _stand_in(self) -> Tensor:
        return self.codes

    def _empty_buffers(self, device: torch.device | str | None) -> dict[str, Tensor | None]:
        n = self.out_features
        return {
            "qweight": torch.empty((n, padded_k(self.in_features)), dtype=torch.int8, device=device),
            "weight_scale": torch.empty(n, dtype=torch.float32, device=device),
        }

    def _refuse_second_moment(self, known: Known) -> None:
        if known.second_moment is not None:
            raise ConfigError(
                f"{layer_prefix(self.name)}scheme {self.scheme.name} got a second moment; codebooks take one"
            )

    def _quantize(self, weight: Tensor, known: Known) -> None:
        self._refuse_second_moment(known)
        q, self.weight_scale = numerics.quantize_weight(weight, row_absmax=known.row_absmax, layer=self.name)
        self.qweight = q.new_zeros(self.qweight.shape)
        self.qweight[:, : self.in_features] = q


class W8A8Linear(Int8Linear, schemes=[W8A8("dynamic")]):
    """A W8A8 layer that quantizes each token by the token's own largest magnitude; sums are int32.

    Exactness: that of `qcut.numerics.int8.w8a8_linear_ref`, bitwise.
    """

    k_max = K_MAX
    largest_tile = 256

    def quantized_tokens(self, x: Tensor) -> Tensor:
        """See `Linear.quantized_tokens`."""
        q, scale = numerics.quantize_per_token_ref(x, x.shape[1])
        return q.float() * scale[:, None]

    def forward_int8(self, q: Tensor, scale: Tensor, dtype: torch.dtype, absmax: Tensor | None = None) -> Tensor:
        """Applies the layer to tokens that were quantized before.

        Args:
            q: int8 ``[M, K_padded]`` and
            scale: float32 ``[M]``, as `torch.ops.qcut.quantize_per_token` gives them.
            dtype: of the tokens before, and of the result.
            absmax: float32 ``[M]``, raised to the largest magnitude of each row of the result, for
                `forward_with_absmax` of the next layer.

        Returns:
            ``[M, N]``, bitwise what `forward` makes of the tokens.
        """
        b = self._buffers
        return _INT8(q, scale, b["qweight"], b["weight_scale"], b["bias"], self.activation, dtype, absmax)

    def forward_with_absmax(self, x: Tensor, absmax: Tensor) -> Tensor:
        """Applies the layer to rows with known largest magnitudes.

        Args:
            x: ``[M, K]``.
            absmax: float32 ``[M]``: ``max |x[m]|``.

        Returns:
            ``[M, N]``, bitwise what `forward` makes of x.
        """
        b = self._buffers
        return _WITH_ABSMAX(x, absmax, b["qweight"], b["weight_scale"], b["bias"], self.activation)

    @classmethod
    def routed(
        cls,
        stack: Stacked,
        x: Tensor | Prepared,
        tiles: RouteTiles,
        per_row: int,
        *,
        gate: GatedSilu | None = None,
        weights: Tensor | None = None,
    ) -> Tensor | None:
        """See `Linear.routed`; bitwise what the layers' `forward` makes of the routes' tokens."""
        if not isinstance(x, Tensor):
            q, scale = x[:2]
        else:
            x = gated(x, gate)
            if tiles.ordered:
                q, scale = _in_order(x, tiles, per_row, torch.int8)
            else:
                q, scale = torch.ops.qcut.quantize_per_token(x, padded_k(x.shape[1]))
        return int8_routed(stack, q, scale, x.dtype, tiles, per_row, weights)

    def _product(self, x: Tensor) -> Tensor:
        # nn.Module finds buffers through a slow __getattr__; this is the hot path, here and in the layers below.
        b = self._buffers
        return _W8A8(x, b["qweight"], b["weight_scale"], b["bias"], self.activation)


def int8_routed(
    stack: Stacked,
    q: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    tiles: RouteTiles,
    per_row: int,
    weights: Tensor | None,
) -> Tensor:
    """The products of routes with int8 tokens; see `Linear.routed` and `qcut.ops.experts.W8A8ExpertsOp`."""
    b, options = stack.tensors, (stack.form.activation, dtype)
    weight = b["qweight"], b["weight_scale"], b["bias"]
    y: Tensor = torch.ops.qcut.w8a8_experts(
        q, scale, tiles.total // per_row, per_row, tiles.experts, tiles.routes, *weight, *options
    )
    return _summed(y, tiles, len(weight[0]), weights)


def _in_order(x: Tensor, tiles: RouteTiles, per_row: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Blocks of the tokens of all places of tiles, of x's type or quantized, and the scales of routes."""
    from qcut.numerics.codebook.layout import UNIT_COLUMNS  # here: quantizing to int8 needs no codebooks

    no_operands, one_pass = x.new_empty(0), [0]
    blocks, scale = torch.ops.qcut.rotate_routes(
        x, no_operands, "none", UNIT_COLUMNS, one_pass, dtype, tiles.routes, per_row, dtype is torch.int8
    )
    return blocks, scale


def _summed(results: Tensor, tiles: RouteTiles, experts: int, weights: Tensor | None) -> Tensor:
    """The results of routes, or of tokens if weights are given."""
    if weights is None:
        return results
    y: Tensor = torch.ops.qcut.sum_routes(results, weights, tiles.experts.view(weights.shape), experts, None)
    return y


def _factor_problem(input_scale: Tensor, weight_scale: Tensor) -> str | None:
    """Why results of one scale of tokens and these of weights would be 0 or infinite; None if they are not."""
    largest = float((input_scale * weight_scale).max())
    if _LEAST_NORMAL <= largest < math.inf:
        return None
    return (
        f"the scale of the input, {float(input_scale):.4g}, times the largest of the weight, "
        f"{float(weight_scale.max()):.4g}, is {largest:.4g}; allowed: normal numbers of float32"
    )


class CalibratedLinear(Int8Linear):
    """A layer that quantizes all tokens with one calibrated scale.

    Attributes:
        col_scale: float32 ``[N]``, ``input_scale * weight_scale`` rounded.
        input_scale: float32 ``[1]``.
    """

    col_scale: Tensor
    input_scale: Tensor
    _range: ClassVar[tuple[str, ...]] = ("input_scale",)  # the buffers that say how tokens are quantized
    _read: Reading[Any] | None

    @property
    def input_qparams(self) -> Any:
        """What quantizes the tokens, read from the device once, and again when a tensor has changed.

        Scale and zero point of the scheme ``w8a8_static``, the scale of ``int16x8_static`` and ``fp8_static``.

        Raises:
            QuantizationError: a scale that is not positive and finite, or a zero point out of range.
        """
        read = self._read
        if read is None or not (torch.compiler.is_compiling() or read.holds_for(self._buffers)):
            read = self._read = Reading(self._buffers, self._range, self._read_qparams())
        return read.value

    def _read_qparams(self) -> Any:
        scale = float(self.input_scale)
        if not 0 < scale < math.inf:
            raise QuantizationError(f"input_scale is {scale}; allowed: positive and finite", self.name)
        return scale

    def _set_range(self, static_range: StaticRange, device: torch.device) -> Any:
        """Set the buffers of a calibrated range; returns `input_qparams`."""
        raise NotImplementedError

    def _quantize(self, weight: Tensor, known: Known) -> None:
        """See `Linear`.

        Raises:
            QuantizationError: the largest factor is no normal float32, so that results would be 0 or infinite.
        """
        assert known.static_range is not None, "from_float checks needs_range"
        super()._quantize(weight, known)
        qparams = self._set_range(known.static_range, weight.device)
        self._read = Reading(self._buffers, self._range, qparams)
        self.col_scale = self.input_scale * self.weight_scale
        if problem := _factor_problem(self.input_scale, self.weight_scale):
            raise QuantizationError(problem, self.name)

    def state_problem(self, state: Mapping[str, Tensor]) -> tuple[str, str] | None:
        """See `Linear.state_problem`: besides, a scale of the input that can be, and factors as defined."""
        if problem := super().state_problem(state):
            return problem
        if found := out_of_range(state["input_scale"], 0.0, above=True):
            return "input_scale", f"found {found}; a finite value above 0 is allowed"
        if found := out_of_range(state["col_scale"]):
            return "col_scale", f"found {found}; finite values are allowed"
        if found := first_difference(state["col_scale"], state["input_scale"] * state["weight_scale"]):
            return "col_scale", f"found {found}: input_scale * weight_scale"
        if found := _factor_problem(state["input_scale"], state["weight_scale"]):
            return "input_scale", found
        return None

    def _empty_buffers(self, device: torch.device | str | None) -> dict[str, Tensor | None]:
        self._read = None
        return super()._empty_buffers(device) | {
            "col_scale": torch.empty(self.out_features, dtype=torch.float32, device=device),
            "input_scale": torch.empty(1, dtype=torch.float32, device=device),
        }

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._read = None
        if not self.input_scale.is_meta:
            # Read here, since reading a tensor at the first call would break a compiled graph.
            _ = self.input_qparams

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        read = self._read
        super()._apply(fn, recurse)
        # Moving changes no value: the call that follows need not wait for the device.
        self._read = None if read is None else Reading(self._buffers, self._range, read.value)
        return self


class W8A8StaticLinear(CalibratedLinear, schemes=[W8A8("static")]):
    """A W8A8 layer that quantizes all tokens with one calibrated scale and zero point; sums are int32.

    Attributes:
        col_scale: float32 ``[N]``, ``input_scale * weight_scale`` rounded.
        colsum: int32 ``[N]``, row sums of ``qweight``.
        input_scale: float32 ``[1]``.
        input_zero_point: int32 ``[1]``.

    Exactness: that of `qcut.numerics.int8.w8a8_static_linear_ref`, bitwise.
    """

    k_max = K_MAX_ZERO_POINT
    least_code = -127

    colsum: Tensor
    input_zero_point: Tensor
    _range = ("input_scale", "input_zero_point")

    def _read_qparams(self) -> tuple[float, int]:
        scale, zero_point = super()._read_qparams(), int(self.input_zero_point)
        if not -128 <= zero_point <= 127:
            raise QuantizationError(f"input_zero_point is {zero_point}; allowed: -128 to 127", self.name)
        return scale, zero_point

    def state_problem(self, state: Mapping[str, Tensor]) -> tuple[str, str] | None:
        """See `Linear.state_problem`: besides, parameters of the input that can be, and factors and sums as defined."""
        if problem := super().state_problem(state):
            return problem
        if found := out_of_range(state["input_zero_point"], -128, 127):
            return "input_zero_point", f"found {found}; -128 to 127 are allowed"
        if found := first_difference(state["colsum"], numerics.colsum_ref(state["qweight"])):
            return "colsum", f"found {found}: the sum of its row of qweight"
        return None

    def _empty_buffers(self, device: torch.device | str | None) -> dict[str, Tensor | None]:
        calibrated = super()._empty_buffers(device)
        input_scale = calibrated.pop("input_scale")  # after colsum, as in checkpoints
        return calibrated | {
            "colsum": torch.empty(self.out_features, dtype=torch.int32, device=device),
            "input_scale": input_scale,
            "input_zero_point": torch.empty(1, dtype=torch.int32, device=device),
        }

    def _set_range(self, static_range: StaticRange, device: torch.device) -> tuple[float, int]:
        scale, zero_point = numerics.static_qparams(static_range.lo, static_range.hi)
        self.input_scale = torch.full((1,), scale, dtype=torch.float32, device=device)
        self.input_zero_point = torch.full((1,), zero_point, dtype=torch.int32, device=device)
        self.colsum = numerics.colsum_ref(self.qweight)
        return scale, zero_point

    def quantized_tokens(self, x: Tensor) -> Tensor:
        """See `Linear.quantized_tokens`."""
        scale, zero_point = self.input_qparams
        return (numerics.quantize_per_tensor_ref(x, scale, zero_point, x.shape[1]).float() - zero_point) * scale

    def _product(self, x: Tensor) -> Tensor:
        b = self._buffers
        scale, zero_point = self.input_qparams
        weight = b["qweight"], b["col_scale"], b["colsum"], b["bias"]
        return _W8A8_STATIC(x, *weight, scale, zero_point, self.activation)


class W8A16Linear(Int8Linear, schemes=[W8A16()]):
    """A layer with weights dequantized in registers and tokens in their own 16-bit type; sums are float32.

    Exactness: that of `qcut.numerics.int8.w8a16_linear_ref`.
    """

    largest_tile = 128

    @classmethod
    def routed(
        cls,
        stack: Stacked,
        x: Tensor | Prepared,
        tiles: RouteTiles,
        per_row: int,
        *,
        gate: GatedSilu | None = None,
        weights: Tensor | None = None,
    ) -> Tensor | None:
        """See `Linear.routed`: tokens of 16 bits."""
        if not isinstance(x, Tensor) or x.dtype is torch.float32:
            return None
        b, x = stack.tensors, gated(x, gate)
        weight = b["qweight"], b["weight_scale"], b["bias"]
        tokens = _in_order(x, tiles, per_row, x.dtype)[0] if tiles.ordered else x
        y: Tensor = torch.ops.qcut.w8a16_experts(
            tokens, *x.shape, per_row, tiles.experts, tiles.routes, *weight, stack.form.activation
        )
        return _summed(y, tiles, len(weight[0]), weights)

    def _product(self, x: Tensor) -> Tensor:
        b = self._buffers
        return _W8A16(x, b["qweight"], b["weight_scale"], b["bias"], self.activation)


class Int16x8Linear(Int8Linear, schemes=[Int16x8()]):
    """A layer that quantizes each token to int16 by the token's own largest magnitude; sums are int64.

    Exactness: that of `qcut.numerics.int16.int16x8_linear_ref`, bitwise.
    """

    k_max = K_MAX

    @property
    def largest_tile(self) -> int:
        """See `Linear.largest_tile`."""
        return TOKENS_PER_BLOCK

    @classmethod
    def routed(
        cls,
        stack: Stacked,
        x: Tensor | Prepared,
        tiles: RouteTiles,
        per_row: int,
        *,
        gate: GatedSilu | None = None,
        weights: Tensor | None = None,
    ) -> Tensor | None:
        """See `Linear.routed`; bitwise what the layers' `forward` makes of the routes' tokens."""
        if not isinstance(x, Tensor):
            return None
        b = stack.tensors
        weight = b["qweight"], b["weight_scale"], b["bias"]
        if gate is None:
            absmax = torch.linalg.vector_norm(x, math.inf, 1, dtype=torch.float32)
        else:
            absmax = x.new_zeros(len(x), dtype=torch.float32)
            x = gated(x, gate, absmax)
        y: Tensor = torch.ops.qcut.int16x8_experts(
            x, absmax, per_row, tiles.experts, tiles.routes, *weight, stack.form.activation
        )
        return _summed(y, tiles, len(weight[0]), weights)

    def _product(self, x: Tensor) -> Tensor:
        b = self._buffers
        return _INT16X8(x, b["qweight"], b["weight_scale"], b["bias"], self.activation)


class Int16x8StaticLinear(CalibratedLinear, schemes=[Int16x8("static")]):
    """A layer that quantizes all tokens to int16 with one calibrated scale; sums are int64.

    Attributes:
        col_scale: float32 ``[N]``, ``input_scale * weight_scale`` rounded.
        input_scale: float32 ``[1]``.

    Exactness: that of `qcut.numerics.int16.int16x8_static_linear_ref`, bitwise.
    """

    k_max = K_MAX

    def _set_range(self, static_range: StaticRange, device: torch.device) -> float:
        scale = int16.static_scale(static_range.lo, static_range.hi)
        self.input_scale = torch.full((1,), scale, dtype=torch.float32, device=device)
        return scale

    def quantized_tokens(self, x: Tensor) -> Tensor:
        """See `Linear.quantized_tokens`."""
        return int16.quantize_tensor_ref(x, self.input_qparams, x.shape[1]).float() * self.input_qparams

    def _product(self, x: Tensor) -> Tensor:
        b = self._buffers
        return _INT16X8_STATIC(x, b["qweight"], b["col_scale"], b["bias"], self.input_qparams, self.activation)
