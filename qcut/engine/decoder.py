"""A decoder-only transformer as data, and a token's way through it: from its id, block by block, to logits.

`Decoder` holds the modules of a Hugging Face model, sorted by what they do; `qcut.engine.families` sorts them. Linear
layers are called. Norms, activations and embeddings are kernels of qcut that read the modules' weights. Attention is an
argument: `qcut.engine.attention` has one for prompts and one for steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, NamedTuple, Protocol, TypeGuard, cast

import torch
from torch import Tensor, nn

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.config import W8A8
from qcut.layers.base import Linear
from qcut.layers.embedding import table_of
from qcut.layers.stacking import Stacker
from qcut.ops.w8a8 import FEW_ELEMENTS, FEW_ROWS

# ── rows between modules ─────────────────────────────────────────────────────────────────────────


class Int8Rows(NamedTuple):
    """Rows of ``dtype``, quantized by `torch.ops.qcut.quantize_per_token`: int8 ``[R, K_padded]``, float32 ``[R]``."""

    q: Tensor
    scale: Tensor
    dtype: torch.dtype


class RowsWithAbsmax(NamedTuple):
    """Rows ``[R, K]``, and the largest magnitude of each, float32 ``[R]``."""

    x: Tensor
    absmax: Tensor


Rows = Tensor | Int8Rows | RowsWithAbsmax


def takes_int8(module: nn.Module) -> TypeGuard[Linear]:
    """Whether a module is a linear layer that computes with int8 rows and a scale for each."""
    return isinstance(module, Linear) and module.scheme == W8A8()


def takes_absmax(module: nn.Module, rows: int) -> bool:
    """Whether a module quantizes so few rows itself, given the largest magnitude of each."""
    return takes_int8(module) and rows <= FEW_ROWS and rows * module.in_features <= FEW_ELEMENTS


def project(module: nn.Module, rows: Rows, absmax: Tensor | None = None) -> Tensor:
    """Apply a linear layer to rows.

    Args:
        module: a linear layer; rows other than a tensor are for those that `takes_int8`.
        rows: R rows of K elements.
        absmax: float32 ``[R]``, raised to the largest magnitudes of the result; with `Int8Rows` alone.

    Returns:
        ``[R, N]``.
    """
    if isinstance(rows, Int8Rows):
        return cast(Linear, module).forward_int8(*rows, absmax)
    if isinstance(rows, RowsWithAbsmax):
        return cast(Linear, module).forward_noted(*rows)
    return cast(Tensor, module(rows))


# ── parts of a block ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class AddNorm:
    """A sum, and its norm.

    Attributes:
        norm: RMSNorm, or LayerNorm.
        module: has the weight, and the bias if there is one.
        eps: under the root.
        k_padded: columns of the int8 rows that all readers of the norm take; None where a reader takes floats.
    """

    norm: Literal["rms", "layer"]
    module: nn.Module
    eps: float
    k_padded: int | None

    @classmethod
    def rms(cls, module: nn.Module, eps: float, readers: Sequence[nn.Module] = ()) -> AddNorm:
        """An RMSNorm whose result is read by these linear layers; by none: as floats."""
        return cls("rms", module, eps, _int8_columns(readers))

    @classmethod
    def layer(cls, module: nn.LayerNorm, readers: Sequence[nn.Module] = ()) -> AddNorm:
        """A LayerNorm whose result is read by these linear layers; by none: as floats."""
        return cls("layer", module, module.eps, _int8_columns(readers))

    def __call__(self, x: Tensor, unadded: Tensor | None) -> tuple[Tensor, Rows]:
        """``x + unadded``, or x where there is nothing to add, and the norm of that; ``[R, hidden]`` each."""
        weight, bias = cast(Tensor, self.module.weight), getattr(self.module, "bias", None)
        given = (x, unadded, weight, bias, self.norm == "layer", self.eps)
        rows: Rows
        if self.k_padded is None:
            total, rows = torch.ops.qcut.add_norm(*given)
        else:
            total, q, scale = torch.ops.qcut.add_norm_int8(*given, self.k_padded)
            rows = Int8Rows(q, scale, x.dtype)
        return x if unadded is None else total, rows


def _int8_columns(readers: Sequence[nn.Module]) -> int | None:
    columns = {module.qweight.shape[1] if takes_int8(module) else None for module in readers}
    return columns.pop() if len(columns) == 1 else None


class Heads(NamedTuple):
    """Heads of a token.

    Attributes:
        queries: their number.
        keys: the number of keys, and of values; each serves ``queries / keys`` queries.
        size: elements of a head.
    """

    queries: int
    keys: int
    size: int

    def split(self, projected: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[R, queries, size]``, keys and values ``[R, keys, size]`` of three projections, or of one."""
        if len(projected) == 3:
            q, k, v = (part.view(len(part), -1, self.size) for part in projected)
        else:
            (rows,) = projected
            q, k, v = rows.view(len(rows), -1, self.size).split((self.queries, self.keys, self.keys), 1)
        return q, k, v


Attend = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Tensor]
"""Attention of one layer: what `Attention` is called with, but for the layer."""


@dataclass(frozen=True)
class SelfAttention:
    """Projections to queries, keys and values, attention, and the projection of its heads.

    Attributes:
        projections: to queries, keys and values: three modules, or one whose result is all of them.
        output: of the heads, side by side.
        heads: of a token.
        scaling: of the scores.
    """

    projections: tuple[nn.Module, ...]
    output: nn.Module
    heads: Heads
    scaling: float

    def __call__(self, rows: Rows, attend: Attend, absmax: Tensor | None) -> Tensor:
        """``[R, hidden]``; ``absmax``, zeros ``[R]``, tells ``output`` the largest magnitudes of what it reads."""
        q, k, v = self.heads.split([project(module, rows) for module in self.projections])
        mixed = attend(q, k, v, self.scaling, absmax)
        return project(self.output, mixed if absmax is None else RowsWithAbsmax(mixed, absmax))


ActivationName = Literal["silu_mul", "gelu_tanh"]
_ACTIVATION_CLASSES = {"gelu_tanh": ("NewGELUActivation", "GELUTanh"), "silu_mul": ("SiLUActivation", "SiLU")}
"""Classes of modules that the operators of ``torch.ops.qcut`` stand for."""


def activation_of(module: nn.Module, name: ActivationName) -> ActivationName | nn.Module:
    """An operator where the module computes the same, else the module.

    A model's configuration does not say: a quantized layer's epilogue may have taken the activation over.
    """
    return name if type(module).__name__ in _ACTIVATION_CLASSES[name] else module


@dataclass(frozen=True)
class MLP:
    """Projections up, an activation, a projection down.

    Attributes:
        projections: up; of a gated MLP gate and up, or one module whose result is both.
        activation: of the result, or of the gate, which then multiplies up: an operator of ``torch.ops.qcut``, or a
            module.
        down: back to the hidden size.
        gated: whether there is a gate.
    """

    projections: tuple[nn.Module, ...]
    activation: ActivationName | nn.Module
    down: nn.Module
    gated: bool

    def __call__(self, rows: Rows, absmax: Tensor | None) -> Tensor:
        """``[R, hidden]``; ``absmax``, zeros ``[R]``, tells ``down`` the largest magnitudes of what it reads."""
        module = self.activation if isinstance(self.activation, nn.Module) else None
        # A projection whose epilogue is the activation knows the magnitudes of its own result.
        fused = isinstance(module, nn.Identity) and isinstance(rows, Int8Rows) and not self.gated
        if module is not None and not fused:
            absmax = None
        parts = [project(up, rows, absmax if fused else None) for up in self.projections]
        if self.gated:
            gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
            y = torch.ops.qcut.silu_mul(gate, up, absmax) if module is None else module(gate) * up
        else:
            y = torch.ops.qcut.gelu_tanh(parts[0], absmax) if module is None else module(parts[0])
        return project(self.down, y if absmax is None else RowsWithAbsmax(y, absmax))


class BlockAbsmax(NamedTuple):
    """Zeros ``[R]`` for the magnitudes of what a block's output and down projections read; None where not asked for."""

    attention: Tensor | None
    mlp: Tensor | None


_NO_ABSMAX = BlockAbsmax(None, None)


@dataclass(frozen=True)
class Block:
    """One layer of a decoder: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    The last sum of a block is left to the first norm of the next.
    """

    attention_norm: AddNorm
    attention: SelfAttention
    mlp_norm: AddNorm
    mlp: MLP

    def __call__(self, x: Tensor, unadded: Tensor | None, attend: Attend, absmax: BlockAbsmax) -> tuple[Tensor, Tensor]:
        """Two summands of the result from two summands of the input, ``[R, hidden]`` each."""
        x, rows = self.attention_norm(x, unadded)
        attended = self.attention(rows, attend, absmax.attention)
        x, rows = self.mlp_norm(x, attended)
        return x, self.mlp(rows, absmax.mlp)


# ── the decoder ──────────────────────────────────────────────────────────────────────────────────


class Attention(Protocol):
    """Attention of all layers, at the positions of the tokens that are read.

    Attributes:
        raises_absmax: whether calls may be given an ``absmax``.
    """

    raises_absmax: ClassVar[bool]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, absmax: Tensor | None) -> Tensor:
        """Keep a layer's new keys and values, and mix the values of all tokens up to each query's own.

        Args:
            layer: its index.
            q: ``[R, queries, D]``, before rotations; may be overwritten.
            k: ``[R, keys, D]``, before rotations.
            v: ``[R, keys, D]``.
            scaling: of the scores.
            absmax: float32 ``[R]``, raised to the largest magnitudes of the result, or None.

        Returns:
            Heads side by side, ``[R, queries * D]``.
        """
        ...


@dataclass(frozen=True)
class Decoder:
    """A model's parts. Modules are the model's own, but for those that `stacked` makes: nothing is copied.

    Attributes:
        architecture: name of the model's class.
        tokens: embedding of token ids.
        positions: embedding of positions, or None.
        rotary: module that gives cosines and sines ``[1, T, D]`` of positions, or None.
        blocks: in order.
        norm: after the last block.
        head: from the last norm to logits.
        heads: of a token.
        vocabulary: number of token ids.
        context: most tokens that the model was made for.
        window: most tokens that attention looks back on, or None.
        dtype: of activations.
        device: of the weights.
    """

    architecture: str
    tokens: nn.Module
    positions: nn.Module | None
    rotary: nn.Module | None
    blocks: tuple[Block, ...]
    norm: AddNorm
    head: nn.Module
    heads: Heads
    vocabulary: int
    context: int
    window: int | None
    dtype: torch.dtype
    device: torch.device

    def __call__(self, ids: Tensor, positions: Tensor, batch: int, attention: Attention) -> tuple[Tensor, Tensor]:
        """Read tokens.

        Args:
            ids: int64 ``[R]``, R = batch T, a sequence's after another's, each in the vocabulary.
            positions: int32 ``[R]``.
            batch: sequences.
            attention: looks back from these positions.

        Returns:
            Two summands of the last block's result, ``[R, hidden]`` each; `logits` takes them.
        """
        x, unadded = self.embed(ids, positions, batch), None
        absmax = self._absmax(len(ids)) if attention.raises_absmax else [_NO_ABSMAX] * len(self.blocks)
        for i, (block, of_block) in enumerate(zip(self.blocks, absmax, strict=True)):
            x, unadded = block(x, unadded, partial(attention, i), of_block)
        return x, cast(Tensor, unadded)

    def logits(self, x: Tensor, unadded: Tensor) -> Tensor:
        """Logits ``[R, vocabulary]`` of rows whose two summands are x and ``unadded``."""
        _, rows = self.norm(x, unadded)
        return project(self.head, rows)

    def embed(self, ids: Tensor, positions: Tensor, batch: int) -> Tensor:
        """Rows ``[R, hidden]`` that the first block reads; arguments as of the call.

        Exactness: bitwise the sum of what the modules return.
        """
        tokens, places = table_of(self.tokens), None
        if self.positions is not None:
            places = table_of(self.positions)
        plain = places is not None and places.scale is None and places.dtype is self.dtype
        if tokens is not None and tokens.dtype is self.dtype and (plain or self.positions is None):
            more = (None, None) if places is None else (positions, places.rows)
            return cast(Tensor, torch.ops.qcut.embed_rows(ids, tokens.rows, tokens.scale, *more, self.dtype))
        x: Tensor = self.tokens(ids.view(batch, -1))
        if self.positions is not None:
            x = x + self.positions(positions.view(batch, -1).long())
        return x.flatten(0, 1)

    def rotary_tables(self, context: int) -> tuple[Tensor | None, Tensor | None]:
        """Cosines and sines ``[context, D]`` in the model's dtype, by its own module; None without rotations."""
        if self.rotary is None:
            return None, None
        example = torch.empty(0, dtype=self.dtype, device=self.device)
        places = torch.arange(context, device=self.device)[None]
        cos, sin = self.rotary(example, places)
        return cos[0], sin[0]

    def stacked(self, model: nn.Module) -> Decoder:
        """The decoder with one product for queries, keys and values, and one for gate and up, where there can be.

        Weights of the model are moved, a set at a time; see `qcut.layers.stacking`.

        Args:
            model: what the decoder was made of.

        Raises:
            RuntimeError: torch's, where memory for the next set is short. Sets before it stay as they are then.
        """
        stacker = Stacker(model)
        blocks = []
        for block in self.blocks:
            attention = replace(block.attention, projections=stacker.joined(block.attention.projections))
            mlp = replace(block.mlp, projections=stacker.joined(block.mlp.projections))
            blocks.append(replace(block, attention=attention, mlp=mlp))
        if stacker.moved_bytes and self.device.type == "cuda":
            torch.cuda.empty_cache()  # what the weights left behind: torch keeps it, in pieces too small for the next
        return replace(self, blocks=tuple(blocks))

    def _absmax(self, rows: int) -> list[BlockAbsmax]:
        """Of each block, for R rows."""
        wanted = [[takes_absmax(m, rows) for m in (b.attention.output, b.mlp.down)] for b in self.blocks]
        if not any(map(any, wanted)):
            return [_NO_ABSMAX] * len(wanted)
        zeros = torch.zeros((len(wanted), 2, rows), dtype=torch.float32, device=self.device)
        return [
            BlockAbsmax(z[0] if attention else None, z[1] if mlp else None)
            for z, (attention, mlp) in zip(zeros, wanted, strict=True)
        ]
