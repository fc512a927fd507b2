"""Two processes that save to one directory while a third one loads: ``python -m tests.checkpoints.concurrent_saves``.

Every save is of one number, which all its tensors hold. A load must give the tensors of one save.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import qcut
from qcut.checkpoints.formats.turboquant import writer
from qcut.checkpoints.formats.turboquant.format import Config
from qcut.conversion.calibration.calibrate import Calibration, LayerStats
from qcut.conversion.quantize import quantize
from qcut.layers.codebook import CodebookLinear
from qcut.layers.linear import Linear

KINDS = ("qcut", "turboquant", "calibration")


class Net(nn.Module):
    """Three layers and a parameter; all values are one number."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.gain = nn.Parameter(torch.full((5,), value))
        for layer in self.layers:
            nn.init.constant_(layer.weight, value)
            nn.init.constant_(layer.bias, value)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def save(kind: str, folder: Path, value: int) -> None:
    """Save a number."""
    if kind == "calibration":
        stats = {f"l{i}": LayerStats(*(torch.full(s, float(value)) for s in ((3,), (3,), (2, 3))), 2) for i in range(3)}
        Calibration(stats).save(folder)
        return
    model = Net(float(value))
    if kind == "qcut":
        quantize(model, "w8a8", progress=False)
        qcut.save(model, folder, max_shard_bytes=500)
    else:
        writer.quantize_model(model, Config(group_size=16), progress=False)
        writer.save_turboquant(model, folder)


def load(kind: str, folder: Path) -> int:
    """Load, and return the number that all tensors hold."""
    if kind == "calibration":
        found = {
            float(t)
            for s in Calibration.load(folder).layers.values()
            for part in (s.lo, s.hi, s.sample)
            for t in part.flatten()
        }
    elif kind == "qcut":
        model = qcut.load(folder, model=Net, progress=False)
        layers = [m for m in model.modules() if isinstance(m, Linear)]
        assert len(layers) == 3
        found = {round(float(v) * 127, 2) for m in layers for v in m.weight_scale}  # type: ignore[union-attr]
        found |= {float(v) for v in model.gain.detach()} | {float(v) for m in layers for v in m.bias}  # type: ignore[union-attr]
    else:
        model = qcut.load(folder, model=Net, progress=False)
        layers = [m for m in model.modules() if isinstance(m, CodebookLinear)]
        assert len(layers) == 3
        found = {round(float(v) / 4, 2) for m in layers for v in m.norms.flatten()}
        found |= {float(v) for v in model.gain.detach()} | {float(v) for m in layers for v in m.bias}  # type: ignore[union-attr]
    (value,) = found
    return int(value)


def run(kind: str, folder: Path, rounds: int) -> tuple[int, int]:
    """Let two processes save ``rounds`` times each, and load until they end.

    Returns:
        The number of loads, and of different saves that they gave.
    """
    save(kind, folder, 1)
    context = multiprocessing.get_context("fork")  # importing torch takes seconds
    savers = [context.Process(target=_save_on, args=(kind, folder, i, rounds)) for i in (2, 3)]
    found: list[int] = []
    for saver in savers:
        saver.start()
    try:
        while any(saver.is_alive() for saver in savers):
            found.append(load(kind, folder))
            if found[-2:-1] == found[-1:]:  # the savers are still starting, or in the middle
                time.sleep(0.02)
    finally:
        for saver in savers:
            saver.join()
    assert [saver.exitcode for saver in savers] == [0, 0]
    assert load(kind, folder) in (2 * rounds, 2 * rounds + 1)
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert not left, left
    return len(found), len(set(found))


def _save_on(kind: str, folder: Path, first: int, rounds: int) -> None:
    for i in range(rounds):
        save(kind, folder, 2 * i + first)


def main() -> None:
    """Run one kind, or all."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # processes fork, and threads do not go with them
    for kind in KINDS if arguments.kind is None else (arguments.kind,):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            loads, saves = run(kind, Path(folder), arguments.rounds)
            took = time.perf_counter() - start
            print(
                f"{kind}: 2 savers x {arguments.rounds} rounds, {loads} loads of {saves} saves, {took:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
