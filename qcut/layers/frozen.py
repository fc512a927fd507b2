"""The parameter that stands for a quantized weight among a model's parameters."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn


class FrozenWeight(nn.Parameter):
    """A frozen parameter without elements, by which a model with quantized layers has a device, a dtype and a size.

    Tools ask ``next(model.parameters())`` for a model's device and dtype, and add up ``numel()`` for the number of its
    parameters. A layer's weight is in its buffers, so this tensor takes no bytes and is in no state dict.

    Args:
        shape: ``[N, K]`` of the weight.
        buffers: of the layer; a bias among them counts.
        dtype: of the float weight, ``Linear.weight_dtype``.
        device: of the buffers.
    """

    shape_nk: tuple[int, int]
    of: dict[str, Tensor | None]

    def __new__(
        cls,
        shape: tuple[int, int],
        buffers: dict[str, Tensor | None],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> FrozenWeight:
        """An empty tensor."""
        empty = torch.empty((0, shape[1]), dtype=dtype, device=device)
        made: FrozenWeight = torch.Tensor._make_subclass(cls, empty, False)
        made.shape_nk, made.of = shape, buffers
        return made

    def numel(self) -> int:
        """Parameters of the float layer: ``N * K``, and N more with a bias."""
        n, k = self.shape_nk
        return n * k + (0 if self.of.get("bias") is None else n)

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenWeight:
        made = memo[id(self)] = FrozenWeight(self.shape_nk, deepcopy(self.of, memo), self.dtype, self.device)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FrozenWeight, (self.shape_nk, self.of, self.dtype, self.device)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<frozen weight {list(self.shape_nk)} of a quantized layer>"


def float_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a model's first floating parameter that is no quantized weight.

    Where the model has none, the dtype that its configuration states, or else float32.
    """
    floats = (p.dtype for p in model.parameters() if p.is_floating_point() and not isinstance(p, FrozenWeight))
    stated = getattr(getattr(model, "config", None), "dtype", None)
    return next(floats, stated if isinstance(stated, torch.dtype) else torch.float32)
