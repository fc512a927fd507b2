"""Layers of experts and their stacks, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qcut.layers.experts.experts import Experts
from qcut.layers.experts.linear_stack import LinearStack
from qcut.layers.linear import Linear
from qcut.numerics.gating import Gating
from qcut.schemes import StaticRange
from tests.layers.test_codebook import INT8
from tests.layers.test_codebook import SCHEMES as CODEBOOKS
from tests.layers.test_linear import FLOAT8
from tests.layers.test_linear import SCHEMES as INTEGERS

SCHEMES = (*INTEGERS, *FLOAT8, *CODEBOOKS, *INT8, "codebook4_rows_qr_int8", "codebook4_g64")
"""Of 16 to 2 bits."""
EXACT = ("w8a8", "w8a8_static", "codebook4_int8", "int4_int8")
"""Products are of integers: a token's result does not depend on the other tokens."""


def layers_of(
    scheme: str, experts: int, n: int, k: int, bias: bool = True, name: str | None = None, seed: int = 0
) -> list[Linear]:
    """A quantized layer for each expert; a range of its own where the scheme is static."""
    torch.manual_seed(seed + n)
    made = []
    for e in range(experts):
        module = nn.Linear(k, n, bias)
        static_range = StaticRange(-3.0 - e, 4.0 + e / 2) if scheme.endswith("_static") else None
        own = None if name is None else f"{name}.{e}"
        made.append(Linear.from_float(module, scheme, static_range=static_range, name=own))
    return made


def stack_of(scheme: str, experts: int = 3, n: int = 33, k: int = 64, bias: bool = True, **options: Any) -> LinearStack:
    return LinearStack.of(layers_of(scheme, experts, n, k, bias, **options), options.get("name"))


def experts_of(
    scheme: str | None,
    experts: int = 6,
    columns: int = 64,
    width: int = 32,
    gating: Gating | None = None,
    **options: Any,
) -> Experts:
    """Experts of a scheme with biases; in float under None."""
    gating = Gating("silu") if gating is None else gating
    sizes = (("mlp.experts.up", width * (1 + gating.gated), columns), ("mlp.experts.down", columns, width))
    parts: list[Any] = []
    for name, n, k in sizes:
        torch.manual_seed(n)
        if scheme is None:
            parts.append(nn.ModuleList(nn.Linear(k, n) for _ in range(experts)))
        else:
            parts.append(stack_of(scheme, experts, n, k, name=name))
    return Experts(*parts, gating, name="mlp.experts", **options).eval()


class Routed(nn.Module):
    """Experts, and a router that gives token t the experts t and t + 1."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        first = torch.arange(len(flat), device=x.device)
        index = torch.stack([first, first + 1], 1) % self.experts.num_experts
        weights = torch.tensor([[0.75, 0.5]], device=x.device).expand(len(flat), 2)
        y: Tensor = self.experts(flat, index, weights)
        return y.view(x.shape)
