"""What stands before the application: who may ask, and how much."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from qcut.server.refusals import Refusal

OPEN = frozenset({"/", "/health"})
"""Paths that need no key: the page, which has no secrets, and the health of the process."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class Hosts:
    """Refuses requests that name another host than those allowed.

    A server on this machine's own address is within reach of every page that a browser shows: a page whose name is made
    to mean this machine would else read the answers.

    Args:
        app: behind.
        allowed: names of hosts; empty: all.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app, self._allowed = app, frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["type"] == "http" and self._allowed:
            given = Headers(scope=scope).get("host", "")
            if _host(given) not in self._allowed:
                allowed = ", ".join(sorted(self._allowed))
                await Refusal(403, f"host {given[:80]!r}; allowed: {allowed}", code="host").answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Key:
    """Asks for a key.

    Args:
        app: behind.
        key: None lets everyone in.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key = app, None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if self._key is not None and scope["type"] == "http" and scope["path"] not in OPEN:
            kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self._key):
                headers = {"WWW-Authenticate": "Bearer"}
                refusal = Refusal(401, "no valid API key; allowed: Authorization: Bearer KEY", headers=headers)
                refusal.code = "invalid_api_key"
                await refusal.answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def body(scope: Scope, receive: Receive, *, most: int, seconds: float) -> bytes:
    """Read the body of a request.

    Args:
        scope: the request's.
        receive: the request's.
        most: bytes.
        seconds: in which the body has to come.

    Raises:
        Refusal: another type than JSON, which also keeps out what a page of another origin may send without asking; a
            longer body; one that is not there in time, or not whole.
    """
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, f"content-type {kind[:80]!r}; allowed: application/json", code="content_type")
    too_long = Refusal(
        413, f"a body of more bytes than allowed: {most}", code="too_long", headers={"Connection": "close"}
    )
    given = headers.get("content-length", "")
    if given.isdecimal() and (len(given) > 18 or int(given) > most):
        raise too_long

    async def read() -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "the body is not whole")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise too_long
            if not message.get("more_body", False):
                return b"".join(parts)

    try:
        return await asyncio.wait_for(read(), seconds)
    except asyncio.TimeoutError:
        late = {"Connection": "close"}
        raise Refusal(408, f"the body did not come in {seconds:g} s", code="timeout", headers=late) from None


def _host(given: str) -> str:
    """The name in a Host header, without port."""
    try:
        return urlsplit(f"//{given}").hostname or ""
    except ValueError:
        return ""
