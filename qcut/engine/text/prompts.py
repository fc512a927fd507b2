"""Turns prompts that are text or chats into token ids, by a tokenizer of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qcut.engine.failures import is_interrupt
from qcut.errors import ConfigError, DtypeError, QcutError, ShapeError

Message = Mapping[str, Any]
"""``{"role": …, "content": …}``."""
Chat = Sequence[Message]

_KINDS = "one kind in a call: strings, chats, or lists of token ids"
_CHATS = 'a chat is a list of messages {"role": …, "content": …}'


def check_tokenizer(tokenizer: Any) -> None:
    """Check what is given as tokenizer.

    Raises:
        ConfigError: no tokenizer of transformers.
    """
    if not callable(tokenizer) or not hasattr(tokenizer, "decode"):
        raise ConfigError(f"tokenizer is a {type(tokenizer).__name__}; allowed: a tokenizer of transformers, or None")


def as_ids(prompts: Any, tokenizer: Any, vocabulary: int) -> Any:
    """Prompts as `qcut.engine.arguments.prompt_rows` takes them: text and chats become token ids, all else passes.

    Args:
        prompts: a string, a chat, or any number of strings, chats or rows of token ids.
        tokenizer: a tokenizer of transformers; None lets strings through, which `prompt_rows` then refuses.
        vocabulary: number of tokens that the model knows.

    Raises:
        DtypeError: kinds that are mixed, a message by itself, or a chat without a tokenizer.
        ShapeError: an empty text or chat.
        ConfigError: text that the tokenizer does not take, a message without role or content, a tokenizer without a
            template for chats or whose template refuses a chat, or a token that the model does not know.
    """
    if isinstance(prompts, str):
        return prompts if tokenizer is None else [_text_ids(tokenizer, prompts, 0, vocabulary)]
    if isinstance(prompts, Mapping) and "role" in prompts:
        raise DtypeError(f"prompts are one message; allowed: a list, where {_CHATS}")
    if isinstance(prompts, Mapping | bytes) or hasattr(prompts, "__array__") or not isinstance(prompts, Iterable):
        return prompts
    rows = list(prompts)
    kinds = [_kind(row) for row in rows]
    if set(kinds) <= {"ids"} or (tokenizer is None and "text" in kinds):
        return rows
    for i, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise DtypeError(f"prompt 0 is {_NAMES[kinds[0]]}, prompt {i} {_NAMES[kind]}; allowed: {_KINDS}")
    if tokenizer is None:
        raise DtypeError("prompts are a chat, and the engine has no tokenizer; allowed: Engine(model, tokenizer=…)")
    if kinds[0] == "text":
        return [_text_ids(tokenizer, row, i, vocabulary) for i, row in enumerate(rows)]
    chats = [rows] if kinds[0] == "message" else rows
    return [_chat_ids(tokenizer, chat, i, vocabulary) for i, chat in enumerate(chats)]


_NAMES = {"text": "text", "message": "a message", "chat": "a chat", "ids": "neither text nor a chat"}


def _kind(row: Any) -> str:
    if isinstance(row, str):
        return "text"
    if isinstance(row, Mapping):
        return "message"
    return "chat" if isinstance(row, list | tuple) and row and isinstance(row[0], Mapping) else "ids"


def _text_ids(tokenizer: Any, text: str, index: int, vocabulary: int) -> list[int]:
    if not text:
        raise ShapeError(f"prompt {index} is an empty string; allowed: text of 1 character and more")
    try:
        text.encode()  # half of a surrogate pair is no text
        found = tokenizer(text, verbose=False)["input_ids"]
    except BaseException as error:  # of whatever kinds tokenizers raise; a panic in Rust is no Exception
        if is_interrupt(error):
            raise
        raise ConfigError(f"prompt {index} is no text that the tokenizer takes: {_line(error)}") from error
    return _checked(found, tokenizer, index, vocabulary)


def _chat_ids(tokenizer: Any, chat: Chat, index: int, vocabulary: int) -> list[int]:
    for j, message in enumerate(chat):
        if not isinstance(message, Mapping):
            raise DtypeError(f"prompt {index}: message {j} is a {type(message).__name__}; allowed: {_CHATS}")
        for key in ("role", "content"):
            if key not in message:
                raise ConfigError(f"prompt {index}: message {j} has no {key!r}; allowed: {_CHATS}")
        if not isinstance(message["role"], str) or not isinstance(message["content"], str | list | tuple):
            found = f"{message['role']!r:.40} and {message['content']!r:.40}"
            raise ConfigError(f"prompt {index}: message {j} has role and content {found}; allowed: strings")
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("prompts are a chat, and the tokenizer has no chat template; allowed: text or token ids")
    try:
        found = tokenizer.apply_chat_template(
            [dict(message) for message in chat], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except QcutError:
        raise
    except BaseException as error:  # of jinja2, of a tokenizer, or whatever a template raises
        if is_interrupt(error):
            raise
        raise ConfigError(f"prompt {index}: the tokenizer's chat template refuses it: {_line(error)}") from error
    return _checked(found, tokenizer, index, vocabulary)


def _checked(found: Any, tokenizer: Any, index: int, vocabulary: int) -> list[int]:
    ids = [int(token) for token in found]
    if not ids:
        raise ShapeError(f"prompt {index} has no tokens by the tokenizer; allowed: 1 token and more")
    if max(ids) >= vocabulary:
        raise ConfigError(
            f"prompt {index}: the tokenizer gives token id {max(ids)}; allowed: 0 to {vocabulary - 1}, what the model "
            "knows. Is the tokenizer the model's?"
        )
    return ids


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
