"""Decode steps: what they read, where they keep it, which token comes next."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from qcut.engine import runner
from qcut.engine.runner import DecodeLoop, HostCopy

CPU = torch.device("cpu")


class Recorder:
    """A model that says token + 1, and remembers what it was given."""

    def __init__(self) -> None:
        self.reaches: list[int] = []
        self.seen: list[tuple[list[int], list[int], list[int]]] = []

    def __call__(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, reach: int, others: Sequence[int] = ()
    ) -> Tensor:
        assert (positions.dtype, slots.dtype) == (torch.int32, torch.int32)
        self.reaches.append(reach)
        self.seen.append((tokens.tolist(), positions.tolist(), slots.tolist()))
        return torch.nn.functional.one_hot(tokens + 1, 32).float()


def test_likeliest_token_comes_next_unless_set() -> None:
    read = Recorder()
    loop = DecodeLoop(read, 2, 10, CPU)
    loop.start(torch.tensor([3, 7]), torch.tensor([0, 4], dtype=torch.int32))
    assert loop.step().argmax(1).tolist() == [4, 8]
    assert HostCopy(loop.tokens).wait() == [4, 8]
    loop.step()
    loop.set_tokens(torch.tensor([20, 21]))
    loop.step()
    assert read.seen == [([3, 7], [0, 4], [0, 4]), ([4, 8], [1, 5], [1, 5]), ([20, 21], [2, 6], [2, 6])]


def test_padded_sequence_is_not_written() -> None:
    read = Recorder()
    loop = DecodeLoop(read, 2, 10, CPU)
    loop.start(torch.tensor([1, 2]), torch.tensor([3, 8], dtype=torch.int32))
    loop.step()
    for _ in range(2):
        loop.pad(0)
        loop.step()
    assert [positions for _, positions, _ in read.seen] == [[3, 8], [0, 9], [1, 9]]
    assert [slots for *_, slots in read.seen] == [[3, 8], [10, 9], [10, 10]]
    assert loop.lengths == [4, 10]
    loop.start(torch.tensor([1, 2]), torch.tensor([3, 8], dtype=torch.int32))
    loop.step()
    assert loop.lengths == [4, 9]


def test_full_and_unused_slots_write_after_the_context() -> None:
    read = Recorder()
    loop = DecodeLoop(read, 3, 10, CPU)
    loop.start(torch.tensor([1, 2]), torch.tensor([9, 3], dtype=torch.int32))
    assert loop.step().shape == (2, 32)
    assert loop.step().shape == (2, 32)
    assert loop.tokens.tolist() == [3, 4]
    assert [positions for _, positions, _ in read.seen] == [[9, 3, 0], [9, 4, 1]]
    assert [slots for *_, slots in read.seen] == [[9, 3, 10], [10, 4, 10]]


def test_steps_take_the_bucket_of_the_longest_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "FIRST_BUCKET", 4)
    read = Recorder()
    loop = DecodeLoop(read, 4, 10, CPU)
    loop.start(torch.tensor([1, 2, 3]), torch.tensor([2, 1, 7], dtype=torch.int32))
    for _ in range(2):
        loop.step()
    loop.pad(2)
    for _ in range(3):
        loop.step()
    loop.pad(0)
    loop.step()
    assert read.reaches == [9, 0, 9, 9, 9, 9]
    lengths = [max(positions) + 1 for _, positions, _ in read.seen]
    assert lengths == [8, 9, 5, 6, 7, 7], "nobody reads beyond the longest"
    loop.start(torch.tensor([1]), torch.tensor([3], dtype=torch.int32))
    for _ in range(9):
        loop.step()
    assert read.reaches[6:] == [5, 9, 9, 9, 9, 0, 0, 0, 0]


@pytest.mark.parametrize(("context", "bounds"), [(1, [1]), (512, [512]), (513, [512, 513]), (2048, [512, 1024, 2048])])
def test_buckets_double_up_to_the_context(context: int, bounds: list[int]) -> None:
    assert runner.buckets(context) == bounds
