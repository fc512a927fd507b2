"""The real ``openai`` client gets what the engine gives."""

from __future__ import annotations

import asyncio
import math
from itertools import chain
from typing import Any

import pytest

import qcut
from tests.server.serving import NAME, TEMPLATE, Served, steady

openai = pytest.importorskip("openai")

TEXTS = ["The import statement", "A function that", "Strings are", "When a module"]
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="session")
def client(served: Served) -> Any:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def complete(client: Any, prompt: Any, count: int = 12, **options: Any) -> Any:
    return client.completions.create(model=NAME, prompt=prompt, max_tokens=count, **{"temperature": 0, **options})


def test_models(client: Any, served: Served) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == (NAME, "model", served.alone.context)
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="allowed: 'gpt2'"):
        client.models.retrieve("an/other")


def test_a_completion(client: Any, served: Served) -> None:
    answer = complete(client, TEXTS[0])
    (choice,) = answer.choices
    assert choice.text == served.text(TEXTS[0], 12)
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("length", 0, None)
    read = len(served.alone.tokenizer(TEXTS[0])["input_ids"])
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (read, 12, read + 12)
    assert (answer.object, answer.model) == ("text_completion", NAME)
    assert answer.system_fingerprint == f"qcut-{qcut.__version__}"


def test_a_stream_is_the_whole_in_pieces(client: Any, served: Served) -> None:
    pieces = list(complete(client, TEXTS[0], stream=True, stream_options={"include_usage": True}))
    *texts, last = pieces
    assert "".join(piece.choices[0].text for piece in texts) == served.text(TEXTS[0], 12)
    assert [piece.choices[0].finish_reason for piece in texts] == [None] * (len(texts) - 1) + ["length"]
    assert all(piece.usage is None for piece in texts)
    assert (last.choices, last.usage.completion_tokens) == ([], 12)
    assert len({piece.id for piece in pieces}) == 1


def test_beginnings_that_are_known_are_counted(client: Any, served: Served) -> None:
    ids = list(range(100, 150))
    first, second = (complete(client, [*ids, last], 1).usage for last in (7, 8))
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == 50
    assert second.prompt_tokens == 51


def test_several_prompts_and_samples(client: Any, served: Served) -> None:
    answer = complete(client, TEXTS, 8)
    assert [choice.text for choice in answer.choices] == [served.text(text, 8) for text in TEXTS]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    samples = complete(client, TEXTS[:2], 8, n=2, temperature=1, seed=5)
    pieces = list(complete(client, TEXTS[:2], 8, n=2, temperature=1, seed=5, stream=True))
    texts = [choice.text for choice in samples.choices]
    assert len(set(texts)) == 4
    streamed = ["".join(p.choices[0].text for p in pieces if p.choices[0].index == i) for i in range(4)]
    assert streamed == texts
    assert samples.usage.completion_tokens == 32
    assert samples.usage.prompt_tokens == sum(len(served.alone.tokenizer(text)["input_ids"]) for text in TEXTS[:2])
    assert texts[0] == served.text(TEXTS[0], 8, sampling=qcut.Sampling(1.0, seed=5))


def test_ids_are_prompts(client: Any, served: Served) -> None:
    ids = served.alone.tokenizer(TEXTS[1])["input_ids"]
    assert complete(client, ids).choices[0].text == served.text(TEXTS[1], 12)
    both = complete(client, [ids, ids[:2]]).choices
    assert both[0].text == served.text(TEXTS[1], 12)
    echoed = complete(client, [ids], 4, echo=True).choices[0].text
    assert echoed == TEXTS[1] + served.text(TEXTS[1], 4)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(client: Any, served: Served, stream: bool) -> None:
    answer = complete(client, TEXTS[:2], 4, echo=True, n=2, stream=stream)
    choices = [c for piece in answer for c in piece.choices] if stream else answer.choices
    texts = ["".join(c.text for c in choices if c.index == i) for i in range(4)]
    assert texts == [text + served.text(text, 4) for text in TEXTS[:2] for _ in range(2)]


def test_every_way_of_choosing_tokens_is_passed_on(client: Any, served: Served) -> None:
    given = {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": -3}
    more = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2}
    text = complete(client, TEXTS[2], extra_body=more, **given).choices[0].text
    sampling = qcut.Sampling(**{**given, **more, "seed": 2**64 - 3})  # type: ignore[arg-type]
    assert text == served.text(TEXTS[2], 12, sampling=sampling)
    draws = {complete(client, TEXTS[2], temperature=1.5).choices[0].text for _ in range(4)}
    assert len(draws) > 1, "without a seed every request draws anew"


def test_stops(client: Any, served: Served) -> None:
    whole = served.text(TEXTS[0], 40)
    word = whole.split()[4]
    answer = complete(client, TEXTS[0], 40, stop=word)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == whole[: whole.index(word)]
    pieces = list(complete(client, TEXTS[0], 40, stop=[word, "never"], stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole[: whole.index(word)]
    (found,) = served.alone.generate(TEXTS[0], 40)
    token = found.tokens[6]
    first = found.tokens.index(token)
    cut = complete(client, TEXTS[0], 40, extra_body={"stop_token_ids": [token]})
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("stop", first + 1)


def test_a_model_s_own_end(client: Any, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = served.alone.generate(TEXTS[0], 20)
    token = found.tokens[5]
    monkeypatch.setattr(served.scheduler.engine, "end_tokens", (token,))
    first = found.tokens.index(token) + 1
    assert complete(client, TEXTS[0], 20).usage.completion_tokens == first
    assert complete(client, TEXTS[0], 20, extra_body={"ignore_eos": True}).usage.completion_tokens == 20


def test_log_probabilities_of_completions(client: Any, served: Served) -> None:
    whole = complete(client, TEXTS[0], 6, logprobs=3).choices[0]
    (ids,) = served.alone.generate(TEXTS[0], 6)
    found = whole.logprobs
    assert found.tokens == [served.alone.tokenizer.decode([token]) for token in ids.tokens]
    assert "".join(found.tokens) == whole.text
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(6)]
    assert found.token_logprobs == [max(top.values()) for top in found.top_logprobs]  # greedy
    assert all(len(top) == 3 for top in found.top_logprobs)
    logits = served.alone.prefill(TEXTS[0])[0].float().log_softmax(0)
    assert found.token_logprobs[0] == pytest.approx(float(logits.max()), abs=1e-4)
    pieces = list(complete(client, TEXTS[0], 6, logprobs=3, stream=True))
    parts = [piece.choices[0].logprobs for piece in pieces]
    assert list(chain.from_iterable(part.tokens for part in parts)) == found.tokens
    assert list(chain.from_iterable(part.text_offset for part in parts)) == found.text_offset
    assert list(chain.from_iterable(part.token_logprobs for part in parts)) == pytest.approx(
        found.token_logprobs, abs=1e-5
    )


def test_a_chat(client: Any, served: Served) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": CHAT, "temperature": 0, "max_completion_tokens": 10}
    text = served.text("system: Be short.\nuser: What is a list?\nassistant:", 10)
    assert TEMPLATE.startswith("{% for")
    answer = client.chat.completions.create(**options)
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", text)
    assert answer.object == "chat.completion"
    first, *pieces = list(client.chat.completions.create(**options, stream=True))
    assert first.choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    assert pieces[-1].choices[0].finish_reason == "length"
    parts = {"role": "system", "content": [{"type": "text", "text": part} for part in ("Be ", "short.")]}
    options["messages"] = [parts, CHAT[1]]
    assert client.chat.completions.create(**options).choices[0].message.content == text


def test_log_probabilities_of_chats(client: Any) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": CHAT, "temperature": 0, "max_tokens": 5}
    found = client.chat.completions.create(**options, logprobs=True, top_logprobs=2).choices[0]
    rows = found.logprobs.content
    assert "".join(row.token for row in rows) == found.message.content
    for row in rows:
        assert len(row.top_logprobs) == 2
        assert row.logprob == row.top_logprobs[0].logprob <= 0
        assert bytes(row.bytes).decode() == row.token
    bare = client.chat.completions.create(**options, logprobs=True).choices[0].logprobs.content
    assert [row.logprob for row in bare] == pytest.approx([row.logprob for row in rows], abs=1e-5)
    assert all(row.top_logprobs == [] for row in bare)
    assert all(math.isfinite(row.logprob) for row in rows)


def test_an_answer_goes_back_as_it_came(client: Any, served: Served) -> None:
    messages: list[Any] = [CHAT[1]]
    for question in ("And a set?", "And a dict?"):
        answer = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=4)
        messages += [answer.choices[0].message, {"role": "user", "content": question}]
    last = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=4)
    turns = [message if isinstance(message, dict) else message.model_dump() for message in messages]
    prompt = "".join(f"{turn['role']}: {turn['content']}\n" for turn in turns) + "assistant:"
    assert last.choices[0].message.content == served.text(prompt, 4)


@pytest.mark.parametrize("stream", [False, True])
def test_the_newer_interface(client: Any, served: Served, stream: bool) -> None:
    options: dict[str, Any] = {"model": NAME, "input": "What is a list?", "temperature": 0, "max_output_tokens": 8}
    text = served.text("user: What is a list?\nassistant:", 8)
    if stream:
        with client.responses.stream(**options) as found:
            events = list(found)
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
        answer = events[-1].response
    else:
        answer = client.responses.create(**options)
    assert (answer.output_text, answer.usage.output_tokens) == (text, 8)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with pytest.raises(openai.BadRequestError, match="whole conversation"):
        client.responses.create(**options, previous_response_id=answer.id)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve(answer.id)


def test_asynchronous_calls(served: Served) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            options: dict[str, Any] = {"model": NAME, "messages": CHAT, "temperature": 0, "max_tokens": 6}
            whole = await client.chat.completions.create(**options)
            stream = await client.chat.completions.create(**options, stream=True)
            text = "".join([piece.choices[0].delta.content or "" async for piece in stream])
            response = await client.responses.create(
                model=NAME, input=CHAT, temperature=0, max_output_tokens=6, extra_body={"ignore_eos": True}
            )
            return [whole.choices[0].message.content or "", text, response.output_text]

    assert len(set(asyncio.run(ask()))) == 1


def test_half_a_character_is_never_sent(client: Any, served: Served) -> None:
    """Of each sequence the pieces are the whole, though tokens are bytes."""
    options: dict[str, Any] = {"temperature": 2.0, "seed": 3, "n": 4, "extra_body": {"top_k": 0}}
    whole = complete(client, "caf\u00e9 \u65e5\u672c", 40, **options)
    pieces = [piece.choices[0] for piece in complete(client, "caf\u00e9 \u65e5\u672c", 40, stream=True, **options)]
    for choice in whole.choices:
        assert "".join(piece.text for piece in pieces if piece.index == choice.index) == choice.text


def test_the_context_ends_a_text(client: Any, served: Served) -> None:
    answer = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == served.alone.context + 1


def test_64_concurrent_clients_get_their_own_tokens(served: Served) -> None:
    prompts = [f"{TEXTS[i % 4]} {i}" for i in range(64)]
    alone = [steady(served.alone, prompt, 3 + i % 6, qcut.Sampling()) for i, prompt in enumerate(prompts)]
    asked = [i for i, texts in enumerate(alone) if texts]
    assert sum(len(alone[i]) for i in asked) > 128

    async def ask(client: Any, index: int) -> str:
        options = {"model": NAME, "prompt": prompts[index], "temperature": 0, "max_tokens": len(alone[index])}
        if index % 2:
            return str((await client.completions.create(**options)).choices[0].text)
        return "".join([p.choices[0].text async for p in await client.completions.create(**options, stream=True)])

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(ask(client, index) for index in asked))

    assert asyncio.run(all_at_once()) == [alone[i][-1] for i in asked]


def test_clients_that_go_leave_nothing(served: Served) -> None:
    async def go(client: Any, index: int) -> None:
        stream = await client.completions.create(
            model=NAME, prompt=f"{TEXTS[0]} {index}", max_tokens=80, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()

    async def wait_not(client: Any) -> None:
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.05).completions.create(
                model=NAME, prompt=TEXTS[1], max_tokens=80, n=4, extra_body={"ignore_eos": True}
            )

    async def all_at_once() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            await asyncio.gather(*(go(client, index) for index in range(12)), wait_not(client))

    before = served.scheduler.load.new_tokens
    asyncio.run(all_at_once())
    served.idle()
    assert served.scheduler.load.new_tokens - before < 12 * 80, "what was left was not read to its end"
    figures = served.metrics()
    assert {'qcut_requests_total{reason="cancelled"}', 'qcut_refused_total{status="499"}'} <= figures.keys()
    assert 'qcut_refused_total{status="503"}' not in figures


def test_example_client_prints_the_answer(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    from examples.client import main

    main("The import statement", f"{served.url}/v1")
    assert len(capsys.readouterr().out) > 20
