"""The end of a step of speculative decoding on plain lists, after the words of `qcut.ops.next_token.AcceptOp`."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

DTYPES = {
    "chosen": torch.int64,
    "tokens": torch.int64,
    "counts": torch.int32,
    "positions": torch.int32,
    "slots": torch.int32,
    "text": torch.int32,
    "ends": torch.int32,
}
"""Types of a state's tensors, in the order of the operator's arguments."""


@dataclass
class State:
    """Tensors of the operator as lists."""

    chosen: list[list[int]]
    tokens: list[list[int]]
    counts: list[int]
    positions: list[int]
    slots: list[int]
    text: list[list[int]]
    ends: list[int]

    def tensors(self, device: str = "cpu") -> dict[str, Tensor]:
        """Contiguous tensors by name."""
        made = {name: torch.tensor(getattr(self, name), dtype=dtype) for name, dtype in DTYPES.items()}
        if not self.ends:  # lists of no sequences have no columns
            made |= {name: made[name].reshape(0, 1) for name in ("chosen", "text")}
        return {name: tensor.to(device) for name, tensor in made.items()}

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> State:
        """The lists of tensors."""
        return cls(**{name: tensor.tolist() for name, tensor in tensors.items()})


def accept_ref(
    state: State,
    context: int,
    least: int = 2,
    most: int = 4,
    host_copy: list[list[list[int]]] | None = None,
    turn: list[int] | None = None,
) -> None:
    """Change a state as the operator does, token by token."""
    width = len(state.tokens)
    for b in range(len(state.ends)):
        new: list[int] = []
        drafts: list[int] = []
        if state.slots[b] < context:
            valid = min(state.counts[b], len(state.chosen[b]), context - state.slots[b])
            for t in range(valid):
                new.append(state.chosen[b][t])
                if t + 1 < valid and state.tokens[t + 1][b] != new[-1]:
                    break
            for token in new:
                if state.ends[b] < len(state.text[b]):
                    state.text[b][state.ends[b]] = token
                    state.ends[b] += 1
            state.slots[b] += len(new)
            state.positions[b] = min(state.slots[b], context - 1)
            drafts = drafts_ref(state.text[b][: state.ends[b]], least, most, width - 1)
            drafts = drafts[: max(0, context - 1 - state.slots[b])]
            for row, token in enumerate([new[-1], *drafts, *[0] * (width - 1 - len(drafts))]):
                state.tokens[row][b] = token
        state.counts[b] = 1 + len(drafts)
        if host_copy is not None and turn is not None:
            host_copy[turn[b]][b] = [len(new), len(drafts), *new, *[0] * (width - len(new))]
            turn[b] = (turn[b] + 1) % len(host_copy)


def drafts_ref(text: list[int], least: int, most: int, count: int) -> list[int]:
    """Tokens that follow the latest of the longest earlier occurrences of a text's last tokens."""
    for length in range(most, max(least, 1) - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[len(text) - length :]:
                continued = list(text)
                for i in range(count):
                    continued.append(continued[end + i])
                return continued[len(text) :]
    return []


def random_state(random: Random, sequences: int, text: int) -> tuple[State, int, dict[str, int]]:
    """A state of few different tokens, a context, and the lengths of n-grams; some sequences are full."""
    width, kinds, context = random.randint(1, 16), random.randint(1, 4), random.randint(1, text + 20)
    chosen = random.randint(1, width)

    def some(count: int) -> list[int]:
        return [random.randrange(kinds) for _ in range(count)]

    slots = [random.randrange(context + 2) for _ in range(sequences)]
    state = State(
        [some(chosen) for _ in range(sequences)],
        [some(sequences) for _ in range(width)],
        [random.randint(1, width) for _ in range(sequences)],
        [min(slot, context - 1) for slot in slots],
        slots,
        [some(text) for _ in range(sequences)],
        [random.randint(0, text) for _ in range(sequences)],
    )
    most = random.randint(0, 8)
    return state, context, {"least": random.randint(1, max(most, 1)), "most": most}
