"""A plan's file: written whole or not at all, read with every value checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qcut.conversion.planning.plan import LayerPlan, Plan
from qcut.errors import PlanError
from qcut.schemes import StaticRange
from tests.support.faults import deaths, every_failure, files_of_at_most, mounted


def made(value: float) -> Plan:
    layer = LayerPlan(
        "w8a8_static", 32, 16, StaticRange(-value, value), "minmax", {"w8a8": value}, {"w8a8": 1.0}, "why"
    )
    return Plan({"a.b": layer}, 0.1, "logits", "time", None, value, float("inf"), 7)


def test_round_trip(tmp_path: Path) -> None:
    made(0.5).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made(0.5)


def put(*keys: str):
    """The text of a plan with a value in place of another."""

    def change(value: object) -> str:
        data = made(0.5).to_json() | {"start": None}
        inner = data
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        return json.dumps(data)

    return change


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (put("tokens")(-5), "'tokens': found -5"),
        (put("tokens")(1 << 70), "64 bits"),
        (put("budget")(float("nan")), "NaN; finite"),
        (put("measured")(None), "'measured': found None; allowed: a finite number"),
        (put("metric")(3), "'metric': found 3; allowed: text"),
        (
            put("layers", "a.b", "in_features")(0),
            r"'layers\.a\.b\.in_features': found 0; allowed: a whole number from 1",
        ),
        (put("layers", "a.b", "in_features")("abc"), "found 'abc'"),
        (put("layers", "a.b", "scheme")(["w8a8"]), r"scheme': found \['w8a8'\]; allowed: text"),
        (put("layers", "a.b", "cost")({"w8a8": [1]}), r"found \[1\]; allowed: a finite number"),
        (put("layers", "a.b", "sensitivity")({"w8a8": "low"}), "found 'low'"),
        (put("layers", "a.b", "static_range")({"lo": -1, "hi": -2}), r"static_range\.hi': found -2"),
        (put("layers", "a.b", "static_range")([1, 2]), "an object"),
        ("[" * 100_000, "within one another"),
        ('{"budget": 1' + "0" * 400 + "}", "64 bits"),
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_failed_save_keeps_old_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = []
    made(1).save(path)
    for _ in deaths(lambda: made(2).save(path)):
        found.append(Plan.load(path).measured)
        made(1).save(path)
        assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]
    assert set(found) == {1, 2}
    made(1).save(path)
    held = [1.0]

    def check() -> None:
        assert Plan.load(path).measured in (1, 2)
        assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]
        held.append(1)
        made(1).save(path)

    every_failure(lambda: made(2).save(path), (PlanError,), check)
    assert len(held) > 5
    with files_of_at_most(50), pytest.raises(PlanError, match=f"{path}: cannot be written: .*too large"):
        made(2).save(path)
    assert Plan.load(path) == made(1)
    with mounted(tmp_path / "disk", "ro"), pytest.raises(PlanError, match="Read-only"):
        made(1).save(tmp_path / "disk" / "plan.json")
    with pytest.raises(PlanError, match=r"cannot be written: .*No such file"):
        made(1).save(tmp_path / "none" / "plan.json")
