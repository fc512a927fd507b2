"""The benchmark of model families, on tiny shapes and a CPU; the real sizes are built without memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import bench_families, harness
from benchmarks.bench_families import FAMILIES
from benchmarks.harness import read_rows
from qcut.engine.families import FAMILIES as KNOWN
from qcut.engine.families import decoder_of


def test_steps_of_tiny_models_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--families", "tiny-llama,tiny-gpt_neox", "--batches", "1,2", "--quick", "--out", str(tmp_path)]
    assert bench_families.main(words) == 0
    rows = read_rows(tmp_path / "bench_families.csv")
    assert [(row["family"], row["batch"]) for row in rows] == [
        (name, batch) for name in ("tiny-llama", "tiny-gpt_neox") for batch in ("1", "2")
    ]
    assert all(int(row["tokens_s"]) > 0 and float(row["gb"]) > 0 for row in rows)
    assert "tiny-gpt_neox" in capsys.readouterr().out


def test_every_family_of_the_engine_has_a_real_size() -> None:
    assert {family.model_type for family in FAMILIES.values()} == {*KNOWN}


@pytest.mark.parametrize("name", [name for name in FAMILIES if "tiny" not in name])
def test_real_sizes_are_the_engines(name: str) -> None:
    """Built without memory: heads, context and kernels' limits are those of the configuration."""
    family = FAMILIES[name]
    sizes = {"hidden_size": family.width, "intermediate_size": family.hidden, "num_attention_heads": family.heads}
    sizes |= {"num_key_value_heads": family.kv_heads, "vocab_size": family.vocabulary, "num_hidden_layers": 2}
    with torch.device("meta"):
        config = AutoConfig.for_model(family.model_type, **sizes, max_position_embeddings=2048, **family.more)
        model: Any = AutoModelForCausalLM.from_config(config)
    decoder = decoder_of(model)
    assert decoder.context >= bench_families.CONTEXT
    assert (decoder.heads.queries, decoder.heads.keys) == (family.heads, family.kv_heads)
    assert decoder.heads.size <= 256


def test_the_plot_has_the_families_of_earlier_calls(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = harness.Results("bench_families", harness.environment())
    for family in ("one", "other"):
        results.add(harness.Timing.of([2.0]), family=family, batch=1, fraction=0.5)
        results.write_csv(tmp_path, bench_families.KEY)
        results.rows.clear()
    bench_families.draw(tmp_path)
    drawn = (tmp_path / "bench_families.svg").read_text()
    assert all(name in drawn for name in ("one", "other", "batch 1"))
