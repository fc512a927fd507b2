"""`CodebookLinear`: the `qcut.Linear` of codebook schemes, its memory and its two paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from qcut.errors import ConfigError, DtypeError, QuantizationError, ShapeError, layer_prefix
from qcut.layers.codebook_buffers import (
    NORM_SCALE,
    PASS_KEYS,
    SET_KEYS,
    CodebookSet,
    codebook_shape,
    empty_set,
    matching_state,
    packed_set,
    stored_passes,
)
from qcut.layers.host_values import Reading
from qcut.layers.linear import Known, Linear, Stacked, gated
from qcut.layers.quantized import StateEntry
from qcut.layers.rotations import RotationSpec, by_kernels, rotation_for, shared
from qcut.layers.tokens import MOST_PREPARED, Prepared, RotatedTokens, RotationArguments
from qcut.models.guards import refuse_foreign_saving, refuse_stored
from qcut.models.modules import dtype_name, float_bias, tensor_key
from qcut.numerics.checks import out_of_range
from qcut.numerics.codebook import float4, packing, pairs, products, rotation
from qcut.numerics.codebook import layout as codebook_layout
from qcut.numerics.codebook.layout import UNIT_COLUMNS, Geometry
from qcut.numerics.codebook.lookup import look_up_rows
from qcut.numerics.codebook.passes import (
    NORM_DTYPES,
    check_norms,
    check_values,
    quantize_weights,
    scale_problem,
    scheme_of,
)
from qcut.numerics.codebook.quantizer import RotatedCodebook, check_even, dequantize, fixed_values
from qcut.numerics.int8 import apply_activation
from qcut.numerics.plain_state import in_plain_state
from qcut.numerics.routing import MOST_GATHERED, RouteTiles
from qcut.ops.codebook import can_rotate
from qcut.ops.embed import can_embed
from qcut.schemes import K_MAX, Codebook, Scheme

if TYPE_CHECKING:
    from typing_extensions import Self

    from qcut.backends.cuda.launch.prebuild import LayerCall
    from qcut.numerics.gating import GatedSilu

_GEMM = torch.ops.qcut.codebook_gemm.early_read
_GEMV = torch.ops.qcut.codebook_gemv.early_read
_EMBED = torch.ops.qcut.embed_codebook.default
_ACTIVATE = torch.ops.qcut.activate_rotated.early_read
_REFERENCE = torch.ops.qcut.codebook_linear.default

Books = dict[torch.dtype, tuple[int, ...]]
"""A codebook in both 16-bit types, as launches take it."""

RowOperands = tuple[list[Tensor], Tensor, list[Tensor], list[int], rotation.Kind, int, tuple[int, ...], int]
"""Units, norms, codebooks, bits, kind, group size, seeds and columns, as `look_up_rows` takes them after the ids."""

_CODEBOOK_KEYS = tuple(keys[CodebookSet._fields.index("codebook")] for keys in SET_KEYS)

_HALVES = (torch.float16, torch.bfloat16)


class CodebookTable(NamedTuple):
    """A table of a codebook's indices: the layer and the returned dtype."""

    linear: CodebookLinear
    dtype: torch.dtype

    def embed(self, ids: Tensor, positions: Tensor | None, places: Tensor | None, zeroed: Tensor | None) -> Tensor:
        """`torch.ops.qcut.embed_codebook` of the table."""
        weight, signs = self.linear.row_operands, self.linear.signs
        return cast(Tensor, _EMBED(ids, *weight, signs, positions, places, self.dtype, zeroed))


class CodebookLinear(Linear, schemes=[Codebook]):
    """``y = act(x @ W.T + b)``, W the sum of one or two passes of rotated codebook weights.

    Arguments are those of `Linear`. Passes of one width follow one another along K as one
    *set*; passes of two widths are two sets, and two products. Inference only. ``.to(dtype)``, ``.half()``
    and the like leave all buffers as they are; ``.to(device)`` moves them.

    Attributes:
        units: uint8 ``[T, U, bytes]``, T tiles of 16 rows, U units of 128 columns, all passes of the set.
        packed_norms: float16 ``[T, U, slots, 8, 2]``, relative to the row's power of two.
        norms: float16 or float32 ``[N, passes * G]``, as they were quantized; or float8_e4m3fn.
        norm_scale: float64 ``[N]``, multiplied into e4m3 norms (`qcut.numerics.codebook.float4`); else None.
        codebook: float32 ``[2**bits]``, or pairs, ``[256, 2]``.
        col_scale: float32 ``[N]``: the row's power of two, times ``norm_scale`` if there is one, over the square root
            of the group size (1 without a rotation) and, with int8 products, over ``fold``.
        fold: float32 ``[16 T]``, which makes int8 of a row's weights; None except with int8 products.
        bias: float32 ``[N]`` or None.
        residual_units, residual_packed_norms, residual_codebook, residual_col_scale, residual_fold: the same buffers
            of the second set, if there is one.

    The state dict is in plain order: ``indices`` packed by `qcut.numerics.codebook.packing.pack`, ``norms`` ``[N, G]``,
    ``codebook``, the same with ``residual_`` in front for a second pass, ``norm_scale`` of e4m3 norms, and ``bias``.

    Raises:
        ConfigError: another scheme, an unknown activation, or a group that the rotation cannot take.
        QuantizationError: K or N below 1, or K beyond the exact range of int8 products.

    Exactness: that of ``qcut.numerics.codebook.products.codebook_linear_ref``, or ``codebook_linear_s8_ref`` with int8
    products. Kernels of 16-bit products may round ``value * norm`` to 16 bits, once.

    Source: docs/schemes.md, section 4.
    """

    units: Tensor
    packed_norms: Tensor
    norms: Tensor
    norm_scale: Tensor | None
    codebook: Tensor
    fold: Tensor | None
    scheme: Codebook

    block_rows = codebook_layout.ROW_ALIGNMENT

    @classmethod
    def cuda_calls(
        cls, scheme: Scheme, *, dtype: torch.dtype, rows: int, n: int, k: int, bias: bool, activation: str
    ) -> Sequence[LayerCall]:
        """See `Linear.cuda_calls`; there are none of passes of two widths."""
        from qcut.backends.cuda.codebook import CodebookLayer

        scheme = cast(Codebook, scheme)
        if len(set(scheme.widths)) > 1:
            return ()
        geometry = Geometry(k, scheme.group_columns(k), scheme.rotation)
        call = CodebookLayer(
            rows=rows,
            n=n,
            k=k,
            dtype=dtype,
            bits=scheme.bits,
            passes=scheme.passes,
            kind=scheme.rotation,
            group_size=scheme.group_columns(k),
            int8=scheme.int8_products,
            bias=bias,
            activation=activation,
            pairs=scheme.pairs,
            row_norm=_has_one_norm(scheme, geometry) and scheme.levels == "normal",
            mirrored=scheme.int8_products and scheme.bits == 4 and scheme.levels == "normal" and not scheme.pairs,
        )
        return [call]

    def _empty_buffers(self, device: torch.device | str | None) -> dict[str, Tensor | None]:
        scheme, k, n = self.scheme, self.in_features, self.out_features
        self.kind = scheme.rotation
        self.group_size = scheme.group_columns(k)
        if scheme.rotation != "none":
            rotation.check_group_size(k, self.group_size, scheme.rotation, self.name)
        if scheme.pairs:
            check_even(k, self.group_size, self.name)
        self.geometry = Geometry(k, self.group_size, self.kind)
        self.int8 = scheme.int8_products
        widths = scheme.widths
        if self.int8 and self.geometry.k_padded * len(widths) > K_MAX:
            raise QuantizationError(
                f"{len(widths)} passes of K={k}, {self.geometry.k_padded} with padding; int8 products are exact for "
                f"{K_MAX} columns in all",
                self.name,
            )
        self.set_bits = list(widths) if len(set(widths)) > 1 else [widths[0]]
        self._rotation = rotation_for(RotationSpec(self.kind, self.group_size, k, scheme.seeds))
        self._rotates_one = len(self.set_bits) == 1 and can_rotate(self.kind, self.group_size, k)
        self._one_norm = _has_one_norm(scheme, self.geometry)
        self._row_norm = False
        self._read: Reading[list[Books]] | None = None
        units = self.geometry.units * len(widths) // len(self.set_bits)
        norms_shape = n, len(widths) * self.geometry.groups
        buffers: dict[str, Tensor | None] = {
            "norms": torch.empty(norms_shape, dtype=NORM_DTYPES[scheme.norm_dtype], device=device),
            NORM_SCALE: torch.empty(n, dtype=torch.float64, device=device) if scheme.norm_dtype == "e4m3" else None,
        }
        for i, bits in enumerate(self.set_bits):
            part = empty_set(n, units, bits, self.geometry, self.int8, scheme.pairs, device)
            buffers |= zip(SET_KEYS[i], part, strict=True)
        return buffers

    @classmethod
    def _quantize_all(cls, layers: Sequence[Self], weights: Sequence[Tensor], known: Sequence[Known]) -> None:
        moments, names = [one.second_moment for one in known], [layer.name for layer in layers]
        found = quantize_weights(weights, layers[0].scheme, moments, names, [one.row_absmax for one in known])
        for layer, weight, passes in zip(layers, weights, found, strict=True):
            layer._set_passes(passes, weight.device)

    @classmethod
    @in_plain_state
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
                values, ascending. Two of one width have the same codebook. A codebook of pairs goes with one pass.
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
        layer._settle(torch.float32)
        return layer.eval()

    @property
    def passes(self) -> list[RotatedCodebook]:
        """The weight as it was quantized, indices unpacked; new memory."""
        return [self._pass(p) for p in range(len(self.scheme.widths))]

    @in_plain_state
    def dequantized_weight(self) -> Tensor:
        """float32 ``[N, K]``: the sum of the passes, rotated back."""
        return dequantize(self.passes)

    def rows(self, ids: Tensor) -> Tensor:
        """See `Linear.rows`; bitwise, except for the rotation ``qr``: its float32 products depend on device and R."""
        return look_up_rows(ids, *self.row_operands, self.norm_scale)

    @property
    def row_operands(self) -> RowOperands:
        """What rows are made of, except ``norm_scale``."""
        sets, scheme = self.sets(), self.scheme
        units, codebooks = [part.units for part in sets], [part.codebook for part in sets]
        rotated = self.kind, self.group_size, scheme.seeds, self.in_features
        return units, self.norms, codebooks, self.set_bits, *rotated

    def table(self, dtype: torch.dtype) -> CodebookTable | None:
        """See `Linear.table`; None with offsets, e4m3 norms, or what `qcut.ops.embed.can_embed` does not name."""
        fits = type(self) is CodebookLinear and can_embed(self.kind, self.group_size, self.in_features)
        fits = fits and self.norm_scale is None
        return CodebookTable(self, dtype) if fits else None

    @property
    def signs(self) -> Tensor:
        """The operands of the rotation, on the weight's device; see `qcut.numerics.codebook.tokens.operands`."""
        return self._rotation.operands_for(self.norms)

    def row_buffers(self) -> dict[str, Tensor]:
        """All but the codebooks."""
        return {key: buffer for key, buffer in super().row_buffers().items() if not key.endswith("codebook")}

    def stored(self) -> dict[str, StateEntry]:
        """The tensors of the state dict, by key, each made when it is read."""
        n, k = self.out_features, self.in_features
        stored: dict[str, StateEntry] = {}
        for p, (bits, keys) in enumerate(zip(self.scheme.widths, PASS_KEYS, strict=False)):
            part, _, _ = self._place(p)
            sources = (part.units, self.norms, part.codebook)
            codebook = codebook_shape(bits, self.scheme.pairs)
            shapes = ((n, packing.packed_bytes(k, bits)), (n, self.geometry.groups), codebook)
            dtypes = (torch.uint8, self.norms.dtype, torch.float32)
            for key, source, shape, dtype in zip(keys, sources, shapes, dtypes, strict=True):
                identity = (key, *tensor_key(source))
                stored[key] = StateEntry(shape, dtype, identity, _reader(self, p, key, shape, dtype))
        if self.norm_scale is not None:
            stored[NORM_SCALE] = StateEntry.of(self.norm_scale)
        if self.bias is not None:
            stored["bias"] = StateEntry.of(self.bias)
        return stored

    def state_problem(self, state: Mapping[str, Tensor]) -> tuple[str, str] | None:
        """See `Linear.state_problem`: finite norms from 0 up, and codebooks that ascend, if due in equal steps."""
        for _, norms, values in PASS_KEYS[: len(self.scheme.widths)]:
            if found := out_of_range(state[norms], 0.0):
                return norms, f"found {found}; finite values from 0 are allowed"
            book = state[values]
            if self.scheme.pairs:
                if not pairs.are_symmetric(book):
                    return values, f"found other points; {pairs.SYMMETRIC}, are allowed"
                continue
            if out_of_range(book) or not bool((book.diff() > 0).all()):
                return values, f"found {book.tolist()}; finite values, ascending, are allowed"
            fixed = fixed_values(self.scheme.levels, self.scheme.bits, book.device)
            if fixed is not None and not torch.equal(book, fixed.to(book.dtype)):
                return values, f"found {book.tolist()}; {self.scheme.name} has {fixed.tolist()}"
            if NORM_SCALE in state:
                if problem := scale_problem(state[NORM_SCALE]):
                    return NORM_SCALE, problem
            elif self.scheme.levels == "e2m1" and not float4.are_powers_of_two(state[norms]):
                return norms, f"found others than powers of two; {self.scheme.name} has these and 0"
        first, second = PASS_KEYS[0][2], PASS_KEYS[1][2]
        if len(set(self.scheme.widths)) < len(self.scheme.widths) and not torch.equal(state[first], state[second]):
            return second, f"differs from {first}; passes of one width have one codebook"
        return super().state_problem(state)

    def extra_repr(self) -> str:
        """Sizes, bias, scheme and activation, for ``print(model)``."""
        bits = 8 * self.weight_bytes / (self.in_features * self.out_features)
        return f"{super().extra_repr()}, bits_per_weight={bits:.2f}"

    # ── products ─────────────────────────────────────────────────────────────────────────────────

    @property
    def reads(self) -> tuple[object, ...]:
        """What layers have in common that can read the same rotated rows: the rotation, and whether rows are int8."""
        return self._rotation, self.int8

    def rotation_of(self, like: Tensor, *, routed: bool = False) -> RotationArguments | None:
        """How an operator is to rotate rows that it makes for this layer, or None if the layer takes plain tokens.

        A single row is rotated in the product's kernel, except if it is routed to experts.

        Args:
            like: a tensor with the rows' number, dtype and device.
            routed: whether `routed` multiplies the rows.
        """
        least, most = (1, MOST_PREPARED) if routed else (2, math.inf)
        if not least <= len(like) <= most or like.dtype not in _HALVES or not by_kernels(like.device):
            return None
        if not can_rotate(self.kind, self.group_size, self.in_features):
            return None
        tokens = torch.int8 if self.int8 else like.dtype
        return RotationArguments(self._rotation.operands_for(like), self.group_size, self.scheme.seeds, tokens)

    def forward_rotated(self, blocks: Tensor, scale: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        """Applies the layer to rows that were rotated before, as `rotation_of` says.

        Args:
            blocks: of the rows, and
            scale: float32 ``[M]``, or ``[0]``, as `torch.ops.qcut.rotate_tokens` gives them.
            rows: M.
            dtype: of the rows before, and of the result.

        Returns:
            ``[M, N]``, bitwise what `forward` makes of the rows.
        """
        return self._multiplied(blocks, scale, rows, dtype)

    def quantized_tokens(self, x: Tensor) -> Tensor | None:
        """See `Linear.quantized_tokens`."""
        return None if self.int8 else x.float()

    @property
    def largest_tile(self) -> int:
        """See `Linear.largest_tile`: group scales take the registers of 256 tokens."""
        if self.kind == "qr":
            return MOST_GATHERED
        return 256 if self.int8 or self.geometry.slot > UNIT_COLUMNS // 4 else 128

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
        """See `Linear.routed`: products of one set, with one codebook for all experts."""
        one, b, dtype = stack.form, stack.tensors, x.dtype
        if len(one.set_bits) > 1 or not (dtype in _HALVES or (one.int8 and dtype is torch.float32)):
            return None
        books = stack.read(("codebook",), _common_books)
        if books is None or (tiles.ordered and one.kind == "qr"):
            return None
        if isinstance(x, Tensor):
            rotated = one._rotated_routes(x, tiles, per_row, gate)
            # What wrote the routes has ended when the rotation begins, or the kernel before the activation.
            early = one.kind != "qr"
        else:
            rotated, early = cast(RotatedTokens, x), False  # the kernel just before writes the routes
        weight = b["units"], b["packed_norms"], b["fold"], b["col_scale"], books[torch.float16 if one.int8 else dtype]
        y: Tensor = torch.ops.qcut.codebook_experts(
            rotated.blocks, rotated.scale if one.int8 else None, rotated.tokens, per_row, tiles.experts, tiles.routes,
            *weight, b["bias"], one.set_bits[0], one.activation, dtype, early, weights,
        )  # fmt: skip
        return y

    def _rotated_routes(self, x: Tensor, tiles: RouteTiles, per_row: int, gate: GatedSilu | None) -> RotatedTokens:
        """The tokens of routes, rotated, in the order of tiles if they are ``ordered``; see `Linear.routed`."""
        operands, dtype = self._rotation.operands_for(x), x.dtype
        groups = self.group_size, self.scheme.seeds, torch.int8 if self.int8 else dtype
        rotates = not tiles.ordered and dtype in _HALVES and can_rotate(self.kind, self.group_size, self.in_features)
        if gate is not None and rotates:
            blocks, scale = _ACTIVATE(*x.chunk(2, -1), operands, *groups, *gate)
        else:
            x = gated(x, gate)
            if self.kind == "qr":
                blocks, scale = torch.ops.qcut.rotate_tokens.early_read(x, operands, self.kind, *groups)
            else:
                routes = tiles.routes if tiles.ordered else None
                blocks, scale = torch.ops.qcut.rotate_routes(x, operands, self.kind, *groups, routes, per_row)
        return RotatedTokens(blocks, scale, len(x), dtype)

    def _product(self, x: Tensor) -> Tensor:
        refuse_stored(self.__dict__, layer_prefix(self.name))
        return self._by_kernel(x) if by_kernels(x.device) else self._by_reference(x, self.activation)

    def _by_reference(self, x: Tensor, activation: str) -> Tensor:
        """The product through rotated tokens and dequantized weights, on any device and in any type of x."""
        sets = self.sets()
        y: Tensor = _REFERENCE(
            x,
            units=[part.units for part in sets],
            packed_norms=[part.packed_norms[..., :2] for part in sets],  # without offsets
            fold=[part.fold for part in sets] if self.int8 else [],
            col_scale=[part.col_scale for part in sets],
            norms=float4.float_norms(self.norms, self.norm_scale) if self.norm_scale is not None else self.norms,
            codebooks=[part.codebook for part in sets],
            bias=self._buffers["bias"],
            bits=self.set_bits,
            kind=self.kind,
            group_size=self.group_size,
            seeds=self.scheme.seeds,
            activation=activation,
        )
        return y

    def _by_kernel(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        if dtype not in _HALVES and not (self.int8 and dtype is torch.float32):
            allowed = "float16, bfloat16" + (", float32" if self.int8 else "")
            raise DtypeError(f"x is {dtype_name(dtype)}; {self.scheme.name} computes in {allowed} on CUDA")
        m = x.numel() // self.in_features
        if m == 1 and self._rotates_one and dtype in _HALVES:
            row = (
                x if x.dim() == 2 else x.reshape(1, self.in_features),
                self._rotation.operands_for(x),
                self.group_size,
                self.scheme.seeds,
            )
            last = self._buffers["bias"], self.set_bits[0], self.activation, None, dtype
            return self._as_result(_GEMV(*row, *self._whole(dtype), *last), x)
        blocks, scale = shared.rotate(self, self._rotation, x, torch.int8 if self.int8 else dtype)
        return self._as_result(self._multiplied(blocks, scale, m, dtype), x)

    def _whole(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """The first set of weights and its codebook, as products take them with results of a dtype."""
        b = self._buffers  # nn.Module finds buffers through a slow __getattr__; this is the hot path
        book = self._books()[0][torch.float16 if self.int8 else dtype]
        return b["units"], b["packed_norms"], b["fold"], b["col_scale"], book

    def _multiplied(self, blocks: Tensor, row_scale: Tensor, m: int, dtype: torch.dtype) -> Tensor:
        """The product ``[m, N]`` of rotated tokens."""
        bias = self._buffers["bias"]
        scale = row_scale if self.int8 else None
        if len(self.set_bits) == 1:
            whole = self._whole(dtype)  # reads the codebook, on which the last option depends
            options = self.set_bits[0], self.activation, None, dtype, self._row_norm
            y: Tensor = _GEMM(blocks, scale, m, *whole, bias, *options)
            return y
        # One product for each set: the second adds the result of the first, and the activation comes last.
        sets, books, halves = self.sets(), self._books(), torch.float16 if self.int8 else dtype
        counts = [part.units.shape[1] * UNIT_COLUMNS * blocks.element_size() // 128 for part in sets]
        total: Tensor | None = None
        for i, (part, of_set) in enumerate(zip(sets, blocks.split(counts), strict=True)):
            weight = *part[:4], books[i][halves]
            added = bias if i else None
            total = _GEMM(of_set, scale, m, *weight, added, self.set_bits[i], "none", total, torch.float32)
        return apply_activation(cast(Tensor, total), self.activation).to(dtype)

    def _as_result(self, y: Tensor, x: Tensor) -> Tensor:
        """``[..., N]`` of y ``[M, N]``; even a view that changes nothing takes time."""
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)

    def _books(self) -> list[Books]:
        """The codebooks as 16-bit values on the host, from which launches take them."""
        read = self._read
        if read is None or not (torch.compiler.is_compiling() or read.holds_for(self._buffers)):
            tensors = [cast(Tensor, self._buffers[key]) for key in self._codebook_keys]
            books = [{dtype: products.pack_book(codebook, dtype) for dtype in _HALVES} for codebook in tensors]
            read = self._read = Reading(self._buffers, self._codebook_keys, books)
            self._row_norm = self._one_norm and products.has_one_table(tensors[0])
        return read.value

    @property
    def _codebook_keys(self) -> Sequence[str]:
        return _CODEBOOK_KEYS[: len(self.set_bits)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        read = self._read
        super()._apply(fn, recurse)
        # Moving changes no value: the call that follows need not wait for the device.
        self._read = None if read is None else Reading(self._buffers, self._codebook_keys, read.value)
        return self

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    def sets(self) -> list[CodebookSet]:
        """What each product reads of the weight: one set, or one a pass if the passes have two widths."""
        buffers = cast(dict[str, Any], self._buffers)
        return [CodebookSet(*[buffers[key] for key in keys]) for keys in SET_KEYS[: len(self.set_bits)]]

    def _place(self, p: int) -> tuple[CodebookSet, slice, slice]:
        """The set that holds a pass, its units along K in the set, and its columns of ``norms``."""
        g, sets = self.geometry, self.sets()
        groups = slice(p * g.groups, (p + 1) * g.groups)
        if len(sets) > 1:
            return sets[p], slice(0, g.units), groups
        return sets[0], slice(p * g.units, (p + 1) * g.units), groups

    def _indices(self, p: int) -> Tensor:
        part, units, _ = self._place(p)
        return codebook_layout.unpack_units(
            part.units[:, units], self.scheme.widths[p], self.out_features, self.geometry
        )

    def _pass(self, p: int) -> RotatedCodebook:
        part, _, groups = self._place(p)
        return RotatedCodebook(
            self._indices(p),
            self.norms[:, groups].clone(),
            part.codebook.clone(),
            self.group_size,
            self.kind,
            self.scheme.seeds[p],
            None if self.norm_scale is None else self.norm_scale.clone(),
        )

    @in_plain_state
    def _set_passes(self, passes: Sequence[RotatedCodebook], device: torch.device) -> None:
        """Put quantized passes in the buffers, as new tensors on a device."""
        g = self.geometry
        norms = torch.cat([q.norms.to(device) for q in passes], 1)
        scale = passes[0].norm_scale
        norm_scale = None if scale is None else scale.to(device, torch.float64, copy=True)
        check_norms(norms, norm_scale, self.name)
        self.norms, self.norm_scale = norms, norm_scale
        per_set = len(passes) // len(self.set_bits)
        for i, bits in enumerate(self.set_bits):
            mine = passes[i * per_set : (i + 1) * per_set]
            own_norms = norms[:, i * per_set * g.groups : (i + 1) * per_set * g.groups]
            made = packed_set(mine, own_norms, norm_scale, bits, g, self.int8)
            self._buffers.update(zip(SET_KEYS[i], made, strict=True))
        self._books()

    def _stand_in(self) -> Tensor:
        return self.units.view(torch.int8).as_strided((self.out_features, self.in_features), (0, 0))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        refuse_foreign_saving(self.name)
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
        given = matching_state(state_dict, prefix, wanted, missing_keys, error_msgs)
        if strict:
            own = (key for key in state_dict if key.startswith(prefix) and "." not in key[len(prefix) :])
            unexpected_keys += [key for key in own if key[len(prefix) :] not in wanted]
        if len(given) < len(wanted) or any(t.is_meta for t in given.values()):
            return
        assign = local_metadata.get("assign_to_params_buffers", False)
        if self.norms.is_meta and not assign:
            return  # as torch does: a copy into a tensor without memory
        device = given["indices"].device if assign else self.norms.device
        passes = stored_passes(given, self.scheme, self.in_features, device)
        try:
            check_values(passes, self.name)
            self._set_passes(passes, device)
        except (ConfigError, QuantizationError) as error:
            error_msgs.append(f"{prefix or 'layer'}: {error}")
            return
        if self.bias is not None:
            self.bias = given["bias"].to(device) if assign else given["bias"].detach().to(device, copy=True)
        self._settle(self.weight_dtype)


def _reader(
    layer: CodebookLinear, p: int, key: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Callable[[], Tensor]:
    """Makes one tensor of the state dict."""

    def read() -> Tensor:
        if layer.norms.is_meta:
            return torch.empty(shape, dtype=dtype, device="meta")
        part, _, groups = layer._place(p)
        if key.endswith("norms"):
            return layer.norms[:, groups].detach().clone()
        if key.endswith("codebook"):
            return part.codebook.detach().clone()
        return packing.pack(layer._indices(p), layer.scheme.widths[p])

    return read


def _common_books(codebooks: Tensor) -> Books | None:
    """The codebook of all experts, ``[E, ...]``, as launches take it; None if they differ."""
    if not bool((codebooks == codebooks[:1]).all()):
        return None
    return {dtype: products.pack_book(codebooks[0], dtype) for dtype in _HALVES}


def _has_one_norm(scheme: Codebook, geometry: Geometry) -> bool:
    """Whether kernels may read one norm for a whole row of int8 values: one group, in slots of whole units."""
    whole = geometry.groups == 1 and geometry.slot == UNIT_COLUMNS
    return whole and scheme.int8_products and list(scheme.widths) == [4] and not scheme.pairs
