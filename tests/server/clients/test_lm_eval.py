"""lm-evaluation-harness scores over HTTP what the engine scores."""

from __future__ import annotations

from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from tests.server.clients.conftest import KEY
from tests.server.serving import MODEL, NAME, Served

PAIRS = [("The import statement", " is used"), ("A function that", " returns a list of"), ("Strings", " are\n")]
OPTIONS = {"model": NAME, "max_length": 250, "max_retries": 1, "max_gen_toks": 8}


def completions(served: Served, **options: Any) -> LocalCompletionsAPI:
    return LocalCompletionsAPI(base_url=f"{served.url}/v1/completions", **{**OPTIONS, **options})


def score(served: Served, context: list[int], continuation: list[int]) -> float:
    (found,) = served.alone.score([[*context, *continuation]])
    return -float(found[len(context) - 1 :].sum())


@pytest.mark.parametrize(
    "options",
    [
        {"tokenizer": str(MODEL), "tokenizer_backend": "huggingface"},
        {"tokenizer": str(MODEL), "tokenizer_backend": "huggingface", "batch_size": 3},
        {"tokenizer_backend": "remote", "auth_token": KEY},
    ],
)
def test_likelihoods_of_continuations(keyed: Served, options: dict[str, Any]) -> None:
    model = completions(keyed, **options)
    found = model.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)])
    for (value, is_greedy), (context, continuation) in zip(found, PAIRS, strict=True):
        whole = keyed.alone.tokenizer(context + continuation)["input_ids"]
        first = keyed.alone.tokenizer(context)["input_ids"]
        assert value == pytest.approx(score(keyed, first, whole[len(first) :]), abs=0.05)
        likely = keyed.alone.generate([first], len(whole) - len(first))[0].tokens
        assert is_greedy == (likely == whole[len(first) :])


def test_texts_as_prompts(keyed: Served) -> None:
    model = completions(keyed, tokenizer=str(MODEL), tokenizer_backend="huggingface", tokenized_requests=False)
    found = model.loglikelihood([Instance("loglikelihood", {}, PAIRS[0], 0)])
    whole = keyed.alone.tokenizer("".join(PAIRS[0]))["input_ids"]
    first = len(keyed.alone.tokenizer(PAIRS[0][0])["input_ids"])
    assert found[0][0] == pytest.approx(score(keyed, whole[:first], whole[first:]), abs=0.05)


def test_likelihoods_of_whole_texts(keyed: Served) -> None:
    """Longer than the context, in windows."""
    model = completions(keyed, tokenizer=str(MODEL), tokenizer_backend="huggingface")
    text = "The import statement binds names. " * 60
    (value,) = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    ids = keyed.alone.tokenizer(text)["input_ids"]
    assert len(ids) > 300
    assert -20 * len(ids) < value < 0


def test_texts_are_continued(keyed: Served) -> None:
    model = completions(keyed, tokenizer=str(MODEL), tokenizer_backend="huggingface")
    word = keyed.text("The import statement", 8).split()[2]
    asked: Any = ("The import statement", {"until": [word], "temperature": 0, "do_sample": False})
    (text,) = model.generate_until([Instance("generate_until", {}, asked, 0)])
    whole = keyed.text("The import statement", 8)
    assert text == whole[: whole.index(word)]


def test_chats_are_answered(keyed: Served) -> None:
    model = LocalChatCompletion(base_url=f"{keyed.url}/v1/chat/completions", **OPTIONS)
    prompt = model.apply_chat_template([{"role": "user", "content": "What is a list?"}])
    asked: Any = (prompt, {"until": ["never"], "max_gen_toks": 8})
    (text,) = model.generate_until([Instance("generate_until", {}, asked, 0)])
    assert text == keyed.text("user: What is a list?\nassistant:", 8)
