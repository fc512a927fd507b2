"""Launches of operators on the CPU: a stand-in for launch plans records each call's arguments by name."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from qcut.backends.cuda.launch.plans import PlanCache
from qcut.dispatch.gpus import Target
from qcut.emitters.core.source import KernelSource

H200, A100 = Target("sm_90a", 132, "NVIDIA H200"), Target("sm_80", 108, "NVIDIA A100-SXM4-80GB")
_TYPES = {"ptr": int, "i64": int, "i32": int, "f32": float}


class Launches(list[dict[str, Any]]):
    """Launches in order: arguments by parameter, ``kernel`` the name, ``rows`` and ``grid`` the extents."""

    def __init__(self, gpu: Target) -> None:
        self.gpu = gpu

    def spec(
        self,
        source: KernelSource,
        grid: Callable[[int], tuple[int, int, int]],
        tail: tuple[int, ...] = (),
        pdl: bool = False,
        fallback: Callable[[], Noted] | None = None,
    ) -> Noted:
        return Noted(self, source, grid, tail)


class Noted:
    """A launch plan, and what makes one, that launches nothing."""

    def __init__(
        self,
        launches: Launches,
        source: KernelSource,
        grid: Callable[[int], tuple[int, int, int]],
        tail: tuple[int, ...],
    ) -> None:
        self.launches, self.source, self.grid, self.tail = launches, source, grid, tail

    def load(self, device: int) -> Noted:
        return self

    def for_native(self) -> None:
        """Python launches."""

    def launch(self, m: int, args: tuple[int | float, ...], stream: int) -> None:
        params = self.source.params
        workspace = (0,) if params[-1].name == "workspace" else ()
        args = (*args, *self.tail, *workspace)
        assert [type(a) for a in args] == [_TYPES[p.kind] for p in params], self.source.name
        named = {p.name: value for p, value in zip(params, args, strict=True)}
        self.launches.append({"kernel": self.source.name, "rows": m, "grid": self.grid(m), **named})


def note_launches(module: ModuleType, gpu: Target, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Let a module of `qcut.backends.cuda` launch on a GPU that is not there."""
    launches = Launches(gpu)
    monkeypatch.setattr(module, "LaunchSpec", launches.spec)
    monkeypatch.setattr(module, "target", lambda device: gpu)
    monkeypatch.setattr(module, "pdl", lambda device: False, raising=False)
    monkeypatch.setattr(module, "current_stream", lambda device: 0)
    for name in [name for name in vars(module) if name.endswith("_plans")]:
        monkeypatch.setattr(module, name, PlanCache(vars(module)[name].maker))
    return launches
