"""What generation returns, the state of a sequence on its way there, and the batch in which sequences are decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from qcut.engine.drafters import Drafter, DraftState
from qcut.engine.likelihoods import LogProbability, likelihoods
from qcut.engine.runner import DecodeLoop, HostCopy, ModelRunner
from qcut.engine.speculation import Choose, DraftedLoop, DraftRecord, drafted_loop, next_width
from qcut.numerics.sampling import Ban, History, Rows, Sampling, only_allowed, sample
from qcut.text.matcher import Matcher, write_masks
from qcut.text.sequence_text import SequenceText

Reason = Literal["stop", "length", "context", "cancelled"]
End = Reason | Literal["failed"]


@dataclass(frozen=True)
class Generated:
    """The continuation of a prompt.

    Attributes:
        tokens: ids of the new tokens, a stop token included, or the token that completed a stop string.
        reason: why generation ended: ``stop`` at a stop token or string, ``length`` at ``max_new_tokens``, ``context``
            when the context was full, ``cancelled`` by `Request.cancel`.
        text: the new tokens' text up to a stop token or string, without special tokens; None without a tokenizer.
        log_probabilities: of each token, if asked for; else None.
        drafted_tokens: drafts of the sequence that steps have verified.
        accepted_tokens: those that were right, and are among ``tokens``.
    """

    tokens: list[int] = field(default_factory=list)
    reason: Reason = "length"
    text: str | None = None
    log_probabilities: list[LogProbability] | None = None
    drafted_tokens: int = field(default=0, compare=False)
    accepted_tokens: int = field(default=0, compare=False)

    def _repr_html_(self) -> str:
        from qcut.common.html import MOST_ROWS, html_table

        others = len(self.tokens) - MOST_ROWS
        ids = ", ".join(map(str, self.tokens[:MOST_ROWS])) + (f", … {others} more" if others > 0 else "")
        rows = [("reason", self.reason), ("new tokens", str(len(self.tokens))), ("ids", f"[{ids}]")]
        if self.log_probabilities:
            mean = sum(one.chosen for one in self.log_probabilities) / len(self.log_probabilities)
            rows.append(("mean log-probability", f"{mean:.4f}"))
        if self.drafted_tokens:
            rows.append(("drafts", f"{self.accepted_tokens} of {self.drafted_tokens} accepted"))
        return html_table(self.text or "", ("result", ""), rows)


@dataclass(frozen=True)
class Event:
    """A token of one sequence, as it comes, or an end without one.

    Attributes:
        sequence: index of the prompt that is continued, or of the sample of a request's prompt.
        token: id of the new token; None if the sequence ends without one.
        text: text that is certain with this token, often none: half a character waits for the other half, and the
            beginning of a stop string for its end. All texts of a sequence together are `Generated.text`. None without
            a tokenizer.
        reason: why the sequence ends with this token, as in `Generated`, or ``failed``; None while it goes on.
        log_probability: of the token, if asked for.
    """

    sequence: int
    token: int | None
    text: str | None
    reason: End | None
    log_probability: LogProbability | None = None


class SequenceState:
    """A sequence that is being continued.

    Args:
        prompt: ids, by which penalties go.
        length: tokens in the KV cache after prefill.
        context: tokens that the cache has room for. The last new token is not cached.
        max_new_tokens: most new tokens, or None.
        stops: ids that end the sequence.
        text: the sequence's; None without a tokenizer.
        index: among the sequences of a prompt or a call, which draws depend on.
        top: how many of the likeliest tokens are listed with each; None: no log-probabilities.
        sampling: how tokens are chosen.
        bans: tokens that are not chosen.
        least: new tokens before which no string ends the sequence.
        matcher: finds the tokens that its constraint allows; None: all are.
        speculate: whether its drafts make steps wider; other sequences' drafts may do so anyway.

    Attributes:
        tokens: ids of the new tokens that the host has.
        log_probabilities: of the new tokens, if asked for.
        finish_reason: why the sequence ended; None while it goes on.
        max_tokens: most new tokens, by ``max_new_tokens`` and the context.
        queued: new tokens, including those of queued steps: of a drafted step one until its tokens are on the host.
        drafts: what became of its drafts.
        drafted_tokens: drafts that steps have verified.
        accepted_tokens: those that were right, and are among ``tokens`` or on their way there.
        slot: in a batch; None while the sequence has none.
        newest: tokens of the last queued step, and the sequence's index in them, if it has a constraint.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        length: int,
        context: int,
        max_new_tokens: int | None,
        stops: frozenset[int],
        text: SequenceText | None = None,
        *,
        index: int = 0,
        top: int | None = None,
        sampling: Sampling | None = None,
        bans: tuple[Ban, ...] = (),
        least: int = 0,
        matcher: Matcher | None = None,
        speculate: bool = True,
    ) -> None:
        self.tokens: list[int] = []
        self.log_probabilities: list[LogProbability] | None = None
        self.finish_reason: Reason | None = None
        self.prompt, self.index, self.top = prompt, index, top
        self.sampling, self.bans = sampling or Sampling(), bans
        self.queued = 0
        self.drafts, self.speculate = DraftRecord(), speculate
        self.drafted_tokens = self.accepted_tokens = 0
        self.slot: int | None = None
        self._prompt_length, self._context = length, context
        self._stops, self._text, self._least = stops, text, least
        self.matcher = matcher
        self.newest: tuple[HostCopy, int] | None = None
        room = context - length + 1
        self.max_tokens = room if max_new_tokens is None else min(room, max_new_tokens)
        self._at_end: Reason = "length" if self.max_tokens == max_new_tokens else "context"

    @property
    def length(self) -> int:
        """Tokens in the KV cache before the last token that the host has."""
        return self._prompt_length + max(0, len(self.tokens) - 1)

    @property
    def cached(self) -> int:
        """Tokens in the KV cache once all queued steps have run."""
        return min(self._context, self._prompt_length + max(0, self.queued - 1))

    @property
    def next_position(self) -> int:
        """Position of the first token that no queued step chooses."""
        return self._prompt_length + self.queued

    @property
    def has_next(self) -> bool:
        """Whether there may be a token after those that are queued."""
        return self.finish_reason is None and self.queued < self.max_tokens

    @property
    def takes_likeliest(self) -> bool:
        """Whether each token is the likeliest by the model's own logits."""
        sampling = self.sampling
        plain = sampling.greedy and not (sampling.penalizes or sampling.logit_bias or self.bans)
        return plain and self.matcher is None

    def followed(self) -> Matcher | None:
        """Its matcher after the tokens that are queued, if there is one and the answer goes on.

        Waits for the last queued token.
        """
        matcher = self.matcher
        if matcher is None or self.finish_reason is not None:
            return None
        if self.newest is not None and matcher.count < self.queued:
            copy, index = self.newest
            matcher.consume(copy.wait()[index])
        return matcher if matcher.goes_on else None

    def banned(self) -> Iterator[int]:
        """Ids that the first token that no queued step chooses may not be."""
        place = self.next_position
        return (token for ban in self.bans if ban.until is None or place < ban.until for token in ban.tokens)

    @property
    def generated(self) -> Generated:
        """What has been generated."""
        text = None if self._text is None else self._text.text
        counts = self.drafted_tokens, self.accepted_tokens
        return Generated(self.tokens, self.finish_reason or "length", text, self.log_probabilities, *counts)

    def finish_without_token(self) -> None:
        """End a sequence that has no room for a token."""
        self.finish_reason = self._at_end

    def finish_cancelled(self) -> str | None:
        """End the sequence; returns the text held back."""
        self.finish_reason = "cancelled"
        return None if self._text is None else self._text.rest()

    def append(self, token: int, log_probability: LogProbability | None = None) -> str | None:
        """Append a token, which may be the last, and return the text that is certain with it.

        Raises:
            RequestError: its constraint fails.
        """
        self.tokens.append(token)
        is_complete = self._is_complete(token)
        if log_probability is not None:
            self.log_probabilities = self.log_probabilities or []
            self.log_probabilities.append(log_probability)
        if token in self._stops or is_complete:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.max_tokens:
            self.finish_reason = self._at_end
        if self._text is None:
            return None
        text = "" if token in self._stops else self._text.add(token, len(self.tokens) >= self._least)
        if self.finish_reason is not None:
            text += self._text.rest()
        if self._text.stopped:
            self.finish_reason = "stop"
        return text

    def _is_complete(self, token: int) -> bool:
        """Whether a constraint lets nothing follow the last token; a step may have gone on from it already."""
        matcher = self.matcher
        if matcher is None:
            return False
        if matcher.count < len(self.tokens):
            matcher.consume(token)
        if matcher.error is not None:
            raise matcher.error
        return matcher.is_complete and matcher.count == len(self.tokens)


S = TypeVar("S", bound=SequenceState)


@dataclass(frozen=True)
class NewTokens(Generic[S]):
    """New tokens of sequences, on their way to the host.

    Attributes:
        tokens: one of each sequence.
        sequences: in the tokens' order.
        log_probabilities: of the tokens.
    """

    tokens: HostCopy
    sequences: list[S]
    log_probabilities: list[LogProbability | None]

    def wait(self) -> Iterator[tuple[S, int, LogProbability | None]]:
        """Wait for the device; returns each new token with its sequence, a sequence's tokens in order."""
        return zip(self.sequences, self.tokens.wait(), self.log_probabilities, strict=True)


class DraftedTokens(NewTokens[S]):
    """New tokens of sequences from a step that verified drafts: one and more of each, none of a full one.

    ``tokens`` has for each sequence what `torch.ops.qcut.accept` tells, and ``log_probabilities`` are those of all
    tokens of the step, a sequence's side by side.

    Attributes:
        verified: drafts that the step has verified, once the host has its tokens.
        right: those that were right, as far as `wait` has given them to sequences that had not ended.
    """

    def __init__(
        self,
        tokens: HostCopy,
        sequences: list[S],
        log_probabilities: list[LogProbability | None],
        loop: DraftedLoop,
        width: int,
    ) -> None:
        super().__init__(tokens, sequences, log_probabilities)
        self._loop, self._width = loop, width
        self._lengths = loop.lengths
        self._new: list[list[int]] | None = None
        self.verified = self.right = 0

    @property
    def is_settled(self) -> bool:
        """Whether it is noted how many tokens each sequence has."""
        return self._new is not None

    def settle(self) -> list[list[int]]:
        """Wait for the device; note how many tokens each sequence has, once, and return them."""
        if self._new is None:
            rows, self._new = self.tokens.wait(), []
            for slot, (sequence, (count, found, *tokens)) in enumerate(zip(self.sequences, rows, strict=True)):
                sequence.queued += count - 1
                if self._loop.offered is not None:  # in this step and the next
                    sequence.drafts.found = found = self._loop.offered
                verified = sequence.drafts.note(self._width, count, found)
                sequence.drafted_tokens += verified
                self.verified += verified
                self._loop.settle(self._lengths, slot, self._width - count)
                self._new.append(tokens[:count])
        return self._new

    def wait(self) -> Iterator[tuple[S, int, LogProbability | None]]:
        """See `NewTokens.wait`."""
        return self._each(self.settle())

    def _each(self, new: list[list[int]]) -> Iterator[tuple[S, int, LogProbability | None]]:
        likely = self.log_probabilities or [None] * (len(self.sequences) * self._width)
        for slot, (sequence, tokens) in enumerate(zip(self.sequences, new, strict=True)):
            for i, (token, found) in enumerate(zip(tokens, likely[slot * self._width :], strict=False)):
                if i < len(tokens) - 1 and sequence.finish_reason is None:
                    sequence.accepted_tokens += 1
                    self.right += 1
                yield sequence, token, found


class _DraftedSampling:
    """How the tokens after each of a sequence's T tokens are chosen; T is ``width``."""

    def __init__(self, sequences: Sequence[SequenceState], width: int, device: torch.device) -> None:
        each = [sequence for sequence in sequences for _ in range(width)]
        self._rows = Rows.of([one.sampling for one in each], device, [one.bans for one in each])
        on_host = torch.tensor([one.index for one in each], dtype=torch.int64, device="cpu")
        self._indices = on_host.to(device, non_blocking=True)
        self._after = torch.arange(1, width + 1, dtype=torch.int64, device=device)

    def choose(self, state: DraftState, logits: Tensor) -> Tensor:
        """Tokens int64 ``[n T]`` by logits ``[n T, vocabulary]`` and the sequences' places in the cache."""
        positions = (state.slots[:, None] + self._after).flatten()
        return sample(logits, self._rows, self._indices, positions)


class _BatchSampling:
    """How the next token of each sequence is chosen, by settings, indices and positions on the device."""

    def __init__(self, sequences: Sequence[SequenceState], device: torch.device) -> None:
        settings = [each.sampling for each in sequences]
        bans = [each.bans if each.matcher is None else () for each in sequences]  # matchers leave them out
        self._rows = rows = Rows.of(settings, device, bans)
        self._takes_largest = rows.greedy and rows.biases is None and not rows.penalizes
        draws = [[each.index for each in sequences], [each.next_position for each in sequences]]
        on_host = torch.tensor(draws, dtype=torch.int64, device="cpu")
        self._indices, self._positions = on_host.to(device, non_blocking=True)

    def choose(self, logits: Tensor, history: History | None) -> Tensor:
        """The next tokens, int64 ``[n]``."""
        if self._takes_largest:
            return cast(Tensor, torch.ops.qcut.argmax(logits))
        tokens = sample(logits, self._rows, self._indices, self._positions, history)
        self._positions.add_(1)
        return tokens


class SequenceBatch(Generic[S]):
    """Sequences in the first slots of a runner's batch, decoded together.

    No call waits for the device, except for log-probabilities and constraints: the host may read the tokens of a step
    while the device computes the next one. With constraints it reads them while the device computes the next logits.

    Args:
        runner: its slots are this batch's while it is used.
        slots: most sequences.
        drafter: finds drafts; None: there are none. Steps have none either while penalties or a constraint go by the
            tokens before.

    Attributes:
        sequences: by slot.
        runs_ahead: whether the device computes a step while the host reads the tokens of the last one.
    """

    def __init__(self, runner: ModelRunner, slots: int, drafter: Drafter | None = None) -> None:
        self._runner, self._slots, self._device = runner, slots, runner.decoder.device
        self.sequences: list[S] = []
        self.runs_ahead = self._device.type == "cuda"
        self._tokens = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._history: History | None = None
        self._loop: DecodeLoop | DraftedLoop | None = None  # None: the batch has changed since the last step
        self._sampling: _BatchSampling | None = None  # None: all take the likeliest
        self._drafter, self._state = drafter, None
        if drafter is not None:
            self._state = DraftState.of(slots, drafter.drafts + 1, runner.context, self._device)
        self._unsettled: list[DraftedTokens[S]] = []
        self._draws: dict[int, _DraftedSampling] = {}

    def start(self, sequences: list[S]) -> NewTokens[S]:
        """Start with sequences that the runner has prefilled in the first slots; returns their first tokens."""
        new = self._first_tokens(sequences, self._runner, 0, 0)
        for slot, sequence in enumerate(sequences):
            sequence.slot = slot
        self.sequences = sequences
        return new

    def admit(self, sequence: S, source: ModelRunner, row: int) -> NewTokens[S]:
        """Give a sequence the next slot, unless its first token is its last; returns its first token.

        Args:
            sequence: to be continued.
            source: another runner, which has prefilled the prompt; keys and values are copied from its cache.
            row: slot of the prompt in ``source``.
        """
        slot = len(self.sequences)
        self._leave_loop()
        new = self._first_tokens([sequence], source, row, slot)
        if sequence.has_next:
            self._runner.cache.copy_sequence(source.cache, row, slot, 0, sequence.cached)
            sequence.slot = slot
            self.sequences.append(sequence)
        return new

    def _first_tokens(self, sequences: list[S], source: ModelRunner, row: int, slot: int) -> NewTokens[S]:
        """Choose the first tokens of sequences for slots from ``slot`` on, prefilled in ``source`` from ``row`` on."""
        n, history = len(sequences), None
        logits = source.logits[row : row + n]
        if any(sequence.sampling.penalizes for sequence in sequences):
            if self._history is None:
                self._history = History.empty(self._slots, logits.shape[1], self._device)
            history = self._history.of(slot, n)
            for i, sequence in enumerate(sequences):
                history.start(i, torch.tensor(sequence.prompt, dtype=torch.int64, device="cpu"))
        tokens = source.likeliest[row : row + n].clone()
        if not all(sequence.takes_likeliest for sequence in sequences):
            sampling = _BatchSampling(sequences, self._device)
            tokens = sampling.choose(self._only_allowed(logits, sequences), history)
        new = self._new_tokens(HostCopy(tokens), sequences, logits, tokens)
        self._tokens[slot : slot + n] = tokens
        if self._state is not None:
            for i, sequence in enumerate(sequences):
                self._state.begin(slot + i, sequence.prompt)
            self._state.put(slot, tokens, [sequence.cached for sequence in sequences], self._runner.context)
        if history is not None:
            history.add(tokens)
        return new

    def step(self) -> NewTokens[S]:
        """Queue a decode step of all sequences; returns the next token of each, or several."""
        if self._loop is None:
            lengths, drafts = [sequence.cached for sequence in self.sequences], self._state
            if drafts is None or self._drafter is None or any(map(_needs_plain_steps, self.sequences)):
                self._loop = self._runner.decode_loop(self._tokens[: len(lengths)], lengths)
                likeliest = all(sequence.takes_likeliest for sequence in self.sequences)
                self._sampling = None if likeliest else _BatchSampling(self.sequences, self._device)
            else:
                self._loop = drafted_loop(self._runner, drafts.of_slots(0, len(lengths)), lengths, self._drafter)
                self._draws.clear()
        if isinstance(self._loop, DraftedLoop):
            return self._drafted_step(self._loop)
        logits = self._runner.decode_step(self._loop)
        if self._sampling is not None:
            allowed = self._only_allowed(logits, self.sequences)
            self._loop.set_tokens(self._sampling.choose(allowed, self._history))
            if self._history is not None:
                self._history.add(self._loop.tokens)
        return self._new_tokens(self._loop.host_copy(), self.sequences, logits, self._loop.tokens)

    def _only_allowed(self, logits: Tensor, sequences: Sequence[S]) -> Tensor:
        """Logits with -Inf for tokens that constraints do not allow."""
        found = [(row, matcher, each) for row, each in enumerate(sequences) if (matcher := each.followed()) is not None]
        if not found:
            return logits
        shape, pinned = (len(sequences), found[0][1].words), self._device.type == "cuda"
        masks = torch.full(shape, -1, dtype=torch.int32, pin_memory=pinned, device="cpu")
        write_masks([(row, matcher, each.banned()) for row, matcher, each in found], masks.numpy().view(np.uint32))
        return only_allowed(logits, masks.to(self._device, non_blocking=True))

    def _drafted_step(self, loop: DraftedLoop) -> NewTokens[S]:
        sequences = self.sequences
        counted = [each.speculate and each.finish_reason is None for each in sequences]
        records = [each.drafts if counts else DraftRecord() for each, counts in zip(sequences, counted, strict=True)]
        likeliest = all(sequence.takes_likeliest for sequence in sequences)

        def choose(width: int) -> Choose | None:
            if likeliest:
                return None
            draws = self._draws.get(width) or _DraftedSampling(sequences, width, self._device)
            self._draws[width] = draws
            return partial(draws.choose, loop.used)

        width = next_width(records, loop.widths, lambda width: loop.cost(width, choose(width)))
        logits, chosen, copy = loop.step(width, choose(width))
        for slot, length in enumerate(loop.lengths):
            self._runner.cache.wrote(slot, 1, min(length, self._runner.context))
        tops = [sequence.top for sequence in sequences for _ in range(width)]
        found = likelihoods(logits, chosen.flatten(), tops)
        for sequence in sequences:
            sequence.queued += 1
        new = DraftedTokens(copy, list(sequences), found, loop, width)
        self._unsettled = [*(each for each in self._unsettled if not each.is_settled), new]
        return new

    def pad(self, sequence: S) -> None:
        """Make the slot of a sequence that has ended padding: the other sequences stay in their slots."""
        if self._loop is not None and sequence.slot is not None:
            self._loop.pad(sequence.slot)

    def retire(self, sequence: S) -> None:
        """Remove a sequence, if it has a slot: the last sequence moves there, and its KV cache is copied."""
        slot, sequence.slot = sequence.slot, None
        if slot is None:
            return
        self._leave_loop()
        last = self.sequences.pop()
        if last is not sequence:
            end = len(self.sequences)
            self._runner.cache.copy_sequence(self._runner.cache, end, slot, 0, last.cached)
            self._tokens[slot] = self._tokens[end]
            if self._history is not None:
                self._history.move(end, slot)
            if self._state is not None:
                self._state.of_slots(slot, 1).copy_(self._state.of_slots(end, 1))
            last.slot, self.sequences[slot] = slot, last

    def forget(self, sequence: S) -> None:
        """Remove a sequence, and leave the runner as it is, which others use; no further step is possible."""
        if sequence.slot is not None:
            self.sequences.remove(sequence)
            sequence.slot, self._loop = None, None

    def _leave_loop(self) -> None:
        """Save the next tokens, and where the sequences are, before the loop of other sequences starts."""
        loop, self._loop, n = self._loop, None, len(self.sequences)
        if loop is None:
            return
        self._tokens[:n].copy_(loop.tokens)
        if isinstance(loop, DraftedLoop):
            for new in self._unsettled:
                new.settle()
            self._unsettled = []
            cast(DraftState, self._state).of_slots(0, n).copy_(loop.used)
        elif self._state is not None:
            for slot, sequence in enumerate(self.sequences):
                self._state.begin(slot, [*sequence.prompt, *sequence.tokens[: sequence.queued - 1]])
            self._state.put(0, loop.tokens, [sequence.cached for sequence in self.sequences], self._runner.context)
            for sequence in self.sequences:
                sequence.drafts.found = 0

    def _new_tokens(self, copy: HostCopy, sequences: list[S], logits: Tensor, tokens: Tensor) -> NewTokens[S]:
        tops = [sequence.top for sequence in sequences]
        found: list[LogProbability | None] = [None] * len(tops)
        if any(top is not None for top in tops):
            found = likelihoods(logits, tokens, tops)
        for i, sequence in enumerate(sequences):
            sequence.queued += 1
            sequence.newest = None if sequence.matcher is None else (copy, i)
        return NewTokens(copy, list(sequences), found)


def _needs_plain_steps(sequence: SequenceState) -> bool:
    """Whether each token changes how the next one is chosen, so that no drafts can be verified."""
    return sequence.sampling.penalizes or sequence.matcher is not None
