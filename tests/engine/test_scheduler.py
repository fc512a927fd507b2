"""Continuous batching: a sequence's tokens do not depend on which other sequences come and go."""

from __future__ import annotations

import copy
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import qcut
from qcut.engine.engine import Engine
from qcut.engine.kv_cache.cache import KVDtype
from qcut.engine.request import Request
from qcut.engine.scheduler import Scheduler
from qcut.engine.sequence import Event, Generated
from qcut.errors import BusyError, ConfigError, ContextError, DtypeError, RequestError, ShapeError
from qcut.numerics.sampling import History, Sampling, log_probabilities, sample
from tests.support import ROOT
from tests.support.decoders import VOCABULARY, prompts_of, sizes, small


def engine_of(model: Any, batch: int, kv_cache: KVDtype = "auto") -> Engine:
    guide = [[1, 2, 3, 4]] if kv_cache == "int4" else None
    return Engine(model, batch=batch, context=64, kv_cache=kv_cache, calibration_prompts=guide)


def by_itself(model: Any, prompt: list[int], new: int | None, **options: Any) -> Generated:
    (found,) = engine_of(model, 1, options.pop("kv_cache", "auto")).generate([prompt], new, **options)
    return found


def wide() -> Any:
    """A model with heads of 32 columns, which 4-bit caches ask for."""
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    return model.eval()


def finished(scheduler: Scheduler, most: int = 1000) -> int:
    """Steps until the scheduler is idle."""
    for steps in range(most):
        if not scheduler.step():
            load = scheduler.load
            assert (load.waiting, load.prefilling, load.running) == (0, 0, 0)
            return steps
    raise AssertionError(f"not done after {most} steps")


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "scheme", "kv_cache"),
    [
        ("llama", None, "auto"),
        ("gpt2", "w8a8", "int8"),
        ("qwen2", "codebook4_g32", "auto"),
        ("wide", "codebook4_g32_int8", "int4"),
        ("qwen3_moe", "w8a8", "int8"),
        ("qwen2_moe", "codebook4_g32", "auto"),
        ("gpt_oss", "w8a8", "int8"),
        ("gpt_oss", "mxfp4", "auto"),
    ],
)
def test_admitted_and_retired_sequences_change_no_tokens(kind: str, scheme: str | None, kv_cache: KVDtype) -> None:
    model = wide() if kind == "wide" else small(kind)
    if scheme is not None:
        qcut.quantize(model, scheme, allow_growth=True, progress=False)
    prompts = prompts_of(VOCABULARY, 5, 1, 30, 17, 2, 44, 9, 23)
    news = [7, 1, 12, 20, 3, 9, None, 15]
    want = [by_itself(model, p, n, kv_cache=kv_cache) for p, n in zip(prompts, news, strict=True)]
    for ahead in (False, True):
        scheduler = Scheduler(engine_of(model, 3, kv_cache), chunk=8, prefix_cache=2)
        scheduler._batch.runs_ahead = ahead
        requests = []
        for prompt, new in zip(prompts, news, strict=True):
            requests.append(scheduler.submit(prompt, new))
            for _ in range(2):
                scheduler.step()
        finished(scheduler)
        assert [request.result() for request in requests] == want, f"ahead: {ahead}"


def test_draws_are_those_of_the_engine() -> None:
    model = small("llama")
    options = [
        Sampling(1.0, seed=3),
        Sampling(),
        Sampling(1.5, top_k=20, top_p=0.9, seed=2**63),
        Sampling(0.7, min_p=0.1),
    ]
    prompts = prompts_of(VOCABULARY, 6, 11, 3, 19)
    scheduler = Scheduler(engine_of(model, 4), chunk=16)
    requests = [scheduler.submit(p, 12, sampling=s) for p, s in zip(prompts, options, strict=True)]
    finished(scheduler)
    for request, prompt, each in zip(requests, prompts, options, strict=True):
        assert request.result() == by_itself(model, prompt, 12, sampling=each)


def test_stop_tokens_and_the_contexts_end() -> None:
    model = small("gpt2")
    prompt = prompts_of(VOCABULARY, 9)[0]
    tokens = by_itself(model, prompt, 10).tokens
    scheduler = Scheduler(engine_of(model, 2))
    stopped, full = scheduler.submit(prompt, stop=[tokens[4]]), scheduler.submit(prompt)
    finished(scheduler)
    assert stopped.result() == Generated(tokens[: tokens.index(tokens[4]) + 1], "stop")
    assert full.result() == by_itself(model, prompt, None)
    assert full.reason == "context"
    assert len(full.tokens) == 64 - 9 + 1


def penalized_alone(model: Any, prompt: list[int], new: int, options: Sampling) -> list[int]:
    """Step by step through `Engine.decode`."""
    engine, history, tokens = Engine(model, context=64), History.empty(1, VOCABULARY, torch.device("cpu")), []
    history.start(0, torch.tensor(prompt))
    logits = engine.prefill([prompt])
    for i in range(new):
        token = sample(logits, options, torch.tensor([0]), torch.tensor([len(prompt) + i]), history)
        history.add(token)
        tokens.append(int(token))
        logits = engine.decode(token)
    return tokens


@pytest.mark.parametrize("ahead", [False, True])
def test_penalties_are_each_sequences_own(ahead: bool) -> None:
    model = small("llama")
    options = [
        Sampling(repetition_penalty=1.8),
        Sampling(),
        Sampling(1.0, presence_penalty=2.0, frequency_penalty=0.5, seed=5),
        Sampling(presence_penalty=100.0),
    ]
    prompts = prompts_of(VOCABULARY, 5, 8, 3, 6)
    scheduler = Scheduler(engine_of(model, 2))
    scheduler._batch.runs_ahead = ahead
    requests = [scheduler.submit(p, n, sampling=s) for p, s, n in zip(prompts, options, (20, 4, 9, 20), strict=True)]
    finished(scheduler)
    for request, prompt, each in zip(requests, prompts, options, strict=True):
        want = penalized_alone(model, prompt, len(request.tokens), each)
        assert request.tokens == want == by_itself(model, prompt, len(want), sampling=each).tokens
    assert len(set(requests[3].tokens)) == 20
    assert requests[0].tokens != by_itself(model, prompts[0], 20).tokens


def test_samples_of_a_prompt_share_its_prefill() -> None:
    model = small("llama")
    prompt = prompts_of(VOCABULARY, 21)[0]
    scheduler = Scheduler(engine_of(model, 4), prefix_cache=0)
    requests = scheduler.submit_samples(prompt, 3, 10, sampling=Sampling(1.0, seed=8))
    finished(scheduler)
    assert scheduler.load.prompt_tokens == 21
    # A batch of the engine gives its rows the indices that samples have here.
    want = Engine(model, batch=3, context=64).generate([prompt] * 3, 10, sampling=Sampling(1.0, seed=8))
    assert [request.result() for request in requests] == want
    assert len({tuple(request.tokens) for request in requests}) == 3


def test_log_probabilities_are_the_models() -> None:
    model = small("qwen2")
    prompts = prompts_of(VOCABULARY, 7, 4)
    scheduler = Scheduler(engine_of(model, 2))
    asked = scheduler.submit(prompts[0], 5, sampling=Sampling(2.0, seed=1), top=3)
    chosen = scheduler.submit(prompts[1], 5, top=0)
    finished(scheduler)
    events = list(asked.events())
    assert [event.reason for event in events] == [None] * 4 + ["length"]
    engine = Engine(model, context=64)
    logits = engine.prefill([prompts[0]])
    for event in events:
        want = log_probabilities(logits, torch.tensor([event.token]), 3)
        assert event.log_probability is not None
        assert event.log_probability.chosen == pytest.approx(want.chosen.item(), abs=1e-5)
        assert [token for token, _ in event.log_probability.top] == want.tokens[0].tolist()
        assert [value for _, value in event.log_probability.top] == pytest.approx(want.values[0].tolist(), abs=1e-5)
        logits = engine.decode([event.token or 0])
    found = [event.log_probability for event in chosen.events()]
    assert all(each is not None and each.top == () and each.chosen < 0 for each in found)
    assert asked.generated.log_probabilities == [event.log_probability for event in events]


@pytest.mark.parametrize("sampling", [None, Sampling(2.0, seed=1), Sampling(presence_penalty=0.5)])
def test_log_probabilities_of_a_batch_are_those_of_requests(sampling: Sampling | None) -> None:
    model = small("llama")
    prompts = prompts_of(VOCABULARY, 7, 4)
    engine = engine_of(model, 2)
    results = engine.generate(prompts, 5, sampling=sampling, top=2)
    events = list(engine.stream(prompts, 5, sampling=sampling, top=2))
    for i, result in enumerate(results):
        assert result.log_probabilities == [event.log_probability for event in events if event.sequence == i]
        assert len(result.log_probabilities) == 5
    scheduler = Scheduler(engine_of(model, 2))
    request = scheduler.submit(prompts[0], 5, sampling=sampling, top=2)
    finished(scheduler)
    alone = request.generated
    assert alone.tokens == results[0].tokens
    for one, other in zip(alone.log_probabilities or [], results[0].log_probabilities or [], strict=True):
        assert one.chosen == pytest.approx(other.chosen, abs=1e-5)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
    assert engine.generate(prompts, 1)[0].log_probabilities is None
    for top in (-1, 21, True, "x"):
        with pytest.raises(ConfigError, match="allowed: 0 to 20, or None"):
            engine.stream(prompts, 5, top=top)  # type: ignore[arg-type]


# ── prefix cache ─────────────────────────────────────────────────────────────────────────────────


def test_prefix_cache_finds_prefixes_by_tokens() -> None:
    model = small("llama")
    common, *ends = prompts_of(VOCABULARY, 40, 3, 5, 2)
    scheduler = Scheduler(engine_of(model, 2), chunk=8, prefix_cache=2)
    for i, end in enumerate(ends):
        request = scheduler.submit([*common, *end], 4)
        finished(scheduler)
        assert request.result() == by_itself(model, [*common, *end], 4)
        assert scheduler.load.reused_tokens == 40 * i
    # A chat goes on: its whole beginning is there, except the last new token, which nobody has read.
    before = scheduler.load.reused_tokens
    longer = [*request.prompt, *request.tokens, 1, 2]
    again = scheduler.submit(longer, 4)
    finished(scheduler)
    assert again.result() == by_itself(model, longer, 4)
    assert scheduler.load.reused_tokens - before == len(longer) - 3


def test_prefix_cache_evicts_least_recently_used() -> None:
    model = small("gpt2")
    first, second, third = prompts_of(VOCABULARY, 20, 24, 28)
    scheduler = Scheduler(engine_of(model, 1), prefix_cache=2)

    def found(prompt: list[int]) -> int:
        before = scheduler.load.reused_tokens
        request = scheduler.submit(prompt, 1)
        finished(scheduler)
        assert request.result() == by_itself(model, prompt, 1)
        return scheduler.load.reused_tokens - before

    assert [found(p) for p in (first, second, first, third, first, second)] == [0, 0, 19, 0, 19, 0]
    assert scheduler.load.prefix_cache_tokens == 20 + 24


def test_prefix_cache_stores_a_prompt_once() -> None:
    scheduler = Scheduler(engine_of(small("gpt2"), 1), prefix_cache=4)
    prompt = prompts_of(VOCABULARY, 20)[0]
    for _ in range(3):
        scheduler.submit(prompt, 1)
        finished(scheduler)
    assert scheduler.load.prefix_cache_tokens == 20
    scheduler.submit(prompt, 5)
    finished(scheduler)
    assert scheduler.load.prefix_cache_tokens == 24
    scheduler.submit(prompts_of(VOCABULARY, 15)[0], 1)
    finished(scheduler)
    assert scheduler.load.prefix_cache_tokens == 24


# ── iterations ───────────────────────────────────────────────────────────────────────────────────


def test_long_prompt_delays_running_sequences_by_chunks() -> None:
    model = small("llama")
    short, long = prompts_of(VOCABULARY, 4, 48)
    scheduler = Scheduler(engine_of(model, 2), chunk=8, prefix_cache=0)
    running = scheduler.submit(short, 30)
    scheduler.step()
    waiting = scheduler.submit(long, 3)
    came = []
    while not waiting.tokens:
        before = len(running.tokens)
        scheduler.step()
        came.append(len(running.tokens) - before)
    assert came == [1] * 6
    finished(scheduler)
    assert running.result() == by_itself(model, short, 30)
    assert waiting.result() == by_itself(model, long, 3)


def test_cancelled_requests_leave_at_once() -> None:
    model = small("llama")
    prompts = prompts_of(VOCABULARY, 5, 7, 9, 30, 3)
    scheduler = Scheduler(engine_of(model, 2), chunk=4)
    one, two, three, four, five = (scheduler.submit(prompt, 20) for prompt in prompts)
    five.cancel()
    while len(one.tokens) < 4:
        scheduler.step()
    one.cancel()
    three.cancel()
    scheduler.step()
    assert (one.reason, three.reason, five.reason) == ("cancelled",) * 3
    while not four.tokens:
        scheduler.step()
    four.cancel()
    finished(scheduler)
    assert one.result() == Generated(by_itself(model, prompts[0], 20).tokens[: len(one.tokens)], "cancelled")
    assert two.result() == by_itself(model, prompts[1], 20)
    assert 1 <= len(four.tokens) < 20
    assert (three.tokens, five.tokens) == ([], [])
    two.cancel()  # has ended
    assert two.reason == "length"


# ── threads ──────────────────────────────────────────────────────────────────────────────────────


def test_many_clients_at_once() -> None:
    model = small("llama")
    rng = random.Random(5)
    jobs = [
        ([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))], rng.randint(1, 12), Sampling(1.0, seed=i))
        for i in range(24)
    ]
    want = [by_itself(model, prompt, new, sampling=options) for prompt, new, options in jobs]
    found: dict[int, list[int]] = {}
    with Scheduler(engine_of(model, 5), chunk=16) as scheduler:

        def client(mine: int) -> None:
            for i in range(mine, len(jobs), 8):
                prompt, new, options = jobs[i]
                found[i] = list(scheduler.submit(prompt, new, sampling=options))

        threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[i] for i in range(len(jobs))] == [each.tokens for each in want]
    load = scheduler.load
    assert (load.waiting, load.prefilling, load.running) == (0, 0, 0)
    assert load.prompt_tokens == sum(len(prompt) for prompt, _, _ in jobs)
    assert load.new_tokens == sum(len(each.tokens) for each in want)


def test_closing_finishes_what_runs() -> None:
    model = small("gpt2")
    prompt = prompts_of(VOCABULARY, 6)[0]
    scheduler = Scheduler(engine_of(model, 1)).run()
    requests = [scheduler.submit(prompt, 5) for _ in range(3)]
    scheduler.close()
    assert [request.result() for request in requests] == [by_itself(model, prompt, 5)] * 3
    with pytest.raises(BusyError, match="the scheduler closes"):
        scheduler.submit(prompt)
    scheduler.close()


def test_a_failed_block_cancels() -> None:
    model = small("gpt2")
    held: list[Request] = []

    def block() -> None:
        with Scheduler(engine_of(model, 1)) as scheduler:
            held.extend(scheduler.submit([token], 60) for token in (1, 2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert held[1].result() == Generated([], "cancelled")
    assert held[0].reason in ("cancelled", "length")


def test_a_failed_step_ends_only_its_requests() -> None:
    model = small("gpt2")
    engine = engine_of(model, 2)
    scheduler = Scheduler(engine)
    failing = [scheduler.submit([1, 2], 20), scheduler.submit([3], 20)]
    waiting = scheduler.submit([4, 5], 20)
    scheduler.step()
    down, failures = engine.decoder.blocks[1].mlp.down, [MemoryError("no memory")]

    def fail(*_: object) -> None:
        if failures:
            raise failures.pop()

    hook = down.register_forward_pre_hook(fail)  # engines that are there do not look for hooks
    finished(scheduler)
    hook.remove()
    for request in failing:
        assert request.reason == "failed"
        with pytest.raises(RequestError, match="the request has failed: MemoryError: no memory"):
            request.result()
    assert waiting.result() == by_itself(model, [4, 5], 20)
    assert scheduler.error is None
    assert scheduler.submit([1, 2], 20).reason is None


def test_a_failed_listener_ends_only_its_request(caplog: pytest.LogCaptureFixture) -> None:
    model = small("gpt2")
    scheduler = Scheduler(engine_of(model, 2))

    def listener(event: Event) -> None:
        raise OSError("the connection has gone")

    failed, other = scheduler.submit([1, 2], 20, listener=listener), scheduler.submit([3], 20)
    finished(scheduler)
    assert (failed.reason, len(failed.tokens)) == ("cancelled", 1)
    assert other.result() == by_itself(model, [3], 20)
    assert "a request's listener has failed" in caplog.text


def test_listeners_get_events_in_place_of_the_queue() -> None:
    seen: list[Event] = []
    scheduler = Scheduler(engine_of(small("gpt2"), 1))
    request = scheduler.submit([1, 2, 3], 3, listener=seen.append)
    finished(scheduler)
    assert [event.token for event in seen] == request.tokens
    assert seen[-1] == Event(0, request.tokens[-1], None, "length")


@pytest.mark.parametrize("listener", [None, lambda event: None])
def test_results_may_be_read_again(listener: Any) -> None:
    scheduler = Scheduler(engine_of(small("gpt2"), 2))
    request = scheduler.submit([1, 2, 3], 3, listener=listener)
    failed = scheduler.submit([1, 2, 3], 3, listener=listener)
    scheduler.step()
    failed.fail(RequestError("no"))
    finished(scheduler)
    with ThreadPoolExecutor(3) as pool:
        assert [each.result(10) for each in [pool.submit(request.result) for _ in range(3)]] == [request.generated] * 3
        assert pool.submit(lambda: list(request)).result(10) == []
        for _ in range(2):
            with pytest.raises(RequestError, match="no"):
                pool.submit(failed.result).result(10)


@pytest.mark.parametrize("other", ["engine", "scheduler"])
def test_others_of_an_engine_end_what_runs(other: str) -> None:
    model = small("gpt2")
    engine = engine_of(model, 2)
    scheduler, second = Scheduler(engine), Scheduler(engine)
    request = scheduler.submit([1, 2, 3], 20)
    for _ in range(4):
        scheduler.step()
    if other == "engine":
        engine.generate([[4, 5]], 2)
    else:
        second.submit([4, 5], 2)
        finished(second)
    finished(scheduler)
    with pytest.raises(ConfigError, match="this request is over: the engine has served another call since"):
        request.result()
    again = scheduler.submit([1, 2, 3], 20)
    finished(scheduler)
    assert again.result() == by_itself(model, [1, 2, 3], 20)


def test_lost_requests_leave_the_engines_cache() -> None:
    """Requests that end move no sequence in the cache, which is another call's by then."""
    model = small("gpt2")
    engine, prompts = engine_of(model, 3), [[4, 5], [6, 7, 8], [9, 1]]
    scheduler = Scheduler(engine)
    requests = [scheduler.submit([1, 2, 3 + i], 20) for i in range(3)]
    for _ in range(6):
        scheduler.step()
    found = []
    for event in engine.stream(prompts, 12, top=1):
        found.append(event)
        requests[0].cancel()
        scheduler.step()
    assert found == list(engine_of(model, 3).stream(prompts, 12, top=1))
    for request in requests[1:]:
        with pytest.raises(ConfigError, match="this request is over"):
            request.result()


def test_calls_from_several_threads_wait() -> None:
    model = small("gpt2")
    engine = engine_of(model, 2)
    prompts = [[[i, 2, 3], [4, i]] for i in range(1, 9)]
    wanted = [([by_itself(model, prompt, 6) for prompt in two], engine.score(two)) for two in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            texts = [pool.submit(engine.generate, two, 6) for two in prompts]
            scores = [pool.submit(engine.score, two) for two in prompts]
            for text, score, (tokens, losses) in zip(texts, scores, wanted, strict=True):
                assert text.result(60) == tokens
                assert all(map(torch.equal, score.result(60), losses))


def test_steps_wait_for_calls_of_their_engine() -> None:
    model = small("gpt2")
    engine = engine_of(model, 2)
    scheduler = Scheduler(engine)
    running = scheduler.submit([1, 2, 3], 20)
    for _ in range(4):
        scheduler.step()
    waiting = scheduler.submit([3, 2, 1], 4)
    thread = threading.Thread(target=finished, args=(scheduler,))

    def on_token(sequence: int, token: int) -> None:
        if not thread.ident:
            thread.start()
            thread.join(0.2)

    assert engine.generate([[4, 5]], 4, on_token=on_token) == [by_itself(model, [4, 5], 4)]
    thread.join(60)
    with pytest.raises(ConfigError, match="this request is over"):
        running.result()
    assert waiting.result() == by_itself(model, [3, 2, 1], 4)


@pytest.mark.parametrize("options", [{"top": 1}, {"top": 0, "prompt_top": 0}, {"max_new_tokens": 0, "prompt_top": 2}])
def test_log_probabilities_that_are_nan_fail(options: dict[str, Any]) -> None:
    model = copy.deepcopy(small("gpt2"))
    torch.nn.init.constant_(model.transformer.ln_f.weight, float("nan"))
    scheduler = Scheduler(engine_of(model, 2))
    request = scheduler.submit([1, 2, 3], **{"max_new_tokens": 2, **options})
    finished(scheduler)
    with pytest.raises(RequestError, match="log-probabilities are NaN"):
        request.result()


# ── wrong calls ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([],), {}, ShapeError, "prompt 0 is empty"),
        (([0] * 65,), {}, ContextError, "prompt 0 has 65 tokens; this engine's context is 64"),
        (([VOCABULARY],), {}, ConfigError, str(VOCABULARY)),
        ((["text"],), {}, DtypeError, "text"),
        (([1], 0), {}, ConfigError, "max_new_tokens is 0"),
        (([1],), {"sampling": 1.0}, ConfigError, "sampling is 1.0"),
        (([1],), {"top": 21}, ConfigError, "top is 21; allowed: 0 to 20, or None"),
        (([1],), {"stop": ["x"]}, ConfigError, "stop"),
        (([1],), {"listener": 5}, ConfigError, "listener is 5; allowed: a function of an Event, or None"),
        (([1],), {"skip_special_tokens": [1]}, ConfigError, r"skip_special_tokens is \[1\]; allowed: True or False"),
    ],
)
def test_wrong_requests(arguments: Any, options: Any, error: type[Exception], message: str) -> None:
    scheduler = Scheduler(engine_of(small("gpt2"), 2))
    with pytest.raises(error, match=message):
        scheduler.submit(*arguments, **options)
    assert not scheduler.step()


def test_a_scheduler_of_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine is a GPT2LMHeadModel; allowed: a qcut\.Engine"):
        Scheduler(small("gpt2"))


def test_limits() -> None:
    engine = engine_of(small("gpt2"), 2)
    scheduler = Scheduler(engine, max_waiting=1)
    with pytest.raises(ConfigError, match="samples is 3; allowed: 1 to 2"):
        scheduler.submit_samples([1], 3)
    scheduler.submit([1], 1)
    with pytest.raises(BusyError, match="1 prompts wait; allowed: 1"):
        scheduler.submit([1], 1)
    finished(scheduler)
    scheduler.submit([1], 1)
    for name, value in (("chunk", 0), ("prefix_cache", -1), ("max_waiting", 0)):
        with pytest.raises(ConfigError, match=name):
            Scheduler(engine, **{name: value})


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def talking() -> Engine:
    """An engine with the embedded checkpoint and its tokenizer."""
    folder = ROOT / "models" / "gpt2-5m"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    return Engine(model, batch=3, context=128, tokenizer=tokenizer)


def test_text_and_chats_are_those_of_the_engine(talking: Engine) -> None:
    chat = [{"role": "user", "content": "Which statement imports a module?"}]
    prompts = ["The import statement", chat, talking.tokenizer("A function").input_ids]
    want = [talking.generate(p if i < 2 else [p], 16)[0] for i, p in enumerate(prompts)]
    stop = str(want[0].text)[5:9]
    stopped = talking.generate(prompts[0], 16, stop=[stop])[0]
    scheduler = Scheduler(talking)
    requests = [scheduler.submit(prompt, 16) for prompt in prompts]
    requests.append(scheduler.submit(prompts[0], 16, stop=[stop]))
    finished(scheduler)
    events = [list(request.events()) for request in requests]
    for request, seen, result in zip(requests, events, [*want, stopped], strict=True):
        assert "".join(event.text or "" for event in seen) == request.generated.text == result.text
        assert request.generated == result
    assert (stopped.reason, stop in str(stopped.text), len(stopped.tokens) < 16) == ("stop", False, True)


def test_a_cancelled_text_is_whole(talking: Engine) -> None:
    scheduler = Scheduler(talking)
    request = scheduler.submit("Strings are", 40, stop=["no such string"])
    while len(request.tokens) < 7:
        scheduler.step()
    request.cancel()
    finished(scheduler)
    events = list(request.events())
    assert events[-1].reason == "cancelled"
    said = talking.tokenizer.decode(talking.tokenizer("Strings are").input_ids + request.tokens)
    assert "".join(event.text or "" for event in events) == request.generated.text == said[len("Strings are") :]


def test_one_prompt_a_request(talking: Engine) -> None:
    chat = [{"role": "user", "content": "Why?"}]
    given: list[Any] = [["one", "two"], [chat, chat]]
    for several in given:
        with pytest.raises((ShapeError, DtypeError)):
            Scheduler(talking).submit(several)
