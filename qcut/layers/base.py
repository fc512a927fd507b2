"""`Linear`: a quantized linear layer, in place of ``nn.Linear`` and transformers' ``Conv1D``.

Schemes with int8 weights are here; the class makes a `qcut.layers.codebook.CodebookLinear` of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.config import (
    K_MAX,
    K_MAX_ZERO_POINT,
    W8A8,
    W8A16,
    Codebook,
    Scheme,
    StaticRange,
    check_activation,
    padded_k,
    parse_scheme,
)
from qcut.errors import ConfigError, DtypeError, QuantizationError, ShapeError, UnsupportedError, layer_prefix
from qcut.models.modules import tensor_key
from qcut.numerics import int8 as numerics

if TYPE_CHECKING:
    from typing_extensions import Self

_W8A8 = torch.ops.qcut.w8a8_linear.default
_INT8 = torch.ops.qcut.int8_linear.default
_NOTED = torch.ops.qcut.noted_linear.default
_W8A8_STATIC = torch.ops.qcut.w8a8_static_linear.default
_W8A16 = torch.ops.qcut.w8a16_linear.default

ALLOWED_SCHEMES = "use w8a8, w8a8_static, w8a16 or a codebook such as codebook4"
WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Stored:
    """A tensor of a layer's state dict before it is made.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        identity: equal for tensors of two layers that are one and the same, tied.
        read: makes it, or returns it where it exists.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    identity: tuple[Any, ...]
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> Stored:
        """A tensor that exists."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor_key(tensor), lambda: tensor)


class Linear(nn.Module):
    """``y = act(x @ W.T + b)`` with a quantized W; formulas in `qcut.numerics`, by scheme.

    With a scheme that is a `qcut.Codebook`, calling this class makes a `qcut.layers.codebook.CodebookLinear`, whose
    buffers are others. The following is of int8 weights.

    Build one with `from_float`, or with `empty` and a state dict. Inference only: torch warns when a
    gradient reaches the layer. ``.to(dtype)``, ``.half()`` and the like leave scales and bias in
    float32: the layer computes in whatever type its input has, and ``.to(device)`` moves everything.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is a bias.
        scheme: ``w8a8``, ``w8a8_static``, ``w8a16`` or a codebook's name, or the scheme object.
        activation: fused after the bias; see `qcut.config.ACTIVATIONS`.
        device: where the buffers live, ``"meta"`` included. They are not initialized.
        name: name of the layer, for error messages.

    Attributes:
        qweight: int8 ``[N, padded_k(K)]``, zero padded.
        weight_scale: float32 ``[N]``.
        bias: float32 ``[N]`` or None.
        col_scale: float32 ``[N]``, ``input_scale * weight_scale`` rounded (static only).
        colsum: int32 ``[N]``, row sums of ``qweight`` (static only).
        input_scale: float32 ``[1]`` (static only).
        input_zero_point: int32 ``[1]`` (static only).

    Raises:
        ConfigError: an unknown scheme or activation, or the scheme ``fp16``, which leaves layers alone.
        QuantizationError: K or N below 1, or K beyond the scheme's exact range.

    Exactness: that of ``qcut.numerics.{w8a8,w8a8_static,w8a16}_linear_ref``.
    """

    qweight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    col_scale: Tensor
    colsum: Tensor
    input_scale: Tensor
    input_zero_point: Tensor

    def __new__(
        cls,
        in_features: int = 0,
        out_features: int = 0,
        bias: bool = True,
        scheme: str | Scheme = "w8a8",
        *_: Any,
        **__: Any,
    ) -> Self:
        """A layer of the class that the scheme asks for."""
        if cls is Linear and isinstance(parse_scheme(scheme), Codebook):
            from qcut.layers.codebook import CodebookLinear

            made: Any = CodebookLinear.__new__(CodebookLinear)
            return made
        return super().__new__(cls)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        scheme: str | Scheme = "w8a8",
        activation: str = "none",
        device: torch.device | str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.scheme = parse_scheme(scheme)
        if not isinstance(self.scheme, (W8A8, W8A16)):
            raise ConfigError(f"qcut.Linear has no scheme {self.scheme.name!r}; {ALLOWED_SCHEMES}")
        self.static = self.scheme == W8A8("static")
        k_max = _k_max(self.scheme)
        if in_features < 1 or out_features < 1 or (k_max is not None and in_features > k_max):
            k_range = ">= 1" if k_max is None else f"in [1, {k_max}]"
            raise QuantizationError(
                f"weight is [N={out_features}, K={in_features}]; {self.scheme.name} allows N >= 1 and K {k_range}", name
            )
        self.in_features = in_features
        self.out_features = out_features
        self.activation = check_activation(activation)
        self.name = name
        n, f32 = out_features, torch.float32
        shapes: dict[str, tuple[int | tuple[int, int], torch.dtype]] = {
            "qweight": ((n, padded_k(in_features)), torch.int8),
            "weight_scale": (n, f32),
        }
        if self.static:
            shapes |= {
                "col_scale": (n, f32),
                "colsum": (n, torch.int32),
                "input_scale": (1, f32),
                "input_zero_point": (1, torch.int32),
            }
        for key, (shape, dtype) in shapes.items():
            self.register_buffer(key, torch.empty(shape, dtype=dtype, device=device))
        self.register_buffer("bias", torch.empty(n, dtype=f32, device=device) if bias else None)
        self._input_qparams: tuple[float, int] | None = None

    @classmethod
    def empty(
        cls,
        in_features: int,
        out_features: int,
        bias: bool = True,
        scheme: str | Scheme = "w8a8",
        activation: str = "none",
        device: torch.device | str | None = None,
        name: str | None = None,
    ) -> Linear:
        """A layer with uninitialized buffers, to be filled from a state dict; arguments as the class."""
        return cls(in_features, out_features, bias, scheme, activation, device, name)

    @classmethod
    def from_float(
        cls,
        module: nn.Module,
        scheme: str | Scheme = "w8a8",
        *,
        activation: str = "none",
        static_range: StaticRange | None = None,
        second_moment: Tensor | None = None,
        name: str | None = None,
    ) -> Linear:
        """Quantizes a layer; the original is left alone.

        Args:
            module: ``nn.Linear``, or transformers' ``Conv1D`` (weight ``[K, N]``), with weights in
                float16, bfloat16, float32 or float64.
            scheme: see the class.
            activation: fused after the bias.
            static_range: calibrated range of the input; w8a8_static needs it, the others refuse it.
            second_moment: ``E[x x^T]`` of the input, ``[K, K]``: codebooks are then fitted with it
                (`qcut.codebooks.fit`); the other schemes refuse it.
            name: name of the layer, for error messages.

        Returns:
            A layer on the module's device, with its training flag.

        Raises:
            UnsupportedError: another kind of module, or weights on the meta device.
            ConfigError: see the class; or a static range missing or superfluous.
            DtypeError: weights of another dtype.
            QuantizationError: an empty weight, NaN or Inf in weight or bias, K beyond the exact range.

        Exactness: bitwise, on every device; see `qcut.numerics.quantize_weight`.
        """
        scheme = parse_scheme(scheme)
        if isinstance(scheme, Codebook):
            from qcut.layers.codebook import CodebookLinear

            return CodebookLinear.from_float(
                module,
                scheme,
                activation=activation,
                static_range=static_range,
                second_moment=second_moment,
                name=name,
            )
        if second_moment is not None:
            raise ConfigError(f"{layer_prefix(name)}scheme {scheme.name} got a second moment; codebooks take one")
        weight = float_weight(module, name)
        bias = getattr(module, "bias", None)
        if (scheme == W8A8("static")) != (static_range is not None):
            found, wanted = ("none", "one") if static_range is None else (f"{static_range}", "none")
            raise ConfigError(f"{layer_prefix(name)}scheme {scheme.name} got static_range {found}, it takes {wanted}")
        n, k = weight.shape
        layer = cls(k, n, bias is not None, scheme, activation, weight.device, name)
        q, layer.weight_scale = numerics.quantize_weight(weight, layer=name)
        layer.qweight.zero_()[:, :k] = q
        if bias is not None:
            layer.bias = float_bias(bias, name)
        if static_range is not None:
            scale, zero_point = numerics.static_qparams(static_range.lo, static_range.hi)
            layer.input_scale.fill_(scale)
            layer.input_zero_point.fill_(zero_point)
            layer.col_scale = layer.input_scale * layer.weight_scale
            layer.colsum = numerics.colsum_ref(layer.qweight)
            layer._input_qparams = (scale, zero_point)
        return layer.train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer.

        Args:
            x: ``[..., K]`` float16, bfloat16 or float32, any strides, any number of tokens.

        Returns:
            ``[..., N]`` of x's dtype.

        Raises:
            ShapeError: x has another number of columns.
            DtypeError: x has another dtype.
            DeviceError: x is on another device.
        """
        if x.shape[-1:] != (self.in_features,):
            raise ShapeError(
                f"{layer_prefix(self.name)}x has shape {list(x.shape)}; allowed: [..., {self.in_features}]"
            )
        # nn.Module finds buffers through a slow __getattr__; this is the hot path.
        b = self._buffers
        if self.static:
            scale, zero_point = self._input_qparams or self._read_input_qparams()
            return _W8A8_STATIC(
                x, b["qweight"], b["col_scale"], b["colsum"], b["bias"], scale, zero_point, self.activation
            )
        op = _W8A8 if isinstance(self.scheme, W8A8) else _W8A16
        return op(x, b["qweight"], b["weight_scale"], b["bias"], self.activation)

    def forward_int8(self, q: Tensor, scale: Tensor, dtype: torch.dtype, absmax: Tensor | None = None) -> Tensor:
        """Applies the layer, W8A8 with scales per token, to tokens that were quantized before.

        Args:
            q: int8 ``[M, K_padded]`` and
            scale: float32 ``[M]``, as `torch.ops.qcut.quantize_per_token` gives them.
            dtype: of the tokens before, and of the result.
            absmax: float32 ``[M]``, raised to the largest magnitude of each row of the result, for `forward_noted`
                of the next layer.

        Returns:
            ``[M, N]``, bitwise what `forward` makes of the tokens.
        """
        b = self._buffers
        return _INT8(q, scale, b["qweight"], b["weight_scale"], b["bias"], self.activation, dtype, absmax)

    def forward_noted(self, x: Tensor, absmax: Tensor) -> Tensor:
        """Applies the layer, W8A8 with scales per token, to rows whose largest magnitudes are known.

        Args:
            x: ``[M, K]``.
            absmax: float32 ``[M]``: ``max |x[m]|``.

        Returns:
            ``[M, N]``, bitwise what `forward` makes of x.
        """
        b = self._buffers
        return _NOTED(x, absmax, b["qweight"], b["weight_scale"], b["bias"], self.activation)

    @property
    def weight(self) -> Tensor:
        """int8 ``[N, K]``: ``qweight`` without its padding, a view. Model code reads dtype and device here."""
        return self.qweight[:, : self.in_features]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all buffers: what the layer keeps in memory."""
        return sum(b.nbytes for b in self.buffers())

    def dequantized_weight(self) -> Tensor:
        """float32 ``[N, K]``: ``f32(q[n, k]) * weight_scale[n]``."""
        return numerics.dequantize_ref(self.weight, self.weight_scale)

    def stored(self) -> dict[str, Stored]:
        """The tensors of the state dict, by key, in the order they are written."""
        return {key: Stored.of(buffer) for key, buffer in self._buffers.items() if buffer is not None}

    def tie_to(self, owner: Linear) -> None:
        """Hold the owner's tensors wherever this layer's have the same values."""
        for name, buffer in owner._buffers.items():
            mine = self._buffers.get(name)
            if buffer is not None and mine is not None and torch.equal(buffer, mine):
                self._buffers[name] = buffer

    def extra_repr(self) -> str:
        """Sizes, bias, scheme and activation, for ``print(model)``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scheme={self.scheme.name}, activation={self.activation}"
        )

    def _read_input_qparams(self) -> tuple[float, int]:
        self._input_qparams = (float(self.input_scale), int(self.input_zero_point))
        return self._input_qparams

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear:
        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        super()._apply(keep_dtype, recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._input_qparams = None
        if self.static and not self.input_scale.is_meta:
            # Now, and not at the first call: reading a tensor would break a compiled graph.
            self._read_input_qparams()


def _k_max(scheme: Scheme) -> int | None:
    if not isinstance(scheme, W8A8):
        return None
    return K_MAX if scheme.mode == "dynamic" else K_MAX_ZERO_POINT


def float_bias(bias: Tensor, name: str | None) -> Tensor:
    """float32 ``[N]``, a copy.

    Raises:
        QuantizationError: NaN or Inf.
    """
    bias = bias.detach().to(torch.float32, copy=True)
    if not bias.isfinite().all():
        raise QuantizationError("bias holds NaN or Inf; every value must be finite in float32", name)
    return bias


def float_weight(module: nn.Module, name: str | None) -> Tensor:
    """The weight as ``[N, K]``, whichever way the module stores it.

    Raises:
        UnsupportedError: another kind of module, or a weight on the meta device.
        DtypeError: a weight of another dtype than `WEIGHT_DTYPES`.
    """
    kind = type(module).__name__
    is_conv1d = kind == "Conv1D" and hasattr(module, "nf")
    weight = getattr(module, "weight", None)
    if not (isinstance(module, nn.Linear) or is_conv1d) or not isinstance(weight, Tensor):
        raise UnsupportedError(
            f"{layer_prefix(name)}cannot quantize a {kind}; allowed: nn.Linear, transformers' Conv1D"
        )
    if weight.is_meta:
        raise UnsupportedError(f"{layer_prefix(name)}the weight is on the meta device; load the model first")
    if weight.dtype not in WEIGHT_DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in WEIGHT_DTYPES)
        found = str(weight.dtype).removeprefix("torch.")
        raise DtypeError(f"{layer_prefix(name)}the weight is {found}; allowed: {allowed}")
    weight = weight.detach()
    return weight.t() if is_conv1d else weight
