"""Middleware: allowed hosts, the API key, limits on bodies, and errors in OpenAI's format."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Collection
from ipaddress import ip_address
from time import monotonic
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qcut.server.metrics import Metrics
from qcut.server.refusals import RETRY_AFTER_S, Refusal

_log = logging.getLogger("qcut")

OPEN = frozenset({"/", "/health"})
"""Paths that need no key: the page, which holds no secrets, and the health check. Compared literally."""
_DRAIN_BYTES = 16 << 20
_DRAIN_S = 2.0
_HELD = "qcut.body_bytes"


class Refusals:
    """Turns a `Refusal` into OpenAI's error format, and any other exception into 500 with a traceback in the log.

    Args:
        app: the next ASGI application.
        metrics: counters of refusals.
        bodies: memory of bodies, released with the request.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, bodies: BodyMemory) -> None:
        self._app, self._metrics, self._bodies = app, metrics, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        is_begun = False

        async def noted(message: Message) -> None:
            nonlocal is_begun
            is_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a tokenizer's panic is no Exception
            if not isinstance(error, Refusal):
                _log.exception("a fault in the server: %s %s", scope.get("method"), str(scope.get("path"))[:80])
            refusal = error if isinstance(error, Refusal) else Refusal.of_fault(error)
            self._metrics.refused(refusal.status)
            if is_begun:
                raise ConnectionAbortedError("the answer is cut off") from None
            await refusal.answer(scope, receive, send)
        finally:
            self._bodies.release(scope)


class Hosts:
    """Refuses requests over the loopback interface that name a foreign host.

    Any page in a browser can call a server on the loopback address, and with DNS rebinding it could read the
    responses. The check uses the local address of the connection, so that a server on all addresses (``0.0.0.0``,
    ``::``) is protected as well.

    Args:
        app: the next ASGI application.
        allowed: names in addition to ``localhost``, its subdomains and loopback addresses.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app, self._allowed = app, frozenset(name.lower().rstrip(".") for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["type"] == "http" and is_loopback((scope.get("server") or ("",))[0]):
            given = Headers(scope=scope).get("host", "")
            name = host_name(given).rstrip(".")
            local = name == "localhost" or name.endswith(".localhost") or is_loopback(name)
            if not local and name not in self._allowed:
                allowed = ", ".join(["localhost", "127.0.0.1", "[::1]", *sorted(self._allowed)])
                raise Refusal(403, f"host {given[:80]!r}; allowed: {allowed}, and those of --allow-host", code="host")
        await self._app(scope, receive, send)


class Key:
    """Requires the API key.

    Args:
        app: the next ASGI application.
        key: None: no key is required.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key = app, None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if self._key is not None and scope["type"] == "http" and scope["path"] not in OPEN:
            kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self._key):
                headers = {"WWW-Authenticate": "Bearer"}
                message = "no valid API key; allowed: Authorization: Bearer KEY"
                raise Refusal(401, message, code="invalid_api_key", headers=headers)
        await self._app(scope, receive, send)


class BodyMemory:
    """Bounds the bytes of all request bodies in memory.

    Args:
        most: most bytes.
    """

    def __init__(self, most: int) -> None:
        self._most, self.held = most, 0

    def take(self, scope: Scope, size: int) -> None:
        """Reserve bytes for a request.

        Raises:
            Refusal: the bound is exceeded.
        """
        if self.held + size > self._most:
            message = f"bodies of {self.held + size:,} bytes are held; allowed: {self._most:,}"
            raise Refusal(503, message, code="busy", headers={"Retry-After": str(RETRY_AFTER_S), "Connection": "close"})
        self.held += size
        scope[_HELD] = scope.get(_HELD, 0) + size

    def release(self, scope: Scope) -> None:
        """Release the bytes of a request."""
        self.held -= scope.pop(_HELD, 0)


async def body(scope: Scope, receive: Receive, *, most: int, seconds: float, memory: BodyMemory | None = None) -> bytes:
    """Read the body of a request.

    Args:
        scope: ASGI scope of the request.
        receive: ASGI receive of the request.
        most: most bytes.
        seconds: time within which the body must arrive.
        memory: bound shared by all bodies.

    Raises:
        Refusal: the content type is not JSON (which also stops cross-origin requests without preflight); the body is
            compressed, too long, late or incomplete; no memory is left for it.
    """
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, f"content-type {kind[:80]!r}; allowed: application/json", code="content_type")
    coding = headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise Refusal(415, f"content-encoding {coding[:80]!r}; allowed: none", code="content_encoding")
    too_long = Refusal(
        413, f"a body of more bytes than allowed: {most}", code="too_long", headers={"Connection": "close"}
    )
    given = headers.get("content-length", "")
    length = int(given) if given.isdecimal() and len(given) <= 18 else None
    if given and (length is None or length > most):
        if length is not None and length <= _DRAIN_BYTES and "expect" not in headers:
            await _drain(receive)
        raise too_long

    async def read() -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "the body is not whole")
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise too_long
            if memory is not None:
                memory.take(scope, len(part))
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    try:
        return await asyncio.wait_for(read(), seconds)
    except asyncio.TimeoutError:
        late = {"Connection": "close"}
        raise Refusal(408, f"the body did not come in {seconds:g} s", code="timeout", headers=late) from None


async def _drain(receive: Receive) -> None:
    """Read and discard the body for a while: a client that is still writing at the close never reads the response."""
    end, size = monotonic() + _DRAIN_S, 0
    while size <= _DRAIN_BYTES and (left := end - monotonic()) > 0:
        try:
            message = await asyncio.wait_for(receive(), left)
        except asyncio.TimeoutError:
            return
        size += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


def is_loopback(address: str) -> bool:
    """Whether an address is a loopback address, ``127.0.0.2`` and ``::ffff:127.0.0.1`` included."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def host_name(given: str) -> str:
    """The name in a Host header, in lower case and without port; empty if malformed."""
    try:
        found = urlsplit(f"//{given}")
    except ValueError:
        return ""
    return (found.hostname or "") if found.netloc == given and "@" not in given else ""
