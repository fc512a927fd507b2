"""Further endpoints of vLLM's server: tokenization, load, version, responses, and OpenAPI's description of all."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from html import escape
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from qcut import __version__
from qcut.engine.scheduler import Scheduler
from qcut.engine.token_ids import check_ids, ids_of
from qcut.errors import QcutError
from qcut.server.answers import Form
from qcut.server.bodies import AnyPrompt, Body, ChatBody, CompletionBody, Message, Schema, Text, ToolFields
from qcut.server.known_fields import CHAT_ONLY, CONSTRAINTS, IGNORED
from qcut.server.limits.executors import Executors
from qcut.server.refusals import Refusal
from qcut.server.responses_api import Response as ResponseForm
from qcut.server.responses_api import ResponsesBody
from qcut.server.tools.choice import Parsing

MOST_DETOKENIZED = 1 << 17
"""Most tokens of one ``/detokenize``: the tokenizer holds Python's global lock while it decodes."""
B = TypeVar("B", bound=Schema)
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"


class Service(Protocol):
    """The part of the service that these endpoints call."""

    scheduler: Scheduler
    executors: Executors

    async def health(self, request: Request) -> Response:
        """Whether requests are served."""

    async def read(self, request: Request, kind: type[B]) -> B:
        """The body of a request."""

    async def ids(self, request: Request, prompt: AnyPrompt) -> list[int]:
        """The token ids of a prompt."""

    async def answer(self, request: Request, given: Body, form: Form) -> Response:
        """Generate text and respond."""

    def name_for(self, given: Body) -> str:
        """The model's name in the response."""

    def parsing(self, given: ToolFields) -> Parsing | None:
        """How to parse the answers to a request."""


class TokenizeBody(ToolFields):
    """Body of ``/tokenize``.

    Attributes:
        prompt: a text, or ``messages`` is a chat.
        return_token_strs: return the tokens' names in the vocabulary.
    """

    UNSERVED = CHAT_ONLY
    UNUSED = IGNORED | CONSTRAINTS
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(default_factory=list, fail_fast=True)]
    return_token_strs: bool = False

    @property
    def turns(self) -> list[Message]:
        """See `ChatFields`."""
        return self.messages

    @classmethod
    def renamed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """See `Schema`. A text gets the tokenizer's special tokens, a chat the template's."""
        given = super().renamed(given)
        given.setdefault("add_special_tokens", "prompt" in given)
        if ("prompt" in given) == ("messages" in given):
            raise Refusal(400, "prompt: Field required, or messages in its place, not both", param="prompt")
        return given


class DetokenizeBody(Schema):
    """Body of ``/detokenize``."""

    UNUSED = IGNORED
    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=MOST_DETOKENIZED, fail_fast=True)]


def routes(service: Service) -> list[Route]:
    """Routes of these endpoints.

    Args:
        service: reads bodies and generates.
    """
    engine = service.scheduler.engine

    async def tokenize(request: Request) -> Response:
        given = await service.read(request, TokenizeBody)
        if given.prompt == "":  # a text need not fit the context to be tokenized
            ids = list(engine.tokenizer("", add_special_tokens=given.add_special_tokens)["input_ids"])
        else:
            prompt = given.chat if given.prompt is None else Text(given.prompt, given.add_special_tokens)
            ids = await service.ids(request, prompt)

        def made() -> Response:
            names = engine.tokenizer.convert_ids_to_tokens(ids) if given.return_token_strs else None
            found = {"count": len(ids), "max_model_len": engine.context, "tokens": ids, "token_strs": names}
            return JSONResponse(found)

        return await service.executors.run(request.state.body_bytes, made)

    async def detokenize(request: Request) -> Response:
        given = await service.read(request, DetokenizeBody)
        try:
            check_ids(ids_of(given.tokens, None), engine.decoder.vocabulary)
        except QcutError as error:
            raise Refusal(400, f"tokens: {error}", param="tokens") from error
        decode = partial(engine.tokenizer.decode, given.tokens)
        return JSONResponse({"prompt": await service.executors.run(request.state.body_bytes, decode)})

    async def tokenizer_info(request: Request) -> Response:
        tokenizer = engine.tokenizer
        names = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        template = getattr(tokenizer, "chat_template", None)
        return JSONResponse(
            {
                "tokenizer_class": type(tokenizer).__name__,
                **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")),
                **names,
                "chat_template": template if isinstance(template, str) else None,
                "model_max_length": engine.context,
            }
        )

    async def responses(request: Request) -> Response:
        given = await service.read(request, ResponsesBody)
        form = ResponseForm(service.name_for(given), given, service.parsing(given))
        return await service.answer(request, given, form)

    async def unstored(request: Request) -> Response:
        message = "responses are not stored; send the whole conversation as input to /v1/responses"
        raise Refusal(404, message, param="response_id", code="not_stored")

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def load(request: Request) -> Response:
        found = service.scheduler.load
        return JSONResponse({"server_load": found.waiting + found.prefilling + found.running})

    async def openapi(request: Request) -> Response:
        return JSONResponse(description())

    async def docs(request: Request) -> Response:
        return HTMLResponse(_page(description()), headers={"Content-Security-Policy": _PAGE_POLICY})

    return [
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/responses/{id}", unstored, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/cancel", unstored, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info),
        Route("/version", version),
        Route("/load", load),
        Route("/ping", service.health, methods=["GET", "POST"]),
        Route("/openapi.json", openapi),
        Route("/docs", docs),
    ]


_PATHS: Mapping[str, tuple[str, str, type[Schema] | None]] = {
    "/v1/completions": ("post", "Continue texts or token ids", CompletionBody),
    "/v1/chat/completions": ("post", "Answer a chat", ChatBody),
    "/v1/responses": ("post", "Answer a chat, in the form of OpenAI's newer interface", ResponsesBody),
    "/tokenize": ("post", "The token ids of a text or a chat", TokenizeBody),
    "/detokenize": ("post", "The text of token ids", DetokenizeBody),
    "/tokenizer_info": ("get", "The special tokens and the chat template", None),
    "/v1/models": ("get", "The model that is served", None),
    "/v1/models/{model}": ("get", "The model by its name", None),
    "/health": ("get", "200 while requests are served", None),
    "/ping": ("get", "The same", None),
    "/load": ("get", "The number of sequences that wait or run", None),
    "/metrics": ("get", "Figures for Prometheus", None),
    "/version": ("get", "The version of qcut", None),
    "/openapi.json": ("get", "This description, for programs", None),
    "/docs": ("get", "This description", None),
    "/": ("get", "A page to chat with the model", None),
}


@cache
def description() -> dict[str, Any]:
    """All endpoints and the fields of their bodies, in OpenAPI 3.1."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for path, (method, summary, body) in _PATHS.items():
        entry: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "The answer"}}}
        if "{model}" in path:
            entry["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        if body is not None:
            found = body.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= found.pop("$defs", {})
            schemas[body.__name__] = found
            reference = {"$ref": f"#/components/schemas/{body.__name__}"}
            entry["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
            entry["responses"]["400"] = {"description": "The message names the field, its value, and what is allowed"}
        paths[path] = {method: entry}
    info = {"title": "qcut", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _page(found: dict[str, Any]) -> str:
    """The description as a page without external resources."""
    parts = ["<!DOCTYPE html><html lang=en><meta charset=utf-8><title>qcut's endpoints</title>"]
    parts.append("<style>body{font:1rem/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}")
    parts.append("td{padding:0 1rem 0 0;vertical-align:top}</style><h1>Endpoints</h1>")
    for path, methods in found["paths"].items():
        for method, entry in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(entry['summary'])}.</p>")
            if "requestBody" in entry:
                reference = entry["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                parts.append(_table(found["components"]["schemas"][reference.rpartition("/")[2]]))
    return "".join(parts)


def _table(schema: dict[str, Any]) -> str:
    rows = []
    for name, field in schema["properties"].items():
        default = "required" if name in schema.get("required", ()) else repr(field.get("default"))
        rows.append(f"<tr><td><code>{name}</code><td>{_kind(field)}<td>{escape(default)}")
    return f"<table><tr><th>field<th>type<th>default{''.join(rows)}</table>"


def _kind(field: dict[str, Any]) -> str:
    """The type of a field, in words."""
    if "anyOf" in field:
        return " or ".join(_kind(one) for one in field["anyOf"] if one.get("type") != "null")
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if field.get("type") == "array":
        return f"list of {_kind(field['items'])}"
    return str(field.get("type", "text or token ids"))
