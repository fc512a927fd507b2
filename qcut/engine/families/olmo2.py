"""OLMo 2: as Llama, with norms after attention and MLP in place of before, and of whole queries and keys."""

from __future__ import annotations

from typing import Any

from qcut.engine.decoder import MLP, AddNorm, Block, Decoder, HeadNorms, Heads, Rotary, SelfAttention
from qcut.engine.families.common import llama_like


def decoder(model: Any) -> Decoder:
    """The parts of an ``Olmo2ForCausalLM``; see `llama_like`."""
    return llama_like(model, _block, AddNorm.rms(model.model.norm))


def _block(block: Any, heads: Heads, rotary: Rotary) -> Block:
    attention, mlp = block.self_attn, block.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    norms = HeadNorms(AddNorm.rms(attention.q_norm), AddNorm.rms(attention.k_norm))
    return Block(
        attention_norm=None,
        attention=SelfAttention(qkv, attention.o_proj, heads, attention.scaling, norms, rotary),
        mlp_norm=None,
        mlp=MLP((mlp.gate_proj, mlp.up_proj), mlp.act_fn, mlp.down_proj, gated=True),
        attention_end=AddNorm.rms(block.post_attention_layernorm),
        mlp_end=AddNorm.rms(block.post_feedforward_layernorm),
    )
