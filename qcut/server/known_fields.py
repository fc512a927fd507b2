"""Fields of other servers' requests: those without influence on the response, and those accepted only at defaults.

A field in neither table and not in the schema is unknown: it is logged once and ignored; a strict server refuses it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic_core import to_json

from qcut.server.refusals import Refusal

_log = logging.getLogger("qcut")
_SHOWN = 80
_MOST_NAMES = 64


class Only(NamedTuple):
    """A field that would change the response and is not supported.

    Attributes:
        values: accepted values, without effect; null always is.
        advice: alternative for the user.
    """

    values: tuple[object, ...]
    advice: str


_STRUCTURED = "Served are json, regex, choice and grammar"
_TEXT = "The model reads and writes text; send text only"
_BEAMS = "Beam search is not served; ask for n samples and compare their log-probabilities"
_SAMPLER = "Served are temperature, top_p, top_k, min_p, the penalties and logit_bias"
_PROMPT = "Shorten the prompt before it is sent; /tokenize counts its tokens"
_STORED = "Responses are not stored; send the whole conversation as input"

IGNORED = frozenset(
    {
        *("cache_prompt", "cache_salt", "client_metadata", "guided_decoding_backend"),
        *("id_slot", "include_reasoning", "max_tool_calls", "metadata", "moderation", "n_keep", "parallel_tool_calls"),
        *("parse_tool_calls", "priority", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("reasoning_format", "request_id", "return_progress", "safety_identifier", "service_tier", "slot_id"),
        *("spaces_between_special_tokens", "store", "t_max_predict_ms", "timings_per_token", "user"),
    }
)
"""Fields without influence on the text."""

CONSTRAINTS = frozenset(
    {
        *("grammar", "guided_choice", "guided_grammar", "guided_json", "guided_json_object", "guided_regex"),
        *("json_schema", "response_format", "structured_outputs"),
    }
)
"""Fields of the answer's form: see `qcut.server.structured`."""

ONLY: Mapping[str, Only] = {
    "add_response_role": Only((False,), "Use /v1/chat/completions"),
    "allowed_token_ids": Only(([],), _SAMPLER),
    "bad_words": Only(([],), "Give the words' tokens a logit_bias of -100"),
    "early_stopping": Only((False,), _BEAMS),
    "guided_whitespace_pattern": Only((), "Between the parts of JSON there are a space, or a line's end and spaces"),
    "kv_transfer_params": Only(({},), "One server computes the whole answer"),
    "length_penalty": Only((1,), _BEAMS),
    "logits_processors": Only(([],), _SAMPLER),
    "n_probs": Only((0,), "Ask for logprobs"),
    "prompt_embeds": Only(([],), "Send text or token ids as prompt"),
    "prompt_logprobs": Only((), "/v1/completions gives them with echo, logprobs and max_tokens 0"),
    "structural_tag": Only((), _STRUCTURED),
    "truncate_prompt_tokens": Only((), _PROMPT),
    "use_beam_search": Only((False,), _BEAMS),
    "vllm_xargs": Only(({},), _SAMPLER),
    # Samplers of llama.cpp, at llama.cpp's defaults.
    "dry_multiplier": Only((0,), _SAMPLER),
    "dynatemp_range": Only((0,), _SAMPLER),
    "mirostat": Only((0,), _SAMPLER),
    "tfs_z": Only((1,), _SAMPLER),
    "top_n_sigma": Only((-1,), _SAMPLER),
    "typical_p": Only((1,), _SAMPLER),
    "xtc_probability": Only((0,), _SAMPLER),
}
"""Fields of all requests."""

COMPLETION_ONLY: Mapping[str, Only] = {
    **ONLY,
    "image_data": Only(([],), _TEXT),
    "suffix": Only(("",), "Filling in between two texts is not served; put what follows into the prompt"),
}
"""Fields of ``/v1/completions``."""

CHAT_ONLY: Mapping[str, Only] = {
    **ONLY,
    "audio": Only((), _TEXT),
    "chat_template": Only(("",), "`qcut serve --chat-template FILE` sets a template"),
    "documents": Only(([],), "Send their text in a message"),
    "echo": Only((False,), "Use /v1/completions"),
    "function_call": Only(("none", "auto"), "Use tool_choice"),
    "functions": Only(([],), "Use tools"),
    "media_io_kwargs": Only(({},), _TEXT),
    "mm_processor_kwargs": Only(({},), _TEXT),
    "modalities": Only((["text"],), _TEXT),
    "prediction": Only((), "Leave it out"),
    "verbosity": Only(("medium",), "Say in a message how long the answer shall be"),
    "web_search_options": Only((), "The server looks up nothing; put the text into a message"),
}
"""Fields of ``/v1/chat/completions``."""

RESPONSES_ONLY: Mapping[str, Only] = {
    **ONLY,
    "background": Only((False,), _STORED),
    "context_management": Only(([],), _PROMPT),
    "conversation": Only((), _STORED),
    "previous_response_id": Only(("",), _STORED),
    "prompt": Only((), "Send the prompt's text as input"),
    "truncation": Only(("disabled",), _PROMPT),
}
"""Fields of ``/v1/responses``."""

MESSAGE_IGNORED = frozenset({"annotations", "id", "phase", "refusal", "status", "type"})
MESSAGE_ONLY: Mapping[str, Only] = {
    "audio": Only(({},), _TEXT),
    "function_call": Only(({},), "Send tool_calls"),
}
"""Fields of a message."""

ALIASES: Mapping[str, str] = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Field names of llama.cpp's server, and the corresponding fields here."""


class UnknownFields:
    """Treatment of unknown fields.

    Args:
        strict: refuse them; otherwise log each name once, up to a number of names.
    """

    def __init__(self, strict: bool = False) -> None:
        self._strict = strict
        self._names: set[str] = set()
        self._lock = threading.Lock()

    def found(self, name: str, allowed: Mapping[str, Any]) -> None:
        """Log a field, or refuse it.

        Args:
            name: path of the field.
            allowed: known fields at this place.

        Raises:
            Refusal: the server is strict.
        """
        shown = name[:_SHOWN]
        if self._strict:
            message = f"unknown field {shown}; allowed: {', '.join(sorted(allowed))}"
            raise Refusal(400, message, param=shown, code="unknown")
        with self._lock:
            if shown in self._names or len(self._names) > _MOST_NAMES:
                return
            self._names.add(shown)
            is_last = len(self._names) > _MOST_NAMES
        if is_last:
            _log.warning("more unknown fields than %d; further ones are ignored without a line", _MOST_NAMES)
        else:
            _log.warning("unknown field %r is ignored in requests (--strict refuses it)", shown)


def refuse_unserved(given: Mapping[str, Any], table: Mapping[str, Only], where: str = "") -> None:
    """Refuse unsupported fields that are not at their default.

    Args:
        given: fields of a request or of a nested object, without nulls.
        table: fields that are accepted only at a default.
        where: path of the enclosing fields, each with a dot.

    Raises:
        Refusal: names the field, its value, the allowed values, and the alternative.
    """
    for name in given:
        if name not in table:
            continue
        values, advice = table[name]
        found = given[name]
        if isinstance(found, dict):
            found = {key: value for key, value in found.items() if value is not None}
        if not any(type(found) in _alike(value) and found == value for value in values):
            passes = " or ".join([*(shown(value) for value in values), "null"])
            message = f"{where}{name}: found {shown(given[name])}; allowed: {passes}. {advice}"
            raise Refusal(400, message, param=f"{where}{name}", code="unsupported")


def shown(value: object) -> str:
    """A value's JSON, shortened."""
    text = to_json(value, inf_nan_mode="constants").decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _alike(value: object) -> tuple[type, ...]:
    """JSON types equivalent to a value's: 1 and 1.0 are, True is not."""
    return (int, float) if type(value) in (int, float) else (type(value),)
