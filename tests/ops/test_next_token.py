"""The end of a greedy step: the largest logit, the next place, accepted and drafted tokens, refusals."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut import errors
from tests.support.accepting import State, accept_ref, random_state
from tests.support.oracles import FLOATS

OPS = torch.ops.qcut


def test_argmax_is_samplings() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, math.nan], [-math.inf] * 4, [math.nan] * 4, [-1.0, -0.0, 0.0, -2.0]])
    for dtype in FLOATS:
        assert OPS.argmax(logits.to(dtype)).tolist() == [1, 0, 0, 1]
    assert OPS.argmax(torch.zeros(0, 5)).shape == (0,)


def test_step_takes_likeliest_token_and_next_position() -> None:
    logits = torch.eye(4)[:, :3]
    tokens, positions, slots = torch.zeros(4, dtype=torch.int64), *torch.tensor([[0, 7, 8, 8], [0, 7, 8, 9]]).int()
    OPS.advance(logits, tokens, positions, slots, 9)
    assert (tokens.tolist(), positions.tolist(), slots.tolist()) == ([0, 1, 2, 0], [1, 8, 8, 8], [1, 8, 9, 9])
    torch.library.opcheck(OPS.advance.default, (logits, tokens, positions, slots, 9))
    host_copy, turn = torch.full((3, 4), -1), torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    OPS.advance(logits, tokens, positions, slots, 9, host_copy, turn)
    assert host_copy.tolist() == [[0, -1, -1, -1], [-1, 1, -1, -1], [-1, -1, 2, 0]]
    assert turn.tolist() == [1, 2, 0, 0]
    torch.library.opcheck(OPS.advance.default, (logits, tokens, positions, slots, 9, host_copy, turn))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck() -> None:
    torch.library.opcheck(OPS.argmax.default, (torch.randn(3, 8),))


def test_advance_refuses() -> None:
    logits, tokens, places = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(errors.DtypeError, match="advance: logits is int64"):
        OPS.advance(torch.zeros(2, 3, dtype=torch.int64), tokens, places, places.clone(), 4)
    with pytest.raises(errors.DtypeError, match="advance: tokens is int32"):
        OPS.advance(logits, places, places, places.clone(), 4)
    with pytest.raises(errors.ShapeError, match=r"advance: slots has shape \[1\]"):
        OPS.advance(logits, tokens, places, places[:1], 4)
    with pytest.raises(errors.ShapeError, match="allowed: contiguous"):
        OPS.advance(logits, torch.zeros(4, dtype=torch.int64)[::2], places, places.clone(), 4)
    with pytest.raises(errors.ConfigError, match="host_copy and turn go together"):
        OPS.advance(logits, tokens, places, places.clone(), 4, torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(errors.ShapeError, match=r"host_copy has shape \[2, 3\] .*; allowed: \[R, 2\], contiguous"):
        OPS.advance(logits, tokens, places, places.clone(), 4, torch.zeros(2, 3, dtype=torch.int64), places.clone())
    with pytest.raises(errors.ConfigError, match="context is 0"):
        OPS.advance(logits, tokens, places, places.clone(), 0)


def test_argmax_refuses() -> None:
    with pytest.raises(errors.ShapeError, match=r"argmax: logits have shape \[4\]"):
        OPS.argmax(torch.zeros(4))
    with pytest.raises(errors.DtypeError, match="argmax: logits is int64"):
        OPS.argmax(torch.zeros(2, 4, dtype=torch.int64))


# ── accept ───────────────────────────────────────────────────────────────────────────────────────


def run(state: State, context: int, **options: Any) -> State:
    """What the operator makes of a state: the state's lists again."""
    tensors = state.tensors()
    OPS.accept(*tensors.values(), context, **options)
    return State.of(tensors)


def one(text: list[int], chosen: list[int], drafts: list[int], *, width: int = 5, room: int = 64) -> State:
    """One sequence; its first token is the text's last."""
    tokens = [text[-1], *drafts, *[0] * (width - 1 - len(drafts))]
    slot = len(text) - 1
    return State([chosen], [[t] for t in tokens], [1 + len(drafts)], [slot], [slot], [text + [0] * room], [len(text)])


def drafts_of(text: list[int], **options: Any) -> list[int]:
    """What is drafted after a text with a chosen last token."""
    width, context = options.pop("width", 5), options.pop("context", 64)
    got = run(one(text[:-1], text[-1:], [], width=width), context, **options)
    tokens = [row[0] for row in got.tokens]
    assert tokens[0] == text[-1]
    assert not any(tokens[got.counts[0] :])
    return tokens[1 : got.counts[0]]


def test_all_drafts_are_accepted() -> None:
    got = run(one([1, 2], [3, 4, 5], [3, 4]), 64, most=0)
    assert (got.positions, got.slots, got.ends) == ([4], [4], [5])
    assert got.text[0][:6] == [1, 2, 3, 4, 5, 0]
    assert (got.tokens, got.counts) == ([[5], [0], [0], [0], [0]], [1])


def test_rejected_draft_ends_the_step() -> None:
    got = run(one([1, 2], [3, 9, 5, 6], [3, 4, 5]), 64, most=0)
    assert (got.slots, got.ends, got.text[0][:5], got.tokens[0]) == ([3], [4], [1, 2, 3, 9, 0], [9])
    got = run(one([1, 2], [7, 4, 5, 6], [3, 4, 5]), 64, most=0)
    assert (got.slots, got.ends, got.text[0][:4], got.tokens[0]) == ([2], [3], [1, 2, 7, 0], [7])


def test_fewer_were_chosen_than_drafted() -> None:
    got = run(one([1, 2], [3, 4], [3, 4, 5]), 64)
    assert (got.slots, got.text[0][:5]) == ([3], [1, 2, 3, 4, 0])


def test_fewer_were_drafted_than_chosen() -> None:
    got = run(one([1, 2], [3, 0, 0, 0], [3]), 64)
    assert (got.slots, got.text[0][:5], got.ends) == ([3], [1, 2, 3, 0, 0], [4])


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([1, 2, 3, 4, 5], []),
        ([3, 1], []),
        ([7, 7], []),
        ([7, 7, 7], [7, 7, 7, 7]),
        ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 5, 9]),
        ([9, 1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),
        ([8, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2], [3, 9, 1, 2]),
        ([1, 2, 3, 4, 5, 0, 2, 3, 4, 6, 1, 2, 3, 4], [5, 0, 2, 3]),
        ([6, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 7, 6, 1, 2, 3, 4], [7, 6, 1, 2]),
        ([1, 2, 3, 1, 2], [3, 1, 2, 3]),
        ([1, 2, 1, 2], [1, 2, 1, 2]),
        ([0, 1, 2, 2], []),
    ],
    ids=str,
)
def test_drafts(text: list[int], drafts: list[int]) -> None:
    assert drafts_of(text) == drafts


def test_lengths_of_matches() -> None:
    text = [1, 2, 3, 4, 5, 3, 6, 1, 2, 3]
    assert drafts_of(text, least=1, most=1) == [6, 1, 2, 3]
    assert drafts_of(text, least=1, most=2) == [4, 5, 3, 6]
    assert drafts_of(text, least=3, most=3) == [4, 5, 3, 6]
    assert drafts_of(text, least=4, most=8) == []
    assert drafts_of(text, least=9, most=0) == []
    long = list(range(20, 29))
    assert drafts_of([30, *long[1:], 1, 31, *long[1:], 2, 30, *long[1:]], most=8) == [2, 30, 21, 22]


def test_drafts_fit_into_the_step_and_context() -> None:
    text = [7] * 9
    assert drafts_of(text, width=1) == []
    assert drafts_of(text, width=2) == [7]
    assert drafts_of(text, width=16) == [7] * 15
    assert [len(drafts_of(text, context=context)) for context in (8, 9, 10, 12, 13, 99)] == [0, 0, 1, 3, 4, 4]


def test_context_limits_accepted_tokens() -> None:
    got = run(one([7, 7, 7], [7, 7, 7, 7], [7, 7, 7]), 4)
    assert (got.positions, got.slots, got.ends, got.counts) == ([3], [4], [5], [1])
    assert got.tokens == [[7], [0], [0], [0], [0]]


def test_full_sequences_and_padding_stay() -> None:
    state = one([1, 2, 3], [4, 4], [4])
    for slot in (9, 10):
        state.slots = [slot]
        host_copy, turn = torch.full((2, 1, 7), -1), torch.tensor([1], dtype=torch.int32)
        got = run(state, 9, host_copy=host_copy, turn=turn)
        assert got.counts == [1]
        got.counts = state.counts
        assert got == state
        assert (host_copy.tolist(), turn.tolist()) == ([[[-1] * 7], [[0] * 7]], [0])


def test_full_text_loses_new_tokens() -> None:
    got = run(one([1, 2], [3, 4, 5], [3, 4], room=1), 64)
    assert (got.text, got.ends, got.tokens[0], got.slots) == ([[1, 2, 3]], [3], [5], [4])
    got = run(one([7, 7, 7], [7], [], room=0), 64)
    assert (got.text, got.ends, got.slots, got.counts) == ([[7, 7, 7]], [3], [3], [5])
    empty = one([1], [2], [], room=0)
    empty.text, empty.ends = [[]], [0]
    assert run(empty, 64).ends == [0]


def test_told_gets_new_tokens() -> None:
    host_copy, turn = torch.full((2, 1, 7), -1), torch.zeros(1, dtype=torch.int32)
    state = run(one([5, 6, 1], [5, 6, 9], [5, 6]), 64, host_copy=host_copy, turn=turn)
    assert (host_copy[0, 0].tolist(), turn.tolist()) == ([3, 0, 5, 6, 9, 0, 0], [1])
    state.chosen = [[6]]
    assert run(state, 64, host_copy=host_copy, turn=turn, least=1).counts == [5]
    assert (host_copy[1, 0].tolist(), turn.tolist()) == ([1, 4, 6, 0, 0, 0, 0], [0])
    assert host_copy[0, 0].tolist() == [3, 0, 5, 6, 9, 0, 0]


@pytest.mark.parametrize("seed", range(60))
def test_accept_is_the_oracles(seed: int) -> None:
    random = Random(seed)
    state, context, options = random_state(random, sequences=random.randrange(6), text=random.choice((0, 3, 20, 60)))
    tensors, rows = state.tensors(), random.randint(1, 3)
    turn = torch.tensor([random.randrange(rows) for _ in state.ends], dtype=torch.int32)
    host_copy = torch.full((rows, len(state.ends), len(state.tokens) + 2), -1)
    want_host_copy, want_turn = host_copy.tolist(), turn.tolist()
    for _ in range(4):
        OPS.accept(*tensors.values(), context, **options, host_copy=host_copy, turn=turn)
        accept_ref(state, context, **options, host_copy=want_host_copy, turn=want_turn)
        assert State.of(tensors) == state
        assert (host_copy.tolist(), turn.tolist()) == (want_host_copy, want_turn)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck_of_accept() -> None:
    state = one([5, 6, 1], [5, 6, 9], [5, 6]).tensors()
    host_copy, turn = torch.full((2, 1, 7), -1), torch.zeros(1, dtype=torch.int32)
    torch.library.opcheck(OPS.accept.default, (*state.values(), 64))
    torch.library.opcheck(OPS.accept.default, (*state.values(), 64, 1, 2, host_copy, turn))


WRONG = [
    (
        {"tokens": torch.zeros(17, 1).long()},
        r"tokens have shape \[17, 1\]; allowed: \[W, B\], W of 1 to 16$",
    ),
    ({"tokens": torch.zeros(5, dtype=torch.int64)}, r"tokens have shape \[5\]"),
    ({"tokens": torch.zeros(5, 1, dtype=torch.int32)}, "tokens is int32; allowed: int64"),
    ({"tokens": torch.zeros(10, 1, dtype=torch.int64)[::2]}, r"tokens have strides \[2, 1\]; allowed: contiguous"),
    ({"chosen": torch.zeros(1, 6, dtype=torch.int64)}, r"chosen has shape \[1, 6\]; allowed: \[1, T\], T of 1 to 5"),
    ({"chosen": torch.zeros(1, 0, dtype=torch.int64)}, r"chosen has shape \[1, 0\]"),
    ({"chosen": torch.zeros(2, 3, dtype=torch.int64)}, r"chosen has shape \[2, 3\]"),
    ({"chosen": torch.zeros(1, 6, dtype=torch.int64)[:, ::2]}, r"chosen have strides \[6, 2\]"),
    ({"counts": torch.zeros(1, dtype=torch.int64)}, "counts is int64; allowed: int32"),
    ({"positions": torch.zeros(2, dtype=torch.int32)}, r"positions has shape \[2\]; allowed: \[1\]"),
    ({"text": torch.zeros(1, 9, dtype=torch.int64)}, "text is int64; allowed: int32"),
    ({"text": torch.zeros(2, 9, dtype=torch.int32)}, r"text has shape \[2, 9\]; allowed: \[1, H\]"),
    ({"text": torch.zeros(1, 9, dtype=torch.int32)[:, ::2]}, "text have strides"),
    ({"ends": torch.zeros(1, 1, dtype=torch.int32)}, r"ends has shape \[1, 1\]; allowed: \[1\]"),
    ({"context": 0}, "context is 0; allowed: 1 and more"),
    ({"most": 9}, "most is 9; allowed: 0 to 8"),
    ({"most": -1}, "most is -1; allowed: 0 to 8"),
    ({"least": 0}, "least is 0; allowed: 1 to 4"),
    ({"least": 5}, "least is 5; allowed: 1 to 4"),
    ({"host_copy": torch.zeros(2, 1, 7, dtype=torch.int64)}, "host_copy and turn go together; give both or neither"),
    ({"turn": torch.zeros(1, dtype=torch.int32)}, "host_copy and turn go together; give both or neither"),
    (
        {"host_copy": torch.zeros(2, 1, 6, dtype=torch.int64), "turn": torch.zeros(1, dtype=torch.int32)},
        r"host_copy has shape \[2, 1, 6\] .*; allowed: \[R, 1, 7\], contiguous",
    ),
]


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_accept_refuses(changed: dict[str, Any], message: str) -> None:
    arguments = {**one([5, 6, 1], [5, 6, 9], [5, 6]).tensors(), "context": 64, **changed}
    with pytest.raises(errors.QcutError, match=f"^qcut::accept: {message}"):
        OPS.accept(**arguments)
