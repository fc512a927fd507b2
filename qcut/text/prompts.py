"""Turns prompts that are text or chats into token ids, by a tokenizer of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

from qcut.errors import ConfigError, DtypeError, ShapeError
from qcut.text import tokenization as bounded

Message = Mapping[str, Any]
"""``{"role": …, "content": …}``."""
Chat = Sequence[Message]

_KINDS = "one kind in a call: strings, chats, or lists of token ids"
_CHATS = 'a chat is a list of messages {"role": …, "content": …}'


def check_tokenizer(tokenizer: Any) -> None:
    """Check what is given as tokenizer.

    Raises:
        ConfigError: no tokenizer of transformers, or one with a decoder that may take any time; see
            `qcut.text.tokenization.check_decoder`.
    """
    if not callable(tokenizer) or not hasattr(tokenizer, "decode"):
        raise ConfigError(f"tokenizer is a {type(tokenizer).__name__}; allowed: a tokenizer of transformers, or None")
    bounded.check_decoder(tokenizer)


def as_ids(prompts: Any, tokenizer: Any, vocabulary: int) -> Any:
    """Prompts as `qcut.engine.token_ids.prompt_ids` takes them: text and chats become token ids, all else passes.

    Args:
        prompts: a string, a chat, or any number of strings, chats or lists of token ids.
        tokenizer: a tokenizer of transformers; None lets strings through, which `prompt_ids` then refuses.
        vocabulary: number of tokens that the model knows.

    Raises:
        DtypeError: kinds that are mixed, a message by itself, or a chat without a tokenizer.
        ShapeError: an empty text or chat.
        ConfigError: text that the tokenizer does not take, a message without role or content, a tokenizer without a
            template for chats or with one that refuses the chat, or a token that the model does not know.
    """
    if isinstance(prompts, str):
        return prompts if tokenizer is None else [text_ids(tokenizer, prompts, vocabulary)]
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
        return [text_ids(tokenizer, row, vocabulary, i) for i, row in enumerate(rows)]
    chats = [rows] if kinds[0] == "message" else rows
    return [chat_ids(tokenizer, chat, vocabulary, i) for i, chat in enumerate(chats)]


_NAMES = {"text": "text", "message": "a message", "chat": "a chat", "ids": "neither text nor a chat"}


def _kind(row: Any) -> str:
    if isinstance(row, str):
        return "text"
    if isinstance(row, Mapping):
        return "message"
    return "chat" if isinstance(row, list | tuple) and row and isinstance(row[0], Mapping) else "ids"


def text_ids(
    tokenizer: Any, text: str, vocabulary: int, index: int = 0, *, add_special_tokens: bool = True
) -> list[int]:
    """The token ids of a text.

    Args:
        tokenizer: a tokenizer of transformers.
        text: of one character and more.
        vocabulary: number of tokens that the model knows.
        index: of the prompt, for messages.
        add_special_tokens: whether the tokenizer adds tokens of its own, as that of a beginning.

    Raises:
        ShapeError, ConfigError: as `as_ids`.
    """
    if not text:
        raise ShapeError(f"prompt {index} is an empty string; allowed: text of 1 character and more")
    try:
        text.encode()  # half of a surrogate pair is no text
        found = bounded.text_ids(tokenizer, text, special_tokens=add_special_tokens)
    except (UnicodeError, ConfigError) as error:
        raise ConfigError(f"prompt {index} is no text that the tokenizer takes: {error}") from error
    return _checked(found, tokenizer, index, vocabulary)


def chat_ids(
    tokenizer: Any,
    chat: Chat,
    vocabulary: int,
    index: int = 0,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """The token ids of a chat by the tokenizer's template.

    Args:
        tokenizer: a tokenizer of transformers.
        chat: messages.
        vocabulary: number of tokens that the model knows.
        index: of the prompt, for messages.
        add_generation_prompt: whether the beginning of an answer follows the messages.
        continue_final_message: whether the last message goes on.
        add_special_tokens: whether the tokenizer adds its tokens to those of the template.
        variables: of the template, besides the messages.
        tools: functions that the model may call, in the form of transformers.

    Raises:
        DtypeError, ShapeError, ConfigError: as `as_ids`; ConfigError, also: a variable that is an argument of
            ``apply_chat_template``.
    """
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
    given = dict(variables or {})
    for name in signature(tokenizer.apply_chat_template).parameters:
        if name in given:
            found = f"variable {name[:40]!r} of the chat template"
            raise ConfigError(f"{found}; allowed: no argument of its tokenizer", "chat_template_kwargs")
    try:
        given |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        given |= {"tools": list(tools)} if tools else {}
        if add_special_tokens:
            ids = bounded.text_ids(tokenizer, bounded.chat_text(tokenizer, chat, **given))
        else:
            ids = bounded.chat_ids(tokenizer, chat, **given)
    except ConfigError as error:
        raise ConfigError(f"prompt {index}: the tokenizer's chat template refuses it: {error}") from error
    return _checked(ids, tokenizer, index, vocabulary)


def _checked(found: Any, tokenizer: Any, index: int, vocabulary: int) -> list[int]:
    ids = list(found)
    if not ids:
        raise ShapeError(f"prompt {index} has no tokens by the tokenizer; allowed: 1 token and more")
    if max(ids) >= vocabulary:
        raise ConfigError(
            f"prompt {index}: the tokenizer gives token id {max(ids)}; allowed: 0 to {vocabulary - 1}, what the model "
            "knows. Is the tokenizer the model's?"
        )
    return ids
