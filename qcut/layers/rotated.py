"""Linear layers with rotated int8 weights and rotated int8 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from qcut.errors import ConfigError, layer_prefix
from qcut.layers.int8 import Int8Linear, W8A8Linear, int8_routed
from qcut.layers.linear import Known, Stacked, gated
from qcut.layers.rotations import RotationSpec, by_kernels, rotation_for, shared
from qcut.layers.tokens import RotationArguments
from qcut.numerics import int8 as numerics
from qcut.numerics.chunks import row_chunks
from qcut.numerics.codebook import rotation
from qcut.numerics.codebook.lookup import lookup_for
from qcut.numerics.codebook.tokens import quantize_rotated_ref
from qcut.numerics.routing import MOST_GATHERED, RouteTiles
from qcut.ops.codebook import can_rotate
from qcut.ops.linear import FEW_ELEMENTS
from qcut.schemes import K_MAX, LEAST_ROTATED_GROUP, Scheme, W8A8Rotated

if TYPE_CHECKING:
    from qcut.backends.cuda.launch.prebuild import LayerCall
    from qcut.layers.tokens import Prepared
    from qcut.numerics.gating import GatedSilu

_INT8 = torch.ops.qcut.int8_linear_pure.default
_OF_TOKENS = torch.ops.qcut.int8_linear.early_read
_QUANTIZE = torch.ops.qcut.quantize_rotated.default
_ACTIVATE = torch.ops.qcut.activate_rotated.early_read
_OF_ONE = torch.ops.qcut.w8a8_rotated_linear.early_read
_HALVES = (torch.float16, torch.bfloat16)


class W8A8RotatedLinear(Int8Linear, schemes=[W8A8Rotated]):
    """A W8A8 layer that rotates each token by groups of columns before it quantizes the token; sums are int32.

    Attributes:
        qweight: int8 ``[N, padded_k(K)]``: rows of the weight, rotated in float32, then quantized as those of ``w8a8``.
        weight_scale: float32 ``[N]``.

    Raises:
        ConfigError: a group, or the shorter last one, is no power of two.

    Exactness: bitwise ``int8_linear`` of `qcut.numerics.codebook.tokens.quantize_rotated_ref`.

    Source: docs/schemes.md, section 2.
    """

    scheme: W8A8Rotated

    k_max = K_MAX

    def _empty_buffers(self, device: torch.device | str | None) -> dict[str, Tensor | None]:
        k, self.group_size = self.in_features, self.scheme.group_columns(self.in_features)
        if not can_rotate_groups(self.group_size, k):
            full = min(self.group_size, k)
            raise ConfigError(
                f"{layer_prefix(self.name)}{self.scheme.name} rotates K={k} in groups of {full}, the last of "
                f"{k % full or full}; allowed: powers of two, in groups of {LEAST_ROTATED_GROUP} and more"
            )
        self._rotation = rotation_for(RotationSpec("hadamard", self.group_size, k, (self.scheme.seed,)))
        self._rotates_one = k <= FEW_ELEMENTS and can_rotate("hadamard", self.group_size, k)
        return super()._empty_buffers(device)

    @classmethod
    def cuda_calls(
        cls, scheme: Scheme, *, dtype: torch.dtype, rows: int, n: int, k: int, bias: bool, activation: str
    ) -> Sequence[LayerCall]:
        """See `Linear.cuda_calls`."""
        from qcut.backends.cuda.linear import RotatedLayer

        return [RotatedLayer(dtype, rows, n, k, cast(W8A8Rotated, scheme).group_columns(k), bias, activation)]

    @property
    def largest_tile(self) -> int:
        """See `Linear.largest_tile`: kernels that put rotated tokens in order give a shorter last group a factor."""
        return W8A8Linear.largest_tile if self._whole_groups else MOST_GATHERED

    @property
    def _whole_groups(self) -> bool:
        return self.in_features % min(self.group_size, self.in_features) == 0

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
        one, dtype = stack.form, x.dtype
        if tiles.ordered and not one._whole_groups:
            return None
        if not isinstance(x, Tensor):
            q, scale = x[:2]
        elif gate is not None and not tiles.ordered and (rotation := one.rotation_of(x)) is not None:
            q, scale = _ACTIVATE(*x.chunk(2, -1), *rotation[:4], *gate, True)
        else:
            x = gated(x, gate)
            signs, size, seed = one._rotation.operands_for(x), one.group_size, one.scheme.seed
            if tiles.ordered:
                groups = "hadamard", size, [seed], torch.int8
                q, scale = torch.ops.qcut.rotate_routes(x, signs, *groups, tiles.routes, per_row, natural=True)
            else:
                q, scale = _QUANTIZE(x, signs, size, seed)
        return int8_routed(stack, q, scale, dtype, tiles, per_row, weights)

    @property
    def reads(self) -> tuple[object, ...]:
        """What layers have in common that can read the same rotated rows: the rotation, and that they are no blocks."""
        return self._rotation, "int8 rows"

    def rotation_of(self, like: Tensor, *, routed: bool = False) -> RotationArguments | None:
        """How an operator is to rotate rows that it makes for this layer, or None if the layer takes plain tokens.

        Args:
            like: a tensor with the rows' dtype and device.
            routed: whether `routed` multiplies the rows, which changes nothing here.
        """
        if like.dtype not in _HALVES or not by_kernels(like.device):
            return None
        if not can_rotate("hadamard", self.group_size, self.in_features):
            return None
        signs = self._rotation.operands_for(like)
        return RotationArguments(signs, self.group_size, (self.scheme.seed,), torch.int8, in_rows=True)

    def forward_int8(self, q: Tensor, scale: Tensor, dtype: torch.dtype, absmax: Tensor | None = None) -> Tensor:
        """See `W8A8Linear.forward_int8`; tokens are those of ``torch.ops.qcut.quantize_rotated``."""
        b = self._buffers
        y: Tensor = _OF_TOKENS(q, scale, b["qweight"], b["weight_scale"], b["bias"], self.activation, dtype, absmax)
        return y

    def table(self, dtype: torch.dtype) -> None:
        """See `Linear.table`: no operator rotates int8 rows back."""

    def dequantized_weight(self) -> Tensor:
        """float32 ``[N, K]``: ``f32(q[n, k]) * weight_scale[n]``, rotated back."""
        return self._rotated_back(super().dequantized_weight())

    def rows(self, ids: Tensor) -> Tensor:
        """See `Linear.rows`; bitwise the rows of `dequantized_weight`."""
        return self._rotated_back(super().rows(ids))

    def quantized_tokens(self, x: Tensor) -> Tensor:
        """See `Linear.quantized_tokens`; rotated back."""
        q, scale = quantize_rotated_ref(x, self.group_size, self.scheme.seed, x.shape[1])
        return self._rotated_back(numerics.dequantize_ref(q, scale))

    def _rotated_back(self, rows: Tensor) -> Tensor:
        size = self.group_size
        constants = lookup_for("hadamard", size, self.in_features, self.scheme.seed, rows.device)
        return rotation.rotate_groups_back_by(rows, "hadamard", size, constants.inverse_rotations)

    def _quantize(self, weight: Tensor, known: Known) -> None:
        # Two copies of a chunk at a time, and one float32 copy of the weight.
        rotated = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in row_chunks(*weight.shape):
            rotated[rows] = rotation.rotate_groups(weight[rows], "hadamard", self.group_size, self.scheme.seed)
        super()._quantize(rotated, known._replace(row_absmax=None))

    def _product(self, x: Tensor) -> Tensor:
        b, k = self._buffers, self.in_features
        y: Tensor
        if self._rotates_one and x.numel() == k and x.dtype in _HALVES and by_kernels(x.device):
            signs = self._rotation.operands_for(x)
            weight = b["qweight"], b["weight_scale"], b["bias"], self.activation
            y = _OF_ONE(x if x.dim() == 2 else x.reshape(1, k), signs, self.group_size, self.scheme.seed, *weight)
            return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)
        q, scale = shared.rotate(self, self._rotation, x, torch.int8, in_rows=True)
        y = _INT8(q, scale, b["qweight"], b["weight_scale"], b["bias"], self.activation, x.dtype)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)


def can_rotate_groups(group_size: int, k: int) -> bool:
    """Whether all groups of K columns are powers of two, as a Hadamard rotation requires."""
    full = min(group_size, k)
    return not full & (full - 1) and not k % full & (k % full - 1)
