"""Errors in OpenAI's format."""

from __future__ import annotations

from starlette.responses import JSONResponse

from qcut.errors import BusyError, ContextError, QcutError

RETRY_AFTER_S = 1

CLIENT_GONE = 499
"""Status of a request after its client disconnected (nginx's 499); only in the metrics."""


class Refusal(Exception):
    """A request that is refused, with its HTTP status and error object.

    Args:
        status: HTTP status.
        message: the value found and the values allowed.
        param: field of the body.
        code: OpenAI's machine-readable code.
        headers: headers of the response.
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
        """The refusal for one of qcut's exceptions.

        Args:
            error: exception raised for the request.
            context: the engine's context in tokens, for OpenAI's wording of a prompt that is too long.
            param: field of the prompt, which the exception is about unless it names an argument.
        """
        if isinstance(error, BusyError):
            return cls(503, str(error), code="busy", headers={"Retry-After": str(RETRY_AFTER_S)})
        if isinstance(error, ContextError):
            message = (
                f"This model's maximum context length is {context} tokens. {error}. Shorten the {param or 'prompt'}"
            )
            return cls(400, message, param=param, code="context_length_exceeded")
        return cls(400, str(error), param=getattr(error, "argument", None) or param)

    @classmethod
    def of_fault(cls, error: BaseException) -> Refusal:
        """Status 500 for a fault of the server; the traceback is in the log only."""
        return cls(500, f"a fault in the server: {type(error).__name__}")

    @property
    def body(self) -> dict[str, object]:
        """The error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def answer(self) -> JSONResponse:
        """Send the error as a complete response."""
        return JSONResponse(self.body, self.status, self.headers)
