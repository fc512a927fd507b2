"""Chunks of prompts: their sizes, what they cover, and what they tell the device."""

from __future__ import annotations

import pytest
import torch

from qcut.engine.chunked_prefill import Chunk, Span, size_for, size_within, spans


def test_sizes_are_few_and_padding_is_small() -> None:
    sizes = sorted({size_for(count) for count in range(1, 8193)})
    assert sizes[:12] == [1, 2, 4, 8, 16, 32, 64, 80, 96, 112, 128, 160]
    assert len(sizes) == 7 + 4 * 7
    for count in range(1, 8193):
        size = size_for(count)
        assert count <= size
        assert size_for(size) == size
        assert size < 1.25 * count or size < 2 * count <= 128


def test_sequences_are_padded_by_less_than_a_quarter() -> None:
    sizes = sorted({size_for(count, doubling=1) for count in range(1, 300)})
    assert sizes[:13] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]
    assert all(count <= size_for(count, doubling=1) < 1.25 * count for count in range(1, 300))


def test_the_largest_size_within_a_limit() -> None:
    sizes = sorted({size_for(count) for count in range(1, 3000)})
    for limit in range(1, 2049):
        assert size_within(limit) == max(size for size in sizes if size <= limit)


@pytest.mark.parametrize("lengths", [[1], [5], [8], [17, 3], [2, 9, 1], [8, 8, 8], [1, 1, 16]])
@pytest.mark.parametrize("most", [1, 2, 5, 8])
def test_spans_cover_each_prompt_once_and_end_together(lengths: list[int], most: int) -> None:
    found = list(spans(lengths, most))
    assert len(found) == -(-max(lengths) // most)
    for i, length in enumerate(lengths):
        read = [place for span in found for place in range(span.firsts[i], span.firsts[i] + span.counts[i])]
        assert read == list(range(length))
        assert all(span.counts[i] <= most for span in found)
        assert found[-1].counts[i] >= 1
    assert all(max(span.counts) == most for span in found[1:])


def test_chunk_positions_write_padding_after_the_context() -> None:
    chunk = Chunk(3, 4, 10, torch.device("cpu"))
    prompts = [torch.tensor([11, 12, 13]), torch.tensor([21, 22, 23, 24, 25, 26])]
    chunk.fill(prompts, [8, 0], Span([1, 2], [2, 4]))
    assert chunk.ids[0, :2].tolist() == [12, 13]
    assert chunk.ids[1].tolist() == [23, 24, 25, 26]
    assert (chunk.starts.tolist(), chunk.lengths.tolist()) == ([9, 2, 0], [2, 4, 0])
    positions, slots = chunk.positions()
    assert (positions.dtype, slots.dtype) == (torch.int32, torch.int32)
    assert slots.view(3, 4).tolist() == [[9, 10, 10, 10], [2, 3, 4, 5], [10] * 4]
    assert positions.view(3, 4).tolist() == [[9, 9, 9, 9], [2, 3, 4, 5], [0, 1, 2, 3]]
    assert chunk.last_tokens().tolist() == [1, 7, 8]
    chunk.fill(prompts[:1], [0], Span([0], [1]))  # nothing of the last time is left
    assert chunk.ids.flatten().tolist() == [11] + [0] * 11
    assert (chunk.starts.tolist(), chunk.lengths.tolist()) == ([0] * 3, [1, 0, 0])
