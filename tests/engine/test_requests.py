"""Options of a request next to its prompt, and that no request ends another."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qcut
from qcut.engine.engine import Engine
from qcut.engine.likelihoods import likelihoods
from qcut.engine.request import Request
from qcut.engine.scheduler import Scheduler
from qcut.engine.sequence import Event
from qcut.errors import ConfigError, RequestError
from qcut.numerics.sampling import Sampling
from tests.support import ROOT
from tests.support.decoders import VOCABULARY, prompts_of, small

FOLDER = ROOT / "models" / "gpt2-5m"


def done(scheduler: Scheduler) -> None:
    while scheduler.step():
        pass


def by_itself(model: Any, prompt: Any, new: int, **options: Any) -> Any:
    (found,) = Engine(model, context=64).generate([prompt], new, **options)
    return found


class Strange(Sampling):
    """Settings that were not checked."""

    def __post_init__(self) -> None:
        """Let everything pass."""


@pytest.fixture(scope="module")
def talking() -> Engine:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|stop|>", "<|turn|>"]})
    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return Engine(model, batch=3, context=128, tokenizer=tokenizer)


def forced(engine: Engine, tokens: list[int]) -> list[Sampling]:
    return [Sampling(logit_bias={token: 100.0}) for token in tokens]


# ── biases and least lengths ─────────────────────────────────────────────────────────────────────


def test_biases_of_one_request_do_not_reach_others() -> None:
    model, prompts = small("llama"), prompts_of(VOCABULARY, 5, 8, 3)
    options = [Sampling(logit_bias={7: 100.0}), Sampling(), Sampling(1.0, seed=4, logit_bias={1: 3.0, 2: -100.0})]
    scheduler = Scheduler(Engine(model, batch=3, context=64), chunk=4)
    requests = [scheduler.submit(p, 9, sampling=s) for p, s in zip(prompts, options, strict=True)]
    done(scheduler)
    for request, prompt, each in zip(requests, prompts, options, strict=True):
        assert request.result() == by_itself(model, prompt, 9, sampling=each)
    assert requests[0].tokens == [7] * 9
    assert requests[1].tokens == by_itself(model, prompts[1], 9).tokens


def test_stop_tokens_wait_for_the_least_length() -> None:
    model, (prompt,) = small("llama"), prompts_of(VOCABULARY, 6)
    stop = by_itself(model, prompt, 4).tokens[1:2]
    assert len(by_itself(model, prompt, 20, stop=stop).tokens) == 2
    scheduler = Scheduler(Engine(model, batch=2, context=64))
    found = by_itself(model, prompt, 20, stop=stop, min_new_tokens=6)
    request = scheduler.submit(prompt, 20, stop=stop, min_new_tokens=6)
    done(scheduler)
    assert request.result() == found
    assert len(found.tokens) > 6
    assert stop[0] not in found.tokens[:6]
    assert by_itself(model, prompt, 6, stop=[stop[0], 10**9, -1], min_new_tokens=6).tokens == found.tokens[:6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_new_tokens": 5}, r"min_new_tokens is 5; allowed: 0 to max_new_tokens, 4"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"min_new_tokens": 1.5}, r"min_new_tokens is 1\.5"),
        ({"sampling": Sampling(logit_bias={VOCABULARY: 1.0})}, rf"logit_bias of token {VOCABULARY}; allowed: tokens 0"),
        ({"prompt_top": 21}, "prompt_top is 21; allowed: 0 to 20"),
        ({"top": 2**70}, "top is"),
    ],
)
def test_arguments_out_of_range_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scheduler(Engine(small("gpt2"), context=64)).submit([1, 2], 4, **options)


# ── stop strings and special tokens ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_stop_as_strings(talking: Engine, skip: bool) -> None:
    special = talking.tokenizer.convert_tokens_to_ids("<|stop|>")
    options: dict[str, Any] = {"sampling": Sampling(logit_bias={special: 100.0}), "skip_special_tokens": skip}
    (free,) = talking.generate("The import statement", 3, **options)
    assert free.text == ("" if skip else "<|stop|>" * 3)
    (found,) = talking.generate("The import statement", 3, stop=["<|stop|>"], **options)
    assert (found.tokens, found.reason, found.text) == ([special], "stop", "")
    (two,) = talking.generate("The import statement", 5, stop=["<|stop|><|stop|>"], **options)
    assert (len(two.tokens), two.reason, two.text) == (2, "stop", "")
    (later,) = talking.generate("The import statement", 5, stop=["<|stop|>"], min_new_tokens=3, **options)
    assert (len(later.tokens), later.reason) == (3, "stop")


def test_a_string_with_a_special_token_in_it_stops(talking: Engine) -> None:
    (usual,) = talking.generate("The import statement", 4)
    scheduler, special = Scheduler(talking), talking.tokenizer.convert_tokens_to_ids("<|turn|>")
    request = scheduler.submit("The import statement", 9, stop=[f"{str(usual.text)[-3:]}<|turn|>", "<|turn|>\n"])
    while len(request.tokens) < 4:
        scheduler.step()
    assert request.reason is None
    request.append(special)  # as if the model had chosen it
    assert (request.finish_reason, request.generated.text) == ("stop", str(usual.text)[:-3])


# ── log-probabilities of prompts ─────────────────────────────────────────────────────────────────


def test_prompts_are_scored_next_to_other_requests() -> None:
    model, prompts = small("llama"), prompts_of(VOCABULARY, 30, 21, 40, 1)
    engine = Engine(model, batch=3, context=64)
    want = Engine(model, batch=4, context=64).score(prompts)
    scheduler = Scheduler(engine, chunk=8, prefix_cache=4)
    before = scheduler.submit(prompts[2], 20)
    requests = [scheduler.submit(p, new, prompt_top=3) for p, new in zip(prompts, (5, 0, 1, 0), strict=True)]
    again = scheduler.submit(prompts[0], 0, prompt_top=0)  # its beginning is kept, and read all the same
    done(scheduler)
    assert before.result() == by_itself(model, prompts[2], 20)
    for request, prompt, scores in zip(requests, prompts, want, strict=True):
        found = request.prompt_log_probabilities
        assert found is not None
        assert len(found) == len(prompt) - 1
        torch.testing.assert_close(torch.tensor([each.chosen for each in found]), -scores)
        assert all(len(each.top) == 3 for each in found)
    assert requests[0].result() == by_itself(model, prompts[0], 5)
    assert (requests[1].result().tokens, requests[1].reason) == ([], "length")
    assert [event.token for event in requests[3].events()] == [None]
    assert [each.chosen for each in again.prompt_log_probabilities or ()] == pytest.approx(
        (-want[0]).tolist(), abs=1e-5
    )
    with torch.no_grad():
        logits = model(torch.tensor(prompts[:1])).logits[0, :-1]
    (first, *_) = likelihoods(logits, torch.tensor(prompts[0][1:]), [3] * 29)
    listed = (requests[0].prompt_log_probabilities or [None])[0]
    assert first is not None
    assert listed is not None
    assert [token for token, _ in listed.top] == [token for token, _ in first.top]


def test_zero_new_tokens_need_prompt_scores() -> None:
    with pytest.raises(ConfigError, match="max_new_tokens is 0; allowed: 1 and more"):
        Scheduler(Engine(small("gpt2"), context=64)).submit([1, 2], 0)


def test_waiting_prompts_are_prefilled_in_order() -> None:
    model, prompts = small("llama"), prompts_of(VOCABULARY, 20, 20, 20, 20, 20, 20)
    scheduler, ended = Scheduler(Engine(model, batch=3, context=64), chunk=8), []
    for i, prompt in enumerate(prompts):
        scheduler.submit(prompt, 1, prompt_top=1 if i % 2 else None, listener=lambda _, i=i: ended.append(i))
    done(scheduler)
    assert ended == sorted(ended)


# ── failures ─────────────────────────────────────────────────────────────────────────────────────


class Panic(BaseException):
    """As a tokenizer in Rust raises."""


@pytest.mark.parametrize("top_k", [2**63, "many"])
def test_failed_settings_end_only_their_request(top_k: Any) -> None:
    model = small("gpt2")
    with Scheduler(Engine(model, batch=2, context=64)) as scheduler:
        bad = scheduler.submit([1, 2], 9, sampling=Strange(1.0, top_k=top_k))
        good = scheduler.submit([3], 9, sampling=Sampling(1.0, seed=3))
        with pytest.raises(RequestError, match="the request has failed"):
            bad.result()
        assert good.result() == by_itself(model, [3], 9, sampling=Sampling(1.0, seed=3))
        assert scheduler.submit([4], 5).result() == by_itself(model, [4], 5)
        assert scheduler.error is None
        assert bad.reason == "failed"


class Failing:
    """A tokenizer without text for what follows some token, once a prompt has been taken."""

    eos_token_id = None

    def __init__(self, token: int, error: BaseException) -> None:
        self.token, self.error, self.fails = token, error, False

    def __call__(self, text: str, **_: Any) -> Any:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: list[int], **_: Any) -> str:
        if self.fails and self.token in ids:
            raise self.error
        return " ".join(map(str, ids))


@pytest.mark.parametrize("error", [ValueError("no text"), Panic("panicked"), SystemExit(3), KeyboardInterrupt()])
def test_a_failed_tokenizer_ends_only_its_request(error: BaseException) -> None:
    tokenizer, model = Failing(77, error), small("gpt2")
    scheduler = Scheduler(Engine(model, batch=2, context=64, tokenizer=tokenizer))
    bad, good = scheduler.submit("1 77", 12), scheduler.submit("3", 12)
    tokenizer.fails = True
    with scheduler:
        with pytest.raises(ConfigError, match=r"the tokenizer fails on [0-9]+ tokens"):
            bad.result()
        assert good.result().tokens == by_itself(model, [3], 12).tokens
        assert scheduler.error is None


@pytest.mark.parametrize("error", [OSError("gone"), SystemExit(1), Panic("panicked"), KeyboardInterrupt()])
def test_a_failed_listener_ends_only_its_request(error: BaseException) -> None:
    model, ended = small("gpt2"), threading.Event()

    def listener(event: Event) -> None:
        ended.set()
        raise error

    with Scheduler(Engine(model, batch=2, context=64)) as scheduler:
        bad = scheduler.submit([1, 2], 30, listener=listener)
        assert scheduler.submit([3], 20).result() == by_itself(model, [3], 20)
        assert ended.wait(10)
        assert scheduler.submit([4], 5).result() == by_itself(model, [4], 5)
    assert bad.reason == "cancelled"


def test_a_tokenizers_panic_over_a_prompt_is_refused(talking: Engine) -> None:
    class Panicking:
        decode = talking.tokenizer.decode
        eos_token_id = None

        def __call__(self, *_: Any, **__: Any) -> Any:
            raise Panic("called `Option::unwrap()` on a `None` value")

    engine = Engine(small("gpt2"), context=64, tokenizer=Panicking())
    with pytest.raises(ConfigError, match="prompt 0 is no text that the tokenizer takes: called"):
        Scheduler(engine).submit("text", 3)


def test_a_failed_chunk_ends_only_its_prompts() -> None:
    model, failures = small("gpt2"), [RuntimeError("no memory")]
    engine = Engine(model, batch=2, context=64)
    scheduler = Scheduler(engine, chunk=8)
    running = scheduler.submit([1, 2], 30)
    scheduler.step()
    bad = scheduler.submit([5] * 20, 4)

    def fail(_: Any, given: Any) -> None:
        if given[0].shape[0] > 2 and failures:  # rows of a chunk
            raise failures.pop()

    hook = engine.decoder.blocks[0].mlp.down.register_forward_pre_hook(fail)
    done(scheduler)
    hook.remove()
    assert (bad.reason, str(bad.error)) == ("failed", "the request has failed: RuntimeError: no memory")
    assert running.result() == by_itself(model, [1, 2], 30)


def test_cancelled_prompt_stops_in_prefill() -> None:
    scheduler = Scheduler(Engine(small("gpt2"), batch=2, context=64), chunk=4, prefix_cache=0)
    long, short = scheduler.submit([7] * 60, 4), scheduler.submit([1, 2], 1)
    scheduler.step()
    long.cancel()
    scheduler.step()
    scheduler.step()
    assert (long.reason, short.reason) == ("cancelled", "length")


# ── seeds ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scheme", [None, "w8a8", "w8a16", "codebook4_g32", "codebook4_g32_int8"])
def test_seeds_give_the_same_tokens_under_load(scheme: str | None) -> None:
    """Prompts that are read in one piece each; see docs/exactness.md for what else a seed promises."""
    model = small("llama")
    if scheme is not None:
        qcut.quantize(model, scheme, allow_growth=True, progress=False)
    prompts = prompts_of(VOCABULARY, 9, 3, 17, 30, 1, 12, 22, 5, 8, 26, 2, 14)
    options = [Sampling(1.0, seed=i, top_p=0.95) for i in range(len(prompts))]
    engine = Engine(model, context=64)
    want = [engine.generate([p], 12, sampling=s)[0].tokens for p, s in zip(prompts, options, strict=True)]
    scheduler, requests = Scheduler(Engine(model, batch=5, context=64)), list[Request]()
    for prompt, each in zip(prompts, options, strict=True):
        requests.append(scheduler.submit(prompt, 12, sampling=each))
        scheduler.step()
    done(scheduler)
    assert [request.tokens for request in requests] == want
