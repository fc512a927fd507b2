"""The engine's prompts as text and chats, its text, stop strings and stream, against ids and transformers' own text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qcut
from qcut import errors
from qcut.engine.sequence import Event
from tests.support import ROOT
from tests.support.decoders import last_logits, small

FOLDER = ROOT / "models" / "gpt2-5m"
TEXTS = ["The import statement", "A class definition is", "emoji 👍🏽"]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def engine(model: Any, tokenizer: Any) -> qcut.Engine:
    return qcut.Engine(model, tokenizer=tokenizer, batch=3, context=96)


def ids_of(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in texts]


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────


def test_text_is_the_tokenizers_ids(engine: qcut.Engine, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, TEXTS)
    assert engine.generate(TEXTS, 5) == engine.generate(ids, 5)
    assert engine.generate(TEXTS[0], 5) == engine.generate(ids[:1], 5)
    assert engine.generate(tuple(TEXTS[:2]), 5) == engine.generate((text for text in TEXTS[:2]), 5)
    assert torch.equal(engine.prefill(TEXTS), engine.prefill(ids))
    for one, other in zip(engine.score(TEXTS), engine.score(ids), strict=True):
        assert torch.equal(one, other)


def test_a_chat_goes_through_the_tokenizers_template(engine: qcut.Engine, tokenizer: Any) -> None:
    text = "system: Be short.\nuser: What is a list?\nassistant:"
    assert engine.generate(CHAT, 5) == engine.generate(text, 5)
    assert engine.generate([CHAT, CHAT[1:]], 5) == engine.generate([text, text.split("\n", 1)[1]], 5)
    assert torch.equal(engine.prefill(CHAT), engine.prefill(text))


def test_text_continues_after_a_reused_prefix(engine: qcut.Engine, tokenizer: Any) -> None:
    engine.prefill(TEXTS[0][:10])
    (rest,) = engine.generate(TEXTS[0][10:], 6, reuse_prefix=True)
    first, second = ids_of(tokenizer, [TEXTS[0][:10], TEXTS[0][10:]])
    assert engine.generate([first + second], 6) == [rest]


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ("", errors.ShapeError, "prompt 0 is an empty string"),
        (["a", ""], errors.ShapeError, "prompt 1 is an empty string"),
        ([], errors.ShapeError, "no prompt"),
        ("\ud800", errors.ConfigError, "prompt 0 is no text that the tokenizer takes"),
        (["a", [1]], errors.DtypeError, "prompt 0 is text, prompt 1 neither text nor a chat; allowed: one kind"),
        ([[1], "a"], errors.DtypeError, "prompt 0 is neither text nor a chat, prompt 1 text; allowed: one kind"),
        (["a", CHAT], errors.DtypeError, "prompt 0 is text, prompt 1 a chat"),
        ([CHAT, CHAT[0]], errors.DtypeError, "prompt 0 is a chat, prompt 1 a message"),
        ([CHAT[0], "a"], errors.DtypeError, "prompt 0 is a message, prompt 1 text"),
        ([CHAT, []], errors.DtypeError, "prompt 0 is a chat, prompt 1 neither"),
        (CHAT[0], errors.DtypeError, "prompts are one message; allowed: a list, where a chat is a list of messages"),
        ([[CHAT[0], "a"]], errors.DtypeError, "prompt 0: message 1 is a str; allowed: a chat is a list"),
        ([{"role": "user"}], errors.ConfigError, "prompt 0: message 0 has no 'content'"),
        ([CHAT, [{"content": "a"}]], errors.ConfigError, "prompt 1: message 0 has no 'role'"),
        ([{"role": "user", "content": None}], errors.ConfigError, "has role and content 'user' and None"),
        (["a"] * 4, errors.ContextError, "4 prompts; this engine's batch is 3"),
        ("word " * 200, errors.ContextError, "prompt 0 has .* tokens; this engine's context is 96"),
        ([[[1, 2]]], errors.ShapeError, r"prompt 0 is of shape \[1, 2\]"),
        ([["a", "b"]], errors.DtypeError, "prompt 0 is no list of integers"),
        ([1, 2], errors.ShapeError, "prompts are one list of token ids"),
        (b"a", errors.DtypeError, "prompts are text"),
    ],
)
def test_other_prompts_are_refused(engine: qcut.Engine, prompts: Any, error: Any, message: str) -> None:
    engine.prefill(["a", "b"])
    lengths = engine.lengths
    for call in (engine.generate, engine.prefill, engine.score, engine.stream):
        with pytest.raises(error, match=message):
            call(prompts)
    assert engine.lengths == lengths


def test_text_and_chats_want_a_tokenizer(model: Any) -> None:
    engine = qcut.Engine(model, context=16)
    assert engine.tokenizer is None
    for prompts, message in (
        ("a", r"prompts are text, 'a'; .*; text needs Engine\(model, tokenizer=…\)"),
        (["a"], r"prompt 0 is text, 'a'; .*; text needs Engine\(model, tokenizer=…\)"),
        (CHAT, r"prompts are a chat, and the engine has no tokenizer; allowed: Engine\(model, tokenizer=…\)"),
        ([CHAT], "prompts are a chat, and the engine has no tokenizer"),
    ):
        with pytest.raises(errors.DtypeError, match=message):
            engine.generate(prompts)
    with pytest.raises(errors.ConfigError, match=r"stop is \['a'\]; .*; strings need Engine\(model, tokenizer=…\)"):
        engine.generate([[1]], stop=["a"])
    (got,) = engine.generate([[1]], 2)
    assert got.text is None
    assert [event.text for event in engine.stream([[1]], 2)] == [None, None]


def test_templates_that_are_missing_or_refuse_are_named(model: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    engine = qcut.Engine(model, tokenizer=tokenizer, context=16)
    with pytest.raises(errors.ConfigError, match="the tokenizer has no chat template; allowed: text or token ids"):
        engine.generate(CHAT)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(errors.ConfigError, match="prompt 0: the tokenizer's chat template refuses it: roles must alt"):
        engine.generate(CHAT)
    for wrong in ("gpt2", 7, str.upper):
        with pytest.raises(
            errors.ConfigError, match=r"tokenizer is a \w+; allowed: a tokenizer of transformers, or None"
        ):
            qcut.Engine(model, tokenizer=wrong)


def test_tokenizer_of_more_tokens_than_the_model(tokenizer: Any) -> None:
    engine = qcut.Engine(small("gpt2"), tokenizer=tokenizer)
    with pytest.raises(errors.ConfigError, match=r"prompt 0: the tokenizer gives token id \d+; allowed: 0 to 95"):
        engine.generate("The import statement")
    known = next(t for t in map(chr, range(33, 127)) if max(tokenizer(t)["input_ids"]) < 96)
    assert engine.generate(known, 3)[0].text is not None


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


def test_text_is_what_transformers_decodes(engine: qcut.Engine, model: Any, tokenizer: Any) -> None:
    for text, got in zip(TEXTS, engine.generate(TEXTS, 24), strict=True):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        assert got.text is not None
        assert text + got.text == tokenizer.decode(out[0], skip_special_tokens=True)


def test_text_of_random_tokens_ends_inside_characters(engine: qcut.Engine, tokenizer: Any) -> None:
    hot = qcut.Sampling(temperature=100.0, seed=5)
    ids = ids_of(tokenizer, TEXTS)
    got = engine.generate(TEXTS, 60, sampling=hot)
    for prompt, text, result in zip(ids, TEXTS, got, strict=True):
        assert text + (result.text or "") == tokenizer.decode(prompt + result.tokens, skip_special_tokens=True)
    assert any("\ufffd" in (result.text or "") for result in got)


def test_stop_tokens_do_not_show(engine: qcut.Engine, tokenizer: Any) -> None:
    free = engine.generate(TEXTS[0], 12)[0]
    end = free.tokens.index(free.tokens[5])
    (got,) = engine.generate(TEXTS[0], 12, stop=[free.tokens[end]])
    assert (got.tokens, got.reason) == (free.tokens[: end + 1], "stop")
    assert got.text == tokenizer.decode(free.tokens[:end])


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_stop_strings_end_a_sequence(engine: qcut.Engine, tokenizer: Any, size: int) -> None:
    free = engine.generate(TEXTS[:2], 24)
    text = free[0].text or ""
    cut = text[11 : 11 + size]
    begin = text.index(cut)
    got, other = engine.generate(TEXTS[:2], 24, stop=[cut, "never in the text"])
    assert (got.text, got.reason) == (text[:begin], "stop")
    # Tokens up to the one that completes the string, and no further.
    assert got.tokens == free[0].tokens[: len(got.tokens)]
    assert cut in tokenizer.decode(got.tokens)
    assert cut not in tokenizer.decode(got.tokens[:-1])
    if cut not in (free[1].text or ""):
        assert other == free[1]


def test_strings_and_ids_stop_together(engine: qcut.Engine) -> None:
    free = engine.generate(TEXTS[0], 16)[0]
    string, token = (free.text or "")[-3:], free.tokens[2]
    assert engine.generate(TEXTS[0], 16, stop=[string, token]) == engine.generate(TEXTS[0], 16, stop=[token])
    assert engine.generate(TEXTS[0], 16, stop={string}) == engine.generate(TEXTS[0], 16, stop=(string, 8191))


def test_an_unfinished_stop_string_is_text(engine: qcut.Engine) -> None:
    free = engine.generate(TEXTS[0], 8)[0]
    assert engine.generate(TEXTS[0], 8, stop=[(free.text or "")[-4:] + "\u2603"])[0] == free


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("end", r"stop is 'end'; allowed: .* and of strings, \['end'\] for one"),
        ([""], "stop has an empty string; allowed: 1 character and more"),
        ([b"end"], "stop is .*; allowed: a list"),
        (["end", None], "stop is .*; allowed: a list"),
        (3, r"stop is 3; allowed: a list of token ids, \[3\] for one"),
    ],
)
def test_other_stops_are_refused(engine: qcut.Engine, stop: Any, message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        engine.generate("a", stop=stop)


def test_end_tokens_are_the_models_and_the_tokenizers(engine: qcut.Engine, tokenizer: Any) -> None:
    assert engine.end_tokens == (tokenizer.eos_token_id,) == (0,)
    tiny = small("llama")
    assert qcut.Engine(tiny).end_tokens == ()
    tiny.generation_config.eos_token_id = [7, 3, 4096]
    assert qcut.Engine(tiny).end_tokens == (3, 7)
    assert qcut.Engine(tiny, tokenizer=tokenizer).end_tokens == (0, 3, 7)
    assert engine.generate("a", 4, stop=[*engine.end_tokens, "\u2603"])[0].reason == "length"


# ── streams ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sampling", [None, qcut.Sampling(temperature=100.0, seed=2)], ids=["greedy", "drawn"])
def test_a_stream_is_generate_in_events(engine: qcut.Engine, sampling: qcut.Sampling | None) -> None:
    free = engine.generate(TEXTS, 20, sampling=sampling)
    stop: list[int | str] = [free[1].tokens[6], (free[0].text or "")[12:15]]
    heard: list[tuple[int, int]] = []
    want = engine.generate(TEXTS, 20, sampling=sampling, stop=stop, on_token=lambda i, token: heard.append((i, token)))
    lengths = engine.lengths
    events = list(engine.stream(TEXTS, 20, sampling=sampling, stop=stop))
    assert engine.lengths == lengths
    assert [(event.sequence, event.token) for event in events] == heard
    for i, result in enumerate(want):
        own = [event for event in events if event.sequence == i]
        assert [event.token for event in own] == result.tokens
        assert "".join(event.text or "" for event in own) == result.text
        assert [event.reason for event in own] == [None] * (len(own) - 1) + [result.reason]
    assert {result.reason for result in want} == {"stop", "length"}


def test_a_left_stream_can_be_continued(engine: qcut.Engine, model: Any, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, TEXTS[:2])
    events: list[Event] = []
    for event in engine.stream(TEXTS[:2], 20):
        events.append(event)
        if len(events) == 7:  # between two sequences of one step
            break
    shown = [[event.token for event in events if event.sequence == i] for i in range(2)]
    assert [len(tokens) for tokens in shown] == [4, 3]
    assert engine.lengths == tuple(len(row) + len(new) - 1 for row, new in zip(ids, shown, strict=True))
    logits = engine.decode([tokens[-1] for tokens in shown])
    for row, prompt, new in zip(logits, ids, shown, strict=True):
        want = last_logits(model, prompt + new)
        assert (row - want).abs().max() <= 1e-4 * want.abs().max()
    assert engine.generate(TEXTS, 4) == qcut.Engine(model, tokenizer=tokenizer, batch=3).generate(TEXTS, 4)


def test_a_closed_stream_has_ended(engine: qcut.Engine, tokenizer: Any) -> None:
    whole = engine.generate(TEXTS[0], 9)[0]
    stream = engine.stream(TEXTS[0], 9)
    assert engine.lengths == (len(tokenizer(TEXTS[0])["input_ids"]),)  # read before the first event
    shown = [next(stream).token for _ in range(4)]
    stream.close()
    assert list(stream) == []
    (rest,) = engine.generate([shown[-1:]], 5, reuse_prefix=True)
    assert shown + rest.tokens == whole.tokens


def test_a_stream_ends_with_the_next_call(engine: qcut.Engine) -> None:
    begun, waiting = engine.stream(TEXTS[0], 9), engine.stream(TEXTS[1], 9)
    for stream in (begun, waiting):
        if stream is waiting:
            next(stream)
            engine.prefill(TEXTS[1])
        with pytest.raises(errors.ConfigError, match="this stream is over: the engine has served another call since"):
            next(stream)
    assert engine.lengths == (len(engine.tokenizer(TEXTS[1])["input_ids"]),)


def test_no_gradients_are_kept(model: Any, tokenizer: Any) -> None:
    for event in qcut.Engine(model, tokenizer=tokenizer, context=16).stream("The", 2):
        assert torch.is_grad_enabled(), event
