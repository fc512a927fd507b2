"""Llama, Mistral, Qwen2, Qwen3, SmolLM3: rotary positions, RMSNorms, keys for several queries each, a gated MLP.

Mixtral, Qwen2-MoE and Qwen3-MoE: the same with mixtures of experts in place of all MLPs, or of some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qcut.engine.decoder import AddNorm, Block, Decoder, FeedForward, HeadNorms, Heads, Rotary, SelfAttention
from qcut.engine.families.common import llama_like, window_of
from qcut.engine.families.mixtures import mlp_of


def decoder(model: Any) -> Decoder:
    """The parts of a causal language model of Llama's shape; see `llama_like` and `mlp_of`."""
    return llama_like(model, block_of, AddNorm.rms(model.model.norm))


def block_of(
    block: Any,
    heads: Heads,
    rotary: Rotary,
    mlp_of: Callable[[Any], FeedForward] = mlp_of,
) -> Block:
    """A block of Llama's shape.

    Args:
        block: a layer of transformers' model.
        heads: the model's.
        rotary: the model's.
        mlp_of: makes the part after attention; see `qcut.engine.families.mixtures.mlp_of`.
    """
    attention, mlp = block.self_attn, mlp_of(block)
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    norms = None
    if hasattr(attention, "q_norm"):
        norms = HeadNorms(AddNorm.rms(attention.q_norm), AddNorm.rms(attention.k_norm))
    rotary_or_none = rotary if getattr(attention, "use_rope", True) else None
    return Block(
        attention_norm=AddNorm.rms(block.input_layernorm, qkv),
        attention=SelfAttention(
            qkv, attention.o_proj, heads, attention.scaling, norms, rotary_or_none, window=window_of(attention)
        ),
        mlp_norm=AddNorm.rms(block.post_attention_layernorm, mlp.readers),
        mlp=mlp,
    )
