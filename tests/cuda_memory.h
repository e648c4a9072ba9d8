// SPDX-License-Identifier: Apache-2.0
// Streams and guarded memory of the tests on a GPU, and the fixture that skips them where there is none.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "backend.h"
#include "leanattn/attention.h"

namespace leanattn::testing {

inline void must(cudaError_t answer, const char* what) {
  if (answer != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(answer));
}

// Every test that needs a GPU: without one it is skipped, with the library's own sentence.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!backend_available(Backend::kCuda)) GTEST_SKIP() << cuda::why_absent();
  }
};

class CudaCases : public CudaTest {};

// A fault of the kernel fails every way of every case: a dozen of them say enough.
inline bool enough_failures() { return ::testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count() >= 12; }

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  must(cudaGetDevice(&device), "cudaGetDevice");
  must(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}
inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// Runs beside the default stream, not in turn with it.
class Stream {
 public:
  Stream() { must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void wait() const { must(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

// --- Memory ---

constexpr unsigned char kNanByte = 0xff;     // a NaN in every dtype, −1 in a length or a table
constexpr unsigned char kCanaryByte = 0xa5;  // round what a call writes
constexpr std::size_t kGuardBytes = 4096;

// Tight memory has no guards: what is read or written behind it is compute-sanitizer's to find.
enum class Room { kGuarded, kTight };

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // The address modulo 256 is that of `like`.
  DeviceBuffer(std::size_t bytes, const void* like, unsigned char guard, Room room = Room::kGuarded) : bytes_(bytes), guard_(guard) {
    behind_ = room == Room::kGuarded ? kGuardBytes : 0;
    first_ = behind_ + reinterpret_cast<std::uintptr_t>(like) % 256;
    all_bytes_ = first_ + bytes + behind_;
    void* base = nullptr;
    if (all_bytes_ > 0) must(cudaMalloc(&base, all_bytes_), "cudaMalloc");
    base_ = static_cast<std::byte*>(base);
    fill(guard);
  }
  ~DeviceBuffer() {
    if (base_) cudaFree(base_);
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    std::swap(all_bytes_, other.all_bytes_);
    std::swap(first_, other.first_);
    std::swap(behind_, other.behind_);
    std::swap(guard_, other.guard_);
    return *this;
  }

  std::byte* data() const { return base_ + first_; }
  std::size_t bytes() const { return bytes_; }
  // All of it, guards included.
  void fill(unsigned char value) {
    if (all_bytes_ > 0) must(cudaMemset(base_, value, all_bytes_), "cudaMemset");
  }
  void upload(const void* from) { upload(from, bytes_); }
  void upload(const void* from, std::size_t bytes) {
    if (bytes > 0) must(cudaMemcpy(data(), from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the device");
  }
  std::vector<std::byte> download() const {
    std::vector<std::byte> copy(bytes_);
    if (bytes_ > 0) must(cudaMemcpy(copy.data(), data(), bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy to the host");
    return copy;
  }
  // Empty when both guards are whole.
  std::string fault(const char* name) const {
    if (!is_whole(0, first_)) return std::string(name) + ": written before its first byte";
    if (!is_whole(first_ + bytes_, behind_)) return std::string(name) + ": written behind its " + std::to_string(bytes_) + " bytes";
    return {};
  }

 private:
  bool is_whole(std::size_t begin, std::size_t bytes) const {
    std::byte guard[kGuardBytes + 256];
    if (bytes > 0) must(cudaMemcpy(guard, base_ + begin, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy to the host");
    return std::all_of(guard, guard + bytes, [this](std::byte b) { return b == std::byte{guard_}; });
  }

  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0, all_bytes_ = 0, first_ = 0, behind_ = 0;
  unsigned char guard_ = 0;
};

// Full of NaN, between canaries, then initialised on the stream.
class DeviceWorkspace {
 public:
  explicit DeviceWorkspace(std::size_t bytes, const Options& options = {}, Room room = Room::kGuarded)
      : buffer_(bytes, nullptr, kCanaryByte, room) {
    if (bytes > 0) must(cudaMemset(buffer_.data(), kNanByte, bytes), "cudaMemset");
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    Options own = options;
    own.backend = Backend::kCuda;
    initialize_workspace(own, span());
  }
  std::span<std::byte> span() const { return {buffer_.data(), buffer_.bytes()}; }
  std::string fault() const { return buffer_.fault("workspace"); }

 private:
  DeviceBuffer buffer_;
};

}  // namespace leanattn::testing
