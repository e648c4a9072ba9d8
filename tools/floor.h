// SPDX-License-Identifier: Apache-2.0
// The read floor: the time to read the bytes of K and V that a call must read, and to do nothing else. On the threads that decode runs
// on, in equal parts, with the machine's widest loads. How many streams a thread reads side by side and how far it prefetches is tried out
// (calibrate), so that the floor is the fastest plain reading here and not one guess at it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "leanattn/problem.h"

namespace leanattn::tools {

// Bytes that lie in one piece.
struct FloorBlock {
  const std::byte* data = nullptr;
  std::int64_t bytes = 0;
};

struct FloorVariant {
  int streams = 1;         // 1, 2, 4 or 8, side by side
  int prefetch_bytes = 0;  // ahead of each stream; 0: left to the hardware
};

class ReadFloor {
 public:
  ReadFloor(std::vector<FloorBlock> pieces, int threads);
  // The rows of K and V within reach of some query token.
  ReadFloor(const Problem& problem, int threads);

  std::int64_t bytes() const { return bytes_; }
  int threads() const { return static_cast<int>(parts_.size()); }
  void set_variant(FloorVariant variant) { variant_ = variant; }
  FloorVariant variant() const { return variant_; }
  // Reads everything once.
  void read() const;
  double read_us() const;

 private:
  std::vector<std::vector<FloorBlock>> parts_;  // one a thread, blocks of at most kBlockBytes
  std::int64_t bytes_ = 0;
  FloorVariant variant_;
};

// All variants, and the one that reads fastest over floors of equal bytes at different addresses (turned, so that caches are cold).
std::vector<FloorVariant> floor_variants();
FloorVariant fastest_variant(std::vector<ReadFloor>& floors, double seconds);
std::string variant_name(FloorVariant variant);

// The tokens of K and V that a problem must read, neighbours joined.
std::vector<FloorBlock> kv_pieces(const Problem& problem);

// Reads blocks in `variant.streams` streams with the widest loads of this processor. Returns a digest of the bytes, so that no load is
// idle.
std::uint64_t read_blocks(const FloorBlock* blocks, std::size_t count, FloorVariant variant);

}  // namespace leanattn::tools

// The same for other languages. `sets` floors over `pieces` pieces of memory each (data and bytes: [sets, pieces]), all with the variant
// found fastest in `seconds` of trying; read takes one of them and gives µs.
extern "C" {
#define LEANATTN_FLOOR_EXPORT __attribute__((visibility("default")))
LEANATTN_FLOOR_EXPORT void* leanattn_floor_new(const void* const* data, const std::int64_t* bytes, std::int64_t sets, std::int64_t pieces,
                                               std::int32_t threads, double seconds);
LEANATTN_FLOOR_EXPORT double leanattn_floor_read(void* floor, std::int64_t set);
LEANATTN_FLOOR_EXPORT void leanattn_floor_free(void* floor);
}
