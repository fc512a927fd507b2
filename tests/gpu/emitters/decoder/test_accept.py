"""The end of a step of speculative decoding on CUDA: bitwise the CPU's, over many steps, in graphs."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from tests.gpu.support.oracles import DEVICE, assert_same
from tests.support.accepting import State, random_state

OPS = torch.ops.qcut
STEPS = 6


def guarded(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """A state on the GPU in one piece of memory, with guards between its tensors, and that memory."""
    gap = 256
    memory = torch.full(
        (sum(t.nbytes + 2 * gap for t in state.values()) + gap,), 0x5A, dtype=torch.uint8, device=DEVICE
    )
    found, at = {}, gap
    for name, tensor in state.items():
        found[name] = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        at += -(-tensor.nbytes // gap) * gap + gap
    return found, memory


def assert_guards(memory: Tensor, state: dict[str, Tensor]) -> None:
    """No byte outside of the state's tensors was written."""
    inside = torch.zeros_like(memory, dtype=torch.bool)
    for tensor in state.values():
        first = tensor.data_ptr() - memory.data_ptr()
        inside[first : first + tensor.nbytes] = True
    assert bool((memory[~inside] == 0x5A).all())


def compare(state: State, context: int, options: dict[str, Any], seed: int, rows: int = 3) -> None:
    """Takes the same steps on the CPU, on the GPU and in a graph; many of the chosen tokens are drafted ones."""
    cpu = state.tensors()
    sequences, width = len(state.ends), len(state.tokens)
    gpu, memory = guarded(cpu)
    captured, captured_memory = guarded(cpu)
    host_copies = [torch.full((rows, sequences, width + 2), -7, pin_memory=True) for _ in range(3)]
    turns = [torch.arange(sequences, dtype=torch.int32, device=place) % rows for place in ("cpu", DEVICE, DEVICE)]

    def step(which: int, tensors: dict[str, Tensor]) -> None:
        OPS.accept(*tensors.values(), context, **options, host_copy=host_copies[which], turn=turns[which])

    OPS.accept(*state.tensors(DEVICE).values(), context, **options)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(2, captured)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        read = cpu["chosen"].shape[1]
        drafts = torch.cat((cpu["tokens"][1:], cpu["tokens"][:1])).t()[:, :read]
        is_draft = torch.rand(drafts.shape, generator=generator) < 0.8
        chosen = torch.where(is_draft, drafts, torch.randint(0, 4, drafts.shape, generator=generator))
        for tensors in (cpu, gpu, captured):
            tensors["chosen"].copy_(chosen)
        step(0, cpu)
        step(1, gpu)
        graph.replay()
        torch.cuda.synchronize()
        for found, host_copy, turn in zip((gpu, captured), host_copies[1:], turns[1:], strict=True):
            for name, tensor in cpu.items():
                assert_same(found[name].cpu(), tensor)
            assert_same(host_copy, host_copies[0])
            assert_same(turn.cpu(), turns[0])
    assert_guards(memory, gpu)
    assert_guards(captured_memory, captured)


@pytest.mark.parametrize("seed", range(30))
def test_accept_is_the_cpus(seed: int) -> None:
    random = Random(seed)
    state, context, options = random_state(random, random.randint(1, 9), random.choice((0, 3, 20, 300, 3000)))
    compare(state, context, options, seed, rows=random.randint(1, 3))


@pytest.mark.parametrize("known", [2, 31, 255, 256, 257, 2048, 2049, 8100])
@pytest.mark.parametrize("kinds", [1, 2, 50])
def test_drafts_of_long_texts(known: int, kinds: int) -> None:
    random = Random(known + kinds)
    text = [[random.randrange(kinds) for _ in range(8192)] for _ in range(3)]
    fed = [[row[known - 1] for row in text], *[[0] * 3 for _ in range(7)]]
    places = [known - 1] * 3
    state = State([[1] * 8] * 3, fed, [1] * 3, places, places, text, [known] * 3)
    compare(state, 8192, {"least": 2, "most": 8}, known)


def test_accept_without_host_copy() -> None:
    state, context, options = random_state(Random(5), 8, 300)
    cpu, gpu = state.tensors(), state.tensors(DEVICE)
    for tensors in (cpu, gpu):
        OPS.accept(*tensors.values(), context, **options)
    for name, tensor in cpu.items():
        assert_same(gpu[name].cpu(), tensor)
