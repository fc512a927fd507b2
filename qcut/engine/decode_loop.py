"""Decodes a batch of sequences step by step, with tokens and positions on the device, optionally as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.engine.graphs import Graphs

Read = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A step: takes tokens (int64), positions and slots (int32), all ``[B]``, and returns logits ``[B, vocabulary]``."""


class DecodeLoop:
    """Reads one token of each sequence per step; the likeliest token comes next, unless `choose` names another.

    No step waits for the device. Full sequences stay at the context's last position, and their keys and values go to
    the slot after the context.

    Args:
        read: computes a step. A captured graph reads weights at the addresses that they have now.
        size: most sequences in a step.
        context: positions of a sequence.
        device: device of all tensors.
        graphs: captures the step here; None captures no graph.

    Raises:
        RuntimeError: torch's, where the step cannot be captured. Nothing is left behind.
    """

    def __init__(self, read: Read, size: int, context: int, device: torch.device, graphs: Graphs | None = None) -> None:
        self._read, self._context, self._used = read, context, size
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._positions = torch.full((size,), context - 1, dtype=torch.int32, device=device)
        self._slots = torch.full((size,), context, dtype=torch.int32, device=device)
        self._graph = None if graphs is None else self._captured(graphs)

    @property
    def tokens(self) -> Tensor:
        """Tokens that the next step reads, int64 ``[n]``; every step overwrites them."""
        return self._tokens[: self._used]

    def start(self, tokens: Tensor, positions: Tensor) -> None:
        """Start with n tokens, int64 ``[n]``, at positions int32 ``[n]``."""
        n = self._used = len(tokens)
        self._tokens[:n].copy_(tokens, non_blocking=True)
        self._slots[:n].copy_(positions, non_blocking=True)
        self._slots[n:].fill_(self._context)
        torch.clamp(self._slots, max=self._context - 1, out=self._positions)

    def choose(self, tokens: Tensor) -> None:
        """Set the tokens that the next step reads, int64 ``[n]`` on the device."""
        self.tokens.copy_(tokens)

    def step(self) -> Tensor:
        """Read the tokens and return logits ``[n, vocabulary]``, in memory that the next step may overwrite."""
        if self._graph is None:
            logits = self._run()
        else:
            self._graph.replay()
            logits = self._logits
        return logits[: self._used]

    def _run(self) -> Tensor:
        logits = self._read(self._tokens, self._positions, self._slots)
        torch.ops.qcut.advance(logits, self._tokens, self._positions, self._slots, self._context)
        return logits

    def _captured(self, graphs: Graphs) -> torch.cuda.CUDAGraph:
        def step() -> None:
            self._logits = self._run()

        return graphs.run_and_capture(step)


class Fetched:
    """Tokens on their way to the host, copied after the work that makes them and before work queued later."""

    def __init__(self, tokens: Tensor) -> None:
        self._event = None
        self._tokens = tokens
        if tokens.is_cuda:
            from qcut.cuda.streams import recorded_event

            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._event = recorded_event(tokens.device)

    def wait(self) -> list[int]:
        """Wait for the copy and return the tokens."""
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._tokens.tolist()
        return tokens
