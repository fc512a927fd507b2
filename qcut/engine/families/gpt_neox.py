"""GPT-NeoX and Pythia: parallel attention and MLP, LayerNorms, rotary positions of a part of each head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qcut.engine.decoder import MLP, AddNorm, Block, Decoder, Heads, Rotary, SelfAttention
from qcut.engine.families.common import decoder_from
from qcut.engine.families.rotary import column_order, rotary_of
from qcut.models.modules import model_device


def decoder(model: Any) -> Decoder:
    """The parts of a ``GPTNeoXForCausalLM``.

    Raises:
        UnsupportedError: see `rotary_of`.
    """
    body, config = model.gpt_neox, model.config
    n, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    heads = Heads(n, n, size)
    rotary, rotated = rotary_of(model, body.rotary_emb, heads)
    # Each head's query, key and value follow one another.
    starts = [(3 * head + part) * size for part in range(3) for head in range(n)]
    order = column_order(heads, rotated, starts, model_device(model))
    blocks = (_block(block, heads, rotary, order) for block in body.layers)
    norm, head = AddNorm.layer(body.final_layer_norm), model.get_output_embeddings()
    return decoder_from(model, heads, blocks, norm, tokens=body.embed_in, head=head)


def _block(block: Any, heads: Heads, rotary: Rotary, order: Tensor | None) -> Block:
    attention, mlp = block.attention, block.mlp
    qkv = (attention.query_key_value,)
    return Block(
        attention_norm=AddNorm.layer(block.input_layernorm, qkv),
        attention=SelfAttention(qkv, attention.dense, heads, attention.scaling, rotary=rotary, order=order),
        mlp_norm=AddNorm.layer(block.post_attention_layernorm, [mlp.dense_h_to_4h]),
        mlp=MLP((mlp.dense_h_to_4h,), mlp.act, mlp.dense_4h_to_h, gated=False),
        parallel=block.use_parallel_residual,
    )
