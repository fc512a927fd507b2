"""GPT-2: learned positions, LayerNorms, one projection to queries, keys and values, an MLP without a gate."""

from __future__ import annotations

from typing import Any

from qcut.engine.decoder import MLP, AddNorm, Block, Decoder, Heads, SelfAttention
from qcut.errors import UnsupportedError
from qcut.models.modules import model_device


def decoder(model: Any) -> Decoder:
    """The parts of a ``GPT2LMHeadModel``.

    Raises:
        UnsupportedError: attention to another model's tokens.
    """
    body, config = model.transformer, model.config
    if config.add_cross_attention:
        raise UnsupportedError(
            f"{type(model).__name__}: add_cross_attention is set; allowed: attention to the model's own tokens"
        )
    n = config.num_attention_heads
    heads = Heads(n, n, config.hidden_size // n)
    return Decoder(
        architecture=type(model).__name__,
        tokens=body.wte,
        positions=body.wpe,
        blocks=tuple(_block(block, heads) for block in body.h),
        norm=AddNorm.layer(body.ln_f),
        head=model.lm_head,
        heads=heads,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        dtype=body.ln_f.weight.dtype,
        device=model_device(model),
    )


def _block(block: Any, heads: Heads) -> Block:
    attention, mlp = block.attn, block.mlp
    return Block(
        attention_norm=AddNorm.layer(block.ln_1, [attention.c_attn]),
        attention=SelfAttention((attention.c_attn,), attention.c_proj, heads, attention.scaling),
        mlp_norm=AddNorm.layer(block.ln_2, [mlp.c_fc]),
        mlp=MLP((mlp.c_fc,), mlp.act, mlp.c_proj, gated=False),
    )
