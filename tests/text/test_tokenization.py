"""Texts and chats through the tokenizer's process: equal to transformers' own, and within time and memory."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from qcut.checkpoints.pretrained import load_pretrained
from qcut.errors import CheckpointError, ConfigError
from qcut.text import tokenization as bounded
from qcut.text.detokenizer import Detokenizer
from qcut.text.tokenization import chat_ids, chat_text, check_decoder, text_ids
from tests.support import ROOT

FOLDER = ROOT / "models" / "gpt2-5m"
CHAT = [{"role": "user", "content": "What is a list?"}, {"role": "assistant", "content": "An object 👍🏽."}]
LONG = ("a" * 21 + "c") * 1000 + "b"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ extra }}"


@pytest.fixture
def tokenizer() -> Any:
    found = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    found.chat_template = TEMPLATE
    return found


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that tests can wait for."""
    monkeypatch.setattr(bounded, "SECONDS", 1.0)
    monkeypatch.setattr(bounded, "BYTES", 256 << 20)


def splitting(pattern: str) -> Any:
    """A tokenizer of letters that splits by a regular expression."""
    vocabulary = {chr(i): i for i in range(32, 127)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_ids_are_those_of_transformers(tokenizer: Any) -> None:
    for text in ("", "The import statement", " two  spaces\n", "emoji 👍🏽", "<|endoftext|>", "\x00"):
        for special in (True, False):
            expected = tokenizer(text, add_special_tokens=special)["input_ids"]
            assert text_ids(tokenizer, text, special_tokens=special) == expected


def test_chats_are_those_of_transformers(tokenizer: Any) -> None:
    for options in ({}, {"add_generation_prompt": False}, {"extra": "!"}, {"continue_final_message": True}):
        asked = {"add_generation_prompt": "continue_final_message" not in options, **options}
        expected = tokenizer.apply_chat_template(CHAT, tokenize=False, **asked)
        assert chat_text(tokenizer, CHAT, **asked) == expected
        assert chat_ids(tokenizer, CHAT, **asked) == tokenizer(expected, add_special_tokens=False)["input_ids"]


def test_changed_tokenizers_are_sent_anew(tokenizer: Any) -> None:
    assert len(text_ids(tokenizer, "<new>")) > 1
    tokenizer.add_tokens(["<new>"])
    assert text_ids(tokenizer, "<new>") == [len(tokenizer) - 1]
    chat_text(tokenizer, CHAT)
    tokenizer.chat_template = "other"
    assert chat_text(tokenizer, CHAT) == "other"
    tokenizer.split_special_tokens = True
    assert text_ids(tokenizer, "<|endoftext|>") == tokenizer("<|endoftext|>")["input_ids"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}", "more than 1 s"),
        ("{{ 'ab' * 10 ** 10 }}", "more than 256 MiB of memory"),
        ("{{ 'x' | center(10 ** 10) }}", "more than 256 MiB of memory"),
        ("{{ '%9999999999d' | format(1) }}", "more than 256 MiB of memory"),
        ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "of memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ messages.__class__.__mro__[1] }}", "unsafe"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected"),
    ],
)
@pytest.mark.usefixtures("brief")
def test_templates_end_within_bounds(tokenizer: Any, template: str, message: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=message):
        chat_text(tokenizer, CHAT)
    assert text_ids(tokenizer, "next") == tokenizer("next")["input_ids"]


@pytest.mark.parametrize(
    ("pattern", "text", "message"),
    [
        (r"(a+)+b", "a" * 60 + "c", "retry-limit"),  # of one attempt
        (r"(a|a)*b", LONG, "more than 1.21 s"),  # of many attempts, each below that limit
    ],
)
@pytest.mark.usefixtures("brief")
def test_regular_expressions_end_within_bounds(pattern: str, text: str, message: str) -> None:
    one = splitting(pattern)
    assert text_ids(one, "cd") == one("cd")["input_ids"]
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=message):
        text_ids(one, text)
    assert time.monotonic() - begin < 20


@pytest.mark.usefixtures("brief")
def test_normalizers_end_within_bounds() -> None:
    one = splitting("x")
    one.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 1000)] * 4)
    with pytest.raises(ConfigError, match="more than"):
        text_ids(one, "a")


@pytest.mark.usefixtures("brief")
def test_others_are_served_beside_a_text_without_end(tokenizer: Any) -> None:
    hostile = splitting(r"(a|a)*b")
    text_ids(hostile, "c"), text_ids(tokenizer, "c")
    failed: list[str] = []

    def endless() -> None:
        try:
            text_ids(hostile, LONG)
        except ConfigError as error:
            failed.append(str(error))

    threads = [threading.Thread(target=endless) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert text_ids(tokenizer, "next") == tokenizer("next")["input_ids"]
    for thread in threads:
        thread.join()
    assert len(failed) == 2


def test_a_forked_child_has_processes_of_its_own(tokenizer: Any) -> None:
    expected = text_ids(tokenizer, "The import statement")
    if (child := os.fork()) == 0:
        os._exit(0 if text_ids(tokenizer, "The import statement") == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert text_ids(tokenizer, "The import statement") == expected


def test_the_callers_own_class_works_in_place() -> None:
    class Own(PreTrainedTokenizerFast):
        def __call__(self, text: str, **options: Any) -> Any:
            if text == "fails":
                raise ValueError("two\nlines")
            return {"input_ids": [len(text)]}

    own = Own(tokenizer_object=splitting("x").backend_tokenizer)
    assert text_ids(own, "four") == [4]
    with pytest.raises(ConfigError, match="two lines"):
        text_ids(own, "fails")


def test_arguments_of_the_tokenizer_are_refused(tokenizer: Any) -> None:
    for name in ("chat_template", "tokenize", "max_length"):
        with pytest.raises(ConfigError, match=f"'{name}' is no argument of a chat template"):
            chat_ids(tokenizer, CHAT, **{name: 1})
    for name in ("self", "messages"):
        with pytest.raises(ConfigError, match="multiple values"):
            chat_ids(tokenizer, CHAT, **{name: 1})
    assert chat_text(tokenizer, CHAT, tokenizer=1, chat=2, extra=3).endswith("3")


def test_decoders_without_a_bound_are_refused() -> None:
    one = splitting("x")
    for decoder, message in (
        (decoders.Replace(Regex("(a|a)*b"), ""), "replaces Regex"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b" * 100)]), "by 'bbb"),
    ):
        one.backend_tokenizer.decoder = decoder
        with pytest.raises(ConfigError, match=message):
            check_decoder(one)
    one.backend_tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    check_decoder(one)


def test_failures_of_a_decoder_are_qcuts_errors(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer)
    with pytest.raises(ConfigError, match="the tokenizer fails on 1 tokens"):
        detokenizer.decode([-1])


def test_loading_looks_at_the_decoder(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    one = splitting("x")
    one.backend_tokenizer.decoder = decoders.Replace(Regex("(a|a)*b"), "")
    one.save_pretrained(folder)
    with pytest.raises(CheckpointError, match="its tokenizer cannot be read: the tokenizer's decoder replaces"):
        load_pretrained(str(folder), dtype=torch.float32, device=torch.device("cpu"))
