"""Schemas of requests: the supported fields of OpenAI's interface and of vLLM's and llama.cpp's servers.

null means unset. `qcut.server.known_fields` defines how all other fields are treated.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError, to_json

from qcut.engine.likelihoods import MOST_TOP
from qcut.numerics.sampling import Sampling
from qcut.server.known_fields import (
    ALIASES,
    CHAT_ONLY,
    COMPLETION_ONLY,
    IGNORED,
    MESSAGE_IGNORED,
    MESSAGE_ONLY,
    ONLY,
    Only,
    UnknownFields,
    refuse_unserved,
    shown,
)
from qcut.server.limits.json_body import parse_json
from qcut.server.refusals import Refusal
from qcut.server.structured import Asked, asked
from qcut.server.tools.requests import Calling, calling, checked_calls, checked_choice, checked_tools, path_of

MOST_STOPS = 64
MOST_STOP_CHARACTERS = 1024
MOST_BIASED = 1024
MOST_VARIABLES = 64
MOST_NAME_CHARACTERS = 4096
_LARGEST = (1 << 63) - 1
_MOST_TOP_K = (1 << 31) - 1
_SHOWN = 80

_Stop = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]
_Positive = Annotated[int, Field(ge=1, le=_LARGEST)]
_Token = Annotated[int, Field(ge=0, le=_LARGEST)]
_Top = Annotated[int, Field(ge=0, le=MOST_TOP)]
_Name = Annotated[str, Field(max_length=MOST_NAME_CHARACTERS)]  # every chunk of a stream carries it
B = TypeVar("B", bound="Schema")


def _unset(value: object) -> object:
    """A number; -1 means null: no limit, or no seed."""
    return None if type(value) is int and value == -1 else value


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _prompt(value: object) -> object:
    """Validate a prompt with a single error; pydantic would list one per item and type."""
    is_served = isinstance(value, str) or (
        isinstance(value, list)
        and (_is_ids(value) or all(isinstance(one, str) for one in value) or all(map(_is_ids, value)))
    )
    if not is_served:
        raise PydanticCustomError("prompt_type", "allowed: a text, a list of texts, token ids, or lists of token ids")
    return value


def _bias(value: object) -> object:
    """``logit_bias`` with integer token ids; JSON has them as strings."""
    if not isinstance(value, dict) or len(value) > MOST_BIASED:
        raise PydanticCustomError("logit_bias", f"allowed: an object of at most {MOST_BIASED} token ids with numbers")
    for token, bias in value.items():
        is_id = token.isascii() and token.isdecimal() and len(token) <= 18
        if not is_id or type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise PydanticCustomError("logit_bias", "allowed: token ids, each with a number from -100 to 100")
    return {int(token): float(bias) for token, bias in value.items()}


_Limit = Annotated[Annotated[int, Field(ge=0, le=_LARGEST)] | None, BeforeValidator(_unset)]
_Seed = Annotated[Annotated[int, Field(ge=-(2**63), lt=2**64)] | None, BeforeValidator(_unset)]


class Schema(BaseModel):
    """Base of requests and their nested objects.

    Attributes:
        WHERE: path of the enclosing fields, each with a dot.
        UNSERVED: fields that are accepted only at their default.
        UNUSED: fields without influence on the response.
    """

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
    WHERE: ClassVar[str] = ""
    UNSERVED: ClassVar[Mapping[str, Only]] = {}
    UNUSED: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: object, info: ValidationInfo) -> object:
        """Keep known fields that are set; look the others up by name."""
        if not isinstance(value, dict):
            return value
        given = cls.renamed({name: one for name, one in value.items() if one is not None})
        refuse_unserved(given, cls.UNSERVED, cls.WHERE)
        for name in given:
            if name not in cls.model_fields and name not in cls.UNSERVED and name not in cls.UNUSED:
                (info.context or UnknownFields()).found(f"{cls.WHERE}{name}", cls.model_fields)
        return given

    @classmethod
    def renamed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Rename aliases to the schema's fields; ``given`` has no nulls."""
        return given


class StreamOptions(Schema):
    """``stream_options``.

    Attributes:
        include_usage: the last chunk has the usage.
        continuous_usage_stats: every chunk has the usage.
        include_obfuscation: has no influence; nothing is obfuscated.
    """

    WHERE = "stream_options."
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


@dataclass(frozen=True)
class Chat:
    """A chat, rendered to a prompt by the tokenizer's chat template.

    Attributes:
        messages: role, text, reasoning and calls of each message; the arguments of calls are objects, or texts that are
            no JSON of an object.
        add_generation_prompt: whether the template opens an assistant message at the end.
        continue_final_message: whether the last message is continued.
        add_special_tokens: whether the tokenizer adds special tokens to the template's.
        variables: further variables of the template.
        tools: functions that may be called.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[dict[str, Any]] = ()

    @property
    def texts(self) -> list[str]:
        """Texts that the prompt has at least: contents, calls and tools."""
        given = [message["content"] for message in self.messages]
        others = [*(message["tool_calls"] for message in self.messages if "tool_calls" in message), *self.tools]
        return given + [to_json(other).decode() for other in others]


@dataclass(frozen=True)
class Text:
    """A text prompt.

    Attributes:
        text: at least one character.
        add_special_tokens: whether the tokenizer adds special tokens such as BOS.
    """

    text: str
    add_special_tokens: bool = True


AnyPrompt = Text | Chat | list[int]


class Body(Schema):
    """Fields of all generating requests.

    Attributes:
        PROMPT: name of the field with the prompt.
        model: name of the served model, or null.
        n: samples per prompt.
        seed: seed of sampling; null or -1 draws one. Equal seeds give equal texts.
        stop_token_ids: stop tokens in addition to the model's EOS tokens.
        ignore_eos: do not stop at the model's EOS tokens.
        min_tokens: no stop before this number of new tokens.
        include_stop_str_in_output: keep the stop string in the text.
        return_tokens_as_token_ids: log-probabilities name tokens ``token_id:N``.
        speculate: whether decode steps may verify drafted tokens for this request; its text is the same.
        return_token_ids: return token ids of texts and prompts.
        response_format: the form of the answer; see `qcut.server.structured`, as the fields after it.
    """

    UNSERVED = ONLY
    UNUSED = IGNORED
    PROMPT: ClassVar[str] = "messages"
    model: _Name | None = None
    n: _Positive = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[_Token], Field(max_length=MOST_STOPS, fail_fast=True)] = []
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=_LARGEST)] | None = None
    seed: _Seed = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MOST_TOP_K)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_bias)] = {}
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    speculate: bool = True
    best_of: _Positive | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_json_object: bool = False
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None

    @classmethod
    def renamed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """See `Schema`."""
        for other, name in ALIASES.items():
            if other in given and name in cls.model_fields:
                given.setdefault(name, given.pop(other))
        return given

    def check(self) -> None:
        """Check fields that depend on each other.

        Raises:
            Refusal: two fields contradict each other, or a constraint is wrong; the message names them.
        """
        _ = self.constraint  # refuses a wrong one
        if self.best_of not in (None, self.n):
            message = f"best_of: found {self.best_of}; allowed: {self.n}, which is n. Compare the n log-probabilities"
            raise Refusal(400, message, param="best_of", code="unsupported")

    @cached_property
    def constraint(self) -> Asked | None:
        """The form that the answer must have.

        Raises:
            Refusal: see `asked`.
        """
        return asked(self.formats, vars(self))

    @property
    def formats(self) -> dict[str, dict[str, Any] | None]:
        """OpenAI's field with the form of the answer, by its path."""
        return {"response_format": self.response_format}

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters.

        Raises:
            ConfigError: a value outside of its range.
        """
        names = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        given: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            given["top_k"] = max(0, self.top_k)
        if self.logit_bias:
            given["logit_bias"] = self.logit_bias
        seed = secrets.randbits(64) if self.seed is None else self.seed & (2**64 - 1)
        return Sampling(1.0 if self.temperature is None else self.temperature, seed=seed, **given)

    def stops(self, ends: Sequence[int]) -> list[int | str]:
        """Stop tokens and stop strings, in addition to the model's EOS tokens."""
        return [*([] if self.ignore_eos else ends), *self.stop_token_ids, *self.stop_strings]

    @property
    def stop_strings(self) -> list[str]:
        """Stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def prompts(self) -> list[AnyPrompt]:
        """The prompts."""
        raise NotImplementedError

    @property
    def most(self) -> int | None:
        """Most new tokens; None: up to the context."""
        raise NotImplementedError

    @property
    def top(self) -> int | None:
        """Number of top log-probabilities per token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        """Whether the text starts with the prompt."""
        return False


class CompletionBody(Body):
    """Body of ``/v1/completions``."""

    UNSERVED = COMPLETION_ONLY
    PROMPT = "prompt"

    prompt: Annotated[Any, BeforeValidator(_prompt)]
    max_tokens: _Limit = 16
    logprobs: _Top | None = None
    echo: bool = False
    add_special_tokens: bool = True

    def check(self) -> None:
        """See `Body`."""
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise Refusal(400, "max_tokens: found 0; allowed: 1 and more, or 0 with echo", param="max_tokens")

    @property
    def prompts(self) -> list[AnyPrompt]:
        """The prompts."""
        given: Any = self.prompt
        several = [given] if isinstance(given, str) or not given or isinstance(given[0], int) else given
        return [Text(one, self.add_special_tokens) if isinstance(one, str) else one for one in several]

    @property
    def most(self) -> int | None:
        """Most new tokens; None: up to the context."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """Number of top log-probabilities per token; None: no log-probabilities."""
        return self.logprobs

    @property
    def echoes(self) -> bool:
        """See `Body`."""
        return self.echo


class TextPart(Schema):
    """A content part of a message."""

    WHERE = "messages.content."
    UNUSED = frozenset({"annotations", "cache_control", "logprobs"})
    type: Literal["text", "input_text", "output_text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, value: object) -> object:
        """What an assistant refuses is its text."""
        if isinstance(value, dict) and value.get("type") == "refusal" and "refusal" in value:
            return {"type": "output_text", "text": value["refusal"]}
        return value


class Message(Schema):
    """A chat message; an assistant message may lack content.

    Attributes:
        tool_calls: calls of an assistant's message.
        tool_call_id: the call that a message of the role ``tool`` answers.
        reasoning_content: the reasoning of an assistant's message.
    """

    WHERE = "messages."
    UNSERVED = MESSAGE_ONLY
    UNUSED = MESSAGE_IGNORED
    role: str
    content: str | Annotated[list[str | TextPart], Field(fail_fast=True)]
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], BeforeValidator(checked_calls)] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, value: object) -> object:
        """Null or missing content is what the assistant refuses, or the empty text."""
        if not isinstance(value, dict):
            return value
        if "reasoning" in value:  # the newer name of other servers
            value = {"reasoning_content": value["reasoning"], **value}
            del value["reasoning"]
        is_empty = value["content"] is None if "content" in value else value.get("role") == "assistant"
        refusal = value.get("refusal")
        return {**value, "content": refusal if isinstance(refusal, str) else ""} if is_empty else value

    @property
    def plain(self) -> dict[str, Any]:
        """The message as a dictionary for the chat template."""
        parts = [self.content] if isinstance(self.content, str) else self.content
        text = "".join(part if isinstance(part, str) else part.text for part in parts)
        found: dict[str, Any] = {"role": self.role, "content": text}
        found |= {name: value for name in ("name", "tool_call_id") if (value := getattr(self, name)) is not None}
        if self.tool_calls:
            found["tool_calls"] = self.tool_calls
        if self.reasoning_content:
            found["reasoning_content"] = self.reasoning_content
            if not (text and self.tool_calls):  # GPT-OSS' template takes either with calls
                found["thinking"] = self.reasoning_content
        return found


class ChatFields(Schema):
    """Fields of requests with a chat as prompt.

    Attributes:
        chat_template_kwargs: further variables of the template.
        reasoning_effort: a variable of the template, under OpenAI's name.
    """

    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MOST_VARIABLES)] = {}
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False

    @property
    def turns(self) -> list[Message]:
        """The messages."""
        raise NotImplementedError

    @property
    def chat(self) -> Chat:
        """The messages and the options of the template.

        Raises:
            Refusal: ``continue_final_message`` and ``add_generation_prompt`` are both set.
        """
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message: found true; allowed: false, or add_generation_prompt false"
            raise Refusal(400, message, param="continue_final_message")
        adds = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return Chat(
            [message.plain for message in self.turns],
            adds,
            self.continue_final_message,
            self.add_special_tokens,
            {**effort, **self.chat_template_kwargs},
        )


class ToolFields(ChatFields):
    """Fields of requests with a chat that may have tools.

    Attributes:
        IS_FLAT: whether the fields of a function stand next to the type of its tool.
        tools: functions that the model may call.
        tool_choice: whether it may or must call one, and which; ``none`` drops them.
        parallel_tool_calls: whether an answer may have several calls.
    """

    IS_FLAT: ClassVar[bool] = False
    tools: Annotated[list[dict[str, Any]], BeforeValidator(checked_tools)] = []
    tool_choice: Annotated[str | dict[str, Any], BeforeValidator(checked_choice)] = "auto"
    parallel_tool_calls: bool = True

    @classmethod
    def renamed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """See `Schema`. ``tool_choice: none`` drops the tools."""
        return without_tools(super().renamed(given))

    @property
    def calling(self) -> Calling:
        """The calls of the answer.

        Raises:
            Refusal: the choice does not fit the tools.
        """
        paths = [f"{path_of(i, self.IS_FLAT)}.parameters" for i in range(len(self.tools))]
        return calling(self.tools, self.tool_choice, self.parallel_tool_calls, paths)

    @property
    def chat(self) -> Chat:
        """See `ChatFields`; with the functions that may be called.

        Raises:
            Refusal, also: see `calling`.
        """
        return replace(super().chat, tools=self.calling.tools)


class ChatBody(ToolFields, Body):
    """Body of ``/v1/chat/completions``."""

    UNSERVED = CHAT_ONLY

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: _Limit = None
    max_completion_tokens: _Limit = None
    logprobs: bool = False
    top_logprobs: _Top = 0

    def check(self) -> None:
        """See `Body`."""
        super().check()
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise Refusal(400, f"{name}: found 0; allowed: 1 and more", param=name)
        if self.top_logprobs and not self.logprobs:
            message = f"top_logprobs: found {self.top_logprobs}; allowed: 0, or logprobs true"
            raise Refusal(400, message, param="top_logprobs")

    @property
    def turns(self) -> list[Message]:
        """See `ChatFields`."""
        return self.messages

    @property
    def prompts(self) -> list[AnyPrompt]:
        """The prompts."""
        return [self.chat]

    @property
    def most(self) -> int | None:
        """Most new tokens; None: up to the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top(self) -> int | None:
        """Number of top log-probabilities per token; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None


def without_tools(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request; without tools if ``tool_choice`` is ``none``."""
    for choice, tools in (("tool_choice", "tools"), ("function_call", "functions")):
        if given.get(choice) == "none":
            given.pop(tools, None)
    return given


def parsed(kind: type[B], data: bytes, unknown: UnknownFields | None = None) -> B:
    """Parse and validate a body.

    Args:
        kind: schema of the body.
        data: JSON.
        unknown: treatment of unknown fields; None: log and ignore.

    Raises:
        Refusal: invalid JSON; a field is missing, not supported, or of another type. The message names the field.
    """
    given = parse_json(data)
    try:
        found = kind.model_validate(given, context=unknown or UnknownFields())
    except ValidationError as error:
        raise _refusal(error, kind) from None
    if isinstance(found, Body):
        found.check()
    return found


def _refusal(found: ValidationError, kind: type[Schema]) -> Refusal:
    """The first error. For a union of types, the error of the type that matched furthest."""
    errors = found.errors(include_url=False, include_context=False)
    beside = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    first = max(beside, key=lambda error: (len(error["loc"]), not error["type"].endswith("_type")))
    known = {*kind.model_fields, *Message.model_fields, *TextPart.model_fields, *StreamOptions.model_fields}
    names = [str(name) for name in first["loc"] if isinstance(name, int) or name in known]
    where = ".".join(names)[:_SHOWN]
    value = "" if first["type"] == "missing" else f"found {shown(first['input'])}; "
    what = "Field required" if first["type"] == "missing" else first["msg"]
    hint = ". The model reads text only" if first["type"] == "literal_error" and names[-1] == "type" else ""
    return Refusal(400, f"{where or 'the body'}: {value}{what}{hint}", param=where or None)
