"""A decoder-only model as an engine sees it: what its layers are made of, whoever wrote the classes around them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.errors import UnsupportedError
from qcut.layers.embedding import table_of
from qcut.layers.int8 import W8A8Linear
from qcut.layers.stacking import Stacker
from qcut.models.modules import model_device

LLAMA_TYPES = ("llama", "mistral", "qwen2")
"""``model_type`` of configurations with Llama's shape: RMS norms, rotary positions, a gated MLP."""
MODEL_TYPES = ("gpt2", *LLAMA_TYPES)
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # of the others, frequencies depend on the length


class Int8Rows(NamedTuple):
    """Rows as `torch.ops.qcut.quantize_per_token` makes them of some of a dtype."""

    q: Tensor
    scale: Tensor
    dtype: torch.dtype


class NotedRows(NamedTuple):
    """Rows, and the largest magnitude of each."""

    x: Tensor
    absmax: Tensor


Rows = Tensor | Int8Rows | NotedRows


def is_dynamic(module: nn.Module) -> TypeGuard[W8A8Linear]:
    """Whether a module takes int8 rows with a scale for each."""
    return isinstance(module, W8A8Linear)


def project(module: nn.Module, x: Rows, absmax: Tensor | None = None) -> Tensor:
    """A linear layer of rows ``[R, K]``; of int8 rows, ``absmax`` is raised to its result's largest magnitudes."""
    if isinstance(x, Int8Rows):
        return cast(W8A8Linear, module).forward_int8(*x, absmax)
    if isinstance(x, NotedRows):
        return cast(W8A8Linear, module).forward_with_absmax(*x)
    return cast(Tensor, module(x))


@dataclass(frozen=True)
class DecoderNorm:
    """A norm of rows.

    Attributes:
        module: has its weight and bias.
        layer: a LayerNorm; else an RMSNorm.
        eps: under the root.
        k_padded: columns of its int8 rows, where all that read it take those; else None.
    """

    module: nn.Module
    layer: bool
    eps: float
    k_padded: int | None = None

    def of_sum(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Rows]:
        """``x + residual``, or x, and its norm; ``[R, hidden]``."""
        weight, bias = cast(Tensor, self.module.weight), getattr(self.module, "bias", None)
        y: Rows
        if self.k_padded is None:
            total, y = torch.ops.qcut.add_norm(x, residual, weight, bias, self.layer, self.eps)
        else:
            arguments = (x, residual, weight, bias, self.layer, self.eps, self.k_padded)
            total, q, scale = torch.ops.qcut.add_norm_int8(*arguments)
            y = Int8Rows(q, scale, x.dtype)
        return x if residual is None else total, y


@dataclass(frozen=True)
class DecoderMLP:
    """Projections up, an activation, a projection down.

    Attributes:
        projections: up; of a gated one, gate and up, or one module whose result is both.
        gated: the gate goes through the activation and multiplies up; else up goes through it.
        activation: silu_mul or gelu_tanh (``torch.ops.qcut``), or a module where neither is meant.
        down: back to the hidden size.
    """

    projections: tuple[nn.Module, ...]
    gated: bool
    activation: str | nn.Module
    down: nn.Module

    def __call__(
        self, norm: DecoderNorm, x: Tensor, residual: Tensor, absmax: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``x + residual``, and the MLP of its norm; ``[R, hidden]``.

        ``absmax``, zeros ``[R]``, is where the projection down finds the largest magnitudes of its rows: only for one
        that `is_dynamic`.
        """
        x, rows = norm.of_sum(x, residual)
        module = self.activation if isinstance(self.activation, nn.Module) else None
        # The product knows what comes out of it.
        fused = isinstance(module, nn.Identity) and isinstance(rows, Int8Rows) and not self.gated
        if module is not None and not fused:
            absmax = None
        parts = [project(up, rows, absmax if fused else None) for up in self.projections]
        if self.gated:
            gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
            y = torch.ops.qcut.silu_mul(gate, up, absmax) if module is None else module(gate) * up
        else:
            y = torch.ops.qcut.gelu_tanh(parts[0], absmax) if module is None else module(parts[0])
        return x, project(self.down, y if absmax is None else NotedRows(y, absmax))


@dataclass(frozen=True)
class DecoderLayer:
    """One block: ``x + output(attention(norm(x)))``, then ``x + mlp(norm(x))``.

    Attributes:
        attention_norm: before the attention.
        projections: of the normed x to queries, keys and values: three modules, or one whose result is all of them.
        output: of the heads, side by side.
        mlp_norm: before the MLP.
        mlp: after it.
        scaling: of the attention's scores.
    """

    attention_norm: DecoderNorm
    projections: tuple[nn.Module, ...]
    output: nn.Module
    mlp_norm: DecoderNorm
    mlp: DecoderMLP
    scaling: float

    def project(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``x + residual``, or x, and each projection of its norm; ``[R, hidden]``."""
        x, rows = self.attention_norm.of_sum(x, residual)
        return x, tuple(project(module, rows) for module in self.projections)


@dataclass(frozen=True)
class Decoder:
    """A model's parts. Modules are the model's own, but for those that `stacked` makes: nothing is copied.

    Attributes:
        architecture: name of the model's class.
        layers: in order.
        tokens: embedding of token ids.
        positions: embedding of positions, or None.
        rotary: module that gives cosines and sines ``[1, T, D]`` of positions, or None.
        norm: after the last layer.
        head: from the last norm to logits.
        heads: queries of a token.
        kv_heads: keys and values of a token.
        head_size: elements of each.
        vocabulary: number of token ids.
        context: most tokens that the model was made for.
        window: most tokens that attention looks back on, or None.
        dtype: of activations.
        device: of the weights.
    """

    architecture: str
    layers: tuple[DecoderLayer, ...]
    tokens: nn.Module
    positions: nn.Module | None
    rotary: nn.Module | None
    norm: DecoderNorm
    head: nn.Module
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context: int
    window: int | None
    dtype: torch.dtype
    device: torch.device

    def stacked(self, model: nn.Module) -> Decoder:
        """The decoder with one product for queries, keys and values, and one for gate and up, where there can be.

        Weights of the model are moved, a set at a time; see `qcut.layers.stacking`.

        Args:
            model: what the decoder was made of.

        Raises:
            RuntimeError: torch's, where memory for the next set is short. Sets before it stay as they are then.
        """
        stacker = Stacker(model)
        layers = tuple(
            replace(
                layer,
                projections=stacker.joined(layer.projections),
                mlp=replace(layer.mlp, projections=stacker.joined(layer.mlp.projections)),
            )
            for layer in self.layers
        )
        if stacker.moved_bytes and self.device.type == "cuda":
            torch.cuda.empty_cache()  # what the weights left behind: torch keeps it, in pieces too small for the next
        return replace(self, layers=layers)

    def embed(self, ids: Tensor, positions: Tensor, batch: int) -> Tensor:
        """What the first layer reads.

        Args:
            ids: int64 ``[batch T]``, a sequence's after another's, each in the vocabulary.
            positions: int32 ``[batch T]``.
            batch: sequences.

        Returns:
            ``[batch T, hidden]``.

        Exactness: bitwise the modules' sum.
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

    def rotary_tables(self, context: int) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines ``[context, D]`` in the model's dtype, by its own module; None without rotations."""
        if self.rotary is None:
            return None
        example = torch.empty(0, dtype=self.dtype, device=self.device)
        places = torch.arange(context, device=self.device)[None]
        cos, sin = self.rotary(example, places)
        return cos[0], sin[0]

    def heads_of(self, projected: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[R, heads, D]``, keys and values ``[R, kv_heads, D]``: views of what a layer projects."""
        if len(projected) == 3:
            q, k, v = (part.view(len(part), -1, self.head_size) for part in projected)
        else:
            (rows,) = projected
            q, k, v = rows.view(len(rows), -1, self.head_size).split((self.heads, self.kv_heads, self.kv_heads), 1)
        return q, k, v


def decoder_of(model: nn.Module) -> Decoder:
    """Take a Hugging Face causal language model apart.

    Args:
        model: GPT-2, or of Llama's shape (`MODEL_TYPES`); its linear layers and embeddings quantized or not.

    Raises:
        UnsupportedError: another architecture, or a part of one that is not built here; the message names it.
    """
    config: Any = getattr(model, "config", None)
    kind, name = getattr(config, "model_type", None), type(model).__name__
    if kind not in MODEL_TYPES or not name.endswith(("ForCausalLM", "LMHeadModel")):
        raise UnsupportedError(
            f"{name}: a model of type {kind!r}; allowed: causal language models of type {', '.join(MODEL_TYPES)}"
        )
    return _gpt2(model, config) if kind == "gpt2" else _llama(model, config)


def _refuse(model: nn.Module, what: str, allowed: str) -> UnsupportedError:
    return UnsupportedError(f"{type(model).__name__}: {what}; allowed: {allowed}")


def _gpt2(model: Any, config: Any) -> Decoder:
    if config.add_cross_attention:
        raise _refuse(model, "add_cross_attention is set", "attention to the model's own tokens")
    body = model.transformer
    layers = tuple(
        DecoderLayer(
            _norm(b.ln_1, b.attn.c_attn),
            (b.attn.c_attn,),
            b.attn.c_proj,
            _norm(b.ln_2, b.mlp.c_fc),
            DecoderMLP((b.mlp.c_fc,), False, _activation(b.mlp.act, "gelu_tanh"), b.mlp.c_proj),
            b.attn.scaling,
        )
        for b in body.h
    )
    return Decoder(
        architecture=type(model).__name__,
        layers=layers,
        tokens=body.wte,
        positions=body.wpe,
        rotary=None,
        norm=_norm(body.ln_f),
        head=model.lm_head,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_size=config.hidden_size // config.num_attention_heads,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        window=None,
        dtype=_dtype(body.ln_f),
        device=model_device(model),
    )


def _llama(model: Any, config: Any) -> Decoder:
    body = model.model
    rope = getattr(body.rotary_emb, "rope_type", "default")
    if rope not in _STATIC_ROPE:
        raise _refuse(model, f"rotary positions of type {rope!r}", ", ".join(_STATIC_ROPE))
    attention = body.layers[0].self_attn
    layers = tuple(
        DecoderLayer(
            _norm(b.input_layernorm, b.self_attn.q_proj, b.self_attn.k_proj, b.self_attn.v_proj),
            (b.self_attn.q_proj, b.self_attn.k_proj, b.self_attn.v_proj),
            b.self_attn.o_proj,
            _norm(b.post_attention_layernorm, b.mlp.gate_proj, b.mlp.up_proj),
            DecoderMLP(
                (b.mlp.gate_proj, b.mlp.up_proj),
                True,
                _activation(b.mlp.act_fn, "silu_mul"),
                b.mlp.down_proj,
            ),
            b.self_attn.scaling,
        )
        for b in body.layers
    )
    windowed = config.model_type == "mistral" or getattr(config, "use_sliding_window", False)
    return Decoder(
        architecture=type(model).__name__,
        layers=layers,
        tokens=body.embed_tokens,
        positions=None,
        rotary=body.rotary_emb,
        norm=_norm(body.norm),
        head=model.lm_head,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=attention.head_dim,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        window=getattr(config, "sliding_window", None) if windowed else None,
        dtype=_dtype(body.norm),
        device=model_device(model),
    )


_CLASSES = {"gelu_tanh": ("NewGELUActivation", "GELUTanh"), "silu_mul": ("SiLUActivation", "SiLU")}
"""Classes of modules that the operators of `torch.ops.qcut` stand for."""


def _activation(module: nn.Module, op: str) -> str | nn.Module:
    # The module, not the configuration, says what is done: a quantized layer's epilogue may have taken it over.
    return op if type(module).__name__ in _CLASSES[op] else module


def _norm(module: Any, *readers: nn.Module) -> DecoderNorm:
    layer = isinstance(module, nn.LayerNorm)
    padded = {m.qweight.shape[1] if is_dynamic(m) else None for m in readers}
    k_padded = padded.pop() if len(padded) == 1 else None
    return DecoderNorm(module, layer, float(module.eps if layer else module.variance_epsilon), k_padded)


def _dtype(norm: nn.Module) -> torch.dtype:
    return cast(Tensor, norm.weight).dtype
