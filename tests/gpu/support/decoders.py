"""A small Llama with sizes that every kernel of the engine takes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import qcut
from tests.gpu.support.oracles import DEVICE
from tests.support.decoders import VOCABULARY


def llama(scheme: str | None = None, dtype: torch.dtype = torch.float16, device: str = DEVICE) -> Any:
    """Heads of 64, three to a head of keys; larger weights than usual, so that tokens differ."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 384, "intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 300}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.to(device, dtype).eval()
    if scheme is not None:
        qcut.quantize(model, scheme, prebuild=(64,), progress=False)
    return model
