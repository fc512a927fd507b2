"""The host launcher of a CUTLASS kernel: flat arguments in, CUTLASS's parameter block out, one driver call.

Host code: ``include/qcut/cutlass/launcher_sm90.cuh`` and ``launcher_sm80.cuh``.
"""

from __future__ import annotations

from collections.abc import Iterable

from qcut.emitters.core.source import Param
from qcut.emitters.core.text import flag, include
from qcut.emitters.gemm.problem import Schedule

_FIELDS = {"ptr": "void*", "i32": "int", "i64": "long long", "f32": "float"}


def emit_launcher(
    kernel: str,
    declarations: str,
    params: Iterable[Param],
    *,
    schedule: Schedule,
    epilogue: str,
    residual: bool,
    transposed: bool = False,
    units: bool = False,
    promotion: int | None = None,
) -> str:
    """Write the launcher's C++, which exports ``qcut_launch`` and ``qcut_query``.

    Args:
        kernel: C++ name of the kernel's type.
        declarations: the text that declares it.
        params: fields of the argument struct, in order.
        schedule: ``multistage`` takes SM80's parameter block, the others SM90's.
        epilogue: C++ initializer of the epilogue's arguments, in terms of the argument struct ``a``.
        residual: whether ``a.residual`` is the kernel's C.
        transposed: whether the kernel's A are the weights ``a.b``, and its D the transpose of ``a.d``.
        units: whether the weights are ``a.units`` and the tokens blocks, ``a.x``.
        promotion: instructions with a common sum, which is added in float32; None: the main loop has one sum.

    Returns:
        The translation unit; see `qcut.emitters.core.source.KernelSource` for what it exports.
    """
    sm90 = schedule != "multistage"
    arguments = "decltype(Kernel::EpilogueArguments::thread)" if sm90 else "typename Kernel::FusionCallbacks::Arguments"
    fields = "".join(f"  {_FIELDS[param.kind]} {param.name};\n" for param in params)
    return (
        f"{include('core/host_prelude.cuh')}{declarations}"
        f"{include('cutlass/launcher_sm90.cuh' if sm90 else 'cutlass/launcher_sm80.cuh')}\n"
        "namespace {\n"
        "struct Call {\n"
        f"{fields}"
        f"  using Kernel = {kernel};\n"
        f"  static constexpr bool kStreamK = {flag(schedule == 'stream_k')};\n"
        f"  static constexpr bool kTransposed = {flag(transposed)};\n"
        f"  static constexpr bool kUnits = {flag(units)};\n"
        f"  static constexpr int kPromotion = {promotion or 0};\n"
        f"  static {arguments} epilogue(Call const& a) {{ return {epilogue}; }}\n"
        f"  static void* residual_of(Call const& a) {{ return {'a.residual' if residual else 'nullptr'}; }}\n"
        "};\n"
        "}  // namespace\n\n"
        'extern "C" int qcut_launch(void const* args, void* function, void* stream, int flags) {\n'
        "  return qcut::Launcher<Call>::launch(args, function, stream, flags);\n"
        "}\n\n"
        'extern "C" long qcut_query(int what, void const* args) { return qcut::Launcher<Call>::query(what, args); }\n'
    )
