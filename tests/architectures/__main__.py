"""``python -m tests.architectures``: builds the kernels for all architectures and prints what they are.

Ends with 1 if one of them has a fault. ``--raw`` leaves out CUTLASS's; each takes about a minute.
"""

from __future__ import annotations

import sys
import time
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

from qcut import jit
from qcut.emitters.core.arch import ARCHITECTURES
from tests.architectures.kernels import cutlass, raw_kernels
from tests.architectures.reading import faults


def cpu_seconds() -> float:
    """CPU time of this process and of the compilers that it has run."""
    return sum(usage.ru_utime + usage.ru_stime for usage in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN)))


def main(raw: bool) -> int:
    start = time.monotonic()
    sources = [source for arch in ARCHITECTURES for source in (*raw_kernels(arch), *([] if raw else cutlass(arch)))]
    built, bad = jit.build_many(sources), 0
    for source in sources:
        binary = built[source.name]
        wrong = [str(binary)] if isinstance(binary, Exception) else faults(source, binary)
        registers = "-" if isinstance(binary, Exception) or binary.resources is None else binary.resources.registers
        print(f"{source.arch:7} {registers!s:>4} registers  {source.name}" + "".join(f"\n        {w}" for w in wrong))
        bad += bool(wrong)
    by_arch = ", ".join(f"{sum(s.arch == arch for s in sources)} for {arch}" for arch in ARCHITECTURES)
    print(
        f"{len(sources)} kernels: {by_arch}; {bad} with faults; "
        f"{time.monotonic() - start:.0f} s, CPU {cpu_seconds():.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main("--raw" in sys.argv[1:]))
