"""The process of tokenizers from downloaded files: it ends if a request takes too much time or memory.

Frames of both directions are 8 bytes of length, little-endian, and the bytes. Requests are pickles of the parent, which
is trusted; answers begin with a letter: ``i`` and int64 token ids, ``t`` and UTF-8, ``e`` and an error, ``m`` if
memory was refused.
"""

from __future__ import annotations

import array
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

from qcut.common.failures import line_of

LENGTH = struct.Struct("<Q")
"""The head of a frame."""


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more.

    A request is the key of a tokenizer, what it is loaded from, keys to forget, the work, and limits in seconds of CPU
    time and bytes of memory. Beyond the time the kernel ends this process.
    """
    tokenizers: dict[int, Any] = {}
    while head := requests.read(LENGTH.size):
        data = requests.read(LENGTH.unpack(head)[0])
        try:
            answer = _answer(pickle.loads(data), tokenizers)
        except MemoryError:
            answer = b"m"
        except BaseException as error:  # of whatever kinds tokenizers and templates raise, panics of Rust among them
            answer = b"e" + line_of(error).encode("utf-8", "replace")
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()


def _answer(request: tuple[Any, ...], tokenizers: dict[int, Any]) -> bytes:
    key, source, forgotten, work, seconds, nbytes = request
    for other in forgotten:
        tokenizers.pop(other, None)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))  # loading, which may import torch, has no limit
    if source is not None:
        tokenizers[key] = _loaded(*source)
    most = _address_space() + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    signal.setitimer(
        signal.ITIMER_PROF, seconds
    )  # its signal ends a process, in the middle of a regular expression too
    kind, given, options = work
    tokenizer = tokenizers[key]
    found = tokenized(tokenizer, given, **options) if kind == "text" else rendered(tokenizer, given, **options)
    return b"t" + found.encode() if isinstance(found, str) else b"i" + array.array("q", found).tobytes()


def _loaded(kind: str, data: Any, splits: bool) -> Any:
    """A tokenizer: a pickle of one of transformers, or the JSON of one of tokenizers, which is loaded in a tenth."""
    if kind == "pickle":
        return pickle.loads(data)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(data)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = splits
    return tokenizer


def tokenized(tokenizer: Any, text: str, /, *, special_tokens: bool) -> Sequence[int]:
    """Token ids of a text, of a tokenizer of transformers or of tokenizers."""
    if hasattr(tokenizer, "encode_special_tokens"):
        ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=special_tokens).ids
        return ids
    return [int(token) for token in tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"]]


def rendered(tokenizer: Any, chat: list[Any], /, *, tokenize: bool, **template: Any) -> str | Sequence[int]:
    """The text of a chat by the tokenizer's template, or its token ids."""
    found = tokenizer.apply_chat_template(chat, tokenize=tokenize, return_dict=False, **template)
    return [int(token) for token in found] if tokenize else str(found)


def _address_space() -> int:
    """Bytes of this process's address space."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def main() -> None:
    """Serve on standard input and output; other output is dropped."""
    answers = sys.stdout.buffer
    with open("/dev/null", "w") as nowhere:
        sys.stdout = nowhere
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        serve(sys.stdin.buffer, answers)
