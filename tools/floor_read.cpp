// SPDX-License-Identifier: Apache-2.0
// The loads of the read floor, compiled once for each instruction set.
#include <algorithm>
#include <utility>

#undef HWY_TARGET_INCLUDE
// SSSE3 and the finer AVX-512 levels load no wider than the others.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2)
#define HWY_TARGET_INCLUDE "tools/floor_read.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "tools/floor.h"

HWY_BEFORE_NAMESPACE();
namespace leanattn::tools::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

constexpr std::int64_t kLineBytes = 64;

using Bytes = hn::ScalableTag<std::uint64_t>;
using Vec = hn::Vec<Bytes>;

// One line of 64 bytes into the digest.
HWY_INLINE Vec read_line(const std::byte* line, Vec digest) {
  const Bytes d;
  for (std::size_t at = 0; at < kLineBytes; at += 8 * hn::Lanes(d)) {
    digest = hn::Xor(digest, hn::LoadU(d, reinterpret_cast<const std::uint64_t*>(line + at)));
  }
  return digest;
}

template <std::size_t... stream>
HWY_INLINE std::uint64_t read_streams(const FloorBlock* blocks, std::size_t count, std::int64_t prefetch_bytes,
                                      std::index_sequence<stream...>) {
  constexpr std::size_t kStreams = sizeof...(stream);
  const Bytes d;
  Vec digest[kStreams] = {((void)stream, hn::Zero(d))...};
  std::uint64_t tail = 0;
  const std::size_t steps = (count + kStreams - 1) / kStreams;  // stream s reads blocks [s·steps, (s + 1)·steps)
  for (std::size_t step = 0; step < steps; ++step) {
    const FloorBlock block[kStreams] = {(stream * steps + step < count ? blocks[stream * steps + step] : FloorBlock{})...};
    const std::int64_t together = std::min({block[stream].bytes...}) / kLineBytes * kLineBytes;
    if (prefetch_bytes > 0) {
      for (std::int64_t at = 0; at < together; at += kLineBytes) {
        ((__builtin_prefetch(block[stream].data + at + prefetch_bytes),
          digest[stream] = read_line(block[stream].data + at, digest[stream])),
         ...);
      }
    } else {
      for (std::int64_t at = 0; at < together; at += kLineBytes) {
        ((digest[stream] = read_line(block[stream].data + at, digest[stream])), ...);
      }
    }
    for (const FloorBlock& rest : block) {
      std::int64_t at = together;
      for (; at + kLineBytes <= rest.bytes; at += kLineBytes) digest[0] = read_line(rest.data + at, digest[0]);
      for (; at < rest.bytes; ++at) tail += static_cast<std::uint64_t>(rest.data[at]);
    }
  }
  Vec all = hn::Zero(d);
  ((all = hn::Xor(all, digest[stream])), ...);
  // Not SumOfLanes: the compiler's own reduction adds signed numbers, whose overflow is undefined.
  HWY_ALIGN std::uint64_t lanes[hn::MaxLanes(d)];
  hn::Store(all, d, lanes);
  for (const std::uint64_t lane : lanes) tail += lane;
  return tail;
}

std::uint64_t read_blocks(const FloorBlock* blocks, std::size_t count, FloorVariant variant) {
  switch (variant.streams) {
    case 8: return read_streams(blocks, count, variant.prefetch_bytes, std::make_index_sequence<8>());
    case 4: return read_streams(blocks, count, variant.prefetch_bytes, std::make_index_sequence<4>());
    case 2: return read_streams(blocks, count, variant.prefetch_bytes, std::make_index_sequence<2>());
    default: return read_streams(blocks, count, variant.prefetch_bytes, std::make_index_sequence<1>());
  }
}

}  // namespace leanattn::tools::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace leanattn::tools {

HWY_EXPORT(read_blocks);

std::uint64_t read_blocks(const FloorBlock* blocks, std::size_t count, FloorVariant variant) {
  return HWY_DYNAMIC_DISPATCH(read_blocks)(blocks, count, variant);
}

}  // namespace leanattn::tools
#endif
