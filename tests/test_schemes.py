"""Schemes, ranges and exceptions: names, JSON round trips, and what is refused."""

from __future__ import annotations

import json
import pickle

import pytest

from qcut import errors, schemes
from qcut.emitters.core import epilogue
from qcut.emitters.gemm import problem as gemm
from qcut.schemes import (
    FP8,
    W8A8,
    W8A16,
    Codebook,
    Float,
    Int16x8,
    StaticRange,
    W8A8Rotated,
    parse_scheme,
    scheme_from_json,
)

FP8_NAMES = ("fp8", "fp8_blocks", "fp8_dynamic", "fp8_static")
PLAIN_NAMES = ("w8a8", "w8a8_static", "w8a8_rotated", "w8a16", *FP8_NAMES, "int16x8", "int16x8_static", "fp16")
FP8S = (FP8(), FP8(blocks=True), FP8(tokens="dynamic"), FP8(tokens="static"))
PLAIN = (W8A8(), W8A8("static"), W8A8Rotated(), W8A16(), *FP8S, Int16x8(), Int16x8("static"), Float())
CODEBOOKS = {
    "codebook4": Codebook(),
    "codebook3": Codebook(3),
    "codebook2": Codebook(2),
    "codebook4+4": Codebook(4, 4),
    "codebook4_int8": Codebook(activation="int8"),
    "codebook4+4_int8": Codebook(4, 4, activation="int8"),
    "codebook4_pairs": Codebook(pairs=True),
    "codebook4_pairs_int8": Codebook(pairs=True, activation="int8"),
    "int4": Codebook(levels="steps", rotation="none"),
    "mxfp4": Codebook(group_size=32, levels="e2m1", rotation="none"),
    "nvfp4": Codebook(group_size=16, levels="e2m1", rotation="none", norm_dtype="e4m3"),
    "codebook4+2_rows_qr_seed0_residual_seed7_fp32norms_int8": Codebook(
        4, 2, None, "qr", 0, 7, activation="int8", norm_dtype="fp32"
    ),
    "codebook4_pairs_g50_qr_seed3_fp32norms_int8": Codebook(
        group_size=50, rotation="qr", seed=3, activation="int8", norm_dtype="fp32", pairs=True
    ),
    "codebook4_g64_none": Codebook(group_size=64, rotation="none"),
    "nvfp4_seed7_int8": Codebook(
        group_size=16, levels="e2m1", rotation="none", norm_dtype="e4m3", seed=7, activation="int8"
    ),
    "mxfp4_fp32norms": Codebook(group_size=32, levels="e2m1", rotation="none", norm_dtype="fp32"),
    "int3_g32_int8": Codebook(3, group_size=32, rotation="none", activation="int8", levels="steps"),
}
ROTATED = (W8A8Rotated(64), W8A8Rotated(None, 7), W8A8Rotated(seed=0))
SCHEMES = (*PLAIN, *ROTATED, *CODEBOOKS.values())


def test_constants_agree_with_the_emitters():
    assert (schemes.K_MAX, schemes.K_MAX_ZERO_POINT) == (gemm.K_MAX, gemm.K_MAX_ZERO_POINT)
    assert schemes.ACTIVATIONS == epilogue.ACTIVATIONS


def test_k_limits_are_the_largest_exact_ones():
    assert 128 * 128 * schemes.K_MAX < 2**31 <= 128 * 128 * (schemes.K_MAX + 1)
    assert 255 * 127 * schemes.K_MAX_ZERO_POINT < 2**31 <= 255 * 127 * (schemes.K_MAX_ZERO_POINT + 1)


def test_padded_k():
    assert [schemes.padded_k(k) for k in (1, 15, 16, 17, 32, 33)] == [16, 16, 16, 32, 32, 48]


def test_scheme_names():
    assert [s.name for s in PLAIN] == list(PLAIN_NAMES) == list(schemes.SCHEME_NAMES[: len(PLAIN)])
    assert [s.name for s in CODEBOOKS.values()] == list(CODEBOOKS)
    assert list(schemes.SCHEME_NAMES[len(PLAIN) :]) == list(CODEBOOKS)[:11]
    int8 = ["w8a8", "w8a8_static", "w8a8_rotated", "int16x8", "int16x8_static"]
    assert [s.name for s in PLAIN if s.int8_products] == int8
    assert [s.name for s in ROTATED] == ["w8a8_rotated_g64", "w8a8_rotated_rows_seed7", "w8a8_rotated_seed0"]
    assert [name for name, s in CODEBOOKS.items() if s.int8_products] == [n for n in CODEBOOKS if n.endswith("_int8")]


def test_schemes_say_what_they_need():
    said = {
        name: (scheme.int8_products, scheme.is_float, scheme.needs_range, scheme.takes_second_moments, scheme.passes)
        for name in (*PLAIN_NAMES, "codebook4", "codebook4+4_int8", "int4")
        for scheme in (parse_scheme(name),)
    }
    assert said == {
        "w8a8": (True, False, False, False, 1),
        "w8a8_static": (True, False, True, False, 1),
        "w8a8_rotated": (True, False, False, False, 1),
        "w8a16": (False, False, False, False, 1),
        "fp8": (False, False, False, False, 1),
        "fp8_blocks": (False, False, False, False, 1),
        "fp8_dynamic": (False, False, False, False, 1),
        "fp8_static": (False, False, True, False, 1),
        "int16x8": (True, False, False, False, 2),
        "int16x8_static": (True, False, True, False, 2),
        "fp16": (False, True, False, False, 1),
        "codebook4": (False, False, False, True, 1),
        "codebook4+4_int8": (True, False, False, True, 2),
        "int4": (False, False, False, False, 1),
    }
    assert [parse_scheme(name).weight_bytes(10, 256) for name in ("fp16", "w8a8", "codebook3")] == [5120, 2560, 1000]


def test_fp8_has_tokens_of_three_kinds():
    assert scheme_from_json({"kind": "fp8", "blocks": True}) == FP8(blocks=True)  # as older files have it
    assert FP8(tokens="static").to_json() == {"kind": "fp8", "blocks": False, "tokens": "static"}
    for tokens in ("dynamic", "static"):
        with pytest.raises(errors.ConfigError, match=f"FP8 of blocks: tokens is '{tokens}'; allowed: 'float'"):
            FP8(blocks=True, tokens=tokens)
    with pytest.raises(errors.ConfigError, match="FP8 tokens is 'int8'; allowed: 'float', 'dynamic', 'static'"):
        scheme_from_json({"kind": "fp8", "tokens": "int8"})
    with pytest.raises(errors.ConfigError, match="FP8 blocks is 1; allowed: true, false"):
        FP8(blocks=1)


def test_rotated_groups_are_powers_of_two():
    for size in (0, 16, 96, 64.0, True):
        with pytest.raises(errors.ConfigError, match=r"W8A8Rotated group_size is .*; allowed: powers of two from 32"):
            W8A8Rotated(size)
    with pytest.raises(errors.ConfigError, match="W8A8Rotated group_size is 16; allowed: powers of two from 32 on"):
        parse_scheme("w8a8_rotated_g16")
    for seed in (-1, 1 << 62, 1.0):
        with pytest.raises(errors.ConfigError, match=r"W8A8Rotated seed is .*; allowed: 0 to 2\*\*62 - 1"):
            scheme_from_json({"kind": "w8a8_rotated", "seed": seed})


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_scheme_round_trips(scheme):
    assert parse_scheme(scheme.name) == scheme
    assert parse_scheme(scheme) is scheme
    assert scheme_from_json(json.loads(json.dumps(scheme.to_json()))) == scheme
    assert pickle.loads(pickle.dumps(scheme)) == scheme
    assert len({scheme, parse_scheme(scheme.name)}) == 1


@pytest.mark.parametrize(
    "name",
    [
        *("int8", "x", "", None, ["w8a8"], "codebook5", "codebook4+1", "codebook4_g0", "codebook4_g64_rows"),
        *(
            "codebook4_int8_qr",
            "codebook4_g64_pairs",
            "int4_pairs",
            "int4+4",
            "codebook",
            "codebook4\n",
            "codebook\u0664",
        ),
    ],
)
def test_unknown_scheme_lists_the_names(name):
    with pytest.raises(
        errors.ConfigError,
        match=rf"does not exist; (did.*\? )?use one of {', '.join(PLAIN_NAMES)}",
    ):
        parse_scheme(name)


@pytest.mark.parametrize(
    ("alias", "name"),
    [("W8A8", "w8a8"), ("W8A8-Static", "w8a8_static"), ("int8_weight_only", "w8a16"), ("16x8", "int16x8")],
)
def test_other_spellings_of_the_same_scheme(alias, name):
    assert parse_scheme(alias) == parse_scheme(name)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("int8", r"w8a8 \(weights and activations in int8\) or w8a16"),
        ("w4a16", "int4"),
        ("NF4", r"codebook4 .*another format"),
        ("4bit", "codebook4"),
        ("gptq", "codebook4 with second_moments"),
        ("w8a8_fp8", "fp8_dynamic"),
        ("fp4", r"nvfp4 .*, mxfp4 .*, or codebook4"),
        ("codbook4", "codebook4"),
        ("w8a8_statik", "w8a8_static"),
    ],
)
def test_did_you_mean(name, near):
    with pytest.raises(errors.ConfigError, match=rf"{name!r} does not exist; did you mean {near}"):
        parse_scheme(name)


def test_unknown_mode():
    for scheme in (W8A8, Int16x8):
        with pytest.raises(errors.ConfigError, match="'fast' does not exist; use 'dynamic' or 'static'"):
            scheme("fast")  # type: ignore[arg-type]


def test_what_pairs_do_not_go_with():
    for name in ("codebook3_pairs", "codebook4+4_pairs", "codebook4_pairs_none"):
        with pytest.raises(
            errors.ConfigError, match=r"Codebook of pairs: bits is .*; allowed: 4, None, and 'hadamard'"
        ):
            parse_scheme(name)
    with pytest.raises(errors.ConfigError, match="Codebook of pairs: group_size is 15; allowed: even numbers"):
        parse_scheme("codebook4_pairs_g15_qr")
    with pytest.raises(errors.ConfigError, match="Codebook pairs is 1; allowed: False, True"):
        Codebook(pairs=1)  # type: ignore[arg-type]


def test_foreign_scheme_json():
    for data in [None, [], {}, {"kind": "w4"}, {"kind": ["w8a8"]}]:
        with pytest.raises(
            errors.ConfigError,
            match=r"not a scheme: .*'kind' is one of w8a8, w8a8_rotated, w8a16, fp8, int16x8, fp16, codebook",
        ):
            scheme_from_json(data)


def test_scheme_json_with_unknown_fields():
    with pytest.raises(errors.ConfigError, match="kind 'w8a16' has unknown fields"):
        scheme_from_json({"kind": "w8a16", "group_size": 128})
    with pytest.raises(errors.ConfigError, match="mode 'x' does not exist"):
        scheme_from_json({"kind": "w8a8", "mode": "x"})


def test_unknown_activation():
    assert schemes.check_activation("silu") == "silu"
    with pytest.raises(
        errors.ConfigError, match="'gelu' does not exist; use one of none, relu, gelu_erf, gelu_tanh, silu"
    ):
        schemes.check_activation("gelu")


def test_static_range_round_trip():
    original = StaticRange(-0.1, 1 / 3)
    assert StaticRange.from_json(json.loads(json.dumps(original.to_json()))) == original
    assert StaticRange.including_zero(0.5, 2.0) == StaticRange(0.0, 2.0)
    assert StaticRange.including_zero(-3.0, -1.0) == StaticRange(-3.0, 0.0)


def test_static_range_refuses():
    for lo, hi in [(0.1, 1.0), (-1.0, -0.1), (float("nan"), 1.0), (-1.0, float("nan")), (float("-inf"), 0.0)]:
        with pytest.raises(errors.ConfigError, match="is not finite with lo <= 0 <= hi"):
            StaticRange(lo, hi)


def test_static_range_json_refuses():
    for data in [{}, {"lo": -1.0}, {"lo": "x", "hi": 1}, None, [1, 2]]:
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


def test_build_error_shows_kernel_command_and_log_end():
    log = "\n".join(f"line {i}" for i in range(50))
    error = errors.BuildError("nvcc failed", kernel="qcut_x", command="nvcc -cubin a.cu", log=log)
    lines = str(error).splitlines()
    assert lines[:3] == ["kernel qcut_x: nvcc failed", "command: nvcc -cubin a.cu", "line 30"]
    assert lines[-1] == "line 49"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.kernel, copy.command, copy.log) == (str(error), error.kernel, error.command, log)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 5}, "bits is 5; allowed: 2, 3, 4"),
        ({"bits": 4.0}, "bits is 4.0; allowed: 2, 3, 4"),
        ({"residual_bits": 1}, "residual_bits is 1; allowed: None, 2, 3, 4"),
        ({"group_size": 0}, "group_size is 0; allowed: 1 and more, or None for whole rows"),
        ({"group_size": 96}, "group_size is 96; the rotation 'hadamard' takes powers of two"),
        ({"rotation": "fft"}, "rotation is 'fft'; allowed: hadamard, qr, none"),
        ({"activation": "bf16"}, "activation is 'bf16'; allowed: fp16, int8"),
        ({"norm_dtype": "fp8"}, "norm_dtype is 'fp8'; allowed: fp16, fp32, e4m3"),
        ({"norm_dtype": "e4m3"}, "levels 'normal': norm_dtype is 'e4m3'; allowed: fp16, fp32"),
        (
            {"levels": "e2m1", "rotation": "none", "group_size": 16},
            "group_size 16 with norms of fp16; allowed: 4 and 32, or 4 and 16 with e4m3",
        ),
        (
            {"levels": "e2m1", "rotation": "none", "group_size": 32, "norm_dtype": "e4m3"},
            "group_size 32 with norms of e4m3; allowed: 4 and 32, or 4 and 16 with e4m3",
        ),
        ({"seed": -1}, "seed is -1; allowed: 0 to"),
        ({"seed": "42"}, "seed is '42'; allowed: 0 to"),
        ({"levels": "int"}, "levels is 'int'; allowed: normal, steps, e2m1"),
        ({"levels": "steps"}, "levels 'steps': rotation is 'hadamard'"),
        ({"levels": "steps", "rotation": "none", "residual_bits": 4}, "residual_bits 4; allowed: 'none' and None"),
    ],
)
def test_codebooks_that_cannot_be(fields, message):
    with pytest.raises(errors.ConfigError, match=message):
        Codebook(**fields)
    with pytest.raises(errors.ConfigError, match=message):
        scheme_from_json({"kind": "codebook", **fields})


def test_what_a_codebook_says_of_its_passes():
    assert (Codebook().widths, Codebook().seeds) == ((4,), (42,))
    assert (Codebook(4, 2).widths, Codebook(4, 2).seeds) == ((4, 2), (42, 1042))
    assert (Codebook().group_columns(64), Codebook(group_size=None).group_columns(64)) == (128, 64)
