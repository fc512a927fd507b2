"""A decoder-only transformer: its parts as data, and the computation from token ids through blocks to logits.

A `Decoder` holds the modules of a Hugging Face model by their role; `qcut.engine.families` makes decoders. Linear
layers are called as modules. Norms, activations and embeddings are computed by qcut's kernels from the modules'
weights. Attention is an argument: `qcut.engine.attention` has one class for prompts and one for steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar, Literal, NamedTuple, Protocol, TypeGuard, cast

import torch
from torch import Tensor, nn

from qcut.layers.codebook import CodebookLinear
from qcut.layers.embedding import Table, table_of
from qcut.layers.int8 import W8A8Linear
from qcut.layers.stacking import Stacker
from qcut.ops.linear import FEW_ELEMENTS, FEW_ROWS

# ── rows between modules ─────────────────────────────────────────────────────────────────────────


class Int8Rows(NamedTuple):
    """Rows quantized by `torch.ops.qcut.quantize_per_token`: int8 ``[R, K_padded]``, scales float32 ``[R]``."""

    q: Tensor
    scale: Tensor
    dtype: torch.dtype


class RowsWithAbsmax(NamedTuple):
    """Rows ``[R, K]``, and the largest magnitude of each, float32 ``[R]``."""

    x: Tensor
    absmax: Tensor


class RotatedRows(NamedTuple):
    """Rows ``[R, K]`` of a dtype as `torch.ops.qcut.rotate_tokens` makes blocks and scales of them."""

    blocks: Tensor
    scale: Tensor
    rows: int
    dtype: torch.dtype


Rows = Tensor | Int8Rows | RowsWithAbsmax | RotatedRows


def takes_int8(module: nn.Module) -> TypeGuard[W8A8Linear]:
    """Whether a module is a linear layer that computes with int8 rows and a scale for each."""
    return isinstance(module, W8A8Linear)


def takes_absmax(module: nn.Module, rows: int) -> bool:
    """Whether a module quantizes ``rows`` rows in its product, by their largest magnitudes."""
    return takes_int8(module) and rows <= FEW_ROWS and rows * module.in_features <= FEW_ELEMENTS


def project(module: nn.Module, rows: Rows, absmax: Tensor | None = None) -> Tensor:
    """Apply a linear layer to rows.

    Args:
        module: a linear layer. Rows other than a plain tensor need a layer for which `takes_int8` holds; rotated rows
            need a `CodebookLinear` that rotates so.
        rows: R rows of K elements.
        absmax: float32 ``[R]``, raised to the largest magnitude of each row of the result; only with `Int8Rows`.

    Returns:
        ``[R, N]``.
    """
    if isinstance(rows, Int8Rows):
        return cast(W8A8Linear, module).forward_int8(*rows, absmax)
    if isinstance(rows, RowsWithAbsmax):
        return cast(W8A8Linear, module).forward_with_absmax(*rows)
    if isinstance(rows, RotatedRows):
        return cast(CodebookLinear, module).forward_rotated(*rows)
    return cast(Tensor, module(rows))


# ── parts of a block ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class AddNorm:
    """Adds two tensors, and normalizes the sum.

    Attributes:
        norm: RMSNorm or LayerNorm.
        module: holds the weight, and the bias if there is one.
        eps: added under the root.
        k_padded: columns of the normalized rows in int8, where all linear layers that read them take int8; else None.
        rotating: a linear layer as which all rotate that read the normalized rows; else None.
    """

    norm: Literal["rms", "layer"]
    module: nn.Module
    eps: float
    k_padded: int | None
    rotating: CodebookLinear | None = None

    @classmethod
    def rms(cls, module: nn.Module, eps: float, readers: Sequence[nn.Module] = ()) -> AddNorm:
        """An AddNorm with an RMSNorm; ``readers`` are all linear layers that read the result."""
        return cls("rms", module, eps, _int8_columns(readers), _rotating(readers))

    @classmethod
    def layer(cls, module: nn.LayerNorm, readers: Sequence[nn.Module] = ()) -> AddNorm:
        """An AddNorm with a LayerNorm; ``readers`` are all linear layers that read the result."""
        return cls("layer", module, module.eps, _int8_columns(readers), _rotating(readers))

    def __call__(self, x: Tensor, unadded: Tensor | None) -> tuple[Tensor, Rows]:
        """The sum ``x + unadded``, or x where ``unadded`` is None, and the norm of the sum; ``[R, hidden]`` each."""
        weight, bias = cast(Tensor, self.module.weight), getattr(self.module, "bias", None)
        given = (x, unadded, weight, bias, self.norm == "layer", self.eps)
        rows: Rows
        rotation = None if self.rotating is None else self.rotating.rotation_of(x)
        if rotation is not None:
            total, blocks, scale = torch.ops.qcut.add_norm_rotated(*given, *rotation, constants=True)
            rows = RotatedRows(blocks, scale, len(x), x.dtype)
        elif self.k_padded is None:
            total, rows = torch.ops.qcut.add_norm(*given, constants=True)
        else:
            total, q, scale = torch.ops.qcut.add_norm_int8(*given, self.k_padded, constants=True)
            rows = Int8Rows(q, scale, x.dtype)
        return x if unadded is None else total, rows


def _int8_columns(readers: Sequence[nn.Module]) -> int | None:
    columns = {module.qweight.shape[1] if takes_int8(module) else None for module in readers}
    return columns.pop() if len(columns) == 1 else None


def _rotating(readers: Sequence[nn.Module]) -> CodebookLinear | None:
    """The first of layers that rotate rows alike; None where one does not."""
    layers = [module for module in readers if isinstance(module, CodebookLinear)]
    return layers[0] if len(layers) == len(readers) and len({layer.reads for layer in layers}) == 1 else None


class Heads(NamedTuple):
    """Heads of a token.

    Attributes:
        queries: number of query heads.
        keys: number of key heads and of value heads; each serves ``queries / keys`` query heads.
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


class Scores(NamedTuple):
    """How a layer's scores come about.

    Attributes:
        scaling: factor of the products of queries and keys.
        window: places that a query sees, its own the last; 0: all up to its own.
        softcap: scores s are ``softcap * tanh(s / softcap)``; 0: they stay.
    """

    scaling: float
    window: int = 0
    softcap: float = 0.0


class HeadWeights(NamedTuple):
    """Weights ``[D]`` of the RMSNorms of queries and of keys, and what is added under both roots."""

    query: Tensor
    key: Tensor
    eps: float


class HeadNorms(NamedTuple):
    """RMSNorms of queries and of keys before they are rotated: of each head, or of all heads of a row together."""

    query: AddNorm
    key: AddNorm

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized queries and keys of the same shapes, of ``[R, heads, D]``."""
        mine, theirs = (
            cast(Tensor, norm(x.reshape(-1, len(cast(Tensor, norm.module.weight))), None)[1]).view(x.shape)
            for norm, x in zip(self, (q, k), strict=True)
        )
        return mine, theirs

    def by_head(self, size: int) -> HeadWeights | None:
        """What normalizes each head of so many elements by itself; None where the norms do otherwise."""
        query, key = (cast(Tensor, norm.module.weight) for norm in self)
        if len(query) != size or len(key) != size or self.query.eps != self.key.eps:
            return None
        return HeadWeights(query, key, self.query.eps)


Attend = Callable[[Tensor, Tensor, Tensor, Scores, HeadNorms | None, Tensor | None], Tensor]
"""`Attention` of one layer: takes q, k, v, scores, norms and absmax."""

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes an example of activations and positions int64 ``[1, T]``; returns cosines and sines ``[1, T, D]`` like it."""

Tables = tuple[Tensor, Tensor] | tuple[None, None]
"""Cosines and sines ``[context, D]`` of a layer's positions; None: the layer does not rotate."""


@dataclass(frozen=True)
class SelfAttention:
    """Projections to queries, keys and values, attention over them, and a projection of its heads.

    Attributes:
        projections: three modules for queries, keys and values, or one module whose result holds all three.
        output: the projection of the heads, side by side.
        heads: heads of a token.
        scaling: factor of the scores.
        norms: of queries and of keys, before they are rotated; or None.
        rotary: makes cosines and sines of positions; None: nothing is rotated.
        order: int64, columns of the projections' results side by side, in the order that ``heads`` wants them in and
            rotations pair them in; None: they are in that order.
        window: see `Scores`.
        softcap: see `Scores`.
    """

    projections: tuple[nn.Module, ...]
    output: nn.Module
    heads: Heads
    scaling: float
    norms: HeadNorms | None = None
    rotary: Rotary | None = None
    order: Tensor | None = None
    window: int = 0
    softcap: float = 0.0

    def __call__(self, rows: Rows, attend: Attend, absmax: Tensor | None) -> Tensor:
        """``[R, hidden]``; ``absmax``, zeros ``[R]``, tells ``output`` the largest magnitudes of the heads."""
        projected = [project(module, rows) for module in self.projections]
        if self.order is not None:
            projected = [torch.cat(projected, 1).index_select(1, self.order)]
        q, k, v = self.heads.split(projected)
        mixed = attend(q, k, v, Scores(self.scaling, self.window, self.softcap), self.norms, absmax)
        return project(self.output, mixed if absmax is None else RowsWithAbsmax(mixed, absmax))


@cache
def kernel_activations(gated: bool) -> frozenset[type[nn.Module]]:
    """By ``MLP.gated``: classes of activations that the kernels ``gelu_tanh`` and ``silu_mul`` compute."""
    from transformers import activations

    names = ("SiLUActivation",) if gated else ("NewGELUActivation", "GELUTanh")
    found = {getattr(activations, name) for name in names if hasattr(activations, name)}
    return frozenset({nn.SiLU, *found} if gated else found)


@dataclass(frozen=True)
class MLP:
    """Projections up, an activation, a projection down.

    Attributes:
        projections: the projection up; in a gated MLP gate and up, or one module whose result holds both.
        activation: applied to the projection up, or to the gate, by which up is then multiplied.
        down: the projection back to the hidden size.
        gated: whether there is a gate.
    """

    projections: tuple[nn.Module, ...]
    activation: nn.Module
    down: nn.Module
    gated: bool

    @property
    def activated_by_kernel(self) -> bool:
        """Whether a kernel computes the activation."""
        return type(self.activation) in kernel_activations(self.gated)

    @property
    def activated_by_projection(self) -> bool:
        """Whether the projection up computes the activation, if it computes any."""
        return isinstance(self.activation, nn.Identity) and not self.gated

    def __call__(self, rows: Rows, absmax: Tensor | None) -> Tensor:
        """``[R, hidden]``; ``absmax``, zeros ``[R]``, tells ``down`` the largest magnitudes of the rows that it reads.

        The activation's module decides what is computed, not the model's configuration: a quantized projection may
        compute the activation, and ``nn.Identity`` then stands in its place.
        """
        by_kernel = self.activated_by_kernel
        by_projection = self.activated_by_projection and isinstance(rows, Int8Rows)
        if not (by_kernel or by_projection):
            absmax = None  # no kernel computes the magnitudes
        parts = [project(up, rows, absmax if by_projection else None) for up in self.projections]
        if self.gated:
            gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
        else:
            gate, up = parts[0], None
        rotating = _rotating([self.down]) if by_kernel else None
        rotation = None if rotating is None else rotating.rotation_of(gate)
        if rotation is not None:
            blocks, scale = torch.ops.qcut.activate_rotated(gate, up, *rotation, constants=True)
            return project(self.down, RotatedRows(blocks, scale, len(gate), gate.dtype))
        if up is not None:
            y = torch.ops.qcut.silu_mul(gate, up, absmax) if by_kernel else self.activation(gate) * up
        else:
            y = torch.ops.qcut.gelu_tanh(gate, absmax) if by_kernel else self.activation(gate)
        return project(self.down, y if absmax is None else RowsWithAbsmax(y, absmax))


class BlockAbsmax(NamedTuple):
    """Zeros ``[R]`` to be raised to the largest magnitudes of rows, or None where the projection does not use them.

    Attributes:
        attention: for the rows that ``attention.output`` reads.
        mlp: for the rows that ``mlp.down`` reads.
    """

    attention: Tensor | None
    mlp: Tensor | None


_NO_ABSMAX = BlockAbsmax(None, None)


class _Absmax(NamedTuple):
    """All blocks' magnitudes, and the memory that is to be zeroed before they are raised, or None."""

    memory: Tensor | None
    blocks: list[BlockAbsmax]


@dataclass(frozen=True)
class Block:
    """One layer of a decoder: ``x + end(attention(norm(x)))``, then ``x + end(mlp(norm(x)))``.

    In a parallel block, both read the same x. The first norm of the next block computes the last sum of a block.

    Attributes:
        attention_norm: before attention, or None.
        attention: the block's.
        mlp_norm: before the MLP, or None.
        mlp: the block's.
        attention_end: after attention, or None.
        mlp_end: after the MLP, or None.
        parallel: the MLP reads what attention reads, not its sum.
    """

    attention_norm: AddNorm | None
    attention: SelfAttention
    mlp_norm: AddNorm | None
    mlp: MLP
    attention_end: AddNorm | None = None
    mlp_end: AddNorm | None = None
    parallel: bool = False

    def __call__(self, x: Tensor, unadded: Tensor | None, attend: Attend, absmax: BlockAbsmax) -> tuple[Tensor, Tensor]:
        """Two summands of the result from two summands of the input, ``[R, hidden]`` each."""
        x, rows = _normed(self.attention_norm, x, unadded)
        attended = _ended(self.attention_end, self.attention(rows, attend, absmax.attention))
        x, rows = _normed(self.mlp_norm, x, None if self.parallel else attended)
        added = _ended(self.mlp_end, self.mlp(rows, absmax.mlp))
        return x, added + attended if self.parallel else added


def _normed(norm: AddNorm | None, x: Tensor, unadded: Tensor | None) -> tuple[Tensor, Rows]:
    """The sum of x and ``unadded``, and what the block's next part reads."""
    if norm is not None:
        return norm(x, unadded)
    x = x if unadded is None else x + unadded
    return x, x


def _ended(norm: AddNorm | None, x: Tensor) -> Tensor:
    """A result's norm, where it has one."""
    return x if norm is None else cast(Tensor, norm(x, None)[1])


# ── the decoder ──────────────────────────────────────────────────────────────────────────────────


class Attention(Protocol):
    """Attention of all layers, at the positions of the tokens that are read.

    Attributes:
        raises_absmax: whether calls may be given an ``absmax``.
    """

    raises_absmax: ClassVar[bool]

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Scores,
        norms: HeadNorms | None,
        absmax: Tensor | None,
    ) -> Tensor:
        """Keep a layer's new keys and values, and mix the values of all tokens up to each query's own.

        Args:
            layer: index of the layer.
            q: ``[R, queries, D]``, before norms and rotations; may be overwritten.
            k: ``[R, keys, D]``, before norms and rotations.
            v: ``[R, keys, D]``.
            scores: how the layer's scores come about.
            norms: of queries and keys, or None.
            absmax: float32 ``[R]``, raised to the largest magnitudes of the result, or None.

        Returns:
            Heads side by side, ``[R, queries * D]``.
        """
        ...


@dataclass(frozen=True)
class Decoder:
    """A model's parts. The modules are the model's own, except for those that `stacked` makes; nothing is copied.

    Attributes:
        architecture: name of the model's class.
        tokens: embedding of token ids.
        positions: embedding of positions, or None.
        blocks: the blocks in order.
        norm: the norm after the last block.
        head: the projection from the last norm's result to logits.
        heads: heads of a token.
        vocabulary: number of token ids.
        context: most tokens that the model was made for.
        dtype: dtype of activations.
        device: device of the weights.
        softcap: logits are ``softcap * tanh(logits / softcap)``; None: they are as the head makes them.
    """

    architecture: str
    tokens: nn.Module
    positions: nn.Module | None
    blocks: tuple[Block, ...]
    norm: AddNorm
    head: nn.Module
    heads: Heads
    vocabulary: int
    context: int
    dtype: torch.dtype
    device: torch.device
    softcap: float | None = None

    def __call__(
        self, ids: Tensor, positions: Tensor, batch: int, attention: Attention
    ) -> tuple[Tensor, Tensor | None]:
        """Read tokens.

        Args:
            ids: int64 ``[R]``, R = batch T, sequence after sequence, each id in the vocabulary.
            positions: int32 ``[R]``.
            batch: number of sequences.
            attention: attention of all layers at these positions.

        Returns:
            Two summands of the last block's result, ``[R, hidden]`` each, or the result and None; `logits` takes them.
        """
        absmax = self._absmax(len(ids)) if attention.raises_absmax else self._no_absmax()
        x, unadded = self.embed(ids, positions, batch, absmax.memory), None
        for i, (block, magnitudes) in enumerate(zip(self.blocks, absmax.blocks, strict=True)):
            x, unadded = block(x, unadded, partial(attention, i), magnitudes)
        return x, unadded

    def logits(self, x: Tensor, unadded: Tensor | None) -> Tensor:
        """Logits ``[R, vocabulary]`` of rows whose two summands are x and ``unadded``, or that are x."""
        _, rows = self.norm(x, unadded)
        logits = project(self.head, rows)
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap

    def embed(self, ids: Tensor, positions: Tensor, batch: int, zeroed: Tensor | None = None) -> Tensor:
        """Embeddings of R tokens ``[R, hidden]``, which the first block reads.

        Args:
            ids: int64 ``[R]``.
            positions: int32 ``[R]``.
            batch: sequences; each has R / batch tokens.
            zeroed: float32, to which zeros are written, if possible by the same kernel: one that does nothing else
                would not begin before its predecessor ends; or None.

        Exactness: bitwise the sum of what the modules return.
        """
        tokens, places = table_of(self.tokens), None
        if self.positions is not None:
            places = table_of(self.positions)
        plain = isinstance(places, Table) and places.scale is None and places.dtype is self.dtype
        if tokens is not None and tokens.dtype is self.dtype and (plain or self.positions is None):
            at, rows = (positions, places.rows) if isinstance(places, Table) else (None, None)
            return tokens.embed(ids, at, rows, zeroed)
        if zeroed is not None:
            zeroed.zero_()
        x: Tensor = self.tokens(ids.view(batch, -1))
        if self.positions is not None:
            x = x + self.positions(positions.view(batch, -1).long())
        return x.flatten(0, 1)

    def rotary_tables(self, context: int) -> tuple[Tables, ...]:
        """Cosines and sines ``[context, D]`` of each layer in the model's dtype, by its own modules."""
        example = torch.empty(0, dtype=self.dtype, device=self.device)
        places = torch.arange(context, device=self.device, dtype=torch.int64)[None]

        @cache
        def tables(rotary: Rotary | None) -> Tables:
            if rotary is None:
                return None, None
            cos, sin = rotary(example, places)
            return cos[0].to(self.dtype), sin[0].to(self.dtype)  # some models keep float32

        return tuple(tables(block.attention.rotary) for block in self.blocks)

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

    def _no_absmax(self) -> _Absmax:
        return _Absmax(None, [_NO_ABSMAX] * len(self.blocks))

    def _absmax(self, rows: int) -> _Absmax:
        """Memory for each block, all from one allocation."""
        wanted = [[takes_absmax(m, rows) for m in (b.attention.output, b.mlp.down)] for b in self.blocks]
        if not any(map(any, wanted)):
            return self._no_absmax()
        memory = torch.empty((len(wanted), 2, rows), dtype=torch.float32, device=self.device)
        blocks = [
            BlockAbsmax(*(zeros if of_block else None for zeros, of_block in zip(z, which, strict=True)))
            for z, which in zip(memory, wanted, strict=True)
        ]
        return _Absmax(memory, blocks)
