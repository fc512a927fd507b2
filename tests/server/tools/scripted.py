"""A server with answers that a test writes: the model runs, and the texts of its tokens are those of a script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import qcut
from qcut.engine.request import Request
from qcut.engine.sequence import End, Event
from tests.server.serving import CHATS, Served, engine, serving

USER = {"role": "user", "content": "How is the weather in Zürich?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time"}}
HERMES = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}{{ m.tool_call_id or '' }}: {{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}"
    "assistant:{{ ' <think>\n' if enable_thinking else '' }}"
)


def with_special_tokens(tokenizer: Any, markers: Sequence[str], template: str) -> Any:
    """A tokenizer with markers as its last tokens, and a chat template."""
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    model, count = data["model"], len(markers)
    ids = dict(zip(markers, range(len(model["vocab"]) - count, len(model["vocab"])), strict=True))
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i not in ids.values()}
    model["merges"] = model["merges"][: len(model["merges"]) - count]  # the last token is the last merge's, and so on
    data["added_tokens"] += [{**data["added_tokens"][0], "id": i, "content": marker} for marker, i in ids.items()]
    found = Tokenizer.from_str(json.dumps(data))
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<|endoftext|>", chat_template=template)


class Script(qcut.Scheduler):
    """A scheduler that returns a script instead of the model's texts.

    Attributes:
        pieces: the text of each token.
        reason: why each sequence ends.
    """

    pieces: Sequence[str] = ("",)
    reason: End = "stop"

    def submit_samples(self, *arguments: Any, listener: Any = None, stop: Any = (), **options: Any) -> list[Request]:
        pieces, reason, counts = self.pieces, self.reason, dict[int, int]()

        def scripted(event: Event) -> None:
            at = counts.get(event.sequence, 0)
            counts[event.sequence] = at + 1
            listener(replace(event, text=pieces[at], reason=reason if at + 1 == len(pieces) else None))

        prompt, samples, *_ = arguments
        return super().submit_samples(prompt, samples, len(pieces), listener=scripted, **options)


@contextmanager
def scripted(template: str = HERMES, **settings: Any) -> Iterator[Served]:
    """A server with a chat template; `write` sets its answers."""

    def with_template(tokenizer: Any) -> Any:
        tokenizer.chat_template = template
        return tokenizer

    with serving(engine(context=256, wrap=with_template), kind=Script, **settings) as served:
        yield served


def write(served: Served, text: str, size: int = 3, reason: End = "stop") -> None:
    """Set the text of the next answers, in tokens of some characters."""
    assert isinstance(served.scheduler, Script)
    served.scheduler.pieces = [text[i : i + size] for i in range(0, len(text), size)]
    served.scheduler.reason = reason


def post(served: Served, **body: Any) -> tuple[int, Any]:
    """Status and answer to a chat."""
    return served.call("POST", CHATS, {"messages": [USER], **body})[:2]


def deltas(served: Served, **body: Any) -> list[dict[str, Any]]:
    """The choices of a stream's chunks."""
    status, text = post(served, stream=True, **body)
    assert status == 200, text
    found = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [choice for chunk in found for choice in chunk["choices"]]


def message_of(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas of a stream add up to, with ids of calls left out."""
    found: dict[str, Any] = {}
    for delta in (choice["delta"] for choice in choices):
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                found[name] = found.get(name, "") + delta[name]
        for part in delta.get("tool_calls", ()):
            calls = found.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                calls.append({"type": part["type"], "function": dict(part["function"])})
                assert part["id"]
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return found
