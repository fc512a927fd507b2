"""The host launcher of a CUTLASS kernel: flat arguments in, CUTLASS's parameter block out, one driver call.

Source: CUTLASS 4.2.0, ``cutlass/gemm/kernel`` (``Arguments``, ``Params``); CUDA driver API, ``cuLaunchKernelEx``.
"""

from __future__ import annotations

from collections.abc import Iterable

from qcut.emitters.core.source import Param
from qcut.emitters.gemm.problem import Schedule

_C_TYPES = {"ptr": "void*", "i32": "int", "i64": "long long", "f32": "float"}


def emit_launcher(
    kernel: str, declarations: str, params: Iterable[Param], *, schedule: Schedule, epilogue: str, residual: bool
) -> str:
    """Write the launcher's C++, which exports ``qcut_launch`` and ``qcut_query``.

    Args:
        kernel: C++ name of the kernel's type.
        declarations: the text that declares it.
        params: fields of the argument struct ``a``, in order.
        schedule: ``multistage`` takes SM80's parameter block, the others SM90's.
        epilogue: C++ initializer of the epilogue's arguments, in terms of ``a``.
        residual: whether ``a.residual`` is the kernel's C.

    Returns:
        The translation unit; see `qcut.emitters.core.source.KernelSource` for what it exports.
    """
    stream_k = schedule == "stream_k"
    text = _HOST_SM80 if schedule == "multistage" else _HOST_SM90
    for placeholder, value in {
        "@DECLARATIONS@": declarations,
        "@FIELDS@": "\n".join(f"  {_C_TYPES[p.kind]} {p.name};" for p in params),
        "@KERNEL@": kernel,
        "@EPILOGUE@": epilogue,
        "@PTR_C@": "a.residual" if residual else "nullptr",
        "@SCHEDULER@": (
            "{a.splits, a.swizzle, raster, Decomposition::Heuristic}" if stream_k else "{a.swizzle, raster}"
        ),
        "@DECOMPOSITION@": (
            "using Decomposition = typename Kernel::TileScheduler::DecompositionMode;" if stream_k else ""
        ),
    }.items():
        text = text.replace(placeholder, value)
    return text


_HOST_COMMON = r"""// Host launcher: flat arguments in, CUTLASS's parameter block out, one driver call.
#include <qcut/core/host_prelude.cuh>
#include <cstdint>
#include <cstring>
#include <optional>
@DECLARATIONS@
namespace {
struct LaunchArguments {
@FIELDS@
};
using Kernel = @KERNEL@;

int launch(void* function, dim3 grid, dim3 cluster, unsigned block, unsigned smem, void* stream, bool pdl,
           void* params) {
  CUlaunchAttribute attributes[2];
  unsigned count = 0;
  if (cluster.x * cluster.y * cluster.z > 1) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[count].value.clusterDim = {cluster.x, cluster.y, cluster.z};
    ++count;
  }
  if (pdl) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[count].value.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  CUlaunchConfig config{grid.x, grid.y, grid.z, block, 1, 1, smem, static_cast<CUstream>(stream), attributes, count};
  void* kernel_params[] = {params};
  return cuLaunchKernelEx(&config, static_cast<CUfunction>(function), kernel_params, nullptr);
}
"""

_HOST_SM90 = (
    _HOST_COMMON
    + r"""
@DECOMPOSITION@
typename Kernel::Arguments arguments(LaunchArguments const& a) {
  using Raster = typename Kernel::TileScheduler::RasterOrderOptions;
  Raster raster = a.raster == 1 ? Raster::AlongM : a.raster == 2 ? Raster::AlongN : Raster::Heuristic;
  typename Kernel::Arguments arguments{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {a.m, a.n, a.k, 1},
      {(int8_t const*)a.a, {int64_t(a.lda), {}, {}}, (int8_t const*)a.b, {int64_t(a.ldb), {}, {}}},
      {@EPILOGUE@, (typename Kernel::ElementC const*)@PTR_C@, {int64_t(a.ldd), {}, {}},
       (typename Kernel::ElementD*)a.d, {int64_t(a.ldd), {}, {}}}};
  arguments.hw_info.sm_count = a.sm_count;
  arguments.scheduler = @SCHEDULER@;
  return arguments;
}
}  // namespace

extern "C" int qcut_launch(void const* args, void* function, void* stream, int flags) {
  // Encoding three tensor maps costs more than the launch, and steady loops repeat their addresses.
  static thread_local LaunchArguments last;
  static thread_local std::optional<typename Kernel::Params> params;
  static thread_local size_t workspace_bytes;
  LaunchArguments const& a = *static_cast<LaunchArguments const*>(args);
  if (!params || std::memcmp(&last, &a, sizeof a) != 0) {
    auto arguments_ = arguments(a);
    workspace_bytes = Kernel::get_workspace_size(arguments_);
    params.emplace(Kernel::to_underlying_arguments(arguments_, a.workspace));
    std::memcpy(&last, &a, sizeof a);
  }
  if (workspace_bytes > 0) {
    // Stream-K's barriers count up from zero within one launch.
    if (a.workspace == nullptr) return CUDA_ERROR_INVALID_VALUE;
    int status = cuMemsetD8Async(CUdeviceptr(a.workspace), 0, workspace_bytes, static_cast<CUstream>(stream));
    if (status != CUDA_SUCCESS) return status;
  }
  typename Kernel::DispatchPolicy::ClusterShape cluster;
  return launch(function, Kernel::get_grid_shape(*params), dim3(cute::size<0>(cluster), cute::size<1>(cluster), 1),
                Kernel::MaxThreadsPerBlock, Kernel::SharedStorageSize, stream, flags & 1, &*params);
}

extern "C" long qcut_query(int what, void const* args) {
  switch (what) {
    case 0: return Kernel::SharedStorageSize;
    case 1: return sizeof(typename Kernel::Params);
    case 2: return long(Kernel::get_workspace_size(arguments(*static_cast<LaunchArguments const*>(args))));
    case 3: return Kernel::MaxThreadsPerBlock;
    case 4: return Kernel::can_implement(arguments(*static_cast<LaunchArguments const*>(args)));
    default: return -1;
  }
}
"""
)

_HOST_SM80 = (
    _HOST_COMMON
    + r"""
typename Kernel::Arguments arguments(LaunchArguments const& a) {
  using Output = typename Kernel::FusionCallbacks;
  typename Output::Arguments epilogue @EPILOGUE@;
  return typename Kernel::Arguments(cutlass::gemm::GemmUniversalMode::kGemm, {a.m, a.n, a.k}, 1, epilogue, a.a, a.b,
                                    @PTR_C@, a.d, 0, 0, 0, 0, int64_t(a.lda), int64_t(a.ldb), int64_t(a.ldd),
                                    int64_t(a.ldd));
}
}  // namespace

extern "C" int qcut_launch(void const* args, void* function, void* stream, int flags) {
  typename Kernel::Params params(arguments(*static_cast<LaunchArguments const*>(args)), -1, -1);
  return launch(function, params.get_grid_dims(), dim3(1, 1, 1), Kernel::kThreadCount,
                sizeof(typename Kernel::SharedStorage), stream, flags & 1, &params);
}

extern "C" long qcut_query(int what, void const*) {
  switch (what) {
    case 0: return sizeof(typename Kernel::SharedStorage);
    case 1: return sizeof(typename Kernel::Params);
    case 2: return 0;
    case 3: return Kernel::kThreadCount;
    case 4: return 1;
    default: return -1;
  }
}
"""
)
