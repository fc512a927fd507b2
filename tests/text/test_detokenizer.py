"""Pieces of text against tokenizers' own decoding of whole texts, for every cut of a text into prompt and answer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from qcut.text.detokenizer import Detokenizer, IncrementalDetokenizer, _final
from qcut.text.sequence_text import SequenceText
from tests.support import ROOT

TEXTS = (
    "The import statement, isn't it? It 's  one .\n\n    def f(x):\n\treturn 'x'\n",
    "emoji 👩\u200d👩\u200d👧 🇩🇪 👍🏽 end",
    "e\u0301 a\u0308o\u0302 นี่คือ ก็ Zürich",
    "漢字かな交じり文。 한국어 と English",
    " leading and trailing ",
    "x",
)


def wrapped(tokenizer: Tokenizer, **options: Any) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", **options)


def byte_level() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=alphabet, special_tokens=["<unk>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return wrapped(tokenizer)


def unigram(**options: Any) -> Any:
    """As T5's: a metaspace before words, no bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return wrapped(tokenizer, **options)


def sentencepiece() -> Any:
    """As Llama 2's: bytes for what the vocabulary lacks, and one space taken from the beginning."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abdefhimnorstx", "▁t", "▁th"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "t"), ("▁t", "h")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return wrapped(tokenizer)


def word_piece() -> Any:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return wrapped(tokenizer, clean_up_tokenization_spaces=True)


TOKENIZERS = {
    "gpt2-5m": lambda: AutoTokenizer.from_pretrained(ROOT / "models" / "gpt2-5m", local_files_only=True),
    "byte_level": byte_level,
    "unigram": unigram,
    "unigram_cleaned": lambda: unigram(clean_up_tokenization_spaces=True),
    "sentencepiece": sentencepiece,
    "word_piece_cleaned": word_piece,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


def decoded(tokenizer: Any, prompt: list[int], new: list[int]) -> str:
    """The tokenizer's own text of new tokens after a prompt."""
    before, text = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + new))
    common = 0
    while common < min(len(before), len(text)) and before[common] == text[common]:
        common += 1
    return text[common:]


def pieces_of(tokenizer: Any, prompt: list[int], new: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    pieces = detokenizer.incremental(prompt)
    return [*(pieces.add(token) for token in new if not detokenizer.skips(token)), pieces.rest()]


def ends_whole(tokenizer: Any, ids: list[int]) -> bool:
    return "\ufffd" not in tokenizer.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_incremental_text_equals_decoding_all_tokens(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    fallback = any(token.startswith("<0x") for token in tokenizer.get_vocab())
    checked = 0
    for start in range(len(ids)):
        for end in range(start, len(ids) + 1):
            prompt, new = ids[:start], ids[start:end]
            if fallback and not (ends_whole(tokenizer, prompt) and ends_whole(tokenizer, prompt + new)):
                continue  # the decoder takes back characters of such a run: see below
            assert "".join(pieces_of(tokenizer, prompt, new)) == decoded(tokenizer, prompt, new)
            checked += 1
    assert checked >= len(ids)


def test_special_tokens_between_tokens_change_nothing(tokenizer: Any) -> None:
    ids = tokenizer("a text 👍🏽 of some words", add_special_tokens=False)["input_ids"]
    mixed = [token for one in ids for token in (one, tokenizer.eos_token_id)]
    assert "".join(pieces_of(tokenizer, [], mixed)) == decoded(tokenizer, [], ids)


def test_kept_special_tokens_are_text(tokenizer: Any) -> None:
    detokenizer, end, name = Detokenizer(tokenizer), tokenizer.eos_token_id, tokenizer.eos_token
    ids = tokenizer("a text 👍🏽 of some words", add_special_tokens=False)["input_ids"]

    def text(kept: list[str], may_stop: bool = True) -> str:
        found = SequenceText(detokenizer, [], [f"none{name}"], kept)
        return "".join(found.add(token, may_stop) for token in [*ids, end, *ids]) + found.rest()

    for may_stop in (True, False):
        before, marker, after = text(["<tool>", name], may_stop).partition(name)
        assert (marker, before + after) == (name, text([], may_stop))
    stop = detokenizer.decode(ids)[-1] + name
    stopping = SequenceText(detokenizer, [], [stop], [name])
    given = "".join(stopping.add(token) for token in [*ids, end])
    assert (stopping.stopped, name in given) == (True, False)


@pytest.mark.parametrize("tokenizer", [name for name in TOKENIZERS if name != "sentencepiece"], indirect=True)
def test_random_tokens_are_the_text(tokenizer: Any) -> None:
    """Bytes that are no characters included, in runs that a model without training may write."""
    draw = random.Random(0)
    count = min(len(tokenizer), 300)
    for _ in range(30):
        ids = [draw.randrange(count) for _ in range(draw.randrange(1, 40))]
        start = draw.randrange(len(ids))
        assert "".join(pieces_of(tokenizer, ids[:start], ids[start:])) == decoded(tokenizer, ids[:start], ids[start:])


def test_complete_characters_of_a_run_of_bytes_stay() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer("é漢", add_special_tokens=False)["input_ids"]
    assert len(ids) == 6  # a space, and bytes
    *given, rest = pieces_of(tokenizer, ids[:1], ids[1:-1])
    assert given == ["", "é", "", ""]
    assert set(rest) == {"\ufffd"}
    assert pieces_of(tokenizer, ids[:1], ids[1:]) == ["", "é", "", "", "漢", ""]


def test_characters_of_several_tokens_come_whole() -> None:
    raw = {0: b"a", 1: "ü".encode()[:1], 2: "ü".encode()[1:], 3: b" b"}

    def decode(ids: list[int]) -> str:
        return b"".join(raw[i] for i in ids).decode("utf-8", "replace")

    pieces = IncrementalDetokenizer(decode, [0])
    assert [pieces.add(token) for token in (1, 2, 3, 1)] == ["", "ü", " b", ""]
    assert pieces.rest() == "\ufffd"


@pytest.mark.parametrize("kind", [b"word ", "👍".encode(), b"\x80", b"\xf0\x9f", b""], ids=str)
def test_the_work_for_a_token_does_not_grow(kind: bytes) -> None:
    decoded = 0

    def decode(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return b"".join(kind[i % len(kind) :][:1] if kind else b"" for i in ids).decode("utf-8", "replace")

    pieces = IncrementalDetokenizer(decode, [])
    for token in range(4000):
        pieces.add(token)
    assert decoded < 4000 * 60


def test_what_cleaning_leaves_alone_is_final() -> None:
    """Over all texts of the characters that cleaning looks at, cleaning of both parts is cleaning of the whole."""
    clean = word_piece().clean_up_tokenization
    draw, cut = random.Random(1), 0
    for _ in range(20000):
        text = "".join(draw.choices(" 'nt.sxve", weights=(6, 4, 2, 2, 1, 1, 3, 1, 1), k=draw.randrange(1, 14)))
        for size in range(1, len(text)):
            end = _final(text[:size])
            cut += end > 0
            assert clean(text[:end]) + clean(text[end:]) == clean(text), (text, size)
    assert cut > 10000


@pytest.mark.parametrize("make", [byte_level, unigram, sentencepiece])
@pytest.mark.parametrize("cleans", [False, True])
def test_what_decodes_beneath_transformers_decodes_the_same(make: Any, cleans: bool) -> None:
    tokenizer = make()
    tokenizer.clean_up_tokenization_spaces = cleans
    found = Detokenizer(tokenizer)
    spaced = tokenizer("a , b", add_special_tokens=False)["input_ids"]
    cleaned = tokenizer.decode(spaced) != tokenizer.backend_tokenizer.decode(spaced, skip_special_tokens=False)
    assert (found._direct is None) == cleaned
    assert cleaned == cleans if make is unigram else cleans or not cleaned
    for text in TEXTS:
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id, 5, 7]
        for end in range(1, len(ids)):
            assert found.decode(ids[:end]) == tokenizer.decode(ids[:end], skip_special_tokens=True)


def test_a_tokenizer_of_its_own_decodes_by_itself() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **options: Any) -> str:
            return super()._decode(*args, **options).upper()

    tokenizer = Shouting(tokenizer_object=byte_level().backend_tokenizer, eos_token="</s>", unk_token="<unk>")
    assert Detokenizer(tokenizer).decode(tokenizer("abc")["input_ids"]) == "ABC"
