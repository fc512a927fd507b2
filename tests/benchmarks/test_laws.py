"""The model of scale: its laws on made-up rows, its sums, its memory against that of qcut's layers, and its checks."""

from __future__ import annotations

import csv
import itertools
import math
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness import CEILINGS, RESULTS
from benchmarks.layers.experts import MODELS, TOKENS, Mixture
from benchmarks.publish import scale, tables
from benchmarks.publish.rows import Rows
from benchmarks.scaling import check, pages, split
from benchmarks.scaling.laws import (
    ASSUMED_IN_HOST,
    FLOAT,
    GPU,
    SCHEMES,
    Curve,
    Measured,
    MixtureLaw,
    Primitives,
    ProductLaw,
    Routed,
    fullest,
    mixture_laws,
    reached,
    weight_bytes,
)
from benchmarks.scaling.model import (
    LLAMAS,
    MIXTURES,
    Layout,
    Shape,
    check_layout,
    prompt,
    room,
    served,
    step,
    token_bytes,
    weights_bytes,
)
from qcut import Linear
from qcut.errors import ConfigError

EIGHT, SEVENTY, _ = LLAMAS
SMALL, LARGE = MIXTURES
MIXTURE = MixtureLaw(9.0, 5.0, 3e-7, (2e-8, 5e-9, 3e-9))
MIXTURE_SCHEMES = SCHEMES[:-1]


SIZES = ((1280, 1280), (5120, 1280), (1280, 5120), (4096, 4096), (14336, 4096), (4096, 14336))


FREE = Curve(((1.0, 1e-9), (2.0, 1e-9)))


@pytest.fixture(scope="module")
def known() -> Primitives:
    rows = Rows(RESULTS)
    return check.calibrated(Primitives.read(rows), rows)


@pytest.fixture(scope="module")
def mixed(known: Primitives) -> Primitives:
    """With a law of mixtures, whatever rows there are."""
    return replace(known, mixtures=dict.fromkeys(MIXTURE_SCHEMES, MIXTURE))


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


def test_a_mixtures_law_is_found_in_its_rows() -> None:
    work = [Routed.of(mixture, "codebook4", tokens) for mixture in MODELS.values() for tokens in TOKENS]
    found = MixtureLaw.fit((one, MIXTURE.us(one)) for one in work)
    assert (found.launch_us, found.sort_us, found.us_per_byte) == pytest.approx((9.0, 5.0, 3e-7), rel=1e-6)
    assert found.us_per_weight == pytest.approx(MIXTURE.us_per_weight, rel=1e-6)
    assert len(found.residuals) == len(work)
    assert max(map(abs, found.residuals)) < 1e-9
    # One model's tokens leave some terms unknown, which have their floors.
    least = (2.5e-7, 1e-9)
    one = MixtureLaw.fit(((one, MIXTURE.us(one)) for one in work[: len(TOKENS)]), least)
    assert one.us_per_byte >= least[0]
    assert one.us_per_weight[2] == least[1]
    assert max(map(abs, one.residuals)) < 1e-9
    faster = MixtureLaw.fit(((one, MIXTURE.us(one)) for one in work), (4e-7, 0.0))
    assert faster.us_per_byte >= 4e-7
    assert min(faster.launch_us, faster.sort_us, *faster.us_per_weight) >= 0
    with pytest.raises(ConfigError, match="at least 6 rows, got 5"):
        MixtureLaw.fit((one, 1.0) for one in work[:5])


@pytest.mark.parametrize("gpus", [1, 4])
def test_more_tokens_take_a_mixture_longer(gpus: int) -> None:
    for mixture in MODELS.values():
        tokens = (*range(1, 70), 128, 256, 1024, 4096, 16384)
        times = [MIXTURE.us(Routed.of(mixture, "w8a8", m, gpus)) for m in tokens]
        assert times == sorted(times)
        assert times[0] < times[1] < times[-1]


def test_experts_of_the_fullest_gpu() -> None:
    for chosen, gpus in itertools.product(range(1, 9), (1, 2, 4, 8)):
        most = [
            max(sum(one * gpus // 8 == gpu for one in choice) for gpu in range(gpus))
            for choice in itertools.combinations(range(8), chosen)
        ]
        assert fullest(8, chosen, gpus) == pytest.approx(statistics.mean(most))
    assert reached(128, 8, 1) == pytest.approx(8)
    assert reached(128, 8, 10**4) == pytest.approx(128)
    mixture = Mixture(64, 32, 8, 2)
    one = Routed.of(mixture, "w8a8", 1, 4)
    # The second expert of a token is on the GPU of the first with 1 of the 7 others.
    assert list(one) == pytest.approx([1, 8 / 7, 1, 3 * 32 * 64, 3 * 32 * 64])
    assert Routed.of(mixture, "w8a8", 10**4, 4)[1:3] == pytest.approx((2, 2500))


def test_mixture_steps_are_sums_of_their_terms(made: Primitives) -> None:
    shape = Shape("s", 4, 256, 4, 2, 128, 1000, experts=(8, 2), head_size=128)
    with pytest.raises(ConfigError, match="scheme 'w8a8' has no measured mixtures; measured: none"):
        step(made, shape, "w8a8", 1, 100)
    law = MixtureLaw(1.0, 2.0, 1e-5, (0.0, 0.0, 0.0))
    free = replace(made, all_reduce={2: FREE, 4: FREE}, mixtures={"w8a8": law})
    one, four = (step(free, shape, "w8a8", 1, 100, Layout(tp)) for tp in (1, 4))
    expert, router = 3 * 128 * 256, 8 * 256 / 4e6
    attention = 256 * (4 + 2 * 2) * 128 + 4 * 128 * 256
    assert one.products_us == pytest.approx(4 * (attention / 4e6 + router + 1 + 2 * expert / 1e5))
    # Each of the 2 heads of keys is on 2 of the 4 GPUs.
    shard = 256 * (1 + 2 * 1) * 128 + 128 * 256
    assert four.products_us == pytest.approx(4 * (shard / 4e6 + router + 1 + 8 / 7 * expert / 1e5))
    assert token_bytes(shape, layout=Layout(4)) == token_bytes(shape, layout=Layout(2)) == token_bytes(shape) / 2


@pytest.mark.parametrize("scheme", MIXTURE_SCHEMES)
def test_mixtures_take_longer_for_more_work(mixed: Primitives, scheme: str) -> None:
    free = replace(mixed, all_reduce=dict.fromkeys((2, 4, 8), FREE))
    for shape in MIXTURES:
        for times in (
            [step(mixed, shape, scheme, batch, 2048).us for batch in (1, 8, 64, 1024)],
            [step(free, shape, scheme, 8, 2048, Layout(tp)).us for tp in (8, 4, 2, 1)],
            [prompt(mixed, shape, scheme, 1, tokens).us for tokens in (32, 256, 4096, 16384)],
            [prompt(free, shape, scheme, 1, 4096, Layout(tp)).us for tp in (8, 4, 2, 1)],
        ):
            assert times == sorted(times)
            assert times[0] < times[-1]


@pytest.mark.parametrize("scheme", MIXTURE_SCHEMES)
def test_weights_of_mixtures_are_those_of_layers(scheme: str) -> None:
    def layer(n: int, k: int, kind: str = scheme) -> int:
        return Linear(k, n, False, kind, device="meta").weight_bytes

    norms = 2 * (2 * 2048 + 2 * 128)
    attention = layer((32 + 2 * 4) * 128, 2048) + layer(2048, 32 * 128)
    experts = 128 * (layer(2 * 768, 2048) + layer(2048, 768))
    tables = 2 * layer(151936, 2048, "w8a16") + 2 * 2048
    assert weights_bytes(SMALL, scheme) == 48 * (norms + attention + experts + 2 * 128 * 2048) + tables
    if scheme == "codebook4":
        assert weights_bytes(SMALL, scheme) == pytest.approx(16.6e9, rel=3e-3)
    for shape in MIXTURES:
        for tp in (2, 4, 8):
            check_layout(shape, scheme, Layout(tp))
            assert tp * weights_bytes(shape, scheme, Layout(tp)) == pytest.approx(
                weights_bytes(shape, scheme), rel=0.04
            )
    assert room(LARGE, scheme, 2048, Layout(4)) > 0
    with pytest.raises(ConfigError, match="30B has 12 experts, which 8 GPUs cannot share"):
        check_layout(replace(SMALL, name="30B", experts=(12, 8)), scheme, Layout(8))


def _with_mixtures(folder: Path) -> Rows:
    """All results, with made-up rows of mixtures, and a step of one in an engine."""
    shutil.copytree(RESULTS, folder)
    environment = {"gpu": GPU, "driver": "580", "cuda": "13.0", "torch": "2.11", "commit": "abc123"}
    with (folder / "bench_experts.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["bench", "model", "scheme", "m", "part", "median_us", *environment])
        writer.writeheader()
        for (model, mixture), m, scheme in itertools.product(MODELS.items(), TOKENS, (*MIXTURE_SCHEMES, "marlin_int4")):
            known = "codebook4" if scheme == "marlin_int4" else scheme
            us = MIXTURE.us(Routed.of(mixture, known, m))
            for part, share in (("mixture", 1.0), ("up", 0.5)):
                row = {"bench": "bench_experts", "model": model, "scheme": scheme, "m": m, "part": part}
                writer.writerow({**row, "median_us": share * us, **environment})
    engine = folder / "bench_engine.csv"
    with engine.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if "qwen3" not in row["case"]]
    step_row = dict.fromkeys(rows[0], "") | environment | {"bench": "bench_engine", "case": "qwen3-30b-a3b-codebook4"}
    step_row |= {"what": "decode", "batch": "8", "median_us": "3500"}
    with engine.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows([*rows, step_row])
    return Rows(folder)


def test_few_rows_of_mixtures_make_no_law(tmp_path: Path) -> None:
    rows = _with_mixtures(tmp_path / "few")
    path = rows.folder / "bench_experts.csv"
    assert {"codebook4", "w8a8"} <= set(mixture_laws(rows, GPU))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if ",w8a8," not in line or ",4096," in line))
    laws = mixture_laws(Rows(rows.folder), GPU)
    assert "codebook4" in laws
    assert "w8a8" not in laws


def test_the_page_has_mixtures_if_there_are_rows(tmp_path: Path) -> None:
    page = next(path for path in tables.PAGES if path.name == "scale.md").read_text(encoding="utf-8")
    rows = _with_mixtures(tmp_path / "with")
    assert CEILINGS[GPU].read_bytes > 1e6 / MIXTURE.us_per_byte
    for law in mixture_laws(rows, GPU).values():
        assert max(map(abs, law.residuals)) < 0.05
    text = tables.filled(page, rows)
    for name, schemes in (("8B", 4), ("30B-A3B", 3), ("235B-A22B", 3)):
        lines = [line for line in pages.rates(rows).splitlines() if line.startswith(f"| {name} |")]
        assert len(lines) == schemes
        assert any(FLOAT in line for line in lines) == (name == "8B")
        assert all(line in text for line in lines)
    assert "| codebook4, mixtures | 24 |" in text
    assert "qwen3-30b-a3b, mixtral-8x7b, gpt-oss-20b, olmoe-1b-7b, of 1, 4, 8, 16, 64, 4,096 tokens" in text
    assert "Steps of Qwen3-30B-A3B: " in text
    assert "marlin" not in text
    shutil.copytree(tmp_path / "with", tmp_path / "without")
    (tmp_path / "without" / "bench_experts.csv").unlink()
    without = tables.filled(page, Rows(tmp_path / "without"))
    assert "Not measured: there are no rows in `bench_experts.csv`." in without
    assert not any(name in without for name in ("| 30B-A3B |", "| 235B-A22B |", "qwen3-30b-a3b", ", mixtures |"))
