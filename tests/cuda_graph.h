// SPDX-License-Identifier: Apache-2.0
// Calls captured from a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "cuda_decoding.h"

namespace leanattn::testing {

// What queue(stream) queues, captured so that an allocation or a synchronisation anywhere would fail, and made ready to launch.
class CapturedGraph {
 public:
  template <class Queue>
  CapturedGraph(cudaStream_t stream, Queue queue) {
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    try {
      queue(stream);
    } catch (...) {
      cudaStreamEndCapture(stream, &graph_);  // else the stream stays in capture
      if (graph_) cudaGraphDestroy(graph_);
      throw;
    }
    must(cudaStreamEndCapture(stream, &graph_), "cudaStreamEndCapture");
    must(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
  }
  ~CapturedGraph() {
    if (executable_) cudaGraphExecDestroy(executable_);
    if (graph_) cudaGraphDestroy(graph_);
  }
  CapturedGraph(const CapturedGraph&) = delete;

  void launch(cudaStream_t stream) const { must(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch"); }

  std::vector<cudaGraphNode_t> nodes() const {
    std::size_t count = 0;
    must(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
    std::vector<cudaGraphNode_t> all(count);
    if (count > 0) must(cudaGraphGetNodes(graph_, all.data(), &count), "cudaGraphGetNodes");
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

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace leanattn::testing
