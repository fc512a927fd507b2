"""Kernel emitters: frozen descriptions in, CUDA C++ text out.

Nothing here imports torch, touches a GPU or runs a compiler. See `qcut.emitters.core.source.KernelSource`, the
one type that crosses to `qcut.jit`.
"""
