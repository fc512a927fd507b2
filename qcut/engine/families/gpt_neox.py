"""GPT-NeoX and Pythia: attention and MLP beside each other, LayerNorms, positions that turn a part of each head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qcut.engine.decoder import MLP, AddNorm, Block, Decoder, Heads, Rotary, SelfAttention
from qcut.engine.families.rotary import column_order, context_of, rotary_of
from qcut.models.modules import model_device


def decoder(model: Any) -> Decoder:
    """The parts of a ``GPTNeoXForCausalLM``.

    Raises:
        UnsupportedError: see `rotary_of`.
    """
    body, config, device = model.gpt_neox, model.config, model_device(model)
    n, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    heads = Heads(n, n, size)
    rotary, turned = rotary_of(model, body.rotary_emb, heads)
    # Each head's query, key and value follow one another.
    starts = [(3 * head + part) * size for part in range(3) for head in range(n)]
    order = column_order(heads, turned, starts, device)
    return Decoder(
        architecture=type(model).__name__,
        tokens=body.embed_in,
        positions=None,
        blocks=tuple(_block(block, heads, rotary, order) for block in body.layers),
        norm=AddNorm.layer(body.final_layer_norm),
        head=model.get_output_embeddings(),
        heads=heads,
        vocabulary=config.vocab_size,
        context=context_of(config),
        dtype=body.final_layer_norm.weight.dtype,
        device=device,
    )


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
