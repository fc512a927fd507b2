"""Speculative decoding: several drafted tokens of a sequence are verified in one step.

A step computes the logits after a sequence's next token and after each of its drafted tokens. Drafts are right as far
as they are what the model chooses there, greedily or by a draw: these tokens and the next one are new. What the model
chooses never depends on drafts, and draws only on the position, so that a sequence has the tokens of plain steps.

How many drafts a step verifies is chosen by what such steps take, which is measured, and by how many drafts of the last
steps were right.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from qcut.engine.drafters import Drafter, DraftState
from qcut.engine.runner import MOST_FUSED_ROWS, HostCopy, HostTokens, MaxSeqLens, ModelRunner, inference, parked

_DECAY = 0.9
"""Weight of a step's drafts next to those of the step after it."""
_FORGOTTEN = 0.01
"""Share of what is known that a step without verified drafts forgets: after wrong ones, drafts are tried again."""
_RIGHT, _COMPARED = 1.0, 1.5
"""What is known before the first drafts: two of three are right."""
_TIMED, _SETTLING = 8, 3
"""Steps that are timed on a GPU, and steps before them; on the CPU the fastest of `_SETTLING` counts."""
_SPREAD = 7919
"""Distance of the ids of tokens in timed steps."""


@dataclass
class DraftRecord:
    """What became of a sequence's drafts.

    Attributes:
        found: drafts that it is known to have for its next step.
    """

    found: int = 0
    _right: float = _RIGHT
    _compared: float = _COMPARED

    def note(self, width: int, new: int, found: int) -> int:
        """Note a step of so many tokens: how many new ones it gave, and how many drafts there are now.

        Returns:
            Drafts that the step has verified.
        """
        had, self.found = self.found, found
        verified = min(had, width - 1)
        if not new or not had:
            return 0
        if verified:
            self._right = self._right * _DECAY + new - 1
            self._compared = self._compared * _DECAY + min(verified, new)
        else:
            self._right += (_RIGHT - self._right) * _FORGOTTEN
            self._compared += (_COMPARED - self._compared) * _FORGOTTEN
        return verified

    def expected(self, width: int) -> float:
        """New tokens that a step of this width is expected to give."""
        drafts = min(self.found, width - 1)
        share = self._right / self._compared
        return float(drafts + 1) if share >= 1 else (1 - share ** (drafts + 1)) / (1 - share)


def next_width(records: Sequence[DraftRecord], widths: Sequence[int], cost: Callable[[int], float]) -> int:
    """The tokens of each sequence in the next step: the number that is expected to give the most new ones a time.

    Args:
        records: of the sequences.
        widths: numbers to choose from, in ascending order, 1 the first.
        cost: time of a step, by its width.
    """
    most = 1 + max((record.found for record in records), default=0)
    useful = [width for i, width in enumerate(widths) if i == 0 or widths[i - 1] < most]
    if len(useful) == 1:
        return useful[0]
    return max(useful, key=lambda width: sum(record.expected(width) for record in records) / cost(width))


def widths_of(drafts: int, room: int) -> tuple[int, ...]:
    """Tokens of a sequence that steps have, ``room`` at most: 1, 2, 4 and so on, and one with all drafts."""
    doubling = [1 << i for i in range(drafts.bit_length()) if 1 << i <= drafts]
    return tuple(width for width in (*doubling, drafts + 1) if width <= room)


def drafted_loop(runner: ModelRunner, state: DraftState, lengths: Sequence[int], drafter: Drafter) -> DraftedLoop:
    """A loop of drafted steps of the sequences in a runner's first n batch slots.

    Args:
        runner: computes steps.
        state: of n sequences.
        lengths: tokens of each in the cache.
        drafter: finds drafts.
    """
    n, graphs = len(lengths), runner.graphs
    size = n if graphs is None else min(runner.batch, 1 << (n - 1).bit_length())
    make = partial(DraftedLoop, runner, size, drafter)
    if graphs is None:
        loop = make()
    else:
        graphs.refresh()
        loop = graphs.get(("drafted", size, drafter), make)
    loop.start(state, lengths)
    return loop


@inference()
def capture_drafted(runner: ModelRunner, sequences: int, drafter: Drafter) -> None:
    """Capture and time greedy steps of so many sequences, of all widths and buckets, if graphs are used."""
    if runner.graphs is not None:
        state = DraftState.of(sequences, drafter.drafts + 1, runner.context, runner.decoder.device)
        drafted_loop(runner, state, [0] * sequences, drafter).capture()


Choose = Callable[[Tensor], Tensor]
"""Takes logits ``[n T, vocabulary]`` after T tokens of each sequence, and returns tokens int64 ``[n T]``."""


class DraftedLoop:
    """Decodes one token and more of each sequence a step; as `qcut.engine.runner.DecodeLoop`, no step waits.

    Args:
        runner: computes steps.
        size: batch slots.
        drafter: finds drafts.

    Attributes:
        state: of all slots.
        widths: tokens of a sequence that a step may have, in ascending order.
        lengths: most tokens that each sequence can have in the cache after the steps so far.
        offered: drafts that each sequence has for its next step; None: as many as the last step has found.
    """

    def __init__(self, runner: ModelRunner, size: int, drafter: Drafter) -> None:
        self._runner, self._drafter = runner, drafter
        context, device, width = runner.context, runner.decoder.device, drafter.drafts + 1
        self._context, self._device, self._graphs = context, device, runner.graphs
        self.state = DraftState.of(size, width, context, device)
        self._hidden: Tensor | None = None
        if drafter.reads_hidden:
            self._hidden = torch.zeros(size, runner.decoder.width, dtype=runner.decoder.dtype, device=device)
        both = (runner, *(() if runner.companion is None else (runner.companion,)))
        rooms = [ring.room for each in both for ring in each.rings if ring is not None]
        self.widths = widths_of(drafter.drafts, min(rooms, default=width))
        self.offered = None if drafter.longest else drafter.drafts
        self._host = HostTokens((size, width + 2), device)
        if device.type == "cuda":
            weakref.finalize(self, self._host.settle).atexit = False
        self._max_seq_lens = MaxSeqLens(context)
        self._graph_of: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._result_of: dict[tuple[int, int, bool], tuple[Tensor, Tensor]] = {}
        self._cost: dict[tuple[int, bool], float] = runner.step_us.setdefault((drafter, size), {})
        self._padded: set[int] = set()
        self.lengths: list[int] = []

    @property
    def used(self) -> DraftState:
        """The state of the sequences, without unused slots."""
        return self.state.of_slots(0, len(self.lengths))

    @property
    def tokens(self) -> Tensor:
        """The next token of each sequence, int64 ``[n]``."""
        return self.used.tokens[0]

    def start(self, state: DraftState, lengths: Sequence[int]) -> None:
        """Start with the state of n sequences, and the tokens of each in the cache."""
        self.lengths, self._padded = list(lengths), set()
        self.used.copy_(state)
        self.state.slots[len(lengths) :].fill_(self._context)
        self.state.positions[len(lengths) :].zero_()

    def settle(self, lengths: list[int], slot: int, missed: int) -> None:
        """Note that a step gave a sequence so many tokens less than the step had.

        Args:
            lengths: `lengths` when the step was queued; others may have started the loop since.
            slot: of the sequence.
            missed: tokens.
        """
        if slot not in self._padded:
            lengths[slot] -= missed

    def pad(self, slot: int) -> None:
        """Make a slot padding: further steps keep no keys and values of its sequence."""
        if slot not in self._padded:
            self._padded.add(slot)
            self.state.slots[slot].fill_(self._context)
            self.state.positions[slot].zero_()

    def cost(self, width: int, choose: Choose | None = None) -> float:
        """Microseconds of a step of this width, measured at its first use; keys and values are few then.

        Args:
            width: tokens of each sequence, one of `widths`.
            choose: see `step`; that of other sequences may have been timed.
        """
        timed = width, choose is not None
        if timed not in self._cost:
            key = (width, self._max_seq_lens.of(()) if width <= MOST_FUSED_ROWS else 0, choose is None)
            with self._parked():
                self._capture(key)
                # Different tokens: of a mixture, equal ones would read the same few experts.
                tokens = self.state.tokens
                spread = torch.arange(tokens.numel(), dtype=torch.int64, device=self._device) * _SPREAD
                tokens.copy_((spread % self._runner.decoder.vocabulary).view_as(tokens))
                self._cost[timed] = self._timed(key, choose)
        return self._cost[timed]

    def capture(self) -> None:
        """Capture greedy steps of all widths and buckets, and measure what they take."""
        for width in self.widths:
            self.cost(width)
        with self._parked():
            for width, max_seq_len in product(self.widths, self._max_seq_lens.all):
                if width <= MOST_FUSED_ROWS:
                    self._capture((width, max_seq_len, True))

    def step(self, width: int, choose: Choose | None) -> tuple[Tensor, Tensor, HostCopy]:
        """Queue a step of some tokens of each sequence.

        Args:
            width: tokens of each, one of `widths`.
            choose: chooses tokens; None: the likeliest.

        Returns:
            Logits, the tokens that were chosen, int64 ``[n, T]``, both in memory that the next step may overwrite, and
            what `torch.ops.qcut.accept` tells of each sequence.

        Raises:
            RuntimeError: torch's, if the step cannot be captured. No token has been appended then.
        """
        n, key = len(self.lengths), (width, self._max_seq_len(width), choose is None)
        if self._graphs is not None and key not in self._graph_of:
            with self._parked():
                self._capture(key)
        self._host.make_room()
        logits, chosen = self._queue(key)
        if choose is not None:
            chosen[:n] = choose(logits[: n * width]).view(n, width)
            self._accept(chosen)
        self._host.queued()
        for slot, length in enumerate(self.lengths):
            self.lengths[slot] = length if slot in self._padded else length + width
        return logits[: n * width], chosen[:n], self._host.copy(n)

    def _parked(self) -> AbstractContextManager[None]:
        state, more = self.state, () if self._hidden is None else (self._hidden,)
        kept = (state.counts, state.text, state.ends, *more)
        return parked(self._context, state.tokens, state.positions, state.slots, *kept, host=self._host)

    def _max_seq_len(self, width: int) -> int:
        """Bucket of a step up to `MOST_FUSED_ROWS` tokens; wider ones have none."""
        if width > MOST_FUSED_ROWS:
            return 0
        lengths = (length for slot, length in enumerate(self.lengths) if slot not in self._padded)
        return self._max_seq_lens.of(lengths, width)

    def _run(self, key: tuple[int, int, bool], others: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        width, max_seq_len, takes_likeliest = key
        state, runner = self.state, self._runner
        if width == 1:
            logits = runner.forward_step(state.tokens[0], state.positions, state.slots, max_seq_len, others)
        else:
            if not self._drafter.longest:
                self._drafter.propose(runner.companion, state, width - 1, self._hidden)
            tokens, places = state.tokens[:width], (state.positions, state.slots)
            logits = runner.forward_tokens(tokens, *places, max_seq_len, others)
        if takes_likeliest:
            chosen = torch.ops.qcut.argmax(logits).view(-1, width)
            self._accept(chosen)
        else:
            chosen = torch.zeros((len(logits) // width, width), dtype=torch.int64, device=self._device)
        return logits, chosen

    def _accept(self, chosen: Tensor) -> None:
        state, drafter, before = self.state, self._drafter, None
        if self._hidden is not None:
            before = state.slots.clone()
        host_copy = (self._host.memory, self._host.row)
        torch.ops.qcut.accept(chosen, *state, self._context, drafter.shortest, drafter.longest, *host_copy)
        if self._hidden is not None and before is not None:
            last = (state.slots - before - 1).clamp(min=0).long()
            rows = torch.arange(len(chosen), dtype=torch.int64, device=self._device) * chosen.shape[1] + last
            self._hidden.copy_(self._runner.last_hidden()[rows])

    def _queue(self, key: tuple[int, int, bool]) -> tuple[Tensor, Tensor]:
        """Queue a step that is captured, if graphs are used; returns what `_run` does."""
        if self._graphs is None:
            return self._run(key)
        self._graph_of[key].replay()
        return self._result_of[key]

    def _capture(self, key: tuple[int, int, bool]) -> None:
        """Capture a step once, if graphs are used."""
        if self._graphs is None or key in self._graph_of:
            return

        def step() -> None:
            self._result_of[key] = self._run(key)

        others = [other for other in self._max_seq_lens.all if other != key[1]] if key[0] <= MOST_FUSED_ROWS else []
        self._graph_of[key] = self._graphs.run_and_capture(step, lambda: self._run(key, others))

    def _timed(self, key: tuple[int, int, bool], choose: Choose | None) -> float:
        """Microseconds of a step."""

        def run() -> None:
            logits, _ = self._queue(key)
            if choose is not None:
                choose(logits[: len(self.lengths) * key[0]])

        if self._device.type != "cuda":
            times = []
            for _ in range(_SETTLING):
                times.append(-time.perf_counter())
                run()
                times[-1] += time.perf_counter()
            return min(times) * 1e6
        for _ in range(_SETTLING):
            run()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_TIMED):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / _TIMED
