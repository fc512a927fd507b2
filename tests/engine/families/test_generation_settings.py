"""What a checkpoint's generation_config asks for is computed as transformers computes it, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qcut.engine.engine import Engine
from qcut.engine.scheduler import Scheduler
from qcut.errors import ConfigError, UnsupportedError
from qcut.numerics.sampling import Sampling
from tests.support.decoders import VOCABULARY, prompts_of, small

NEW = 16


def with_settings(kind: str = "llama", **settings: Any) -> Any:
    model = small(kind)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


def by_transformers(model: Any, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, **options}
    found: list[int] = model.generate(ids, max_new_tokens=NEW, **options)[0, len(prompt) :].tolist()
    return found


def by_engine(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """Tokens of the engine, which are the scheduler's, too."""
    (alone,) = Engine(model, context=48).generate([prompt], NEW, **options)
    scheduler = Scheduler(Engine(model, batch=2, context=48), chunk=4)
    other, request = scheduler.submit([5, 6], 9), scheduler.submit(prompt, NEW, **options)
    while scheduler.step():
        pass
    assert other.reason is not None
    assert request.result().tokens == alone.tokens
    return alone.tokens


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"repetition_penalty": 1.3}),
        ("gpt2", {"repetition_penalty": 1.9}),
        ("qwen2", {"repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}),
        ("llama", {"suppress_tokens": [*range(0, VOCABULARY, 3)]}),
        ("gpt2", {"begin_suppress_tokens": [*range(0, VOCABULARY, 2)], "repetition_penalty": 1.2}),
        ("gemma2", {"no_repeat_ngram_size": 0, "num_beams": 1, "forced_eos_token_id": None, "penalty_alpha": None}),
    ],
)
def test_greedy_tokens_are_those_of_transformers(kind: str, settings: dict[str, Any]) -> None:
    model = with_settings(kind, **settings)
    (prompt,) = prompts_of(VOCABULARY, 9)
    want = by_transformers(model, prompt)
    assert by_engine(model, prompt) == want
    if len(settings) < 4:
        assert want != by_transformers(with_settings(kind), prompt)


@pytest.mark.parametrize("setting", ["min_new_tokens", "min_length"])
def test_texts_are_at_least_as_long_as_transformers(setting: str) -> None:
    (prompt,) = prompts_of(VOCABULARY, 9)
    usual = by_transformers(with_settings(), prompt)
    ends = [usual[2], usual[5]]
    model = with_settings(eos_token_id=ends, **{setting: 7 + (9 if setting == "min_length" else 0)})
    want = by_transformers(model, prompt)
    assert Engine(model, context=48).end_tokens == tuple(sorted(set(ends)))
    assert by_engine(model, prompt, stop=ends) == want
    assert len(want) > 7
    assert len(by_engine(model, prompt, stop=ends, min_new_tokens=0 if setting == "min_new_tokens" else 12)) != len(
        want
    )


def test_a_call_names_another_penalty() -> None:
    model = with_settings(repetition_penalty=1.4)
    (prompt,) = prompts_of(VOCABULARY, 9)
    assert by_engine(model, prompt, sampling=Sampling()) == by_transformers(model, prompt)
    usual = by_transformers(with_settings(), prompt)
    assert by_engine(model, prompt, sampling=Sampling(repetition_penalty=1.0)) == usual


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_repeat_ngram_size", 3),
        ("bad_words_ids", [[3]]),
        ("forced_bos_token_id", 0),
        ("forced_eos_token_id", 2),
        ("encoder_repetition_penalty", 1.1),
        ("encoder_no_repeat_ngram_size", 2),
        ("num_beams", 4),
        ("penalty_alpha", 0.6),
        ("sequence_bias", {(3,): -5.0}),
        ("guidance_scale", 1.5),
        ("exponential_decay_length_penalty", (5, 1.2)),
        ("stop_strings", ["."]),
        ("max_time", 1.5),
        ("dola_layers", "low"),
        ("token_healing", True),
    ],
)
def test_what_the_engine_lacks_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"generation_config\.{name} is .*; allowed: None.*model\.generate"):
        Engine(with_settings(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("repetition_penalty", 0.0, r"generation_config\.repetition_penalty 0\.0; allowed"),
        ("suppress_tokens", [VOCABULARY], r"generation_config\.suppress_tokens is .*allowed: ids of tokens, 0 to 95"),
        ("min_new_tokens", -1, r"generation_config\.min_new_tokens is -1; allowed"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(with_settings(**{name: value}))


def test_entries_that_nobody_reads_pass() -> None:
    model = with_settings(chat_format="chatml", max_window_size=2048)
    model.generation_config.max_length, model.generation_config.do_sample = 2048, True
    Engine(model)
    model.generation_config = None
    Engine(model)
