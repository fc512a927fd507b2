"""Listens, until a signal or the engine's failure, and lets what runs come to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from qcut.engine.scheduler import Scheduler
from qcut.errors import ConfigError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SWITCH_S = 0.0005
"""Longest time that the thread which turns waits for the one that writes answers: Python's 5 ms are two steps."""
_LOOK_S = 0.5


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Args:
        host: name or address.
        port: 0 takes a free one.

    Raises:
        ConfigError: there is no such address, or it is taken.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            found = stack.enter_context(socket.socket(family, kind, proto))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            stack.pop_all()
            return found
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}") from error


def address(found: socket.socket) -> str:
    """The address of a socket, as browsers take it."""
    host, port = found.getsockname()[:2]
    return f"http://[{host}]:{port}" if found.family == socket.AF_INET6 else f"http://{host}:{port}"


def server(app: ASGIApp, *, grace_s: float | None = None, most: int = 4096) -> Server:
    """A server of an application.

    Args:
        app: `qcut.server.application.application`.
        grace_s: seconds that what runs has after a signal; None: any time.
        most: connections at once; others get 503.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        limit_concurrency=most,
        timeout_graceful_shutdown=None if grace_s is None else max(1, round(grace_s)),
    )
    return Server(config)


def run(server: Server, scheduler: Scheduler, found: socket.socket) -> bool:
    """Serve until SIGINT or SIGTERM. What runs then comes to its end; a second signal cancels it.

    Args:
        server: whose application has the scheduler.
        scheduler: is run, and closed at the end.
        found: listens.

    Returns:
        Whether all that ran has come to its end.

    Raises:
        BaseException: what the engine has failed with.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    scheduler.run()
    log = logging.getLogger("uvicorn.error")
    log.addFilter(_is_of_interest)
    try:
        asyncio.run(_served(server, scheduler, found))
        finished = server.is_done and not server.force_exit
    except BaseException:
        scheduler.close(cancel=True)
        raise
    finally:
        log.removeFilter(_is_of_interest)
        sys.setswitchinterval(before)
    scheduler.close(cancel=not finished)
    if scheduler.error is not None:
        raise scheduler.error
    return finished


async def _served(server: Server, scheduler: Scheduler, found: socket.socket) -> None:
    """Serve, and end where the engine fails."""

    async def look() -> None:
        while scheduler.error is None:
            await asyncio.sleep(_LOOK_S)
        server.should_exit = True

    watcher = asyncio.ensure_future(look())
    try:
        await server.serve([found])
    finally:
        watcher.cancel()


def _is_of_interest(record: logging.LogRecord) -> bool:
    """Whether a line is for the log: requests that are cancelled at the end are no faults."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


class Server(uvicorn.Server):
    """A server whose signals end it without killing the process, since the scheduler has to be closed.

    Attributes:
        is_done: whether no request was left at the end.
    """

    is_done = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take signals while the server runs, where the main thread runs it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets what runs come to its end, the second does not."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End."""
        await super().shutdown(sockets)
        self.is_done = not self.server_state.tasks
