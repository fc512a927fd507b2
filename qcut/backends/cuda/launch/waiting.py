"""`qcut.wait_for_kernels`, in a module that imports nothing of the kernel side."""

from __future__ import annotations


def wait_for_kernels(timeout: float | None = None) -> bool:
    """Wait until all kernels that are being built in the background are in use.

    Until then, calls launch fallback kernels, with the same results at less speed.

    Args:
        timeout: most seconds to wait; None waits as long as it takes.

    Returns:
        Whether all are in use, or have failed with a warning. Captured CUDA graphs go on with the kernels that they
        were captured with; `qcut.Engine` captures anew at its next request.

    Example::

        >>> qcut.quantize(model, "w8a8", device="cuda")  # doctest: +SKIP
        >>> qcut.wait_for_kernels()  # before measuring, or before a server takes requests  # doctest: +SKIP
        True
    """
    from qcut.jit import background

    return background.builder.wait(timeout)
