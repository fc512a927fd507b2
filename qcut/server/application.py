"""The application: OpenAI's interface over a scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import signature
from typing import Any, TypeVar, cast

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from qcut.engine.request import Listener, Request
from qcut.engine.scheduler import Scheduler
from qcut.errors import ConfigError, ConstraintError, QcutError, shown
from qcut.server import endpoints, page
from qcut.server.access_log import AccessLog
from qcut.server.answers import JSON, ChatCompletion, Completion, Form
from qcut.server.bodies import (
    MOST_NAME_CHARACTERS,
    AnyPrompt,
    Body,
    Chat,
    ChatBody,
    CompletionBody,
    Schema,
    Text,
    ToolFields,
    parsed,
)
from qcut.server.guards import BodyMemory, Hosts, Key, Refusals, body, host_name
from qcut.server.known_fields import UnknownFields
from qcut.server.limits.executors import LARGE_BYTES, Executors
from qcut.server.limits.prompts import PromptLimit
from qcut.server.logprobs import Vocabulary
from qcut.server.metrics import Metrics
from qcut.server.refusals import CLIENT_GONE, Refusal
from qcut.server.sending import Answer, EventStream, watched
from qcut.server.streams import Bridge, Stream
from qcut.server.structured import Asked
from qcut.server.tools.choice import PROMPT_TOKENS, Parsers, Parsing
from qcut.server.tools.requests import with_text_arguments, without_calls
from qcut.text.prompts import chat_ids, text_ids

MOST_SCORED = 1 << 21
"""Most log-probabilities of a request, which are in memory until it is answered: half a kilobyte each."""
B = TypeVar("B", bound=Schema)
Endpoint = Callable[[HTTPRequest], Awaitable[Response]]


@dataclass(frozen=True)
class Settings:
    """Options of a server.

    Attributes:
        name: name of the model.
        key: API key that clients must send; None: no key.
        hosts: further names by which clients on this machine may call the server (see `qcut.server.guards.Hosts`).
        origins: origins of other sites' pages that may use this server (CORS).
        most_body: largest request body in bytes.
        most_tokens: most new tokens of a sequence, whatever the request sets; None: only the context limits them.
        most_prompts: most prompts in a request.
        seconds: time within which a body must arrive.
        most_bodies: most bytes of all bodies in memory.
        any_model: whether requests may name any model.
        strict: whether unknown fields are refused; otherwise they are ignored and logged once.
        tool_parser: name of the parser of calls (see `qcut.server.tools.choice`).
        reasoning_parser: name of the parser of reasoning.

    Raises:
        ConfigError: the name is empty, or longer than a request may give it; the key is empty, or has surrounding
            spaces or characters that a header cannot hold; a host or an origin is malformed.
    """

    name: str
    key: str | None = None
    hosts: Collection[str] = ()
    origins: Collection[str] = ()
    most_body: int = 2 << 20
    most_tokens: int | None = None
    most_prompts: int = 1024
    seconds: float = 60
    most_bodies: int = 256 << 20
    any_model: bool = False
    strict: bool = False
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= MOST_NAME_CHARACTERS:
            raise ConfigError(f"--served-name {shown(self.name)}; allowed: 1 to {MOST_NAME_CHARACTERS} characters")
        key = self.key
        if key is not None and (not key or key != key.strip() or not key.isprintable()):
            raise ConfigError("the API key is empty, or has spaces at its ends or control characters; allowed: a key")
        for host in self.hosts:
            if not host or host_name(host) != host.lower():
                raise ConfigError(f"--allow-host {shown(host)}; allowed: a name without a port, such as proxy.example")
        for origin in self.origins:
            scheme, _, place = origin.partition("://")
            if origin != "*" and not (scheme and place and origin == origin.lower() and "/" not in place):
                raise ConfigError(
                    f"--allow-origin {shown(origin)}; allowed: a scheme, a name and a port, such as https://a.example"
                )


def application(scheduler: Scheduler, settings: Settings, metrics: Metrics | None = None) -> ASGIApp:
    """The ASGI application.

    Args:
        scheduler: over an engine with a tokenizer. The caller runs and closes it.
        settings: options of the server.
        metrics: counters shared with `qcut.server.running.server`; None makes new ones.

    Raises:
        ConfigError: parsers that do not exist, or do not go together.
    """
    service = Service(scheduler, settings, metrics or Metrics(scheduler))
    routes = [
        Route("/", service.page),
        Route("/health", service.health),
        Route("/metrics", service.metrics_text),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        *endpoints.routes(service),
    ]
    guards = [
        Middleware(AccessLog),
        Middleware(Refusals, metrics=service.metrics, bodies=service.bodies),
        Middleware(Hosts, allowed=settings.hosts),
        Middleware(Key, key=settings.key),
    ]
    if settings.origins:  # before the key: preflight requests carry none
        # Any header: browser clients send their own, such as x-stainless-os, and no header grants a right here.
        options: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["Retry-After"]}
        if "allow_private_network" in signature(CORSMiddleware).parameters:  # this machine's own addresses are one
            options["allow_private_network"] = True
        cors = Middleware(CORSMiddleware, allow_origins=list(settings.origins), **options)
        guards.insert(1, cors)  # outside of the error middleware, so that pages can read its responses
    handlers: dict[Any, Any] = {404: service.unknown, 405: service.unknown}
    return Starlette(routes=routes, middleware=guards, exception_handlers=handlers)


class Service:
    """Handlers of the main endpoints.

    Args:
        scheduler: see `application`.
        settings: see `application`.
        metrics: see `application`.
    """

    def __init__(self, scheduler: Scheduler, settings: Settings, metrics: Metrics) -> None:
        engine = scheduler.engine
        self.scheduler, self.settings, self.metrics = scheduler, settings, metrics
        self.bodies = BodyMemory(settings.most_bodies)
        metrics.body_bytes.set_function(lambda: self.bodies.held)
        self.vocabulary = Vocabulary(engine.tokenizer)
        self.unknown_fields = UnknownFields(settings.strict)
        template = getattr(engine.tokenizer, "chat_template", None)
        added: dict[str, int] = getattr(engine.tokenizer, "get_added_vocab", dict)()
        self._parsers = Parsers(template, settings.tool_parser, settings.reasoning_parser, added)
        self._rendered: set[str] = set()  # what the chat template is known to render
        self._created = int(time.time())
        self._bridge: Bridge | None = None
        self.executors = Executors()
        # The tokenizer's processes take seconds to start; they start before the first request.
        self.executors.prepare(partial(text_ids, engine.tokenizer, "a", engine.decoder.vocabulary))
        self._prompts = PromptLimit(engine.tokenizer, engine.decoder.vocabulary, engine.context)

    # ── model, health, metrics ────────────────────────────────────────────────────────────────────────────

    async def page(self, request: HTTPRequest) -> Response:
        """``/``: a page to chat with the model."""
        text, headers = page.document()
        return HTMLResponse(text, headers=headers)

    async def health(self, request: HTTPRequest) -> Response:
        """``/health``: 200 while the engine works."""
        if self.scheduler.error is not None:
            raise Refusal(503, "the engine has failed")
        return JSONResponse({"status": "ok"})

    async def metrics_text(self, request: HTTPRequest) -> Response:
        """``/metrics`` in Prometheus' text format."""
        return Response(self.metrics.text, media_type="text/plain; version=0.0.4")

    async def models(self, request: HTTPRequest) -> Response:
        """``/v1/models``."""
        return JSONResponse({"object": "list", "data": [self._model]})

    async def model(self, request: HTTPRequest) -> Response:
        """``/v1/models/{name}``."""
        self._check_name(request.path_params["name"])
        return JSONResponse(self._model)

    async def unknown(self, request: HTTPRequest, error: Any) -> Response:
        """404 and 405, with the allowed methods."""
        methods = (error.headers or {}).get("Allow")
        served = "GET /docs lists what is served" if methods is None else f"allowed: {methods}"
        message = f"{request.method} {request.url.path[:80]}: {error.detail}; {served}"
        raise Refusal(error.status_code, message, headers=error.headers)

    @cached_property
    def _model(self) -> JSON:
        engine = self.scheduler.engine
        return {
            "id": self.settings.name,
            "object": "model",
            "created": self._created,
            "owned_by": "qcut",
            "max_model_len": engine.context,
            "chat": bool(getattr(engine.tokenizer, "chat_template", None)),
        }

    def _check_name(self, name: str | None) -> None:
        if name not in (None, self.settings.name) and not self.settings.any_model:
            allowed = f"allowed: {self.settings.name!r}, or any name if the server runs with --any-model"
            message = f"model {name[:80]!r}; {allowed}"
            raise Refusal(404, message, param="model", code="model_not_found")

    # ── completions ──────────────────────────────────────────────────────────────────────────────

    async def completions(self, request: HTTPRequest) -> Response:
        """``/v1/completions``."""
        given = await self.read(request, CompletionBody)
        return await self.answer(request, given, Completion(self.name_for(given)))

    async def chat(self, request: HTTPRequest) -> Response:
        """``/v1/chat/completions``."""
        given = await self.read(request, ChatBody)
        return await self.answer(request, given, ChatCompletion(self.name_for(given), self.parsing(given)))

    def parsing(self, given: ToolFields) -> Parsing | None:
        """How to parse the answers to a request.

        Raises:
            Refusal: see `Parsers.of`.
        """
        return self._parsers.of(given.calling)

    def name_for(self, given: Body) -> str:
        """The model's name in the response: the name in the request, if any."""
        return given.model or self.settings.name

    async def read(self, request: HTTPRequest, kind: type[B]) -> B:
        """Read and validate the body of a request.

        Raises:
            Refusal: see `body` and `parsed`; or the request names another model.
        """
        settings = self.settings
        data = await body(
            request.scope, request.receive, most=settings.most_body, seconds=settings.seconds, memory=self.bodies
        )
        parse = partial(parsed, kind, data, self.unknown_fields)
        given = parse() if len(data) < LARGE_BYTES else await self.executors.run(len(data), parse)
        self._check_name(getattr(given, "model", None))
        request.state.body_bytes = len(data)
        return given

    async def ids(self, request: HTTPRequest, prompt: AnyPrompt) -> list[int]:
        """The token ids of a prompt, computed in another thread.

        Raises:
            Refusal: the tokenizer or its template does not take the prompt.
        """
        try:
            return await self.executors.run(request.state.body_bytes, partial(self._ids, prompt))
        except QcutError as error:
            field = (ChatBody if isinstance(prompt, Chat) else CompletionBody).PROMPT
            raise Refusal.of(error, self.scheduler.engine.context, field) from error

    def _ids(self, prompt: AnyPrompt, where: str = ChatBody.PROMPT) -> list[int]:
        engine = self.scheduler.engine
        tokenizer, vocabulary = engine.tokenizer, engine.decoder.vocabulary
        if isinstance(prompt, Text):
            return text_ids(tokenizer, prompt.text, vocabulary, add_special_tokens=prompt.add_special_tokens)
        if not isinstance(prompt, Chat):
            return prompt
        ids = self._chat_ids(prompt)
        has_calls = any("tool_calls" in message for message in prompt.messages)
        for field, is_given, without in (
            ("tools", bool(prompt.tools), replace(prompt, tools=())),
            ("tool_calls", has_calls, replace(prompt, messages=without_calls(prompt.messages))),
        ):
            if is_given and field not in self._rendered:
                if self._is_rendered_as(without, ids):
                    message = f"{field}: the chat template of this model ignores them; allowed: none"
                    param = field if field == "tools" else f"{where}.{field}"
                    raise Refusal(400, message, param=param, code="unsupported")
                self._rendered.add(field)
        return ids

    def _is_rendered_as(self, chat: Chat, ids: list[int]) -> bool:
        try:
            return self._chat_ids(chat) == ids
        except ConfigError:  # a template may refuse results without calls
            return False

    def _chat_ids(self, chat: Chat) -> list[int]:
        engine = self.scheduler.engine

        def rendered(messages: list[JSON]) -> list[int]:
            return chat_ids(
                engine.tokenizer,
                messages,
                engine.decoder.vocabulary,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                add_special_tokens=chat.add_special_tokens,
                variables=chat.variables,
                tools=chat.tools,
            )

        try:
            return rendered(chat.messages)
        except ConfigError:
            texts = with_text_arguments(chat.messages)  # some templates take no objects
            if texts == chat.messages:
                raise
            with suppress(ConfigError):
                return rendered(texts)
            raise

    async def answer(self, request: HTTPRequest, given: Body, form: Form) -> Response:
        """Generate text and respond in the endpoint's format."""
        loop = asyncio.get_running_loop()
        if self._bridge is None:
            self._bridge = Bridge(loop)
        stream = Stream(self._bridge, given.n)
        stops = given.stops(self.scheduler.engine.end_tokens)
        answer = Answer(given, form, stream, stops, self.vocabulary, self.metrics, self.executors)
        submit = partial(self._submit, stream, given, form)
        constrains = given.constraint is not None or (isinstance(given, ToolFields) and given.calling.is_forced)
        try:
            async with watched(request.receive, stream):
                await self.executors.run(request.state.body_bytes, submit, constrains=constrains)
        except QcutError as error:
            raise Refusal.of(error, self.scheduler.engine.context, given.PROMPT) from error
        if stream.is_left:
            raise Refusal(CLIENT_GONE, "the client has gone", code="cancelled")
        request.state.requests = stream.requests
        if given.stream:
            return EventStream(stream, answer.chunks())
        async with watched(request.receive, stream):
            return await answer.complete()

    def _submit(self, stream: Stream, given: Body, form: Form) -> None:
        sampling, stops = given.sampling, given.stops(self.scheduler.engine.end_tokens)
        limits = [limit for limit in (given.most, self.settings.most_tokens) if limit is not None]
        most, batch = min(limits, default=None), self.scheduler.engine.batch
        context = self.scheduler.engine.context
        if given.n > batch:
            raise Refusal(400, f"n: found {given.n}; allowed: 1 to {batch}, the sequences that run at once", param="n")
        if most is not None and (given.min_tokens or 0) > most:
            message = f"min_tokens: found {given.min_tokens}; allowed: 0 to {most}, the most new tokens"
            raise Refusal(400, message, param="min_tokens")
        prompts, most_prompts = given.prompts, self.settings.most_prompts
        if len(prompts) > most_prompts:
            raise Refusal(400, f"{len(prompts)} prompts; allowed: {most_prompts}", param="prompt")
        scores_prompts = given.echoes and (given.top is not None or most == 0)
        scored = 0
        for prompt in prompts:
            if stream.is_left:
                return
            self._prompts.check(prompt)
            ids = self._ids(prompt, given.PROMPT)
            new = 0 if given.top is None else given.n * min(context if most is None else most, context)
            scored += (new + len(ids) * scores_prompts) * (1 + (given.top or 0))
            if scored > MOST_SCORED:
                what = "in all prompts and samples, of tokens and their likeliest alternatives"
                message = f"logprobs: {scored} and more {what}; allowed: {MOST_SCORED}"
                raise Refusal(400, message, param="logprobs")
            if form.kept:
                form.prompt_end = self.vocabulary.decode(ids[-PROMPT_TOKENS:], skip_special_tokens=False)
            asked = form.asked(given.constraint)

            def submit(samples: int, listener: Listener, ids: list[int], asked: Asked | None) -> list[Request]:
                return self.scheduler.submit_samples(
                    ids,
                    samples,
                    most,
                    sampling=sampling,
                    stop=stops,
                    min_new_tokens=given.min_tokens,
                    skip_special_tokens=given.skip_special_tokens,
                    keep_special_tokens=form.kept,
                    constraint=None if asked is None else asked.constraint,
                    top=given.top,
                    prompt_top=(given.top or 0) if scores_prompts else None,
                    speculate=given.speculate,
                    listener=listener,
                )

            try:
                stream.submit(partial(submit, ids=ids, asked=asked))
            except ConstraintError as error:
                raise cast(Asked, asked).refusal(error) from error
