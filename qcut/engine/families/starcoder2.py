"""Starcoder2: rotary positions, LayerNorms, keys and values for several queries each, an MLP without a gate."""

from __future__ import annotations

from typing import Any

from qcut.engine.decoder import MLP, AddNorm, Block, Decoder, Heads, Rotary, SelfAttention
from qcut.engine.families.common import llama_like, window_of


def decoder(model: Any) -> Decoder:
    """The parts of a ``Starcoder2ForCausalLM``; see `llama_like`."""
    return llama_like(model, _block, AddNorm.layer(model.model.norm))


def _block(block: Any, heads: Heads, rotary: Rotary) -> Block:
    attention, mlp = block.self_attn, block.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    return Block(
        attention_norm=AddNorm.layer(block.input_layernorm, qkv),
        attention=SelfAttention(
            qkv, attention.o_proj, heads, attention.scaling, rotary=rotary, window=window_of(attention)
        ),
        mlp_norm=AddNorm.layer(block.post_attention_layernorm, [mlp.c_fc]),
        mlp=MLP((mlp.c_fc,), mlp.act, mlp.c_proj, gated=False),
    )
