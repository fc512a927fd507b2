"""Starcoder2: rotary positions, LayerNorms, keys and values for several queries each, an MLP without a gate."""

from __future__ import annotations

from typing import Any

from qcut.engine.decoder import MLP, AddNorm, Block, Decoder, Heads, Rotary, SelfAttention
from qcut.engine.families.rotary import context_of, rotary_of
from qcut.engine.families.windows import window_of
from qcut.models.modules import model_device


def decoder(model: Any) -> Decoder:
    """The parts of a ``Starcoder2ForCausalLM``.

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
        norm=AddNorm.layer(body.norm),
        head=model.lm_head,
        heads=heads,
        vocabulary=config.vocab_size,
        context=context_of(config),
        dtype=body.norm.weight.dtype,
        device=model_device(model),
    )


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
