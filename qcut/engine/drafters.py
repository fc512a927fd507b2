"""Drafters: what finds drafts for `qcut.engine.speculation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from qcut.common.numbers import check_integer
from qcut.engine.runner import MOST_ROWS, ModelRunner
from qcut.errors import ConfigError, shown

MOST_DRAFTS, MOST_NGRAM = MOST_ROWS - 1, 8
"""Most drafts of a step, and tokens of an n-gram, that `torch.ops.qcut.accept` takes."""


class DraftState(NamedTuple):
    """What drafted steps read and write of n sequences, on the device; see `torch.ops.qcut.accept`.

    Attributes:
        tokens: int64 ``[W, n]``: each sequence's next token, and its drafts.
        counts: int32 ``[n]``, how many of these there are.
        positions: int32 ``[n]``, of the next token.
        slots: int32 ``[n]``, its place in the cache; the context for a sequence that is full or padding.
        text: int32 ``[n, context + 1]``, ids of prompt and answer; the last one is the next token.
        ends: int32 ``[n]``, how many ids there are.
    """

    tokens: Tensor
    counts: Tensor
    positions: Tensor
    slots: Tensor
    text: Tensor
    ends: Tensor

    @classmethod
    def of(cls, sequences: int, width: int, context: int, device: torch.device) -> DraftState:
        """The state of padding."""

        def whole(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        n = sequences
        tokens = torch.zeros(width, n, dtype=torch.int64, device=device)
        return cls(tokens, whole(n) + 1, whole(n), whole(n) + context, whole(n, context + 1), whole(n))

    def of_slots(self, first: int, count: int) -> DraftState:
        """A view of some sequences."""
        part = slice(first, first + count)
        return DraftState(self.tokens[:, part], *(tensor[part] for tensor in self[1:]))

    def copy_(self, other: DraftState) -> None:
        """Copy the state of as many sequences."""
        for ours, theirs in zip(self, other, strict=True):
            ours.copy_(theirs, non_blocking=True)

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        """Begin a sequence's text with the ids of its prompt; see `put`."""
        row = self.text[slot, : len(prompt)]
        row.copy_(torch.tensor(prompt, dtype=torch.int32, device="cpu"), non_blocking=True)
        self.ends[slot] = len(prompt)

    def put(self, slot: int, tokens: Tensor, lengths: Sequence[int], context: int) -> None:
        """Put the next tokens int64 ``[m]`` of sequences from ``slot`` on, after so many tokens in the cache."""
        part, places = self.of_slots(slot, len(tokens)), torch.tensor(lengths, dtype=torch.int32, device="cpu")
        part.tokens[0].copy_(tokens)
        part.counts.fill_(1)
        part.slots.copy_(places, non_blocking=True)
        torch.clamp(part.slots, max=context - 1, out=part.positions)
        part.text.scatter_(1, part.ends.long().clamp(max=context)[:, None], tokens.to(torch.int32)[:, None])
        part.ends.add_(1).clamp_(max=context + 1)


class Drafter(Protocol):
    """Finds drafts of sequences. Whatever it finds, the tokens of an engine are those of plain steps.

    Attributes:
        drafts: most drafts of a sequence, 1 to `MOST_DRAFTS`.
        shortest: fewest last tokens that the look-up compares, see `Lookup`.
        longest: most of them; 0: there is no look-up, and steps with drafts call `propose`.
        reads_hidden: whether `propose` is given hidden states, as heads that are trained with a model read them.
    """

    @property
    def drafts(self) -> int:
        """See above."""

    @property
    def shortest(self) -> int:
        """See above."""

    @property
    def longest(self) -> int:
        """See above."""

    @property
    def reads_hidden(self) -> bool:
        """See above."""

    def companion(self, runner: ModelRunner, tokenizer: Any) -> ModelRunner | None:
        """A runner with a KV cache of its own, for the sequences of an engine's runner; None: there is none.

        It prefills the prompts that the engine's runner prefills, and its sequences are copied with the engine's.

        Args:
            runner: of the engine.
            tokenizer: of the engine, or None.

        Raises:
            ConfigError: the drafter does not go with the engine.
        """

    def propose(self, companion: ModelRunner | None, state: DraftState, drafts: int, hidden: Tensor | None) -> None:
        """Write drafts 1 to ``drafts`` of all sequences into ``state.tokens``; runs in a CUDA graph.

        Args:
            companion: of `companion`, for the same batch slots.
            state: of all slots. What is written for padding does not matter.
            drafts: number to write.
            hidden: states ``[n, H]`` before the last norm, after which each next token was chosen; None unless
                ``reads_hidden``. Unknown, zeros, before a sequence's first drafted or plain step.
        """


@dataclass(frozen=True)
class Lookup:
    """Drafts by look-up: what followed the last tokens where they stood before, in prompt and answer.

    It costs next to nothing, and is right if a text repeats its prompt or itself: edits of a document, code.

    Attributes:
        drafts: most drafted tokens of a step, 1 to 15.
        shortest: fewest last tokens that must have stood before, 1 to ``longest``.
        longest: most of them that are compared, to 8: of several places the one that agrees longest, then the last one.

    Raises:
        ConfigError: a number out of its range.
    """

    drafts: int = 7
    shortest: int = 2
    longest: int = 4
    reads_hidden: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, most in (("drafts", MOST_DRAFTS), ("longest", MOST_NGRAM), ("shortest", self.longest)):
            check_integer(getattr(self, name), f"Lookup: {name}", 1, most)

    def companion(self, runner: ModelRunner, tokenizer: Any) -> None:
        """See `Drafter.companion`."""

    def propose(self, companion: ModelRunner | None, state: DraftState, drafts: int, hidden: Tensor | None) -> None:
        """See `Drafter.propose`: the operator that accepts drafts looks the next ones up."""


class HasRunner(Protocol):
    """A `qcut.Engine`."""

    runner: ModelRunner
    tokenizer: Any


@dataclass(frozen=True)
class DraftModel:
    """Drafts by a smaller model of the same vocabulary, each its likeliest token.

    Attributes:
        engine: the smaller model's `qcut.Engine`, on the same device and of the same context. Its weights are shared;
            sequences of the engine that it drafts for have a KV cache of their own.
        drafts: most drafted tokens of a step, 1 to 15.

    Raises:
        ConfigError: no engine, or a number out of its range.
    """

    engine: HasRunner
    drafts: int = 4
    shortest: ClassVar[int] = 1
    longest: ClassVar[int] = 0
    reads_hidden: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(getattr(self.engine, "runner", None), ModelRunner):
            raise ConfigError(f"DraftModel: engine is {shown(self.engine)}; allowed: a qcut.Engine")
        check_integer(self.drafts, "DraftModel: drafts", 1, MOST_DRAFTS)

    def companion(self, runner: ModelRunner, tokenizer: Any) -> ModelRunner:
        """See `Drafter.companion`. Tokenizers are compared if both engines have one."""
        ours = self.engine.runner
        for name, found, allowed in (
            ("a vocabulary of", ours.decoder.vocabulary, runner.decoder.vocabulary),
            ("a context of", ours.context, runner.context),
            ("the device", ours.decoder.device, runner.decoder.device),
        ):
            if found != allowed:
                raise ConfigError(f"DraftModel: the engine has {name} {found}; allowed: {allowed}, as of the model")
        check_words(self.engine.tokenizer, tokenizer, "DraftModel: the tokenizer")
        return ours.with_batch(runner.batch)

    def propose(self, companion: ModelRunner | None, state: DraftState, drafts: int, hidden: Tensor | None) -> None:
        """See `Drafter.propose`.

        The first step reads the token before the next one again: it may have been the last draft, which the smaller
        model has not read.
        """
        assert companion is not None
        context = companion.context
        before = state.text.gather(1, (state.ends - 2).clamp(min=0).long()[:, None]).flatten().long()
        full = state.slots >= context
        tokens = torch.stack((before, state.tokens[0]))
        places = torch.where(full, context, state.slots - 1)
        logits = companion.forward_tokens(tokens, (state.positions - 1).clamp(min=0), places)[1::2]
        for i in range(1, drafts + 1):
            state.tokens[i].copy_(torch.ops.qcut.argmax(logits))
            if i < drafts:
                at, places = state.positions + i, torch.where(full, context, state.slots + i)
                at, places = at.clamp(max=context - 1), places.clamp(max=context)
                logits = companion.forward_tokens(state.tokens[i : i + 1], at, places)
        room = (context - state.slots).clamp(min=1, max=drafts + 1)
        state.counts.copy_(room)


def accompany(runner: ModelRunner, drafter: Drafter, tokenizer: Any) -> None:
    """Give a runner what a drafter needs; ``tokenizer`` is the engine's, or None.

    Raises:
        ConfigError: no drafter, or one that does not go with the runner.
    """
    if not all(hasattr(drafter, name) for name in ("drafts", "companion", "propose")):
        raise ConfigError(f"speculate is {shown(drafter)}; allowed: a qcut.Lookup, a qcut.DraftModel, or None")
    companion = drafter.companion(runner, tokenizer)
    if companion is not None:
        runner.accompany(companion)


def check_words(tokenizer: Any, models: Any, what: str) -> None:
    """Compare another model's tokenizer, which messages call ``what``, and a model's, if there are both.

    Raises:
        ConfigError: a word has another id.
    """
    if tokenizer is None or models is None:
        return
    found, allowed = (each.get_vocab() for each in (tokenizer, models))
    others = sorted(word for word, index in found.items() if allowed.get(word) != index)
    if others:
        given = f"{others[0]!r} as token {found[others[0]]}"
        raise ConfigError(f"{what} has {given}; allowed: {allowed.get(others[0])}, as the model's tokenizer")
