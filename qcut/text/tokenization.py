"""Texts and chats turned into token ids, within limits of time and memory.

A chat template and the regular expressions of a tokenizer come with a model's files, and can run for ever, or ask for
any memory, on a short text. Neither can be stopped in a thread. Tokenizers of transformers therefore work in processes
of their own (`qcut.text.tokenizer_process`), which end at the limits and are started anew. A tokenizer of a class
outside transformers is the caller's own code, and works in the caller's process.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from qcut.common.failures import is_interrupt, line_of
from qcut.common.locks import Lock
from qcut.errors import ConfigError
from qcut.text import tokenizer_process
from qcut.text.tokenizer_process import LENGTH

SECONDS, SECONDS_PER_BYTE = 5.0, 10 / (1 << 20)
"""CPU time that a text may take, and more for each of its bytes."""
BYTES, BYTES_PER_BYTE = 1 << 30, 256
"""Memory that a text may take, and more for each of its bytes."""
PROCESSES = 4
"""Most processes at a time, for all tokenizers."""
_LOAD_S, _WAIT_S = 120.0, 60.0
_MOST_ANSWER = 1 << 26
_MOST_TOKENIZERS, _MOST_REPLACED = 8, 64
_ARGUMENTS = (
    "chat_template",
    "conversation",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
)
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from qcut.text.tokenizer_process import main; main()"


def text_ids(tokenizer: Any, text: str, *, special_tokens: bool = True) -> list[int]:
    """Token ids of a text.

    Args:
        tokenizer: of transformers.
        text: any.
        special_tokens: add those that the tokenizer puts around a text.

    Raises:
        ConfigError: the tokenizer does not take the text, or takes more time or memory for it than is allowed.

    Exactness: those of ``tokenizer(text)``.
    """
    ids = _done(tokenizer, "text", text, {"special_tokens": special_tokens}, len(text.encode("utf-8", "replace")))
    assert not isinstance(ids, str)
    return list(ids)


def chat_ids(tokenizer: Any, chat: Sequence[Mapping[str, Any]], /, **template: Any) -> list[int]:
    """Token ids of a chat, by the tokenizer's chat template.

    Args:
        tokenizer: of transformers, with a template.
        chat: messages, plain data.
        **template: what the template is given: ``add_generation_prompt``, True unless given, and others.

    Raises:
        ConfigError: the template refuses the chat or takes more time or memory for it than is allowed, or an argument
            is none of a template.

    Exactness: those of ``tokenizer.apply_chat_template(chat)``.
    """
    ids = _chat(tokenizer, chat, True, template)
    assert not isinstance(ids, str)
    return list(ids)


def chat_text(tokenizer: Any, chat: Sequence[Mapping[str, Any]], /, **template: Any) -> str:
    """The text of a chat, by the tokenizer's chat template; see `chat_ids`."""
    return str(_chat(tokenizer, chat, False, template))


def _chat(tokenizer: Any, chat: Sequence[Mapping[str, Any]], tokenize: bool, template: dict[str, Any]) -> Any:
    for name in _ARGUMENTS:
        if name in template:
            raise ConfigError(f"{name!r} is no argument of a chat template; allowed: those that the template names")
    given = [dict(message) for message in chat]
    size = sum(len(str(value)) for each in (*given, template) for value in each.values())
    options = {"add_generation_prompt": True, **template, "tokenize": tokenize}
    return _done(tokenizer, "chat", given, options, size)


def check_decoder(tokenizer: Any) -> None:
    """Check what turns tokens into text, which is done for each new token, in the process of the engine.

    Raises:
        ConfigError: it has a regular expression, or puts long texts in the place of short ones.
    """
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    steps = [] if decoder is None else [json.loads(decoder.__getstate__())]
    while steps:
        step = steps.pop()
        steps += step.get("decoders", [])
        if step.get("type") == "Replace":
            (kind, pattern), content = next(iter(step["pattern"].items())), step["content"]
            if kind != "String" or not pattern or len(content) > _MOST_REPLACED:
                found = f"{kind} {pattern[:40]!r} by {content[:40]!r}"
                raise ConfigError(
                    f"the tokenizer's decoder replaces {found}; allowed: a string by up to {_MOST_REPLACED} characters"
                )


def start_process() -> None:
    """Start a process, if there is none, so that the first text does not wait for it. Returns at once."""
    with contextlib.suppress(ConfigError), _pool.lent():
        pass


# ── processes ────────────────────────────────────────────────────────────────────────────────────


def _done(tokenizer: Any, kind: str, given: Any, options: dict[str, Any], size: int) -> str | Sequence[int]:
    if not _is_foreign(tokenizer):
        try:
            if kind == "text":
                return tokenizer_process.tokenized(tokenizer, given, **options)
            return tokenizer_process.rendered(tokenizer, given, **options)
        except BaseException as error:
            if is_interrupt(error):
                raise
            raise ConfigError(line_of(error)) from error
    seconds, nbytes = SECONDS + SECONDS_PER_BYTE * size, BYTES + BYTES_PER_BYTE * size
    work = kind, given, options
    with _pool.lent() as process:
        answer = process.ask(_Key.of(tokenizer, kind), work, seconds, nbytes)
    if answer[:1] == b"i":
        ids = array.array("q")
        ids.frombytes(answer[1:])
        return ids
    if answer[:1] == b"m":
        raise ConfigError(f"more than {nbytes >> 20} MiB of memory are needed, the most for {size} bytes")
    text = answer[1:].decode("utf-8", "replace")
    if answer[:1] == b"t":
        return text
    raise ConfigError(text)


def _is_foreign(tokenizer: Any) -> bool:
    """Whether a tokenizer is of a class of transformers, with nothing of it replaced: its data are a file's."""
    replaced = any(callable(value) for value in vars(tokenizer).values()) if hasattr(tokenizer, "__dict__") else True
    return type(tokenizer).__module__.startswith("transformers.") and not replaced


class _Key:
    """A tokenizer as it is now, by a number that processes know it under."""

    _numbers: ClassVar[weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, _Key]]]] = weakref.WeakKeyDictionary()
    _last = 0
    _lock = Lock()

    def __init__(self, number: int, source: tuple[str, Any, bool]) -> None:
        self.number, self.source = number, source

    @classmethod
    def of(cls, tokenizer: Any, kind: str) -> _Key:
        """The key of a tokenizer for a kind of work; a new one if the tokenizer has changed."""
        plain = {
            name: value
            for name, value in vars(tokenizer).items()
            if type(value) in (str, int, bool) or name in ("chat_template", "_special_tokens_map")
        }
        state = repr((len(tokenizer), sorted(plain.items())))
        with cls._lock:
            known = cls._numbers.setdefault(tokenizer, {})
            if kind not in known or known[kind][0] != state:
                cls._last += 1
                backend = _backend(tokenizer) if kind == "text" else None
                source = ("pickle", _pickled(tokenizer), False) if backend is None else ("json", *backend)
                known[kind] = state, cls(cls._last, source)
            return known[kind][1]


def _backend(tokenizer: Any) -> tuple[str, bool] | None:
    """What transformers asks beneath its own functions, which take long to import; None if a class does more."""
    kind, backend = type(tokenizer), getattr(tokenizer, "backend_tokenizer", None)
    own = all(
        getattr(kind, name).__module__.startswith("transformers.tokenization_utils")
        for name in ("__call__", "_encode_plus", "_batch_encode_plus", "_call_one", "set_truncation_and_padding")
        if hasattr(kind, name)
    )
    if not own or backend is None or not hasattr(backend, "encode_special_tokens"):
        return None
    return backend.to_str(), bool(getattr(tokenizer, "split_special_tokens", False))


def _pickled(tokenizer: Any) -> bytes:
    try:
        return pickle.dumps(tokenizer)
    except Exception as error:
        raise ConfigError(
            f"the {type(tokenizer).__name__} cannot be copied to a process of its own: {error}"
        ) from error


class _Ended(ConfigError):
    """The process has ended, or was ended."""


class _Process:
    """A process that tokenizes."""

    def __init__(self) -> None:
        quiet = {"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps([path or os.getcwd() for path in sys.path])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **quiet},
                start_new_session=True,  # Ctrl-C is for the parent, which closes the pipes
            )
        except OSError as error:
            raise ConfigError(f"no process for text can be started: {error}") from error
        self._known: OrderedDict[int, None] = OrderedDict()

    def ask(self, key: _Key, work: tuple[Any, ...], seconds: float, nbytes: int) -> bytes:
        """The answer to a piece of work.

        Raises:
            ConfigError: the process ended, or its answer is too long; it must not be asked again.
        """
        source = None if key.number in self._known else key.source
        forgotten = [] if source is None else list(self._known)[: len(self._known) + 1 - _MOST_TOKENIZERS]
        for number in forgotten:
            del self._known[number]
        self._known[key.number] = None
        self._known.move_to_end(key.number)
        try:
            request = pickle.dumps((key.number, source, forgotten, work, seconds, nbytes))
        except Exception as error:
            raise _Ended(f"it holds more than plain data: {line_of(error)}") from error
        end = time.monotonic() + 10 * seconds + _WAIT_S + (_LOAD_S if source is not None else 0)
        try:
            stdin = self._process.stdin
            assert stdin is not None
            stdin.write(LENGTH.pack(len(request)) + request)
            stdin.flush()
            length = LENGTH.unpack(self._read(LENGTH.size, end))[0]
            if length <= _MOST_ANSWER:
                return self._read(length, end)
        except (BrokenPipeError, TimeoutError):
            raise _Ended(self._how_ended(seconds, nbytes)) from None
        raise _Ended(f"it becomes {length >> 20} MiB; allowed: {_MOST_ANSWER >> 20}")

    def _read(self, count: int, end: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        data = bytearray()
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        while len(data) < count:
            if not poll.poll(max(0, 1000 * (end - time.monotonic()))):
                raise TimeoutError
            piece = os.read(stdout.fileno(), min(count - len(data), 1 << 20))
            if not piece:
                raise BrokenPipeError
            data += piece
        return bytes(data)

    def _how_ended(self, seconds: float, nbytes: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.returncode
        if code in (None, -signal.SIGPROF):
            return f"more than {seconds:.3g} s are needed, the most for a text of this length"
        if code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGKILL):
            return f"more than {nbytes >> 20} MiB of memory are needed, or the tokenizer's own code failed"
        return f"the process for text ended with the code {code}"

    def close(self, *, kill: bool) -> None:
        """End the process; without ``kill``, when it has answered."""
        if kill:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)


class _Pool:
    """Processes that are free, and how many there are."""

    def __init__(self) -> None:
        self._changed, self._free, self._count = threading.Condition(), list[_Process](), 0

    @contextlib.contextmanager
    def lent(self) -> Iterator[_Process]:
        """A process for a block; one that has ended is not lent again."""
        with self._changed:
            while not self._free and self._count >= PROCESSES:
                self._changed.wait()
            process = self._free.pop() if self._free else None
            self._count += process is None
        broken = True
        try:
            process = process or _Process()
            yield process
            broken = False
        finally:
            if broken and process is not None:
                process.close(kill=True)
            with self._changed:
                self._count -= broken
                if not broken and process is not None:
                    self._free.append(process)
                self._changed.notify()

    def close(self) -> None:
        """End the processes that are free."""
        with self._changed:
            while self._free:
                self._free.pop().close(kill=True)
                self._count -= 1

    def forget(self) -> None:
        """In a forked child: the parent's processes are not its own."""
        self.__init__()  # type: ignore[misc]


_pool = _Pool()
atexit.register(_pool.close)
os.register_at_fork(after_in_child=_pool.forget)
