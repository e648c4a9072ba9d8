// SPDX-License-Identifier: Apache-2.0
// Whether outputs get stretches of their own, in clusters of how many blocks: from bounds that the host knows, by estimated time. The
// constants were measured on an H200 (docs/kernel.md); they decide speed only. Plain C++.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "leanattn/schedule.h"

namespace leanattn::cuda {

constexpr int kMaxCluster = 16;

// Bounds of one call, and what the device can hold.
struct Work {
  std::int64_t outputs = 0;     // seqs × KV heads, one row block each
  std::int64_t tiles = 0;       // of the longest output
  std::int64_t tile_bytes = 0;  // of K and V
  int blocks = 0;               // at most so many, one a multiprocessor
  // Clusters of n blocks that run at the same time, by n; 0: none. [1] is not used.
  std::array<int, kMaxCluster + 1> clusters{};
};

// Stretches of an output's own (Line::output_stretches), and of one cluster. 0: stretches across outputs.
struct OwnCut {
  int stretches = 0;
  int cluster = 1;
};

// Tiles a stretch from which it pays to join a second cluster (Line::join_cost_grains).
constexpr int kJoinCostTiles = 3;

// Share of the memory's speed that so many of all blocks reach: half of them 82 %, nine tenths 98 %.
inline double streaming(double share) { return std::min(1.0, share * (2.55 - 1.55 * share)) * (1.0 - 0.15 * (1.0 - share)); }

inline OwnCut own_cut(const Work& work) {
  constexpr double kBlockBytesPerUs = 35.6e3, kLoneBlockBytesPerUs = 60e3;  // all blocks together, a few alone
  constexpr double kAcrossUs = 3.5;                                         // search of the stretch, and the merge through memory
  constexpr double kClusterUs = 1.0, kRankUs = 0.03, kJoinUs = 1.3, kJoinBatchUs = 0.4;
  constexpr double kUnevenClusterUs = 0.3;  // of a size that is no power of two: slices and stretches come out uneven
  OwnCut best;
  const double bytes = static_cast<double>(work.outputs) * static_cast<double>(work.tiles) * static_cast<double>(work.tile_bytes);
  double best_us = bytes / (kBlockBytesPerUs * work.blocks) + kAcrossUs;
  for (int cluster = 1; cluster <= kMaxCluster; ++cluster) {
    const std::int64_t room = cluster == 1 ? work.blocks : std::min(work.clusters[cluster], work.blocks / cluster);
    if (work.outputs > room) continue;
    const std::int64_t most = cluster == 1 ? 1 : room / work.outputs;  // clusters an output: alone, a block has nobody to merge with
    for (std::int64_t joined = 1; joined <= most; ++joined) {
      Line line;
      line.output_stretches = static_cast<int>(cluster * joined);
      line.cluster_stretches = cluster;
      line.join_cost_grains = kJoinCostTiles;
      const int tiles = static_cast<int>(std::min<std::int64_t>(work.tiles, 1 << 30));
      const int stretches = own_stretches(line, tiles);
      if (stretches < line.output_stretches) break;  // no use for so many
      const double blocks = static_cast<double>(work.outputs * stretches);
      const double stretch_bytes = bytes / blocks;  // tiles are a bound, so how they divide says nothing
      double us =
          std::max(bytes / (kBlockBytesPerUs * work.blocks * streaming(blocks / work.blocks)), stretch_bytes / kLoneBlockBytesPerUs);
      if (cluster > 1) us += kClusterUs + kRankUs * cluster;
      if (!std::has_single_bit(static_cast<unsigned>(cluster))) us += kUnevenClusterUs;
      if (joined > 1) us += kJoinUs + kJoinBatchUs * static_cast<double>((joined - 1) / 8);
      if (us < best_us) {
        best_us = us;
        best = {line.output_stretches, cluster};
      }
    }
  }
  return best;
}

}  // namespace leanattn::cuda
