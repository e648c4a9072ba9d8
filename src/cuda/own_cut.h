// SPDX-License-Identifier: Apache-2.0
// Whether outputs get stretches of their own, in clusters of how many blocks: from bounds that the host knows, by estimated time. The
// constants were measured on an H200 (docs/kernel.md); they decide speed only. Plain C++.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "cuda/variants.h"
#include "leanattn/schedule.h"

namespace leanattn::cuda {

// Bounds of one call, and what the device can hold.
struct Work {
  std::int64_t outputs = 0;     // seqs × KV heads, one row block each
  std::int64_t tiles = 0;       // of the longest output
  std::int64_t tile_bytes = 0;  // of K and V
  int blocks = 0;               // at most so many, one a multiprocessor
  int chunk_tiles = 0;          // batch-invariant: the grain of growing chunks (Chunks), and clusters are powers of two; else 0
  // Clusters of n blocks that run at the same time, by n; 0: none. [1] is not used.
  std::array<int, kMaxCluster + 1> clusters{};
};

// Stretches of an output's own (Line::output_stretches), and of one cluster. 0: stretches across outputs.
struct OwnCut {
  int stretches = 0;
  int cluster = 1;
};

// Tiles a stretch from which it pays to join a second cluster (Line::join_cost_tiles).
constexpr int kJoinCostTiles = 3;

// Parts in the workspace that are fetched at once (merge_vector in cluster.cuh).
constexpr int kJoinBatch = 8;

// Share of the memory's speed that so many of all blocks reach: half of them 82 %, nine tenths 98 %.
inline double streaming(double share) { return std::min(1.0, share * (2.55 - 1.55 * share)) * (1.0 - 0.15 * (1.0 - share)); }

inline double bytes_of(const Work& work) {
  return static_cast<double>(work.outputs) * static_cast<double>(work.tiles) * static_cast<double>(work.tile_bytes);
}

inline int bound_tiles(const Work& work) { return static_cast<int>(std::min<std::int64_t>(work.tiles, 1 << 30)); }

// Batch-invariant: chunks of the longest output.
inline int bound_chunks(const Work& work) { return make_chunks(bound_tiles(work), work.chunk_tiles, true).count; }

// Time to read all of it on all blocks.
inline double reading_us(const Work& work) {
  constexpr double kBlockBytesPerUs = 35.6e3;
  return bytes_of(work) / (kBlockBytesPerUs * work.blocks);
}

// Estimated time of a call with stretches across outputs.
inline double across_us(const Work& work) {
  constexpr double kAcrossUs = 5.5;                // search of the stretch, and the merge through memory
  constexpr double kNodesUs = 6.0, kPartUs = 0.3;  // batch-invariant: the nodes of an output's parts merge one after the other
  double us = reading_us(work) + kAcrossUs;
  if (work.chunk_tiles > 0 && work.outputs < work.blocks) us += kNodesUs + kPartUs * work.blocks / static_cast<double>(work.outputs);
  return us;
}

// Estimated time of a call whose outputs have stretches of their own: `joined` clusters of `cluster` blocks each.
inline double own_cut_us(const Work& work, int cluster, std::int64_t joined) {
  constexpr double kLoneBlockBytesPerUs = 55e3, kTileUs = 0.41, kChunkUs = 0.5;  // of a block that memory does not hold up
  constexpr double kClusterUs = 1.0, kRankUs = 0.03, kJoinUs = 1.3, kJoinBatchUs = 0.4, kJoinNodesUs = 1.2;
  constexpr double kUnevenClusterUs = 0.5;  // of a size that is no power of two: slices and stretches come out uneven
  std::int64_t stretches = cluster * joined;
  if (work.chunk_tiles > 0) {  // each is a node of the merge tree, of 1, 2, 4 … chunks
    stretches =
        static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(std::min<std::int64_t>(stretches, bound_chunks(work)))));
  }
  const double blocks = static_cast<double>(work.outputs * stretches);
  const double stretch_bytes = bytes_of(work) / blocks;  // tiles are a bound, so how they divide says nothing
  const double stretch_tiles = static_cast<double>(work.tiles) / static_cast<double>(stretches);
  double block_us = std::max(stretch_bytes / kLoneBlockBytesPerUs, stretch_tiles * kTileUs);
  if (work.chunk_tiles > 0) block_us += kChunkUs * bound_chunks(work) / static_cast<double>(stretches);
  double us = std::max(reading_us(work) / streaming(blocks / work.blocks), block_us);
  if (cluster > 1) us += kClusterUs + kRankUs * cluster;
  if (!std::has_single_bit(static_cast<unsigned>(cluster))) us += kUnevenClusterUs;
  if (joined > 1) us += kJoinUs + (work.chunk_tiles > 0 ? kJoinNodesUs : kJoinBatchUs) * static_cast<double>((joined - 1) / kJoinBatch);
  return us;
}

// Clusters that an output may have: as many as fit beside those of the others and have a tile; 0 where not every output gets one.
inline std::int64_t most_joined(const Work& work, int cluster) {
  if (work.chunk_tiles > 0 && !std::has_single_bit(static_cast<unsigned>(cluster))) return 0;  // a cluster merges one node of the tree
  const std::int64_t room = cluster == 1 ? work.blocks : std::min(work.clusters[cluster], work.blocks / cluster);
  if (work.outputs > room) return 0;
  if (cluster == 1) return 1;  // alone, a block has nobody to merge with
  Line line;
  line.chunk_tiles = work.chunk_tiles;
  line.chunks_grow = true;
  line.output_stretches = static_cast<int>(cluster * (room / work.outputs));
  line.cluster_stretches = cluster;
  line.join_cost_tiles = kJoinCostTiles;
  return own_stretches(line, bound_tiles(work)) / cluster;
}

inline OwnCut own_cut(const Work& work) {
  OwnCut best;
  double best_us = across_us(work);
  for (int cluster = 1; cluster <= kMaxCluster; ++cluster) {
    const std::int64_t most = most_joined(work, cluster);
    // Every call on the host comes here: of the numbers that merge in as many batches only the largest, which is the fastest of them.
    std::int64_t joined = 1;
    while (joined <= most) {
      const double us = own_cut_us(work, cluster, joined);
      if (us < best_us) {
        best_us = us;
        best = {static_cast<int>(cluster * joined), cluster};
      }
      if (joined == most) break;
      joined = std::min(most, (joined / kJoinBatch + 1) * kJoinBatch);
    }
  }
  return best;
}

}  // namespace leanattn::cuda
