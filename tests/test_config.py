"""Schemes, ranges and exceptions: names, JSON round trips, and what is refused."""

from __future__ import annotations

import json
import pickle

import pytest

from emitters import epilogue, gemm
from qcut import config, errors
from qcut.config import W8A8, W8A16, Float, StaticRange, parse_scheme, scheme_from_json

SCHEMES = (W8A8(), W8A8("static"), W8A16(), Float())


def test_constants_agree_with_the_emitters():
    assert (config.K_MAX, config.K_MAX_ZERO_POINT) == (gemm.K_MAX, gemm.K_MAX_ZERO_POINT)
    assert config.ACTIVATIONS == epilogue.ACTIVATIONS


def test_k_limits_are_the_largest_exact_ones():
    assert 128 * 128 * config.K_MAX < 2**31 <= 128 * 128 * (config.K_MAX + 1)
    assert 255 * 127 * config.K_MAX_ZERO_POINT < 2**31 <= 255 * 127 * (config.K_MAX_ZERO_POINT + 1)


def test_padded_k():
    assert [config.padded_k(k) for k in (1, 15, 16, 17, 32, 33)] == [16, 16, 16, 32, 32, 48]


def test_scheme_names():
    assert [s.name for s in SCHEMES] == ["w8a8", "w8a8_static", "w8a16", "fp16"] == list(config.SCHEME_NAMES)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_scheme_round_trips(scheme):
    assert parse_scheme(scheme.name) == scheme
    assert parse_scheme(scheme) is scheme
    assert scheme_from_json(json.loads(json.dumps(scheme.to_json()))) == scheme
    assert pickle.loads(pickle.dumps(scheme)) == scheme
    assert len({scheme, parse_scheme(scheme.name)}) == 1


@pytest.mark.parametrize("name", ["int8", "W8A8", "", None, ["w8a8"]])
def test_unknown_scheme_lists_the_names(name):
    with pytest.raises(errors.ConfigError, match=r"does not exist; use one of w8a8, w8a8_static, w8a16, fp16"):
        parse_scheme(name)


def test_unknown_mode():
    with pytest.raises(errors.ConfigError, match="'fast' does not exist; use 'dynamic' or 'static'"):
        W8A8("fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [None, [], {}, {"kind": "w4"}, {"kind": ["w8a8"]}])
def test_foreign_scheme_json(data):
    with pytest.raises(errors.ConfigError, match=r"not a scheme: .*'kind' is one of w8a8, w8a16, fp16"):
        scheme_from_json(data)


def test_scheme_json_with_unknown_fields():
    with pytest.raises(errors.ConfigError, match="kind 'w8a16' has unknown fields"):
        scheme_from_json({"kind": "w8a16", "group_size": 128})
    with pytest.raises(errors.ConfigError, match="mode 'x' does not exist"):
        scheme_from_json({"kind": "w8a8", "mode": "x"})


def test_unknown_activation():
    assert config.check_activation("silu") == "silu"
    with pytest.raises(
        errors.ConfigError, match="'gelu' does not exist; use one of none, relu, gelu_erf, gelu_tanh, silu"
    ):
        config.check_activation("gelu")


def test_static_range_round_trip():
    original = StaticRange(-0.1, 1 / 3)
    assert StaticRange.from_json(json.loads(json.dumps(original.to_json()))) == original
    assert StaticRange.including_zero(0.5, 2.0) == StaticRange(0.0, 2.0)
    assert StaticRange.including_zero(-3.0, -1.0) == StaticRange(-3.0, 0.0)


@pytest.mark.parametrize(
    ("lo", "hi"), [(0.1, 1.0), (-1.0, -0.1), (float("nan"), 1.0), (-1.0, float("nan")), (float("-inf"), 0.0)]
)
def test_static_range_refuses(lo, hi):
    with pytest.raises(errors.ConfigError, match="is not finite with lo <= 0 <= hi"):
        StaticRange(lo, hi)


@pytest.mark.parametrize("data", [{}, {"lo": -1.0}, {"lo": "x", "hi": 1}, None, [1, 2]])
def test_static_range_json_refuses(data):
    with pytest.raises(errors.ConfigError, match="not a static range"):
        StaticRange.from_json(data)


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.QuantizationError, ValueError),
        (errors.ShapeError, ValueError),
        (errors.DtypeError, TypeError),
        (errors.DeviceError, RuntimeError),
        (errors.UnsupportedError, NotImplementedError),
        (errors.CheckpointError, ValueError),
        (errors.CalibrationError, ValueError),
        (errors.PlanError, ValueError),
        (errors.LaunchError, RuntimeError),
        (errors.BuildError, RuntimeError),
        (errors.ToolchainError, errors.BuildError),
    ],
)
def test_exception_kinds(cls, builtin):
    assert issubclass(cls, errors.QcutError)
    assert issubclass(cls, builtin)
    assert str(pickle.loads(pickle.dumps(cls("what was found")))) == "what was found"


def test_quantization_error_names_the_layer():
    error = errors.QuantizationError("weight is empty", "h.0.mlp")
    assert str(error) == "layer 'h.0.mlp': weight is empty"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.layer) == (str(error), "h.0.mlp")


def test_build_error_shows_kernel_command_and_the_end_of_the_log():
    log = "\n".join(f"line {i}" for i in range(50))
    error = errors.BuildError("nvcc failed", kernel="qcut_x", command="nvcc -cubin a.cu", log=log)
    lines = str(error).splitlines()
    assert lines[:3] == ["kernel qcut_x: nvcc failed", "command: nvcc -cubin a.cu", "line 30"]
    assert lines[-1] == "line 49"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.kernel, copy.command, copy.log) == (str(error), error.kernel, error.command, log)
