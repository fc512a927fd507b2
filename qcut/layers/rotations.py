"""Rotated tokens that layers share: q, k and v, or gate and up, read the same tensor and rotate it alike."""

from __future__ import annotations

import weakref
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qcut.codebooks import tokens as rotated_tokens
from qcut.codebooks.rotation import Kind

_ROTATE = torch.ops.qcut.rotate_tokens.default
_HALVES = (torch.float16, torch.bfloat16)

_operands: dict[tuple[Any, ...], Tensor] = {}


class RotationSpec(NamedTuple):
    """A layer's rotation.

    Attributes:
        kind: hadamard, qr or none.
        group_size: columns of a group.
        k: columns of the input.
        seeds: one for each pass.
    """

    kind: Kind
    group_size: int
    k: int
    seeds: tuple[int, ...]


def operands(spec: RotationSpec, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What the rotation's kernel reads besides tokens of a dtype; one tensor for all layers that rotate alike."""
    # Matrices are of the tokens' type; signs are the same for all.
    matrices = dtype if spec.kind == "qr" and dtype in _HALVES else torch.float16
    key = (spec, matrices, device)
    found = _operands.get(key)
    if found is None:
        found = _operands[key] = rotated_tokens.operands(*spec, matrices, device)
    return found


def operands_for(spec: RotationSpec, x: Tensor) -> Tensor:
    """`operands` for a tensor; a constant in compiled code."""
    if torch.compiler.is_compiling():
        return _constant_operands(spec, x.dtype, x.device)
    return operands(spec, x.dtype, x.device)


class _Rotation:
    """A rotated tensor, who has used it, and what it holds for."""

    def __init__(self, x: weakref.ref[Tensor], key: tuple[Any, ...], result: tuple[Tensor, Tensor]) -> None:
        self.x, self.key, self.result = x, key, result
        self.users: set[int] = set()


class SharedRotations:
    """Remembers the last tensor that was rotated, for the layers that read the same: q, k and v, or gate and up.

    A result is given out where nothing can have changed: for the same tensor object at the same version, the same
    rotation and token type, on the same stream, inside the same graph capture or outside of any, and once to each
    layer. It is dropped when the tensor dies. Tensors made in inference mode count no versions: each layer rotates
    them anew; so it does in compiled code, where the compiler sees common subexpressions itself. What writes to a
    tensor without torch's knowledge between two layers that read it, a graph's replay for example, goes unnoticed.
    """

    def __init__(self) -> None:
        self._last: _Rotation | None = None

    def rotate(self, user: object, spec: RotationSpec, x: Tensor, tokens: torch.dtype) -> tuple[Tensor, Tensor]:
        """Token blocks of x ``[..., K]``, and their scales; see ``torch.ops.qcut.rotate_tokens``.

        Args:
            user: the layer that asks.
            spec: its rotation.
            x: its input, the very object it was called with.
            tokens: dtype of the blocks.
        """
        constants = operands_for(spec, x)
        state = None if torch.compiler.is_compiling() or x.is_inference() else stream_state(x.device)
        if state is None:
            return _rotate(spec, x, tokens, constants)
        key = (x._version, spec, tokens, state)
        last = self._last
        if last is None or last.x() is not x or last.key != key or id(user) in last.users:
            result = _rotate(spec, x, tokens, constants)
            last = self._last = _Rotation(weakref.ref(x, self._forget), key, result)
        last.users.add(id(user))
        return last.result

    def _forget(self, dead: weakref.ref[Tensor]) -> None:
        last = self._last
        if last is not None and last.x is dead:
            self._last = None


def stream_state(device: torch.device) -> tuple[int, int] | None:
    """`qcut.cuda.streams.stream_state` of a CUDA device."""
    state: tuple[int, int] | None = _streams().stream_state(device)
    return state


@cache
def _streams() -> ModuleType:
    from qcut.cuda import streams  # at the first CUDA call: layers on the CPU import nothing of the kernel side

    return streams


shared = SharedRotations()
"""Of the process."""


def _rotate(spec: RotationSpec, x: Tensor, tokens: torch.dtype, operands: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.reshape(-1, spec.k)
    result: tuple[Tensor, Tensor] = _ROTATE(rows, operands, spec.kind, spec.group_size, spec.seeds, tokens)
    return result


@torch.compiler.assume_constant_result
def _constant_operands(spec: RotationSpec, dtype: torch.dtype, device: torch.device) -> Tensor:
    return operands(spec, dtype, device)
