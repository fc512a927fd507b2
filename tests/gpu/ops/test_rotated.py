"""Norms and activations that rotate their rows on the GPU, beside the same two kernels one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.backends.cuda import activation, norm
from qcut.backends.cuda.launch.plans import target, watched_loads
from qcut.engine.engine import Engine
from qcut.numerics.codebook.layout import from_blocks
from qcut.numerics.codebook.tokens import operands
from tests.gpu.support.decoders import llama
from tests.gpu.support.oracles import DEVICE, assert_same
from tests.support.decoders import VOCABULARY, prompts_of

OPS = torch.ops.qcut
CASES = (
    # dtype, of blocks, rows, columns, group, passes
    (torch.float16, torch.float16, 8, 4096, 128, 1),
    (torch.bfloat16, torch.int8, 8, 4096, 128, 1),
    (torch.float16, torch.int8, 3, 14336, 128, 2),
    (torch.bfloat16, torch.bfloat16, 17, 192, 64, 2),
    (torch.float16, torch.int8, 9, 160, 32, 1),
    (torch.float16, torch.float16, 1030, 2048, 32, 1),
    (torch.float16, torch.int8, 1030, 4096, 128, 1),
)


def rows(count: int, m: int, k: int, dtype: torch.dtype) -> list[Tensor]:
    """Rows with all kinds of values: ordinary, zeros, outliers, NaN."""
    found = [torch.randn(m, k, device=DEVICE, dtype=dtype) for _ in range(count)]
    for x in found:
        x[1] = 0
        x[2, k // 3] *= 1000
    found[0][m - 1, k // 2] = float("nan")
    return found


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...], m: int) -> None:
    """Hold blocks and scales to others; rows of blocks past m are unwritten."""
    for blocks, expected in zip(got, want, strict=True):
        if blocks.dim() == 4:
            blocks, expected = from_blocks(blocks, m), from_blocks(expected, m)
        assert_same(blocks, expected)


@pytest.mark.parametrize(("dtype", "to", "m", "k", "group", "passes"), CASES)
def test_rotated_rows_are_those_of_two_kernels(
    dtype: torch.dtype, to: torch.dtype, m: int, k: int, group: int, passes: int
) -> None:
    x, other = rows(2, m, k, dtype)
    weight, bias = 1 + 0.3 * torch.randn(k, device=DEVICE, dtype=dtype), torch.randn(k, device=DEVICE, dtype=dtype)
    seeds = list(range(passes))
    signs = operands("hadamard", group, k, seeds, dtype, DEVICE)
    turned, ahead_of_time = (signs, group, seeds, to), target(torch.cuda.current_device()).ahead_of_time
    with watched_loads() as loaded:
        for layer, residual in ((False, other), (True, None)):
            given = (x, residual, weight, bias if layer else None, layer, 1e-5)
            total, y = OPS.add_norm(*given)
            want = (total, *OPS.rotate_tokens(y, signs, "hadamard", *turned[1:]))
            for op in (OPS.add_norm_rotated.default, OPS.add_norm_rotated.early_read):
                same(op(*given, *turned), want, m)
        stacked = torch.cat((x, other), 1)
        for gate, up in ((x, None), (x, other), stacked.chunk(2, 1)):
            y = OPS.gelu_tanh(gate) if up is None else OPS.silu_mul(gate, up)
            want = OPS.rotate_tokens(y, signs, "hadamard", *turned[1:])
            same(OPS.activate_rotated(gate, up, *turned), want, m)
    assert ahead_of_time or any(f"_h{group}p{passes}" in name for name in loaded)


def test_unaligned_rows() -> None:
    m, k = 5, 256
    x, other = (torch.randn(m, k + 1, device=DEVICE).half()[:, 1:] for _ in range(2))
    weight = torch.randn(k + 1, device=DEVICE).half()[1:]
    signs = operands("hadamard", 128, k, [1], torch.float16, DEVICE)
    for to in (torch.float16, torch.int8):
        total, y = OPS.add_norm(x, other, weight, None, False, 1e-5)
        want = (total, *OPS.rotate_tokens(y, signs, "hadamard", 128, [1], to))
        same(OPS.add_norm_rotated(x, other, weight, None, False, 1e-5, signs, 128, [1], to), want, m)
        want = OPS.rotate_tokens(OPS.silu_mul(x, other), signs, "hadamard", 128, [1], to)
        same(OPS.activate_rotated(x, other, signs, 128, [1], to), want, m)


@pytest.mark.parametrize("scheme", ["codebook4", "codebook4_int8"])
def test_engines_give_the_logits_of_rotations_apart(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(scheme)

    def steps() -> list[Tensor]:
        engine = Engine(model, batch=3)
        read = engine.prefill(prompts_of(VOCABULARY, 20, 3, 7))
        return [read, engine.decode([5, 6, 7]), engine.decode([7, 8, 9])]

    within = steps()
    for module in (norm, activation):
        monkeypatch.setattr(module, "rotates_rows", lambda *_, **__: False)
    for got, want in zip(within, steps(), strict=True):
        assert_same(got, want)
