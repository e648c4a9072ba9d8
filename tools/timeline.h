// SPDX-License-Identifier: Apache-2.0
// When the thread blocks of one CUDA call came to which point of the kernel (builds with LEANATTN_TIMELINE).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace leanattn::tools {

struct Timeline {
  static constexpr std::int64_t kNever = -1;

  std::vector<std::vector<std::int64_t>> blocks;  // [blocks, marks] ns after the first block's entry; kNever: the block did not come there
  std::int64_t duration_ns() const;               // to the last mark of any block
};

// times: [blocks, marks] ns as the kernel wrote them. A block's first mark is its entry, and what is earlier comes from another call; a
// block whose entry is 0 did not run and is left out.
Timeline make_timeline(std::span<const std::uint64_t> times, std::size_t marks);

// Of a mark, over the blocks that came to it: all 0 where none did.
struct MarkQuantiles {
  int blocks = 0;
  double min_ns = 0.0;
  double median_ns = 0.0;
  double p90_ns = 0.0;
  double max_ns = 0.0;
};
MarkQuantiles mark_quantiles(const Timeline& timeline, std::size_t mark);

// The one of median duration (of an even number the shorter). all is not empty.
const Timeline& median_timeline(const std::vector<Timeline>& all);

}  // namespace leanattn::tools
