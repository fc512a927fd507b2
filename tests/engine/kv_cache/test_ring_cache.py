"""Rings: layers with windows keep their last tokens, and everything is as with all tokens, or refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut import errors
from qcut.dispatch.attention import prompt_attention_menu
from qcut.emitters.core.source import DType
from qcut.engine.engine import Engine
from qcut.engine.kv_cache.cache import KVCache, KVDtype
from qcut.engine.kv_cache.prefix_cache import Match, PrefixCache
from qcut.engine.kv_cache.ring_cache import SLACK, Ring
from qcut.engine.scheduler import Scheduler
from qcut.numerics.sampling import Sampling
from tests.support.decoders import VOCABULARY, prompts_of, small

CONTEXT, BLOCK = 320, 128
"""Of the models here, and the least that a ring of theirs has."""
LOCAL = ("mistral_window", "qwen2_window", "gemma2", "gemma3", "gpt_oss")


def model_of(kind: str) -> Any:
    return small(kind, max_position_embeddings=CONTEXT)


def engines(model: Any, batch: int = 1, kv_cache: KVDtype = "auto") -> tuple[Engine, Engine]:
    """One with rings and one without, which read prompts in the same chunks."""
    rung, whole = (Engine(model, batch=batch, ring=ring, kv_cache=kv_cache) for ring in (8, 0))
    room = min(ring.room for ring in rung.runner.rings if ring is not None)
    for engine in (rung, whole):
        engine.runner.max_prefill_tokens = room
    return rung, whole


def one_ring(rows: int, written: int = 0, beginning: int = 0) -> KVCache:
    """A cache of one layer with a window of 4; its only sequence is a token's number at each of its rows."""
    cache = KVCache(1, 1, 1, 65, 8, dtype=torch.float32, device=torch.device("cpu"), rings=[Ring(4, rows)])
    for token in range(written):
        cache.layer(0)[0][0, 0, token % rows] = beginning + token
    cache.wrote(0, 0, written)
    return cache


# ── rings ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("window", "slack", "context", "head", "rows"),
    [
        (1024, SLACK, 8192, 128, 2048),
        (1024, SLACK, 8192, 256, 2560),
        (512, SLACK, 4096, 64, 1536),
        (4096, SLACK, 32768, 128, 5120),
        (1, 1, 128, 128, 128),
        (2, 128, 256, 16, 256),
        (4096, SLACK, 4096, 128, None),
        (4096, SLACK, 5119, 128, None),
        (0, SLACK, 8192, 128, None),
        (512, 0, 8192, 128, None),
    ],
)
def test_rows_of_a_ring(window: int, slack: int, context: int, head: int, rows: int | None) -> None:
    ring = Ring.of(window, slack, context, head)
    assert (None if ring is None else ring.rows) == rows
    assert ring is None or ring.room >= slack


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_rings_hold_whole_blocks_of_prompts_keys(arch: str) -> None:
    for x, head in product((DType.F16, DType.BF16), range(8, 257, 8)):
        ring = Ring.of(1000, SLACK, 1 << 20, head)
        for cache, values in ((x, None), (DType.S8, None), (DType.U4, None), (DType.S8, DType.U4)):
            for kernel in prompt_attention_menu(x, cache, head, arch, values):
                assert ring is not None
                assert ring.rows % kernel.keys == 0, kernel.name


def test_rings_hold_the_tokens_of_windows() -> None:
    """`Ring.least` against a list of the tokens that lie in the rows."""
    for window in (1, 2, 5, 8):
        ring, held = Ring(window, 8), [-1] * 8
        for written in range(1, 40):
            held[(written - 1) % 8] = written - 1
            for length in range(1, written + 1):
                seen = range(max(0, length + 1 - window), length)
                assert (length >= ring.least(written)) == all(held[token % 8] == token for token in seen) or not seen


# ── engines ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
@pytest.mark.parametrize("kind", LOCAL)
def test_logits_are_those_without(kind: str, kv_cache: KVDtype) -> None:
    """Bit by bit: of prompts shorter than a ring, of one row less and more, and around twice; then of steps."""
    rung, whole = engines(model_of(kind), 5, kv_cache)
    prompts = prompts_of(VOCABULARY, 3, BLOCK - 1, BLOCK + 1, 2 * BLOCK + 40, 2 * BLOCK - 3)
    assert torch.equal(rung.prefill(prompts), whole.prefill(prompts))
    for step in range(12):
        tokens = [(7 * step + i) % VOCABULARY for i in range(5)]
        assert torch.equal(rung.decode(tokens), whole.decode(tokens))
    more = prompts_of(VOCABULARY, 9, 1, 4, 2, 30)
    assert torch.equal(rung.prefill(more, reuse_prefix=True), whole.prefill(more, reuse_prefix=True))
    assert [*map(torch.Tensor.tolist, rung.score(prompts))] == [*map(torch.Tensor.tolist, whole.score(prompts))]


@pytest.mark.parametrize("kind", LOCAL)
def test_memory_is_that_of_the_rows(kind: str) -> None:
    rung, whole = engines(model_of(kind), 2)
    windowed = sum(ring is not None for ring in rung.runner.rings)
    assert windowed == sum(block.attention.window > 0 for block in rung.decoder.blocks) > 0
    layer = whole.cache.nbytes // 2
    assert rung.cache.nbytes == (2 - windowed) * layer + windowed * layer * BLOCK // (CONTEXT + 1)
    assert whole.cache.ring(0) == 0
    assert {rung.cache.ring(i) for i in range(2)} <= {0, CONTEXT}
    assert Engine(small("llama")).cache.nbytes == Engine(small("llama"), ring=0).cache.nbytes


@pytest.mark.parametrize("ring", [-1, 1.5, None, True])
def test_no_such_ring(ring: Any) -> None:
    with pytest.raises(errors.ConfigError, match="ring is"):
        Engine(small("mistral_window"), ring=ring)


@pytest.mark.parametrize("kind", ["mistral_window", "gemma3", "gpt_oss"])
def test_sequences_go_back_as_far_as_windows_are_there(kind: str) -> None:
    rung, whole = engines(model_of(kind))
    (prompt,), (more,) = prompts_of(VOCABULARY, 250), prompts_of(VOCABULARY, 6)
    least = rung.cache.least(0)
    assert least == 0
    for engine in (rung, whole):
        engine.prefill([prompt])
        engine.decode([5])
    window = rung.decoder.blocks[0].attention.window
    least = rung.cache.least(0)
    assert least == 251 - BLOCK + window - 1
    for reuse in (1, least - 1):
        with pytest.raises(errors.ContextError, match=f"sequence 0 would go on after {reuse} tokens.*0, {least} and"):
            rung.prefill([more], reuse_prefix=reuse)
        assert rung.lengths == (251,)
    for reuse in (least + 3, least, 0):
        assert torch.equal(rung.prefill([more], reuse_prefix=reuse), whole.prefill([more], reuse_prefix=reuse))
        assert torch.equal(rung.decode([1]), whole.decode([1]))
    assert rung.cache.least(0) == 0  # it has begun anew


@pytest.mark.parametrize("kind", ["mistral_window", "gemma2"])
def test_answers_that_ended_long_before_others_go_on(kind: str) -> None:
    """What comes of them after their ends is not kept: it would take rows that their windows see."""
    rung, whole = engines(model_of(kind), 2)
    prompts, more = prompts_of(VOCABULARY, 100, 20), prompts_of(VOCABULARY, 4, 4)
    stop = whole.generate(prompts, 3)[0].tokens[-1:]
    first, second = (engine.generate(prompts, 220, stop=stop) for engine in (rung, whole))
    assert first == second
    assert len(first[0].tokens) <= 3
    follow = [[got.tokens[-1], *row] for got, row in zip(first, more, strict=True)]
    assert rung.generate(follow, 5, reuse_prefix=True) == whole.generate(follow, 5, reuse_prefix=True)


def test_a_stream_that_was_left_can_be_gone_on_with() -> None:
    rung, whole = engines(model_of("mistral_window"), 2)
    prompts = prompts_of(VOCABULARY, 130, 5)
    rows: list[Tensor] = []
    for engine in (rung, whole):
        for count, _ in enumerate(engine.stream(prompts, 40)):
            if count == 50:
                break
        rows.append(engine.decode([1, 2]))
    assert torch.equal(*rows)


# ── copies, beginnings ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("written", [3, 15, 16, 17, 40])
def test_copied_rings_equal_the_source(written: int) -> None:
    source, copied = one_ring(16, written), one_ring(16, 60, 1000)
    copied.copy_sequence(source, 0, 0, 2, written)
    assert copied.least(0) == source.least(0)
    rows = [token % 16 for token in range(max(0, written - 16), written)]
    for mine, theirs in zip(copied.layer(0)[:2], source.layer(0)[:2], strict=True):
        assert torch.equal(mine[0, 0, rows], theirs[0, 0, rows])


def test_prefix_matches_only_with_its_window() -> None:
    """Of 40 tokens, with 16 kept, and a window of 4: beginnings of 27 tokens and more."""
    ids, kept = torch.arange(40), one_ring(16)
    prefixes = PrefixCache(kept, 1, 64)
    prefixes.insert(ids, one_ring(16, 40), 0)
    other = torch.full((20,), 99)
    for length in range(16, 41):
        found = prefixes.find(torch.cat((ids[:length], other)))
        assert found == (Match(0, length) if length >= 27 else Match(0, 0))
    cache = one_ring(16, 60, 1000)
    prefixes.copy_to(Match(0, 30), cache, 0)
    assert cache.layer(0)[0][0, 0, [token % 16 for token in range(27, 30)], 0].tolist() == [27, 28, 29]
    assert cache.least(0) == 27


def test_prefix_lost_by_longer_sequence_is_not_evicted() -> None:
    """Of 16 kept tokens and a window of 4: after 30 tokens all from 17 on can be gone on with, after 40 from 27 on."""
    ids, sizes = torch.arange(60), {"dtype": torch.float32, "device": torch.device("cpu")}
    prefixes = PrefixCache(KVCache(1, 3, 1, 65, 8, rings=[Ring(4, 16)], **sizes), 3, 64)  # type: ignore[arg-type]
    prefixes.insert(ids[:16], one_ring(16, 16), 0)
    prefixes.insert(ids[:30], one_ring(16, 30), 0)
    assert prefixes.tokens == 16 + 30
    assert [prefixes.find(ids[:n]).length for n in (17, 18, 31, 50)] == [16, 17, 30, 30]
    prefixes.insert(ids[:40], one_ring(16, 40), 0)
    assert prefixes.tokens == 16 + 40
    assert [prefixes.find(ids[:n]).length for n in (17, 27, 28, 50)] == [16, 16, 27, 40]
    prefixes.insert(ids[:25], one_ring(16, 25), 0)  # a part of 40, but lost there
    assert prefixes.tokens == 25 + 40
    assert [prefixes.find(ids[:n]).length for n in (17, 26, 27)] == [16, 25, 25]
    prefixes.insert(ids[:20], one_ring(16, 60), 0)  # what it would go on with is lost
    assert prefixes.tokens == 25 + 40


# ── batching ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["mistral_window", "gemma3", "gpt_oss"])
def test_schedulers_give_the_tokens_of_engines_without(kind: str) -> None:
    """Prompts with common beginnings, samples of one, cancelled ones, in a batch that is too small for them."""
    model = model_of(kind)
    rung, whole = engines(model, 3)
    (common, tail), others = prompts_of(VOCABULARY, 150, 90), prompts_of(VOCABULARY, 5, 200, 17)
    prompts = [common, [*common, *tail], *others, [*common, 3], [*common, *tail, 4, 5], common[:100]]
    news = [60, 30, 9, 100, 40, 8, 12, 20]
    single = Engine(model, ring=0)
    want = [single.generate([p], n)[0].tokens for p, n in zip(prompts, news, strict=True)]
    loads = []
    for engine in (rung, whole):
        scheduler = Scheduler(engine, chunk=64, prefix_cache=4)
        assert scheduler._prefill_runner.cache.nbytes == engine.cache.nbytes
        requests = []
        for prompt, new in zip(prompts, news, strict=True):
            requests.append(scheduler.submit(prompt, new))
            cancelled = scheduler.submit(prompt[:60], 50)
            for _ in range(9):
                scheduler.step()
            cancelled.cancel()
        sampled = scheduler.submit_samples(common, 3, 20, sampling=Sampling(temperature=1.0, seed=1))
        while scheduler.step():
            pass
        assert [list(request.tokens) for request in requests] == want
        loads.append((scheduler.load.reused_tokens, [list(request.tokens) for request in sampled]))
    (found, first), (most, second) = loads
    assert 0 < found <= most
    assert first == second
