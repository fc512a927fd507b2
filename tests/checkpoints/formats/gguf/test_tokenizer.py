"""Tokenizers that GGUF files describe: the tokens of the models' own, in `load_pretrained` and in the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from qcut.checkpoints.pretrained import load_pretrained
from qcut.errors import CheckpointError, QcutError, UnsupportedError
from qcut.text.tokenization import chat_ids
from tests.checkpoints.formats.gguf.written import write
from tests.cli.commands import DEMO, answer, on_cpu, run

pytestmark = pytest.mark.filterwarnings("ignore::qcut.errors.QuantizationWarning")
PATH = "model.gguf"
TEXTS = (
    "",
    " ",
    "   deep\n\n\tindent\r\n ",
    "Hello world! It's 1234567 ½ of 3.14, isn't it?",
    "naïve Việt 日本語 🙂‍↔️ e\u0301",
    "def f(x):\n    return x ** 2  # CamelCase HTTPServer/path",
)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_STORED = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))["model"]
GPT2: dict[str, tuple[str, Any]] = {
    "ggml.model": ("string", "gpt2"),
    "ggml.pre": ("string", "gpt-2"),
    "ggml.tokens": ("array", list(_STORED["vocab"])),
    "ggml.token_type": ("array", [3, *[1] * (len(_STORED["vocab"]) - 1)]),
    "ggml.merges": ("array", [" ".join(merge) for merge in _STORED["merges"]]),
    "ggml.bos_token_id": ("uint32", 0),
    "ggml.eos_token_id": ("uint32", 0),
    "chat_template": ("string", TEMPLATE),
}
"""That of the embedded model."""
_PIECES = ["▁", *"abcd", "▁a", "ab", "abc", "cd", "▁▁", "▁ab", "bcd"]
LLAMA: dict[str, tuple[str, Any]] = {
    "ggml.model": ("string", "llama"),
    "ggml.pre": ("string", "default"),
    "ggml.tokens": ("array", ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *_PIECES, "[IN]"]),
    "ggml.scores": ("array", [0.0] * 259 + [-1e9] * 5 + [-float(i) for i in range(7)] + [-1000.0]),
    "ggml.token_type": ("array", [2, 3, 3, *[6] * 256, *[1] * len(_PIECES), 4]),
    "ggml.bos_token_id": ("uint32", 1),
    "ggml.eos_token_id": ("uint32", 2),
    "ggml.unknown_token_id": ("uint32", 0),
}
"""Merges by scores, as of SentencePiece; the bytes of all other characters."""


def of(name: str, offset: int = 259) -> int:
    return offset + _PIECES.index(name)


def read(path: Path, entries: dict[str, tuple[str, Any]], **changes: tuple[str, Any] | None) -> Any:
    """The tokenizer of a file with these entries; a change of None leaves an entry out."""
    named = {key.replace("__", "."): value for key, value in changes.items()}
    made = {key: value for key, value in {**entries, **named}.items() if value is not None}
    write(path / PATH, "gpt2", tokenizer=made, vocab_size=max(48, len(entries["ggml.tokens"][1])))
    return load_pretrained(str(path), dtype=torch.float32, device=torch.device("cpu"))[1]


def test_tokens_are_those_of_the_model(tmp_path: Path) -> None:
    found, expected = read(tmp_path, GPT2), AutoTokenizer.from_pretrained(DEMO)
    for text in (*TEXTS, "<|endoftext|>a<|endoftext|>"):
        assert found(text)["input_ids"] == expected(text)["input_ids"], text
        assert found.decode(found(text)["input_ids"]) == text
    assert (found.bos_token_id, found.eos_token_id, len(found)) == (0, 0, len(expected))
    chat = [{"role": "user", "content": "Hi"}]
    assert chat_ids(found, chat) == expected("<|endoftext|>user: Hi\n")["input_ids"]


@pytest.mark.parametrize("pre", ["qwen2", "gpt-4o", "dbrx", "llama-bpe", "tekken"])
def test_words_are_cut_as_transformers_does(tmp_path: Path, pre: str) -> None:
    pytest.importorskip("transformers.integrations.gguf", reason="older versions cut words of all kinds alike")
    found = read(tmp_path, GPT2, ggml__pre=("string", pre))
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file=PATH)
    for text in TEXTS:
        cut = found.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert cut == expected.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text), text


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", "Ġ2026", ",", "Ġ½", "?", "Ċ", "Ċ", "x"]),
        ("starcoder", ["It", "'s", "Ġ", "2", "0", "2", "6", ",", "Ġ", "½", "?", "Ċ", "Ċ", "x"]),
        ("llama-bpe", ["It", "'s", "Ġ", "202", "6", ",", "Ġ", "½", "?ĊĊ", "x"]),
        ("qwen2", ["It", "'s", "Ġ", "2", "0", "2", "6", ",", "Ġ", "½", "?ĊĊ", "x"]),
        ("gpt-4o", ["It's", "Ġ", "202", "6", ",", "Ġ", "½", "?ĊĊ", "x"]),
        ("deepseek-coder", ["It", "'", "s", "Ġ", "2", "0", "2", "6", ",", "Ġ", "½", "?", "Ċ", "Ċ", "x"]),
    ],
)
def test_numbers_and_lines_are_cut(tmp_path: Path, pre: str, words: list[str]) -> None:
    found = read(tmp_path, GPT2, ggml__pre=("string", pre))
    cut = found.backend_tokenizer.pre_tokenizer.pre_tokenize_str("It's 2026, ½?\n\nx")
    assert [word.replace("Â½", "½") for word, _ in cut] == words


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "olmo"])
def test_characters_are_composed_as_models_do(tmp_path: Path, pre: str) -> None:
    found = read(tmp_path, GPT2, ggml__pre=("string", pre))
    assert (found("e\u0301")["input_ids"] == found("é")["input_ids"]) == (pre != "gpt-2")


def test_tokens_are_merged_by_score(tmp_path: Path) -> None:
    found = read(tmp_path, LLAMA)
    assert found("ab")["input_ids"] == [1, of("▁ab")]
    assert found("abcd")["input_ids"] == [1, of("▁ab"), of("cd")]  # "bcd" has the lowest score
    assert found(" a\n")["input_ids"] == [1, of("▁"), of("▁a"), 3 + 10]
    assert found("a[IN]é</s>")["input_ids"] == [1, of("▁a"), 259 + 12, of("▁"), 3 + 0xC3, 3 + 0xA9, 2]
    assert found.decode(found("  abé\n", add_special_tokens=False)["input_ids"]) == "  abé\n"
    found = read(tmp_path, LLAMA, ggml__add_space_prefix=("bool", False))
    assert found("ab")["input_ids"] == [1, of("ab")]
    assert found.decode([of("▁a")]) == " a"


def test_spaces_behind_control_tokens_of_phi3(tmp_path: Path) -> None:
    tokens = [*LLAMA["ggml.tokens"][1], "<|end|>"]
    entries: dict[str, tuple[str, Any]] = {
        **LLAMA,
        "ggml.tokens": ("array", tokens),
        "ggml.scores": ("array", [*LLAMA["ggml.scores"][1], 0.0]),
        "ggml.token_type": ("array", [*LLAMA["ggml.token_type"][1], 3]),
    }
    for family, spaces in (("phi3", []), ("llama", [of("▁"), 3 + 10])):
        write(tmp_path / PATH, family, tokenizer=entries, vocab_size=len(tokens))
        _, found = load_pretrained(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
        assert found("<|end|>\n<s>")["input_ids"] == [1, len(tokens) - 1, *spaces, 1]


@pytest.mark.parametrize(
    ("entries", "changes", "begins", "ends"),
    [
        (GPT2, {}, False, False),
        (GPT2, {"ggml__pre": ("string", "llama-bpe")}, True, False),
        (GPT2, {"ggml__pre": ("string", "tekken"), "ggml__add_bos_token": ("bool", False)}, False, False),
        (GPT2, {"ggml__add_bos_token": ("bool", True), "ggml__add_eos_token": ("bool", True)}, True, True),
        (LLAMA, {}, True, False),
        (LLAMA, {"ggml__add_bos_token": ("bool", False)}, False, False),
    ],
)
def test_tokens_around_a_text(
    tmp_path: Path, entries: dict[str, Any], changes: dict[str, Any], begins: bool, ends: bool
) -> None:
    found = read(tmp_path, entries, **changes)
    inner = found("a", add_special_tokens=False)["input_ids"]
    bos, eos = [found.bos_token_id] * begins, [found.eos_token_id] * ends
    assert found("a")["input_ids"] == [*bos, *inner, *eos]


def test_control_tokens_keep_their_ids(tmp_path: Path) -> None:
    tokens = GPT2["ggml.tokens"][1]
    tokens = [*tokens[1:-2], "<｜begin▁of｜>", "  "]  # outside of the alphabet of bytes
    types = ("array", [*[1] * (len(tokens) - 2), 3, 4])
    merges = [merge for merge in GPT2["ggml.merges"][1] if merge.replace(" ", "") in set(tokens)]
    bos = ("uint32", len(tokens) - 2)
    changed = {**GPT2, "ggml.tokens": ("array", tokens), "ggml.token_type": types, "ggml.merges": ("array", merges)}
    found = read(tmp_path, changed, ggml__bos_token_id=bos, ggml__eos_token_id=bos)
    ids = found("<｜begin▁of｜>a  b<|endoftext|>")["input_ids"]
    assert ids[:1] == [bos[1]]
    assert len(tokens) - 1 in ids
    assert max(ids) < len(found) == len(tokens)


WRONG: dict[str, tuple[dict[str, tuple[str, Any]], dict[str, Any], str]] = {
    "another kind": (
        GPT2,
        {"ggml__model": ("string", "t5")},
        r"ggml\.model is 't5' and tokenizer\.ggml\.pre 'gpt-2'; allowed for ggml\.model: 'gpt2', 'llama', or",
    ),
    "another cut": (GPT2, {"ggml__pre": ("string", "bloom")}, r"ggml\.pre 'bloom'; allowed for ggml\.pre: gpt-2, "),
    "no cut": (GPT2, {"ggml__pre": None}, r"tokenizer\.ggml\.pre ''; allowed"),
    "no tokens": (GPT2, {"ggml__tokens": None}, r"ggml\.tokens: found None; allowed: a list of str"),
    "tokens that are numbers": (GPT2, {"ggml__tokens": ("array", [1, 2])}, r"ggml\.tokens: found a list of 2"),
    "more tokens than the model": (
        GPT2,
        {"ggml__tokens": ("array", [f"t{i}" for i in range(9000)])},
        r"found 9000 tokens; allowed: at most 8192, those of token_embd",
    ),
    "a token twice": (GPT2, {"ggml__tokens": ("array", ["a", "b", "a"])}, r"found 'a' twice; allowed: different"),
    "a long token": (GPT2, {"ggml__tokens": ("array", ["a" * 2000])}, r"found one of 2000 characters; .* 1024"),
    "fewer types": (GPT2, {"ggml__token_type": ("array", [1, 1])}, r"token_type: found 2 values; allowed: 8192, one"),
    "a merge of nothing": (
        GPT2,
        {"ggml__merges": ("array", ["a zzzz"])},
        r"ggml\.merges: found 'a zzzz'; allowed: two",
    ),
    "no merges": (GPT2, {"ggml__merges": None}, r"ggml\.merges: found None; allowed: a list of str"),
    "no scores": (LLAMA, {"ggml__scores": None}, r"ggml\.scores: found None; allowed: a list of float"),
    "scores of NaN": (LLAMA, {"ggml__scores": ("array", [float("nan")] * 272)}, r"ggml\.scores: found NaN or Inf"),
    "another id": (GPT2, {"ggml__eos_token_id": ("int32", 9000)}, r"eos_token_id: found 9000; allowed: 0 to 8191"),
    "no first token": (LLAMA, {"ggml__bos_token_id": None}, r"bos_token_id: found None; allowed: a token, since texts"),
    "a flag that is a number": (GPT2, {"ggml__add_bos_token": ("uint32", 1)}, r"add_bos_token: found 1; .* a bool"),
    "a long template": (GPT2, {"chat_template": ("string", "a" * (1 << 21))}, r"found 2097152 characters; allowed: up"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_entries_are_refused(tmp_path: Path, case: str) -> None:
    entries, changes, message = WRONG[case]
    with pytest.raises(QcutError, match=message) as caught:
        read(tmp_path, entries, **changes)
    assert str(tmp_path / PATH) in str(caught.value)
    assert isinstance(caught.value, UnsupportedError if "cut" in case or "kind" in case else CheckpointError)


def test_own_files_come_before_metadata(tmp_path: Path) -> None:
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(tmp_path)
    found = read(tmp_path, GPT2, ggml__pre=("string", "bloom"))
    assert found("Hello")["input_ids"] == AutoTokenizer.from_pretrained(DEMO)("Hello")["input_ids"]


@pytest.mark.parametrize("named", ["folder", "file"])
def test_commands_read_a_bare_file(tmp_path: Path, capfd: pytest.CaptureFixture[str], named: str) -> None:
    model, out, text = tmp_path / "in", tmp_path / "out", tmp_path / "text.txt"
    model.mkdir()
    write(model / PATH, "gpt2", tokenizer=GPT2, vocab_size=len(_STORED["vocab"]))
    model = model / PATH if named == "file" else model
    text.write_text("A text of words. " * 40)
    status, _, err = on_cpu(capfd, "generate", model, "--prompt", "Hello", "--steps", 4, "--dtype", "float32")
    assert status == 0, err
    found = answer(capfd, "eval", model, "--text", text, "--window", 32, "--max-windows", 1, "--device", "cpu")
    assert found["perplexity"] > 1
    answer(capfd, "quantize", model, "--scheme", "int4_g32", "--out", out)
    saved, own = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(DEMO)
    assert all(saved(text)["input_ids"] == own(text)["input_ids"] for text in TEXTS)
    assert saved.chat_template == TEMPLATE
    assert on_cpu(capfd, "generate", out, "--prompt", "Hello", "--steps", 4)[0] == 0
    status, _, err = run(capfd, "generate", tmp_path / "none.gguf", "--prompt", "Hello")
    assert status != 0
    assert "none.gguf: not a directory, and no GGUF file" in err
