"""What is measured of caches, on the CPU: perplexity of the embedded checkpoint, steps of a tiny model, and tables."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import bench_cache, cache_quality, tables
from benchmarks.demo import EMBEDDED
from benchmarks.harness import CheckError
from benchmarks.quality import tokens_of
from benchmarks.reporting.rows import Rows
from qcut.engine.kv_cache.cache import KV_DTYPES
from qcut.models.evaluation import perplexity

TEXT = "A class definition defines a class object. The import statement binds a name in the namespace. " * 12


def test_quality_by_cache_is_measured_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    given = ["--models-dir", str(EMBEDDED.parent), "--models", EMBEDDED.name, "--text", str(text), "--window", "32"]
    given += ["--max-windows", "4", "--device", "cpu", "--out", str(tmp_path)]
    assert cache_quality.main(given) == 0
    rows = {row["cache"]: row for row in Rows(tmp_path).of("cache_quality")}
    assert tuple(rows) == cache_quality.CACHES
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    tokens = tokens_of(AutoTokenizer.from_pretrained(EMBEDDED), TEXT)
    exact = perplexity(model, tokens, window=32, max_windows=4, progress=False)
    assert float(rows["float"]["perplexity"]) == pytest.approx(exact, rel=1e-4)
    for cache, row in rows.items():
        change = float(row["change_percent"])
        assert float(row["perplexity"]) == pytest.approx(exact * (1 + change / 100), rel=1e-3)
        assert (change == 0) == (cache == "float")
        assert abs(change) < {"int8": 0.5}.get(cache, 20)
    sizes = [float(rows[cache]["bytes_token"]) for cache in ("float", "int8", "int8/int4", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    assert rows[cache_quality.UNTURNED]["bytes_token"] == ""
    table = tables.cache_quality(Rows(tmp_path))
    assert f"| int4 | {float(rows['int4']['change_percent']):+.2f} ± " in table
    # Rows of caches that a call does not measure stay.
    assert cache_quality.main([*given, "--caches", "int8"]) == 0
    assert set(cache_quality.CACHES) == {row["cache"] for row in Rows(tmp_path).of("cache_quality")}
    with pytest.raises(SystemExit):
        cache_quality.main([*given, "--caches", "int3"])
    assert "int3 is not one of float; int8; int8/int4; int4; int4, nearest codes; " in capsys.readouterr().err


def test_transformers_attention_is_given_back() -> None:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    windows = tokens_of(AutoTokenizer.from_pretrained(EMBEDDED), TEXT)[:64].view(2, 32)
    exact = cache_quality.by_transformers(model, windows, "sdpa")
    rounded = cache_quality.by_transformers(model, windows, cache_quality.ATTENTION)
    assert not torch.equal(exact, rounded)
    assert torch.equal(exact, cache_quality.by_transformers(model, windows, "eager")) or torch.allclose(
        exact, cache_quality.by_transformers(model, windows, "eager")
    )
    assert model.config._attn_implementation == "sdpa"


def test_steps_of_every_cache_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--case", "tiny-llama", "--contexts", "24,40", "--batches", "1,2", "--device", "cpu"]
    assert bench_cache.main([*given, "--out", str(tmp_path)]) == 0
    assert f"{4 * len(KV_DTYPES)} results checked, 0 wrong; nothing timed on a CPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    logits = torch.randn(2, 50)
    bench_cache.check("int4", logits + 0.01 * torch.randn(2, 50), logits)
    for wrong in (logits.flip(1), torch.full_like(logits, math.nan)):
        with pytest.raises(CheckError, match="int4: logits have cosine"):
            bench_cache.check("int4", wrong, logits)


def test_a_step_is_timed_from_the_same_tokens() -> None:
    case = bench_cache.CASES["tiny-llama"]
    model = bench_cache.build(case, "cpu", 48)
    engine = bench_cache.engine_of(model, 2, 48, "int4", case.vocabulary)
    engine.prefill(bench_cache.prompts_of(case.vocabulary, 2, 40))
    timing = bench_cache.step_us(engine, 40, 2, 8, 1)
    assert timing.median_us > 0
    assert engine.lengths == (48, 48)
    assert engine.cache.guide(0) is not None


def test_tokens_per_second_are_told(tmp_path: Path) -> None:
    assert "Not measured" in tables.caches(Rows(tmp_path))
    assert "Not measured" in tables.cache_quality(Rows(tmp_path))
    columns = "batch,context,cache,tokens_s,bytes_token"
    lines = ["1,512,auto,583.4,131072", "1,512,int4,590.1,33792", "8,8192,int8,1234.5,67584"]
    (tmp_path / "bench_cache.csv").write_text("\n".join((columns, *lines)) + "\n")
    table = tables.caches(Rows(tmp_path))
    assert "| 1 × 512 | 583 | – | 590 | – |" in table
    assert "| 8 × 8,192 | – | 1,234 | – | – |" in table
    assert "| bytes a token | 131,072 | 67,584 | 33,792 | – |" in table
