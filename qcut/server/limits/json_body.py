"""Parses the JSON of a body; refuses nested or wide JSON before objects are built."""

from __future__ import annotations

from codecs import BOM_UTF8
from typing import Any

from pydantic_core import from_json

from qcut.server.refusals import Refusal

MOST_FIELDS = 4096
"""Most fields of one JSON object."""
MOST_NESTED = 32768
"""Most arrays and objects in a body."""
MOST_DEPTH = 64
"""Deepest nesting of arrays and objects."""


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a body that is a JSON object.

    Args:
        data: the body.

    Raises:
        Refusal: invalid JSON (``NaN`` and ``Infinity`` included), not an object, or too many or too deep objects.
    """
    if _nested(data) > MOST_NESTED:  # before parsing: building many objects is slow and holds Python's global lock
        raise Refusal(400, f"the body has more arrays and objects than allowed: {MOST_NESTED}", code="json_invalid")
    try:
        # Some clients send a byte order mark.
        given = from_json(data.removeprefix(BOM_UTF8), allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise Refusal(400, f"the body is no JSON: {error}"[:300], code="json_invalid") from None
    if not isinstance(given, dict):
        raise Refusal(400, f"the body is a JSON {_kind(given)}; allowed: an object", code="json_invalid")
    level: list[Any] = [given]
    depth = 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise Refusal(400, f"the body is nested deeper than allowed: {MOST_DEPTH}", code="json_invalid")
        wide = max((len(one) for one in level if isinstance(one, dict)), default=0)
        if wide > MOST_FIELDS:
            raise Refusal(400, f"an object of {wide} fields; allowed: {MOST_FIELDS}", code="json_invalid")
        level = [
            item
            for one in level
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, dict | list)
        ]
    return given


def _nested(data: bytes) -> int:
    """Number of opening brackets; brackets in strings are excluded if there are many."""
    count = data.count(b"[") + data.count(b"{")
    if count <= MOST_NESTED:
        return count
    # A regular expression would be quadratic in unterminated strings.
    outside = b"".join(data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    return outside.count(b"[") + outside.count(b"{")


def _kind(value: Any) -> str:
    kinds = {list: "array", str: "string", bool: "truth value", int: "number", float: "number", type(None): "null"}
    return kinds[type(value)]
