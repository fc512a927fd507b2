"""Tokens of log-probabilities are named by what they add to the text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from qcut.engine.likelihoods import LogProbability
from qcut.server.answers import ChatCompletion, Completion
from qcut.server.logprobs import Scored, Vocabulary, continued
from tests.server.serving import MODEL

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["<unk>", "<s>", "</s>", *BYTES, "▁", "▁a", "a", "▁list", "list", "▁of", "s", ".", "▁▁", "é"]


def sentencepiece() -> Any:
    """A tokenizer that decodes as Llama 2's does."""
    backend = Tokenizer(
        models.BPE({word: i for i, word in enumerate(WORDS)}, [], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def metaspace() -> Any:
    """A tokenizer like T5's: decoding drops the space at the start of a text."""
    words = {word: i for i, word in enumerate(["<unk>", "▁a", "a", "▁list", "list", "▁of", "s"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def byte_level() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def ids(*words: str) -> list[int]:
    return [WORDS.index(word) for word in words]


def scored(tokenizer: Any, before: list[int] | None, tokens: list[int], top: int = 0, **options: Any) -> Scored:
    """The tokens, each the likeliest of the next ids."""
    found = Scored(tokenizer, before, **options)
    size = len(tokenizer)
    for i, token in enumerate(tokens):
        likely = tuple(((token + j) % size, -0.5 - j) for j in range(top))
        found.add(token, LogProbability(-0.5, likely), is_last=i == len(tokens) - 1)
    return found


@pytest.mark.parametrize("make", [sentencepiece, metaspace, byte_level])
def test_tokens_are_the_text_in_pieces(make: Any) -> None:
    """Whatever the tokens are: also bytes that make no characters."""
    tokenizer, generator = make(), random.Random(5)
    special = set(tokenizer.all_special_ids)
    plain = [token for token in range(len(tokenizer)) if token not in special]
    for _ in range(60):
        prompt, tokens = generator.choices(plain, k=5), generator.choices(plain, k=generator.randrange(1, 12))
        whole, known = tokenizer.decode([*prompt, *tokens]), tokenizer.decode(prompt)
        found = scored(tokenizer, prompt, tokens, top=5)
        columns = Completion("m").choice(0, "", found, "stop")["logprobs"]
        text = "".join(columns["tokens"])
        if whole.startswith(known) and "\ufffd" not in whole:
            assert text == whole[len(known) :]
        assert text == continued(Vocabulary(tokenizer), prompt, tokens, True)
        assert columns["text_offset"] == [len("".join(columns["tokens"][:i])) for i in range(len(tokens))]
        assert [len(top) for top in columns["top_logprobs"]] == [5] * len(tokens)
        assert all(token in top for token, top in zip(columns["tokens"], columns["top_logprobs"], strict=True))


def test_space_belongs_to_its_own_token() -> None:
    tokenizer = sentencepiece()
    tokens = ids("▁a", "▁list", "s", "▁of", "a")
    for before, first in ((None, " a"), (ids("<s>"), "a"), (ids("<s>", "s"), " a"), ([], "a")):
        columns = Completion("m").choice(0, "", scored(tokenizer, before, tokens), None)["logprobs"]
        assert columns["tokens"] == [first, " list", "s", " of", "a"]
        assert columns["text_offset"][1] == len(first)
    both = Scored(tokenizer, ids("s"))
    both.add(ids("▁a")[0], LogProbability(-0.1, ((ids("▁a")[0], -0.1), (ids("a")[0], -4.0))))
    assert Completion("m").choice(0, " a", both, None)["logprobs"]["top_logprobs"] == [{" a": -0.1, "a": -4.0}]


def test_alternatives_that_read_alike_are_all_listed() -> None:
    """At a text's beginning a tokenizer may drop the space; the token that was chosen keeps its name."""
    found = Scored(sentencepiece(), [])
    a, spaced = ids("a", "▁a")
    found.add(spaced, LogProbability(-2.0, ((a, -0.1), (spaced, -2.0))))
    columns = Completion("m").choice(0, "a", found, None)["logprobs"]
    assert (columns["tokens"], columns["top_logprobs"]) == (["a"], [{f"token_id:{a}": -0.1, "a": -2.0}])


@pytest.mark.parametrize("make", [sentencepiece, byte_level])
def test_bytes_are_those_of_the_tokens(make: Any) -> None:
    tokenizer = make()
    text = "café 日本 😀 a"
    if make is sentencepiece:
        tokens = [ids(f"<0x{byte:02X}>")[0] for byte in text.encode()]
    else:
        tokens = tokenizer(text)["input_ids"]
    rows = ChatCompletion("m").choice(0, text, scored(tokenizer, tokens[-1:], tokens, 2), None)["logprobs"]["content"]
    assert bytes(byte for row in rows for byte in row["bytes"]) == text.encode()
    assert "".join(row["token"] for row in rows) == text
    assert any(row["token"] == "" for row in rows), "a part of a character has no text"


def test_special_tokens_have_names_and_no_place() -> None:
    tokenizer = sentencepiece()
    tokens = ids("▁a", "</s>", "▁of")
    columns = Completion("m").choice(0, "", scored(tokenizer, ids("s"), tokens, 1), None)["logprobs"]
    assert (columns["tokens"], columns["text_offset"]) == ([" a", "</s>", " of"], [0, 2, 2])
    kept = scored(tokenizer, ids("s"), tokens, 1, skip_special_tokens=False)
    columns = Completion("m").choice(0, "", kept, None)["logprobs"]
    assert columns["text_offset"] == [0, 2, 2 + len(columns["tokens"][1])]


def test_impossible_tokens_have_a_number() -> None:
    scored = Scored(AutoTokenizer.from_pretrained(MODEL))
    scored.add(65, LogProbability(-1.0, ((65, -1.0), (66, float("-inf")))))
    found = Completion("m").choice(0, "a", scored, "stop")
    assert list(found["logprobs"]["top_logprobs"][0].values()) == [-1.0, -9999.0]
    json.dumps(found, allow_nan=False)


def test_tokens_may_be_named_by_id() -> None:
    tokens = ids("▁a", "s")
    found = scored(sentencepiece(), ids("s"), tokens, 2, names_ids=True)
    columns = Completion("m").choice(0, "", found, None)["logprobs"]
    assert columns["tokens"] == [f"token_id:{token}" for token in tokens]
    assert list(columns["top_logprobs"][0]) == [f"token_id:{tokens[0]}", f"token_id:{tokens[0] + 1}"]
    assert columns["text_offset"] == [0, 2]


def test_a_prompt_s_first_token_has_no_probability() -> None:
    found = Scored(sentencepiece(), [])
    first, second = ids("▁a", "s")
    found.add(first, None)
    found.add(second, LogProbability(-1.0, ((second, -1.0),)))
    columns = Completion("m").choice(0, "as", found, None)["logprobs"]
    assert columns["token_logprobs"] == [None, -1.0]
    assert columns["top_logprobs"] == [None, {"s": -1.0}]
