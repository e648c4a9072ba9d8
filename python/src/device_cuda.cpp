// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "device.h"
#include "leanattn/attention.h"

namespace leanattn::python {
namespace {

void require(cudaError_t answer, const char* what) {
  if (answer == cudaSuccess) return;
  cudaGetLastError();
  throw Error(Status::kInternal, fmt::format("{}: CUDA says \"{}\"", what, cudaGetErrorString(answer)));
}

// Allocating is refused while a stream is captured, unless the thread says that it knows what it does.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class OwnStream {
 public:
  OwnStream() { require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
  ~OwnStream() { cudaStreamDestroy(stream); }
  cudaStream_t stream = nullptr;
};

}  // namespace

DeviceGuard::DeviceGuard(int device) {
  if (device < 0) return;
  int current = -1;
  require(cudaGetDevice(&current), "cudaGetDevice");
  if (current == device) return;
  require(cudaSetDevice(device), "cudaSetDevice");
  before_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (before_ >= 0) cudaSetDevice(before_);
}

void* allocate_workspace(std::size_t bytes) {
  const RelaxedCapture relaxed;
  const OwnStream own;
  void* memory = nullptr;
  require(cudaMalloc(&memory, bytes), "cudaMalloc");
  try {
    Options options;
    options.backend = Backend::kCuda;
    options.stream = own.stream;
    initialize_workspace(options, {static_cast<std::byte*>(memory), bytes});
    synchronize(own.stream);
  } catch (...) {
    cudaFree(memory);
    throw;
  }
  return memory;
}

void release_workspace(void* memory) { cudaFree(memory); }

void synchronize(void* stream) { require(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize"); }

}  // namespace leanattn::python
