"""`IntegerChain`: linear layers in integers one after the other, from floats to floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

import qcut.ops.integers  # noqa: F401  (registers its operators)
from qcut.errors import CalibrationError, ConfigError, QuantizationError, ShapeError, UnsupportedError, layer_prefix
from qcut.layers.host_values import Reading
from qcut.layers.integers import IntegerLinear, qparams, token_dtype
from qcut.models.classes import (
    activation_of,
    all_calls_are_watched,
    computes_its_own,
    is_called_as_written,
    is_exactly,
    is_unwatched,
)
from qcut.models.modules import check_batches, evaluating, float_weight, is_linear
from qcut.numerics import int16
from qcut.numerics.checks import out_of_range
from qcut.numerics.plain_state import in_plain_state
from qcut.ops.checks import flat
from qcut.schemes import StaticRange

if TYPE_CHECKING:
    from typing_extensions import Self

_QUANTIZE = torch.ops.qcut.quantize_per_tensor.default


class IntegerChain(nn.Module):
    """A chain of linear layers in integers: floats are quantized once at its start, and made again once at its end.

    Build one with `from_float`, or with the class and a state dict, which `torch.save` and safetensors write::

        chain = qcut.IntegerChain.from_float(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)), batches)
        same = qcut.IntegerChain([qcut.IntegerLinear(64, 96, relu=True), qcut.IntegerLinear(96, 10)])
        same.load_state_dict(chain.state_dict())

    Args:
        layers: at least one, of the same bits and on one device; each K is the N of the layer before.

    Attributes:
        layers: the layers, an ``nn.ModuleList``.
        input_scale: float32 ``[1]``, of the tokens of the first layer, and
        input_zero_point: int32 ``[1]``; 0 with 16 bits.
        output_scale: float32 ``[1]``, of the last layer's result; its zero point is the layer's.

    Raises:
        ConfigError: no layers, or layers of different bits.
        ShapeError: a layer's K is not the N of the one before.

    Exactness: bitwise the same on every device: the quantization is `qcut.numerics`'s, all between is integers, and the
    end is one float32 product.
    """

    input_scale: Tensor
    input_zero_point: Tensor
    output_scale: Tensor
    _range: ClassVar[tuple[str, ...]] = ("input_scale", "input_zero_point")

    def __init__(self, layers: Sequence[IntegerLinear]) -> None:
        super().__init__()
        if not layers or len({layer.bits for layer in layers}) != 1:
            found = ", ".join(str(layer.bits) for layer in layers) or "no layers"
            raise ConfigError(
                f"IntegerChain: found layers of bits {found}; allowed: one layer or more, of the same bits"
            )
        for before, layer in pairwise(layers):
            if layer.in_features != before.out_features:
                sizes = f"K = {layer.in_features} after a layer of N = {before.out_features}"
                raise ShapeError(f"IntegerChain: {layer_prefix(layer.name)}found {sizes}; allowed: the same")
        self.layers = nn.ModuleList(layers)
        device = layers[0].qweight.device
        self.register_buffer("input_scale", torch.empty(1, dtype=torch.float32, device=device))
        self.register_buffer("input_zero_point", torch.empty(1, dtype=torch.int32, device=device))
        self.register_buffer("output_scale", torch.empty(1, dtype=torch.float32, device=device))
        self._read: Reading[tuple[float, int]] | None = None

    @classmethod
    @in_plain_state
    def from_float(cls, module: nn.Sequential, batches: Iterable[Tensor], *, bits: int = 8) -> Self:
        """Quantizes an ``nn.Sequential`` of linear layers, each with or without a ReLU; the module is not changed.

        The batches pass through the float layers; the least and largest values of their results become the ranges.
        Identity and Dropout are left out.

        Args:
            module: of ``nn.Linear`` or ``Conv1D``, ``nn.ReLU``, ``nn.Identity`` and ``nn.Dropout``.
            batches: calibration inputs ``[..., K]`` like those to come, of the module's floating type.
            bits: of tokens, 8 or 16.

        Returns:
            A chain on the module's device, with its training flag.

        Raises:
            UnsupportedError: another kind of module in the chain, a subclass that computes something of its own, or
                hooks.
            ConfigError: other bits, or no linear layer.
            CalibrationError: no batches, an empty one, or values that are not finite.
            QuantizationError: see `IntegerLinear.from_float`; or the float layers do not give the result of the
                module on the first batch.

        Exactness: given the ranges bitwise, on every device.
        """
        token_dtype(bits)
        steps = _steps(module)
        ranges = _ranges(module, steps, batches)
        layers = [
            IntegerLinear.from_float(linear, before, after, bits=bits, relu=relu, name=name)
            for (name, linear, relu), (before, after) in zip(steps, pairwise(ranges), strict=True)
        ]
        chain = cls(layers)
        device = layers[0].qweight.device
        scale, zero_point = qparams(bits, ranges[0].lo, ranges[0].hi)
        out_scale, _ = qparams(bits, ranges[-1].lo, ranges[-1].hi)
        chain.input_scale = torch.full((1,), scale, dtype=torch.float32, device=device)
        chain.input_zero_point = torch.full((1,), zero_point, dtype=torch.int32, device=device)
        chain.output_scale = torch.full((1,), out_scale, dtype=torch.float32, device=device)
        chain._read = Reading(chain._buffers, cls._range, (scale, zero_point))
        return chain.train(module.training)

    @property
    def bits(self) -> int:
        """Of the tokens, 8 or 16."""
        return self._first.bits

    @property
    def input_qparams(self) -> tuple[float, int]:
        """Scale and zero point of the input, read from the device once, and again when a tensor has changed.

        Raises:
            QuantizationError: a scale that is not positive and finite, or a zero point out of range.
        """
        read = self._read
        if read is None or not (torch.compiler.is_compiling() or read.holds_for(self._buffers)):
            scale, zero_point = float(self.input_scale), int(self.input_zero_point)
            least, most = (-128, 127) if self.bits == 8 else (0, 0)
            if not 0 < scale < math.inf:
                raise QuantizationError(f"input_scale is {scale}; allowed: positive and finite")
            if not least <= zero_point <= most:
                raise QuantizationError(f"input_zero_point is {zero_point}; allowed: {least} to {most}")
            read = self._read = Reading(self._buffers, self._range, (scale, zero_point))
        return read.value

    def quantize(self, x: Tensor) -> Tensor:
        """The tokens of the first layer.

        Args:
            x: ``[..., K]`` float16, bfloat16 or float32.

        Returns:
            int8 or int16 ``[..., K]``. Values beyond the range saturate; NaN becomes the zero point.
        """
        if x.shape[-1:] != (self._first.in_features,):
            raise ShapeError(f"IntegerChain: x has shape {list(x.shape)}; allowed: [..., {self._first.in_features}]")
        scale, zero_point = self.input_qparams
        if self.bits == 8:
            return cast(Tensor, _QUANTIZE(x, scale, zero_point, x.shape[-1])).view(x.shape)
        return int16.quantize_tensor_ref(flat(x), scale, x.shape[-1]).view(x.shape)

    def forward_integers(self, q: Tensor) -> Tensor:
        """Applies the layers to tokens that are integers, without a float.

        Args:
            q: int8 or int16 ``[..., K]``, as `quantize` gives.

        Returns:
            ``[..., N]`` of q's type, as `dequantize` takes.
        """
        for layer in self.layers:
            q = layer(q)
        return q

    def dequantize(self, q: Tensor) -> Tensor:
        """Floats of the last layer's result, ``f32(q - zero_point) * output_scale``.

        Args:
            q: int8 or int16 ``[..., N]``.

        Returns:
            float32 ``[..., N]``.
        """
        zero_point = cast(IntegerLinear, self.layers[-1]).zero_point
        values = q.to(torch.int32) if zero_point is None else q.to(torch.int32) - zero_point
        return values.float() * self.output_scale

    def forward(self, x: Tensor) -> Tensor:
        """Quantizes, applies the layers, and scales back.

        Args:
            x: ``[..., K]`` float16, bfloat16 or float32, any number of tokens.

        Returns:
            ``[..., N]`` of x's dtype, rounded once more if that is a 16-bit type.

        Raises:
            ShapeError: x has another number of columns.
            DtypeError, DeviceError: x has another dtype, or is on another device.
        """
        return self.dequantize(self.forward_integers(self.quantize(x))).to(x.dtype)

    @property
    def _first(self) -> IntegerLinear:
        return cast(IntegerLinear, self.layers[0])

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._read = None
        if not self.input_scale.is_meta:
            # Read here, since reading a tensor at the first call would break a compiled graph.
            _ = self.input_qparams
            if found := out_of_range(self.output_scale, 0.0, above=True):
                raise QuantizationError(f"output_scale: found {found}; a finite value above 0 is allowed")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        read = self._read
        super()._apply(keep_dtype, recurse)
        # Moving changes no value: the call that follows need not wait for the device.
        self._read = None if read is None else Reading(self._buffers, self._range, read.value)
        return self


_Step = tuple[str, nn.Module, bool]
_ROUNDING = 0.01
"""What the same float layers may differ by: bfloat16 rounds by 0.4 %."""


def _steps(module: nn.Sequential) -> list[_Step]:
    """The linear layers of a chain, with their names, and whether a ReLU follows.

    Raises:
        UnsupportedError: the chain, or a module in it, computes or shows something else than its class says.
    """
    _check_chain(module)
    steps: list[_Step] = []
    for name, child in module._modules.items():  # a ReLU may stand in several places
        assert child is not None
        if not is_unwatched(child):
            raise UnsupportedError(
                f"{layer_prefix(name)}it has hooks or a forward of its own, which integers leave out; allowed: none"
            )
        if is_exactly(child, nn.Identity) or is_exactly(child, nn.Dropout):
            continue
        is_relu = activation_of(child) == "relu"
        if is_linear(child):
            steps.append((name, child, False))
        elif is_relu and steps:
            steps[-1] = (*steps[-1][:2], True)
        else:
            where = "before the first linear layer" if is_relu else "in a chain"
            raise UnsupportedError(
                f"{layer_prefix(name)}found a {type(child).__name__} {where}; allowed: nn.Linear or Conv1D, torch's "
                "nn.ReLU behind one, nn.Identity, nn.Dropout"
            )
    if not steps:
        raise ConfigError("IntegerChain: found no linear layer; allowed: one or more")
    return steps


def _check_chain(module: nn.Module) -> None:
    """Check that a module calls its children one after the other, and does nothing else."""
    cls = type(module)
    if not isinstance(module, nn.Sequential):
        raise UnsupportedError(f"IntegerChain: cannot quantize a {cls.__name__}; allowed: nn.Sequential")
    inherited = all(getattr(cls, key) is getattr(nn.Sequential, key) for key in ("forward", "__iter__"))
    if not inherited or not is_called_as_written(cls) or not computes_its_own(nn.Sequential):
        raise UnsupportedError(
            f"IntegerChain: {cls.__module__}.{cls.__qualname__} computes something of its own; allowed: nn.Sequential "
            "with the forward of torch"
        )
    if not is_unwatched(module) or all_calls_are_watched():
        raise UnsupportedError(
            f"IntegerChain: the {cls.__name__} has hooks or a forward of its own, which integers leave out; "
            "allowed: none"
        )


def _verify(module: nn.Module, batch: Tensor, found: Tensor) -> None:
    """Hold the layers, one after the other in float, to the module in evaluation mode.

    Raises:
        QuantizationError: they differ by more than rounding.
    """
    with evaluating(module):
        wanted = module(batch.clone())
    error, size = float((found - wanted).norm()), float(wanted.norm())
    if not error <= _ROUNDING * size:
        raise QuantizationError(
            f"IntegerChain: its layers one after the other are {error / max(size, 1e-30):.1%} off the module on the "
            f"first batch; allowed: {_ROUNDING:.1%}"
        )


@torch.no_grad()
def _ranges(module: nn.Sequential, steps: Sequence[_Step], batches: Iterable[Tensor]) -> list[StaticRange]:
    """Ranges of the chain's input and of each layer's result; on the first batch the layers must give the module's."""
    low, high = [0.0] * (len(steps) + 1), [0.0] * (len(steps) + 1)
    check_batches(batches)
    seen = False
    weight = float_weight(steps[0][1], steps[0][0])
    k, dtype = weight.shape[1], weight.dtype
    for batch in batches:
        fits = isinstance(batch, Tensor) and batch.shape[-1:] == (k,) and batch.dtype == dtype
        if not fits or batch.numel() == 0:
            found = f"{batch.dtype} {list(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
            raise CalibrationError(f"IntegerChain: found a batch of {found}; allowed: {dtype} [..., {k}], not empty")
        x = batch
        for i in range(len(steps) + 1):
            if i:
                _, linear, relu = steps[i - 1]
                x = linear(x)
                x = x.relu() if relu else x
            least, most = (float(v) for v in x.aminmax())
            if not (math.isfinite(least) and math.isfinite(most)):
                what = f"the result of layer {steps[i - 1][0]!r}" if i else "a batch"
                raise CalibrationError(f"IntegerChain: {what} holds NaN or Inf; allowed: finite values")
            low[i], high[i] = min(low[i], least), max(high[i], most)
        if not seen:
            _verify(module, batch, x)
        seen = True
    if not seen:
        raise CalibrationError("IntegerChain: found no batches; allowed: one or more")
    return [StaticRange(*ends) for ends in zip(low, high, strict=True)]
