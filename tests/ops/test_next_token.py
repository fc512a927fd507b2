"""The end of a greedy step: the largest logit, the next place, refusals."""

from __future__ import annotations

import math

import pytest
import torch

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut import errors
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
    told, turn = torch.full((3, 4), -1), torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    OPS.advance(logits, tokens, positions, slots, 9, told, turn)
    assert told.tolist() == [[0, -1, -1, -1], [-1, 1, -1, -1], [-1, -1, 2, 0]]
    assert turn.tolist() == [1, 2, 0, 0]
    torch.library.opcheck(OPS.advance.default, (logits, tokens, positions, slots, 9, told, turn))


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
    with pytest.raises(errors.ConfigError, match="told and turn go together"):
        OPS.advance(logits, tokens, places, places.clone(), 4, torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(errors.ShapeError, match=r"told has shape \[2, 3\] .*; allowed: \[H, 2\], contiguous"):
        OPS.advance(logits, tokens, places, places.clone(), 4, torch.zeros(2, 3, dtype=torch.int64), places.clone())
    with pytest.raises(errors.ConfigError, match="context is 0"):
        OPS.advance(logits, tokens, places, places.clone(), 0)


def test_argmax_refuses() -> None:
    with pytest.raises(errors.ShapeError, match=r"argmax: logits have shape \[4\]"):
        OPS.argmax(torch.zeros(4))
    with pytest.raises(errors.DtypeError, match="argmax: logits is int64"):
        OPS.argmax(torch.zeros(2, 4, dtype=torch.int64))
