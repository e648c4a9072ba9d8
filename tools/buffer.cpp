// SPDX-License-Identifier: Apache-2.0
#include "tools/buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace leanattn::tools {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
constexpr std::size_t kPieceBytes = std::size_t{4} << 20;

std::string gib(std::size_t bytes) { return fmt::format("{:.1f} GiB", static_cast<double>(bytes) / (1 << 30)); }

}  // namespace

std::size_t available_memory_bytes() {
  std::ifstream in("/proc/meminfo");
  std::string key, unit;
  std::size_t kib = 0;
  while (in >> key >> kib && std::getline(in, unit)) {
    if (key == "MemAvailable:") return kib * 1024;
  }
  return 0;
}

Buffer::Buffer(std::size_t bytes, bool huge_pages) : bytes_(bytes) {
  if (bytes == 0) return;
  // The kernel grants address space that it cannot back and kills the process later, so ask first.
  const std::size_t available = available_memory_bytes();
  if (bytes > kHugePageBytes && available > 0 && bytes > available) {
    throw OutOfMemory(fmt::format("{} bytes ({}) of memory wanted, {} available", bytes, gib(bytes), gib(available)));
  }
  if (bytes > SIZE_MAX - kHugePageBytes) throw OutOfMemory(fmt::format("{} bytes of memory wanted", bytes));
  mapping_bytes_ = huge_pages ? bytes + kHugePageBytes : bytes;
  mapping_ = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw OutOfMemory(fmt::format("{} bytes ({}) of memory wanted, the system gave none", bytes, gib(bytes)));
  }
  data_ = static_cast<std::byte*>(mapping_);
  if (huge_pages) {
    const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
    data_ += (kHugePageBytes - address % kHugePageBytes) % kHugePageBytes;
    madvise(data_, bytes, MADV_HUGEPAGE);  // a hint: the outcome changes speed only
  }
}

Buffer::~Buffer() {
  if (mapping_) munmap(mapping_, mapping_bytes_);
}

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_bytes_, other.mapping_bytes_);
  return *this;
}

void parallel_pieces(std::size_t count, std::size_t grain, int threads, const std::function<void(std::size_t, std::size_t)>& body) {
  const std::size_t pieces = count / grain + (count % grain != 0);
  if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t piece = next++; piece < pieces; piece = next++) body(piece * grain, std::min(count, (piece + 1) * grain));
  };
  std::vector<std::thread> others;
  for (std::size_t i = 1; i < std::min<std::size_t>(static_cast<std::size_t>(threads), pieces); ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
}

void parallel_set(std::byte* data, unsigned char value, std::size_t bytes, int threads) {
  parallel_pieces(bytes, kPieceBytes, threads, [=](std::size_t begin, std::size_t end) { std::memset(data + begin, value, end - begin); });
}

void parallel_copy(std::byte* to, const std::byte* from, std::size_t bytes, int threads) {
  parallel_pieces(bytes, kPieceBytes, threads,
                  [=](std::size_t begin, std::size_t end) { std::memcpy(to + begin, from + begin, end - begin); });
}

}  // namespace leanattn::tools
