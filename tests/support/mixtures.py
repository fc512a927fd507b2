"""Tiny mixtures of experts with known routes."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

EXPERTS, NEVER = 6, (4, 5)
KINDS = ("Qwen3Moe", "Mixtral", "GptOss")


def tiny_mixture(kind: str = "Qwen3Moe", width: int = 64) -> Any:
    """A random model of 6 experts, 2 for a token; the experts `NEVER` are chosen by no token.

    Args:
        kind: one of `KINDS`, the beginning of the class's name in transformers.
        width: of tokens and of experts.
    """
    sizes = {"vocab_size": 96, "hidden_size": width, "intermediate_size": width, "moe_intermediate_size": width}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2}
    sizes |= {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(0, 0.15, generator=generator)
        for name, module in model.named_modules():
            if name.endswith(("mlp.gate", "mlp.router")):
                a, b = module.weight[:2].clone()
                # Of a and -a one is above zero, and of b and -b: these two are chosen.
                module.weight.copy_(torch.stack([a, -a, b, -b, 0 * a, 0 * a]))
                if getattr(module, "bias", None) is not None:
                    module.bias.zero_()
    return model


def mixture_batches(count: int = 3, rows: int = 2, length: int = 16, seed: int = 0) -> list[Tensor]:
    """Seeded token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 96, (rows, length), generator=generator) for _ in range(count)]
