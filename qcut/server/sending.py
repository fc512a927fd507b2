"""Sends the response to a request, complete or as server-sent events, while the client is connected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from time import perf_counter
from typing import TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from qcut.engine.sequence import Event
from qcut.server.answers import JSON, Form, finish_reason, usage
from qcut.server.bodies import Body, StreamOptions, Text
from qcut.server.limits.executors import LARGE_BYTES, Executors
from qcut.server.logprobs import CONTEXT, Scored, Vocabulary, continued
from qcut.server.metrics import Metrics
from qcut.server.refusals import CLIENT_GONE, Refusal
from qcut.server.streams import Stream

_log = logging.getLogger("qcut")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Characters that end a line for clients that split as `str.splitlines` does; JSON escapes the others of their kind."""
_MANY_TOKENS = 512
"""Most tokens that the event loop decodes at once for one request; more go to another thread."""
T = TypeVar("T")


class Answer:
    """The response to one generating request.

    Args:
        given: the request.
        form: format of the response.
        stream: events of the request's sequences.
        stops: stop tokens and stop strings.
        vocabulary: texts of tokens.
        metrics: counters.
        executors: threads for long responses.
    """

    def __init__(
        self,
        given: Body,
        form: Form,
        stream: Stream,
        stops: list[int | str],
        vocabulary: Vocabulary,
        metrics: Metrics,
        executors: Executors,
    ) -> None:
        self._given, self._form, self._stream = given, form, stream
        self._stops, self._vocabulary, self._metrics, self._executors = stops, vocabulary, metrics, executors
        self._watch = metrics.watch()
        self._scored: dict[int, Scored] = {}

    async def complete(self) -> Response:
        """The complete response.

        Raises:
            Refusal: the engine failed, the server is shutting down, or the client disconnected.
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
        return JSONResponse(self._form.complete(choices, self._usage))

    async def _made(self, seen: list[tuple[int, Event]], make: Callable[[], T]) -> T:
        """Call a function on events, in another thread if it decodes many tokens."""
        given, requests = self._given, self._stream.requests
        each = 1 + (given.top or 0)
        work = len(seen) * each
        if given.echoes:
            work += each * sum(len(requests[i].prompt) for i in {i for i, _ in seen if i not in self._scored})
        if given.include_stop_str_in_output:
            work += sum(len(requests[i].tokens) for i, event in seen if event.reason == "stop")
        return make() if work <= _MANY_TOKENS else await self._executors.run(LARGE_BYTES, make)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        form, options = self._form, self._given.stream_options or StreamOptions()
        counts = options.include_usage or options.continuous_usage_stats

        def sent(value: JSON) -> bytes:
            if not counts:
                return _sent(value)
            return _sent({**value, "usage": self._usage if options.continuous_usage_stats else None})

        try:
            count = len(self._stream.requests)

            def first_texts() -> list[str]:
                return [self._begin(index) for index in range(count)]

            texts = await self._executors.run(LARGE_BYTES, first_texts) if self._given.echoes else first_texts()
            for index, text in enumerate(texts):
                for value in form.begin(index, text):
                    yield sent(value)
            lengths: dict[int, int] = {}
            async for come in self._stream.events():
                seen = self._seen(come)
                if not seen:
                    yield b": waiting\n\n"
                for chunk in await self._made(seen, partial(self._parts, seen, lengths, sent)):
                    yield chunk
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
        for value in form.counted(self._usage) if options.include_usage else ():
            yield _sent(value)
        if form.END:
            yield form.END

    def _parts(
        self, seen: list[tuple[int, Event]], lengths: dict[int, int], sent: Callable[[JSON], bytes]
    ) -> list[bytes]:
        """Chunks for new events.

        Args:
            seen: new events and their choices.
            lengths: characters of each choice so far; updated.
            sent: encodes a chunk.
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
        chunks: list[bytes] = []
        for choice, parts in texts.items():
            text, scored = "".join(parts), self._scored.get(choice)
            found = None if scored is None else scored.take()
            has_ids = self._given.return_token_ids and tokens[choice]
            if text or reasons[choice] is not None or (found is not None and found.rows) or has_ids:
                more = {"token_ids": tokens[choice]} if self._given.return_token_ids else {}
                chunks += map(sent, self._form.chunks(choice, text, found, reasons[choice], more))
        return chunks

    def _seen(self, come: list[tuple[int, Event]]) -> list[tuple[int, Event]]:
        """Measure events; raise for a sequence that failed or was cancelled."""
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
        """The text before a choice's first token: the prompt if ``echo`` is set."""
        if not self._given.echoes:
            return ""
        prompt = self._given.prompts[choice // self._given.n]
        ids = self._stream.requests[choice].prompt
        return prompt.text if isinstance(prompt, Text) else self._vocabulary.decode(ids, skip_special_tokens=False)

    def _score(self, choice: int, event: Event) -> None:
        """Record the log-probabilities of an event; with ``echo``, first those of the prompt."""
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
        """Stop string or token's text from character ``length``; empty without ``include_stop_str_in_output``."""
        given, request = self._given, self._stream.requests[choice]
        if not given.include_stop_str_in_output:
            return ""
        skips, kept = given.skip_special_tokens, self._form.kept
        rest = continued(self._vocabulary, request.prompt, request.tokens, skips, kept)[length:]
        if request.tokens[-1] in self._stops:
            return rest
        return min((stop for stop in given.stop_strings if rest.startswith(stop)), key=len, default="")

    def _more_of(self, choice: int) -> JSON:
        """Token ids of a choice, if ``return_token_ids`` is set."""
        request = self._stream.requests[choice]
        if not self._given.return_token_ids:
            return {}
        return {"token_ids": request.tokens, "prompt_token_ids": list(request.prompt)}

    @property
    def _usage(self) -> JSON:
        return usage(self._stream.requests, self._given.n)


class EventStream(Response):
    """Server-sent events; a disconnect cancels the sequences."""

    media_type = "text/event-stream"

    def __init__(self, stream: Stream, chunks: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._stream, self._chunks = stream, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        async with watched(receive, self._stream):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.asynccontextmanager
async def watched(receive: Receive, stream: Stream) -> AsyncIterator[None]:
    """Cancel a stream when its client disconnects, and when the block fails."""

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
    """A server-sent event, named by the value's ``type`` if there is one."""
    name = f"event: {value['type']}\n" if "type" in value else ""
    text = _encode(value)
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    return f"{name}data: {text}\n\n".encode(errors="replace")
