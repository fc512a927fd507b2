"""The model of scale: its laws on made-up rows, its sums, its memory beside qcut's layers, and its checks."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness import RESULTS
from benchmarks.publish import scale
from benchmarks.publish.rows import Rows
from benchmarks.scaling import check, pages, split
from benchmarks.scaling.laws import ASSUMED_IN_HOST, SCHEMES, Curve, Measured, Primitives, ProductLaw, weight_bytes
from benchmarks.scaling.model import LLAMAS, Layout, Shape, check_layout, prompt, served, step, weights_bytes
from qcut import Linear
from qcut.errors import ConfigError

EIGHT, SEVENTY, _ = LLAMAS


SIZES = ((1280, 1280), (5120, 1280), (1280, 5120), (4096, 4096), (14336, 4096), (4096, 14336))


FREE = Curve(((1.0, 1e-9), (2.0, 1e-9)))


@pytest.fixture(scope="module")
def known() -> Primitives:
    rows = Rows(RESULTS)
    return check.calibrated(Primitives.read(rows), rows)


@pytest.fixture
def made() -> Primitives:
    """Products of N · K / 4e6 µs for one token and twice that for two; attention and the rest of a few µs."""
    laws = {m: ProductLaw(0.0, m / 4e6, 0.0) for m in (1, 2, 4, 8, 16, 32, 64)}
    attention = Curve(((1e6, 4.0), (1e9, 400.0)))
    return Primitives(
        dict.fromkeys(SCHEMES, laws), {"float": {1: attention}}, Curve(((1e9, 1.0), (1e12, 1000.0))), layer_us=3.0
    )


def test_a_law_is_found_in_its_rows() -> None:
    law = ProductLaw(1.5, 1.4e-7, 8e-5)
    found = ProductLaw.fit(Measured(n, k, law.us(n, k)) for n, k in SIZES)
    assert (found.launch_us, found.us_per_weight, found.us_per_column) == pytest.approx((1.5, 1.4e-7, 8e-5), rel=1e-6)
    assert len(found.residuals) == len(SIZES)
    assert max(map(abs, found.residuals)) < 1e-9


def test_laws_have_floors_and_no_negative_term() -> None:
    fast = ProductLaw.fit((Measured(n, k, 1.0 + 1e-8 * n * k) for n, k in SIZES), 1e-7)
    assert fast.us_per_weight == pytest.approx(1e-7)
    shrinking = ProductLaw.fit(Measured(n, k, 20.0 - 1e-3 * k) for n, k in SIZES)
    assert min(shrinking.launch_us, shrinking.us_per_weight, shrinking.us_per_column) >= 0
    with pytest.raises(ConfigError, match="at least 3 shapes, got 2"):
        ProductLaw.fit([Measured(1, 1, 1.0), Measured(2, 2, 1.0)])


def test_a_curve_passes_its_points() -> None:
    curve = Curve.of([(100.0, 10.0), (1.0, 1.0), (1000.0, 20.0), (1000.0, 30.0)])
    assert [curve.at(x) for x in (0.1, 1, 10, 100, 1000)] == pytest.approx([1, 1, math.sqrt(10), 10, 25])
    assert curve.at(1900) == pytest.approx(25 + 15)
    assert Curve.of([(1.0, 2.0), (2.0, 1.0)]).at(50) == 1.0
    with pytest.raises(ConfigError, match="2 or more different x, got 1"):
        Curve.of([(1.0, 1.0), (1.0, 2.0)])


def test_a_step_is_the_sum_of_its_terms(made: Primitives) -> None:
    shape = Shape("s", 4, 256, 4, 2, 512, 1000)
    free = replace(made, all_reduce={2: FREE})
    one, two = (step(free, shape, "w8a8", 1, 100, Layout(tp)) for tp in (1, 2))
    weights = sum(n * k for n, k in shape.products())
    assert weights == 256 * (4 + 2 * 2) * 64 + 256 * 256 + 3 * 512 * 256
    assert one.products_us == pytest.approx(4 * weights / 4e6)
    assert one.head_us == pytest.approx(1000 * 256 / 4e6)
    assert one.attention_us == pytest.approx(4 * 4.0)
    assert one.rest_us == pytest.approx(4 * (3 + shape.moved_bytes(1) / made.ceiling.read_bytes * 1e6))
    assert (one.all_reduce_us, one.send_us, one.bubble_us, one.host_us) == (0, 0, 0, 0)
    assert one.us == pytest.approx(one.products_us + one.attention_us + one.rest_us + one.head_us)
    assert (two.products_us, two.head_us) == pytest.approx((one.products_us / 2, one.head_us / 2))
    assumed = step(made, shape, "w8a8", 1, 100, Layout(2)).all_reduce_us
    assert assumed == pytest.approx(
        8 * ASSUMED_IN_HOST.all_reduce_us(2, 2 * 256) + ASSUMED_IN_HOST.all_reduce_us(2, 16)
    )
    slower = step(replace(made, all_reduce_factor=2.0), shape, "w8a8", 1, 100, Layout(2))
    assert slower.all_reduce_us == pytest.approx(2 * assumed)


@pytest.mark.parametrize("scheme", pages.SHOWN)
def test_more_work_takes_longer_more_gpus_less(known: Primitives, scheme: str) -> None:
    free = replace(known, all_reduce=dict.fromkeys((2, 4, 8), FREE))
    for shape in LLAMAS:
        for times in (
            [step(known, shape, scheme, batch, 2048).us for batch in (1, 8, 64, 1024)],
            [step(known, shape, scheme, 8, context).us for context in (128, 2048, 32768)],
            [step(free, shape, scheme, 8, 2048, Layout(tp)).us for tp in (8, 4, 2, 1)],
            [prompt(known, shape, scheme, 1, tokens).us for tokens in (32, 256, 4096, 16384)],
            [prompt(free, shape, scheme, 1, 4096, Layout(tp)).us for tp in (8, 4, 2, 1)],
        ):
            assert times == sorted(times)
            assert times[0] < times[-1]
    assert step(known, EIGHT, scheme, 8, 8192, cache="int8").us < step(known, EIGHT, scheme, 8, 8192).us


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_take_the_bytes_of_layers(scheme: str) -> None:
    for shape in LLAMAS:
        total = 2.0 * shape.hidden * (2 * shape.layers + 1)
        for n, k, count in (*((*nk, shape.layers) for nk in shape.products()), (shape.vocabulary, shape.hidden, 2)):
            kind = scheme if count > 2 or scheme == "fp16" else "w8a16"
            layer = 2 * n * k if kind == "fp16" else Linear(k, n, False, kind, device="meta").weight_bytes
            assert weight_bytes(kind, n, k) <= layer < 1.04 * weight_bytes(kind, n, k)
            total += count * layer
        assert weights_bytes(shape, scheme) == total
        norms = 2 * shape.hidden * (2 * shape.layers + 1)
        # Each GPU has a scale for every row of the products that are split along K, and the norms.
        for tp in (2, 4, 8):
            assert tp * (weights_bytes(shape, scheme, Layout(tp)) - norms) == pytest.approx(total - norms, rel=5e-3)
        assert weights_bytes(shape, scheme, Layout(8, 2)) < weights_bytes(shape, scheme, Layout(8))


def test_what_cannot_be_split_is_refused(made: Primitives) -> None:
    for tp, message in ((16, "a host has 8"), (3, "64 heads, which 3 GPUs cannot share")):
        with pytest.raises(ConfigError, match=message):
            check_layout(SEVENTY, "w8a8", Layout(tp))
    narrow = Shape("narrow", 4, 512, 8, 8, 1024, 100)
    check_layout(narrow, "w8a8", Layout(8))
    with pytest.raises(ConfigError, match=r"groups of 128 columns \(K = 64\)"):
        check_layout(narrow, "codebook4", Layout(8))
    with pytest.raises(ConfigError, match="5 stages for the 4 layers"):
        check_layout(narrow, "w8a8", Layout(8, 5))
    with pytest.raises(ConfigError, match="a step of 0 sequences"):
        step(made, narrow, "w8a8", 0, 1)
    with pytest.raises(ConfigError, match="1 prompts of 0 tokens"):
        prompt(made, narrow, "w8a8", 1, 0)


def test_steps_of_one_gpu_are_within_the_limit(known: Primitives) -> None:
    found = [one for one in check.checks(known, Rows(RESULTS)) if one.what.startswith("decode")]
    llama = [one for one in found if "llama-3" in one.case]
    assert [one.case for one in found if one.taken] == [check.STEP_ROW[0]]
    assert sum(one.taken for one in llama) == 1
    assert len(llama) >= 17
    furthest = check.worst(llama)
    assert furthest is not None
    # Steps over other caches were measured before those of eight sequences took 7 % less.
    assert all(one.near for one in llama if one.what == "decode")
    assert abs(furthest.off) < 0.13
    assert abs(furthest.off) == max(abs(one.off) for one in llama if not one.taken)
    assert next(one for one in llama if one.taken).off == pytest.approx(0)
    # A layer of GPT-2 has the overlap of a Llama's in the prediction, and shorter kernels.
    assert all(abs(one.off) < 0.15 for one in found if "gpt2" in one.case)


def test_the_script_predicts_a_case(capsys: pytest.CaptureFixture[str], known: Primitives) -> None:
    given = ["--model", "8B", "--scheme", "w8a8", "--gpus", "4", "--sequences", "8", "--context", "512"]
    assert scale.main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [line.split() for line in lines[1:4]]
    expected = {str(one.layout.tp): one for one in served(known, EIGHT, "w8a8", 8, 512, 4)}
    assert {row[1] for row in cells} == set(expected) == {"1", "2", "4"}
    for row in cells:
        assert float(row[3]) == pytest.approx(expected[row[1]].time.us / 1e3, rel=5e-3)
    assert not any("assumed" in line for line in lines), "rows have all-reduces over 4 GPUs"
    assert scale.main(["--model", "8B", "--scheme", "w8a8", "--gpus", "8"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "All-reduces over 8 GPUs are assumed."
    assert scale.main(["--model", "405B", "--scheme", "fp16", "--gpus", "4"]) == 1
    assert "4 GPUs lack memory for 64 sequences" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        scale.main(["--gpus", "65"])
    assert "--gpus 65: 1 or more, and at most 64 GPUs" in capsys.readouterr().err


def test_vllm_is_predicted_from_one_gpu() -> None:
    found = split.predictions(RESULTS)
    assert {(one.case.split(",")[0], one.gpus) for one in found} >= {("llama-3-8b", 2), ("llama-3-70b", 1)}
    assert all(one.gpus > 1 or not one.case.startswith(split.BASE) for one in found)
    assert {one.gpus for one in found} == {1, 2, 4}
    steps = [one for one in found if one.what == "step"]
    assert sum(one.near for one in steps) >= 0.9 * len(steps)
    assert all(abs(one.off) < 0.13 for one in steps)
    large = [one for one in found if one.what == "prompt" and pages.LARGE in one.case]
    assert large
    assert all(one.near for one in large)  # smaller prompts wait for the host
    assert split.predictions(Path("nowhere")) == []


def test_missing_rows_are_named(tmp_path: Path) -> None:
    for name in ("bench_crossover", "bench_attention", "bench_prompt_attention"):
        shutil.copy(RESULTS / f"{name}.csv", tmp_path)
    with pytest.raises(ConfigError, match=r"no row \('llama-3-8b-codebook4', 'decode', 1, 1\)"):
        check.calibrated(Primitives.read(Rows(tmp_path)), Rows(tmp_path))
    lines = (tmp_path / "bench_crossover.csv").read_text().splitlines()
    (tmp_path / "bench_crossover.csv").write_text("\n".join(line for line in lines if ",w8a16," not in line))
    with pytest.raises(ConfigError, match=r"bench_crossover\.csv has no rows of w8a16"):
        Primitives.read(Rows(tmp_path))
    assert split.predictions(tmp_path) == []
