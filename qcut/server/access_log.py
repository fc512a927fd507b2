"""Access log: one line per request, and one per refused request with the reason."""

from __future__ import annotations

import json
import logging
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger("qcut.server")
QUIET = frozenset({"/health", "/load", "/metrics", "/ping"})
"""Paths that are polled all the time; their lines have level ``debug``."""
_SHOWN = 300


class AccessLog:
    """Logs requests with ``info`` and refusals with ``warning``.

    Args:
        app: the next ASGI application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status, reason = perf_counter(), 0, ""

        async def noted(message: Message) -> None:
            nonlocal status, reason
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400 and not reason:
                reason = _reason(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
            level = logging.WARNING if status >= 400 or not status else level
            if _log.isEnabledFor(level):
                host, port = scope.get("client") or ("", 0)
                why = f"{reason if status else ': cut off before an answer, at the end of the server'}{_tokens(scope)}"
                path = _printable(scope["path"])
                seconds = perf_counter() - start
                _log.log(level, "%s:%s %s %s %s in %.3f s%s", host, port, scope["method"], path, status, seconds, why)


def _tokens(scope: Scope) -> str:
    """Prompt and new tokens of a request that generated text."""
    requests = scope.get("state", {}).get("requests")
    if not requests:
        return ""
    read, new = len(requests[0].prompt), sum(len(request.tokens) for request in requests)
    return f": {len(requests)} sequences, {new} new tokens after {read}"


def _reason(body: bytes) -> str:
    """The error message of a refused request."""
    try:
        return f": {_printable(json.loads(body)['error']['message'])}"
    except (ValueError, LookupError, TypeError):
        return ""


def _printable(text: str) -> str:
    """A client's text on one line, control characters escaped."""
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in shown)
