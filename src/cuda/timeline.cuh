// SPDX-License-Identifier: Apache-2.0
// When a block came to which point, for a build with LEANATTN_TIMELINE; otherwise nothing. The workspace ends in it and is so much larger.
// `leanattn timeline` prints it.
#pragma once

#include <iterator>

#include "cuda/config.cuh"

namespace leanattn::cuda {

#if defined(LEANATTN_TIMELINE)
constexpr bool kKeepsTimeline = true;
#else
constexpr bool kKeepsTimeline = false;
#endif

enum class Mark {
  kEntry,       // the block runs
  kStretch,     // its stretch is known
  kSegment,     // its first segment is described
  kIssued,      // the first stage's copies are issued
  kFirstBytes,  // the first stage has landed
  kLastBytes,   // the last one
  kLastTile,    // its values are added
  kPublished,   // the last cut segment's partial is written, or pushed
  kCounted,     // and its arrival counted, or the parts of the block's cluster have come
  kMerged,      // the parts are merged, where this block came last
  kExit,
};
constexpr const char* kMarkNames[] = {"entry",     "stretch",   "segment", "issued", "first_bytes", "last_bytes",
                                      "last_tile", "published", "counted", "merged", "exit"};
constexpr int kMarks = static_cast<int>(Mark::kExit) + 1;
static_assert(std::size(kMarkNames) == kMarks, "a name a mark, in their order");

__device__ __forceinline__ void mark([[maybe_unused]] const Params& p, [[maybe_unused]] Mark which) {
  if constexpr (kKeepsTimeline) p.timeline[block_index() * kMarks + static_cast<int>(which)] = ptx::nanoseconds();
}

}  // namespace leanattn::cuda
