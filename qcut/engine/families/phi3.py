"""Phi-3 and Phi-4: as Llama, with queries, keys and values in one projection, and gate and up in another."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qcut.engine.decoder import MLP, AddNorm, Block, Decoder, Heads, Rotary, SelfAttention
from qcut.engine.families.common import decoder_from, heads_of, window_of
from qcut.engine.families.rotary import column_order, rotary_of
from qcut.models.modules import model_device


def decoder(model: Any) -> Decoder:
    """The parts of a ``Phi3ForCausalLM``.

    Raises:
        UnsupportedError: see `rotary_of`.
    """
    body, heads = model.model, heads_of(model)
    rotary, rotated = rotary_of(model, body.rotary_emb, heads)
    starts = range(0, heads.size * (heads.queries + 2 * heads.keys), heads.size)
    order = column_order(heads, rotated, starts, model_device(model))
    blocks = (_block(block, heads, rotary, order) for block in body.layers)
    norm = AddNorm.rms(body.norm)
    return decoder_from(model, heads, blocks, norm, tokens=body.embed_tokens, head=model.lm_head)


def _block(block: Any, heads: Heads, rotary: Rotary, order: Tensor | None) -> Block:
    attention, mlp = block.self_attn, block.mlp
    return Block(
        attention_norm=AddNorm.rms(block.input_layernorm, [attention.qkv_proj]),
        attention=SelfAttention(
            (attention.qkv_proj,),
            attention.o_proj,
            heads,
            attention.scaling,
            rotary=rotary,
            order=order,
            window=window_of(attention),
        ),
        mlp_norm=AddNorm.rms(block.post_attention_layernorm, [mlp.gate_up_proj]),
        mlp=MLP((mlp.gate_up_proj,), mlp.activation_fn, mlp.down_proj, gated=True),
    )
