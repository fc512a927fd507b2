"""Llama, Mistral, Qwen2, Qwen3, SmolLM3: rotary positions, RMSNorms, keys for several queries each, a gated MLP."""

from __future__ import annotations

from typing import Any

from qcut.engine.decoder import MLP, AddNorm, Block, Decoder, HeadNorms, Heads, Rotary, SelfAttention
from qcut.engine.families.common import llama_like, window_of


def decoder(model: Any) -> Decoder:
    """The parts of a causal language model of Llama's shape; see `llama_like`."""
    return llama_like(model, _block, AddNorm.rms(model.model.norm))


def _block(block: Any, heads: Heads, rotary: Rotary) -> Block:
    attention, mlp = block.self_attn, block.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up = (mlp.gate_proj, mlp.up_proj)
    norms = None
    if hasattr(attention, "q_norm"):
        norms = HeadNorms(AddNorm.rms(attention.q_norm), AddNorm.rms(attention.k_norm))
    rotary_or_none = rotary if getattr(attention, "use_rope", True) else None
    return Block(
        attention_norm=AddNorm.rms(block.input_layernorm, qkv),
        attention=SelfAttention(
            qkv, attention.o_proj, heads, attention.scaling, norms, rotary_or_none, window=window_of(attention)
        ),
        mlp_norm=AddNorm.rms(block.post_attention_layernorm, gate_up),
        mlp=MLP(gate_up, mlp.act_fn, mlp.down_proj, gated=True),
    )
