"""A GPU for the tuner's tests: kernels that cost what their names say, binaries that were never compiled."""

from __future__ import annotations

import time
from collections.abc import Callable

from qcut.dispatch.gpus import Target, target_named
from qcut.emitters.core.source import KernelSource
from qcut.errors import LaunchError
from qcut.jit import Binary, Resources
from qcut.tuning.search import Task
from qcut.tuning.timing import CheckError, Variant

H200 = target_named("NVIDIA H200")
A100 = target_named("sm_80")
TASK = Task("int8_mma", "s8", "tnt", 256, 1280, 1280)
GOOD = Resources(128, 0, 0, 0, 0)


class FakeBench:
    """Kernels that take what their tiles' names say; a clock that adds their calls up."""

    def __init__(self, target: Target = H200, cost: Callable[[str], float] | None = None, pause_s: float = 0) -> None:
        self.target, self.clock = target, self
        self.cost = cost or (lambda name: 1.0 + sum(map(ord, name)) % 97)
        self.pause_s = pause_s
        self.called_us = 0.0
        self.launched: list[str] = []
        self.wrong: set[str] = set()
        self.astray: set[str] = set()
        self.dead = False

    def variant(self, task: Task, name: str, choice: object, source: KernelSource, binary: Binary) -> Variant:
        self.launched.append(name)

        def call(i: int) -> None:
            self.called_us += self.cost(name)

        def check() -> None:
            time.sleep(self.pause_s)
            if name.split()[0] in self.wrong:
                raise CheckError("3 of 9 elements differ")
            if name.split()[0] in self.astray:
                self.dead = True
                raise LaunchError("an illegal memory access was encountered\nand more")

        return Variant(name, call, 2, check)

    def is_alive(self) -> bool:
        return not self.dead

    def warm_up(self, body: Callable[[], object]) -> None:
        body()

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        return body

    def time_us(self, replay: Callable[[], object]) -> float:
        before = self.called_us
        replay()
        return self.called_us - before


def fake_build(
    sources: list[KernelSource], jobs: int | None = None, progress: bool = True, resources: Resources = GOOD
) -> dict[str, Binary]:
    return {s.name: Binary(s.name, s.entry, s.arch, s.name, b"", None, "", resources) for s in sources}
