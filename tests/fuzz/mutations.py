"""Breaks files, the same way for the same seed: bits, bytes, lengths, JSON, safetensors headers, special files."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

HOSTILE_STRINGS = (
    "",
    ".",
    "..",
    "../x",
    "../../etc/passwd",
    "/etc/passwd",
    "/dev/zero",
    "a/b",
    "a\0b",
    "\0",
    "~",
    "$HOME",
    "é\u202e\U0001f980",
    "\ud800",
    "nan",
    "Infinity",
    "-1",
    "None",
    "__class__",
    "__reduce__",
    "org/kernel",
    "x.safetensors",
    "../x.safetensors",
    "/etc/x.safetensors",
    "\0.safetensors",
    "%s%n{0}",
    "a" * 300 + ".safetensors",
    "b" * 5_000,
    "0." * 20_000,
)

HOSTILE_NUMBERS = (
    "0",
    "-0",
    "-0.0",
    "1",
    "-1",
    "-5",
    "2",
    "3",
    "7",
    "128",
    "255",
    "1000000",
    "1000000000",
    "2147483647",
    "2147483648",
    "-2147483649",
    "4294967296",
    "4611686018427387904",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551616",
    "1" + "0" * 400,
    "-1" + "0" * 400,
    "9" * 5_000,
    "0.5",
    "1.5",
    "1e-7",
    "1e-320",
    "1e308",
    "1e309",
    "-1e309",
    "NaN",
    "Infinity",
    "-Infinity",
)

INTEGERS = (0, 1, -1, 2, 7, 8, 255, 1 << 15, 1 << 16, 10**9, (1 << 31) - 1, -(1 << 31))


class Raw(str):
    """Text that stands in a JSON document as it is."""

    __slots__ = ()


class Pairs(list[tuple[str, Any]]):
    """A JSON object as its members, so that a key may stand there twice."""


@dataclass(frozen=True)
class Mutation:
    """What a file becomes.

    Attributes:
        what: what was done, in words.
        content: the new bytes; None where ``place`` puts something else than a file.
        place: what is made at the path instead of a file.
    """

    what: str
    content: bytes | None
    place: Callable[[Path], None] | None = None

    def apply(self, path: Path) -> None:
        """Take the file away and put the mutation in its place."""
        path.unlink()
        if self.place is not None:
            self.place(path)
        elif self.content is not None:
            path.write_bytes(self.content)


def mutate(rng: Random, data: bytes, kind: str) -> Mutation:
    """One mutation of a file's bytes.

    Args:
        rng: the only source of chance.
        data: the file as it should be.
        kind: what the bytes are understood as: ``json``, ``lines`` (of JSON), ``safetensors``, ``binary``, or ``entry``
            (of the kernel cache).
    """
    if rng.random() < 0.015:
        return rng.choice(_SPECIAL)
    structured = _STRUCTURED.get(kind)
    if structured is not None and rng.random() < 0.75:
        what, content = structured(rng, data)
    else:
        what, content = _bytes(rng, data)
    if rng.random() < 0.03:
        more, content = _bytes(rng, content)
        what = f"{what}; {more}"
    return Mutation(what, content)


# ── no file ──────────────────────────────────────────────────────────────────────────────────────


def _link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


_SPECIAL = (
    Mutation("nothing there", None),
    Mutation("an empty file", b""),
    Mutation("a FIFO", None, os.mkfifo),
    Mutation("a directory", None, Path.mkdir),
    Mutation("a link to /dev/zero", None, _link_to("/dev/zero")),
    Mutation("a link to /dev/null", None, _link_to("/dev/null")),
    Mutation("a link to itself", None, lambda path: path.symlink_to(path.name)),
    Mutation("a link to nothing", None, _link_to("no such file")),
    Mutation("a file of 64 GiB without data", None, lambda path: _sparse(path, 64 << 30)),
)


def _sparse(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────


def _bytes(rng: Random, data: bytes) -> tuple[str, bytes]:
    """Bits, bytes and lengths, whatever the bytes mean."""
    size = len(data)
    if size == 0:
        return "bytes in an empty file", rng.randbytes(rng.randrange(1, 64))
    at = rng.randrange(size)
    length = min(size - at, rng.choice((1, 1, 2, 4, 8, 64, 1024)))
    out = bytearray(data)
    how = rng.choice(("flip", "flip", "flips", "set", "insert", "delete", "truncate", "append", "copy", "zero", "swap"))
    if how == "flip":
        bit = rng.randrange(8)
        out[at] ^= 1 << bit
        return f"bit {bit} of byte {at} flipped", bytes(out)
    if how == "flips":
        count = rng.randrange(2, 40)
        for _ in range(count):
            out[rng.randrange(size)] ^= 1 << rng.randrange(8)
        return f"{count} bits flipped", bytes(out)
    if how == "set":
        out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, ord('"'), ord("{"), ord("}"), ord(","), ord("9"), ord("\n")))
        return f"byte {at} is {out[at]}", bytes(out)
    if how == "insert":
        out[at:at] = rng.randbytes(length)
        return f"{length} random bytes put in at {at}", bytes(out)
    if how == "delete":
        del out[at : at + length]
        return f"{length} bytes taken out at {at}", bytes(out)
    if how == "truncate":
        return f"ends at {at} of {size}", bytes(out[:at])
    if how == "append":
        count = rng.choice((1, 2, 7, 8, 4096))
        return f"{count} bytes appended", bytes(out) + rng.randbytes(count)
    if how == "zero":
        out[at : at + length] = bytes(length)
        return f"{length} bytes at {at} are 0", bytes(out)
    source = rng.randrange(size)
    piece = data[source : source + length]
    if how == "copy":
        out[at : at + len(piece)] = piece
        return f"{len(piece)} bytes at {at} are those at {source}", bytes(out)
    # A file spliced together from its own halves, the second one first or both from another place.
    return f"spliced: from {source} on after the first {at}", data[:at] + data[source:]


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────


def parse(text: str) -> Any:
    """A JSON document with `Pairs` as objects."""
    return json.loads(text, object_pairs_hook=Pairs)


def dump(node: Any) -> str:
    """The text of a document in which `Pairs` and `Raw` may stand."""
    if isinstance(node, Raw):
        return str(node)
    if isinstance(node, Pairs):
        return "{" + ", ".join(f"{json.dumps(key)}: {dump(value)}" for key, value in node) + "}"
    if isinstance(node, list):
        return "[" + ", ".join(map(dump, node)) + "]"
    return json.dumps(node)


def _places(node: Any, path: str = "") -> list[tuple[str, Any, int]]:
    """Every value but the outermost: its path, the container that holds it, and where in it."""
    found: list[tuple[str, Any, int]] = []
    if isinstance(node, Pairs):
        for i, (key, value) in enumerate(node):
            found.append((f"{path}.{key[:20]}", node, i))
            found += _places(value, found[-1][0])
    elif isinstance(node, list):
        for i, value in enumerate(node):
            found.append((f"{path}[{i}]", node, i))
            found += _places(value, found[-1][0])
    return found


def _get(holder: Any, i: int) -> Any:
    return holder[i][1] if isinstance(holder, Pairs) else holder[i]


def _set(holder: Any, i: int, value: Any) -> None:
    holder[i] = (holder[i][0], value) if isinstance(holder, Pairs) else value


def _nested(rng: Random) -> Raw:
    depth = rng.choice((20, 60, 900, 5_000, 100_000))
    return Raw(rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth)))


def _hostile(rng: Random, value: Any) -> Any:
    """Another value where one stood."""
    how = rng.choice(("type", "number", "number", "string", "nudge", "nest", "long"))
    if how == "type":
        return rng.choice((None, True, False, 1, 1.5, "x", "1", [], Pairs(), [value], Pairs([("x", value)]), [[], []]))
    if how == "number":
        return Raw(rng.choice(HOSTILE_NUMBERS))
    if how == "string":
        return rng.choice(HOSTILE_STRINGS)
    if how == "nest":
        return _nested(rng)
    if how == "long":
        return rng.choice(("x" * rng.choice((5_000, 200_000)), [0] * 20_000, Pairs((f"k{i}", i) for i in range(5_000))))
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return rng.choice((value + 1, value - 1, -value, value * 2, value / 2, value * 1000))
    if isinstance(value, str):
        return rng.choice((value + "x", value[:-1], value.upper(), value[::-1], f"{value}.{value}", f" {value}"))
    return rng.choice((None, value, [value]))


def mutate_tree(rng: Random, tree: Any) -> str:
    """Change a document parsed by `parse` in place, in one to three places; returns what was done."""
    done = []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        places = _places(tree)
        if not places:
            break
        path, holder, i = rng.choice(places)
        how = rng.choice(("value", "value", "value", "remove", "rename", "twice", "add", "copy", "swap"))
        if how == "value":
            _set(holder, i, _hostile(rng, _get(holder, i)))
        elif how == "remove":
            del holder[i]
        elif how == "rename" and isinstance(holder, Pairs):
            key = holder[i][0]
            other = rng.choice((*HOSTILE_STRINGS, key + "x", key[:-1], key.upper(), f"{key}.{key}"))
            holder[i] = (other, holder[i][1])
        elif how == "twice" and isinstance(holder, Pairs):
            value = holder[i][1]
            holder.insert(rng.randrange(len(holder) + 1), (holder[i][0], rng.choice((value, _hostile(rng, value)))))
        elif how == "add":
            value = _hostile(rng, _get(holder, i))
            holder.append((rng.choice(HOSTILE_STRINGS), value) if isinstance(holder, Pairs) else value)
        else:
            _, source, j = rng.choice(places)
            value, other = _get(holder, i), _get(source, j)
            # By value: a document that holds itself has no end.
            _set(holder, i, deepcopy(other))
            if how == "swap":
                _set(source, j, deepcopy(value))
        done.append(f"{how} at {path}")
    return ", ".join(done) or "nothing to change"


def _json(rng: Random, data: bytes) -> tuple[str, bytes]:
    text = data.decode()
    how = rng.choice(("tree",) * 9 + ("whole",))
    if how == "whole":
        other = rng.choice(
            (
                "null",
                "[]",
                "{}",
                "1",
                '"x"',
                "NaN",
                "",
                " ",
                "\ufeff" + text,
                text + text,
                text + ",",
                f"[{text}]",
                str(_nested(rng)),
                '{"x": ' + str(_nested(rng)) + "}",
                "9" * 100_000,
            )
        )
        coding = rng.choice(("utf-8", "utf-8", "utf-16", "utf-32"))
        return f"the document is {other[:20]!r} in {coding}", other.encode(coding)
    tree = parse(text)
    what = mutate_tree(rng, tree)
    return what, dump(tree).encode("utf-8", "surrogatepass")


def _lines(rng: Random, data: bytes) -> tuple[str, bytes]:
    lines = data.split(b"\n")
    i = rng.randrange(len(lines))
    how = rng.choice(("change", "change", "change", "remove", "twice", "swap", "join", "cut", "no end"))
    if how == "change" and lines[i].strip():
        what, lines[i] = _json(rng, lines[i])
        return f"line {i}: {what}", b"\n".join(lines)
    if how == "remove":
        del lines[i]
    elif how == "twice":
        lines.insert(rng.randrange(len(lines)), lines[i])
    elif how == "swap":
        j = rng.randrange(len(lines))
        lines[i], lines[j] = lines[j], lines[i]
    elif how == "join" and i + 1 < len(lines):
        lines[i : i + 2] = [lines[i] + lines[i + 1]]
    elif how == "cut":
        lines[i] = lines[i][: rng.randrange(len(lines[i]) + 1)]
    else:
        return "no newline at the end", data.rstrip(b"\n")
    return f"line {i}: {how}", b"\n".join(lines)


# ── safetensors ──────────────────────────────────────────────────────────────────────────────────

_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "U16", "C64", "X9", "")


def _safetensors(rng: Random, data: bytes) -> tuple[str, bytes]:
    (length,) = struct.unpack_from("<Q", data)
    header, body = data[8 : 8 + length], data[8 + length :]
    how = rng.choice(("length", "body", "body", "tree", "tree", "field", "field", "field", "drop", "pad"))
    if how == "length":
        lie = rng.choice((0, 1, 7, length - 1, length + 1, length * 2, len(data), 1 << 31, 1 << 63, (1 << 64) - 1))
        return f"the header's length is said to be {lie}", struct.pack("<Q", lie) + data[8:]
    if how == "body":
        if rng.random() < 0.3:
            at = rng.randrange(0, max(1, len(body) - 4), 4) if len(body) >= 4 else 0
            value = rng.choice(
                (b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x80\x80\x80\x80")
            )
            return f"{value.hex()} at {at} of the tensors", data[: 8 + length] + body[:at] + value + body[at + 4 :]
        what, body = _bytes(rng, body)
        return f"tensors: {what}", data[: 8 + length] + body
    tree = parse(header.decode())
    entries = [i for i, (key, _) in enumerate(tree) if key != "__metadata__"]
    if how == "tree" or not entries:
        what = mutate_tree(rng, tree)
    elif how == "pad":
        text = dump(tree).encode() + b" " * rng.choice((1, 3, 8, 1000))
        return "spaces after the header", struct.pack("<Q", len(text)) + text + body
    elif how == "drop":
        i = rng.choice(entries)
        what = f"no tensor {tree[i][0]!r}"
        begin, end = dict(tree[i][1])["data_offsets"]
        body = body[:begin] + body[end:]
        del tree[i]
        for key, entry in tree:
            if key != "__metadata__":
                for j, (name, value) in enumerate(entry):
                    if name == "data_offsets" and value[0] >= end:
                        entry[j] = (name, [value[0] - (end - begin), value[1] - (end - begin)])
    else:
        i = rng.choice(entries)
        name, entry = tree[i]
        fields = dict(entry)
        begin, end = fields["data_offsets"]
        what_else = rng.choice(("dtype", "shape", "offsets", "offsets", "overlap", "exchange"))
        if what_else == "dtype":
            fields["dtype"] = rng.choice(_DTYPES)
        elif what_else == "shape":
            shape = list(fields["shape"])
            fields["shape"] = rng.choice(
                (
                    shape[::-1],
                    [*shape, 1],
                    shape[1:],
                    [],
                    [0],
                    [-1, *shape],
                    [1 << 62, 4],
                    [1 << 32, 1 << 32],
                    [s * 2 for s in shape],
                    [1.5],
                    [1] * 100,
                )
            )
        elif what_else == "offsets":
            delta = rng.choice((1, -1, 4, -4, 1 << 40, len(body)))
            fields["data_offsets"] = rng.choice(
                (
                    [begin + delta, end + delta],
                    [begin, end + delta],
                    [begin + delta, end],
                    [end, begin],
                    [begin],
                    [0, 0],
                )
            )
        else:
            other = rng.choice(entries)
            theirs = dict(tree[other][1])
            fields["data_offsets"] = theirs["data_offsets"]
            if what_else == "exchange":
                tree[other] = (tree[other][0], Pairs((theirs | {"data_offsets": [begin, end]}).items()))
        tree[i] = (name, Pairs(fields.items()))
        what = f"{what_else} of {name!r}"
    text = dump(tree).encode("utf-8", "surrogatepass")
    return what, struct.pack("<Q", len(text)) + text + body


# ── integers in front ────────────────────────────────────────────────────────────────────────────


def _binary(rng: Random, data: bytes) -> tuple[str, bytes]:
    """A little-endian int32, mostly one of the first ten, or a float, becomes another."""
    if len(data) < 4:
        return _bytes(rng, data)
    words = len(data) // 4
    at = rng.randrange(min(words, 10)) if rng.random() < 0.6 else rng.randrange(words)
    (old,) = struct.unpack_from("<i", data, 4 * at)
    choices = [struct.pack("<i", value) for value in INTEGERS]
    choices += [struct.pack("<i", max(-(1 << 31), min(value, (1 << 31) - 1))) for value in (old + 1, old - 1, -old)]
    choices += [struct.pack("<f", value) for value in (float("nan"), float("inf"), -float("inf"), 1e38, -1e30)]
    new = rng.choice(choices)
    return f"word {at} is {new.hex()} for {old}", data[: 4 * at] + new + data[4 * at + 4 :]


def _entry(rng: Random, data: bytes) -> tuple[str, bytes]:
    """An entry of the kernel cache with broken content, and a digest that fits this content."""
    start = data.index(b"\n") + 1
    body = data[start + 32 :]
    (length,) = struct.unpack_from("<Q", body)
    header, blobs = body[8 : 8 + length], body[8 + length :]
    if rng.random() < 0.2:
        lie = rng.choice((0, 1, length - 1, length + 1, len(body), 1 << 31, 1 << 62, 1 << 63, (1 << 64) - 1))
        what, body = f"the header's length is said to be {lie}", struct.pack("<Q", lie) + body[8:]
    elif rng.random() < 0.2:
        what, body = _bytes(rng, body)
    else:
        what, header = _json(rng, header)
        body = struct.pack("<Q", len(header)) + header + blobs
    return f"{what}; the digest fits", data[:start] + hashlib.sha256(body).digest() + body


_STRUCTURED: dict[str, Callable[[Random, bytes], tuple[str, bytes]]] = {
    "json": _json,
    "lines": _lines,
    "safetensors": _safetensors,
    "binary": _binary,
    "entry": _entry,
}
