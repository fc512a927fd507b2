"""Oracles that share no code with qcut (numpy's IEEE float32, one rounding an operation), and test data."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

F32 = np.float32
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
NAN, INF = float("nan"), float("inf")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """float32 of N(0, 1), the same on every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def to_bf16(v: np.ndarray) -> torch.Tensor:
    """Rounds finite float32 to bfloat16, half to even, by bits."""
    bits = v.astype(F32).view(np.uint32).astype(np.uint64)
    even = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
    return torch.from_numpy(even.astype(np.uint32).view(F32)).bfloat16()


def rounded(v: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bfloat16:
        return to_bf16(v)
    with np.errstate(over="ignore"):  # float16 overflows to Inf, as it should
        return torch.from_numpy(v.astype({torch.float16: np.float16, torch.float32: F32}[dtype]))


def scale_oracle(x: np.ndarray) -> np.ndarray:
    scale = (np.abs(x).max(1) / F32(127)).astype(F32)
    return np.where(scale == 0, F32(1), scale)


def token_oracle(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a = x.float().numpy()
    scale = scale_oracle(a)
    q = np.clip(np.rint(a / scale[:, None]), -127, 127).astype(np.int8)
    return torch.from_numpy(q), torch.from_numpy(scale)


def near_ties() -> torch.Tensor:
    """Rows with quotients within an ulp of a half, where multiplying by a reciprocal rounds differently."""
    absmax = torch.linspace(1.0, 2.0, 512)
    half = (torch.arange(127) + 0.5) * (absmax / 127)[:, None]
    return torch.cat([absmax[:, None], half, torch.nextafter(half, torch.tensor(0.0)), -half], 1)


def epilogue_oracle(
    acc: np.ndarray,
    zp: Any,
    colsum: Any,
    row: torch.Tensor | None,
    col: Any,
    bias: torch.Tensor | None,
    act: str,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
    inv: Any,
    out_zp: Any,
) -> torch.Tensor:
    """The formulas of emitters/core/epilogue.py on numpy float32: one rounding an operation."""
    if zp is not None:
        zp = zp.numpy().astype(np.int64)[:, None] if torch.is_tensor(zp) else zp
        acc = acc - zp * colsum.numpy().astype(np.int64)
    v = acc.astype(F32)
    v = v if row is None else v * row.numpy()[:, None]
    v = v if col is None else v * (col.numpy() if torch.is_tensor(col) else F32(col))
    v = v if bias is None else v + bias.numpy()
    v = np.maximum(v, F32(0)) if act == "relu" else v
    v = v if residual is None else v + residual.float().numpy()
    if dtype is torch.int8:
        q = np.rint(v.astype(np.float64) * float(F32(inv))) + out_zp
        return torch.from_numpy(np.clip(q, -128, 127).astype(np.int8))
    return rounded(v, dtype)


def s8(*shape: int, device: str = "cpu") -> torch.Tensor:
    """int8 over its full range."""
    return torch.randint(-128, 128, shape, dtype=torch.int8, device=device)


def tokens(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def layer(n: int = 7, k: int = 21) -> dict[str, torch.Tensor]:
    """Tensors of a quantized layer: weights over their full range, padded to 16 columns."""
    qweight = torch.zeros(n, -(-k // 16) * 16, dtype=torch.int8)
    qweight[:, :k] = torch.randint(-127, 128, (n, k))
    scale = torch.rand(n) * 0.01 + 0.001
    return {"qweight": qweight, "scale": scale, "colsum": qweight.sum(1, dtype=torch.int32), "bias": torch.randn(n)}


def layer_fp8(n: int = 7, k: int = 21) -> dict[str, torch.Tensor]:
    """Tensors of a layer with weights of e4m3, every finite one, padded to 16 columns."""
    codes = torch.zeros(n, -(-k // 16) * 16, dtype=torch.uint8)
    codes[:, :k] = torch.randint(0, 127, (n, k)) + 128 * torch.randint(0, 2, (n, k))
    scale = torch.rand(n) * 1e-3 + 1e-4
    return {"qweight": codes.view(torch.float8_e4m3fn), "scale": scale, "bias": torch.randn(n)}
