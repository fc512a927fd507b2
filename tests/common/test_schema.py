"""Checks of JSON data: what is found and allowed is said, and nothing is converted."""

from __future__ import annotations

from typing import Any

import pytest

from qcut.common import schema
from qcut.errors import ConfigError

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
