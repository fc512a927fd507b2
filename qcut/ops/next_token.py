"""The end of a greedy step: choosing the likeliest token, accepting drafted tokens, and the place of the next token."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from qcut.errors import ConfigError, DeviceError, ShapeError
from qcut.numerics import sampling
from qcut.ops.checks import FLOAT_DTYPES, check_dtype, check_tensor
from qcut.ops.registry import MUTATED, operator

MOST_FED = 16
"""Tokens that `AcceptOp` takes of a sequence."""

MOST_MATCHED = 8
"""Tokens of the longest n-gram that `AcceptOp` looks up."""


def _check_logits(op: str, logits: Tensor) -> None:
    check_dtype(op, "logits", logits.dtype, FLOAT_DTYPES)
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= sampling.MAX_VOCABULARY:
        allowed = f"[B, V], V of 1 to {sampling.MAX_VOCABULARY}"
        raise ShapeError(f"qcut::{op}: logits have shape {list(logits.shape)}; allowed: {allowed}")


def _check_state(
    op: str, name: str, state: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    check_tensor(op, name, state, (dtype,), shape, device)
    if not state.is_contiguous():
        raise ShapeError(f"qcut::{op}: {name} have strides {list(state.stride())}; allowed: contiguous")


def _check_host_copy(op: str, host_copy: Tensor | None, turn: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raises unless host_copy is ``[R, *shape]`` on the host and given together with turn."""
    if (host_copy is None) != (turn is None):
        raise ConfigError(f"qcut::{op}: host_copy and turn go together; give both or neither")
    if host_copy is not None:
        check_dtype(op, "host_copy", host_copy.dtype, (torch.int64,))
        if (
            host_copy.dim() != len(shape) + 1
            or host_copy.shape[1:] != shape
            or not len(host_copy)
            or not host_copy.is_contiguous()
        ):
            given = f"{list(host_copy.shape)} and strides {list(host_copy.stride())}"
            allowed = ", ".join(("R", *map(str, shape)))
            raise ShapeError(f"qcut::{op}: host_copy has shape {given}; allowed: [{allowed}], contiguous")
        if host_copy.device.type not in ("cpu", "meta"):
            raise DeviceError(f"qcut::{op}: host_copy is on {host_copy.device}; allowed: the host")


def _check_context(op: str, context: int) -> None:
    if context < 1:
        raise ConfigError(f"qcut::{op}: context is {context}; allowed: 1 and more")


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
        host_copy: int64 ``[R, B]`` on the host, contiguous, pinned if the logits are on a GPU: row ``turn[b]`` gets
            token b, too. Who reads waits for the device. None: there is none.
        turn: int32 ``[B]``, contiguous, with ``host_copy``, each 0 to R - 1; raised by one, from R - 1 to 0.

    Raises:
        DtypeError, ShapeError, DeviceError: a tensor is not as above.
        ConfigError: ``context`` is below 1, or one of ``host_copy`` and ``turn`` without the other.

    Exactness: bitwise.
    """

    logits: Tensor
    tokens: Annotated[Tensor, MUTATED]
    positions: Annotated[Tensor, MUTATED]
    slots: Annotated[Tensor, MUTATED]
    context: int
    host_copy: Annotated[Tensor | None, MUTATED] = None
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
            if state is not None:
                _check_state(op, name, state, dtype, logits.shape[:1], logits.device)
        _check_context(op, self.context)
        _check_host_copy(op, self.host_copy, self.turn, logits.shape[:1])

    def fake(self) -> None:
        return None

    def cpu(self) -> None:
        self.tokens.copy_(sampling.argmax(self.logits))
        self.positions.add_(1).clamp_(max=self.context - 1)
        self.slots.add_(1).clamp_(max=self.context)
        if self.host_copy is not None and self.turn is not None:
            self.host_copy.scatter_(0, self.turn.long()[None], self.tokens[None])
            self.turn.add_(1).remainder_(len(self.host_copy))


@operator("accept", returns="()")
class AcceptOp(NamedTuple):
    """Ends a step of speculative decoding in place: accepts drafted tokens, and drafts the next ones from the text.

    Let ``s = slots[b]`` and ``m = min(counts[b], T, context - s)``. Of sequence b, the first a drafts are accepted, a
    the number of leading t from 0 to m - 2 with ``chosen[b, t] == tokens[t + 1, b]``. The ``n = a + 1`` new tokens are
    ``chosen[b, :n]``: appended to ``text`` as far as they fit, the last one in ``tokens[0, b]``, ``positions = min(s +
    n, context - 1)``, ``slots = min(s + n, context)``. If s is ``context`` or more, the sequence is full or padding:
    n and d are 0, ``counts`` becomes 1, ``host_copy`` and ``turn`` are written, and all else stays.

    Drafts continue the text after an earlier occurrence of its last tokens. With ``E = ends[b]``, the g tokens that
    end at j, j < E - 1, equal the g last ones of ``text[b, :E]``: g is as large as possible from ``least`` to ``most``,
    then j is as large as possible. Draft i is ``text[b, j + 1 + i % (E - 1 - j)]``, so the text continues with its
    period. There are ``d = min(W - 1, context - 1 - slots[b])`` drafts, or none without such a j. They become
    ``tokens[1 : 1 + d, b]``, rows after them become 0, and ``counts`` becomes 1 + d.

    Args:
        chosen: int64 ``[B, T]``, contiguous, T from 1 to W: the token that the model chose after each one that it read.
        tokens: int64 ``[W, B]``, contiguous, W from 1 to 16: the token that each sequence read first, its drafts below
            it; written.
        counts: int32 ``[B]``, contiguous, 1 to W: tokens of each sequence in ``tokens``; written.
        positions: int32 ``[B]``, contiguous, the position of each sequence's first token; raised by n.
        slots: int32 ``[B]``, contiguous, the place of each sequence's first token in the cache; raised by n.
        text: int32 ``[B, H]``, contiguous: the tokens of each sequence, ``tokens[0, b]`` the last one; appended to.
        ends: int32 ``[B]``, contiguous, 0 to H: tokens in each row of ``text``; raised by those appended.
        context: tokens that the cache has room for, at least 1.
        least: tokens of the shortest n-gram that gives drafts, 1 to ``most``.
        most: tokens of the longest n-gram that is compared, 0 to 8. 0: no drafts, and ``least`` may be anything.
        host_copy: int64 ``[R, B, W + 2]`` on the host, contiguous, pinned if the tokens are on a GPU: row b of
            ``host_copy[turn[b]]`` gets n, d, the n new tokens, and zeros. Who reads waits for the device. None: there
            is none.
        turn: int32 ``[B]``, contiguous, with ``host_copy``, each 0 to R - 1; raised by one, from R - 1 to 0.

    Raises:
        DtypeError, ShapeError, DeviceError: a tensor is not as above.
        ConfigError: ``context``, ``least`` or ``most`` is not as above, or one of ``host_copy`` and ``turn`` without
            the other.

    Exactness: bitwise.
    """

    chosen: Tensor
    tokens: Annotated[Tensor, MUTATED]
    counts: Annotated[Tensor, MUTATED]
    positions: Annotated[Tensor, MUTATED]
    slots: Annotated[Tensor, MUTATED]
    text: Annotated[Tensor, MUTATED]
    ends: Annotated[Tensor, MUTATED]
    context: int
    least: int = 2
    most: int = 4
    host_copy: Annotated[Tensor | None, MUTATED] = None
    turn: Annotated[Tensor | None, MUTATED] = None

    def check(self) -> None:
        op, chosen, tokens, text = "accept", self.chosen, self.tokens, self.text
        if tokens.dim() != 2 or not 1 <= len(tokens) <= MOST_FED:
            allowed = f"[W, B], W of 1 to {MOST_FED}"
            raise ShapeError(f"qcut::{op}: tokens have shape {list(tokens.shape)}; allowed: {allowed}")
        width, sequences = tokens.shape
        if chosen.dim() != 2 or len(chosen) != sequences or not 1 <= chosen.shape[1] <= width:
            allowed = f"[{sequences}, T], T of 1 to {width}"
            raise ShapeError(f"qcut::{op}: chosen has shape {list(chosen.shape)}; allowed: {allowed}")
        if text.dim() != 2 or len(text) != sequences:
            raise ShapeError(f"qcut::{op}: text has shape {list(text.shape)}; allowed: [{sequences}, H]")
        for name, state, dtype, shape in (
            ("chosen", chosen, torch.int64, chosen.shape),
            ("tokens", tokens, torch.int64, tokens.shape),
            ("counts", self.counts, torch.int32, (sequences,)),
            ("positions", self.positions, torch.int32, (sequences,)),
            ("slots", self.slots, torch.int32, (sequences,)),
            ("text", text, torch.int32, text.shape),
            ("ends", self.ends, torch.int32, (sequences,)),
            ("turn", self.turn, torch.int32, (sequences,)),
        ):
            if state is not None:
                _check_state(op, name, state, dtype, shape, chosen.device)
        _check_context(op, self.context)
        if not 0 <= self.most <= MOST_MATCHED:
            raise ConfigError(f"qcut::{op}: most is {self.most}; allowed: 0 to {MOST_MATCHED}")
        if self.most and not 1 <= self.least <= self.most:
            raise ConfigError(f"qcut::{op}: least is {self.least}; allowed: 1 to {self.most}")
        _check_host_copy(op, self.host_copy, self.turn, (sequences, width + 2))

    def fake(self) -> None:
        return None

    def cpu(self) -> None:
        for b, slot in enumerate(self.slots.tolist()):
            new = drafts = self.chosen[b, :0]
            if slot < self.context:
                new = self._accept(b, slot)
                drafts = self._draft(b)
            self.counts[b] = 1 + len(drafts)
            if self.host_copy is not None and self.turn is not None:
                host_copy = self.host_copy[int(self.turn[b]), b].zero_()
                host_copy[0], host_copy[1] = len(new), len(drafts)
                host_copy[2 : 2 + len(new)] = new
        if self.host_copy is not None and self.turn is not None:
            self.turn.add_(1).remainder_(len(self.host_copy))

    def _accept(self, b: int, slot: int) -> Tensor:
        """The new tokens of a sequence that is not full."""
        valid = min(int(self.counts[b]), self.chosen.shape[1], self.context - slot)
        is_accepted = self.chosen[b, : valid - 1] == self.tokens[1:valid, b]
        new = self.chosen[b, : 1 + int(is_accepted.long().cumprod(0).sum())]
        appended = self.text[b, int(self.ends[b]) :][: len(new)]
        appended.copy_(new[: len(appended)])
        self.ends[b] += len(appended)
        self.slots[b] = slot + len(new)
        self.positions[b] = min(slot + len(new), self.context - 1)
        self.tokens[0, b] = new[-1]
        return new

    def _draft(self, b: int) -> Tensor:
        """The tokens that may follow the text of a sequence."""
        text, drafted = self.text[b, : int(self.ends[b])], self.tokens[1:, b].zero_()
        count = min(len(drafted), max(0, self.context - 1 - int(self.slots[b])))
        last, length = len(text) - 1, 0
        # Where n-grams of `length` tokens end that equal the last ones.
        matches = torch.arange(max(0, last), dtype=torch.int64, device=text.device)
        while length < min(self.most, last):
            longer = matches[matches >= length]
            if not len(longer := longer[text[longer - length] == text[last - length]]):
                break
            matches, length = longer, length + 1
        if length == 0 or length < self.least:
            return drafted[:0]
        match = int(matches[-1])
        places = match + 1 + torch.arange(count, dtype=torch.int64, device=text.device) % (last - match)
        return drafted[:count].copy_(text[places])
