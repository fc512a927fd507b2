"""Runs the server on a socket until a signal or a failure of the engine; running requests finish first."""

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
"""Python's switch interval in seconds while serving: its default of 5 ms is two decode steps of waiting."""
_LOOK_S = 0.5
_COUNTED = ("Invalid HTTP request received.", "Unsupported upgrade request.", "No supported WebSocket library")
BACKLOG = 2048
"""Length of the kernel's queue of connections."""
ACCEPTS = 16
"""Connections accepted per iteration of the event loop."""
SPARE_FILES = 64
"""File descriptors reserved for the log, the tokenizer's processes and connections being accepted."""
MOST_PORT = 65535
_NEVER_S = 1 << 20  # uvicorn's own timeout ends at the first byte; `ConnectionLimits` replaces it
_HINTS = {
    errno.EADDRINUSE: "another program listens there; --port 0 takes a free port",
    errno.EACCES: "ports below 1024 need a privilege; --port 8000 does not",
    errno.EADDRNOTAVAIL: "not an address of this machine",
}


def connection_limit(wanted: int) -> int:
    """The number of connections, up to ``wanted``, that the limit on open files allows.

    Raises the soft limit as far as needed and allowed.

    Raises:
        ConfigError: not even one connection is allowed.
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
    """A listening socket.

    Args:
        host: name or address.
        port: 0 takes a free port.

    Raises:
        ConfigError: the address or port does not exist, is in use, or needs privileges.
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
    except UnicodeError as error:  # a part of the name that is longer than 63 characters
        raise ConfigError(f"--host {host:.80}: {error}; allowed: a name or an address") from error
    except OSError as error:
        hint = f" ({_HINTS[error.errno]})" if error.errno in _HINTS else ""
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}{hint}") from error


def address(found: socket.socket) -> str:
    """The URL of a socket."""
    host, port = found.getsockname()[:2]
    return f"http://[{host}]:{port}" if found.family == socket.AF_INET6 else f"http://{host}:{port}"


def server(
    app: ASGIApp, metrics: Metrics, *, grace_s: float | None = None, limits: ConnectionLimits | None = None
) -> Server:
    """A uvicorn server of an application.

    Args:
        app: `qcut.server.application.application`.
        metrics: metrics of the application.
        grace_s: seconds for running requests after a signal; None: unlimited.
        limits: limits of connections; None: defaults. The limit on open files bounds their number.

    Raises:
        ConfigError: the limit on open files leaves no room for connections.
    """
    limits = limits or ConnectionLimits()
    limits = replace(limits, connections=connection_limit(limits.connections))
    metrics.most_connections.set(limits.connections)
    protocol: Any = protocol_of(ConnectionPool(limits, metrics))
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",  # WebSockets would escape the limits
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
    """Serve until SIGINT or SIGTERM. Running requests then finish; a second signal cancels them.

    Args:
        server: server of the application.
        scheduler: the application's scheduler; run here, and closed at the end.
        found: listening socket.

    Returns:
        Whether all running requests finished.

    Raises:
        BaseException: the engine's failure.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()  # a full garbage collection over torch's and transformers' objects stops every thread
    scheduler.run()
    server.scheduler = scheduler
    logs = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio", "qcut", "qcut.server")]
    # Only this server's loggers: other servers in the process have their own filters.
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
    """Serve until a signal or the engine's failure."""

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
    """Log filter: drops lines about connections that the metrics count, and about cancellation at shutdown."""
    if record.name == "uvicorn.error" and str(record.msg).startswith(_COUNTED):
        return False
    if record.exc_info is None:
        return True
    return not isinstance(record.exc_info[1], asyncio.CancelledError | ConnectionAbortedError)


class Server(uvicorn.Server):
    """A uvicorn server that ends on a signal without ending the process, since the scheduler has to be closed.

    Args:
        config: uvicorn's configuration.
        metrics: counters of connections that cannot be accepted.

    Attributes:
        is_done: whether all requests had finished at the end.
        scheduler: its sequences are waited for at the end.
    """

    is_done = False
    scheduler: Scheduler | None = None

    def __init__(self, config: uvicorn.Config, metrics: Metrics) -> None:
        super().__init__(config)
        self._metrics = metrics

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening with a long queue, accepting few connections at a time."""
        await super().startup(sockets)
        for each in sockets or []:
            each.listen(BACKLOG)

    def handle_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log running out of file descriptors in one line instead of a traceback."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            self._metrics.closed("files")
            _log.warning("a connection waits: %s", error.strerror)
        else:
            loop.default_exception_handler(context)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs, if it runs in the main thread."""
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
        """Shut down gracefully at the first signal, at once at the second."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down, after logging the number of requests that are waited for."""
        if self.server_state.tasks and not self.force_exit and self.scheduler is not None:
            load, grace = self.scheduler.load, self.config.timeout_graceful_shutdown
            _log.warning(
                "%d requests come to their end%s: %d sequences run, %d prompts wait; a second Ctrl-C cancels them",
                len(self.server_state.tasks),
                "" if grace is None else f" within {grace} s",
                load.running,
                load.waiting + load.prefilling,
            )
        await super().shutdown(sockets)
        self.is_done = not self.server_state.tasks
