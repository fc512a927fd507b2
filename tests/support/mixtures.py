"""Tiny mixtures of experts whose routes are known."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

EXPERTS, NEVER = 4, 3
_SIZES = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64},
    **{"num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


def tiny_mixture(kind: str = "Qwen3Moe", skewed: bool = True) -> Any:
    """A random model of 4 experts, 2 for a token.

    Args:
        kind: ``Qwen3Moe``, ``Mixtral`` or ``GptOss``: the beginning of the class's name in transformers.
        skewed: let expert `NEVER` be chosen by no token, and expert 0 by all.
    """
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**_SIZES)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15, generator=generator)
    if skewed:
        for name, module in model.named_modules():
            if name.endswith(("mlp.gate", "mlp.router")):
                _force(module)
    return model


def _force(router: Any) -> None:
    """Weights that read the first channel, which the norm before makes a constant, more than all others."""
    with torch.no_grad():
        router.weight[:, 0] = torch.tensor([40.0, 0.0, 0.0, -40.0])


def constant_channel(model: Any) -> Any:
    """Let the norms before the mixtures give a positive first channel for every token."""
    table = model.get_input_embeddings()
    with torch.no_grad():
        table.weight[:, 0] = 8.0
        for name, p in model.named_parameters():
            # No layer that adds to the residual touches the channel.
            if name.endswith("o_proj.weight"):
                p[0] = 0
            elif name.endswith("o_proj.bias"):
                p[0] = 0
            elif name.endswith("experts.down_proj"):
                if p.shape[1] == p.shape[2]:
                    p[:, 0] = 0
                    p[:, :, 0] = 0
            elif name.endswith("down_proj_bias"):
                p[:, 0] = 0
    return model


def mixture_batches(count: int = 3, rows: int = 2, length: int = 16, seed: int = 0) -> list[Tensor]:
    """Seeded token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, _SIZES["vocab_size"], (rows, length), generator=generator) for _ in range(count)]


def same_modules(model: nn.Module, before: dict[str, nn.Module]) -> bool:
    """Whether a model has the modules that it had."""
    return all(module is before.get(name) for name, module in model.named_modules()) and len(before) == len(
        list(model.named_modules())
    )
