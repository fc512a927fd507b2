"""Answers to what cannot be served, in OpenAI's form."""

from __future__ import annotations

from starlette.responses import JSONResponse

from qcut.errors import BusyError, ContextError, QcutError

RETRY_AFTER_S = 1

CLIENT_GONE = 499
"""Status, only in the metrics, of an answer that nobody is there to take; proxies use the same."""


class Refusal(Exception):
    """A request that is not served.

    Args:
        status: of HTTP.
        message: what was found and what is allowed.
        param: the field of the body.
        code: for programs.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @classmethod
    def of(cls, error: QcutError, context: int, param: str | None = None) -> Refusal:
        """What one of qcut's exceptions means to a client.

        Args:
            error: raised for a request.
            context: the engine's, in tokens. Clients know a prompt that is too long by OpenAI's words.
            param: the field of the prompt.
        """
        if isinstance(error, BusyError):
            return cls(503, str(error), code="busy", headers={"Retry-After": str(RETRY_AFTER_S)})
        if isinstance(error, ContextError):
            message = (
                f"This model's maximum context length is {context} tokens. {error}. Shorten the {param or 'prompt'}"
            )
            return cls(400, message, param=param, code="context_length_exceeded")
        return cls(400, str(error))

    @classmethod
    def of_fault(cls, error: BaseException) -> Refusal:
        """What a fault of the server is to a client; the log has the traceback."""
        return cls(500, f"a fault in the server: {type(error).__name__}")

    @property
    def body(self) -> dict[str, object]:
        """The answer's JSON."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def answer(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body, self.status, self.headers)
