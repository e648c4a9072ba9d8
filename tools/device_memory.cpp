// SPDX-License-Identifier: Apache-2.0
#include "tools/device_memory.h"

#include <utility>

#include <fmt/format.h>

#include "tools/device.h"

namespace leanattn::tools {

void check_cuda(cudaError_t answer, const char* call) {
  if (answer == cudaSuccess) return;
  throw DeviceError(fmt::format("{}: CUDA says \"{}\" ({})", call, cudaGetErrorString(answer), cudaGetErrorName(answer)));
}

DeviceBuffer::DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* memory = nullptr;
  const cudaError_t answer = cudaMalloc(&memory, bytes);
  if (answer == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // the next call must not meet this answer
    std::size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    throw OutOfMemory(fmt::format("{} bytes of GPU memory wanted, {} of {} free", bytes, free, total));
  }
  check_cuda(answer, "cudaMalloc");
  data_ = static_cast<std::byte*>(memory);
}

DeviceBuffer::DeviceBuffer(std::span<const std::byte> host) : DeviceBuffer(host.size()) { upload(host); }

DeviceBuffer::~DeviceBuffer() {
  if (data_) cudaFree(data_);
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void DeviceBuffer::upload(std::span<const std::byte> host, std::size_t first) {
  if (host.empty()) return;
  check_cuda(cudaMemcpy(data_ + first, host.data(), host.size(), cudaMemcpyHostToDevice), "cudaMemcpy to the device");
}

void DeviceBuffer::download(std::span<std::byte> host, std::size_t first) const {
  if (host.empty()) return;
  check_cuda(cudaMemcpy(host.data(), data_ + first, host.size(), cudaMemcpyDeviceToHost), "cudaMemcpy to the host");
}

void DeviceBuffer::fill(unsigned char value) {
  if (bytes_ > 0) check_cuda(cudaMemset(data_, value, bytes_), "cudaMemset");
}

DeviceStream::DeviceStream() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }

DeviceStream::~DeviceStream() {
  if (stream_) cudaStreamDestroy(stream_);
}

void DeviceStream::wait() const { check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

DeviceGraph::DeviceGraph(cudaStream_t stream, const std::function<void(cudaStream_t)>& queue) {
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  try {
    queue(stream);
  } catch (...) {
    cudaStreamEndCapture(stream, &graph_);  // else the stream stays in capture
    destroy();
    throw;
  }
  try {
    check_cuda(cudaStreamEndCapture(stream, &graph_), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
  } catch (...) {
    destroy();
    throw;
  }
}

DeviceGraph::~DeviceGraph() { destroy(); }

void DeviceGraph::destroy() {
  if (executable_) cudaGraphExecDestroy(executable_);
  if (graph_) cudaGraphDestroy(graph_);
}

void DeviceGraph::launch(cudaStream_t stream) const { check_cuda(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch"); }

}  // namespace leanattn::tools
