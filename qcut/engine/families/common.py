"""Parts that several families share: decoders of Llama's shape, and windows of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from qcut.engine.decoder import AddNorm, Block, Decoder, Heads, Rotary
from qcut.engine.families.rotary import context_of, rotary_of
from qcut.models.modules import model_device

_BY_CONFIGURATION = ("mistral", "mixtral", "phi3", "starcoder2")
"""Models with windows only in their configurations; others ignore an entry there."""


def window_of(attention: Any) -> int:
    """Positions that a token of a layer attends to, its own the last; 0: all.

    Args:
        attention: transformers' module. Its own window counts, then that of its configuration.
    """
    window = getattr(attention, "sliding_window", None)
    if window is None and attention.config.model_type in _BY_CONFIGURATION:
        window = attention.config.sliding_window
    return 0 if window is None else int(window)


def heads_of(model: Any) -> Heads:
    """Heads of a model of Llama's shape."""
    config = model.config
    return Heads(config.num_attention_heads, config.num_key_value_heads, model.model.layers[0].self_attn.head_dim)


def decoder_from(
    model: Any,
    heads: Heads,
    blocks: Iterable[Block],
    norm: AddNorm,
    *,
    tokens: Any,
    head: Any,
    positions: Any = None,
    softcap: float | None = None,
) -> Decoder:
    """The decoder of a model from its parts."""
    return Decoder(
        architecture=type(model).__name__,
        tokens=tokens,
        positions=positions,
        blocks=tuple(blocks),
        norm=norm,
        head=head,
        heads=heads,
        vocabulary=model.config.vocab_size,
        context=context_of(model.config),
        dtype=norm.module.weight.dtype,  # type: ignore[arg-type]
        device=model_device(model),
        softcap=softcap,
    )


def llama_like(model: Any, block: Callable[[Any, Heads, Rotary], Block], norm: AddNorm) -> Decoder:
    """The decoder of a model of Llama's shape; all blocks have the same rotary positions.

    Raises:
        UnsupportedError: see `rotary_of`.
    """
    body, heads = model.model, heads_of(model)
    rotary, _ = rotary_of(model, body.rotary_emb, heads)
    blocks = (block(layer, heads, rotary) for layer in body.layers)
    return decoder_from(model, heads, blocks, norm, tokens=body.embed_tokens, head=model.lm_head)
