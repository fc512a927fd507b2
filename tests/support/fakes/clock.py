"""A clock that needs no GPU."""

from __future__ import annotations

from collections.abc import Callable


class FixedClock:
    """Every replay takes the same time, whatever it holds; it captures by doing nothing.

    Args:
        us: microseconds of a replay.
    """

    def __init__(self, us: float) -> None:
        self._us = us

    def warm_up(self, body: Callable[[], object]) -> None:
        body()

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        return body

    def time_us(self, replay: Callable[[], object]) -> float:
        replay()
        return self._us
