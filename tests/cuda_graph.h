// SPDX-License-Identifier: Apache-2.0
// Calls captured from a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "cuda_decoding.h"

namespace leanattn::testing {

// A graph that a test looks into.
class CapturedGraph : public tools::DeviceGraph {
 public:
  using DeviceGraph::DeviceGraph;

  std::vector<cudaGraphNode_t> nodes() const {
    std::size_t count = 0;
    must(cudaGraphGetNodes(graph(), nullptr, &count), "cudaGraphGetNodes");
    std::vector<cudaGraphNode_t> all(count);
    if (count > 0) must(cudaGraphGetNodes(graph(), all.data(), &count), "cudaGraphGetNodes");
    return all;
  }
  // Blocks of the only node, a kernel; 0 when it is not one kernel.
  long long blocks() const {
    const std::vector<cudaGraphNode_t> all = nodes();
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    if (all.size() != 1) return 0;
    must(cudaGraphNodeGetType(all[0], &type), "cudaGraphNodeGetType");
    if (type != cudaGraphNodeTypeKernel) return 0;
    cudaKernelNodeParams kernel{};
    must(cudaGraphKernelNodeGetParams(all[0], &kernel), "cudaGraphKernelNodeGetParams");
    return static_cast<long long>(kernel.gridDim.x) * kernel.gridDim.y * kernel.gridDim.z;
  }
};

}  // namespace leanattn::testing
