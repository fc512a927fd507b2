"""Prompts in pieces: after tokens that are kept, in chunks of any size, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut import errors
from qcut.engine.engine import Engine
from tests.support.decoders import VOCABULARY, kept, last_logits, prompts_of, small


def near(got: Tensor, want: Tensor) -> None:
    """Float32 sums in another order, of 2 layers."""
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def pieces(prompt: list[int], *counts: int) -> list[list[int]]:
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    assert ends[-1] == len(prompt)
    return [prompt[first:end] for first, end in pairwise(ends)]


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
@pytest.mark.parametrize("kind", ["gpt2", "llama3_rope"])
def test_chunked_prefill_equals_one_chunk(kind: str, kv_cache: Any) -> None:
    model, (prompt,) = small(kind), prompts_of(VOCABULARY, 41)
    want = Engine(model, kv_cache=kv_cache).prefill([prompt])
    engine = Engine(model, kv_cache=kv_cache)
    for counts in ((1,) * 41, (1, 40), (40, 1), (7, 16, 1, 17), (33, 8)):
        engine.prefill([[5, 6, 7]])  # of another request
        reuse: bool = False
        for piece in pieces(prompt, *counts):
            got = engine.prefill([piece], reuse_prefix=reuse)
            reuse = True
        if kv_cache == "auto":
            near(got, want)
        else:  # an element of the cache may be a step of 1/127 off
            assert qcut.numerics.int8.sqnr_db(want, got) > 30
        assert engine.lengths == (41,)


@pytest.mark.parametrize("scheme", ["w8a8", "codebook4_g32_int8"])
def test_chunks_of_integer_products_are_near(scheme: str) -> None:
    model, (prompt,) = small("llama"), prompts_of(VOCABULARY, 30)
    qcut.quantize(model, scheme, allow_growth=True, progress=False)
    whole, parts = Engine(model), Engine(model)
    want = whole.prefill([prompt])
    parts.prefill([prompt[:13]])
    got = parts.prefill([prompt[13:]], reuse_prefix=True)
    assert qcut.numerics.int8.sqnr_db(want, got) > 30
    assert torch.equal(kept(whole.cache, 0)[0][:, :, :30], kept(parts.cache, 0)[0][:, :, :30])  # no sum of floats yet


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 24, 64])
@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_chunks_of_any_size_are_the_prompts(kind: str, rows: int) -> None:
    model, prompts = small(kind), prompts_of(VOCABULARY, 30, 2, 64, 1)
    whole, parts = Engine(model, batch=4), Engine(model, batch=4)
    parts.runner.max_prefill_tokens = rows
    near(parts.prefill(prompts), whole.prefill(prompts))
    for one, other in zip(parts.score(prompts), whole.score(prompts), strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    shorter = [prompt[:40] for prompt in prompts]
    assert parts.generate(shorter, 9) == whole.generate(shorter, 9)


def test_a_common_prefix_is_reused() -> None:
    model = small("llama")
    engine = Engine(model, batch=2)
    system, (one, two, three) = prompts_of(VOCABULARY, 20)[0], prompts_of(VOCABULARY, 9, 4, 15)
    engine.prefill([system, system])
    for tails in ((one, two), (three, one), (two, two)):
        got = engine.prefill(tails, reuse_prefix=20)
        assert engine.lengths == tuple(20 + len(tail) for tail in tails)
        for row, tail in zip(got, tails, strict=True):
            near(row, last_logits(model, system + tail))
    near(engine.prefill([three], reuse_prefix=20)[0], last_logits(model, system + three))
    assert engine.lengths == (35,)
    got = engine.prefill([one, two], reuse_prefix=[35, 0])  # the second begins anew
    near(got[0], last_logits(model, system + three + one))
    near(got[1], last_logits(model, two))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_messages_of_a_chat_are_one_text(kind: str) -> None:
    model = small(kind)
    engine = Engine(model, batch=2)
    texts, turns = prompts_of(VOCABULARY, 6, 3), [prompts_of(VOCABULARY, 5, 8), prompts_of(VOCABULARY, 1, 2)]
    answers = engine.generate(texts, 7)
    for turn in turns:
        said = [text + answer.tokens for text, answer in zip(texts, answers, strict=True)]
        texts = [text + more for text, more in zip(said, turn, strict=True)]
        given = [answer.tokens[-1:] + more for answer, more in zip(answers, turn, strict=True)]
        answers = engine.generate(given, 7, reuse_prefix=True)
        assert answers == Engine(model, batch=2).generate(texts, 7)


def test_answers_that_ended_early_are_continued_where_they_ended() -> None:
    model, engine = small("llama"), Engine(small("llama"), batch=2)
    prompts = prompts_of(VOCABULARY, 6, 13)
    free = engine.generate(prompts, 12)
    stop = next(token for token in free[0].tokens if token not in free[1].tokens)
    ended = engine.generate(prompts, 12, stop=[stop])
    assert len(ended[0].tokens) < 12 == len(ended[1].tokens)
    got = engine.prefill([[*g.tokens[-1:], 3, 4] for g in ended], reuse_prefix=True)
    for row, prompt, g in zip(got, prompts, ended, strict=True):
        near(row, last_logits(model, [*prompt, *g.tokens, 3, 4]))


def test_a_reused_context_can_be_filled_exactly() -> None:
    model, (prompt,) = small("gpt2"), prompts_of(VOCABULARY, 21)
    engine = Engine(model, context=20)
    engine.prefill([prompt[:7]])
    before = kept(engine.cache, 1)
    with pytest.raises(errors.ContextError, match="prompt 0 has 14 tokens after 7; this engine's context is 20"):
        engine.prefill([prompt[7:]], reuse_prefix=True)
    assert engine.lengths == (7,)
    for one, other in zip(before, kept(engine.cache, 1), strict=True):
        assert torch.equal(one, other)
    near(engine.prefill([prompt[7:20]], reuse_prefix=True)[0], last_logits(model, prompt[:20]))
    with pytest.raises(errors.ContextError, match="sequence 0 has 20 tokens"):
        engine.decode([1])
    near(engine.prefill([prompt[5:6]], reuse_prefix=5)[0], last_logits(model, prompt[:6]))


@pytest.mark.parametrize(
    ("reuse", "error", "message"),
    [
        (4, errors.ConfigError, "reuse_prefix is 4 for sequence 0; allowed: 0 to 3, its tokens"),
        ([3, 3], errors.ConfigError, "reuse_prefix is 3 for sequence 1; allowed: 0 to 2"),
        ([-1, 0], errors.ConfigError, "reuse_prefix is -1 for sequence 0; allowed: 0 to 3"),
        ([1], errors.ShapeError, "reuse_prefix has 1 numbers; allowed: 2, one for each prompt"),
        ("12", errors.ConfigError, "reuse_prefix is '12'; allowed: True, False, or numbers of tokens"),
        (1.0, errors.ConfigError, r"reuse_prefix is 1\.0; allowed"),
        ([1.0, 2.0], errors.ConfigError, r"reuse_prefix is \[1\.0, 2\.0\]; allowed"),
        ([True, False], errors.ConfigError, r"reuse_prefix is \[True, False\]; allowed"),
        (None, errors.ConfigError, "reuse_prefix is None; allowed"),
        (torch.tensor([0.5, 1.0]), errors.ConfigError, "reuse_prefix is tensor"),
    ],
)
def test_wrong_prefixes_are_refused_and_change_nothing(reuse: Any, error: Any, message: str) -> None:
    engine = Engine(small("llama"), batch=3)
    engine.prefill([[1, 2, 3], [4, 5]])
    for call in (engine.prefill, lambda *given, **more: engine.generate(*given, 2, **more)):
        with pytest.raises(error, match=message):
            call([[1], [2]], reuse_prefix=reuse)
    assert engine.lengths == (3, 2)


def test_reusing_all_needs_a_prompt_for_each_sequence() -> None:
    engine = Engine(small("llama"), batch=3)
    with pytest.raises(errors.ShapeError, match="1 prompts, and all of 0 sequences are kept; allowed: one for each"):
        engine.prefill([[1]], reuse_prefix=True)
    engine.prefill([[1, 2, 3], [4, 5]])
    with pytest.raises(errors.ShapeError, match="3 prompts, and all of 2 sequences are kept"):
        engine.prefill([[1], [2], [3]], reuse_prefix=True)


@pytest.mark.parametrize("reuse", [(2, 1), np.array([2, 1]), torch.tensor([2, 1]), [np.int64(2), 1]])
def test_prefixes_are_any_sequence_of_whole_numbers(reuse: Any) -> None:
    engine = Engine(small("llama"), batch=2)
    engine.prefill([[1, 2, 3], [4, 5]])
    engine.prefill([[6], [7, 8]], reuse_prefix=reuse)
    assert engine.lengths == (3, 3)


def test_a_failed_prefill_leaves_the_prefix() -> None:
    model, (prompt,) = small("llama"), prompts_of(VOCABULARY, 20)
    engine = Engine(model)
    engine.prefill([prompt[:12]])

    def fail(module: nn.Module, given: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    with model.model.layers[1].mlp.down_proj.register_forward_pre_hook(fail), pytest.raises(torch.OutOfMemoryError):
        engine.prefill([[1, 2, 3]], reuse_prefix=10)
    assert engine.lengths == (10,)
    near(engine.prefill([prompt[10:]], reuse_prefix=True)[0], last_logits(model, prompt))


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
def test_padding_stays_behind_the_context(kv_cache: Any) -> None:
    engine = Engine(small("llama"), batch=3, context=40, kv_cache=kv_cache)
    engine.prefill(prompts_of(VOCABULARY, 17, 3))
    for layer in range(2):
        for floats in kept(engine.cache, layer):
            for sequence, length in enumerate((17, 3, 0)):
                assert floats[sequence, :, :length].abs().sum(-1).all()
                assert not floats[sequence, :, length:40].any()


def test_warming_up_serves_each_size_and_empties_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(small("llama"), batch=2, context=20)
    engine.prefill([[1, 2]])
    seen: list[tuple[int, ...]] = []
    right = Engine.generate

    def watched(self: Engine, prompts: Any, *more: Any) -> Any:
        seen.append(tuple(prompts.shape))
        return right(self, prompts, *more)

    monkeypatch.setattr(Engine, "generate", watched)
    engine.warm_up([4, 20], sequences=2)
    assert seen == [(2, 4), (2, 20)]
    assert engine.lengths == ()
    for lengths, sequences, message in (
        ([21], 1, "length is 21; allowed: 1 to 20"),
        ([0], 1, "length is 0"),
        ([4.0], 1, r"length is 4\.0"),
        ([4], 3, "sequences is 3; allowed: 1 to 2"),
    ):
        with pytest.raises(errors.ConfigError, match=message):
            engine.warm_up(lengths, sequences)  # type: ignore[arg-type]
