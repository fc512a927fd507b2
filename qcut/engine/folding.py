"""A decoder's blocks with their norms folded into int8 products: two kernels of a block less in a step.

The product before a norm adds the residual, and notes the largest magnitudes by which the product behind the norm
quantizes; that one computes the norm (`qcut.ops.folded_norms`). The first norm of all and the last are kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, cast

from torch import Tensor, nn

from qcut.engine.decoder import (
    FOLDED_ROWS,
    AddNorm,
    Attention,
    Block,
    BlockAbsmax,
    Decoder,
    FoldedNorm,
    NormedRows,
    Onto,
    Rows,
    takes_int8,
)
from qcut.errors import ConfigError
from qcut.layers.int8 import W8A8Linear
from qcut.numerics.folded_norms import column_sums
from qcut.ops.linear import FEW_ELEMENTS


def folded_norm(norm: AddNorm, readers: Sequence[nn.Module]) -> FoldedNorm:
    """A norm as the layers that read it compute it, all of which take int8."""
    gain, shift = cast(Tensor, norm.module.weight), getattr(norm.module, "bias", None)

    def terms(layer: W8A8Linear) -> tuple[Tensor | None, Tensor | None]:
        if norm.norm == "rms":
            return None, layer.bias
        weight = layer.qweight, layer.weight_scale
        bias = layer.weight_scale.new_zeros(layer.out_features) if layer.bias is None else layer.bias
        return column_sums(*weight, gain), bias if shift is None else bias + column_sums(*weight, shift)

    return FoldedNorm(gain, norm.eps, {layer: terms(cast(W8A8Linear, layer)) for layer in readers})


def check_foldable(decoder: Decoder) -> None:
    """Raise ConfigError, with what is in the way, where a block's norms cannot be folded."""
    if decoder.device.type == "cuda":
        from qcut.cuda.folded_norms import check_kernels

        check_kernels(decoder.device.index)
    for i, block in enumerate(decoder.blocks):
        if obstacle := _obstacle(block):
            raise ConfigError(f"fold_norms: block {i} {obstacle}")
        for role, layer in _layers(block):
            if not takes_int8(layer):
                raise ConfigError(f"fold_norms: block {i}: {role} is {_kind(layer)}; allowed: layers of w8a8")
            if layer.in_features > FEW_ELEMENTS // FOLDED_ROWS:
                columns = f"{role} reads {layer.in_features} columns"
                raise ConfigError(f"fold_norms: block {i}: {columns}; allowed: up to {FEW_ELEMENTS // FOLDED_ROWS}")


class FoldedBlock(NamedTuple):
    """A block between whose products no norm is.

    Attributes:
        block: its parts.
        attention_norm: the norm before attention; None where it is not folded.
        mlp_norm: the norm before the MLP.
        next_gain: weight of the norm behind the block; None where it is not folded.
    """

    block: Block
    attention_norm: FoldedNorm | None
    mlp_norm: FoldedNorm
    next_gain: Tensor | None


class FoldedBlocks(NamedTuple):
    """All blocks of a decoder, in order; they take up to `FOLDED_ROWS` rows."""

    blocks: tuple[FoldedBlock, ...]

    @classmethod
    def of(cls, decoder: Decoder) -> FoldedBlocks:
        """Fold the norms of a decoder's blocks.

        Raises:
            ConfigError: see `check_foldable`.
        """
        check_foldable(decoder)
        blocks: list[FoldedBlock] = []
        gain = None
        for block in reversed(decoder.blocks):
            before = folded_norm(cast(AddNorm, block.attention_norm), block.attention.projections)
            mlp_norm = folded_norm(cast(AddNorm, block.mlp_norm), block.mlp.projections)
            blocks.insert(0, FoldedBlock(block, before if block is not decoder.blocks[0] else None, mlp_norm, gain))
            gain = before.gain
        return cls(tuple(blocks))

    def __call__(self, x: Tensor, attention: Attention, magnitudes: Sequence[BlockAbsmax]) -> Tensor:
        """The last block's result ``[R, hidden]`` from what the first reads."""
        absmax: Tensor | None = None
        for i, ((block, attention_norm, mlp_norm, next_gain), zeros) in enumerate(
            zip(self.blocks, magnitudes, strict=True)
        ):
            rows: Rows
            if attention_norm is None:
                _, rows = cast(AddNorm, block.attention_norm)(x, None)
            else:
                rows = NormedRows(x, cast(Tensor, absmax), attention_norm)
            onto = Onto(x, mlp_norm.gain, zeros.mlp_norm)
            x = block.attention(rows, partial(attention, i), zeros.attention, onto)
            absmax = None if next_gain is None else zeros.next_norm
            rows = NormedRows(x, cast(Tensor, zeros.mlp_norm), mlp_norm)
            x = block.mlp(rows, zeros.mlp, Onto(x, next_gain, absmax))
        return x


def _layers(block: Block) -> list[tuple[str, nn.Module]]:
    """The linear layers of a block, and what each does."""
    attention, mlp = block.attention, block.mlp
    return [
        *(("a projection to queries, keys and values", layer) for layer in attention.projections),
        ("attention's output", attention.output),
        *(("the projection up", layer) for layer in mlp.projections),
        ("the projection down", mlp.down),
    ]


def _kind(layer: nn.Module) -> str:
    scheme = getattr(layer, "scheme", None)
    return f"a {type(layer).__name__}" if scheme is None else f"of {scheme.name}"


def _obstacle(block: Block) -> str | None:
    """What of a block's form is in the way of folding."""
    if block.parallel:
        return "reads the same rows in attention and MLP; allowed: one behind the other"
    if block.attention_end is not None or block.mlp_end is not None:
        return "has norms behind attention or MLP; allowed: norms before them"
    if block.attention_norm is None or block.mlp_norm is None:
        return "lacks a norm before attention or MLP"
    if not (block.mlp.activated_by_kernel or block.mlp.activated_by_projection):
        return f"has the activation {type(block.mlp.activation).__name__}; allowed: those with a kernel"
    return None
