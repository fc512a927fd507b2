"""Speculative decoding: tokens are those of plain steps, whatever is drafted, and drafts that are right save steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qcut
from qcut.engine.drafters import Lookup
from qcut.engine.engine import Engine
from qcut.engine.kv_cache.cache import KVDtype
from qcut.engine.scheduler import Scheduler
from qcut.engine.sequence import Generated
from qcut.engine.speculation import DraftedLoop, DraftRecord, next_width, widths_of
from qcut.errors import ConfigError
from qcut.numerics.sampling import Sampling
from tests.engine.test_scheduler import finished
from tests.support import ROOT
from tests.support.decoders import VOCABULARY, small

EAGER = Lookup(drafts=7, shortest=1)
"""Drafts after a single token that stood before."""


@pytest.fixture(autouse=True)
def widest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of all widths seem to take the same time: each verifies all drafts."""
    monkeypatch.setattr(DraftedLoop, "cost", lambda loop, width, choose=None: 1.0)


def phrases(*lengths: int, words: int = 9, seed: int = 0) -> list[list[int]]:
    """Prompts of few different tokens: most have stood before."""
    generator = torch.Generator().manual_seed(sum(lengths) + seed)
    return [torch.randint(0, words, (n,), generator=generator).tolist() for n in lengths]


def chain(words: int, vocabulary: int = VOCABULARY, sharpness: float = 40.0, **changes: Any) -> Any:
    """A model: the next token depends only on the last one, and is mostly the next of a circle of so many tokens."""
    model = small("llama", vocab_size=vocabulary, **changes)
    tokens = torch.arange(vocabulary)
    after = tokens // words * words + (tokens + 1) % words
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif name.endswith("norm.weight"):
                parameter.fill_(1)
        table = model.model.embed_tokens.weight
        table.div_(table.norm(dim=1, keepdim=True))
        model.lm_head.weight[after] = table * sharpness / table.shape[1] ** 0.5
    return model


def engine_of(model: Any, batch: int, speculate: Lookup | None = EAGER, context: int = 64, **options: Any) -> Engine:
    return Engine(model, batch=batch, context=context, speculate=speculate, **options)


def scheduler_of(engine: Engine, ahead: bool, **options: Any) -> Scheduler:
    scheduler = Scheduler(engine, **options)
    scheduler._batch.runs_ahead = ahead
    return scheduler


def by_plain_steps(model: Any, prompt: list[int], new: int | None = None, **options: Any) -> Generated:
    """By plain steps."""
    given = {name: options.pop(name) for name in ("kv_cache", "context", "ring") if name in options}
    (found,) = engine_of(model, 1, None, **given).generate([prompt], new, **options)
    return found


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "scheme", "kv_cache"),
    [
        ("llama", None, "auto"),
        ("llama", "w8a8", "auto"),
        ("gpt2", "w8a8", "int8"),
        ("qwen2_window", "codebook4_g32", "auto"),
        ("gemma2", None, "int8"),
        ("gpt_neox", None, "auto"),
        ("qwen3_moe", "w8a8", "int8"),
        ("gpt_oss", None, "auto"),
    ],
)
def test_greedy_tokens_are_those_of_plain_steps(kind: str, scheme: str | None, kv_cache: KVDtype) -> None:
    model = small(kind)
    if scheme is not None:
        qcut.quantize(model, scheme, allow_growth=True, progress=False)
    prompts, news = phrases(5, 1, 30, 17, 2, 44, 9, 23), [7, 1, 12, 20, 3, 9, None, 15]
    want = [by_plain_steps(model, p, n, kv_cache=kv_cache) for p, n in zip(prompts, news, strict=True)]
    for ahead in (False, True):
        scheduler = scheduler_of(engine_of(model, 3, kv_cache=kv_cache), ahead, chunk=8, prefix_cache=2)
        requests = []
        for prompt, new in zip(prompts, news, strict=True):
            requests.append(scheduler.submit(prompt, new))
            for _ in range(2):
                scheduler.step()
        finished(scheduler)
        assert [request.result() for request in requests] == want, f"ahead: {ahead}"
        assert scheduler.load.drafted_tokens > 20
        assert scheduler.load.new_tokens == sum(len(each.tokens) for each in want)
    engine = engine_of(model, len(prompts), kv_cache=kv_cache)
    results = engine.generate(prompts, 15)
    assert results == engine_of(model, len(prompts), None, kv_cache=kv_cache).generate(prompts, 15)
    assert sum(result.drafted_tokens for result in results) > 20


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, seed=3),
        Sampling(0.7, min_p=0.1, seed=9),
        Sampling(1.5, top_k=20, top_p=0.9, seed=2**63),
        Sampling(0.8, logit_bias={3: 4.0, 5: 4.0, 7: 4.0}, seed=1),
        Sampling(logit_bias=dict.fromkeys(range(4), 30.0)),
    ],
)
@pytest.mark.parametrize("ahead", [False, True])
def test_draws_are_those_of_plain_steps(sampling: Sampling, ahead: bool) -> None:
    model = small("llama")
    options: dict[str, Any] = {"sampling": sampling, "stop": [6], "min_new_tokens": 9}
    prompts = phrases(6, 11, 3, 29)
    plain = engine_of(model, 4, None)
    scheduler = scheduler_of(engine_of(model, 4), ahead)
    requests = [scheduler.submit(prompt, 30, **options) for prompt in prompts]
    finished(scheduler)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.result() == plain.generate([prompt], 30, **options)[0]
    assert scheduler.load.drafted_tokens > 20
    assert engine_of(model, 4).generate(prompts, 30, **options) == plain.generate(prompts, 30, **options)


def test_samples_are_those_of_plain_steps() -> None:
    model, (prompt,) = chain(8, sharpness=8.0), phrases(14, words=8)
    found = []
    for speculate in (None, EAGER):
        scheduler = Scheduler(engine_of(model, 4, speculate))
        requests = scheduler.submit_samples(prompt, 4, 30, sampling=Sampling(1.0, seed=5))
        finished(scheduler)
        found.append([request.result() for request in requests])
    assert found[0] == found[1]
    assert len({tuple(result.tokens) for result in found[1]}) == 4
    assert scheduler.load.accepted_tokens > 10


def test_log_probabilities_are_those_of_plain_steps() -> None:
    model, prompts = chain(8, sharpness=8.0), phrases(12, 30, words=8)
    options: dict[str, Any] = {"top": 3, "sampling": Sampling(1.0, seed=2)}
    plain, drafted = (engine_of(model, 2, each).generate(prompts, 20, **options) for each in (None, EAGER))
    assert sum(result.accepted_tokens for result in drafted) > 10
    for one, other in zip(plain, drafted, strict=True):
        assert one.tokens == other.tokens
        assert len(other.log_probabilities or []) == 20
        for left, right in zip(one.log_probabilities or [], other.log_probabilities or [], strict=True):
            assert left.chosen == pytest.approx(right.chosen, abs=1e-5)
            assert [token for token, _ in left.top] == [token for token, _ in right.top]
            assert [value for _, value in left.top] == pytest.approx([value for _, value in right.top], abs=1e-5)


def test_penalties_go_by_every_token() -> None:
    model, prompts = chain(8), phrases(20, 9, 16, words=8)
    penalties = [Sampling(repetition_penalty=3.0), Sampling(0.9, seed=4, frequency_penalty=0.7), Sampling()]
    want = [by_plain_steps(model, p, n, sampling=s) for p, s, n in zip(prompts, penalties, (12, 6, 44), strict=True)]
    for ahead in (False, True):
        scheduler = scheduler_of(engine_of(model, 3), ahead)
        last = scheduler.submit(prompts[2], 44)
        while not scheduler.load.drafted_tokens:
            scheduler.step()
        drafted = scheduler.load.drafted_tokens
        first = [scheduler.submit(p, n, sampling=s) for p, s, n in zip(prompts[:2], penalties, (12, 6), strict=False)]
        finished(scheduler)
        assert [each.result() for each in (*first, last)] == want
        assert scheduler.load.drafted_tokens > drafted  # again, once no penalized sequence is left
        assert all(each.drafted_tokens == 0 for each in first)


def test_plain_steps_leave_no_drafts() -> None:
    scheduler = Scheduler(engine_of(chain(8), 2))
    request = scheduler.submit([*range(8), *range(8)])
    while not scheduler.load.drafted_tokens:
        scheduler.step()
    penalized = scheduler.submit([1, 2, 3], 10, sampling=Sampling(presence_penalty=1.0))
    finished(scheduler)
    assert len(penalized.result().tokens) == 10
    assert request.result() == Generated([i % 8 for i in range(49)], "context")
    # All drafts are right: one circle and a token after the last of them, the text goes on as it was.
    assert scheduler.load.drafted_tokens == scheduler.load.accepted_tokens > 20


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_and_go(seed: int, ahead: bool) -> None:
    """Prompts, ends and cancellations at random times."""
    rng, model = random.Random(seed), chain(6, sharpness=6.0)
    scheduler = scheduler_of(engine_of(model, 4), ahead, chunk=16, prefix_cache=2)
    jobs: list[tuple[Any, list[int], int, dict[str, Any]]] = []
    for i in range(24):
        prompt = phrases(rng.randint(1, 40), words=6, seed=i)[0]
        new = rng.randint(1, 30)
        options: dict[str, Any] = {"sampling": Sampling(rng.choice([0.0, 0.0, 1.0]), seed=i)}
        if rng.random() < 0.3:
            options["stop"] = [rng.randrange(6)]
            options["min_new_tokens"] = rng.randint(0, new)
        jobs.append((scheduler.submit(prompt, new, speculate=rng.random() < 0.8, **options), prompt, new, options))
        for _ in range(rng.randint(0, 6)):
            scheduler.step()
        if rng.random() < 0.2:
            rng.choice(jobs)[0].cancel()
    finished(scheduler)
    assert scheduler.load.accepted_tokens > 50
    for request, prompt, new, options in jobs:
        want, found = by_plain_steps(model, prompt, new, **options), request.result()
        if found.reason == "cancelled":
            assert found.tokens == want.tokens[: len(found.tokens)]
        else:
            assert found == want


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ahead", [False, True])
def test_ends_in_the_middle_of_right_drafts(ahead: bool) -> None:
    model, prompt = chain(24), [*range(24), *range(4)]
    for new in range(1, 25):
        scheduler, want = scheduler_of(engine_of(model, 1), ahead), [(4 + i) % 24 for i in range(new)]
        requests = [scheduler.submit(prompt, new), scheduler.submit(prompt, stop=[want[-1]])]
        finished(scheduler)
        assert [request.result() for request in requests] == [Generated(want, "length"), Generated(want, "stop")]
        load = scheduler.load
        assert load.new_tokens == 2 * new
        assert load.accepted_tokens == sum(request.accepted_tokens for request in requests)
        assert all(request.accepted_tokens < new for request in requests)
    assert all(request.accepted_tokens > 16 for request in requests)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_contexts_end_is_reached_exactly(ahead: bool) -> None:
    model = chain(8)
    for length in range(40, 64):
        prompt = [i % 8 for i in range(length)]
        scheduler = scheduler_of(engine_of(model, 2), ahead)
        requests = [scheduler.submit(prompt), scheduler.submit(prompt[1:])]
        finished(scheduler)
        for request in requests:
            have = len(request.prompt)
            end = [(prompt[-1] + 1 + i) % 8 for i in range(64 - have + 1)]
            assert request.result() == Generated(end, "context")


@cache
def demo() -> tuple[Any, Any]:
    folder = ROOT / "models" / "gpt2-5m"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer


def test_stop_strings_end_texts_as_by_plain_steps() -> None:
    model, tokenizer = demo()
    prompts = ["x = 1\nx = 2\nx = 3\nx =", "one two three one two three one two"]
    plain, drafted = (engine_of(model, 2, each, tokenizer=tokenizer) for each in (None, EAGER))
    texts = [result.text or "" for result in plain.generate(prompts, 24)]
    stops = sorted({text[i : i + n] for text in texts for i in (9, 33) for n in (1, 4)} - {""})
    for stop in stops:
        for least in (None, 10):
            want = plain.generate(prompts, 24, stop=[stop], min_new_tokens=least)
            found = drafted.generate(prompts, 24, stop=[stop], min_new_tokens=least)
            assert found == want, stop
            events = list(drafted.stream(prompts, 24, stop=[stop], min_new_tokens=least))
            for i, result in enumerate(want):
                assert "".join(event.text or "" for event in events if event.sequence == i) == result.text
    assert sum(result.accepted_tokens for result in drafted.generate(prompts, 24)) > 10


# ── caches ───────────────────────────────────────────────────────────────────────────────────────


def test_ring_caches_keep_windows_of_drafted_steps() -> None:
    model = small("mistral_window", max_position_embeddings=400)
    prompts = phrases(100, 130, 7)
    options: dict[str, Any] = {"ring": 8, "context": 400}
    engine = engine_of(model, 3, **options)
    assert engine.runner.rings[0] is not None
    results = engine.generate(prompts, 200)
    assert results == engine_of(model, 3, None, **options).generate(prompts, 200)
    assert results == [by_plain_steps(model, prompt, 200, ring=0, context=400) for prompt in prompts]
    assert sum(result.accepted_tokens for result in results) > 20


@pytest.mark.parametrize("kind", ["llama", "mistral_window"])
def test_sequences_go_on_after_a_call(kind: str) -> None:
    model = small(kind, max_position_embeddings=400)
    plain, drafted = (engine_of(model, 2, each, 400, ring=8) for each in (None, EAGER))
    prompts = phrases(150, 30)
    for turn in range(4):
        want, found = (each.generate(prompts, 21, reuse_prefix=turn > 0) for each in (plain, drafted))
        assert found == want
        assert drafted.lengths == plain.lengths
        prompts = [[result.tokens[-1], *phrases(3 + turn)[0]] for result in found]
    assert sum(result.drafted_tokens for result in found) > 10


def test_a_stream_that_is_left_can_go_on() -> None:
    model, (prompt,) = chain(8), phrases(20, words=8)
    want = by_plain_steps(model, prompt, 30).tokens
    for left in range(1, 12):
        engine = engine_of(model, 1)
        stream = engine.stream([prompt], 30)
        tokens = [next(stream).token for _ in range(left)]
        stream.close()
        assert tokens == want[:left]
        assert engine.lengths == (len(prompt) + left - 1,)
        (rest,) = engine.generate([[want[left - 1]]], 30 - left, reuse_prefix=True)
        assert rest.tokens == want[left:]


def test_prefixes_of_drafted_sequences_are_reused() -> None:
    model, (prompt,) = chain(8), phrases(20, words=8)
    for ahead in (False, True):
        scheduler = scheduler_of(engine_of(model, 2), ahead, prefix_cache=2)
        first = scheduler.submit(prompt, 15)
        finished(scheduler)
        longer = [*prompt, *first.tokens, 1, 2, 3]
        again = scheduler.submit(longer, 9)
        finished(scheduler)
        assert again.reused_tokens >= len(prompt)
        assert first.result() == by_plain_steps(model, prompt, 15)
        assert again.result() == by_plain_steps(model, longer, 9)


# ── drafts ───────────────────────────────────────────────────────────────────────────────────────


def test_right_drafts_save_steps() -> None:
    model = chain(8)
    scheduler = Scheduler(engine_of(model, 1, Lookup()))
    request = scheduler.submit([*range(8), *range(4)], 50)
    finished(scheduler)
    found, load = request.result(), scheduler.load
    assert found.tokens == [(4 + i) % 8 for i in range(50)]
    assert load.accepted_tokens == found.accepted_tokens == 49 - load.steps
    assert load.drafted_tokens == found.drafted_tokens
    assert load.steps <= 9  # one without drafts, and 48 tokens by eight a step at most


def test_texts_without_repetition_have_no_drafts() -> None:
    model = chain(VOCABULARY)
    scheduler = Scheduler(engine_of(model, 1))
    request = scheduler.submit([0], 50)
    finished(scheduler)
    assert request.result() == Generated([i + 1 for i in range(50)], "length")
    assert (scheduler.load.drafted_tokens, scheduler.load.steps) == (0, 49)


def test_requests_without_drafts_take_plain_steps() -> None:
    model, prompt = chain(8), [*range(8), *range(8)]
    scheduler = Scheduler(engine_of(model, 2))
    request = scheduler.submit(prompt, 40, speculate=False)
    finished(scheduler)
    assert request.result() == by_plain_steps(model, prompt, 40)
    assert (scheduler.load.drafted_tokens, scheduler.load.steps) == (0, 39)
    # Next to another request with drafts that make steps wider.
    requests = [scheduler.submit(prompt, 40, speculate=each) for each in (False, True)]
    finished(scheduler)
    assert all(each.result() == by_plain_steps(model, prompt, 40) for each in requests)
    assert requests[1].generated.accepted_tokens > 20
    with pytest.raises(ConfigError, match="speculate is 1; allowed: True or False"):
        scheduler.submit(prompt, speculate=1)  # type: ignore[arg-type]


def test_plain_engines_have_no_drafts() -> None:
    scheduler = Scheduler(engine_of(chain(8), 1, None))
    scheduler.submit([*range(8), *range(8)], 20)
    finished(scheduler)
    assert (scheduler.load.drafted_tokens, scheduler.load.accepted_tokens) == (0, 0)


def transitions(words: int, speculate: Lookup | None, draws: int) -> Iterator[list[int]]:
    """Texts at temperature 1, as many as have so many tokens."""
    engine = engine_of(chain(words, words, sharpness=8.0), 128, speculate)
    for seed in range(-(-draws // (128 * 55))):
        found = engine.generate([[i % words, i // words] for i in range(128)], 55, sampling=Sampling(1.0, seed=seed))
        yield from ([result.accepted_tokens, *result.tokens] for result in found)


def test_drafts_change_no_distribution() -> None:
    """Tokens follow each other as often as the model says, and each is what a plain step draws."""
    words = 16
    model = chain(words, words, sharpness=8.0)
    with torch.no_grad():
        logits = torch.stack([model(torch.tensor([[i]])).logits[0, -1] for i in range(words)])
    want = logits.double().softmax(1)
    counts, accepted, texts = torch.zeros(words, words, dtype=torch.float64), 0, []
    for right, *text in transitions(words, EAGER, 100_000):
        accepted += right
        texts.append(text)
        for one, other in pairwise(text):
            counts[one, other] += 1
    assert accepted > 10_000
    expected = want * counts.sum(1, keepdim=True)
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(words * (words - 1.0)).double()
    assert torch.special.gammaincc(freedom / 2, statistic / 2) > 1e-4  # chi-square
    plain = [text for _, *text in transitions(words, None, 20_000)]
    assert texts[: len(plain)] == plain


# ── widths ───────────────────────────────────────────────────────────────────────────────────────


def record(found: int, steps: int = 0, right: int = 0) -> DraftRecord:
    """Of a sequence with drafts for its next step, after steps in which the first drafts of 7 were right."""
    made = DraftRecord(7)
    for _ in range(steps):
        made.note(8, right + 1, 7)
    made.found = found
    return made


def test_widths_follow_drafts_and_costs() -> None:
    widths = widths_of(7, 8)
    assert widths == (1, 2, 4, 8)

    def equal(_: int) -> float:
        return 1.0

    assert next_width([], widths, equal) == 1
    assert next_width([record(0), record(0, 9, 7)], widths, equal) == 1  # nothing is found
    assert next_width([record(7, 20, 7)], widths, equal) == 8  # always right
    assert next_width([record(7, 20, 7)], widths, float) in widths  # each token costs the same
    assert next_width([record(7, 20, 7)], widths, lambda width: width**2) == 1
    assert next_width([record(7, 20, 0)], widths, lambda width: 1 + 0.2 * width) == 1  # never right
    assert next_width([record(7, 20, 1)], widths, lambda width: 1 + 0.2 * width) == 2  # the first draft
    assert next_width([record(3, 20, 7)], widths, equal) == 4  # no more than there are
    assert next_width([record(0)] * 7 + [record(7, 20, 7)], widths, lambda width: 1 + 0.5 * width) == 1  # one of eight
    assert next_width([record(7, 20, 7)] * 8, widths, lambda width: 1 + 0.5 * width) == 8


def test_wrong_drafts_are_tried_again_now_and_then() -> None:
    widths = widths_of(7, 8)
    for costs in ({1: 1.0, 2: 1.08, 4: 1.11, 8: 1.25}, {1: 1.0, 2: 1.2, 4: 1.43, 8: 1.77}):
        one, spent = DraftRecord(7), []
        for _ in range(1000):  # never right
            width = next_width([one], widths, costs.__getitem__)
            spent.append(costs[width])
            one.note(width, 1, 7)
        assert sum(spent[:128]) < 128 / 0.98
        assert 1000 < sum(spent) < 1000 / 0.98
        steps = 0
        while one.expected(8) < 7:  # from now on right
            width, steps = next_width([one], widths, costs.__getitem__), steps + 1
            one.note(width, width, 7)
        assert steps < 60


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.1, seed=2)], ids=["greedy", "drawn"])
def test_steps_are_timed_as_they_are_taken(sampling: Sampling | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model, prompt = chain(6), [0, 1, 2, 3, 4, 5] * 3
    engine = engine_of(model, 1)
    assert (
        engine.generate([prompt], 30, sampling=sampling)[0].tokens
        == by_plain_steps(model, prompt, 30, sampling=sampling).tokens
    )
    (times,) = engine.runner.step_us.values()
    assert {drawn for _, drawn in times} == {sampling is not None}
    assert {width for width, _ in times} >= {1, 2}
    assert all(time > 0 for time in times.values())


def test_unused_drafts_are_not_counted() -> None:
    one = record(3)
    assert one.note(1, 1, 5) == 0
    assert one.note(4, 3, 2) == 3
    assert one.note(8, 1, 0) == 2
    assert one.note(8, 0, 0) == 0


@pytest.mark.parametrize("drafts", [1, 2, 3, 6, 15])
def test_any_number_of_drafts_gives_the_same(drafts: int) -> None:
    model, prompts = chain(8, sharpness=6.0), phrases(14, 25, words=8)
    for sampling in (Sampling(), Sampling(1.0, seed=1)):
        found = engine_of(model, 2, Lookup(drafts, 1, 8)).generate(prompts, sampling=sampling)
        assert found == engine_of(model, 2, None).generate(prompts, sampling=sampling)
        assert sum(result.accepted_tokens for result in found) > 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafts": 0}, "drafts is 0; allowed: 1 to 15"),
        ({"drafts": 16}, "drafts is 16; allowed: 1 to 15"),
        ({"drafts": True}, "drafts is True; allowed: 1 to 15"),
        ({"longest": 9}, "longest is 9; allowed: 1 to 8"),
        ({"shortest": 5}, "shortest is 5; allowed: 1 to 4"),
        ({"shortest": 0}, "shortest is 0; allowed: 1 to 4"),
        ({"shortest": "two"}, "shortest is 'two'; allowed: 1 to 4"),
    ],
)
def test_lookups_out_of_range_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lookup(**options)


def test_other_kinds_of_drafts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"speculate is 7; allowed: a qcut\.Lookup, a qcut\.DraftModel, or None"):
        engine_of(small("llama"), 1, 7)  # type: ignore[arg-type]
