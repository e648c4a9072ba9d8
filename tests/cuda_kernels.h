// SPDX-License-Identifier: Apache-2.0
// Kernels that tests run beside the library's own.
#pragma once

#include <cuda_runtime_api.h>

namespace leanattn::testing {

// Blocks that take a multiprocessor each (shared memory leaves no room for another) until *release is not 0, or the seconds are over so
// that nothing waits for ever. Each adds 1 to *holding when it has begun. Both are device memory.
cudaError_t hold_multiprocessors(int blocks, int* holding, const int* release, double seconds, cudaStream_t stream);

// Words from one place of device memory to another.
struct LateCopy {
  void* to;
  const void* from;
  int words;
};
// Lets the next kernel of the stream start if it asks for it (programmatic dependent launch), waits for the seconds, then copies.
cudaError_t copy_late(const LateCopy& first, const LateCopy& second, double seconds, cudaStream_t stream);

}  // namespace leanattn::testing
