// SPDX-License-Identifier: Apache-2.0
// Large memory for tensors: whole pages, said no to in a sentence when the machine has too little.
#pragma once

#include <cstddef>
#include <functional>
#include <stdexcept>

namespace leanattn::tools {

// what() names the bytes wanted and the bytes available.
class OutOfMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Buffer {
 public:
  Buffer() = default;
  // Zeroed, page aligned; with huge_pages aligned to 2 MB and advised as such. Throws OutOfMemory.
  explicit Buffer(std::size_t bytes, bool huge_pages = false);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  void* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
};

// Bytes that can be had without swapping; 0 when the system does not say.
std::size_t available_memory_bytes();

// body(begin, end) over pieces of [0, count) of at most `grain`, on that many threads (0: all processors).
void parallel_pieces(std::size_t count, std::size_t grain, int threads, const std::function<void(std::size_t, std::size_t)>& body);
void parallel_set(std::byte* data, unsigned char value, std::size_t bytes, int threads);
void parallel_copy(std::byte* to, const std::byte* from, std::size_t bytes, int threads);

}  // namespace leanattn::tools
