// SPDX-License-Identifier: Apache-2.0
// The read floor of a GPU: a kernel that reads as many bytes as K and V have and does nothing else. On compute capability 9.0 and later one
// block a multiprocessor keeps 192 KB of bulk copies into shared memory in flight, evict-first; before that it reads with wide loads.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace leanattn::tools {

// Two pieces of device memory, read one behind the other. Both aligned to 16 bytes and a multiple of 16 long; what is left over of a
// chunk (kFloorChunkBytes) is read as a shorter one.
struct FloorPieces {
  const std::byte* first = nullptr;
  std::int64_t first_bytes = 0;
  const std::byte* second = nullptr;
  std::int64_t second_bytes = 0;
};

constexpr int kFloorChunkBytes = 16 << 10;

class DeviceFloor {
 public:
  DeviceFloor();  // for the current device
  ~DeviceFloor();
  DeviceFloor(const DeviceFloor&) = delete;
  DeviceFloor& operator=(const DeviceFloor&) = delete;
  // Queues one kernel that reads the pieces.
  void read(const FloorPieces& pieces, cudaStream_t stream) const;
  const char* name() const { return bulk_ ? "bulk copies, 12 × 16 KB a block" : "16-byte loads"; }

 private:
  bool bulk_ = false;
  int multiprocessors_ = 0;
  float* sink_ = nullptr;  // somewhere for the sums to go
};

}  // namespace leanattn::tools
