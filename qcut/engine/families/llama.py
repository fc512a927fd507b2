"""Llama, Mistral, Qwen2, Qwen3, SmolLM3: rotary positions, RMSNorms, keys for several queries each, a gated MLP."""

from __future__ import annotations

from typing import Any

from qcut.engine.decoder import MLP, AddNorm, Block, Decoder, HeadNorms, Heads, Rotary, SelfAttention
from qcut.engine.families.rotary import context_of, rotary_of
from qcut.engine.families.windows import window_of
from qcut.models.modules import model_device


def decoder(model: Any) -> Decoder:
    """The parts of a causal language model of Llama's shape.

    Raises:
        UnsupportedError: see `rotary_of`.
    """
    body, config = model.model, model.config
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, body.layers[0].self_attn.head_dim)
    rotary, _ = rotary_of(model, body.rotary_emb, heads)
    return Decoder(
        architecture=type(model).__name__,
        tokens=body.embed_tokens,
        positions=None,
        blocks=tuple(_block(block, heads, rotary) for block in body.layers),
        norm=AddNorm.rms(body.norm, body.norm.variance_epsilon),
        head=model.lm_head,
        heads=heads,
        vocabulary=config.vocab_size,
        context=context_of(config),
        dtype=body.norm.weight.dtype,
        device=model_device(model),
    )


def _block(block: Any, heads: Heads, rotary: Rotary) -> Block:
    attention, mlp = block.self_attn, block.mlp
    attention_norm, mlp_norm = block.input_layernorm, block.post_attention_layernorm
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up = (mlp.gate_proj, mlp.up_proj)
    norms = None
    if hasattr(attention, "q_norm"):
        norms = HeadNorms(*(AddNorm.rms(norm, norm.variance_epsilon) for norm in (attention.q_norm, attention.k_norm)))
    turned_by = rotary if getattr(attention, "use_rope", True) else None
    return Block(
        attention_norm=AddNorm.rms(attention_norm, attention_norm.variance_epsilon, qkv),
        attention=SelfAttention(
            qkv, attention.o_proj, heads, attention.scaling, norms, turned_by, window=window_of(attention)
        ),
        mlp_norm=AddNorm.rms(mlp_norm, mlp_norm.variance_epsilon, gate_up),
        mlp=MLP(gate_up, mlp.act_fn, mlp.down_proj, gated=True),
    )
