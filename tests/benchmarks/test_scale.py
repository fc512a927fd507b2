"""The model of scale: its laws on made-up rows, its sums, its memory beside qcut's layers, and its checks."""

from __future__ import annotations

import csv
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scale, tables
from benchmarks.bench_engine import CASES, NEW, PROMPT
from benchmarks.reporting import serving
from benchmarks.reporting.rows import Rows
from benchmarks.scaling import check, pages, split
from benchmarks.scaling.laws import (
    ASSUMED_IN_HOST,
    GPU,
    SCHEMES,
    Curve,
    Link,
    Measured,
    Primitives,
    ProductLaw,
    cache_row_bytes,
    least_us_per_weight,
    weight_bytes,
)
from benchmarks.scaling.model import (
    LLAMAS,
    MEMORY_BYTES,
    RESERVED_BYTES,
    Layout,
    Shape,
    check_layout,
    kept_bytes,
    layouts,
    prompt,
    room,
    served,
    step,
    token_bytes,
    weights_bytes,
)
from qcut import Linear
from qcut.errors import ConfigError

EIGHT, SEVENTY, LARGEST = LLAMAS
SIZES = ((1280, 1280), (5120, 1280), (1280, 5120), (4096, 4096), (14336, 4096), (4096, 14336))
FREE = Curve(((1.0, 1e-9), (2.0, 1e-9)))


@pytest.fixture(scope="module")
def known() -> Primitives:
    rows = Rows(tables.RESULTS)
    return check.calibrated(Primitives.read(rows), rows)


@pytest.fixture
def made() -> Primitives:
    """Products of N · K / 4e6 µs for one token and twice that for two; attention and the rest of a few µs."""
    laws = {m: ProductLaw(0.0, m / 4e6, 0.0) for m in (1, 2, 4, 8, 16, 32, 64)}
    attention = Curve(((1e6, 4.0), (1e9, 400.0)))
    return Primitives(
        dict.fromkeys(SCHEMES, laws), {"float": {1: attention}}, Curve(((1e9, 1.0), (1e12, 1000.0))), layer_us=3.0
    )


# ── laws ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_law_is_found_again_in_its_own_rows() -> None:
    law = ProductLaw(1.5, 1.4e-7, 8e-5)
    found = ProductLaw.fit(Measured(n, k, law.us(n, k)) for n, k in SIZES)
    assert (found.launch_us, found.us_per_weight, found.us_per_column) == pytest.approx((1.5, 1.4e-7, 8e-5), rel=1e-6)
    assert len(found.residuals) == len(SIZES)
    assert max(map(abs, found.residuals)) < 1e-9


def test_residuals_are_those_of_the_rows() -> None:
    law = ProductLaw(1.5, 1.4e-7, 8e-5)
    rows = [Measured(n, k, law.us(n, k) * factor) for (n, k), factor in zip(SIZES, (1.1, 0.9) * 3, strict=True)]
    found = ProductLaw.fit(rows)
    assert found.residuals == tuple(found.us(row.n, row.k) / row.us - 1 for row in rows)
    assert 0.05 < max(map(abs, found.residuals)) < 0.2


def test_no_law_is_faster_than_its_floor_and_no_term_is_negative() -> None:
    fast = ProductLaw.fit((Measured(n, k, 1.0 + 1e-8 * n * k) for n, k in SIZES), 1e-7)
    assert fast.us_per_weight == pytest.approx(1e-7)
    shrinking = ProductLaw.fit(Measured(n, k, 20.0 - 1e-3 * k) for n, k in SIZES)
    assert min(shrinking.launch_us, shrinking.us_per_weight, shrinking.us_per_column) >= 0
    with pytest.raises(ConfigError, match="at least 3 shapes, got 2"):
        ProductLaw.fit([Measured(1, 1, 1.0), Measured(2, 2, 1.0)])


def test_a_curve_passes_its_points_and_goes_on_as_it_ended() -> None:
    curve = Curve.of([(100.0, 10.0), (1.0, 1.0), (1000.0, 20.0), (1000.0, 30.0)])
    assert [curve.at(x) for x in (0.1, 1, 10, 100, 1000)] == pytest.approx([1, 1, math.sqrt(10), 10, 25])
    assert curve.at(1900) == pytest.approx(25 + 15)
    assert Curve.of([(1.0, 2.0), (2.0, 1.0)]).at(50) == 1.0
    with pytest.raises(ConfigError, match="2 or more places, got 1"):
        Curve.of([(1.0, 1.0), (1.0, 2.0)])


def test_an_assumed_exchange_is_latency_and_the_bytes_that_a_gpu_sends() -> None:
    link = Link(latency_us=5.0, hop_us=1.0, bytes_s=1e9)
    assert link.all_reduce_us(2, 1000) == pytest.approx(5 + 1)
    assert link.all_reduce_us(4, 1000) == pytest.approx(5 + 2 + 1.5)
    assert link.send_us(2000) == pytest.approx(5 + 2)


def test_products_between_and_beyond_measured_tokens(made: Primitives) -> None:
    def us(m: int) -> float:
        return made.product_us("w8a8", m, 2000, 2000)

    assert (us(1), us(2), us(3), us(64)) == pytest.approx((1, 2, 3, 64))
    assert us(128) == pytest.approx(128)
    with pytest.raises(ConfigError, match="'int3' has no measured products; there are codebook4, "):
        made.product_us("int3", 1, 8, 8)
    with pytest.raises(ConfigError, match="a product of 0 tokens"):
        us(0)


def test_a_floor_is_bytes_for_few_tokens_and_operations_for_many(known: Primitives) -> None:
    ceiling = known.ceiling
    assert least_us_per_weight("fp16", 1, ceiling) == pytest.approx(2 / ceiling.read_bytes * 1e6)
    assert least_us_per_weight("w8a8", 4096, ceiling) == pytest.approx(2 * 4096 / ceiling.int8_ops * 1e6)
    assert least_us_per_weight("codebook4", 4096, ceiling) == pytest.approx(2 * 4096 / ceiling.f16_ops * 1e6)
    for scheme, laws in known.products.items():
        assert sorted(laws)[0] == 1
        for m, law in laws.items():
            assert law.us_per_weight >= least_us_per_weight(scheme, m, ceiling)


# ── steps, prompts, memory ───────────────────────────────────────────────────────────────────────


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
def test_more_work_takes_longer_and_more_gpus_less_where_sums_are_free(known: Primitives, scheme: str) -> None:
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


def test_a_pipeline_adds_sends_and_shares_sequences(made: Primitives) -> None:
    shape = Shape("s", 8, 1024, 16, 8, 2048, 1000)
    free = replace(made, all_reduce={8: FREE})
    alone = step(free, shape, "w8a8", 1, 100, Layout(8))
    staged = step(free, shape, "w8a8", 1, 100, Layout(8, 4))
    assert staged.us == pytest.approx(alone.us + staged.send_us)
    assert staged.send_us > 0
    # Four parts of one sequence: each GPU has a quarter of the layers for four times the time, and the head's stage.
    many = step(free, shape, "w8a8", 4, 100, Layout(8, 4))
    per_stage = (staged.us - staged.head_us - staged.all_reduce_us - staged.send_us) / 4
    assert many.us == pytest.approx(4 * (per_stage + staged.head_us + staged.send_us / 4), rel=1e-3)
    assert many.bubble_us > 0
    uneven = step(free, replace(shape, layers=9), "w8a8", 4, 100, Layout(8, 4))
    assert uneven.bubble_us > many.bubble_us
    # A prompt fills the stages chunk by chunk: 4 chunks and 3 more turns in place of 4.
    whole, cut = (prompt(free, shape, "w8a8", 1, 2048, Layout(8, pp)) for pp in (1, 4))
    assert cut.bubble_us == pytest.approx(
        3 / 4 * (cut.products_us + cut.attention_us + cut.rest_us + cut.all_reduce_us + cut.send_us)
    )
    assert cut.us < whole.us
    assert prompt(free, shape, "w8a8", 1, 512, Layout(8, 4)).bubble_us == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_take_the_bytes_that_qcuts_layers_take(scheme: str) -> None:
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


def test_memory_agrees_with_what_the_benchmarks_counted() -> None:
    rows = Rows(tables.RESULTS)
    decoded = [row for row in rows.of("bench_engine", what="decode") if "llama-3" in row["case"]]
    counted = [row for row in decoded if CASES[row["case"]].embeddings == "w8a16"]
    assert len(counted) >= 5
    for row in counted:
        shape, scheme = Shape.of(row["case"], CASES[row["case"]]), str(CASES[row["case"]].scheme)
        table = kept_bytes("w8a16", shape.vocabulary, shape.hidden)  # of which a step reads a row
        if "codebook" in scheme:  # norms are kept twice, and read once
            table += shape.layers * sum(2 * n * k // 128 for n, k in shape.products(1))
        cache = int(row["batch"]) * (PROMPT + NEW // 2) * token_bytes(shape)
        assert weights_bytes(shape, scheme) - table + cache == pytest.approx(float(row["gb"]) * 1e9, rel=3e-4)
    for cache, kind in (("auto", "float"), ("int8", "int8")):
        found = {float(row["bytes_token"]) for row in rows.of("bench_cache", cache=cache)}
        assert found == {token_bytes(EIGHT, kind)}


def test_room_is_what_the_weights_leave() -> None:
    left = MEMORY_BYTES - RESERVED_BYTES - weights_bytes(SEVENTY, "codebook4")
    assert room(SEVENTY, "codebook4", 2048, Layout()) == int(left / (2048 * 80 * 8 * cache_row_bytes("float", 128)))
    assert room(SEVENTY, "fp16", 1, Layout()) == 0
    assert pages.least_gpus(SEVENTY, "fp16") == 2


def test_layouts_use_every_gpu_and_stages_are_hosts() -> None:
    for gpus in pages.GPUS:
        found = list(layouts(gpus))
        assert len(found) == len(set(found))
        assert all(layout.gpus == gpus and (layout.pp == 1 or layout.tp == 8) for layout in found)
        assert Layout(replicas=gpus) in found
    assert Layout(8, 4, 2) in layouts(64)


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


# ── checks ───────────────────────────────────────────────────────────────────────────────────────

Edit = Callable[[list[dict[str, str]]], list[dict[str, str]]]


@pytest.fixture
def edited(tmp_path: Path) -> Callable[[str, Edit], Rows]:
    """The committed rows, those of one benchmark changed."""
    for name in ("bench_cliff", "bench_attention", "bench_prompt_attention", "bench_engine", "bench_cache"):
        shutil.copy(tables.RESULTS / f"{name}.csv", tmp_path)

    def edit(bench: str, change: Edit) -> Rows:
        rows = change([dict(row) for row in Rows(tmp_path).of(bench)])
        with (tmp_path / f"{bench}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)), restval="")
            writer.writeheader()
            writer.writerows(rows)
        return Rows(tmp_path)

    return edit


def test_steps_of_one_gpu_are_within_the_limit(known: Primitives) -> None:
    found = [one for one in check.checks(known, Rows(tables.RESULTS)) if one.what.startswith("decode")]
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


def test_no_other_row_of_a_model_moves_a_prediction(edited: Callable[[str, Edit], Rows], known: Primitives) -> None:
    def doubled(rows: list[dict[str, str]]) -> list[dict[str, str]]:
        for row in rows:
            if row["what"] != "kernel" and check.key_of(row) not in check.TAKEN:
                row["median_us"] = str(2 * float(row["median_us"]))
        return rows

    rows = edited("bench_engine", doubled)
    again = check.calibrated(Primitives.read(rows), rows)
    for figure in ("layer_us", "first_us", "prompt_us"):
        assert getattr(again, figure) == pytest.approx(getattr(known, figure))
    assert min(known.first_us, known.prompt_us) > 0
    assert abs(known.layer_us) < 5  # below 0 where kernels overlap by more than norms take
    steps = [one for one in check.checks(known, rows) if one.what == "decode" and not one.taken]
    assert max(one.off for one in steps) < -0.4
    assert "| decode | 8 | 1 | 3.98 | 1.95 | **-51.1 %** |" in pages.check(rows)


def test_steps_of_several_gpus_are_checked_once_there_are_rows(edited: Callable[[str, Edit], Rows]) -> None:
    case, scheme, sizes = "llama-3-8b-int8", "w8a8", (8 << 10, 1 << 20, 64 << 20)

    def exchanged(rows: list[dict[str, str]]) -> list[dict[str, str]]:
        made: list[dict[str, Any]] = [
            {"gpus": 2, "bytes": size, "variant": variant, "median_us": us * factor, "gpu": GPU}
            | dict.fromkeys(("driver", "cuda", "torch", "commit"), "made-up")
            for variant, factor in (("graph", 1), ("eager", 10))
            for size, us in zip(sizes, (5.0, 20.0, 400.0), strict=True)
        ]
        return made

    rows = edited("bench_allreduce", exchanged)
    primitives = check.calibrated(Primitives.read(rows), rows)
    assert [primitives.assumed(gpus) for gpus in (1, 2, 4)] == [False, False, True]
    assert [primitives.all_reduce_us(2, size) for size in sizes] == pytest.approx([5, 20, 400])
    assert primitives.all_reduce_us(2, 100) == 5
    links = pages.links(rows)
    assert "| 5.00 | 8.86 assumed | 13.3 assumed |" in links
    assert "All-reduces over 4, 8 GPUs are assumed" in links
    expected = step(primitives, Shape.of(case, CASES[case]), scheme, 8, PROMPT + NEW // 2, Layout(2)).us

    def parallel(rows: list[dict[str, str]]) -> list[dict[str, str]]:
        one = next(row for row in rows if row["case"] == case and row["what"] == "decode" and row["batch"] == "8")
        return [*rows, one | {"gpus": "2", "median_us": str(expected / 1.25)}]

    rows = edited("bench_engine", parallel)
    found = [one for one in check.checks(primitives, rows) if one.gpus == 2]
    assert [(one.case, one.what, one.batch, one.near) for one in found] == [(case, "decode", 8, False)]
    assert found[0].off == pytest.approx(0.25)
    assert check.worst(found) == found[0]


def test_a_page_with_steps_of_several_gpus_says_no_more_that_there_are_none(
    edited: Callable[[str, Edit], Rows],
) -> None:
    def parallel(rows: list[dict[str, str]]) -> list[dict[str, str]]:
        return [*rows, next(row for row in rows if row["what"] == "decode") | {"gpus": "2"}]

    assert "No prediction" not in pages.check(edited("bench_engine", parallel))


def test_missing_rows_are_named(edited: Callable[[str, Edit], Rows]) -> None:
    rows = edited("bench_engine", lambda rows: [row for row in rows if row["case"] != "llama2c-288"])
    with pytest.raises(ConfigError, match=r"no row \('llama2c-288', 'prefill of 256', 1, 1\)"):
        check.calibrated(Primitives.read(rows), rows)
    rows = edited("bench_cliff", lambda rows: [row for row in rows if row["variant"] != "w8a16"])
    with pytest.raises(ConfigError, match=r"bench_cliff\.csv has no rows of w8a16"):
        Primitives.read(rows)


# ── tables, plot, script ─────────────────────────────────────────────────────────────────────────


def test_a_scheme_overtakes_where_it_stays_ahead(made: Primitives) -> None:
    slow = {m: ProductLaw(0.0, (9 if m <= 4 or m == 16 else 0.5) * m / 4e6, 0.0) for m in made.products["w8a8"]}
    crossed = replace(made, products={**made.products, "w8a8": slow})
    assert pages.overtakes(crossed, EIGHT, "w8a8", "codebook4", 1) == 32
    assert pages.overtakes(crossed, EIGHT, "w8a16", "codebook4", 1) is None


def test_splitting_pays_until_exchanges_take_what_it_saves(made: Primitives) -> None:
    free = replace(made, all_reduce=dict.fromkeys((2, 4, 8), FREE))
    dear = replace(made, all_reduce={2: FREE, 4: Curve(((1.0, 1e6), (2.0, 1e6))), 8: FREE})
    assert [pages.pays_to(one, EIGHT, "w8a8", 1) for one in (free, dear)] == [8, 2]


def test_the_best_layout_is_the_best_that_has_memory(known: Primitives) -> None:
    for gpus in (2, 16):
        every = list(served(known, SEVENTY, "w8a8", 256, pages.CONTEXT, gpus))
        best = pages.best(known, SEVENTY, "w8a8", 256, gpus)
        assert best is not None
        assert best.tokens_s_gpu == max(one.tokens_s_gpu for one in every)
        assert best.tokens_s_gpu == pytest.approx(256 / best.time.us * 1e6 / gpus)
        held = (room(SEVENTY, "w8a8", pages.CONTEXT, one.layout) * one.layout.replicas for one in every)
        assert min(held) >= 256
    assert pages.best(known, SEVENTY, "w8a8", 256, 1) is None


def test_the_plot_shows_the_predictions_of_the_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pages.plot(Rows(tables.RESULTS), tmp_path)
    # matplotlib writes each text it draws as a comment; shapes may differ by release.
    drawn, kept = (re.findall("<!-- (.+?) -->", (at / "scale.svg").read_text()) for at in (tmp_path, tables.RESULTS))
    assert len(drawn) > 15
    assert drawn == kept, "run `python benchmarks/tables.py`"


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


# ── vLLM on several GPUs ─────────────────────────────────────────────────────────────────────────


@pytest.fixture
def terms() -> split.Terms:
    """One token's product takes launch and N · K / 4e6 µs; attention 320 µs a step; a sum 5 µs."""
    laws = {1: ProductLaw(2.0, 1 / 4e6, 0.0)}
    return split.Terms(
        dict.fromkeys(("fp16", "w8a8"), laws), {("step", 1): 320.0}, {2: Curve(((1.0, 5.0), (2.0, 5.0)))}
    )


def test_known_terms_are_cut_over_gpus(terms: split.Terms) -> None:
    shape = split.shape_of("llama-3-8b")
    weights, head = sum(n * k for n, k in shape.products()), shape.vocabulary * shape.hidden
    one = 32 * (8 + weights / 4e6) + 320 + 2 + head / 4e6
    two = 32 * (8 + weights / 8e6 + 2 * 5) + 160 + 2 + head / 8e6
    assert terms.known_us(shape, "w8a8", "step", 1, 1) == pytest.approx(one)
    assert terms.known_us(shape, "w8a8", "step", 1, 2) == pytest.approx(two)
    larger = split.shape_of("llama-3-70b")  # as many heads of keys, more layers
    without = replace(terms, attention_us={("step", 1): 0.0})
    attention = terms.known_us(larger, "fp16", "step", 1, 1) - without.known_us(larger, "fp16", "step", 1, 1)
    assert attention == pytest.approx(320 * 80 / 32)


def test_times_inside_vllm_are_predicted_from_those_on_one_gpu() -> None:
    found = split.predictions(tables.RESULTS)
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


def test_one_gpu_stands_beside_the_rows_of_several_or_with_all_others(tmp_path: Path) -> None:
    for name in ("bench_vllm", "vllm_kernels", "bench_cliff", "bench_allreduce"):
        shutil.copy(tables.RESULTS / f"{name}.csv", tmp_path)
    (tmp_path / serving.FOUR_GPUS).mkdir()
    shutil.copy(tables.RESULTS / serving.FOUR_GPUS / "bench_vllm.csv", tmp_path / serving.FOUR_GPUS)
    cases = {one.case for one in split.predictions(tmp_path)}
    assert cases == {"llama-3-8b, qcut-w8a8, H200", "llama-3-70b, qcut-codebook4, H200"}  # no laws of vLLM's own W8A8
    other = (tmp_path / "bench_vllm.csv").read_text().replace("NVIDIA H200", "NVIDIA B200")
    (tmp_path / "bench_vllm.csv").write_text(other)
    assert split.predictions(tmp_path) == []  # one of another kind tells nothing


def test_sums_over_gpus_are_told_from_products() -> None:
    assert serving.kind_of("void vllm::cross_device_reduce_1stage<__half, 4>(vllm::RankData*", 161) == "sums over GPUs"
    assert serving.kind_of("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1) == "sums over GPUs"
    assert serving.kind_of("qcut_codebook_stream_sm90a_f16hxc4s1", 80) == "linear layers"


def test_kernels_of_several_gpus_are_summed_by_what_they_are_for(tmp_path: Path) -> None:
    (tmp_path / serving.FOUR_GPUS).mkdir()
    lines = ["shape,method,gpus,what,batch,kernel,count,us"]
    lines += [
        f"s,m,4,{what},1,{kernel},9,{us}"
        for what, kernel, us in (
            ("step", "ncclOne", 700),
            ("step", "cross_device_reduce", 500),
            ("prompt", "ncclOne", 3000),
            ("step", "gemm", 40),
        )
    ]
    (tmp_path / serving.FOUR_GPUS / "vllm_kernels.csv").write_text("\n".join(lines) + "\n")
    table = serving.serving_split_kernels(Rows(tmp_path)).splitlines()
    assert table[2:] == ["| s | m | 4 | linear layers | 0.04 | – |", "| s | m | 4 | sums over GPUs | 1.20 | 3.00 |"]
    assert serving.serving_split_kernels(Rows(Path("nowhere"))).startswith("Not measured")
