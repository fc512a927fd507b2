"""Matchers: the tokens that may come next in an answer with a constraint, by the library llguidance."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

from qcut.common.failures import is_interrupt, line_of
from qcut.common.versions import install, numbers
from qcut.errors import ConstraintError, RequestError
from qcut.text.constraint import Constraint, Kind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

# llguidance's own limits, below its defaults: the initial ones bound the work of a request's first mask, those of a
# step each later mask, for which all sequences wait, and states their memory.
_LIMITS = {
    "initial_lexer_fuel": 400_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# A space, or a line's end and its indentation: without a bound, a model may add spaces to the end of the context.
_JSON: JsonCompileOptions = {"whitespace_pattern": r"[ ]?|\n[ \t]{0,40}", "lenient": False}
COMPACT_JSON: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": r",[ ]?",
    "key_separator": r":[ ]?",
    "lenient": False,
}
"""llguidance's options for JSON with a space at most after commas and colons."""
_BOUNDED = (1, 8)
"""The first version of llguidance that does not repeat a pattern of white space."""
_ALLOWED: Mapping[Kind, str] = {
    "json_schema": "JSON Schema of draft 2020-12 with the keywords that llguidance has",
    "regex": "the syntax of Rust's crate regex, without anchors and look-around",
    "choice": "strings",
    "grammar": "Lark's syntax with a rule start, or GBNF with a rule root",
}
_SECONDS = 2
"""Most CPU time of llguidance for a constraint that it has not seen, in a process of its own."""
# llguidance's stack grows with chains of rules, and its work on expressions that hold at once has no limit: either
# would end or hold up all requests. The stack is half of a thread's usual one: what passes here passes there. The
# process knows the model's special tokens by name and number, since grammars may have them; all other tokens are bytes.
_CHECK = """
import json, os, resource, sys, threading
sys.path[:] = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]), int(sys.argv[2])))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
grammar, limits, names, size = json.load(sys.stdin)
class Bytes:
    eos_token_id, bos_token_id, special_token_ids = 256, None, range(256, 257 + len(names))
    tokens = [*(bytes([i]) for i in range(256)), *(name.encode() for name in ["", *names])]
    __call__ = list
def check():
    tokens = Bytes()
    tokens.tokens += [b""] * (size - len(tokens.tokens))
    tokens = LLTokenizer(TokenizerWrapper(tokens), n_vocab=len(tokens.tokens))
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**limits))
    os.write(1, matcher.get_error().encode(errors="replace"))
    matcher.compute_bitmask()
threading.stack_size(4 << 20)
thread = threading.Thread(target=check)
thread.start()
thread.join()
"""
_KEPT = 32
"""Constraints with a first matcher that is kept: the next request with the same constraint copies it."""
_SHOWN = 400
T = TypeVar("T")


class Grammars:
    """Makes matchers of constraints for the tokens of one model. May be called in any thread.

    Args:
        tokenizer: of transformers, over the library tokenizers; None makes no matcher.
        vocabulary: number of the model's tokens, which may be more or fewer than the tokenizer's.
        ends: ids that end texts.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, tuple(ends)
        self._tokens: LLTokenizer | None = None
        self._kept: OrderedDict[Constraint, Matcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, constraint: Constraint) -> Matcher:
        """A matcher of an answer's first token, with its mask computed.

        Raises:
            ConstraintError: llguidance is missing; the model has no tokenizer of the library tokenizers, or no token
                that ends texts; or llguidance does not take the constraint. The message says where it is wrong.
        """
        with self._lock:
            if constraint in self._kept:
                self._kept.move_to_end(constraint)
                return self._kept[constraint].copy()
        tokens, limits = self._prepared()
        from llguidance import LLMatcher

        size = max(self._vocabulary, len(self._tokenizer))
        message = _checked(constraint, tuple(self._tokenizer.get_added_vocab()), size)
        try:
            if message:
                raise ValueError(message)
            found = LLMatcher(tokens, _grammar(constraint), log_level=0, limits=limits)
            matcher = Matcher(found, self._vocabulary, self._ends)
            matcher.allowed()
        except BaseException as error:  # a panic in Rust is no Exception
            if is_interrupt(error):
                raise
            raise ConstraintError(f"{constraint}: {_message(error)}; allowed: {_ALLOWED[constraint.kind]}") from None
        with self._lock:
            self._kept[constraint] = matcher
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return matcher.copy()

    def _prepared(self) -> tuple[LLTokenizer, LLParserLimits]:
        """The tokens as llguidance has them, made once, and the limits of a matcher."""
        try:
            from llguidance import LLParserLimits
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ConstraintError(f"a constraint needs llguidance ({error}): {install('serve')}") from error
        if self._tokenizer is None:
            raise ConstraintError("a constraint, and the engine has no tokenizer; allowed: Engine(model, tokenizer=…)")
        if not self._ends:
            raise ConstraintError("a constraint, and the model has no token that ends texts; allowed: models with one")
        with self._lock:
            if self._tokens is None:
                try:
                    size = max(self._vocabulary, len(self._tokenizer))
                    self._tokens = from_tokenizer(self._tokenizer, n_vocab=size, eos_token=list(self._ends))
                except BaseException as error:
                    if is_interrupt(error):
                        raise
                    kind = type(self._tokenizer).__name__
                    allowed = "allowed: tokenizers of the library tokenizers"
                    raise ConstraintError(f"a constraint for a {kind}: {_message(error)}; {allowed}") from error
            return self._tokens, LLParserLimits(**_LIMITS)  # type: ignore[arg-type]


class Matcher:
    """The tokens that may come next in one answer.

    Only one thread uses a matcher at a time. A failure is kept in `error`: it concerns no other answer.

    Args:
        matcher: llguidance's.
        vocabulary: number of the model's tokens.
        ends: ids that end texts.

    Attributes:
        count: tokens of the answer so far.
        is_complete: whether nothing may follow the tokens so far, a token that ends texts included.
        error: why the answer cannot go on; None while it can.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, ends: Sequence[int]) -> None:
        self._matcher, self._vocabulary, self._ends = matcher, vocabulary, ends
        self._bits: bytes | None = None
        self.count = 0
        self.is_complete = False
        self.error: RequestError | None = None

    def copy(self) -> Matcher:
        """Another matcher of the same state."""
        other = Matcher(self._matcher.deep_copy(), self._vocabulary, self._ends)
        other._bits, other.count, other.is_complete = self._bits, self.count, self.is_complete
        return other

    def consume(self, token: int) -> None:
        """Append a token, unless the answer is complete or has failed."""
        if self.is_complete or self.error is not None:
            return
        self.count += 1
        self._bits = None

        def consume() -> None:
            taken = self._matcher.consume_token(token)
            self._check()
            if not taken:
                raise RequestError(f"token {token} is not allowed")
            self.is_complete = self._matcher.is_stopped()

        self._tried(consume)

    def mask(self, banned: Iterable[int] = ()) -> bytes | None:
        """The tokens that may come next: bit t % 8 of byte t // 8 for token t; None: the answer has ended.

        Args:
            banned: ids that are not allowed either. Where no other is, the answer ends if it may, and fails otherwise.
        """
        if self.is_complete or self.error is not None:
            return None
        return self._tried(lambda: self.allowed(banned))

    def allowed(self, banned: Iterable[int] = ()) -> bytes:
        """`mask` of an answer that goes on.

        Raises:
            RequestError: no token is allowed, or llguidance's limits do not allow finding out.
        """
        if self._bits is None:
            self._bits = self._found()
        bits = bytearray(self._bits)
        for token in banned:
            bits[token >> 3] &= ~(1 << (token & 7))
        if bits.count(0) == len(bits):
            if not self._matcher.is_accepting():
                raise RequestError("no token of the model is allowed")
            for token in self._ends:
                bits[token >> 3] |= 1 << (token & 7)
        return bytes(bits)

    def _found(self) -> bytes:
        bits = self._matcher.compute_bitmask()
        self._check()
        size, rest = (self._vocabulary + 7) // 8, self._vocabulary % 8
        bits = bits[:size].ljust(size, b"\0")
        return bits if not rest else bits[:-1] + bytes([bits[-1] & ((1 << rest) - 1)])

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(self._matcher.get_error())

    def _tried(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except BaseException as error:
            if is_interrupt(error):
                raise
            self.error = RequestError(f"the constraint fails after {self.count} tokens: {_message(error)}")
            return None


@lru_cache(maxsize=128)
def _checked(constraint: Constraint, names: tuple[str, ...], size: int) -> str:
    """What is wrong with a constraint by another process that makes a matcher of it; empty if nothing is.

    Args:
        constraint: of any kind.
        names: special tokens of the model.
        size: number of the model's tokens.

    Raises:
        ConstraintError: the process ends at its limits.
    """
    try:
        given = json.dumps([_grammar(constraint), _LIMITS, names, size])
    except BaseException as error:
        if is_interrupt(error):
            raise
        return line_of(error, _SHOWN)
    command = [sys.executable, "-I", "-c", _CHECK, json.dumps(sys.path), str(_SECONDS)]
    try:
        done = subprocess.run(
            command, input=given.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=4 * _SECONDS
        )
        is_ended = done.returncode < 0
    except subprocess.TimeoutExpired:
        is_ended = True
    if is_ended:
        allowed = f"allowed: what llguidance reads in {_SECONDS} s of CPU time and 4 MiB of stack"
        raise ConstraintError(f"{constraint}: too many parts that depend on one another; {allowed}")
    return done.stdout.decode(errors="replace")


def _grammar(constraint: Constraint) -> str:
    """What llguidance makes a matcher of."""
    from llguidance import LLMatcher, grammar_from

    if constraint.kind == "json_schema":
        options = COMPACT_JSON if numbers(version("llguidance")) < _BOUNDED else _JSON
        return LLMatcher.grammar_from_json_schema(constraint.text, overrides=options)
    if constraint.kind == "choice":
        strings = json.loads(constraint.text)
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(one) for one in strings))
    return grammar_from(constraint.kind, constraint.text)


def _message(error: BaseException) -> str:
    """An error's message in one line of bounded length."""
    return line_of(error, _SHOWN).removesuffix("<non-verbose/>").rstrip()
