"""`Embedding`: a table of quantized rows in place of ``nn.Embedding``, its own or that of the classifier tied to it.

The table is a `qcut.Linear` without a product; its `rows` are gathered and dequantized. A tied table is the
classifier's own layer, held without being registered, so that moving, saving and loading the model knows one layer and
the two cannot come apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from qcut.errors import DtypeError, QuantizationError, UnsupportedError, layer_prefix
from qcut.layers.linear import Linear
from qcut.models.classes import computes_its_own, is_called_as_written
from qcut.models.guards import refuse_batching
from qcut.models.modules import WEIGHT_DTYPES, dtype_name, is_linear, tensor_key, weight_dtype_names, weight_of
from qcut.ops.checks import check_indices
from qcut.schemes import Scheme

_ID_DTYPES = (torch.int32, torch.int64)


RESERVED = frozenset({"dtype", "linear", "scheme", "table", "tied"})
"""Attributes of quantized embeddings that a float one may not have as well."""


class Embedding(nn.Module):
    """``y[...] = dtype(dequantized W[ids[...]])`` with W in int8 or in a codebook's indices.

    Build one with `from_float`, `tied_to`, or `empty` and a state dict. Inference only. ``.to(dtype)`` and the like
    change what is returned, never the table.

    Args:
        linear: the layer with the table as weight ``[rows, columns]``; its bias and activation do not count.
        dtype: what is returned: float16, bfloat16, float32 or float64.
        tied: the layer belongs to another module, which registers it.

    Attributes:
        dtype: what is returned.
        tied: whether the table is another module's layer.

    Raises:
        DtypeError: another dtype.

    Exactness: rows are those of the layer's `dequantized_weight`; see `forward`.

    Source: docs/schemes.md, sections 3 and 4.
    """

    def __init__(self, linear: Linear, dtype: torch.dtype = torch.float32, *, tied: bool = False) -> None:
        super().__init__()
        if dtype not in WEIGHT_DTYPES:
            raise DtypeError(f"an embedding of {dtype_name(dtype)}; allowed: {weight_dtype_names()}")
        self.dtype = dtype
        self.tied = tied
        if tied:
            self.__dict__["_tied"] = linear  # nn.Module would register it
        else:
            self.table = linear

    @classmethod
    def tied_to(cls, linear: Linear, dtype: torch.dtype = torch.float32) -> Embedding:
        """An embedding that reads the rows of a classifier's weight and holds no tensor; arguments as the class."""
        return cls(linear, dtype, tied=True)

    @classmethod
    def empty(
        cls,
        num_embeddings: int,
        embedding_dim: int,
        scheme: str | Scheme = "w8a16",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        name: str | None = None,
    ) -> Embedding:
        """A table with uninitialized buffers, to be filled from a state dict; errors as `Linear` and the class."""
        return cls(Linear(embedding_dim, num_embeddings, False, scheme, "none", device, name), dtype)

    @classmethod
    def from_float(
        cls,
        module: nn.Module,
        scheme: str | Scheme = "w8a16",
        *,
        device: torch.device | str | None = None,
        name: str | None = None,
    ) -> Embedding:
        """Quantizes a table; the original is not changed.

        Args:
            module: ``nn.Embedding`` with weights in float16, bfloat16, float32 or float64.
            scheme: ``w8a16`` or ``w8a8``, which are the same here, or a codebook.
            device: where it is quantized, and stays; None takes the module's.
            name: for error messages.

        Returns:
            An embedding that returns the module's dtype.

        Raises:
            UnsupportedError: another kind of module, weights on the meta device, or an option that qcut has not:
                ``max_norm``, ``scale_grad_by_freq``, ``sparse``.
            ConfigError: an unknown scheme, or ``w8a8_static``, which is for what has inputs.
            DtypeError: weights of another dtype.
            QuantizationError: an empty weight, NaN or Inf.

        Exactness: that of `Linear.from_float`.
        """
        weight = check_table(module, name).weight
        stand_in = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta").train(module.training)
        stand_in.weight = nn.Parameter(weight.detach().to(device or weight.device), requires_grad=False)
        return cls(Linear.from_float(stand_in, scheme, name=name), weight.dtype).train(module.training)

    @property
    def linear(self) -> Linear:
        """The layer that has the table as weight."""
        linear: Linear = self.__dict__["_tied"] if self.tied else self.table
        return linear

    @property
    def num_embeddings(self) -> int:
        """Rows."""
        return self.linear.out_features

    @property
    def embedding_dim(self) -> int:
        """Columns."""
        return self.linear.in_features

    @property
    def scheme(self) -> Scheme:
        """The layer's scheme."""
        return self.linear.scheme

    @property
    def weight(self) -> Tensor:
        """The layer's weight. Model code reads the device here."""
        return self.linear.weight

    def forward(self, input: Tensor) -> Tensor:
        """Looks rows up.

        Args:
            input: ids, int32 or int64, any shape and strides, on the table's device.

        Returns:
            ``[*ids.shape, columns]`` of `dtype`.

        Raises:
            DtypeError: ids of another dtype.
            RangeError: an id below 0, or beyond the rows, on the CPU. On CUDA the device asserts, as it does for
                ``nn.Embedding``.

        Exactness: rows of `dequantized_weight`, rounded to `dtype`: bitwise, except with the rotation ``qr``: its
        float32 products depend on the device and the number of rows.
        """
        ids = input  # the name is nn.Embedding's
        if ids.dtype not in _ID_DTYPES:
            raise DtypeError(f"{type(self).__name__}: ids are {dtype_name(ids.dtype)}; allowed: int32, int64")
        if ids.device.type == "cpu" and not torch.compiler.is_compiling():
            refuse_batching(f"{type(self).__name__}: ", ids)
            check_indices(type(self).__name__, "ids", ids, self.num_embeddings)
        rows = self.linear.rows(ids.reshape(-1))
        return rows.to(self.dtype).view(*ids.shape, self.embedding_dim)

    def dequantized_weight(self) -> Tensor:
        """float32 ``[rows, columns]``."""
        return self.linear.dequantized_weight()

    def extra_repr(self) -> str:
        """Sizes, scheme and dtype, for ``print(model)``."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, scheme={self.scheme.name}, "
            f"dtype={dtype_name(self.dtype)}" + (", tied" if self.tied else "")
        )

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """See `Linear.register_parameter`."""
        if name == "weight":
            self.linear.register_parameter(name, param)
        else:
            super().register_parameter(name, param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Embedding:
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        return self


def is_table(module: nn.Module) -> bool:
    """Whether this is an ``nn.Embedding`` with the forward of the class: not one that scales, for example."""
    return isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward


def check_table(module: nn.Module, name: str | None = None) -> nn.Embedding:
    """Returns the module, or raises the UnsupportedError of `Embedding.from_float`."""
    where = layer_prefix(name)
    if not isinstance(module, nn.Embedding) or not is_table(module):
        raise UnsupportedError(f"{where}cannot quantize a {type(module).__name__}; allowed: nn.Embedding")
    cls = type(module)
    if "forward" in vars(module) or not is_called_as_written(cls) or not computes_its_own(nn.Embedding):
        raise UnsupportedError(f"{where}a {cls.__name__} that is called otherwise than by nn.Embedding's own forward")
    if "weight" not in module._parameters:
        raise UnsupportedError(f"{where}its weight is computed from other parameters; a quantized embedding takes none")
    for key in ("max_norm", "scale_grad_by_freq", "sparse"):
        if value := getattr(module, key):
            raise UnsupportedError(f"{where}{key} is {value}; a quantized embedding takes none")
    return module


class RowTable(Protocol):
    """What an operator gathers rows of."""

    @property
    def dtype(self) -> torch.dtype:
        """What is returned."""
        ...

    def embed(self, ids: Tensor, positions: Tensor | None, places: Tensor | None, zeroed: Tensor | None) -> Tensor:
        """Rows ``[R, columns]`` of ids, and of positions of another table if given; see `qcut.ops.embed`."""
        ...


class Table(NamedTuple):
    """A table in floating point or int8: rows, scales of int8 rows, and the returned dtype."""

    rows: Tensor
    scale: Tensor | None
    dtype: torch.dtype

    def embed(self, ids: Tensor, positions: Tensor | None, places: Tensor | None, zeroed: Tensor | None) -> Tensor:
        """`torch.ops.qcut.embed_rows` of the table."""
        embed_rows = torch.ops.qcut.embed_rows.default
        return cast(Tensor, embed_rows(ids, self.rows, self.scale, positions, places, self.dtype, zeroed))


def table_of(module: nn.Module) -> RowTable | None:
    """The table of a module that only looks up rows which an operator gathers, or None.

    None is returned for codebooks that `qcut.ops.embed.can_embed` does not name or with offsets, hooks, a forward of
    its own, ``max_norm``, and weights of a tensor subclass.
    """
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return None
    if type(module) is Embedding:
        return cast("RowTable | None", module.linear.table(module.dtype))
    if isinstance(module, nn.Embedding) and is_table(module) and module.max_norm is None:
        weight = module.weight
        return Table(weight, None, weight.dtype) if type(weight) in (Tensor, nn.Parameter) else None
    return None


def token_tables(model: nn.Module) -> dict[str, nn.Embedding]:
    """The embeddings of tokens, by name: ``get_input_embeddings()``, and those tied to it or to a linear layer.

    Tables of positions are small, and are neither.

    Raises:
        QuantizationError: there is none.
    """
    tables = {name: m for name, m in model.named_modules() if name and isinstance(m, nn.Embedding)}
    shared = {tensor_key(weight_of(m)) for m in model.modules() if is_linear(m)}
    given: Any = getattr(model, "get_input_embeddings", None)
    try:
        main = given() if callable(given) else None
    except NotImplementedError:
        main = None
    if isinstance(main, nn.Embedding):
        shared.add(tensor_key(main.weight))
    of_tokens = {name: m for name, m in tables.items() if tensor_key(m.weight) in shared}
    if not of_tokens:
        raise QuantizationError(
            f"{type(model).__name__}: none of its embeddings ({', '.join(tables) or 'there are none'}) is that of "
            "get_input_embeddings() or tied to a linear layer; for others use qcut.Embedding.from_float"
        )
    return of_tokens
