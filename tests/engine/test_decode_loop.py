"""Steps of a batch: what they read, where they keep it, what comes next."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.engine.decode_loop import DecodeLoop, Fetched

CPU = torch.device("cpu")


class Recorder:
    """A model that says token + 1, and remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], list[int], list[int]]] = []

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        assert (positions.dtype, slots.dtype) == (torch.int32, torch.int32)
        self.seen.append((tokens.tolist(), positions.tolist(), slots.tolist()))
        return torch.nn.functional.one_hot(tokens + 1, 32).float()


def test_the_likeliest_is_read_next_unless_told_otherwise() -> None:
    read = Recorder()
    loop = DecodeLoop(read, 2, 10, CPU)
    loop.start(torch.tensor([3, 7]), torch.tensor([0, 4], dtype=torch.int32))
    assert loop.step().argmax(1).tolist() == [4, 8]
    assert Fetched(loop.tokens).wait() == [4, 8]
    loop.step()
    loop.choose(torch.tensor([20, 21]))
    loop.step()
    assert read.seen == [([3, 7], [0, 4], [0, 4]), ([4, 8], [1, 5], [1, 5]), ([20, 21], [2, 6], [2, 6])]


def test_full_sequences_and_unused_ones_have_a_slot_to_spare() -> None:
    read = Recorder()
    loop = DecodeLoop(read, 3, 10, CPU)
    loop.start(torch.tensor([1, 2]), torch.tensor([9, 3], dtype=torch.int32))
    assert loop.step().shape == (2, 32)
    assert loop.step().shape == (2, 32)
    assert loop.tokens.tolist() == [3, 4]
    assert [positions for _, positions, _ in read.seen] == [[9, 3, 9], [9, 4, 9]]
    assert [slots for *_, slots in read.seen] == [[9, 3, 10], [10, 4, 10]]
