"""Launch plans: what they refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qcut.cuda.plans import LaunchPlan
from qcut.emitters.core.family import Grid
from qcut.errors import LaunchError


def test_a_kernel_that_does_not_wait_is_not_launched_before_its_predecessor_ends() -> None:
    kernel: Any = SimpleNamespace(name="hasty", waits=False)
    LaunchPlan(kernel, Grid(1, (1, 1, 1)))
    with pytest.raises(LaunchError, match="kernel hasty: never waits"):
        LaunchPlan(kernel, Grid(1, (1, 1, 1)), pdl=True)
