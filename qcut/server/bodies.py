"""Bodies of requests: OpenAI's fields, and those of `qcut.Sampling`.

Fields that the engine has no answer to are taken at the value that asks for nothing, and refused by name otherwise; so
are fields that nobody knows. A misspelt one is no request for the default.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qcut.engine.likelihoods import MOST_TOP
from qcut.engine.scheduler import Prompt
from qcut.numerics.sampling import Sampling
from qcut.server.limits import parse_json
from qcut.server.refusals import Refusal

MOST_STOPS = 64
MOST_STOP_CHARACTERS = 1024
MOST_COUNT = 2**31 - 1
"""Largest count, and token id, that a field may have."""
_SHOWN = 80

_Strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_Stop = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]
_Positive = Annotated[int, Field(ge=1, le=MOST_COUNT)]
_Token = Annotated[int, Field(ge=0, le=MOST_COUNT)]
_Tokens = Annotated[list[int], Field(fail_fast=True)]  # the engine names ids that it does not know
_Top = Annotated[int, Field(ge=0, le=MOST_TOP)]
B = TypeVar("B", bound="Body")


class StreamOptions(BaseModel):
    """What a stream has besides text."""

    model_config = _Strict
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Body(BaseModel):
    """What both kinds of requests have.

    Attributes:
        model: the name under which the model is served; None is as good.
        n: continuations of each prompt.
        seed: of the draws; None draws one. The same seed gives the same text again.
        stop_token_ids: end the text, besides the model's own.
        ignore_eos: the model's own end tokens do not end the text.
    """

    model_config = _Strict
    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {}
    """Fields of the interface without an answer here, and the values that ask for nothing."""

    model: str | None = None
    n: _Positive = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[_Token], Field(max_length=MOST_STOPS, fail_fast=True)] = []
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(le=MOST_COUNT)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen.

        Raises:
            ConfigError: a value outside of its range.
        """
        names = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        seed = secrets.randbits(64) if self.seed is None else self.seed & (2**64 - 1)
        return Sampling(1.0 if self.temperature is None else self.temperature, seed=seed, **given)

    def stops(self, ends: Sequence[int]) -> list[int | str]:
        """What ends the text, beside a model's own end tokens."""
        strings = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [*([] if self.ignore_eos else ends), *self.stop_token_ids, *strings]

    @property
    def prompts(self) -> list[Prompt]:
        """What is continued."""
        raise NotImplementedError

    @property
    def most(self) -> int | None:
        """Most new tokens; None fills the context."""
        raise NotImplementedError

    @property
    def top(self) -> int | None:
        """How many of the likeliest tokens are listed with each one; None: no log-probabilities."""
        raise NotImplementedError


class CompletionBody(Body):
    """The body of ``/v1/completions``."""

    NEUTRAL = {"best_of": (None, 1), "logit_bias": (None, {}), "suffix": (None, "")}

    prompt: str | Annotated[list[str], Field(fail_fast=True)] | _Tokens | Annotated[list[_Tokens], Field(fail_fast=True)]
    max_tokens: _Positive | None = 16
    logprobs: _Top | None = None
    echo: bool = False

    @property
    def prompts(self) -> list[Prompt]:
        """What is continued."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or not given or isinstance(given[0], int) else given

    @property
    def most(self) -> int | None:
        """Most new tokens; None fills the context."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """How many of the likeliest tokens are listed with each one; None: no log-probabilities."""
        return self.logprobs


class TextPart(BaseModel):
    """A part of a message."""

    model_config = _Strict
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat."""

    model_config = _Strict
    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        """The message as templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content, **({} if self.name is None else {"name": self.name})}


class ChatBody(Body):
    """The body of ``/v1/chat/completions``."""

    NEUTRAL = {
        "audio": (None,),
        "function_call": (None, "none"),
        "functions": (None, []),
        "logit_bias": (None, {}),
        "modalities": (None, ["text"]),
        "parallel_tool_calls": (None, True, False),
        "prediction": (None,),
        "prompt_cache_key": (None,),
        "reasoning_effort": (None, "none"),
        "response_format": (None, {"type": "text"}),
        "safety_identifier": (None,),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "tool_choice": (None, "none", "auto"),
        "tools": (None, []),
        "verbosity": (None,),
        "web_search_options": (None,),
    }

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    logprobs: bool | None = None
    top_logprobs: _Top | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """What is continued."""
        return [[message.plain for message in self.messages]]

    @property
    def most(self) -> int | None:
        """Most new tokens; None fills the context."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        """How many of the likeliest tokens are listed with each one; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


def parsed(kind: type[B], data: bytes) -> B:
    """Read a body.

    Args:
        kind: of the body.
        data: JSON.

    Raises:
        Refusal: no JSON; a field that is missing, unknown, not served, or of another kind, which the message names.
    """
    given = parse_json(data)
    for name, values in kind.NEUTRAL.items():
        if name in given and (value := given.pop(name)) not in values:
            allowed = " or ".join(sorted({_json(one) for one in values}))
            raise Refusal(400, f"{name}: found {_json(value)}; allowed: {allowed}", param=name, code="unsupported")
    try:
        return kind.model_validate(given)
    except ValidationError as found:
        raise _refusal(found, kind) from None


def _json(value: object) -> str:
    from pydantic_core import to_json

    text = to_json(value).decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _refusal(found: ValidationError, kind: type[Body]) -> Refusal:
    """What is wrong first. Of several types that a value might have, the one that fits furthest says it."""
    errors = found.errors(include_url=False, include_context=False)
    beside = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    first = max(beside, key=lambda error: (len(error["loc"]), not error["type"].endswith("_type")))
    if first["type"] == "json_invalid":
        return Refusal(400, f"the body is no JSON: {first['msg']}", code="json_invalid")
    known = {*kind.model_fields, *Message.model_fields, *TextPart.model_fields, *StreamOptions.model_fields}
    *path, last = first["loc"] or ("the body",)
    is_unknown = first["type"] == "extra_forbidden"
    names = [str(name) for name in path if isinstance(name, int) or name in known]
    names += [str(last)] if isinstance(last, int) or last in known or is_unknown or not names else []
    where = ".".join(names)[:_SHOWN]
    if is_unknown:
        allowed = f"; allowed: {', '.join(sorted(kind.model_fields))}" if not path else ""
        return Refusal(400, f"unknown field {where}{allowed}", param=where, code="unknown")
    value = "" if first["type"] == "missing" else f"found {_json(first['input'])}; "
    return Refusal(400, f"{where}: {value}{first['msg']}", param=where if first["loc"] else None)
