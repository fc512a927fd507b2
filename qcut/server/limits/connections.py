"""HTTP connections with limits: on their number, their time and the work of one read.

`Connection` is uvicorn's protocol over h11. uvicorn closes only connections that are idle between two requests; this
class also closes connections that never complete a request or never read their response. A new connection replaces the
one that has kept the server waiting longest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from re import search
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from qcut.server.metrics import Metrics
from qcut.server.refusals import RETRY_AFTER_S, Refusal

_log = logging.getLogger("qcut.server")

READ_BYTES = 8192
"""Most bytes that a connection reads per iteration of the event loop."""
CHUNK_READ_BYTES = 512
"""The same within a chunked body: each chunk of one byte costs as much as a chunk of thousands."""
PIPELINED_BYTES = 65536
"""Bytes read after a request before its response is sent: only a reading server notices a disconnect."""

DRAINED_BYTES = 8 << 20
"""Bytes of a body read after its response: a client that is still writing at the close never reads the response."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of all connections together and of each.

    Attributes:
        connections: most open connections. Beyond them the connection that has been without a complete request for
            longest is closed; if there is none, the new one gets 503.
        keep_alive_s: longest idle time between two requests, in seconds.
        head_s: longest time from the first byte of a request to the end of its head, and from the connection's start.
        write_s: time within which the client must read some of the response, in seconds.
        head_bytes: most bytes of the request line and headers.
        head_lines: most lines of the request line and headers.
        chunks: most chunks of a chunked body.
    """

    connections: int = 4096
    keep_alive_s: float = 20
    head_s: float = 20
    write_s: float = 60
    head_bytes: int = 32768
    head_lines: int = 128
    chunks: int = 4096


class ConnectionPool:
    """State shared by the connections of a server.

    Args:
        limits: limits of connections.
        metrics: counters of refusals and closed connections.

    Attributes:
        waiting: connections without a complete request, oldest first.
    """

    def __init__(self, limits: ConnectionLimits, metrics: Metrics) -> None:
        self.limits, self.metrics = limits, metrics
        self.waiting: dict[Connection, None] = {}

    def make_room(self, new: Connection) -> bool:
        """Close the longest-waiting connection except a new one; False if all others have a complete request."""
        oldest = next((connection for connection in self.waiting if connection is not new), None)
        if oldest is not None:
            oldest.drop("evicted")
        return oldest is not None


class _Parser(h11.Connection):
    """h11's parser, which also refuses contradicting body lengths and too many chunks.

    Attributes:
        refusal: reason why the last request is refused.
        is_chunked: whether the current body is chunked.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        super().__init__(h11.SERVER, limits.head_bytes)
        self._limits = limits
        self.refusal = Refusal(400, "no valid HTTP request", code="http_invalid")
        self.is_chunked = False
        self._chunks = 0

    def next_event(self) -> Any:
        """The next event.

        Raises:
            h11.RemoteProtocolError: the request is invalid or exceeds a limit; ``refusal`` has the reason.
        """
        if self.their_state is h11.IDLE and self._head_lines() > self._limits.head_lines:  # each costs 15 µs to parse
            self._refuse(431, f"a head of more lines than allowed: {self._limits.head_lines}")
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint
            if status == 431:
                message = f"a head of more bytes than allowed: {self._limits.head_bytes}"
            else:
                message = f"no valid HTTP request: {error}"[:200]
            self.refusal = Refusal(status, message, code="http_invalid")
            raise
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            self.is_chunked, self._chunks = b"transfer-encoding" in names, 0
            if self.is_chunked and (b"content-length" in names or event.http_version < b"1.1"):
                found = "Content-Length" if b"content-length" in names else "HTTP/1.0"
                self._refuse(400, f"found Transfer-Encoding with {found}; allowed: one length of a body")
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._chunks += 1
            if self._chunks > self._limits.chunks:
                self._refuse(413, f"a body of more chunks than allowed: {self._limits.chunks}")
        return event

    def _head_lines(self) -> int:
        """Number of lines of the head so far."""
        data = self.trailing_data[0]
        end = search(rb"\n\r?\n", data)
        return data.count(b"\n", 0, len(data) if end is None else end.start())

    def _refuse(self, status: int, message: str) -> None:
        self.refusal = Refusal(status, message, code="http_invalid")
        raise h11.RemoteProtocolError(message, error_status_hint=status)


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """A client's connection.

    Args:
        pool: state shared by all connections.
        options: options of uvicorn's protocol.
    """

    def __init__(self, pool: ConnectionPool, **options: Any) -> None:
        super().__init__(**options)
        self._pool, self._limits = pool, pool.limits
        self.conn = self._parser = _Parser(pool.limits)
        self._buffer = bytearray(READ_BYTES)
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._is_silent = True  # no byte of the next request has arrived
        self._drained = 0

    # ── the connection's life ────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start; close another connection or refuse this one if there are too many."""
        super().connection_made(cast(asyncio.Transport, transport))
        # Writing pauses as soon as the kernel's buffer is full: the next chunk waits for the client.
        self.transport.set_write_buffer_limits(high=0)
        self._pool.metrics.connections.inc()
        self._pool.waiting[self] = None
        self._set_deadline(self._limits.head_s)
        if len(self.connections) > self._limits.connections and not self._pool.make_room(self):
            message = f"{self._limits.connections} connections; allowed: {self._limits.connections}"
            self.refuse(Refusal(503, message, code="busy", headers={"Retry-After": str(RETRY_AFTER_S)}))

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._pool.metrics.connections.dec()
        self._pool.waiting.pop(self, None)
        self._stop_deadline()
        self._stop_stall()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def drop(self, reason: str) -> None:
        """Close at once, without waiting for the client to read.

        Args:
            reason: label in the metrics.
        """
        self._pool.waiting.pop(self, None)
        if not self.transport.is_closing():
            self._pool.metrics.closed(reason)
        self.transport.abort()

    def refuse(self, refusal: Refusal) -> None:
        """Send an error without calling the application, if no response has started, and close."""
        self._pool.metrics.refused(refusal.status)
        host, port = (self.client or ("", 0))[:2]
        _log.warning("%s:%s refused with %s: %s", host, port, refusal.status, ascii(str(refusal)))
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = refusal.answer
            headers = [*answer.raw_headers, (b"connection", b"close")]
            reason = HTTPStatus(refusal.status).phrase.encode()
            head = h11.Response(status_code=refusal.status, headers=headers, reason=reason)
            self.transport.write(self.conn.send(head))
            self.transport.write(self.conn.send(h11.Data(data=bytes(answer.body))))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._pool.waiting.pop(self, None)
        self._stop_deadline()
        self.transport.close()

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer of the next read; small, so that other connections get their turn."""
        in_chunks = self._parser.is_chunked and self.conn.their_state is h11.SEND_BODY
        return memoryview(self._buffer)[: CHUNK_READ_BYTES if in_chunks else READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Parse received bytes."""
        if self._is_silent:
            self._is_silent = False
            self._set_deadline(self._limits.head_s)
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self._drained += nbytes  # the rest of a body after its response was sent
            if self._drained > DRAINED_BYTES:
                self.drop("drained")
                return
        self.data_received(bytes(self._buffer[:nbytes]))
        self._note_progress()

    def send_400_response(self, msg: str) -> None:
        """Respond to an invalid request."""
        self.refuse(self._parser.refusal)

    def on_response_complete(self) -> None:
        """Prepare for the next request after a response."""
        self._drained = 0
        super().on_response_complete()
        if not self.transport.is_closing():
            self._note_progress()

    def _note_progress(self) -> None:
        """Add to or remove from the list of connections without a complete request, and set the timeout."""
        if self.transport.is_closing():
            return
        state, waiting = self.conn.their_state, self._pool.waiting
        buffered = len(self.conn.trailing_data[0])
        if state not in (h11.IDLE, h11.SEND_BODY):  # the request is complete
            waiting.pop(self, None)
            self._stop_deadline()
            if buffered < PIPELINED_BYTES:
                self.flow.resume_reading()
        elif state is h11.SEND_BODY and self.conn.our_state is not h11.DONE:
            waiting.setdefault(self)
            self._stop_deadline()  # the application limits the time of the body
        elif state is h11.IDLE and not buffered:
            waiting.pop(self, None)  # it starts waiting again
            waiting[self] = None
            self._is_silent = True
            self._set_deadline(self._limits.keep_alive_s)
        else:
            waiting.setdefault(self)
            if self._deadline is None:
                self._set_deadline(self._limits.head_s)

    def _set_deadline(self, seconds: float) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(seconds, self._is_late)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        self._deadline = None
        if self._is_silent or self.conn.our_state is not h11.IDLE:
            self.drop("idle")
        else:
            self._pool.metrics.closed("head")
            self.refuse(Refusal(408, f"the head did not come in {self._limits.head_s:g} s", code="timeout"))

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    def pause_writing(self) -> None:
        """Start the write timeout: the client reads too slowly."""
        super().pause_writing()
        self._watch_writing(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Stop the write timeout."""
        self._stop_stall()
        super().resume_writing()

    def _watch_writing(self, left: int) -> None:
        self._stop_stall()

        def look() -> None:
            now = self.transport.get_write_buffer_size()
            if now < left:
                self._watch_writing(now)
                return
            self._stall = None
            _log.warning("a client took nothing for %g s; its connection is closed", self._limits.write_s)
            self.drop("stalled")

        self._stall = self.loop.call_later(self._limits.write_s, look)

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def protocol_of(pool: ConnectionPool) -> Callable[..., Connection]:
    """The protocol factory for uvicorn."""
    return lambda **options: Connection(pool, **options)
