"""OLMo 2: as Llama, with norms after attention and MLP in place of before, and of whole queries and keys."""

from __future__ import annotations

from typing import Any

from qcut.engine.decoder import MLP, AddNorm, Block, Decoder, HeadNorms, Heads, Rotary, SelfAttention
from qcut.engine.families.rotary import context_of, rotary_of
from qcut.models.modules import model_device


def decoder(model: Any) -> Decoder:
    """The parts of an ``Olmo2ForCausalLM``.

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
        norm=_rms(body.norm),
        head=model.lm_head,
        heads=heads,
        vocabulary=config.vocab_size,
        context=context_of(config),
        dtype=body.norm.weight.dtype,
        device=model_device(model),
    )


def _rms(norm: Any) -> AddNorm:
    return AddNorm.rms(norm, norm.variance_epsilon)


def _block(block: Any, heads: Heads, rotary: Rotary) -> Block:
    attention, mlp = block.self_attn, block.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    norms = HeadNorms(_rms(attention.q_norm), _rms(attention.k_norm))
    return Block(
        attention_norm=None,
        attention=SelfAttention(qkv, attention.o_proj, heads, attention.scaling, norms, rotary),
        mlp_norm=None,
        mlp=MLP((mlp.gate_proj, mlp.up_proj), mlp.act_fn, mlp.down_proj, gated=True),
        attention_end=_rms(block.post_attention_layernorm),
        mlp_end=_rms(block.post_feedforward_layernorm),
    )
