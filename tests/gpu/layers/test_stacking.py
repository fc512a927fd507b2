"""Stacked projections on the GPU: bitwise the separate ones where products are of integers, near them elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import qcut
from qcut.engine.engine import Engine
from qcut.layers.base import Linear
from qcut.layers.codebook import execution_path
from qcut.layers.stacking import Stacker
from qcut.numerics.int8 import sqnr_db
from tests.gpu.support.oracles import DEVICE, assert_same

HALF, BRAIN = torch.float16, torch.bfloat16
EXACT = ("w8a8", "codebook4_int8", "codebook3_g64_int8", "codebook4+4_int8", "int4_g32_int8")
FLOAT = (None, "w8a16", "codebook4", "codebook2_g64", "codebook4+4", "codebook4+2", "codebook4_g32_qr", "int4")
LIMIT = {HALF: 2.0**-10, BRAIN: 2.0**-7}
"""Of the error of either product, relative: one rounding of each weight and one of the output, in the tokens' type."""
K, ROWS = 320, (192, 64, 72)
VOCABULARY = 96


def siblings_of(scheme: str | None, dtype: torch.dtype = HALF, *, bias: bool = True) -> Any:
    """With a zero row and an outlier each; the last of them fills no block."""
    torch.manual_seed(3)
    modules: list[nn.Module] = []
    for n in ROWS:
        linear = nn.Linear(K, n, bias=bias)
        with torch.no_grad():
            linear.weight[0] = 0
            linear.weight[n // 2, K // 2] = 9.0
        modules.append(linear.to(dtype) if scheme is None else Linear.from_float(linear, scheme))
    return nn.ModuleList(modules).to(DEVICE).eval()


def stack(modules: Any) -> Any:
    made = Stacker(modules).stack(list(modules))
    assert made is not None
    return made


def tokens(m: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(m)).to(DEVICE, dtype)


def results(modules: Any, x: Tensor) -> Tensor:
    return torch.cat([module(x) for module in modules], -1)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("scheme", EXACT)
def test_integer_products_are_the_separate_ones(scheme: str, dtype: torch.dtype, bias: bool) -> None:
    modules = siblings_of(scheme, bias=bias)
    inputs = [tokens(m, dtype) for m in (1, 2, 9, 130)]
    want = [results(modules, x) for x in inputs]
    stacked = stack(modules)
    for x, expected in zip(inputs, want, strict=True):
        assert_same(stacked(x), expected)
        assert_same(results(modules, x), expected)
        with execution_path("explicit"):
            assert_same(stacked(x), expected)
    if scheme == "w8a8":
        rows = torch.ops.qcut.quantize_per_token(inputs[2], K)
        assert_same(stacked.forward_int8(*rows, dtype), want[2])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("scheme", FLOAT)
def test_float_products_are_near_the_separate_ones(scheme: str | None, dtype: torch.dtype) -> None:
    modules = siblings_of(scheme, dtype)
    inputs = [tokens(m, dtype) for m in (1, 2, 9, 130)]
    want = [results(modules, x) for x in inputs]
    stacked = stack(modules)
    for x, expected in zip(inputs, want, strict=True):
        got = stacked(x)
        assert got.dtype is dtype
        assert_same(stacked(x), got)
        assert (got.double() - expected.double()).norm() <= 2 * LIMIT[dtype] * expected.double().norm()
        if scheme is not None:  # cuBLAS may choose by where a bias lies; kernels of qcut do not
            assert_same(results(modules, x), expected)


@torch.no_grad()
def test_a_captured_stack_is_the_launched_one() -> None:
    for scheme in ("w8a8", "codebook4"):
        stacked, x = stack(siblings_of(scheme)), tokens(1, HALF)
        want = stacked(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = stacked(x)
        graph.replay()
        assert_same(got, want)


@pytest.mark.parametrize("columns", [256, 72, 13])
@pytest.mark.parametrize("m", [1, 5])
def test_gate_and_up_may_lie_side_by_side(m: int, columns: int) -> None:
    both = torch.randn(m, 2 * columns, device=DEVICE).half()
    gate, up = both.chunk(2, -1)
    assert_same(torch.ops.qcut.silu_mul(gate, up), torch.ops.qcut.silu_mul(gate.contiguous(), up.contiguous()))


# ── engines ──────────────────────────────────────────────────────────────────────────────────────


def llama(scheme: str | None, dtype: torch.dtype = HALF) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 384, "intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 300}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.to(DEVICE, dtype).eval()
    if scheme is not None:
        qcut.quantize(model, scheme, progress=False)
    return model


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def steps(engine: Engine) -> list[Tensor]:
    return [engine.prefill(prompts_of(20, 3)), engine.decode([5, 6]), engine.decode([7, 8])]


def stacked_layers(engine: Engine) -> bool:
    return all(len(part.projections) == 1 for block in engine.decoder.blocks for part in (block.attention, block.mlp))


@pytest.mark.parametrize("scheme", [None, "w8a8", "w8a16", "codebook4", "codebook4_int8"])
def test_engines_give_the_logits_of_separate_products(scheme: str | None) -> None:
    """Those captured before the weights were stacked too: they keep what their graphs read."""
    model = llama(scheme)
    separate = Engine(model, batch=2, stack=False)
    want = steps(separate)
    stacked = Engine(model, batch=2)
    assert stacked_layers(stacked)
    assert not stacked_layers(separate)
    torch.cuda.empty_cache()
    trash = torch.full((1 << 26,), 77, dtype=torch.uint8, device=DEVICE)  # where freed weights would have been
    for got, expected in zip(steps(separate), want, strict=True):
        assert_same(got, expected)
    for engine in (stacked, Engine(model, batch=2), Engine(model, batch=2, graphs=False)):
        for got, expected in zip(steps(engine), want, strict=True):
            if scheme in EXACT:
                assert_same(got, expected)
            assert sqnr_db(expected, got) > 40
    del trash


def test_float32_tokens_are_those_of_separate_products() -> None:
    model, prompts = llama(None, torch.float32), prompts_of(7, 100)
    want = Engine(copy.deepcopy(model), batch=2, stack=False).generate(prompts, 40)
    assert Engine(model, batch=2).generate(prompts, 40) == want


@pytest.mark.parametrize("scheme", [None, "w8a8", "codebook4"])
def test_weights_take_no_more_memory(scheme: str | None) -> None:
    """One set more at a time; 16 KiB are for blocks of 512 bytes, and for what compares codebooks."""
    model = llama(scheme)
    sets = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        sets += [(attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)]
    largest = max(sum(t.nbytes for m in one for t in (*m.parameters(), *m.buffers())) for one in sets)
    stacker = Stacker(model)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = [stacker.stack(one) for one in sets]
    assert None not in made
    assert torch.cuda.memory_allocated() <= before
    assert torch.cuda.max_memory_allocated() <= before + largest + (1 << 14)
