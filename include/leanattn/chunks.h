// SPDX-License-Identifier: Apache-2.0
// Batch-invariant calls: the chunks of an output. Cuts fall on their borders alone, and the borders follow from the output's own length, so
// that what a chunk sums to, and the order in which chunks merge (merge_tree.h), is the same whatever else is on the line. Compiles with
// g++, clang, nvcc and NVRTC; includes nothing.
#pragma once

#if defined(__CUDACC__)
#define LEANATTN_HOST_DEVICE __host__ __device__
#else
#define LEANATTN_HOST_DEVICE
#endif

namespace leanattn {

constexpr int kMostGrownChunks = 256;

// Two rules. Fixed: `grain` tiles a chunk, the last may have fewer. Growing: 2^log2_count chunks that are equal within one grain, so that
// 1, 2, 4 … workers have equal parts of the merge tree, whatever the length; of at most 2^25 grains.
struct Chunks {
  int tiles = 0;       // of the output, at least 1
  int grain = 0;       // tiles; 0: there are no chunks
  int grains = 0;      // of the output, the last may have fewer tiles
  int count = 0;       // of the output
  int log2_count = 0;  // growing
  bool grow = false;

  // The tile at which a chunk begins; `tiles` of any index past the last.
  LEANATTN_HOST_DEVICE int begin(long long index) const {
    if (index >= count) return tiles;
    return static_cast<int>((grow ? index * grains >> log2_count : index) * grain);
  }

  // The chunk that a tile is in; the last of any tile past the output's. Its grain g is in the last chunk i with i·grains ÷ count < g + 1.
  LEANATTN_HOST_DEVICE int of(int tile) const {
    const int in = (tile < tiles ? tile : tiles - 1) / grain;
    if (!grow) return in;
    return static_cast<int>((((static_cast<unsigned>(in) + 1) << log2_count) - 1) / static_cast<unsigned>(grains));
  }
};

// How many chunks of a growing output: up to 8 as there are grains, then a power of two that leaves 3 to 6 grains each, up to 128, and 256
// from 6 grains each on. A short chunk gives more workers a part; but its end costs about the time of a third of a tile, and what is left
// of an output merges in log2 of as many steps. Past 2^24 grains Chunks::of would need more than 32 bits for 256.
LEANATTN_HOST_DEVICE inline int log2_grown_chunks(int grains) {
  int most = grains / 3 < 128 ? grains / 3 : 128;
  if (grains / 6 >= kMostGrownChunks && grains <= 1 << 24) most = kMostGrownChunks;
  if (most < 8) most = grains < 8 ? grains : 8;
  int log2 = 0;
  while (2 << log2 <= most) ++log2;
  return log2;
}

// grain > 0.
LEANATTN_HOST_DEVICE inline Chunks make_chunks(int tiles, int grain, bool grow) {
  Chunks chunks;
  chunks.tiles = tiles;
  chunks.grain = grain;
  chunks.grains = tiles / grain + (tiles % grain != 0);
  chunks.grow = grow;
  chunks.count = chunks.grains;
  if (grow) {
    chunks.log2_count = log2_grown_chunks(chunks.grains);
    chunks.count = 1 << chunks.log2_count;
  }
  return chunks;
}

}  // namespace leanattn
