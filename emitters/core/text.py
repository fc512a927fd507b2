"""The text of raw kernels: an include, launch bounds, a signature, statements that instantiate a header's template."""

from __future__ import annotations

from collections.abc import Iterable

from qcut.emitters.core.source import KernelSource, Param


def include(header: str) -> str:
    """The line that includes a header of ``include/qcut``."""
    return f"#include <qcut/{header}>\n"


def kernel_source(
    name: str,
    arch: str,
    params: tuple[Param, ...],
    *statements: str,
    device_code: str,
    block: int,
    waits: bool,
    smem_bytes: int = 0,
    ctas_per_sm: int | None = None,
    cluster: int = 1,
    cooperative: bool = False,
) -> KernelSource:
    """A raw kernel: one ``extern "C"`` function over device code that lies in headers.

    Args:
        name: procedural name, which is also the function's name.
        arch: real architecture.
        params: arguments, in order, with their C++ types.
        statements: C++ of the body, one for each line that is indented by two spaces; a further line within a
            statement brings its own indent.
        device_code: text that precedes the function, such as an `include`.
        block: threads per CTA.
        waits: see `KernelSource`.
        smem_bytes: dynamic shared memory per CTA.
        ctas_per_sm: CTAs of a multiprocessor that the compiler keeps registers for; None leaves the choice to it.
        cluster: CTAs of a cluster, along x.
        cooperative: see `KernelSource`.
    """
    bounds = str(block) if ctas_per_sm is None else f"{block}, {ctas_per_sm}"
    dims = f"__cluster_dims__({cluster}, 1, 1) " if cluster > 1 else ""
    signature = ", ".join(param.declaration for param in params)
    # If the body is one call, the signature is one line; otherwise the parameters stand on a line of their own.
    opening = "(\n    " if len(statements) > 1 else "("
    body = "".join(f"  {statement}\n" for statement in statements)
    return KernelSource(
        name=name,
        text=(
            f"{device_code}\n"
            f'extern "C" __global__ void {dims}__launch_bounds__({bounds})\n'
            f"{name}{opening}{signature}) {{\n{body}}}\n"
        ),
        entry=name,
        params=params,
        arch=arch,
        block=block,
        smem_bytes=smem_bytes,
        includes=("qcut", "cuda"),
        waits=waits,
        cooperative=cooperative,
    )


def call_arguments(names: Iterable[str], params: Iterable[Param], absent: str = "nullptr") -> str:
    """Arguments of a call, by name. An argument that is no parameter of the kernel becomes ``absent``."""
    given = {param.name for param in params}
    return ", ".join(name if name in given else absent for name in names)


def flag(value: bool) -> str:
    """A bool in C++."""
    return "true" if value else "false"
