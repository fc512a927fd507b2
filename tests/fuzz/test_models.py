"""Random models of one's own differ from the float model nowhere in silence."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.fuzz.models import run_models, text_of


def test_random_models_differ_nowhere_in_silence() -> None:
    count, outcomes, failures = run_models(range(60))
    shown = "\n".join(f"{o.seed} {o.what}: {o.result}: {o.message}\n{text_of(o.seed)}" for o in failures[:3])
    assert not failures, shown
    assert count["quantize", "right"] > 40
    assert count["smooth", "right"] > 20
    assert count["chain", "right"] > 15
    assert sum(outcome.fused for outcome in outcomes) > 30
