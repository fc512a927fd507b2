"""Matchers: the tokens that may come next in an answer with a constraint, by the library llguidance."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache, partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from qcut.common.failures import is_interrupt, line_of
from qcut.common.versions import install, numbers
from qcut.errors import ConstraintError, RequestError
from qcut.text.constraint import Constraint, Kind

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
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
_CHARACTERS = r'[^"\\\x00-\x1F\x7F]{1,%d}'
# llguidance keeps the tokens that a pattern takes whole. Those of a few characters are most of the work near the end of
# a string with a most length, and all sequences of a step wait for its longest mask.
_SHORT = [_CHARACTERS % count for count in range(1, 10)]
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
_SHOWN = 400
_ALL = np.uint32(0xFFFFFFFF)
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
        self._lock = threading.Lock()

    def matcher(self, constraint: Constraint) -> Matcher:
        """A matcher of an answer's first token, with its mask computed.

        Matchers share nothing that changes: copies of llguidance's share one lock and the states of one lexer, whose
        limits would end all answers of a constraint as soon as one exceeds them.

        Raises:
            ConstraintError: llguidance is missing; the model has no tokenizer of the library tokenizers, or no token
                that ends texts; or llguidance does not take the constraint. The message says where it is wrong.
        """
        tokens, limits = self._prepared()
        from llguidance import LLMatcher

        size = max(self._vocabulary, len(self._tokenizer))
        message = _checked(constraint, tuple(self._tokenizer.get_added_vocab()), size)
        try:
            if message:
                raise ValueError(message)
            found = LLMatcher(tokens, _grammar(constraint), log_level=0, limits=limits)
            matcher = Matcher(found, self._vocabulary, self._ends, (size + 31) // 32)
            matcher.keep_first_mask()
        except BaseException as error:  # a panic in Rust is no Exception
            if is_interrupt(error):
                raise
            raise ConstraintError(f"{constraint}: {_message(error)}; allowed: {_ALLOWED[constraint.kind]}") from None
        return matcher

    def _prepared(self) -> tuple[LLTokenizer, LLParserLimits]:
        """The tokens as llguidance has them, made once, and the limits of a matcher."""
        try:
            from llguidance import LLParserLimits, LLTokenizer
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
                    slices = [*_SHORT, *LLTokenizer.general_slices()]
                    self._tokens = from_tokenizer(
                        self._tokenizer, n_vocab=size, eos_token=list(self._ends), slices=slices
                    )
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
        words: int32 words of a mask, at least a bit for each token.

    Attributes:
        words: as given.
        count: tokens of the answer so far.
        is_complete: whether nothing may follow the tokens so far, a token that ends texts included.
        error: why the answer cannot go on; None while it can.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, ends: Sequence[int], words: int) -> None:
        self._matcher, self._vocabulary, self._ends, self.words = matcher, vocabulary, ends, words
        self._first: NDArray[np.uint32] | None = None
        self.count = 0
        self.is_complete = False
        self.error: RequestError | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the answer is neither complete nor failed."""
        return not self.is_complete and self.error is None

    def consume(self, token: int) -> None:
        """Append a token, unless the answer is complete or has failed."""
        if not self.goes_on:
            return
        self.count += 1
        self._first = None

        def consume() -> None:
            taken = self._matcher.consume_token(token)
            self._check()
            if not taken:
                raise RequestError(f"token {token} is not allowed")
            self.is_complete = self._matcher.is_stopped()

        self._tried(consume)

    def keep_first_mask(self) -> None:
        """Find the mask of the answer's first token, and keep it until that comes.

        Raises:
            RequestError: no token is allowed, or llguidance's limits do not allow finding out.
        """
        mask = np.empty(self.words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._finish(mask, ())
        self._first = mask

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(self._matcher.get_error())

    def _finish(self, mask: NDArray[np.uint32], banned: Iterable[int]) -> None:
        """Take banned tokens out of a mask. Where no other is, the answer ends if it may, and fails otherwise."""
        self._check()
        full, rest = divmod(self._vocabulary, 32)
        for token in banned:
            mask[token >> 5] &= ~np.uint32(1 << (token & 31))
        if mask[:full].any() or (rest and mask[full] & np.uint32((1 << rest) - 1)):
            return
        if not self._matcher.is_accepting():
            raise RequestError("no token of the model is allowed")
        for token in self._ends:
            mask[token >> 5] |= np.uint32(1 << (token & 31))

    def _tried(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except BaseException as error:
            if is_interrupt(error):
                raise
            self.error = RequestError(f"the constraint fails after {self.count} tokens: {_message(error)}")
            return None


def write_masks(wanted: Sequence[tuple[int, Matcher, Iterable[int]]], masks: NDArray[np.uint32]) -> None:
    """Write which tokens may come next in answers that go on, found on several cores at once.

    Args:
        wanted: row of ``masks``, the answer's matcher, and ids that are not allowed either. Where no other token is
            allowed, the answer ends if it may, and fails otherwise.
        masks: ``[rows, words]``, words those of all matchers; bit t % 32 of word t // 32 says whether token t may come.
            The row of an answer that fails allows all.
    """
    unknown = []
    for row, matcher, _ in wanted:
        if matcher._first is None:
            unknown.append((row, matcher))
        else:
            masks[row] = matcher._first
    place, size = masks.ctypes.data, masks.shape[1] * masks.itemsize
    try:
        if unknown:
            pairs = [(matcher._matcher, row) for row, matcher in unknown]
            _executor().unsafe_compute_mask_ptr(pairs, place, size, len(masks))
    except BaseException as error:  # a panic in Rust is no Exception
        if is_interrupt(error):
            raise
        for row, matcher in unknown:  # one of them fails
            matcher._tried(partial(matcher._matcher.unsafe_compute_mask_ptr, place + row * size, size))
    for row, matcher, banned in wanted:
        if matcher.error is None:
            matcher._tried(partial(matcher._finish, masks[row], banned))
        if matcher.error is not None:
            masks[row] = _ALL


@cache
def _executor() -> LLExecutor:
    """llguidance's threads."""
    from llguidance import LLExecutor

    return LLExecutor()


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


@lru_cache(maxsize=128)
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
