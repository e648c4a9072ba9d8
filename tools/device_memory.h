// SPDX-License-Identifier: Apache-2.0
// What the tools and the tests on a GPU hold of it: memory, a stream, calls as a graph. Only in builds with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <span>

#include "tools/device_error.h"

namespace leanattn::tools {

// Device memory of exactly these bytes, so that a memory checker sees every byte beyond.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::size_t bytes);  // throws OutOfMemory
  explicit DeviceBuffer(std::span<const std::byte> host);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  // As many bytes as the host's span has, from byte `first` of the buffer on. Both wait for the device.
  void upload(std::span<const std::byte> host, std::size_t first = 0);
  void download(std::span<std::byte> host, std::size_t first = 0) const;
  void fill(unsigned char value);

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Runs beside the default stream, not in turn with it.
class DeviceStream {
 public:
  DeviceStream();
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void wait() const;

 private:
  cudaStream_t stream_ = nullptr;
};

// What queue queues on the stream, captured so that an allocation or a synchronisation anywhere in it fails, and made ready to launch.
class DeviceGraph {
 public:
  DeviceGraph(cudaStream_t stream, const std::function<void(cudaStream_t)>& queue);
  ~DeviceGraph();
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;
  void launch(cudaStream_t stream) const;
  cudaGraph_t graph() const { return graph_; }

 private:
  void destroy();

  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace leanattn::tools
