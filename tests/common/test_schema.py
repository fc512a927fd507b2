"""The one reader: what is no regular file, too large, JSON that should not be, or data that fit no schema."""

from __future__ import annotations

import errno
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from qcut.common import schema
from qcut.common.schema import (
    JSON_DEPTH,
    JSON_WIDTH,
    closed_if_refused,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
)
from qcut.errors import CheckpointError, ConfigError

REFUSED = {
    "empty": (b"", "not readable as JSON"),
    "half": (b"{", "not readable as JSON"),
    "a list": (b"[]", "found a JSON list"),
    "no UTF-8": (b'{"a": "\xff"}', "not readable as JSON"),
    "deep": (b'{"a": ' + b"[" * 100_000, f"more than {JSON_DEPTH} objects within one another"),
    "deep and closed": (b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}", f"more than {JSON_DEPTH}"),
    "deep objects": (b'{"a": ' * 100_000, f"more than {JSON_DEPTH}"),
    "unclosed text before depth": (b'{"\\"": ' + b"[" * 100_000, f"more than {JSON_DEPTH}"),
    "NaN": (b'{"a": NaN}', "the number NaN; finite"),
    "Infinity": (b'{"a": -Infinity}', "the number -Infinity; finite"),
    "float beyond": (b'{"a": 1e400}', "the number 1e400; finite"),
    "integer beyond": (b'{"a": 1' + b"0" * 400 + b"}", "whole numbers of 64 bits"),
    "integer of many digits": (b'{"a": ' + b"9" * 100_000 + b"}", "whole numbers of 64 bits"),
    "2**63": (b'{"a": 9223372036854775808}', "whole numbers of 64 bits"),
    "twice": (b'{"a": 1, "a": 2}', "the key 'a' twice"),
    "lone surrogate": (b'{"a": "\\ud800"}', "not readable as JSON"),
    "wide object": (b'{"a": {' + b",".join(b'"k%d": 1' % i for i in range(1_000_000)) + b"}}", "in one object or list"),
    "wide list": (b'{"a": [' + b"1," * 1_000_000 + b"1]}", "in one object or list"),
    "wide object of lists": (
        b'{"a": {' + b",".join(b'"k%d": []' % i for i in range(300_000)) + b"}}",
        f"an object of 300000 keys; at most {JSON_WIDTH}",
    ),
    "wide and deep": (b'{"a": [' + b'{"b": [1, 2]},' * 700_000 + b"1]}", "values; fewer are read"),
    "many values": (b'{"a": [' + b"1," * 2_000_001 + b"1]}", "values; fewer are read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_json_that_is_refused(tmp_path: Path, case: str) -> None:
    data, message = REFUSED[case]
    (tmp_path / "x.json").write_bytes(data)
    start = time.process_time()
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        read_json(tmp_path / "x.json", ConfigError)
    assert time.process_time() - start < 5
    assert str(caught.value).startswith(f"{tmp_path / 'x.json'}: ")


def test_json_that_is_read() -> None:
    text = b'{"a": [1, -2.5, null, true, "[[[[\\\\\\"{{{{\\u00b5", 9223372036854775807], "b": {}}'
    assert parse_json(text, "x", ConfigError) == {"a": [1, -2.5, None, True, '[[[[\\"{{{{µ', (1 << 63) - 1], "b": {}}
    assert parse_json(b"[" * JSON_DEPTH + b"]" * JSON_DEPTH, "x", ConfigError)


def test_only_regular_files_are_opened_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    start = time.perf_counter()
    for name in ("pipe", "zeros", "."):
        with pytest.raises(ConfigError, match="not a regular file"):
            read_json(tmp_path / name, ConfigError)
    for name in ("none", "file/x"):
        with pytest.raises(ConfigError, match="there is no such file"):
            read_json(tmp_path / name, ConfigError)
    for name in ("loop", "x" * 5000, "a\0b"):
        with pytest.raises(ConfigError, match="cannot be opened"):
            read_json(tmp_path / name, ConfigError)
    assert time.perf_counter() - start < 5


def test_files_beyond_the_limit_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1234")
    assert read_bytes(path, 4, ConfigError) == b"1234"
    with pytest.raises(ConfigError, match=f"{path}: found 4 bytes; at most 3 are read"):
        read_bytes(path, 3, ConfigError)
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # of holes
    with pytest.raises(ConfigError, match="found 1099511627776 bytes"):
        read_json(path, ConfigError)
    with pytest.raises(ConfigError, match="at most 10 are read"):
        read_bytes(Path("/proc/self/maps"), 10, ConfigError)  # which has no size and does not end


@pytest.mark.parametrize(
    ("raised", "wanted"),
    [
        (OSError(errno.EIO, "Input/output error"), CheckpointError),
        (MemoryError(), CheckpointError),
        (KeyError("x"), KeyError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_file_that_is_refused_is_closed(tmp_path: Path, raised: BaseException, wanted: type[BaseException]) -> None:
    path = tmp_path / "some"
    path.write_bytes(b"data")
    for refuse in (True, False):
        file = open_regular(path, CheckpointError)
        if refuse:
            with pytest.raises(wanted) as caught, closed_if_refused(file, path, CheckpointError):
                raise raised
            assert (wanted is CheckpointError) == ("some: cannot be read: " in str(caught.value))
        else:
            with closed_if_refused(file, path, CheckpointError):
                pass
        assert file.closed == refuse
        file.close()


POINT = schema.record({"x": schema.number(0, 9)}, {"name": (schema.nothing_or(schema.text()), "a")})
CHECK = schema.record(
    {"points": schema.table(POINT), "sizes": schema.items(schema.integer(1, 5), 2), "on": schema.boolean()}, more=True
)


def data(**changes: Any) -> dict[str, Any]:
    return {"points": {"p": {"x": 1}}, "sizes": [1, 5], "on": True, "else": 3, **changes}


def test_what_fits_comes_back_with_its_defaults() -> None:
    assert schema.conform(data(), CHECK, "f", ConfigError) == data(points={"p": {"x": 1.0, "name": "a"}})
    assert schema.conform({"x": 9, "name": None}, POINT, "f", ConfigError) == {"x": 9.0, "name": None}
    assert schema.conform([1] * 3, schema.items(schema.anything(), most=3), "f", ConfigError) == [1] * 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "f: found []; an object"),
        (data(on=1), "f: field 'on': found 1; allowed: true or false"),
        (data(sizes=[1]), "f: field 'sizes': found [1]; allowed: a list of 2"),
        (data(sizes=[1, 6]), "f: field 'sizes[1]': found 6; allowed: a whole number from 1 to 5"),
        (data(sizes=[1, True]), "f: field 'sizes[1]': found True"),
        (data(sizes=[1, 2.0]), "f: field 'sizes[1]': found 2.0"),
        (data(points={"p": {"x": "1"}}), "f: field 'points.p.x': found '1'; allowed: a finite number from 0 to 9"),
        (data(points={"p": {"x": float("nan")}}), "found nan"),
        (data(points={"p": {"x": 10}}), "found 10"),
        (data(points={"p": {}}), "f: points.p: field 'x' is missing"),
        (data(points={"p": {"x": 1, "z": 2}}), "f: points.p: found the field 'z'; allowed: x, name"),
        (data(points={"p" * 5000: {"x": 1}}), "f: field 'points': found a str of 5000; allowed: keys of up to 4096"),
        (data(points={"p": {"x": 1, "name": "n" * 5000}}), "found a str of 5000; allowed: text of up to 4096"),
        (data(points=list(range(999))), "found a list of 999; allowed: an object"),
    ],
)
def test_what_does_not_fit_is_named(value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schema.conform(value, CHECK, "f", ConfigError)
    assert message in str(caught.value)
