"""Runs the self-test's checks on a GPU, and says what differs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from qcut import jit
from qcut.backends.cuda.launch import native
from qcut.backends.cuda.launch.plans import forget_plans, target, watched_loads
from qcut.cli.selftest.bounds import Near
from qcut.cli.selftest.checks import Check, Expected, all_checks, slow_sources
from qcut.common.progress import progress_bar
from qcut.emitters.core.source import EmitError
from qcut.errors import DeviceError, QcutError
from qcut.jit import background


@dataclass(frozen=True)
class Verdict:
    """What one check found.

    Attributes:
        family: the family, as kernels' names, or the operator's name.
        shape: sizes.
        kernels: names of the kernels that ran.
        problem: what differs, or why nothing could be compared; empty where all is right.
        skipped: why the check did not run; empty where it did.
    """

    family: str
    shape: str
    kernels: tuple[str, ...] = ()
    problem: str = ""
    skipped: str = ""

    def __str__(self) -> str:
        mark = "skip" if self.skipped else "FAIL" if self.problem else "ok  "
        ran = ", ".join(self.kernels)
        text = f"[{mark}] {self.family:<20} {self.shape}" + (f"  {ran}" if ran else "")
        return text + "".join(f"\n{'':7}-> {why}" for why in (self.problem, self.skipped) if why)


def difference(got: Tensor, expected: Expected) -> str:
    """What differs between a result and what must come out, both on the CPU; empty where nothing does."""
    exact, within = expected if isinstance(expected, Near) else (expected, None)
    if got.shape != exact.shape or (within is None and got.dtype is not exact.dtype):
        return f"{got.dtype} {list(got.shape)}, not {exact.dtype} {list(exact.shape)}"
    if within is None:
        wrong = (got != exact) & ~(got.isnan() & exact.isnan())
        if got.is_floating_point():
            wrong |= (got == 0) & (exact == 0) & (got.signbit() != exact.signbit())
    else:
        wrong = ~((got.double() - exact).abs() <= within)
    if not bool(wrong.any()):
        return ""
    first = tuple(int(i) for i in wrong.nonzero()[0])
    tolerance = "every bit" if within is None else f"within {within[first]:.3g}"
    share = f"{int(wrong.sum()):,} of {wrong.numel():,} values differ"
    return f"{share}, first at {list(first)}: {got[first].item()!r}, must be {exact[first].item()!r} ({tolerance})"


def run_check(check: Check, device: torch.device) -> Verdict:
    """Run a check on a device. A kernel that cannot be built or launched is one that failed."""
    with watched_loads() as loaded:
        try:
            got = [t.cpu() for t in check.run(device)]
            problem = _compare(got, check.expected(got))
        except (QcutError, EmitError, RuntimeError) as error:
            problem = f"{type(error).__name__}: {error}"
    return Verdict(check.family, check.shape, tuple(dict.fromkeys(loaded)), problem)


def _compare(got: Sequence[Tensor], expected: Sequence[Expected]) -> str:
    found = [difference(*pair) for pair in zip(got, expected, strict=True)]
    return "; ".join(f"result {i}: {text}" if len(found) > 1 else text for i, text in enumerate(found) if text)


@background.waiting()  # the checks are of the best kernels
def selftest(ordinal: int, *, progress: bool = True) -> list[Verdict]:
    """Run every check on a GPU.

    Kernels come from the cache or are built. Plans of this process are forgotten first.

    Args:
        ordinal: CUDA ordinal.
        progress: show a bar on standard error.

    Returns:
        A verdict for each check, in order. After a device error no further check can run.

    Raises:
        UnsupportedError: the GPU has no kernels.
    """
    gpu, device = target(ordinal), torch.device("cuda", ordinal)
    nvcc = jit.is_toolchain_available("nvcc")
    slow = slow_sources(gpu, cutlass=nvcc)
    # What fails to build fails once more, with its message, when it is needed.
    builders = [threading.Thread(target=jit.build_many, args=(slow,), kwargs={"progress": False})]
    builders.append(threading.Thread(target=native.build))
    for builder in builders:
        builder.start()
    forget_plans()
    verdicts, all_, dead = [], all_checks(), ""
    with progress_bar(len(all_), f"self-test of {gpu.name}", "check", shown=progress) as advance:
        for check in all_:
            if dead:
                verdict = Verdict(check.family, check.shape, skipped=dead)
            elif check.toolchain == "nvcc" and not nvcc:
                verdict = Verdict(check.family, check.shape, skipped="no nvcc or g++: other kernels serve instead")
            else:
                with torch.cuda.device(ordinal):
                    verdict = run_check(check, device)
                dead = _device_error(ordinal)
            verdicts.append(verdict)
            advance(1)
    for builder in builders:
        builder.join()
    return verdicts


def _device_error(ordinal: int) -> str:
    """Why the device can compute no more; empty where it can."""
    try:
        torch.cuda.synchronize(ordinal)
    except RuntimeError as error:
        return f"the device is lost: {str(error).splitlines()[0]}"
    return ""


def command(ordinal: int | None, *, progress: bool | None = None, record: list[dict[str, Any]] | None = None) -> int:
    """``qcut doctor --selftest``: test GPUs and print what was found.

    Args:
        ordinal: CUDA ordinal; None: every visible GPU.
        progress: show a bar; None: where standard error is a terminal.
        record: takes each verdict as plain data, and its GPU's number.

    Returns:
        Exit status: 0 where everything that ran was right.

    Raises:
        DeviceError: there is no GPU, or none of that number.
        UnsupportedError: a GPU has no kernels.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise DeviceError("doctor --selftest: there is no CUDA device here; the self-test compares a GPU with the CPU")
    if ordinal is not None and not 0 <= ordinal < count:
        raise DeviceError(f"doctor --selftest: device {ordinal} does not exist; allowed: 0 to {count - 1}")
    failed = 0
    for each in range(count) if ordinal is None else (ordinal,):
        verdicts = selftest(each, progress=sys.stderr.isatty() if progress is None else progress)
        if record is not None:
            record += [{"gpu": each, **asdict(verdict)} for verdict in verdicts]
        gpu, wrong = target(each), [v for v in verdicts if v.problem]
        skipped = sum(bool(v.skipped) for v in verdicts)
        print(f"cuda:{each} {gpu.name} ({gpu.arch}): {gpu.machine}")
        print("\n".join(map(str, verdicts)))
        right = len(verdicts) - len(wrong) - skipped
        print(f"{right} right, {len(wrong)} wrong, {skipped} not run\n")
        failed += len(wrong)
    return 1 if failed else 0
