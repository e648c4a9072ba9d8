// SPDX-License-Identifier: Apache-2.0
// Guarded memory of the tests on a GPU, and the fixture that skips them where there is none.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend.h"
#include "leanattn/attention.h"
#include "tools/device_memory.h"

namespace leanattn::testing {

inline void must(cudaError_t answer, const char* what) { tools::check_cuda(answer, what); }
using Stream = tools::DeviceStream;

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

// --- Memory ---

constexpr unsigned char kNanByte = 0xff;     // a NaN in every dtype, −1 in a length or a table
constexpr unsigned char kCanaryByte = 0xa5;  // round what a call writes
constexpr std::size_t kGuardBytes = 4096;

// Tight memory has no guards: what is read or written behind it is compute-sanitizer's to find.
enum class Room { kGuarded, kTight };

// While one lives, guarded buffers of its thread take turns with blocks of device memory, so that thousands of small problems do not
// wait for the device in every allocation. It outlives its buffers.
class DevicePool {
 public:
  DevicePool() { current_ = this; }
  ~DevicePool() { current_ = nullptr; }
  DevicePool(const DevicePool&) = delete;

  static tools::DeviceBuffer take(std::size_t bytes) {
    if (current_ == nullptr || bytes == 0) return tools::DeviceBuffer(bytes);
    std::vector<tools::DeviceBuffer>& free = current_->free_[std::bit_width(bytes - 1)];
    if (free.empty()) return tools::DeviceBuffer(std::size_t{1} << std::bit_width(bytes - 1));
    tools::DeviceBuffer block = std::move(free.back());
    free.pop_back();
    return block;
  }
  static void give_back(tools::DeviceBuffer block) {
    if (current_ != nullptr && block.bytes() > 0 && std::has_single_bit(block.bytes())) {
      current_->free_[std::bit_width(block.bytes() - 1)].push_back(std::move(block));
    }
  }

 private:
  static inline thread_local DevicePool* current_ = nullptr;
  std::array<std::vector<tools::DeviceBuffer>, 65> free_;  // of 2^i bytes
};

class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  // The address modulo 256 is that of `like`.
  GuardedBuffer(std::size_t bytes, const void* like, unsigned char guard, Room room = Room::kGuarded)
      : behind_(room == Room::kGuarded ? kGuardBytes : 0),
        first_(behind_ + reinterpret_cast<std::uintptr_t>(like) % 256),
        bytes_(bytes),
        all_(first_ + bytes + behind_),
        guard_(guard),
        memory_(room == Room::kGuarded ? DevicePool::take(all_) : tools::DeviceBuffer(all_)) {
    fill(guard);
  }
  GuardedBuffer(GuardedBuffer&&) = default;
  GuardedBuffer& operator=(GuardedBuffer&&) = default;
  ~GuardedBuffer() { DevicePool::give_back(std::move(memory_)); }

  std::byte* data() const { return memory_.data() + first_; }
  std::size_t bytes() const { return bytes_; }
  // All of it, guards included.
  void fill(unsigned char value) {
    if (all_ > 0) must(cudaMemset(memory_.data(), value, all_), "cudaMemset");
  }
  void upload(const void* from) { upload(from, bytes_); }
  void upload(const void* from, std::size_t bytes) { memory_.upload({static_cast<const std::byte*>(from), bytes}, first_); }
  std::vector<std::byte> download() const {
    std::vector<std::byte> copy(bytes_);
    memory_.download(copy, first_);
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
    std::vector<std::byte> guard(bytes);
    memory_.download(guard, begin);
    return std::all_of(guard.begin(), guard.end(), [this](std::byte b) { return b == std::byte{guard_}; });
  }

  std::size_t behind_ = 0, first_ = 0, bytes_ = 0, all_ = 0;
  unsigned char guard_ = 0;
  tools::DeviceBuffer memory_;
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
  GuardedBuffer buffer_;
};

}  // namespace leanattn::testing
