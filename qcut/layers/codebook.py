"""`CodebookLinear`: the `qcut.Linear` of codebook schemes, its memory and its two paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from qcut.codebooks import layout as codebook_layout
from qcut.codebooks import packing, products, rotation
from qcut.codebooks.layout import UNIT_COLUMNS, Geometry
from qcut.codebooks.passes import NORM_DTYPES, check_norms, check_values, codebook_scheme, quantize_weight, scheme_of
from qcut.codebooks.quantizer import RotatedCodebook, dequantize
from qcut.config import K_MAX, Codebook, Scheme, StaticRange, check_activation
from qcut.errors import ConfigError, DtypeError, QuantizationError, ShapeError, layer_prefix
from qcut.layers.base import Linear, Stored, float_bias, float_weight
from qcut.layers.codebook_buffers import PASS_KEYS, empty_set, matching_state, packed_set, stored_passes
from qcut.layers.rotations import RotationSpec, operands_for, shared
from qcut.models.modules import tensor_key
from qcut.numerics.int8 import apply_activation
from qcut.ops.codebook import can_rotate

_GEMM = torch.ops.qcut.codebook_gemm.default
_GEMV = torch.ops.qcut.codebook_gemv.default
_EXPLICIT = torch.ops.qcut.codebook_linear.default

PATHS = ("fused", "explicit")
_path = "fused"
_HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def execution_path(name: str) -> Iterator[None]:
    """Choose how codebook layers compute, for the whole process, within a block.

    Args:
        name: ``fused``: kernels on CUDA; ``explicit``: plain torch there too, as on every other device: indices
            unpacked, looked up, multiplied and rescaled, piece by piece. With int8 products both give the same
            integers.

    Raises:
        ConfigError: another name.
    """
    global _path
    if name not in PATHS:
        raise ConfigError(f"execution path {name!r} does not exist; use one of {', '.join(PATHS)}")
    before, _path = _path, name
    try:
        yield
    finally:
        _path = before


class CodebookLinear(Linear):
    """``y = act(x @ W.T + b)``, W the sum of one or two passes of rotated codebook weights.

    Made by `Linear` and its class methods, whose arguments these are. Passes of one width lie behind one another along
    K, as one *set*; passes of two widths are two sets, and two products. Inference only. ``.to(dtype)``, ``.half()``
    and the like leave all buffers as they are; ``.to(device)`` moves them.

    Attributes:
        units: uint8 ``[T, U, bytes]``, T tiles of 16 rows, U units of 128 columns, all passes of the set.
        packed_norms: float16 ``[T, U, slots, 8, 2]``, relative to the row's power of two.
        norms: float16 or float32 ``[N, passes * G]``, as they were quantized.
        codebook: float32 ``[2**bits]``.
        col_scale: float32 ``[N]``: the row's power of two over the square root of the group size (1 without a
            rotation) and, with int8 products, over ``fold``.
        fold: float32 ``[16 T]``, which makes int8 of a row's weights (int8 products alone).
        bias: float32 ``[N]`` or None.
        residual_units, residual_packed_norms, residual_codebook, residual_col_scale, residual_fold: of the second
            set, where there is one.

    The state dict is in plain order: ``indices`` packed by `qcut.codebooks.packing.pack`, ``norms`` ``[N, G]``,
    ``codebook``, the same with ``residual_`` in front for a second pass, and ``bias``.

    Raises:
        ConfigError: another scheme, an unknown activation, or a group that the rotation cannot take.
        QuantizationError: K or N below 1, or K beyond the exact range of int8 products.

    Exactness: that of ``qcut.codebooks.products.codebook_linear_ref``, or ``codebook_linear_s8_ref`` with int8
    products. Kernels of 16-bit products may round ``value * norm`` to 16 bits, once.

    Source: schemes.md, section 4.
    """

    units: Tensor
    packed_norms: Tensor
    norms: Tensor
    codebook: Tensor
    fold: Tensor
    scheme: Codebook

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        scheme: str | Scheme = "codebook4",
        activation: str = "none",
        device: torch.device | str | None = None,
        name: str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        scheme = codebook_scheme(scheme, name)
        self.scheme = scheme
        self.static = False
        self.in_features, self.out_features = in_features, out_features
        self.activation = check_activation(activation)
        self.name = name
        k, n = in_features, out_features
        if k < 1 or n < 1:
            raise QuantizationError(f"weight is [N={n}, K={k}]; {scheme.name} allows N >= 1 and K >= 1", name)
        self.kind = scheme.rotation
        self.group_size = scheme.group_columns(k)
        if scheme.rotation != "none":
            rotation.check_group_size(k, self.group_size, scheme.rotation, name)
        self.geometry = Geometry(k, self.group_size)
        self._rotation = RotationSpec(self.kind, self.group_size, k, scheme.seeds)
        self.int8 = scheme.activation == "int8"
        widths = scheme.widths
        if self.int8 and self.geometry.k_padded * len(widths) > K_MAX:
            raise QuantizationError(
                f"{len(widths)} passes of K={k}, {self.geometry.k_padded} with padding; int8 products are exact for "
                f"{K_MAX} columns in all",
                name,
            )
        self.set_bits = list(widths) if len(set(widths)) > 1 else [widths[0]]
        one_set = len(self.set_bits) == 1
        self._rotates_one = not self.int8 and one_set and can_rotate(self.kind, self.group_size, k)
        units = self.geometry.units * len(widths) // len(self.set_bits)
        norms = torch.empty(
            (n, len(widths) * self.geometry.groups), dtype=NORM_DTYPES[scheme.norm_dtype], device=device
        )
        self.register_buffer("norms", norms)
        for prefix, bits in zip(("", "residual_"), self.set_bits, strict=False):
            for key, tensor in empty_set(n, units, bits, self.geometry, self.int8, device).items():
                self.register_buffer(prefix + key, tensor)
        self.register_buffer("bias", torch.empty(n, dtype=torch.float32, device=device) if bias else None)
        self._books: list[dict[torch.dtype, tuple[int, ...]]] | None = None

    @classmethod
    def from_float(
        cls,
        module: nn.Module,
        scheme: str | Scheme = "codebook4",
        *,
        activation: str = "none",
        static_range: StaticRange | None = None,
        second_moment: Tensor | None = None,
        name: str | None = None,
    ) -> CodebookLinear:
        """Quantizes a layer; see `Linear.from_float`.

        To the nearest values of the codebook, or with ``second_moment`` by `qcut.codebooks.fit.fit`, which takes a
        rotation.

        Raises:
            UnsupportedError: another kind of module, or weights on the meta device.
            ConfigError: see the class; or a static range, or a second moment without a rotation.
            DtypeError: weights of another dtype.
            QuantizationError: an empty weight, NaN or Inf in weight or bias, a norm beyond float16, or see the class.

        Exactness: float32; see `qcut.codebooks.quantizer.quantize`.
        """
        scheme = codebook_scheme(scheme, name)
        if static_range is not None:
            raise ConfigError(
                f"{layer_prefix(name)}scheme {scheme.name} got static_range {static_range}, it takes none"
            )
        weight = float_weight(module, name)
        if not weight.numel():
            n, k = weight.shape
            raise QuantizationError(f"weight is [N={n}, K={k}]; {scheme.name} allows N >= 1 and K >= 1", name)
        bias = getattr(module, "bias", None)
        passes = quantize_weight(weight, scheme, second_moment=second_moment, layer=name)
        layer = cls.from_passes(passes, bias, scheme, activation=activation, name=name)
        return layer.train(module.training)

    @classmethod
    def from_passes(
        cls,
        passes: Sequence[RotatedCodebook],
        bias: Tensor | None,
        scheme: str | Scheme = "codebook4",
        *,
        activation: str = "none",
        name: str | None = None,
    ) -> CodebookLinear:
        """Builds a layer from weights that are quantized already.

        Args:
            passes: one or two, of one shape, group size and rotation, on one device; the codebooks of 4, 8 or 16
                values, ascending. Two of one width have the same codebook.
            bias: ``[N]`` of any floating dtype.
            scheme: says what the passes do not: the products' type and whether the codebook is of equal steps. Widths,
                group size, rotation, seeds and the norms' dtype are the passes' own.
            activation: fused after the bias.
            name: name of the layer, for error messages.

        Returns:
            A layer on the passes' device, in evaluation mode. It shares no memory with the passes.

        Raises:
            ConfigError: passes that do not go together, or a codebook of another width.
            ShapeError: norms, or a bias, of another shape than the indices ask for.
            QuantizationError: norms or bias with NaN or Inf, a negative norm, or see the class.

        Exactness: `passes` gives back what was given, bit by bit.
        """
        scheme = scheme_of(passes, scheme, name)
        n, k = passes[0].indices.shape
        device = passes[0].indices.device
        layer = cls(k, n, bias is not None, scheme, activation, "meta", name)
        layer._set_passes(passes, device)
        if bias is not None:
            if bias.shape != (n,):
                raise ShapeError(f"{layer_prefix(name)}bias has shape {list(bias.shape)}; allowed: [{n}]")
            layer.bias = float_bias(bias, name).to(device)
        return layer.eval()

    @property
    def passes(self) -> list[RotatedCodebook]:
        """The weight as it was quantized, indices unpacked; new memory."""
        return [self._pass(p) for p in range(len(self.scheme.widths))]

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer.

        Args:
            x: ``[..., K]``, any strides, any number of tokens; float16, bfloat16 or float32, the last only on the
                explicit path or with int8 products.

        Returns:
            ``[..., N]`` of x's dtype.

        Raises:
            ShapeError: x has another number of columns.
            DtypeError: x has another dtype.
            DeviceError: x is on another device.

        Exactness: see the class.
        """
        if x.shape[-1:] != (self.in_features,):
            raise ShapeError(
                f"{layer_prefix(self.name)}x has shape {list(x.shape)}; allowed: [..., {self.in_features}]"
            )
        if _path == "fused" and _has_kernels(x.device):
            return self._fused(x)
        parts = [self._set_buffers(i) for i in range(len(self.set_bits))]
        units, packed_norms, col_scale, fold, codebooks = (list(part) for part in zip(*parts, strict=True))
        return _EXPLICIT(
            x,
            units,
            packed_norms,
            fold if self.int8 else [],
            col_scale,
            self._buffers["norms"],
            codebooks,
            self._buffers["bias"],
            self.set_bits,
            self.kind,
            self.group_size,
            self.scheme.seeds,
            self.activation,
        )

    @property
    def weight(self) -> Tensor:
        """int8 ``[N, K]`` for its shape, dtype and device, which model code reads; its values say nothing.

        One byte of memory: see `dequantized_weight` and `passes` for the weight.
        """
        return self.units.view(torch.int8).as_strided((self.out_features, self.in_features), (0, 0))

    def dequantized_weight(self) -> Tensor:
        """float32 ``[N, K]``: the sum of the passes, rotated back."""
        return dequantize(self.passes)

    def stored(self) -> dict[str, Stored]:
        """The tensors of the state dict, by key, each made when it is read."""
        n, k = self.out_features, self.in_features
        stored: dict[str, Stored] = {}
        for p, (bits, keys) in enumerate(zip(self.scheme.widths, PASS_KEYS, strict=False)):
            prefix, _, _ = self._place(p)
            sources = (f"{prefix}units", "norms", f"{prefix}codebook")
            shapes = ((n, packing.packed_bytes(k, bits)), (n, self.geometry.groups), (1 << bits,))
            dtypes = (torch.uint8, self.norms.dtype, torch.float32)
            for key, source, shape, dtype in zip(keys, sources, shapes, dtypes, strict=True):
                identity = (key, *tensor_key(self._buffer(source)))
                stored[key] = Stored(shape, dtype, identity, _reader(self, p, key, shape, dtype))
        if self.bias is not None:
            stored["bias"] = Stored.of(self.bias)
        return stored

    def extra_repr(self) -> str:
        """Sizes, bias, scheme and activation, for ``print(model)``."""
        bits = 8 * self.weight_bytes / (self.in_features * self.out_features)
        return f"{super().extra_repr()}, bits_per_weight={bits:.2f}"

    # ── the kernels' path ────────────────────────────────────────────────────────────────────────

    def _fused(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        if dtype not in _HALVES and not (self.int8 and dtype is torch.float32):
            allowed = "float16, bfloat16" + (", float32" if self.int8 else "")
            found = str(dtype).removeprefix("torch.")
            raise DtypeError(f"{layer_prefix(self.name)}x is {found}; {self.scheme.name} computes in {allowed} on CUDA")
        m = math.prod(x.shape[:-1])
        tokens = torch.int8 if self.int8 else dtype
        books = self._books or self._read_books()
        b = self._buffers
        if m == 1 and self._rotates_one:
            y = _GEMV(
                x.reshape(1, self.in_features),
                operands_for(self._rotation, x),
                self.group_size,
                self.scheme.seeds,
                b["units"],
                b["packed_norms"],
                b["col_scale"],
                books[0][dtype],
                b["bias"],
                self.set_bits[0],
                self.activation,
                None,
                dtype,
            )
            return y.view(*x.shape[:-1], self.out_features)
        blocks, row_scale = shared.rotate(self, self._rotation, x, tokens)
        halves = torch.float16 if self.int8 else dtype
        row = row_scale if self.int8 else None
        if len(self.set_bits) == 1:
            fold = b["fold"] if self.int8 else None
            y = _GEMM(
                blocks,
                row,
                m,
                b["units"],
                b["packed_norms"],
                fold,
                b["col_scale"],
                books[0][halves],
                b["bias"],
                self.set_bits[0],
                self.activation,
                None,
                dtype,
            )
            return y.view(*x.shape[:-1], self.out_features)
        total: Tensor | None = None
        first = 0
        for i, bits in enumerate(self.set_bits):
            units, packed_norms, col_scale, fold, _ = self._set_buffers(i)
            count = units.shape[1] * UNIT_COLUMNS * tokens.itemsize // 128
            bias = b["bias"] if i else None
            total = _GEMM(
                blocks[first : first + count],
                row,
                m,
                units,
                packed_norms,
                fold,
                col_scale,
                books[i][halves],
                bias,
                bits,
                "none",
                total,
                torch.float32,
            )
            first += count
        return apply_activation(cast(Tensor, total), self.activation).to(dtype).view(*x.shape[:-1], self.out_features)

    def _read_books(self) -> list[dict[torch.dtype, tuple[int, ...]]]:
        """Codebooks in 16 bits on the host, where launches take them from."""
        codebooks = [self._set_buffers(i)[4] for i in range(len(self.set_bits))]
        self._books = [{dtype: products.pack_book(c, dtype) for dtype in _HALVES} for c in codebooks]
        return self._books

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    def _buffer(self, key: str) -> Tensor:
        return cast(Tensor, self._buffers[key])

    def _set_buffers(self, i: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Units, packed norms, channel scales, folds and codebook of a set."""
        b, p = self._buffers, "residual_" if i else ""
        return (
            cast(Tensor, b[f"{p}units"]),
            cast(Tensor, b[f"{p}packed_norms"]),
            cast(Tensor, b[f"{p}col_scale"]),
            b.get(f"{p}fold"),
            cast(Tensor, b[f"{p}codebook"]),
        )

    def _place(self, p: int) -> tuple[str, slice, slice]:
        """Prefix of the buffers that hold a pass, its units along K in them, and its columns of ``norms``."""
        g = self.geometry
        groups = slice(p * g.groups, (p + 1) * g.groups)
        if len(self.set_bits) > 1:
            return "residual_" * (p > 0), slice(0, g.units), groups
        return "", slice(p * g.units, (p + 1) * g.units), groups

    def _pass(self, p: int) -> RotatedCodebook:
        prefix, units, groups = self._place(p)
        indices = codebook_layout.unpack_units(
            self._buffer(f"{prefix}units")[:, units], self.scheme.widths[p], self.out_features, self.geometry
        )
        return RotatedCodebook(
            indices,
            self.norms[:, groups].clone(),
            self._buffer(f"{prefix}codebook").clone(),
            self.group_size,
            self.kind,
            self.scheme.seeds[p],
        )

    def _set_passes(self, passes: Sequence[RotatedCodebook], device: torch.device) -> None:
        """Put quantized passes in the buffers, as new tensors on a device."""
        g = self.geometry
        norms = torch.cat([q.norms.to(device) for q in passes], 1)
        check_norms(norms, self.name)
        self.norms = norms
        per_set = len(passes) // len(self.set_bits)
        for i, bits in enumerate(self.set_bits):
            mine = passes[i * per_set : (i + 1) * per_set]
            own_norms = norms[:, i * per_set * g.groups : (i + 1) * per_set * g.groups]
            for key, tensor in packed_set(mine, own_norms, bits, g, self.int8).items():
                self._buffers["residual_" * (i > 0) + key] = tensor
        self._read_books()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for key, stored in self.stored().items():
            destination[prefix + key] = stored.read()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        wanted = self.stored()
        found = matching_state(state_dict, prefix, wanted, missing_keys, error_msgs)
        if strict:
            own = (key for key in state_dict if key.startswith(prefix) and "." not in key[len(prefix) :])
            unexpected_keys += [key for key in own if key[len(prefix) :] not in wanted]
        if len(found) < len(wanted) or any(t.is_meta for t in found.values()):
            return
        assign = local_metadata.get("assign_to_params_buffers", False)
        if self.norms.is_meta and not assign:
            return  # as torch does: a copy into a tensor without memory
        device = found["indices"].device if assign else self.norms.device
        passes = stored_passes(found, self.scheme, self.in_features, device)
        try:
            check_values(passes, self.name)
            self._set_passes(passes, device)
        except (ConfigError, QuantizationError) as error:
            error_msgs.append(f"{prefix or 'layer'}: {error}")
            return
        if self.bias is not None:
            self.bias = found["bias"].to(device) if assign else found["bias"].detach().to(device, copy=True)


def _reader(
    layer: CodebookLinear, p: int, key: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Callable[[], Tensor]:
    """Makes one tensor of the state dict."""

    def read() -> Tensor:
        if layer.norms.is_meta:
            return torch.empty(shape, dtype=dtype, device="meta")
        prefix, units, groups = layer._place(p)
        if key.endswith("norms"):
            return layer.norms[:, groups].detach().clone()
        if key.endswith("codebook"):
            return layer._buffer(f"{prefix}codebook").detach().clone()
        bits = layer.scheme.widths[p]
        packed = layer._buffer(f"{prefix}units")[:, units]
        return packing.pack(codebook_layout.unpack_units(packed, bits, layer.out_features, layer.geometry), bits)

    return read


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda"
