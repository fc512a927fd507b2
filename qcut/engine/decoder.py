"""A decoder-only transformer: its parts as data, and the computation from token ids through blocks to logits.

A `Decoder` holds the modules of a Hugging Face model by their role; `qcut.engine.families` makes decoders. Linear
layers are called as modules. Norms, activations and embeddings are computed by qcut's kernels from the modules'
weights. Attention is an argument: `qcut.engine.attention` has one class for prefill and one for decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from qcut.layers.codebook import CodebookLinear
from qcut.layers.embedding import Table, table_of
from qcut.layers.experts.experts import Experts, RoutedResults, summed
from qcut.layers.int8 import W8A8Linear
from qcut.layers.rotated import W8A8RotatedLinear
from qcut.layers.stacking import Stacker
from qcut.layers.tokens import Int8Tokens, Prepared, RotatedTokens, RotationArguments, TokensWithAbsmax
from qcut.ops.linear import FEW_ELEMENTS, FEW_ROWS

# ── activations between layers ──────────────────────────────────────────────────────────────────


class PreparedTokens(NamedTuple):
    """Tokens ``[M, K]``, and the same tokens as the layers of experts take them."""

    x: Tensor
    prepared: Prepared
    experts: Experts

    def project(self, layer: nn.Module, absmax: Tensor | None) -> Tensor:
        """The result of a layer, which takes the prepared tokens if the experts' layers take the same."""
        readers = (layer, self.experts)
        rotating = _rotating(readers)
        rotates = rotating is not None and rotating.rotation_of(self.x) is not None
        return project(layer, self.prepared if rotates or _int8_columns(readers) is not None else self.x, absmax)


Activations = Tensor | Int8Tokens | TokensWithAbsmax | RotatedTokens | PreparedTokens
Branch = Tensor | RoutedResults
"""What is added to the residual, ``[M, hidden]``, or results of routes that the next `AddNorm` adds on its way."""
Rotating = CodebookLinear | W8A8RotatedLinear
"""Layers that take tokens rotated."""


def takes_absmax(module: nn.Module, tokens: int) -> bool:
    """Whether a layer quantizes M tokens in its product, by their largest magnitudes."""
    return isinstance(module, W8A8Linear) and tokens <= FEW_ROWS and tokens * module.in_features <= FEW_ELEMENTS


def project(layer: nn.Module, x: Activations, absmax: Tensor | None = None) -> Tensor:
    """Apply a linear layer to M tokens of K elements, of a kind that the layer takes.

    Args:
        layer: a linear layer.
        x: tokens.
        absmax: float32 ``[M]``, raised to the largest magnitude of each token of the result; only with `Int8Tokens`.

    Returns:
        ``[M, N]``.
    """
    return cast(Tensor, layer(x)) if isinstance(x, Tensor) else x.project(layer, absmax)


# ── parts of a block ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class AddNorm:
    """Adds a branch to the residual, and normalizes the sum.

    Attributes:
        norm: RMSNorm or LayerNorm.
        module: holds the weight, and the bias if there is one.
        eps: added under the root.
        k_padded: columns of the normalized tokens in int8, if all layers that read them take int8; else None.
        rotating: one of the layers that read the normalized tokens, if all rotate alike; else None.
        experts: those that read the normalized tokens, next to layers that take plain ones; None: there are none.
    """

    norm: Literal["rms", "layer"]
    module: nn.Module
    eps: float
    k_padded: int | None
    rotating: Rotating | None = None
    experts: Experts | None = None

    @classmethod
    def rms(cls, module: Any, readers: Sequence[nn.Module] = ()) -> AddNorm:
        """An AddNorm with an RMSNorm; ``readers`` are all linear layers that read the result, or experts."""
        return cls("rms", module, module.variance_epsilon, *_read_by(readers))

    @classmethod
    def layer(cls, module: nn.LayerNorm, readers: Sequence[nn.Module] = ()) -> AddNorm:
        """An AddNorm with a LayerNorm; ``readers`` are all linear layers that read the result, or experts."""
        return cls("layer", module, module.eps, *_read_by(readers))

    def __call__(self, x: Tensor, branch: Branch | None) -> tuple[Tensor, Activations]:
        """The sum ``x + branch``, or x if ``branch`` is None, and the norm of the sum; ``[M, hidden]`` each."""
        weight, bias = cast(Tensor, self.module.weight), getattr(self.module, "bias", None)
        residual, routes = (branch.results, branch.weights) if isinstance(branch, RoutedResults) else (branch, None)
        given = (x, residual, weight, bias, self.norm == "layer", self.eps)
        experts, rotation, k_padded = self.experts, None, self.k_padded
        if experts is not None and not experts.takes_prepared(x):
            k_padded = None
        elif self.rotating is not None:
            rotation = self.rotating.rotation_of(x, routed=experts is not None)
        if rotation is None and k_padded is None:
            total, normed = torch.ops.qcut.add_norm.early_read(*given, routes)
            return x if branch is None else total, normed
        plain = None if experts is None else x.new_empty(x.shape)
        prepared: Prepared
        if rotation is not None:
            *turned, in_rows = rotation
            total, rotated, scale = torch.ops.qcut.add_norm_rotated.early_read(*given, *turned, plain, routes, in_rows)
            prepared = rotation.prepared(rotated, scale, x)
        else:
            total, q, scale = torch.ops.qcut.add_norm_int8.early_read(*given, k_padded, plain, routes)
            prepared = Int8Tokens(q, scale, x.dtype)
        both = prepared if experts is None or plain is None else PreparedTokens(plain, prepared, experts)
        return x if branch is None else total, both


def _read_by(readers: Sequence[nn.Module]) -> tuple[int | None, Rotating | None, Experts | None]:
    """``k_padded``, ``rotating`` and ``experts`` of an `AddNorm`."""
    experts = next((reader for reader in readers if isinstance(reader, Experts)), None)
    return _int8_columns(readers), _rotating(readers), experts


def _layers_of(readers: Sequence[nn.Module]) -> list[nn.Module]:
    """Linear layers that take tokens; of experts, a layer as all of them are."""
    return [
        reader.stacks[0].form if isinstance(reader, Experts) and reader.stacks is not None else reader
        for reader in readers
    ]


def _int8_columns(readers: Sequence[nn.Module]) -> int | None:
    layers = _layers_of(readers)
    columns = {layer.qweight.shape[1] if isinstance(layer, W8A8Linear) else None for layer in layers}
    return columns.pop() if len(columns) == 1 else None


def _rotating(readers: Sequence[nn.Module]) -> Rotating | None:
    """The first of layers that all rotate tokens alike; None if one does not."""
    layers = [layer for layer in _layers_of(readers) if isinstance(layer, Rotating)]
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
        """Queries ``[M, queries, size]``, keys and values ``[M, keys, size]`` of three projections, or of one."""
        if len(projected) == 3:
            q, k, v = (part.view(len(part), -1, self.size) for part in projected)
        else:
            (qkv,) = projected
            q, k, v = qkv.view(len(qkv), -1, self.size).split((self.queries, self.keys, self.keys), 1)
        return q, k, v


class Scores(NamedTuple):
    """How a layer computes attention scores.

    Attributes:
        scaling: factor of the products of queries and keys.
        window: positions that a query attends to, its own the last; 0: all up to its own.
        softcap: scores s become ``softcap * tanh(s / softcap)``; 0: they stay.
        sinks: float32 ``[queries]``, a further score of each head's softmax, which has no value; None: there is none.
    """

    scaling: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


class HeadWeights(NamedTuple):
    """Weights ``[D]`` of the RMSNorms of queries and of keys, and eps of both."""

    query: Tensor
    key: Tensor
    eps: float


class HeadNorms(NamedTuple):
    """RMSNorms of queries and of keys: of each head, or of all heads of a token together.

    Attributes:
        query: the norm of queries.
        key: the norm of keys.
        after_rotary: whether rotary positions come first.
    """

    query: AddNorm
    key: AddNorm
    after_rotary: bool = False

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized queries and keys ``[M, heads, D]``."""
        normed_q, normed_k = (
            cast(Tensor, norm(x.reshape(-1, len(cast(Tensor, norm.module.weight))), None)[1]).view(x.shape)
            for norm, x in ((self.query, q), (self.key, k))
        )
        return normed_q, normed_k

    def at_positions(self, q: Tensor, k: Tensor, tables: Tables, positions: Tensor) -> tuple[Tensor, Tensor, Tables]:
        """Normalized queries and keys ``[M, heads, D]``, and the tables by which they are to be rotated afterwards.

        Args:
            q: ``[M, heads, D]``.
            k: ``[M, heads, D]``.
            tables: of the layer.
            positions: of the tokens, int32 ``[M]``.
        """
        if self.after_rotary and tables[0] is not None:
            (cos, sin), half = (table[positions, None] for table in tables), q.shape[2] // 2
            q, k = (x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin for x in (q, k))
            tables = None, None
        return *self(q, k), tables

    def by_head(self, size: int) -> HeadWeights | None:
        """Weights of norms that normalize each head of so many elements before rotary positions; None for others."""
        query, key = (cast(Tensor, norm.module.weight) for norm in (self.query, self.key))
        if self.after_rotary or len(query) != size or len(key) != size or self.query.eps != self.key.eps:
            return None
        return HeadWeights(query, key, self.query.eps)


Attend = Callable[
    [Tensor, Tensor, Tensor, Scores, HeadNorms | None, Tensor | None, RotationArguments | None], Tensor | RotatedTokens
]
"""`Attention` of one layer: takes q, k, v, scores, norms, absmax and a rotation."""

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes an example of activations and positions int64 ``[1, T]``; returns cosines and sines ``[1, T, D]`` like it."""

Tables = tuple[Tensor, Tensor] | tuple[None, None]
"""Cosines and sines ``[context, D]`` of a layer's positions; None: the layer does not rotate."""


@dataclass(frozen=True)
class SelfAttention:
    """Projections to queries, keys and values, attention, and the output projection.

    Attributes:
        projections: three modules for queries, keys and values, or one module with all three in its result.
        output: the projection of the concatenated heads.
        heads: heads of a token.
        scaling: factor of the scores.
        norms: of queries and of keys, or None.
        rotary: makes cosines and sines of positions; None: no rotary positions.
        order: int64, columns of the concatenated projections in the order that ``heads`` and rotary pairs require;
            None: they are in that order.
        window: see `Scores`.
        softcap: see `Scores`.
        sinks: see `Scores`.
        clip: largest magnitude of queries, keys and values before rotary positions; larger ones become it. None: all
            stay.
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
    sinks: Tensor | None = None
    clip: float | None = None

    def stacked(self, stacker: Stacker) -> SelfAttention:
        """Attention with one product for queries, keys and values, if the layers allow it."""
        return replace(self, projections=stacker.joined(self.projections))

    def __call__(self, x: Activations, attend: Attend, absmax: Tensor | None) -> Tensor:
        """``[M, hidden]``; ``absmax``, zeros ``[M]``, is raised to the heads' largest magnitudes for ``output``."""
        projected = [project(module, x) for module in self.projections]
        if self.order is not None:
            projected = [torch.cat(projected, 1).index_select(1, self.order)]
        (q, k, v), norms = self.heads.split(projected), self.norms
        if self.clip is not None:
            if norms is not None:
                (q, k), norms = norms(q, k), None
            q, k, v = (t.clamp(-self.clip, self.clip) for t in (q, k, v))
        scores = Scores(self.scaling, self.window, self.softcap, self.sinks)
        rotating = _rotating([self.output])
        rotation = None if rotating is None else rotating.rotation_of(q)
        mixed: Activations = attend(q, k, v, scores, norms, absmax, rotation)
        if absmax is not None and isinstance(mixed, Tensor):
            mixed = TokensWithAbsmax(mixed, absmax)
        return project(self.output, mixed)


@cache
def kernel_activations(gated: bool) -> frozenset[type[nn.Module]]:
    """By ``MLP.gated``: classes of activations that the kernels ``gelu_tanh`` and ``silu_mul`` compute."""
    from transformers import activations

    names = ("SiLUActivation",) if gated else ("NewGELUActivation", "GELUTanh")
    found = {getattr(activations, name) for name in names if hasattr(activations, name)}
    return frozenset({nn.SiLU, *found} if gated else found)


class FeedForward(Protocol):
    """The part of a block after attention: a dense `MLP`, or a mixture of experts."""

    @property
    def readers(self) -> Sequence[nn.Module]:
        """All that read the tokens, as `AddNorm` takes them."""

    def __call__(self, x: Activations, absmax: Tensor | None) -> Branch:
        """``[M, hidden]`` of M tokens; ``absmax``, zeros ``[M]``, is scratch memory if `takes_absmax`."""

    def takes_absmax(self, tokens: int) -> bool:
        """Whether calls of M tokens need an ``absmax``."""

    def stacked(self, stacker: Stacker) -> FeedForward:
        """The same computation with projections of one input as one product, if the layers allow it."""


@dataclass(frozen=True)
class MLP:
    """Projections up, an activation, a projection down.

    Attributes:
        projections: the up projection; in a gated MLP gate and up, or one module with both in its result.
        activation: applied to the up projection, or to the gate, by which up is then multiplied. The module decides
            what is computed, not the model's configuration: a quantized projection may compute the activation, and
            ``nn.Identity`` then stands in its place.
        down: the projection back to the hidden size.
        gated: whether there is a gate.
    """

    projections: tuple[nn.Module, ...]
    activation: nn.Module
    down: nn.Module
    gated: bool

    @property
    def readers(self) -> tuple[nn.Module, ...]:
        """See `FeedForward`."""
        return self.projections

    @property
    def activated_by_kernel(self) -> bool:
        """Whether a kernel computes the activation."""
        return type(self.activation) in kernel_activations(self.gated)

    @property
    def activated_by_projection(self) -> bool:
        """Whether the projection up computes the activation, if it computes any."""
        return isinstance(self.activation, nn.Identity) and not self.gated

    def takes_absmax(self, tokens: int) -> bool:
        """See `FeedForward`."""
        return takes_absmax(self.down, tokens)

    def stacked(self, stacker: Stacker) -> MLP:
        """See `FeedForward`."""
        return replace(self, projections=stacker.joined(self.projections))

    def __call__(self, x: Activations, absmax: Tensor | None) -> Tensor:
        """``[M, hidden]``; ``absmax``, zeros ``[M]``, is raised to the largest magnitudes of ``down``'s tokens."""
        by_kernel = self.activated_by_kernel
        by_projection = self.activated_by_projection and isinstance(x, Int8Tokens)
        if not (by_kernel or by_projection):
            absmax = None  # no kernel computes the magnitudes
        parts = [project(up, x, absmax if by_projection else None) for up in self.projections]
        if self.gated:
            gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
        else:
            gate, up = parts[0], None
        rotating = _rotating([self.down]) if by_kernel else None
        rotation = None if rotating is None else rotating.rotation_of(gate)
        if rotation is not None:
            *turned, in_rows = rotation
            rotated, scale = torch.ops.qcut.activate_rotated.early_read(gate, up, *turned, in_rows=in_rows)
            return project(self.down, rotation.prepared(rotated, scale, gate))
        if up is not None:
            y = torch.ops.qcut.silu_mul(gate, up, absmax) if by_kernel else self.activation(gate) * up
        else:
            y = torch.ops.qcut.gelu_tanh(gate, absmax) if by_kernel else self.activation(gate)
        return project(self.down, y if absmax is None else TokensWithAbsmax(y, absmax))


BlockAbsmax = tuple[Tensor | None, Tensor | None]
"""Zeros ``[M]`` to be raised to the largest magnitudes of tokens, for ``attention`` and for ``mlp``; None: not used."""


@dataclass(frozen=True)
class Block:
    """One layer of a decoder: ``x + end(attention(norm(x)))``, then ``x + end(mlp(norm(x)))``.

    In a parallel block, both read the same x. The first norm of the next block adds the last branch of a block.

    Attributes:
        attention_norm: before attention, or None.
        attention: the block's.
        mlp_norm: before the MLP, or None.
        mlp: dense, or a mixture of experts.
        attention_end: after attention, or None.
        mlp_end: after the MLP, or None.
        parallel: the MLP reads what attention reads, not its sum.
        multiplier: of both branches, before they are added.
    """

    attention_norm: AddNorm | None
    attention: SelfAttention
    mlp_norm: AddNorm | None
    mlp: FeedForward
    attention_end: AddNorm | None = None
    mlp_end: AddNorm | None = None
    parallel: bool = False
    multiplier: float = 1.0

    def __call__(self, x: Tensor, branch: Branch | None, attend: Attend, absmax: BlockAbsmax) -> tuple[Tensor, Branch]:
        """Residual and last branch ``[M, hidden]`` of the result, from those of the input."""
        x, normed = _normed(self.attention_norm, x, branch)
        attended = self._ended(self.attention_end, self.attention(normed, attend, absmax[0]))
        x, normed = _normed(self.mlp_norm, x, None if self.parallel else attended)
        added = self._ended(self.mlp_end, self.mlp(normed, absmax[1]))
        return x, summed(added) + summed(attended) if self.parallel else added

    def stacked(self, stacker: Stacker) -> Block:
        """The block with projections of one input as one product, if the layers allow it."""
        return replace(self, attention=self.attention.stacked(stacker), mlp=self.mlp.stacked(stacker))

    def _ended(self, norm: AddNorm | None, branch: Branch) -> Branch:
        branch = branch if norm is None else cast(Tensor, norm(summed(branch), None)[1])
        return branch if self.multiplier == 1 else summed(branch) * self.multiplier


def _normed(norm: AddNorm | None, x: Tensor, branch: Branch | None) -> tuple[Tensor, Activations]:
    """The sum of residual and branch, and its norm, if there is one."""
    if norm is not None:
        return norm(x, branch)
    x = x if branch is None else x + summed(branch)
    return x, x


# ── the decoder ──────────────────────────────────────────────────────────────────────────────────


class Attention(Protocol):
    """Attention of all layers, at the positions of the tokens.

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
        rotation: RotationArguments | None,
    ) -> Tensor | RotatedTokens:
        """Append a layer's keys and values to the cache, and attend to all tokens up to each query's own.

        Args:
            layer: index of the layer.
            q: ``[M, queries, D]``, before norms and rotary positions; may be overwritten.
            k: ``[M, keys, D]``, before norms and rotary positions.
            v: ``[M, keys, D]``.
            scores: how the layer computes scores.
            norms: of queries and keys, or None.
            absmax: float32 ``[M]``, raised to the largest magnitudes of the result, or None.
            rotation: how the layer that reads the result rotates it, which attention may do, or None.

        Returns:
            Concatenated heads ``[M, queries * D]``, or the same rotated.
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
        softcap: logits become ``softcap * tanh(logits / softcap)``; None: they stay.
        embedding_multiplier: of embeddings.
        logits_divisor: of logits.
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
    embedding_multiplier: float = 1.0
    logits_divisor: float = 1.0

    def __call__(
        self, ids: Tensor, positions: Tensor, batch: int, attention: Attention
    ) -> tuple[Tensor, Tensor | None]:
        """Run all blocks.

        Args:
            ids: int64 ``[M]``, M = batch T, sequence after sequence, each id in the vocabulary.
            positions: int32 ``[M]``.
            batch: number of sequences.
            attention: attention of all layers at these positions.

        Returns:
            Residual ``[M, hidden]`` and the last block's branch, to be added to it by `logits`; or None as the branch.
        """
        memory, of_blocks = self._absmax(len(ids)) if attention.raises_absmax else self._no_absmax
        x, branch = self.embed(ids, positions, batch, memory), cast(Branch | None, None)
        x = x if self.embedding_multiplier == 1 else x * self.embedding_multiplier
        for i, (block, absmax) in enumerate(zip(self.blocks, of_blocks, strict=True)):
            x, branch = block(x, branch, partial(attention, i), absmax)
        return x, None if branch is None else summed(branch)

    @property
    def width(self) -> int:
        """Columns of hidden states."""
        return len(cast(Tensor, self.norm.module.weight))

    def logits(self, x: Tensor, branch: Tensor | None) -> Tensor:
        """Logits ``[M, vocabulary]`` of hidden states ``x + branch``, or x."""
        logits = project(self.head, self.norm(x, branch)[1])
        logits = logits if self.logits_divisor == 1 else logits / self.logits_divisor
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap

    def embed(self, ids: Tensor, positions: Tensor, batch: int, zeroed: Tensor | None = None) -> Tensor:
        """Embeddings ``[M, hidden]`` of M tokens.

        Args:
            ids: int64 ``[M]``.
            positions: int32 ``[M]``.
            batch: sequences; each has M / batch tokens.
            zeroed: float32, to which zeros are written, if possible by the same kernel: one that does nothing else
                would not begin before its predecessor ends; or None.

        Exactness: bitwise the sum of what the modules return.
        """
        tokens, of_positions = table_of(self.tokens), None
        if self.positions is not None:
            of_positions = table_of(self.positions)
        plain = isinstance(of_positions, Table) and of_positions.scale is None and of_positions.dtype is self.dtype
        if tokens is not None and tokens.dtype is self.dtype and (plain or self.positions is None):
            at, table = (positions, of_positions.rows) if isinstance(of_positions, Table) else (None, None)
            return tokens.embed(ids, at, table, zeroed)
        if zeroed is not None:
            zeroed.zero_()
        x: Tensor = self.tokens(ids.view(batch, -1))
        if self.positions is not None:
            x = x + self.positions(positions.view(batch, -1).long())
        return x.flatten(0, 1)

    def rotary_tables(self, context: int) -> tuple[Tables, ...]:
        """Cosines and sines ``[context, D]`` of each layer in the model's dtype, by its own modules."""
        example = torch.empty(0, dtype=self.dtype, device=self.device)
        positions = torch.arange(context, device=self.device, dtype=torch.int64)[None]

        @cache
        def tables(rotary: Rotary | None) -> Tables:
            if rotary is None:
                return None, None
            cos, sin = rotary(example, positions)
            return cos[0].to(self.dtype), sin[0].to(self.dtype)  # some models keep float32

        return tuple(tables(block.attention.rotary) for block in self.blocks)

    def stacked(self, model: nn.Module) -> Decoder:
        """The decoder with one product for queries, keys and values, and one for gate and up, if the layers allow it.

        Weights of the model are moved, a set at a time; see `qcut.layers.stacking`.

        Args:
            model: of the decoder.

        Raises:
            RuntimeError: torch's, if memory for the next set is short. Earlier sets stay stacked then.
        """
        stacker = Stacker(model)
        blocks = tuple(block.stacked(stacker) for block in self.blocks)
        if stacker.moved_bytes and self.device.type == "cuda":
            torch.cuda.empty_cache()  # the weights' former memory: torch caches it in pieces too small for the next
        return replace(self, blocks=blocks)

    @property
    def _no_absmax(self) -> tuple[None, list[BlockAbsmax]]:
        return None, [(None, None)] * len(self.blocks)

    def _absmax(self, tokens: int) -> tuple[Tensor | None, list[BlockAbsmax]]:
        """Memory to be zeroed, float32 ``[L, 2, M]`` of all blocks, and the parts of it that each block uses."""
        used = [(takes_absmax(b.attention.output, tokens), b.mlp.takes_absmax(tokens)) for b in self.blocks]
        if not any(map(any, used)):
            return self._no_absmax
        memory = torch.empty((len(used), 2, tokens), dtype=torch.float32, device=self.device)
        of_blocks = [
            (part[0] if a else None, part[1] if m else None) for part, (a, m) in zip(memory, used, strict=True)
        ]
        return memory, of_blocks
