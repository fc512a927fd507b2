"""Attention of several tokens of each sequence in a step: the tokens of plain steps, whatever is drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import qcut
from qcut.engine import runner
from qcut.engine.engine import Engine
from qcut.engine.runner import ModelRunner, inference
from qcut.ops.attention.decode import AppendAttentionOp
from tests.support.decoders import VOCABULARY, prompts_of, small

KINDS = ("llama", "gemma2", "gpt_oss", "qwen3", "mistral_window")
"""A plain one; windows with softcaps, windows with sinks, norms of heads; windows in every layer."""


class Calls(TorchDispatchMode):
    """The operators that are called, and how many tokens of a sequence a decode step's attention has."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.rows = list[str](), list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        if func.name() == "qcut::append_attention":
            place = list(AppendAttentionOp._fields).index("rows")
            self.rows.append(args[place] if place < len(args) else 1)
        return func(*args, **(kwargs or {}))


def repeating(*lengths: int) -> list[list[int]]:
    """Prompts with repeated tokens, so that there are drafts from the first step on."""
    return [(2 * prompt)[: len(prompt) + 4] for prompt in prompts_of(VOCABULARY, *lengths)]


def generated(model: Any, speculate: Any, count: int, **options: Any) -> list[list[int]]:
    engine = Engine(model, batch=3, speculate=speculate, **options)
    with Calls() as calls:
        found = [g.tokens for g in engine.generate(repeating(5, 17, 1), count)]
    assert (max(calls.rows) > 1) == (speculate is not None)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_drafts_change_no_token(kind: str, drafts: int) -> None:
    """Up to a full context: 64."""
    model = small(kind)
    want = generated(model, None, 50, context=64)
    assert generated(model, qcut.Lookup(drafts=drafts, shortest=1), 50, context=64) == want


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token_of_int8_caches(kind: str) -> None:
    model = small(kind)
    want = generated(model, None, 40, kv_cache="int8")
    assert generated(model, qcut.Lookup(drafts=3, shortest=1), 40, kv_cache="int8") == want


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
def test_drafts_change_no_token_of_rings(kind: str, kv_cache: str) -> None:
    """Past the end of a ring of 128 rows."""
    model = small(kind, max_position_embeddings=400)
    options: dict[str, Any] = {"context": 400, "ring": 8, "kv_cache": kv_cache}
    assert Engine(model, **options).runner.rings[0] is not None
    want = generated(model, None, 160, **options)
    assert generated(model, qcut.Lookup(drafts=3, shortest=1), 160, **options) == want


@inference()
def logits_of(made: ModelRunner, tokens: Tensor, positions: list[int], slots: list[int]) -> Tensor:
    where = (torch.tensor(values, dtype=torch.int32) for values in (positions, slots))
    return made.forward_tokens(tokens, *where).unflatten(0, (tokens.shape[1], -1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [2, runner.MOST_FUSED_ROWS, 8])
@inference()
def test_a_step_of_tokens_is_their_steps(kind: str, width: int) -> None:
    """The logits after each token for which the cache has room; one sequence fills it, and one is padding."""
    model, context = small(kind), 64
    one, many = (Engine(model, batch=3, context=context).runner for _ in range(2))
    prompts = [torch.tensor(prompt) for prompt in prompts_of(VOCABULARY, 20, 65 - width, 3)]
    for each in (one, many):
        each.prefill(prompts, [0, 0, 0])
    tokens = torch.tensor(prompts_of(VOCABULARY, *[3] * width))
    starts, counts = [20, 65 - width, 3], [width, width - 1]
    got = logits_of(many, tokens, [*starts[:2], 0], [*starts[:2], context])
    for j in range(width):
        at = torch.tensor([min(start + j, context - 1) for start in starts], dtype=torch.int32)
        want = one.forward_step(tokens[j], at, at, 0, ())
        for b, count in enumerate(counts):
            if j < count:
                torch.testing.assert_close(got[b, j], want[b], rtol=1e-4, atol=1e-4)


def test_a_layers_tokens_are_one_call() -> None:
    """Of up to so many tokens of a sequence; more are a prefill chunk."""
    made = Engine(small("llama"), batch=2, context=64).runner
    for width in (runner.MOST_FUSED_ROWS, 2 * runner.MOST_FUSED_ROWS):
        with Calls() as calls:
            logits_of(made, torch.ones(width, 2, dtype=torch.int64), [0, 0], [0, 0])
        fused = width <= runner.MOST_FUSED_ROWS
        assert calls.rows == [width] * 2 * fused
        assert calls.names.count("qcut::prompt_attention") == 2 * (not fused)
