"""`IntegerLinear`: a linear layer in integers only, bitwise the same everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

import qcut.ops.integers  # noqa: F401  (registers its operators)
from qcut.errors import ConfigError, QuantizationError, ShapeError, layer_prefix
from qcut.models.modules import float_bias, float_weight
from qcut.numerics import int8, int16
from qcut.numerics import integers as numerics
from qcut.numerics.checks import out_of_range
from qcut.numerics.plain_state import in_plain_state
from qcut.schemes import StaticRange, padded_k

if TYPE_CHECKING:
    from typing_extensions import Self

_LINEAR = torch.ops.qcut.integer_linear.early_read
_BITS = {8: torch.int8, 16: torch.int16}


def token_dtype(bits: int) -> torch.dtype:
    """The dtype of tokens of 8 or 16 bits; `ConfigError` for others."""
    if bits not in _BITS:
        raise ConfigError(f"bits is {bits}; allowed: 8 and 16")
    return _BITS[bits]


def qparams(bits: int, lo: float, hi: float) -> tuple[float, int]:
    """Scale and zero point of tokens with a calibrated range."""
    return int8.static_qparams(lo, hi) if bits == 8 else (int16.static_scale(lo, hi), 0)


class IntegerLinear(nn.Module):
    """A linear layer with tokens, weight, bias and result in integers.

    ``y = clamp(rne((acc + bias[n]) * multiplier[n] / 2**shift[n]) + zero_point, least, most)``, where ``acc`` is the
    exact sum of products and ``rne`` rounds to the nearest integer, halves to the even one. int8 tokens give int8,
    int16 tokens give int16. Build one with `from_float`, or with the class and a state dict.

    Args:
        in_features: K, at most 65,536.
        out_features: N.
        bits: of tokens and results, 8 or 16.
        relu: whether results are at least the zero point, the image of 0.
        device: where the buffers live, ``"meta"`` included. They are not initialized.
        name: name of the layer, for error messages.

    Attributes:
        qweight: int8 ``[N, padded_k(K)]``, zero padded.
        bias: int64 ``[N]`` at the sums' scale, magnitudes below 2**38. With int8 tokens, what their zero point adds to
            the sums is taken off here.
        multiplier: int32 ``[N]``, 24 bits, and
        shift: int32 ``[N]``, 0 to 62: ``multiplier / 2**shift`` is the scale of the sums over that of the result.
        zero_point: int32 ``[1]`` of an int8 result; None for int16.

    Raises:
        ConfigError: other bits.
        QuantizationError: K or N below 1, or K beyond 65,536.

    Exactness: bitwise `qcut.numerics.integers.integer_linear_ref`, on every device.
    """

    qweight: Tensor
    bias: Tensor
    multiplier: Tensor
    shift: Tensor
    zero_point: Tensor | None
    k_max: ClassVar[int] = numerics.K_MAX

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bits: int = 8,
        relu: bool = False,
        device: torch.device | str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        token_dtype(bits)
        if in_features < 1 or out_features < 1 or in_features > self.k_max:
            raise QuantizationError(
                f"weight is [N={out_features}, K={in_features}]; integers allow N >= 1 and K in [1, {self.k_max}]", name
            )
        self.in_features, self.out_features, self.bits, self.relu = in_features, out_features, bits, relu
        self.name = name
        shapes = (out_features, padded_k(in_features))
        self.register_buffer("qweight", torch.empty(shapes, dtype=torch.int8, device=device))
        self.register_buffer("bias", torch.empty(out_features, dtype=torch.int64, device=device))
        for key in ("multiplier", "shift"):
            self.register_buffer(key, torch.empty(out_features, dtype=torch.int32, device=device))
        zero_point = torch.empty(1, dtype=torch.int32, device=device) if bits == 8 else None
        self.register_buffer("zero_point", zero_point)

    @classmethod
    @in_plain_state
    def from_float(
        cls,
        module: nn.Module,
        in_range: StaticRange,
        out_range: StaticRange,
        *,
        bits: int = 8,
        relu: bool = False,
        name: str | None = None,
    ) -> Self:
        """Quantizes a layer; the original is not changed.

        Args:
            module: ``nn.Linear``, or transformers' ``Conv1D``, with weights in float16, bfloat16, float32 or float64.
            in_range: calibrated range of the tokens.
            out_range: of the result, after the ReLU where there is one.
            bits: of tokens and results, 8 or 16.
            relu: whether a ReLU follows.
            name: name of the layer, for error messages.

        Returns:
            A layer on the module's device, with its training flag.

        Raises:
            UnsupportedError, DtypeError: another kind of module, or weights of another dtype or on the meta device.
            ConfigError: other bits, or a range too wide for float32.
            QuantizationError: an empty weight, NaN or Inf in weight or bias, K beyond 65,536; a bias of 2**38 or more
                at the scale of its sums; a range of results so narrow that a step of the sums is 2**24 of theirs.

        Exactness: bitwise, on every device.
        """
        weight, bias = float_weight(module, name), getattr(module, "bias", None)
        layer = cls(weight.shape[1], weight.shape[0], bits=bits, relu=relu, device="meta", name=name)
        q, weight_scale = int8.quantize_weight(weight, layer=name)
        layer.qweight = q.new_zeros(layer.qweight.shape)
        layer.qweight[:, : layer.in_features] = q
        in_scale, in_zero_point = qparams(bits, in_range.lo, in_range.hi)
        out_scale, out_zero_point = qparams(bits, out_range.lo, out_range.hi)
        ratio = weight_scale.double() * in_scale / out_scale
        if found := numerics.ratio_problem(ratio):
            raise QuantizationError(
                f"a step of the sums is {found} steps of a result with range [{out_range.lo}, {out_range.hi}]; "
                f"allowed: 0 to {numerics.MULTIPLIER_MAX}",
                name,
            )
        layer.multiplier, layer.shift = numerics.fixed_point(ratio)
        given = None if bias is None else float_bias(bias, name)
        layer.bias = numerics.bias_at_sums(given, in_scale, weight_scale, in_zero_point, int8.colsum_ref(q))
        if bits == 8:
            layer.zero_point = torch.full((1,), out_zero_point, dtype=torch.int32, device=weight.device)
        layer._check_state()
        return layer.train(module.training)

    def forward(self, q: Tensor) -> Tensor:
        """Applies the layer.

        Args:
            q: int8 or int16 ``[..., K]``, as ``bits`` says, any strides.

        Returns:
            ``[..., N]`` of q's type.

        Raises:
            ShapeError, DtypeError, DeviceError: q has another number of columns, another type, or is on another device.
        """
        if q.shape[-1:] != (self.in_features,):
            raise ShapeError(
                f"{layer_prefix(self.name)}q has shape {list(q.shape)}; allowed: [..., {self.in_features}]"
            )
        b = self._buffers
        y: Tensor = _LINEAR(q, b["qweight"], b["bias"], b["multiplier"], b["shift"], b["zero_point"], self.relu)
        return y

    def extra_repr(self) -> str:
        """Sizes, bits and ReLU, for ``print(model)``."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bits={self.bits}, relu={self.relu}"

    def _check_state(self) -> None:
        """Raise `QuantizationError` where a value could take a product out of 64 bits, or is no zero point."""
        found = numerics.state_problem(self.bias, self.multiplier, self.shift)
        if found is None and self.zero_point is not None and (bad := out_of_range(self.zero_point, -128, 127)):
            found = "zero_point", f"found {bad}; -128 to 127 are allowed"
        if found is None and (bad := out_of_range(self.qweight[:, self.in_features :], 0, 0)):
            found = "qweight", f"found {bad} of the padding; 0 is allowed"
        if found is not None:
            raise QuantizationError(f"{found[0]}: {found[1]}", self.name)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._check_state()
