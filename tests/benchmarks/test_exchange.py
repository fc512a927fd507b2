"""The benchmark of exchanges: what the host expects, and kernels that compile."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import bench_exchange
from benchmarks.bench_exchange import FORMS, LAYERS, Form
from tests.support.compiled import build


def test_the_hosts_vectors_are_those_of_a_loop() -> None:
    words, stages, mask = 12, 5, 0xFFFFFFFF
    x, total = [i * 2654435761 & mask for i in range(words)], 0
    for stage in range(stages):
        others = [x[(i + 1 + stage * 97) % words] for i in range(words)]
        turned = [other << 7 & mask | other >> 25 for other in others]
        x = [own * 1664525 + other + stage & mask for own, other in zip(x, turned, strict=True)]
        total += sum(word * (2 * i + 1) & mask for i, word in enumerate(x))
    found, found_total = bench_exchange.vectors(words, stages)
    assert (found.dtype, found.tolist(), found_total) == (np.uint32, x, total & mask)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_kernels_compile_without_spills(form: Form) -> None:
    longest = max(bench_exchange.COLUMNS)
    for binary in build(*(form.source(longest, checked) for checked in (False, True))):
        assert binary.resources is not None
        assert binary.resources.spill_store_bytes == 0


def test_layers_have_vectors_that_are_measured() -> None:
    assert {columns for layer in LAYERS.values() for columns in layer} == set(bench_exchange.COLUMNS)
