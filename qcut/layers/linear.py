"""`Linear`: a quantized linear layer, in place of ``nn.Linear`` and transformers' ``Conv1D``.

One subclass computes one scheme, or all schemes of one class, and names them when it is defined; see
`qcut.layers.int8` and `qcut.layers.codebook`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from qcut.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    QuantizationError,
    ShapeError,
    UnsupportedError,
    layer_prefix,
)
from qcut.layers.gradients import InputGradient
from qcut.layers.quantized import FrozenWeight, QuantizedLayer
from qcut.models.guards import described, is_described, refuse_foreign_saving, refuse_tangents, transformed
from qcut.models.modules import float_bias, float_weight
from qcut.numerics.plain_state import in_plain_state
from qcut.numerics.routing import MOST_GATHERED, RouteTiles
from qcut.ops.gradients import inference_only
from qcut.schemes import (
    ALLOWED_SCHEMES,
    FP8,
    W8A8,
    W8A16,
    Codebook,
    Int16x8,
    Scheme,
    ShiftedCodebook,
    StaticRange,
    W8A8Rotated,
    check_activation,
    parse_scheme,
    scheme_from_json,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from qcut.backends.cuda.launch.prebuild import LayerCall
    from qcut.layers.tokens import Prepared
    from qcut.numerics.codebook.fitting.curvature import Curvature
    from qcut.numerics.gating import GatedSilu

V = TypeVar("V")


_MODULES: dict[type[Scheme], str] = {
    W8A8: "int8",
    W8A8Rotated: "rotated",
    W8A16: "int8",
    FP8: "float8",
    Int16x8: "int8",
    Codebook: "codebook",
    ShiftedCodebook: "shifted",
}
"""The modules of qcut's own layers, imported when a scheme is first used."""


class Stacked(Protocol):
    """Layers of one form with stacked tensors: the experts of a projection."""

    @property
    def tensors(self) -> dict[str, Any]:
        """The stacked tensors of the layers, by name."""

    @property
    def form(self) -> Any:
        """A layer as all of them are, without tensors."""

    def read(self, keys: Sequence[str], make: Callable[..., V]) -> V:
        """What ``make`` finds in buffers, read on the host once, and again when they have changed."""


class Known(NamedTuple):
    """What quantizing a weight needs besides the weight; see `Linear.from_float`."""

    static_range: StaticRange | None = None
    second_moment: Tensor | Curvature | None = None
    row_absmax: Tensor | None = None


class Linear(QuantizedLayer):
    """``y = act(x @ W.T + b)`` with a quantized W.

    Calling this class makes a layer of the subclass that computes the scheme. Each subclass documents its buffers and
    exactness.

    Build one with `from_float`, or with the class and a state dict. The weight is frozen, and a backward pass that
    reaches the layer raises `UnsupportedError` unless `qcut.enable_input_gradients` was called. ``.to(dtype)``,
    ``.half()`` and the like leave the buffers as they are: the layer computes in whatever type its input has, and
    ``.to(device)`` moves everything.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is a bias.
        scheme: ``w8a8``, ``w8a8_static``, ``w8a16`` or a codebook's name, or the scheme object.
        activation: fused after the bias; see `qcut.schemes.ACTIVATIONS`.
        device: where the buffers live, ``"meta"`` included. They are not initialized.
        name: name of the layer, for error messages.

    Attributes:
        bias: float32 ``[N]`` or None.
        k_max: the largest K with exact products, or None if products of any K are exact.
        block_rows: rows of the weight that memory keeps together; weights of whole blocks can be concatenated.

    Raises:
        ConfigError: an unknown scheme or activation, or the scheme ``fp16``, which leaves layers in float.
        QuantizationError: K or N below 1, or K beyond the scheme's exact range.
    """

    bias: Tensor | None

    k_max: ClassVar[int | None] = None
    block_rows: ClassVar[int] = 1
    _subclasses: ClassVar[dict[Scheme | type[Scheme], type[Linear]]] = {}

    def __init_subclass__(cls, schemes: Iterable[Scheme | type[Scheme]] = (), **kwargs: Any) -> None:
        """Registers a subclass.

        Args:
            schemes: schemes that the subclass computes: scheme objects, or scheme classes for all their objects.
            **kwargs: arguments for other bases.
        """
        super().__init_subclass__(**kwargs)
        Linear._subclasses.update(dict.fromkeys(schemes, cls))

    @staticmethod
    def subclass_for(scheme: str | Scheme) -> type[Linear]:
        """The class of a scheme's layers.

        Raises:
            ConfigError: the scheme is unknown, or has no layers, such as ``fp16``.
        """
        scheme = parse_scheme(scheme)
        known = Linear._subclasses
        if scheme not in known and type(scheme) not in known and type(scheme) in _MODULES:
            import_module(f"qcut.layers.{_MODULES[type(scheme)]}")
        subclass = known.get(scheme) or known.get(type(scheme))
        if subclass is None:
            raise ConfigError(f"qcut.Linear has no scheme {scheme.name!r}; {ALLOWED_SCHEMES}")
        return subclass

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
        return cast("Self", super().__new__(Linear.subclass_for(scheme) if cls is Linear else cls))

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
        if not isinstance(self, Linear.subclass_for(self.scheme)):
            raise ConfigError(
                f"{layer_prefix(name)}{type(self).__name__} has no scheme {self.scheme.name!r}; qcut.Linear has all"
            )
        if in_features < 1 or out_features < 1 or (self.k_max is not None and in_features > self.k_max):
            k_range = ">= 1" if self.k_max is None else f"in [1, {self.k_max}]"
            raise QuantizationError(
                f"weight is [N={out_features}, K={in_features}]; {self.scheme.name} allows N >= 1 and K {k_range}", name
            )
        self.in_features = in_features
        self.out_features = out_features
        self.activation = check_activation(activation)
        self.name = name
        for key, tensor in self._empty_buffers(device).items():
            self.register_buffer(key, tensor)
        self.register_buffer("bias", torch.empty(out_features, dtype=torch.float32, device=device) if bias else None)
        self._settle(torch.float32)

    @classmethod
    @in_plain_state
    def from_float(
        cls,
        module: nn.Module,
        scheme: str | Scheme = "w8a8",
        *,
        activation: str = "none",
        static_range: StaticRange | None = None,
        second_moment: Tensor | Curvature | None = None,
        row_absmax: Tensor | None = None,
        name: str | None = None,
    ) -> Self:
        """Quantizes a layer; the original is not changed.

        Args:
            module: ``nn.Linear``, or transformers' ``Conv1D`` (weight ``[K, N]``), with weights in
                float16, bfloat16, float32 or float64.
            scheme: see the class.
            activation: fused after the bias.
            static_range: calibrated range of the input; w8a8_static needs it, the others refuse it.
            second_moment: ``E[x x^T]`` of the input, ``[K, K]``, or the loss's curvature by the weight: codebooks are
                then fitted with it (`qcut.numerics.codebook.fitting.fit`); the other schemes refuse it.
            row_absmax: float32 ``[N]``, the largest magnitude of each whole row, where the layer has a part of the
                columns of a larger one: scales of int8 weights are then those of the larger layer. Codebooks have
                norms of groups, rotated rows have other magnitudes, and both ignore it.
            name: name of the layer, for error messages.

        Returns:
            A layer on the module's device, with its training flag.

        Raises:
            UnsupportedError: another kind of module, or weights on the meta device.
            ConfigError: see the class; or a static range missing or superfluous, or a second moment that the scheme
                does not take.
            DtypeError: weights of another dtype.
            QuantizationError: an empty weight, NaN or Inf in weight or bias, K beyond the exact range.

        Exactness: int8 weights bitwise, on every device (`qcut.numerics.int8.quantize_weight`); codebooks in float32
        (`qcut.numerics.codebook.quantizer.quantize`).
        """
        known = Known(static_range, second_moment, row_absmax)
        return cls.all_from_float([module], scheme, [activation], [known], [name])[0]

    @classmethod
    @in_plain_state
    def all_from_float(
        cls,
        modules: Sequence[nn.Module],
        scheme: str | Scheme,
        activations: Sequence[str],
        known: Sequence[Known],
        names: Sequence[str | None],
    ) -> list[Self]:
        """Quantizes layers of one size, on one device, under one scheme; see `from_float`, which takes one.

        Codebooks are fitted together (`qcut.numerics.codebook.fitting.fit.fit_experts`).

        Args:
            modules: at least one.
            scheme: of all.
            activations: of each, fused after the bias.
            known: of each, what else `from_float` takes.
            names: of each, for error messages.

        Exactness: a layer is bitwise that of `from_float`.
        """
        scheme = parse_scheme(scheme)
        layers, weights = [], []
        for module, activation, (static_range, *_), name in zip(modules, activations, known, names, strict=True):
            weight = float_weight(module, name)
            if scheme.needs_range != (static_range is not None):
                given, wanted = ("none", "one") if static_range is None else (f"{static_range}", "none")
                where = layer_prefix(name)
                raise ConfigError(f"{where}scheme {scheme.name} got static_range {given}, it takes {wanted}")
            n, k = weight.shape
            layers.append(cls(k, n, getattr(module, "bias", None) is not None, scheme, activation, "meta", name))
            weights.append(weight)
        type(layers[0])._quantize_all(layers, weights, known)
        for module, layer, weight in zip(modules, layers, weights, strict=True):
            layer._settle(weight.dtype)
            bias = getattr(module, "bias", None)
            if bias is not None:
                layer.bias = float_bias(bias, layer.name)
            layer.train(module.training)
        return layers

    @classmethod
    def cuda_calls(
        cls, scheme: Scheme, *, dtype: torch.dtype, rows: int, n: int, k: int, bias: bool, activation: str
    ) -> Sequence[LayerCall]:
        """Describes a call on CUDA, so that its kernels can be built before there is a layer.

        Args:
            scheme: one that the class computes.
            dtype: of tokens and result.
            rows: number of tokens.
            n: output channels.
            k: columns of the tokens.
            bias: whether there is one.
            activation: after the bias.

        Returns:
            Descriptions for `qcut.backends.cuda.launch.prebuild`; none where kernels are built when the layer is called
            first.
        """
        return ()

    def forward(self, input: Tensor) -> Tensor:
        """Applies the layer.

        Args:
            input: x, ``[..., K]`` float16, bfloat16 or float32, any strides, any number of tokens.

        Returns:
            ``[..., N]`` of x's dtype.

        Raises:
            ShapeError: x has another number of columns.
            DtypeError: x has another dtype; kernels of some schemes refuse float32.
            DeviceError: x is on another device.
            UnsupportedError: somebody has put another weight in the place of the layer's parameter.

        Exactness: see the class of the layer.
        """
        return self._without_activation().forward_fused(input) if self.apart else self.forward_fused(input)

    def forward_fused(self, x: Tensor) -> Tensor:
        """Applies the layer, its activation included, as `forward` does if the layer is not `apart`."""
        if x.shape[-1:] != (self.in_features,):
            raise ShapeError(
                f"{layer_prefix(self.name)}x has shape {list(x.shape)}; allowed: [..., {self.in_features}]"
            )
        if not torch.compiler.is_compiling():
            held = self._parameters["weight"]
            if held.__class__ is not FrozenWeight and held is not None and held.shape[0]:
                raise UnsupportedError(
                    f"{layer_prefix(self.name)}its weight is quantized, and it is called with another one, as "
                    "torch.func.functional_call does; quantize the float layer that has the new weight"
                )
            if forward_ad._current_level >= 0:
                refuse_tangents(x, layer_prefix(self.name))
        try:
            if x.requires_grad and torch.is_grad_enabled():
                result: Tensor
                if self.input_gradients:
                    result = InputGradient.apply(x, self)
                    return result
                with torch.no_grad():
                    y = self._product(x)
                who = f"{layer_prefix(self.name)}{self.scheme.name} without qcut.enable_input_gradients(model)"
                result = inference_only(y, x, who)
                return result
            return self._product(x)
        except (DtypeError, DeviceError) as error:  # of operators, which do not know the layer
            raise type(error)(f"{layer_prefix(self.name)}{error}") from None
        except RuntimeError as error:
            raise transformed(layer_prefix(self.name), error, x, *self._buffers.values()) or error from None

    @property
    def largest_tile(self) -> int:
        """The most routes of a tile that `routed` takes, on a GPU with kernels for it."""
        return MOST_GATHERED

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
        """The products of routes with the layers of a stack, without a look at the routes on the host.

        Args:
            stack: layers of this class.
            x: ``[M, K]`` on a GPU; with ``gate``, ``[M, 2 K]``; `torch.ops.qcut.silu_mul` makes the tokens of it.
                With tiles that are not ``ordered``, also M tokens that an earlier kernel has prepared for the layers,
                without ``gate``.
            tiles: the routes, ``M * per_row`` in all.
            per_row: routes of each token.
            gate: see ``x``.
            weights: float32 ``[T, k]`` of the routes of T tokens, in tiles of one route; None: routes are not summed.

        Returns:
            ``[M * per_row, N]`` of x's dtype; rows of routes in no tile hold anything. With ``weights``, what
            `torch.ops.qcut.sum_routes` makes of them: ``[T, N]``. None: no kernel computes them.
        """
        return None

    def quantized_tokens(self, x: Tensor) -> Tensor | None:
        """The tokens that the product reads in place of x, dequantized; for checks, not for speed.

        Args:
            x: ``[M, K]``, as `forward` takes it.

        Returns:
            float32 ``[M, K]``; x itself if tokens are not quantized, or to int16 by their own largest magnitudes.
            None if they are quantized after a rotation.
        """
        return x.float()

    def _without_activation(self) -> Self:
        """This layer, in the memory of this one, without its activation."""
        plain = copy(self)
        plain.activation, plain.apart = "none", False
        return plain

    @property
    def weight(self) -> Tensor:
        """``[N, K]`` for what model code asks of it: its shape, its device, and the float weight's dtype.

        Raises:
            UnsupportedError: something reads its values: see `dequantized_weight`.
        """
        return described(self._stand_in(), self.weight_dtype, self.name)

    def dequantized_weight(self) -> Tensor:
        """float32 ``[N, K]``: the weight that the layer computes with."""
        raise NotImplementedError

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of `dequantized_weight`, without making the others.

        Args:
            ids: int32 or int64 ``[R]`` on the layer's device.

        Returns:
            float32 ``[R, K]``.

        Raises:
            IndexError: an id below 0 or beyond N - 1, on the CPU. On CUDA the device asserts.
        """
        raise NotImplementedError

    def row_buffers(self) -> dict[str, Tensor]:
        """The buffers with N, or tiles of N, as first dimension; all other buffers are shared by all rows."""
        return {key: buffer for key, buffer in self._buffers.items() if buffer is not None}

    @property
    def float_count(self) -> int:  # type: ignore[override]
        """Elements of weight and bias."""
        return self.out_features * (self.in_features + (self.bias is not None))

    def to_json(self) -> dict[str, Any]:
        """Scheme, sizes, bias and activation."""
        return {
            "scheme": self.scheme.to_json(),
            "in_features": self.in_features,
            "out_features": self.out_features,
            "bias": self.bias is not None,
            "activation": self.activation,
        }

    @classmethod
    def from_json(cls, spec: Mapping[str, Any], name: str) -> Self:
        """See `QuantizedLayer.from_json`."""
        sizes, scheme = (int(spec["in_features"]), int(spec["out_features"])), scheme_from_json(spec["scheme"])
        return cls(*sizes, bool(spec["bias"]), scheme, spec["activation"], device="meta", name=name)

    def extra_repr(self) -> str:
        """Sizes, bias, scheme and activation, for ``print(model)``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scheme={self.scheme.name}, activation={self.activation}"
            + (f", one of {self.parts} parts" if self.parts > 1 else "")
        )

    def _empty_buffers(self, device: torch.device | str | None) -> dict[str, Tensor | None]:
        """The scheme's buffers, uninitialized, in the order of the state dict; sizes and scheme are set."""
        raise NotImplementedError

    def table(self, dtype: torch.dtype) -> object | None:
        """The weight's rows as `qcut.layers.embedding.RowTable` of a dtype; None if no operator gathers them."""
        return None

    @classmethod
    def _quantize_all(cls, layers: Sequence[Self], weights: Sequence[Tensor], known: Sequence[Known]) -> None:
        """`_quantize` of layers of one scheme and one size."""
        for layer, weight, one in zip(layers, weights, known, strict=True):
            layer._quantize(weight, one)

    def _quantize(self, weight: Tensor, known: Known) -> None:
        """Put new buffers, on the weight's device, in place of the empty ones."""
        raise NotImplementedError

    def _stand_in(self) -> Tensor:
        """int8 ``[N, K]`` on the layer's device, in memory of the layer."""
        raise NotImplementedError

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse another weight; one that the layer holds already, as ``tie_weights()`` gives it, changes nothing.

        Raises:
            UnsupportedError: another weight than the layer's own.
        """
        if name != "weight":
            super().register_parameter(name, param)
        elif param is not self._parameters["weight"] and not is_described(param, self._stand_in()):
            raise UnsupportedError(
                f"{layer_prefix(self.name)}its weight is quantized, and another was assigned to it; quantize the float "
                "layer that has the new weight"
            )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        refuse_foreign_saving(self.name)
        with self._without_parameter():
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        if f"{prefix}weight" in state_dict:  # which strict=False would leave out without a word
            raise UnsupportedError(
                f"{layer_prefix(self.name)}its weight is quantized, and a float one is loaded ({prefix}weight); load "
                "it into the float model, and quantize that"
            )
        with self._without_parameter():
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._settle(self.weight_dtype)

    @contextmanager
    def _without_parameter(self) -> Iterator[None]:
        held = self._parameters.pop("weight")
        try:
            yield
        finally:
            self._parameters["weight"] = held

    def _product(self, x: Tensor) -> Tensor:
        """Compute `forward` for x with K columns."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        with self._without_parameter():
            super()._apply(keep_dtype, recurse)
        self._settle(fn(torch.empty(0, dtype=self.weight_dtype, device="cpu")).dtype)
        return self


def gated(x: Tensor, gate: GatedSilu | None, absmax: Tensor | None = None) -> Tensor:
    """`torch.ops.qcut.silu_mul` of the halves of x ``[M, 2 K]``; x itself without a gate."""
    return x if gate is None else cast(Tensor, torch.ops.qcut.silu_mul(*x.chunk(2, -1), absmax, *gate))
