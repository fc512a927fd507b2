"""Experts by vLLM's Marlin kernels, for comparison: 4-bit integers in groups of columns, tokens of 16 bits.

Weights are random bits: only the time is of interest. Written for vLLM 0.26, which has the kernels in ``_moe_C``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SCHEME = "marlin_int4"
Call = Callable[[int], Any]


def is_there() -> bool:
    """Whether vLLM with these kernels is installed."""
    if importlib.util.find_spec("vllm") is None:
        return False
    from vllm import _custom_ops  # noqa: F401  (loads the libraries)

    return hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm")


class MarlinExperts:
    """A mixture's experts.

    Args:
        experts: number of experts.
        hidden: columns of a token.
        width: of an expert; ``up`` has twice as many rows.
    """

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        self.experts, self.hidden, self.width = experts, hidden, width
        self.up, self.down = self._weight(2 * width, hidden), self._weight(hidden, width)

    def _weight(self, n: int, k: int) -> tuple[Tensor, Tensor]:
        group = 128 if k % 128 == 0 else 64
        bits = torch.randint(-(2**31), 2**31 - 1, (self.experts, k // 16, 2 * n), dtype=torch.int32, device="cuda")
        return bits, torch.rand(self.experts, k // group, n, dtype=torch.float16, device="cuda") / k

    @property
    def weight_bytes(self) -> dict[str, float]:
        """Of one expert, by part."""
        parts = {name: sum(t.nbytes for t in pair) / self.experts for name, pair in self._parts.items()}
        return {**parts, "mixture": sum(parts.values())}

    @property
    def _parts(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {"up": self.up, "down": self.down}

    def calls(self, index: list[Tensor], x: Tensor, hidden: Tensor, weights: Tensor) -> dict[str, Call]:
        """What is timed, by part: of tokens ``[M, H]``, of routes ``[M * k, width]``, and of the whole mixture.

        Args:
            index: experts int32 ``[M, k]``, of each routing that calls take turns with.
            x: tokens.
            hidden: what ``down`` takes.
            weights: float32 ``[M, k]``.
        """
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.scalar_type import scalar_types

        (w1, s1), (w2, s2), kind = self.up, self.down, scalar_types.uint4b8.id
        top_k = index[0].shape[1]
        given = (w1, w2, None, None, s1, s2, weights)
        up = self._product(self.up, x, index, weights, top_k, 2 * self.width, self.hidden, weighs=False)
        down = self._product(self.down, hidden, index, weights, 1, self.hidden, self.width, weighs=True)
        return {"up": up, "down": down, "mixture": lambda i: fused_marlin_moe(x, *given, index[i], kind)}

    def _product(
        self,
        weight: tuple[Tensor, Tensor],
        x: Tensor,
        index: list[Tensor],
        weights: Tensor,
        top_k: int,
        n: int,
        k: int,
        *,
        weighs: bool,
    ) -> Call:
        from vllm import _custom_ops as ops
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
        from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
        from vllm.scalar_type import scalar_types

        routes = index[0].numel()
        block = next((size for size in (8, 16, 32, 48) if routes / self.experts / size < 0.9), 64)
        aligned = [moe_align_block_size(ids, block, self.experts, ignore_invalid_experts=True) for ids in index]
        y = torch.empty(routes, n, dtype=x.dtype, device=x.device)
        workspace, none = marlin_make_workspace_new(x.device, 4), (None,) * 5
        options = {
            "moe_block_size": block, "top_k": top_k, "mul_topk_weights": weighs, "b_q_type": scalar_types.uint4b8,
            "size_m": len(x), "size_n": n, "size_k": k, "is_k_full": True, "use_atomic_add": False,
            "use_fp32_reduce": True, "is_zp_float": False,
        }  # fmt: skip
        bits, scales = weight
        return lambda i: ops.moe_wna16_marlin_gemm(
            x, y, bits, None, scales, *none, workspace, *aligned[i], weights, **options
        )
