"""The application: OpenAI's interface over a scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from time import perf_counter
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from qcut.engine.generated import Event
from qcut.engine.request import Listener, Request
from qcut.engine.scheduler import Scheduler
from qcut.engine.text.prompts import chat_ids, text_ids
from qcut.errors import ConfigError, QcutError
from qcut.server import endpoints, page
from qcut.server.access_log import AccessLog
from qcut.server.answers import JSON, ChatCompletion, Completion, Form, finish_reason, usage
from qcut.server.bodies import AnyPrompt, Body, Chat, ChatBody, CompletionBody, Schema, StreamOptions, Text, parsed
from qcut.server.guards import BodyMemory, Hosts, Key, Refusals, body
from qcut.server.known_fields import UnknownFields
from qcut.server.limits.executors import LARGE_BYTES, Executors
from qcut.server.limits.prompts import PromptLimit
from qcut.server.logprobs import CONTEXT, Scored, Vocabulary, continued
from qcut.server.metrics import Metrics
from qcut.server.refusals import Refusal
from qcut.server.streams import Bridge, Stream

_log = logging.getLogger("qcut")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

CLIENT_GONE = 499
"""Status, in the log of figures alone, of an answer that nobody is there to take; proxies use the same."""
_MANY_TOKENS = 512
"""Tokens whose texts the event loop decodes at most for one request at a time."""
B = TypeVar("B", bound=Schema)
T = TypeVar("T")
Endpoint = Callable[[HTTPRequest], Awaitable[Response]]


@dataclass(frozen=True)
class Settings:
    """What a server is told.

    Attributes:
        name: under which the model is served.
        key: that clients have to give; None: none.
        hosts: further names by which clients on this machine may call the server (see `qcut.server.guards.Hosts`).
        origins: of pages elsewhere that may use this server.
        most_body: bytes of a request's body.
        most_tokens: new tokens of a sequence, whatever is asked for; None: the context alone is the limit.
        most_prompts: of a request.
        seconds: in which a body has to come.
        most_bodies: bytes of all bodies that are held at once.
        any_model: whether clients may give the model any name.
        strict: whether fields that nobody knows are refused; otherwise they are ignored, and logged once.

    Raises:
        ConfigError: a key that is empty, or has spaces at its ends or characters that no header may have.
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

    def __post_init__(self) -> None:
        key = self.key
        if key is not None and (not key or key != key.strip() or not key.isprintable()):
            raise ConfigError("the API key is empty, or has spaces at its ends or control characters; allowed: a key")


def application(scheduler: Scheduler, settings: Settings, metrics: Metrics | None = None) -> ASGIApp:
    """The application, for any server of ASGI.

    Args:
        scheduler: over an engine with a tokenizer. Run and closed by the caller.
        settings: what to serve, to whom.
        metrics: of the scheduler; `qcut.server.running.server` counts in them, too. None makes some.
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
    if settings.origins:  # before the key: browsers ask for leave without one
        # Any header: clients for browsers send their own, such as x-stainless-os, and a header gives no right here.
        cors = Middleware(
            CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["*"], allow_headers=["*"]
        )
        guards.insert(1, cors)  # before refusals, which a page sees then
    handlers: dict[Any, Any] = {404: service.unknown, 405: service.unknown}
    return Starlette(routes=routes, middleware=guards, exception_handlers=handlers)


class Service:
    """Answers requests.

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
        self._created = int(time.time())
        self._bridge: Bridge | None = None
        self.executors = Executors()
        # Processes of the tokenizer take seconds to start; the first clients shall not wait for them.
        self.executors.prepare(partial(text_ids, engine.tokenizer, "a", engine.decoder.vocabulary))
        self._prompts = PromptLimit(engine.tokenizer, engine.decoder.vocabulary, engine.context)

    # ── what is small ────────────────────────────────────────────────────────────────────────────

    async def page(self, request: HTTPRequest) -> Response:
        """The page to chat with the model."""
        text, headers = page.document()
        return HTMLResponse(text, headers=headers)

    async def health(self, request: HTTPRequest) -> Response:
        """Whether requests are served."""
        if self.scheduler.error is not None:
            raise Refusal(503, "the engine has failed")
        return JSONResponse({"status": "ok"})

    async def metrics_text(self, request: HTTPRequest) -> Response:
        """Figures for Prometheus."""
        return Response(self.metrics.text, media_type="text/plain; version=0.0.4")

    async def models(self, request: HTTPRequest) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model]})

    async def model(self, request: HTTPRequest) -> Response:
        """The model by its name."""
        self._check_name(request.path_params["name"])
        return JSONResponse(self._model)

    async def unknown(self, request: HTTPRequest, error: Any) -> Response:
        """Refuse a path that nobody knows, or a method that it has not."""
        served = "; GET /docs lists what is served" if error.status_code == 404 else ""
        message = f"{request.method} {request.url.path[:80]}: {error.detail}{served}"
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
            allowed = f"allowed: {self.settings.name!r}, or any name where the server runs with --any-model"
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
        return await self.answer(request, given, ChatCompletion(self.name_for(given)))

    def name_for(self, given: Body) -> str:
        """The model's name in an answer: as the client gives it."""
        return given.model or self.settings.name

    async def read(self, request: HTTPRequest, kind: type[B]) -> B:
        """The body of a request.

        Raises:
            Refusal: as `body` and `parsed`; or another model.
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
        """The token ids of a prompt, which another thread finds.

        Raises:
            Refusal: the tokenizer or its template does not take the prompt.
        """
        try:
            return await self.executors.run(request.state.body_bytes, partial(self._ids, prompt))
        except QcutError as error:
            raise Refusal.of(error, self.scheduler.engine.context) from error

    def _ids(self, prompt: AnyPrompt) -> list[int]:
        engine = self.scheduler.engine
        tokenizer, vocabulary = engine.tokenizer, engine.decoder.vocabulary
        if isinstance(prompt, Text):
            return text_ids(tokenizer, prompt.text, vocabulary, add_special_tokens=prompt.add_special_tokens)
        if not isinstance(prompt, Chat):
            return prompt
        return chat_ids(
            tokenizer,
            prompt.messages,
            vocabulary,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            add_special_tokens=prompt.add_special_tokens,
            variables=prompt.variables,
        )

    async def answer(self, request: HTTPRequest, given: Body, form: Form) -> Response:
        """The answer to a request for text, in a form."""
        loop = asyncio.get_running_loop()
        if self._bridge is None:
            self._bridge = Bridge(loop)
        stream = Stream(self._bridge, given.n)
        answer = _Answer(self, given, form, stream)
        try:
            async with _watched(request.receive, stream):
                await self.executors.run(request.state.body_bytes, partial(self._submit, stream, given))
        except QcutError as error:
            param = "prompt" if isinstance(given, CompletionBody) else "messages"
            raise Refusal.of(error, self.scheduler.engine.context, param) from error
        if stream.is_left:
            raise Refusal(CLIENT_GONE, "the client has gone", code="cancelled")
        request.state.requests = stream.requests
        if given.stream:
            return _EventStream(stream, answer.pieces())
        async with _watched(request.receive, stream):
            return await answer.whole()

    def _submit(self, stream: Stream, given: Body) -> None:
        sampling, stops = given.sampling, given.stops(self.scheduler.engine.end_tokens)
        limits = [limit for limit in (given.most, self.settings.most_tokens) if limit is not None]
        most = min(limits, default=None)
        prompts, most_prompts = given.prompts, self.settings.most_prompts
        if len(prompts) > most_prompts:
            raise Refusal(400, f"{len(prompts)} prompts; allowed: {most_prompts}", param="prompt")
        scores_prompts = given.echoes and (given.top is not None or most == 0)
        for prompt in prompts:
            if stream.is_left:
                return
            self._prompts.check(prompt)

            def submit(samples: int, listener: Listener, ids: list[int]) -> list[Request]:
                return self.scheduler.submit_samples(
                    ids,
                    samples,
                    most,
                    sampling=sampling,
                    stop=stops,
                    min_new_tokens=given.min_tokens,
                    skip_special_tokens=given.skip_special_tokens,
                    top=given.top,
                    prompt_top=(given.top or 0) if scores_prompts else None,
                    listener=listener,
                )

            stream.submit(partial(submit, ids=self._ids(prompt)))


class _Answer:
    """The answer to one request.

    Args:
        service: that answers.
        given: the request.
        form: of the answer.
        stream: what comes for the request.
    """

    def __init__(self, service: Service, given: Body, form: Form, stream: Stream) -> None:
        self._given, self._form, self._stream = given, form, stream
        self._vocabulary, self._stops = service.vocabulary, given.stops(service.scheduler.engine.end_tokens)
        self._metrics, self._executors = service.metrics, service.executors
        self._watch = service.metrics.watch()
        self._scored: dict[int, Scored] = {}

    async def whole(self) -> Response:
        """The answer at once.

        Raises:
            Refusal: the engine has failed, the server closes, or the client has gone.
        """
        seen: list[tuple[int, Event]] = []
        async for come in self._stream.events():
            seen += self._seen(come)
        return await self._made(seen, partial(self._assembled, seen))

    def _assembled(self, seen: list[tuple[int, Event]]) -> Response:
        count = len(self._stream.requests)
        texts = [[self._begin(i)] for i in range(count)]
        reasons: list[str | None] = [None] * count
        for choice, event in seen:
            texts[choice].append(event.text or "")
            self._score(choice, event)
            reasons[choice] = finish_reason(event)
            if event.reason == "stop":
                texts[choice].append(self._ending(choice, len("".join(texts[choice][1:]))))
        choices = [
            {**self._form.choice(i, "".join(texts[i]), self._scored.get(i), reasons[i]), **self._more_of(i)}
            for i in range(count)
        ]
        return JSONResponse(self._form.whole(choices, self._usage))

    async def _made(self, seen: list[tuple[int, Event]], make: Callable[[], T]) -> T:
        """What a function makes of events; made in another thread if it decodes many tokens."""
        given, requests = self._given, self._stream.requests
        each = 1 + (given.top or 0)
        work = len(seen) * each
        if given.echoes:
            work += each * sum(len(requests[i].prompt) for i in {i for i, _ in seen if i not in self._scored})
        if given.include_stop_str_in_output:
            work += sum(len(requests[i].tokens) for i, event in seen if event.reason == "stop")
        return make() if work <= _MANY_TOKENS else await self._executors.run(LARGE_BYTES, make)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The answer as it comes: server-sent events."""
        form, options = self._form, self._given.stream_options or StreamOptions()
        counts = options.include_usage or options.continuous_usage_stats

        def sent(value: JSON) -> bytes:
            if not counts:
                return _sent(value)
            return _sent({**value, "usage": self._usage if options.continuous_usage_stats else None})

        try:
            count = len(self._stream.requests)

            def beginnings() -> list[str]:
                return [self._begin(index) for index in range(count)]

            texts = await self._executors.run(LARGE_BYTES, beginnings) if self._given.echoes else beginnings()
            for index, text in enumerate(texts):
                for value in form.begin(index, text):
                    yield sent(value)
            lengths: dict[int, int] = {}
            async for come in self._stream.events():
                seen = self._seen(come)
                if not seen:
                    yield b": waiting\n\n"
                for piece in await self._made(seen, partial(self._parts, seen, lengths, sent)):
                    yield piece
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # a tokenizer's panic is no Exception
            self._stream.cancel()
            if not isinstance(error, Refusal):
                _log.exception("a fault in the server, within a stream")
            refusal = error if isinstance(error, Refusal) else Refusal.of_fault(error)
            self._metrics.refused(refusal.status)
            for value in form.failed(refusal):
                yield _sent(value)
            return
        for value in form.end(self._usage):
            yield _sent(value)
        if options.include_usage:
            yield _sent({**form.piece([]), "usage": self._usage})
        if form.END:
            yield form.END

    def _parts(
        self, seen: list[tuple[int, Event]], lengths: dict[int, int], sent: Callable[[JSON], bytes]
    ) -> list[bytes]:
        """Pieces with what has come.

        Args:
            seen: what has come.
            lengths: characters of each choice so far, which are counted on.
            sent: writes a piece.
        """
        texts: dict[int, list[str]] = {}
        tokens: dict[int, list[int]] = {}
        reasons: dict[int, str | None] = {}
        for choice, event in seen:
            text = event.text or ""
            lengths[choice] = lengths.get(choice, 0) + len(text)
            if event.reason == "stop":
                text += self._ending(choice, lengths[choice])
            texts.setdefault(choice, []).append(text)
            tokens.setdefault(choice, []).extend(() if event.token is None else (event.token,))
            reasons[choice] = finish_reason(event)
            self._score(choice, event)
        pieces: list[bytes] = []
        for choice, parts in texts.items():
            text, scored = "".join(parts), self._scored.get(choice)
            found = None if scored is None else scored.take()
            has_ids = self._given.return_token_ids and tokens[choice]
            if text or reasons[choice] is not None or (found is not None and found.rows) or has_ids:
                more = {"token_ids": tokens[choice]} if self._given.return_token_ids else {}
                pieces += map(sent, self._form.pieces(choice, text, found, reasons[choice], more))
        return pieces

    def _seen(self, come: list[tuple[int, Event]]) -> list[tuple[int, Event]]:
        """Measure events, and look whether one is an end without an answer."""
        now = perf_counter()
        for choice, event in come:
            self._watch.take(choice, event, now)
            if event.reason == "failed":
                failure = self._stream.requests[choice].error or "the request has failed"
                raise Refusal(500, str(failure)[:500], code="failed")
            if event.reason == "cancelled" and self._stream.is_left:
                raise Refusal(CLIENT_GONE, "the client has gone", code="cancelled")
            if event.reason == "cancelled":
                raise Refusal(503, "the request has been cancelled: the server closes", code="cancelled")
        return come

    def _begin(self, choice: int) -> str:
        """The text before a choice's first token: its prompt's, where that is asked for."""
        if not self._given.echoes:
            return ""
        prompt = self._given.prompts[choice // self._given.n]
        ids = self._stream.requests[choice].prompt
        return prompt.text if isinstance(prompt, Text) else self._vocabulary.decode(ids, skip_special_tokens=False)

    def _score(self, choice: int, event: Event) -> None:
        """Take the log-probabilities of an event, after those of the prompt where these are asked for."""
        given, request = self._given, self._stream.requests[choice]
        if given.top is None:
            return
        scored = self._scored.get(choice)
        if scored is None:
            scored = self._scored[choice] = Scored(
                self._vocabulary,
                () if given.echoes else request.prompt[-CONTEXT:],
                skip_special_tokens=given.skip_special_tokens,
                names_ids=given.return_tokens_as_token_ids,
            )
            if given.echoes:
                for token, found in zip(request.prompt, (None, *(request.prompt_log_probabilities or ())), strict=True):
                    scored.add(token, found)
        if event.token is not None and event.log_probability is not None:
            scored.add(event.token, event.log_probability, is_last=event.reason is not None)

    def _ending(self, choice: int, length: int) -> str:
        """The stop string, or the stop token's text, after so many characters, where it is asked for."""
        given, request = self._given, self._stream.requests[choice]
        if not given.include_stop_str_in_output:
            return ""
        rest = continued(self._vocabulary, request.prompt, request.tokens, given.skip_special_tokens)[length:]
        if request.tokens[-1] in self._stops:
            return rest
        return min((stop for stop in given.stop_strings if rest.startswith(stop)), key=len, default="")

    def _more_of(self, choice: int) -> JSON:
        """The ids of a whole choice, where they are asked for."""
        request = self._stream.requests[choice]
        if not self._given.return_token_ids:
            return {}
        return {"token_ids": request.tokens, "prompt_token_ids": list(request.prompt)}

    @property
    def _usage(self) -> JSON:
        return usage(self._stream.requests, self._given.n)


class _EventStream(Response):
    """Server-sent events; a client that goes ends what it asked for."""

    media_type = "text/event-stream"

    def __init__(self, stream: Stream, pieces: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._stream, self._pieces = stream, pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        async with _watched(receive, self._stream):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.asynccontextmanager
async def _watched(receive: Receive, stream: Stream) -> AsyncIterator[None]:
    """Cancel a stream at once when its client goes, and when the block fails."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        stream.leave()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    except BaseException:
        stream.cancel()
        raise
    finally:
        watcher.cancel()


def _sent(value: JSON) -> bytes:
    """A server-sent event, which has a name where its value has a type."""
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {_encode(value)}\n\n".encode(errors="replace")
