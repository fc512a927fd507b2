"""Listens, until a signal or the engine's failure, and lets what runs come to its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from qcut.engine.scheduler import Scheduler
from qcut.errors import ConfigError
from qcut.server.limits.connections import ConnectionLimits, ConnectionPool, protocol_of
from qcut.server.limits.log_lines import LogLimit
from qcut.server.metrics import Metrics

_log = logging.getLogger("qcut")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SWITCH_S = 0.0005
"""Longest time that the thread which turns waits for the one that writes answers: Python's 5 ms are two steps."""
_LOOK_S = 0.5
_COUNTED = ("Invalid HTTP request received.", "Unsupported upgrade request.", "No supported WebSocket library")
BACKLOG = 2048
"""Connections that the kernel holds until they are accepted."""
ACCEPTS = 16
"""Connections that are accepted in an iteration of the event loop, before the first of them can be counted."""
SPARE_FILES = 64
"""Files that connections leave to everything else: those accepted at once, the log, the tokenizer's process."""
MOST_PORT = 65535
_NEVER_S = 1 << 20  # of uvicorn's own clock, which is stopped by the first byte; connections have another one
_HINTS = {
    errno.EADDRINUSE: "another program listens there; --port 0 takes a free port",
    errno.EACCES: "ports below 1024 need a privilege; --port 8000 does not",
    errno.EADDRNOTAVAIL: "not an address of this machine",
}


def connection_limit(wanted: int) -> int:
    """The number of connections that the process's limit on open files has room for, up to ``wanted``.

    The soft limit is raised as far as it is needed and allowed.

    Raises:
        ConfigError: there is no room for a single connection.
    """
    opened = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else SPARE_FILES
    needed = wanted + opened + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < opened + SPARE_FILES + 1:
            raise ConfigError(
                f"the limit of open files is {soft}, and {opened} are open; allowed: {opened + SPARE_FILES + 1} and "
                "more (ulimit -n)"
            )
        return min(wanted, soft - opened - SPARE_FILES)
    return wanted


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Args:
        host: name or address.
        port: 0 takes a free one.

    Raises:
        ConfigError: there is no such address or port, or it is taken, or needs a privilege.
    """
    if not 0 <= port <= MOST_PORT:
        raise ConfigError(f"--port {port}; allowed: 0 to {MOST_PORT}")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            found = stack.enter_context(socket.socket(family, kind, proto))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            stack.pop_all()
            return found
    except OSError as error:
        hint = f" ({_HINTS[error.errno]})" if error.errno in _HINTS else ""
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}{hint}") from error


def address(found: socket.socket) -> str:
    """The address of a socket, as browsers take it."""
    host, port = found.getsockname()[:2]
    return f"http://[{host}]:{port}" if found.family == socket.AF_INET6 else f"http://{host}:{port}"


def server(
    app: ASGIApp, metrics: Metrics, *, grace_s: float | None = None, limits: ConnectionLimits | None = None
) -> Server:
    """A server of an application.

    Args:
        app: `qcut.server.application.application`.
        metrics: the application's.
        grace_s: seconds that what runs has after a signal; None: any time.
        limits: of connections; None takes the defaults. As many connections are open as files may be.

    Raises:
        ConfigError: the limit of open files has no room for connections.
    """
    limits = limits or ConnectionLimits()
    limits = replace(limits, connections=connection_limit(limits.connections))
    metrics.most_connections.set(limits.connections)
    protocol: Any = protocol_of(ConnectionPool(limits, metrics))
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",  # a connection that becomes a WebSocket's would leave the limits
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        backlog=ACCEPTS,
        timeout_keep_alive=_NEVER_S,
        timeout_graceful_shutdown=None if grace_s is None else max(1, round(grace_s)),
    )
    return Server(config, metrics)


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
    gc.freeze()  # a look for garbage among all of torch's and transformers' objects stops every thread
    scheduler.run()
    server.scheduler = scheduler
    logs = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio", "qcut", "qcut.server")]
    # Of this server: others in the process have filters of their own.
    filters: tuple[Callable[[logging.LogRecord], bool], ...] = (partial(_is_of_interest), LogLimit().filter)
    for log, each in product(logs, filters):
        log.addFilter(each)
    try:
        asyncio.run(_served(server, scheduler, found))
        finished = server.is_done and not server.force_exit
    except BaseException:
        scheduler.close(cancel=True)
        raise
    finally:
        for log, each in product(logs, filters):
            log.removeFilter(each)
        sys.setswitchinterval(before)
        gc.unfreeze()
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

    asyncio.get_running_loop().set_exception_handler(server.handle_loop_error)
    watcher = asyncio.ensure_future(look())
    try:
        await server.serve([found])
    finally:
        watcher.cancel()


def _is_of_interest(record: logging.LogRecord) -> bool:
    """Whether a line is for the log: not what is counted or told elsewhere, or cancelled at the end."""
    if record.name == "uvicorn.error" and str(record.msg).startswith(_COUNTED):
        return False
    if record.exc_info is None:
        return True
    return not isinstance(record.exc_info[1], asyncio.CancelledError | ConnectionAbortedError)


class Server(uvicorn.Server):
    """A server whose signals end it without killing the process, since the scheduler has to be closed.

    Args:
        config: of uvicorn.
        metrics: count connections that cannot be accepted.

    Attributes:
        is_done: whether no request was left at the end.
        scheduler: whose sequences are waited for at the end.
    """

    is_done = False
    scheduler: Scheduler | None = None

    def __init__(self, config: uvicorn.Config, metrics: Metrics) -> None:
        super().__init__(config)
        self._metrics = metrics

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, few at a time out of a long queue."""
        await super().startup(sockets)
        for each in sockets or []:
            each.listen(BACKLOG)

    def handle_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say in a line what the event loop tells with a traceback: that no file is left for a connection."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            self._metrics.closed("files")
            _log.warning("a connection waits: %s", error.strerror)
        else:
            loop.default_exception_handler(context)

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
        """End, after a line that says what is waited for."""
        if self.server_state.tasks and not self.force_exit and self.scheduler is not None:
            load, grace = self.scheduler.load, self.config.timeout_graceful_shutdown
            _log.warning(
                "%d requests come to their end%s: %d sequences run, %d prompts wait; a second Ctrl-C cancels them",
                len(self.server_state.tasks),
                "" if grace is None else f" within {grace} s",
                load.running,
                load.waiting + load.reading,
            )
        await super().shutdown(sockets)
        self.is_done = not self.server_state.tasks
