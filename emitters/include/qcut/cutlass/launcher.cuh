// The host side of a CUTLASS kernel's launch: one driver call.
//
// The emitted text of a launcher defines `Call`: the arguments of a launch as flat fields, the kernel's type and the
// epilogue's arguments. launcher_sm90.cuh and launcher_sm80.cuh turn a Call into CUTLASS's parameter block.
//
// Source: CUDA driver API, "cuLaunchKernelEx".
#pragma once

namespace qcut {

inline int launch(void* function, dim3 grid, dim3 cluster, unsigned block, unsigned smem, void* stream, bool pdl,
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

}  // namespace qcut
