"""The application: OpenAI's interface over a scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from re import DOTALL, search
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
from qcut.engine.scheduler import Prompt, Scheduler
from qcut.errors import ConfigError, QcutError
from qcut.server.answers import JSON, ChatCompletion, Completion, Form, Scored, finish_reason, usage
from qcut.server.bodies import Body, ChatBody, CompletionBody, parsed
from qcut.server.executors import LARGE_BYTES, Executors
from qcut.server.guards import BodyMemory, Hosts, Key, Refusals, body
from qcut.server.limits import PromptLimit
from qcut.server.metrics import Metrics
from qcut.server.refusals import Refusal
from qcut.server.streams import Bridge, Stream

_log = logging.getLogger("qcut")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

CLIENT_GONE = 499
"""Status, in the log of figures alone, of an answer that nobody is there to take; proxies use the same."""
B = TypeVar("B", bound=Body)
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
    ]
    guards = [
        Middleware(Refusals, metrics=service.metrics, bodies=service.bodies),
        Middleware(Hosts, allowed=settings.hosts),
        Middleware(Key, key=settings.key),
    ]
    if settings.origins:  # before the key: browsers ask for leave without one
        headers = ["Authorization", "Content-Type"]
        cors = Middleware(
            CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["*"], allow_headers=headers
        )
        guards.insert(0, cors)  # refusals have its headers: a page sees them
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
        self.scheduler, self.settings, self.metrics = scheduler, settings, metrics
        self.bodies = BodyMemory(settings.most_bodies)
        self._created = int(time.time())
        self._bridge: Bridge | None = None
        self._executors = Executors()
        self._prompts = PromptLimit(scheduler.engine.tokenizer, scheduler.engine.context)

    # ── what is small ────────────────────────────────────────────────────────────────────────────

    async def page(self, request: HTTPRequest) -> Response:
        """The page to chat with the model."""
        return HTMLResponse(*_page())

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
        message = f"{request.method} {request.url.path[:80]}: {error.detail}"
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
        if name not in (None, self.settings.name):
            message = f"model {name[:80]!r}; allowed: {self.settings.name!r}"
            raise Refusal(404, message, param="model", code="model_not_found")

    # ── completions ──────────────────────────────────────────────────────────────────────────────

    async def completions(self, request: HTTPRequest) -> Response:
        """``/v1/completions``."""
        given = await self._read(request, CompletionBody)
        if given.echo and given.logprobs is not None:
            raise Refusal(400, "echo with logprobs; allowed: one of them", param="echo", code="unsupported")
        return await self._answer(request, given, Completion(self.settings.name))

    async def chat(self, request: HTTPRequest) -> Response:
        """``/v1/chat/completions``."""
        given = await self._read(request, ChatBody)
        return await self._answer(request, given, ChatCompletion(self.settings.name))

    async def _read(self, request: HTTPRequest, kind: type[B]) -> B:
        settings = self.settings
        data = await body(
            request.scope, request.receive, most=settings.most_body, seconds=settings.seconds, memory=self.bodies
        )
        if len(data) < LARGE_BYTES:
            given = parsed(kind, data)
        else:
            given = await self._executors.run(len(data), lambda: parsed(kind, data))
        self._check_name(given.model)
        return given

    async def _answer(self, request: HTTPRequest, given: Body, form: Form) -> Response:
        loop = asyncio.get_running_loop()
        if self._bridge is None:
            self._bridge = Bridge(loop)
        stream = Stream(self._bridge, given.n)
        answer = _Answer(self, given, form, stream)
        try:
            async with _watched(request.receive, stream):
                size = int(request.headers.get("content-length", LARGE_BYTES))
                await self._executors.run(size, lambda: self._submit(stream, given))
        except QcutError as error:
            raise Refusal.of(error) from error
        if stream.is_left:
            raise Refusal(CLIENT_GONE, "the client has gone", code="cancelled")
        if given.stream:
            return _EventStream(stream, answer.pieces())
        async with _watched(request.receive, stream):
            return JSONResponse(await answer.whole())

    def _submit(self, stream: Stream, given: Body) -> None:
        sampling, stops = given.sampling, given.stops(self.scheduler.engine.end_tokens)
        limits = [limit for limit in (given.most, self.settings.most_tokens) if limit is not None]
        most = min(limits, default=None)
        prompts, most_prompts = given.prompts, self.settings.most_prompts
        if len(prompts) > most_prompts:
            raise Refusal(400, f"{len(prompts)} prompts; allowed: {most_prompts}", param="prompt")
        for prompt in prompts:
            if stream.is_left:
                return
            self._prompts.check(prompt)

            def submit(samples: int, listener: Listener, prompt: Prompt = prompt) -> list[Request]:
                return self.scheduler.submit_samples(
                    prompt, samples, most, sampling=sampling, stop=stops, top=given.top, listener=listener
                )

            stream.submit(submit)


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
        self._tokenizer = service.scheduler.engine.tokenizer
        self._metrics = service.metrics
        self._watch = service.metrics.watch()

    async def whole(self) -> JSON:
        """The answer at once.

        Raises:
            Refusal: the engine has failed, the server closes, or the client has gone.
        """
        count = len(self._stream.requests)
        texts, scored = [[self._begin(i)] for i in range(count)], self._scores(count)
        reasons: list[str | None] = [None] * count
        async for come in self._stream.events():
            for choice, event in self._seen(come):
                texts[choice].append(event.text or "")
                if scored is not None and event.token is not None and event.log_probability is not None:
                    scored[choice].add(event.token, event.log_probability)
                reasons[choice] = finish_reason(event)
        choices = [
            self._form.choice(i, "".join(texts[i]), None if scored is None else scored[i], reasons[i])
            for i in range(count)
        ]
        return self._form.whole(choices, usage(self._stream.requests, self._given.n))

    async def pieces(self) -> AsyncIterator[bytes]:
        """The answer as it comes: server-sent events."""
        form, count = self._form, len(self._stream.requests)
        options = self._given.stream_options
        counts = options is not None and options.include_usage
        empty: JSON = {"usage": None} if counts else {}
        for index in range(count):
            if (first := form.first(index, self._begin(index))) is not None:
                yield _sent({**form.piece([first]), **empty})
        try:
            async for choices in self._parts(self._scores(count)):
                yield _sent({**form.piece(choices), **empty}) if choices else b": waiting\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # a tokenizer's panic is no Exception
            self._stream.cancel()
            if not isinstance(error, Refusal):
                _log.exception("a fault in the server, within a stream")
            refusal = error if isinstance(error, Refusal) else Refusal.of_fault(error)
            self._metrics.refused(refusal.status)
            yield _sent(refusal.body)
            return
        if counts:
            yield _sent({**form.piece([]), "usage": usage(self._stream.requests, self._given.n)})
        yield b"data: [DONE]\n\n"

    async def _parts(self, scored: list[Scored] | None) -> AsyncIterator[list[JSON]]:
        """Choices with what has come since, one at a time. Empty: nothing for a while."""
        async for come in self._stream.events():
            if not come:
                yield []
            texts: dict[int, list[str]] = {}
            reasons: dict[int, str | None] = {}
            for choice, event in self._seen(come):
                texts.setdefault(choice, []).append(event.text or "")
                reasons[choice] = finish_reason(event)
                if scored is not None and event.token is not None and event.log_probability is not None:
                    scored[choice].add(event.token, event.log_probability)
            for choice, parts in texts.items():
                text, found = "".join(parts), None if scored is None else scored[choice].take()
                if text or reasons[choice] is not None or (found is not None and found.tokens):
                    yield [self._form.part(choice, text, found, reasons[choice])]

    def _seen(self, come: list[tuple[int, Event]]) -> list[tuple[int, Event]]:
        """Measure events, and look whether one is an end without an answer."""
        now = perf_counter()
        for choice, event in come:
            self._watch.take(choice, event, now)
            if event.reason == "failed":
                raise Refusal(500, "the engine has failed", code="failed")
            if event.reason == "cancelled" and self._stream.is_left:
                raise Refusal(CLIENT_GONE, "the client has gone", code="cancelled")
            if event.reason == "cancelled":
                raise Refusal(503, "the request has been cancelled: the server closes", code="cancelled")
        return come

    def _begin(self, choice: int) -> str:
        """The text before a choice's first token: its prompt's, where that is asked for."""
        if not isinstance(self._given, CompletionBody) or not self._given.echo:
            return ""
        prompt: Any = self._given.prompts[choice // self._given.n]
        return prompt if isinstance(prompt, str) else str(self._tokenizer.decode(prompt))

    def _scores(self, count: int) -> list[Scored] | None:
        return None if self._given.top is None else [Scored(self._tokenizer) for _ in range(count)]


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
    """A server-sent event."""
    return f"data: {_encode(value)}\n\n".encode(errors="replace")


@cache
def _page() -> tuple[str, int, dict[str, str]]:
    """The page, its status, and headers that let it load nothing from elsewhere."""
    text = resources.files("qcut.server").joinpath("page.html").read_text(encoding="utf-8")
    allowed = {}
    for kind in ("style", "script"):
        found = search(f"<{kind}>(.*?)</{kind}>", text, DOTALL)
        assert found is not None
        allowed[kind] = b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{allowed['style']}'; script-src 'sha256-{allowed['script']}'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return text, 200, headers
