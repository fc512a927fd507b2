"""What an engine has captured: by size, the last used, of the kernels of today. Captures themselves: tests/gpu."""

from __future__ import annotations

import pytest
import torch

from qcut.cuda import plans
from qcut.engine import graphs
from qcut.engine.graphs import Graphs


def test_the_sizes_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 3)
    held = Graphs(torch.device("cuda"))
    made: list[int] = []

    def get(size: int) -> int:
        return held.get(size, lambda: made.append(size) or 10 * size)

    assert [get(size) for size in (1, 2, 3, 1, 4, 1, 3, 2)] == [10, 20, 30, 10, 40, 10, 30, 20]
    assert made == [1, 2, 3, 4, 2]
    assert len(held) == 3


def test_plans_forgotten_are_graphs_forgotten() -> None:
    held = Graphs(torch.device("cuda"))
    first = held.get("a", object)
    held.refresh()
    assert held.get("a", object) is first
    before = plans.generation()
    plans.forget_plans()
    assert plans.generation() > before
    assert held.get("a", object) is first  # within a request
    held.refresh()
    assert len(held) == 0
    second = held.get("a", object)
    held.refresh()
    assert held.get("a", object) is second is not first
