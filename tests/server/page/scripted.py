"""A server of the page with answers that a test writes, and a browser's tab."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from qcut.server.page import document

NAME = "scripted"
PATIENCE_S = 20
Event = str | dict[str, Any]


class Refused(Exception):
    """An answer that is an error of HTTP."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Slow:
    """Pieces of an answer that come when a test puts them."""

    def __init__(self) -> None:
        self._events: queue.Queue[Event | None] = queue.Queue()

    def put(self, *events: Event) -> None:
        for event in events:
            self._events.put(event)

    def end(self) -> None:
        self._events.put(None)

    def __iter__(self) -> Iterator[Event]:
        return iter(lambda: self._events.get(timeout=PATIENCE_S), None)


class Scripted:
    """What the server answers, and what it has been asked.

    Attributes:
        answers: to requests, in this order: pieces of text and events, or a refusal. Then each request gets "ok".
        bodies: of requests, in the order in which they came.
        keys: of the same requests, as their headers have them.
        chat: whether the model has a template.
        context: tokens that the model takes; each character of a message is one.
        broken: whether answers end without their last line.
        left: answers whose client went before their end.
    """

    def __init__(self) -> None:
        self.answers: list[Iterable[Event] | Refused] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.chat, self.context, self.broken, self.left = True, 4096, False, 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve, on the same port as before."""
        handler = type("Handler", (_Handler,), {"scripted": self})
        server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def answer(self, body: dict[str, Any]) -> Iterable[Event]:
        """The events of an answer.

        Raises:
            Refused: as the test says, or since the messages are longer than the context.
        """
        self.bodies.append(body)
        size = sum(len(message["content"]) for message in body.get("messages", ()))
        if size > self.context:
            words = f"This model's maximum context length is {self.context} tokens; found {size}"
            raise Refused(400, words, "context_length_exceeded")
        found = self.answers.pop(0) if self.answers else ["ok"]
        if isinstance(found, Refused):
            raise found
        return found


class _Handler(BaseHTTPRequestHandler):
    scripted: Scripted

    def log_message(self, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        kind = "application/json"
        if self.path == "/":
            text, headers = document()
            self._send(200, text, "text/html", headers)
        elif self.path == "/v1/models":
            model = {"id": NAME, "max_model_len": self.scripted.context, "chat": self.scripted.chat}
            self._send(200, json.dumps({"data": [model]}), kind)
        elif self.path == "/metrics":
            names = (
                "new_tokens_total accepted_tokens_total sequences_running sequences_most requests_waiting"
                " prompts_reading cache_bytes"
            )
            lines = [f"qcut_{name} 7" for name in names.split()]
            self._send(200, "\n".join([*lines, "process_resident_memory_bytes 1e9"]), "text/plain")
        else:
            self._send(404, "{}", kind)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.scripted.keys.append(self.headers.get("Authorization", ""))
        try:
            events = self.scripted.answer(body)
        except Refused as refused:
            error = {"message": str(refused), "code": refused.code}
            self._send(refused.status, json.dumps({"error": error}), "application/json")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        count = 0
        try:
            for event in events:
                count += isinstance(event, str)
                self._event({"choices": [self._choice(event)]} if isinstance(event, str) else event)
            size = sum(len(message["content"]) for message in body.get("messages", ()))
            self._event({"choices": [], "usage": {"prompt_tokens": size, "completion_tokens": count}})
            if not self.scripted.broken:
                self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.scripted.left += 1

    def _choice(self, text: str) -> dict[str, Any]:
        return {"index": 0, **({"delta": {"content": text}} if "chat" in self.path else {"text": text})}

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def _send(self, status: int, text: str, kind: str, headers: dict[str, str] | None = None) -> None:
        data = text.encode()
        with suppress(OSError):
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)


class Tab:
    """A page, what it asked for, and what it complained of."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(PATIENCE_S * 1000)
        self.asked: list[str] = []
        self.said: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.goto(url)

    def send(self, text: str) -> None:
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def ask(self, text: str, number: int = 0) -> None:
        """Send a message, and wait for the n-th answer's figures."""
        self.send(text)
        self.text("figures", number)

    def until(self, expression: str) -> None:
        """Wait until the page is as an expression says. The page itself must not evaluate strings: its policy."""
        end = time.monotonic() + PATIENCE_S
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, expression
            time.sleep(0.02)

    def text(self, kind: str, number: int = 0) -> str:
        """The text of the n-th part of a kind, when it is to be seen."""
        found = self.page.locator(f"#talk .{kind}:not([hidden]):not(:empty)").nth(number)
        found.wait_for()
        return str(found.text_content())

    def idle(self) -> None:
        """Wait until no answer is under way."""
        self.page.wait_for_selector("#send:not([hidden]):not(:empty)")

    def answer(self, number: int = 0) -> str:
        """The source of the n-th answer, when it is whole."""
        self.idle()
        kept = json.loads(self.page.evaluate("localStorage.getItem('qcut-chat')"))
        return str(kept["turns"][number]["answer"])
