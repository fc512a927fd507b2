"""Norms and activations that rotate their rows on the GPU, against the same two kernels one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import qcut
from qcut.backends.cuda import activation, norm
from qcut.backends.cuda.launch.plans import target, watched_loads
from qcut.engine.engine import Engine
from qcut.layers.experts.experts import Experts
from qcut.numerics.codebook.layout import from_blocks
from qcut.numerics.codebook.tokens import operands
from tests.gpu.support.decoders import llama
from tests.gpu.support.oracles import DEVICE, assert_same
from tests.support.decoders import VOCABULARY, WIDE, prompts_of, small

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


GATES: tuple[tuple[float, ...], ...] = ((), (1.702, 7.0, True), (1.0, 3.3, False))
"""Alpha, limit and plus_one."""


def rows(count: int, m: int, k: int, dtype: torch.dtype) -> list[Tensor]:
    """Rows with all kinds of values: ordinary, zeros, outliers, NaN."""
    found = [torch.randn(m, k, device=DEVICE, dtype=dtype) for _ in range(count)]
    for x in found:
        x[1] = 0
        x[2, k // 3] *= 1000
    found[0][m - 1, k // 2] = float("nan")
    return found


IN_ROWS = (
    # dtype, rows, columns, group
    (torch.float16, 1, 4096, 128),
    (torch.bfloat16, 9, 160, 32),
    (torch.float16, 17, 12288, 64),
    (torch.bfloat16, 130, 14336, 128),
    (torch.bfloat16, 1030, 4096, 128),
    (torch.bfloat16, 5, 32 * 257, 32),
)


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
                plain = torch.full_like(y, 9.0)
                same(op(*given, *turned, plain), want, m)
                assert_same(plain, y)
        stacked = torch.cat((x, other), 1)
        for gate, up in ((x, None), (x, other), stacked.chunk(2, 1)):
            for numbers in GATES if up is not None else ((),):
                y = OPS.gelu_tanh(gate) if up is None else OPS.silu_mul(gate, up, None, *numbers)
                want = OPS.rotate_tokens(y, signs, "hadamard", *turned[1:])
                for op in (OPS.activate_rotated.default, OPS.activate_rotated.early_read):
                    same(op(gate, up, *turned, *numbers), want, m)
    for end in ("_t", "_p_t") if not ahead_of_time else ():
        assert any(f"_h{group}p{passes}{'s8' * (to is torch.int8)}{end}" in name for name in loaded)


@pytest.mark.parametrize(("dtype", "m", "k", "group"), IN_ROWS)
def test_int8_rows_are_those_of_two_kernels(dtype: torch.dtype, m: int, k: int, group: int) -> None:
    x, other = (made[-m:] for made in rows(2, max(m, 4), k, dtype))
    weight, bias = 1 + 0.3 * torch.randn(k, device=DEVICE, dtype=dtype), torch.randn(k, device=DEVICE, dtype=dtype)
    signs = operands("hadamard", group, k, [3], dtype, DEVICE)
    turned, ahead_of_time = (signs, group, [3], torch.int8), target(torch.cuda.current_device()).ahead_of_time
    with watched_loads() as loaded:
        for layer, residual in ((False, other), (True, None)):
            given = (x, residual, weight, bias if layer else None, layer, 1e-5)
            total, y = OPS.add_norm(*given)
            want = (total, *OPS.quantize_rotated(y, signs, group, 3))
            for op in (OPS.add_norm_rotated.default, OPS.add_norm_rotated.early_read):
                plain = torch.full_like(y, 9.0)
                for beside in (None, plain):
                    for got, expected in zip(op(*given, *turned, beside, in_rows=True), want, strict=True):
                        assert_same(got, expected)
                assert_same(plain, y)
        for gate, up in ((x, None), torch.cat((x, other), 1).chunk(2, 1)):
            for numbers in GATES if up is not None else ((),):
                y = OPS.gelu_tanh(gate) if up is None else OPS.silu_mul(gate, up, None, *numbers)
                want = OPS.quantize_rotated(y, signs, group, 3)
                for op in (OPS.activate_rotated.default, OPS.activate_rotated.early_read):
                    for got, expected in zip(op(gate, up, *turned, *numbers, in_rows=True), want, strict=True):
                        assert_same(got, expected)
    if not ahead_of_time:
        fused = {name.split("_")[1] for name in loaded if f"_h{group}p1s8_rows_t" in name}
        assert fused == {"norm", "silu", "gelu", "clamped"}


@pytest.mark.parametrize("m", [1, 9, 1030])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_int8_norms_write_plain_rows_beside(dtype: torch.dtype, m: int) -> None:
    for k in (77, 2048, 5120):
        columns = -(-k // 16) * 16
        x, other = (x[:m] for x in rows(2, max(m, 4), k, dtype))
        weight, bias = (torch.randn(k, device=DEVICE, dtype=dtype) for _ in range(2))
        for layer, residual in ((False, other), (True, None)):
            given = (x, residual, weight, bias if layer else None, layer, 1e-5)
            total, y = OPS.add_norm(*given)
            want = (total, *OPS.quantize_per_token(y, columns))
            for op in (OPS.add_norm_int8.default, OPS.add_norm_int8.early_read):
                memory = torch.full((m + 2, k), 9.0, device=DEVICE, dtype=dtype)
                for got, expected in zip(op(*given, columns, memory[1:-1]), want, strict=True):
                    assert_same(got, expected)
                assert_same(memory[1:-1], y)
                assert bool((memory[:: m + 1] == 9.0).all()), "rows next to them are not written"


@pytest.mark.parametrize("top_k", [1, 3, 8, 10])
@pytest.mark.parametrize(("m", "k"), [(1, 2048), (9, 7168), (5, 200), (5, 77), (1030, 4096), (8, 14336)])
def test_norms_add_routes(m: int, k: int, top_k: int) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x, results = (torch.randn(n, k, device=DEVICE, dtype=dtype) for n in (m, m * top_k))
        norm, routes = torch.randn(k, device=DEVICE, dtype=dtype), torch.rand(m, top_k, device=DEVICE)
        added = OPS.sum_routes(results, routes, torch.zeros(m, top_k, dtype=torch.int32, device=DEVICE), 1, None)
        end, columns = (norm, None, False, 1e-6), -(-k // 16) * 16
        turned = (
            () if dtype is torch.float32 or k % 128 else (operands("hadamard", 128, k, [1], dtype, DEVICE), 128, [1])
        )
        for op, more in (
            (OPS.add_norm, ()),
            (OPS.add_norm_int8, (columns, torch.empty_like(x))),
            *((OPS.add_norm_rotated, (*turned, to, torch.empty_like(x))) for to in (dtype, torch.int8) if turned),
        ):
            want = op(x, added, *end, *more)
            plain = more[-1].clone() if more else None
            got = op.early_read(x, results, *end, *more, routes)
            if op is OPS.add_norm_rotated:
                same(got, want, m)
            else:
                assert all(map(torch.equal, got, want))
            assert plain is None or torch.equal(plain, more[-1])


def test_unaligned_rows() -> None:
    m, k = 5, 256
    x, other = (torch.randn(m, k + 1, device=DEVICE).half()[:, 1:] for _ in range(2))
    weight = torch.randn(k + 1, device=DEVICE).half()[1:]
    signs = operands("hadamard", 128, k, [1], torch.float16, DEVICE)
    for to in (torch.float16, torch.int8):
        total, y = OPS.add_norm(x, other, weight, None, False, 1e-5)
        want = (total, *OPS.rotate_tokens(y, signs, "hadamard", 128, [1], to))
        for plain in (None, torch.zeros(m * k + 1, device=DEVICE).half()[1:].view(m, k)):
            same(OPS.add_norm_rotated(x, other, weight, None, False, 1e-5, signs, 128, [1], to, plain), want, m)
            assert plain is None or torch.equal(plain, y)
        for numbers in GATES:
            want = OPS.rotate_tokens(OPS.silu_mul(x, other, None, *numbers), signs, "hadamard", 128, [1], to)
            same(OPS.activate_rotated(x, other, signs, 128, [1], to, *numbers), want, m)


@pytest.mark.parametrize("scheme", ["codebook4", "codebook4_int8", "w8a8_rotated"])
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


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe", "gpt_oss"])
@pytest.mark.parametrize("scheme", ["codebook4_g32", "codebook4_g32_int8", "w8a8", "w8a8_rotated_g32"])
def test_mixtures_give_the_logits_of_tokens_prepared_apart(
    scheme: str, kind: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(kind, **WIDE, moe_intermediate_size=64).to(DEVICE, torch.float16)
    qcut.quantize(model, scheme, allow_growth=True, progress=False)

    def steps(graphs: bool) -> list[Tensor]:
        engine = Engine(model, batch=batch, graphs=graphs)
        read = engine.prefill(prompts_of(VOCABULARY, *(20, 3, 7)[:batch]))
        return [read, *(engine.decode([token + i for i in range(batch)]) for token in (5, 7, 9))]

    within = [steps(graphs) for graphs in (False, True)]
    monkeypatch.setattr(Experts, "takes_prepared", lambda self, like: False)
    apart = steps(False)
    for got in within:
        for logits, want in zip(got, apart, strict=True):
            assert_same(logits, want)
