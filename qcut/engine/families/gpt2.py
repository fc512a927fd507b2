"""GPT-2: learned positions, LayerNorms, one projection to queries, keys and values, an MLP without a gate."""

from __future__ import annotations

from typing import Any

from qcut.engine.decoder import MLP, AddNorm, Block, Decoder, Heads, SelfAttention
from qcut.engine.families.common import decoder_from
from qcut.errors import UnsupportedError


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
    blocks, norm = (_block(block, heads) for block in body.h), AddNorm.layer(body.ln_f)
    return decoder_from(model, heads, blocks, norm, tokens=body.wte, positions=body.wpe, head=model.lm_head)


def _block(block: Any, heads: Heads) -> Block:
    attention, mlp = block.attn, block.mlp
    return Block(
        attention_norm=AddNorm.layer(block.ln_1, [attention.c_attn]),
        attention=SelfAttention((attention.c_attn,), attention.c_proj, heads, attention.scaling),
        mlp_norm=AddNorm.layer(block.ln_2, [mlp.c_fc]),
        mlp=MLP((mlp.c_fc,), mlp.act, mlp.c_proj, gated=False),
    )
