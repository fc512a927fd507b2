"""What a built kernel must be on any architecture: read from the compiler's report and from the instructions."""

from __future__ import annotations

import re

from qcut.emitters.core.arch import architecture
from qcut.emitters.core.source import KernelSource
from qcut.jit import Binary
from tests.support.binaries import instructions, overwritten_operands, text

TRY_WAIT = "SYNCS.PHASECHK.TRANS64.TRYWAIT"
"""``mbarrier.try_wait``."""
EXPECT_TX = "SYNCS.ARRIVE.TRANS64"
"""``mbarrier.arrive.expect_tx``; an arrival that expects nothing has a suffix."""
BULK = ("UBLKCP", "STAS")
"""Copies with bytes that a barrier counts: ``cp.async.bulk``, ``st.async``."""
WAIT = "ACQBULK"
"""``griddepcontrol.wait``."""


def report_faults(source: KernelSource, binary: Binary, spill: int = 0) -> list[str]:
    """What the compiler's report says against a kernel: spills, more than an SM has, products one after another.

    Args:
        source: the kernel.
        binary: what it was built to.
        spill: bytes that it may spill.
    """
    arch, resources = architecture(source.arch), binary.resources
    if resources is None:
        return ["the compiler's report has no figures"]
    found = []
    for what in ("spill_store", "spill_load", "stack"):
        if (size := getattr(resources, f"{what}_bytes")) > spill:
            found.append(f"{what} of {size} bytes")
    bounds = re.search(r"__launch_bounds__\((\d+)(?:, (\d+))?\)", source.text)
    threads = int(bounds[1]) * int(bounds[2] or 1) if bounds else source.block
    if resources.registers * threads > arch.registers:
        found.append(f"{resources.registers} registers, too many for {threads} threads")
    if resources.smem_bytes + source.smem_bytes > arch.smem_bytes:
        found.append(f"{resources.smem_bytes + source.smem_bytes} bytes of shared memory")
    if "serialized" in binary.log:
        found.append("waits for each asynchronous product")
    return found


def code_faults(source: KernelSource, binary: Binary, spill: int = 0) -> list[str]:
    """What the instructions say against a kernel: local memory, a missing barrier or wait, operands overwritten."""
    names, found = instructions(binary.cubin), []
    if not spill and any(name.startswith(("LDL", "STL")) for name in names):
        found.append("has local memory")
    if TRY_WAIT in names and EXPECT_TX not in names and any(name.startswith(BULK) for name in names):
        found.append("waits for a barrier that expects nothing")
    if (WAIT in names) != (source.waits and architecture(source.arch).pdl):
        found.append("waits for its predecessor unasked" if WAIT in names else "never waits for its predecessor")
    if ("__cluster_dims__" in source.text) != any(
        name.startswith("UCGABAR") for name in names
    ) and not source.host_text:
        found.append("has a cluster without a barrier, or the other way round")
    if any("GMMA" in name for name in names) and (written := overwritten_operands(text(binary.cubin))):
        found.append(f"overwrites operands of products in flight: {min(written)}")
    return found


def faults(source: KernelSource, binary: Binary) -> list[str]:
    """All of `report_faults` and `code_faults`."""
    return report_faults(source, binary) + code_faults(source, binary)
