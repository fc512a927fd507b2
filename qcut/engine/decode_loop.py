"""Decodes a batch of sequences step by step, with tokens and positions on the device, optionally as a CUDA graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.engine.graphs import Graphs

TELLS = True
"""Whether a step's last kernel writes its tokens to the host's memory; otherwise they are copied after each step."""
_TURNS = 4
"""Steps whose tokens the host's memory holds: the host may be one behind."""

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
        self._told: _Told | None = None
        if TELLS and graphs is not None and device.type == "cuda":
            self._told = _Told(size, device)
            # A step may still write to the memory when nobody holds the loop any more.
            weakref.finalize(self, self._told.settle).atexit = False
        self._graph = None if graphs is None else self._captured(graphs)
        self._ends: list[int] = []
        self._parked: set[int] = set()
        self._chosen = False
        if self._told is not None:
            self._told.turn.zero_()  # steps so far were those of capturing

    @property
    def tokens(self) -> Tensor:
        """Tokens that the next step reads, int64 ``[n]``; every step overwrites them."""
        return self._tokens[: self._used]

    @property
    def ends(self) -> list[int]:
        """Tokens of each of the n sequences, those that steps so far have read included."""
        return self._ends

    def start(self, tokens: Tensor, positions: Tensor) -> None:
        """Start with n tokens, int64 ``[n]``, at positions int32 ``[n]``, which are on the host."""
        n = self._used = len(tokens)
        self._ends, self._parked, self._chosen = positions.tolist(), set(), True
        self._tokens[:n].copy_(tokens, non_blocking=True)
        self._slots[:n].copy_(positions, non_blocking=True)
        self._slots[n:].fill_(self._context)
        torch.clamp(self._slots, max=self._context - 1, out=self._positions)

    def choose(self, tokens: Tensor) -> None:
        """Set the tokens that the next step reads, int64 ``[n]`` on the device."""
        self.tokens.copy_(tokens)
        self._chosen = True

    def fetched(self) -> Fetched:
        """The tokens that the next step reads, on their way to the host."""
        if self._told is None or self._chosen:
            return Fetched(self.tokens)
        return self._told.fetched(self._used)

    def park(self, row: int) -> None:
        """Keep no further keys and values of a sequence that has ended, while the others go on."""
        if row not in self._parked:
            self._parked.add(row)
            self._slots[row].fill_(self._context)

    def step(self) -> Tensor:
        """Read the tokens and return logits ``[n, vocabulary]``, in memory that the next step may overwrite."""
        if self._told is not None:
            self._told.make_room()
        if self._graph is None:
            logits = self._run()
        else:
            self._graph.replay()
            logits = self._logits
        if self._told is not None:
            self._told.noted()
        self._chosen = False
        for row, end in enumerate(self._ends):
            self._ends[row] = end if row in self._parked else min(end + 1, self._context)
        return logits[: self._used]

    def _run(self) -> Tensor:
        logits = self._read(self._tokens, self._positions, self._slots)
        told = () if self._told is None else (self._told.memory, self._told.turn)
        torch.ops.qcut.advance(logits, self._tokens, self._positions, self._slots, self._context, *told)
        return logits

    def _captured(self, graphs: Graphs) -> torch.cuda.CUDAGraph:
        def step() -> None:
            self._logits = self._run()

        return graphs.run_and_capture(step)


class Fetched:
    """Tokens on their way to the host, copied after the work that makes them and before work queued later.

    Args:
        tokens: int64 ``[n]``.
        event: after it, a device has written the tokens, which are on the host; None: they are copied.
    """

    def __init__(self, tokens: Tensor, event: torch.cuda.Event | None = None) -> None:
        self._event = event
        self._tokens = tokens
        self._found: list[int] | None = None
        if tokens.is_cuda:
            from qcut.cuda.streams import recorded_event

            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._event = recorded_event(tokens.device)

    def wait(self) -> list[int]:
        """Wait for the tokens and return them."""
        if self._found is None:
            if self._event is not None:
                self._event.synchronize()
            self._found = self._tokens.tolist()
        return self._found


class _Told:
    """Pinned memory to which steps write their tokens in turn, so that no copy stands between two steps.

    Attributes:
        memory: int64 ``[turns, size]`` on the host.
        turn: int32 ``[size]`` on the device, the row of ``memory`` that the next step writes.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.zeros((_TURNS, size), dtype=torch.int64, pin_memory=True)
        self.turn = torch.zeros(size, dtype=torch.int32, device=device)
        self._device, self._steps = device, 0
        self._event: torch.cuda.Event | None = None
        self._awaited: dict[int, weakref.ref[Fetched]] = {}

    def make_room(self) -> None:
        """Read what is still wanted of the row that the next step overwrites."""
        awaited = self._awaited.pop(self._steps % _TURNS, None)
        fetched = None if awaited is None else awaited()
        if fetched is not None:
            fetched.wait()

    def noted(self) -> None:
        """A step has been queued."""
        from qcut.cuda.streams import recorded_event

        self._event = recorded_event(self._device)
        self._steps += 1

    def fetched(self, count: int) -> Fetched:
        """The last step's first tokens."""
        row = (self._steps - 1) % _TURNS
        fetched = Fetched(self.memory[row, :count], self._event)
        self._awaited[row] = weakref.ref(fetched)
        return fetched

    def settle(self) -> None:
        """Wait for the last step."""
        if self._event is not None:
            self._event.synchronize()
