"""Decodes a batch of sequences step by step, with tokens and positions on the device, optionally as a CUDA graph."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Sequence
from itertools import count, takewhile
from typing import Protocol

import torch
from torch import Tensor

from qcut.engine.graphs import Graphs

_TURNS = 4
"""Steps whose tokens the host's memory holds: the host may be one behind."""

FIRST_BOUND = 512
"""Tokens of a sequence up to which steps are alike: attention has few parts, which meet in a cluster, if at all."""


def bounds(context: int) -> list[int]:
    """Tokens of a sequence up to which steps are alike: powers of two from `FIRST_BOUND` on, and the context."""
    doublings = (FIRST_BOUND << i for i in count())
    return [*takewhile(lambda bound: bound < context, doublings), context]


class Read(Protocol):
    """A step."""

    def __call__(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, reach: int, others: Sequence[int] = ()
    ) -> Tensor:
        """Logits ``[B, vocabulary]`` after tokens (int64) at positions and slots (int32), all ``[B]``.

        Args:
            tokens: one of each sequence.
            positions: of the tokens.
            slots: their places in the cache.
            reach: of `qcut.ops.attention.decode.AppendAttention`.
            others: reaches whose kernels are to be ready, too.
        """


class DecodeLoop:
    """Reads one token of each sequence per step; the likeliest token comes next, unless `choose` names another.

    No step waits for the device. A step's kernels are those for the longest sequence that goes on, by `bounds`. Keys
    and values of full, parked and unused sequences go to the slot after the context; parked and unused ones read no
    more places than the others.

    Args:
        read: computes a step. A captured graph reads weights at the addresses that they have now.
        size: most sequences in a step.
        context: positions of a sequence.
        device: device of all tensors.
        graphs: captures steps here; None captures no graph.
    """

    def __init__(self, read: Read, size: int, context: int, device: torch.device, graphs: Graphs | None = None) -> None:
        self._read, self._context, self._used, self._graphs = read, context, size, graphs
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._positions = torch.zeros(size, dtype=torch.int32, device=device)
        self._slots = torch.full((size,), context, dtype=torch.int32, device=device)
        self._told: _Told | None = None
        if graphs is not None and device.type == "cuda":
            self._told = _Told(size, device)
            # A step may still write to the memory when nobody holds the loop any more.
            weakref.finalize(self, self._told.settle).atexit = False
        self._bounds = bounds(context)
        # A reach has the place behind the context as a cache has: results are those of an engine of that context.
        self._reaches = [*(bound + 1 for bound in self._bounds[:-1]), 0]
        self._graph_of: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits_of: dict[int, Tensor] = {}
        self._ends: list[int] = []
        self._parked: set[int] = set()
        self._chosen = False

    @property
    def tokens(self) -> Tensor:
        """Tokens that the next step reads, int64 ``[n]``; every step overwrites them."""
        return self._tokens[: self._used]

    @property
    def ends(self) -> list[int]:
        """Tokens of each of the n sequences, those that steps so far have read included."""
        return self._ends

    def start(self, tokens: Tensor, positions: Tensor) -> None:
        """Start with n tokens, int64 ``[n]``, at positions int32 ``[n]``, which are on the host.

        Raises:
            RuntimeError: torch's, where the step cannot be captured.
        """
        n = self._used = len(tokens)
        self._ends, self._parked, self._chosen = positions.tolist(), set(), True
        self._tokens[:n].copy_(tokens, non_blocking=True)
        self._slots[:n].copy_(positions, non_blocking=True)
        self._slots[n:].fill_(self._context)
        torch.clamp(self._slots, max=self._context - 1, out=self._positions)
        self._positions[n:].zero_()
        self._capture(self._reach())

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
            self._positions[row].zero_()

    def step(self) -> Tensor:
        """Read the tokens and return logits ``[n, vocabulary]``, in memory that the next step may overwrite.

        Raises:
            RuntimeError: torch's, where the step cannot be captured. No token has been read then.
        """
        reach = self._reach()
        # Captured where a sequence first comes to a bound, and not before: once in an engine's life, that takes as
        # long as some of the 512 steps and more up to there, and most sequences may never come.
        self._capture(reach)
        if self._told is not None:
            self._told.make_room()
        if self._graphs is None:
            logits = self._run(reach)
        else:
            self._graph_of[reach].replay()
            logits = self._logits_of[reach]
        if self._told is not None:
            self._told.noted()
        self._chosen = False
        for row, end in enumerate(self._ends):
            self._ends[row] = end if row in self._parked else min(end + 1, self._context)
        return logits[: self._used]

    def launch(self) -> Tensor:
        """Queue a step's kernels one by one, as a graph of it has them, for those who look at kernels.

        Steps after it go on from what it has done, but not `ends` and `fetched`.
        """
        return self._run(self._reach())

    def capture(self) -> None:
        """Capture the steps of all `bounds`, where graphs are used."""
        for reach in self._reaches:
            self._capture(reach)

    def _reach(self) -> int:
        """Places that the next step is made for; 0: those of the cache."""
        longest = max((end for row, end in enumerate(self._ends) if row not in self._parked), default=0)
        return self._reaches[bisect_left(self._bounds, min(longest + 1, self._context))]

    def _run(self, reach: int, others: Sequence[int] = ()) -> Tensor:
        logits = self._read(self._tokens, self._positions, self._slots, reach, others)
        told = () if self._told is None else (self._told.memory, self._told.turn)
        torch.ops.qcut.advance(logits, self._tokens, self._positions, self._slots, self._context, *told)
        return logits

    def _capture(self, reach: int) -> None:
        """Capture a step unless it has been, or no graphs are used. What the next step reads stays as it is."""
        if self._graphs is None or reach in self._graph_of:
            return

        def step() -> None:
            self._logits_of[reach] = self._run(reach)

        others = [other for other in self._reaches if other != reach]
        state = [self._tokens, self._positions, self._slots]
        if self._told is not None:
            self._told.read()
            state.append(self._told.turn)
        with torch.inference_mode(False), torch.no_grad():  # its tensors are written in other modes, too
            kept = [tensor.clone() for tensor in state]
            try:
                # A step that is tried keeps nothing of the tokens it reads.
                self._tokens.zero_()
                self._positions.zero_()
                self._slots.fill_(self._context)
                # Kernels of all bounds are built and loaded now: no build waits for sequences on their way.
                self._graph_of[reach] = self._graphs.run_and_capture(step, lambda: self._run(reach, others))
            finally:
                for tensor, before in zip(state, kept, strict=True):
                    tensor.copy_(before)


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
            from qcut.backends.cuda.launch.streams import recorded_event

            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True, device="cpu")
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
        self.memory = torch.zeros((_TURNS, size), dtype=torch.int64, pin_memory=True, device="cpu")
        self.turn = torch.zeros(size, dtype=torch.int32, device=device)
        self._device, self._steps = device, 0
        self._event: torch.cuda.Event | None = None
        self._awaited: dict[int, weakref.ref[Fetched]] = {}

    def make_room(self) -> None:
        """Read what is still wanted of the row that the next step overwrites."""
        self._read(self._steps % _TURNS)

    def read(self) -> None:
        """Read what is still wanted of all rows."""
        for row in list(self._awaited):
            self._read(row)

    def _read(self, row: int) -> None:
        awaited = self._awaited.pop(row, None)
        fetched = None if awaited is None else awaited()
        if fetched is not None:
            fetched.wait()

    def noted(self) -> None:
        """A step has been queued."""
        from qcut.backends.cuda.launch.streams import recorded_event

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
