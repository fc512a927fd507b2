"""The end of a greedy step: choosing the likeliest token, and the place of that token."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from qcut.errors import ConfigError, DeviceError, ShapeError
from qcut.numerics import sampling
from qcut.ops.checks import FLOAT_DTYPES, check_dtype, check_tensor
from qcut.ops.registry import MUTATED, operator


def _check_logits(op: str, logits: Tensor) -> None:
    check_dtype(op, "logits", logits.dtype, FLOAT_DTYPES)
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= sampling.MAX_VOCABULARY:
        allowed = f"[B, V], V of 1 to {sampling.MAX_VOCABULARY}"
        raise ShapeError(f"qcut::{op}: logits have shape {list(logits.shape)}; allowed: {allowed}")


@operator("argmax", returns="Tensor")
class ArgmaxOp(NamedTuple):
    """The index of each row's largest logit, as `qcut.numerics.sampling.argmax` chooses it.

    Args:
        logits: float16, bfloat16 or float32 ``[B, V]``, V from 1 to 2**22, of any strides.

    Returns:
        int64 ``[B]``.

    Raises:
        DtypeError, ShapeError: ``logits`` are not as above.

    Exactness: bitwise.
    """

    logits: Tensor

    def check(self) -> None:
        _check_logits("argmax", self.logits)

    def fake(self) -> Tensor:
        return self.logits.new_empty(len(self.logits), dtype=torch.int64)

    def cpu(self) -> Tensor:
        return sampling.argmax(self.logits)


@operator("advance", returns="()")
class AdvanceOp(NamedTuple):
    """Ends a greedy step in place: each sequence's likeliest token is its next input, one place further on.

    ``tokens = argmax(logits)``, ``positions = min(positions + 1, context - 1)``, ``slots = min(slots + 1, context)``.

    Args:
        logits: float16, bfloat16 or float32 ``[B, V]``, V from 1 to 2**22, of any strides.
        tokens: int64 ``[B]``, contiguous; written.
        positions: int32 ``[B]``, contiguous, the position of each sequence's token; raised by one.
        slots: int32 ``[B]``, contiguous, the place of each sequence's token in the cache; raised by one.
        context: tokens that the cache has room for, at least 1.
        told: int64 ``[H, B]`` on the host, contiguous, pinned where the logits are on a GPU: row ``turn[b]`` gets token
            b, too. Who reads waits for the device. None: nobody is told.
        turn: int32 ``[B]``, contiguous, with ``told``, each 0 to H - 1; raised by one, from H - 1 to 0.

    Raises:
        DtypeError, ShapeError, DeviceError: a tensor is not as above.
        ConfigError: ``context`` is below 1, or one of ``told`` and ``turn`` without the other.

    Exactness: bitwise.
    """

    logits: Tensor
    tokens: Annotated[Tensor, MUTATED]
    positions: Annotated[Tensor, MUTATED]
    slots: Annotated[Tensor, MUTATED]
    context: int
    told: Annotated[Tensor | None, MUTATED] = None
    turn: Annotated[Tensor | None, MUTATED] = None

    def check(self) -> None:
        op, logits = "advance", self.logits
        _check_logits(op, logits)
        for name, state, dtype in (
            ("tokens", self.tokens, torch.int64),
            ("positions", self.positions, torch.int32),
            ("slots", self.slots, torch.int32),
            ("turn", self.turn, torch.int32),
        ):
            if state is None:
                continue
            check_tensor(op, name, state, (dtype,), logits.shape[:1], logits.device)
            if not state.is_contiguous():
                raise ShapeError(f"qcut::{op}: {name} have strides {list(state.stride())}; allowed: contiguous")
        if self.context < 1:
            raise ConfigError(f"qcut::{op}: context is {self.context}; allowed: 1 and more")
        told = self.told
        if (told is None) != (self.turn is None):
            raise ConfigError(f"qcut::{op}: told and turn go together; give both or neither")
        if told is not None:
            check_dtype(op, "told", told.dtype, (torch.int64,))
            if told.dim() != 2 or told.shape[1:] != logits.shape[:1] or not len(told) or not told.is_contiguous():
                given = f"{list(told.shape)} and strides {list(told.stride())}"
                raise ShapeError(f"qcut::{op}: told has shape {given}; allowed: [H, {len(logits)}], contiguous")
            if told.device.type not in ("cpu", "meta"):
                raise DeviceError(f"qcut::{op}: told is on {told.device}; allowed: the host")

    def fake(self) -> None:
        return None

    def cpu(self) -> None:
        self.tokens.copy_(sampling.argmax(self.logits))
        self.positions.add_(1).clamp_(max=self.context - 1)
        self.slots.add_(1).clamp_(max=self.context)
        if self.told is not None and self.turn is not None:
            self.told.scatter_(0, self.turn.long()[None], self.tokens[None])
            self.turn.add_(1).remainder_(len(self.told))
