"""Tokens as the kernel before a layer leaves them: quantized, rotated, with their magnitudes, or in two forms."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

MOST_PREPARED = 64
"""Tokens up to which kernels that make them also prepare them for experts: those of decode steps.

Prefill was not measured so.
"""


class Int8Tokens(NamedTuple):
    """Tokens quantized by `torch.ops.qcut.quantize_per_token`, or rotated and quantized by ``quantize_rotated``.

    q is int8 ``[M, K_padded]``, scales are float32 ``[M]``.
    """

    q: Tensor
    scale: Tensor
    dtype: torch.dtype

    def project(self, layer: Any, absmax: Tensor | None) -> Tensor:
        """The layer's `W8A8Linear.forward_int8`, or that of `W8A8RotatedLinear`."""
        return cast(Tensor, layer.forward_int8(*self, absmax))


class TokensWithAbsmax(NamedTuple):
    """Tokens ``[M, K]``, and the largest magnitude of each, float32 ``[M]``."""

    x: Tensor
    absmax: Tensor

    def project(self, layer: Any, absmax: Tensor | None) -> Tensor:
        """The layer's `W8A8Linear.forward_with_absmax`."""
        return cast(Tensor, layer.forward_with_absmax(*self))


class RotatedTokens(NamedTuple):
    """M tokens of a dtype as blocks and scales of `torch.ops.qcut.rotate_tokens`."""

    blocks: Tensor
    scale: Tensor
    tokens: int
    dtype: torch.dtype

    def project(self, layer: Any, absmax: Tensor | None) -> Tensor:
        """The layer's `CodebookLinear.forward_rotated`."""
        return cast(Tensor, layer.forward_rotated(*self))


Prepared = Int8Tokens | RotatedTokens
"""Tokens as W8A8 layers read them, or layers with codebooks."""


class RotationArguments(NamedTuple):
    """How operators rotate the rows that they make, as they take it.

    Attributes:
        signs: int32, those of the rotation.
        group_size: columns of a group.
        seeds: one for each pass.
        out_dtype: type of the tokens.
        in_rows: whether tokens are rows of int8, and not blocks.
    """

    signs: Tensor
    group_size: int
    seeds: tuple[int, ...]
    out_dtype: torch.dtype
    in_rows: bool = False

    def prepared(self, rotated: Tensor, scale: Tensor, like: Tensor) -> Prepared:
        """What an operator has made of rows as ``like``, for `project`."""
        if self.in_rows:
            return Int8Tokens(rotated, scale, like.dtype)
        return RotatedTokens(rotated, scale, len(like), like.dtype)
