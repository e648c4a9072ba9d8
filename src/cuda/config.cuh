// SPDX-License-Identifier: Apache-2.0
// What a variant of the kernel fixes at compile time, and the shared memory that follows from it.
//
//   T           element type of Q, K, V and O
//   kHeadDim    columns of Q, K and V in shared memory; those that a problem does not have are zeros
//   kRows       packed rows of an output (variants.h)
//   kFeatures   what there is code for (variants.h)
//
// Warps: kGroups groups of four consumer warps, each for up to 32 of the rows, or one warpgroup; then four producer warps.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/params.h"
#include "cuda/ptx.cuh"
#include "cuda/variants.h"

namespace leanattn::cuda {

constexpr int kWarp = 32;
constexpr int kProducerThreads = 4 * kWarp;
constexpr int kMmaTokens = 16;  // tokens that a step of P·V takes

// Named barriers of a block; those of the groups of consumers are 1 and 2.
constexpr int kProducerBarrier = 15, kStartBarrier = 14, kConsumerBarrier = 13;

constexpr int kTile = 64;  // tokens of a tile, the unit of the line
// Tokens of a stage: one tile, or two where rows are so short that a warp would have too little work between two barriers.
constexpr int stage_tokens(int head_dim) { return head_dim == 64 ? 128 : 64; }
// Batch-invariant: the grain of chunks in tiles, whole stages; two of head_dim 64, whose stages leave consumers no time to spare for the
// ends of chunks.
constexpr int chunk_tiles(int head_dim) { return stage_tokens(head_dim) / kTile * (head_dim == 64 ? 2 : 1); }

template <class T>
struct Element;

template <>
struct Element<__nv_bfloat16> {
  __device__ static __forceinline__ void mma(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    ptx::mma_bf16(c, a, b0, b1);
  }
  template <bool kTransposed>
  __device__ static __forceinline__ void wgmma(float (&c)[8][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
    ptx::wgmma_bf16<kTransposed>(c, a, b, adds);
  }
  __device__ static __forceinline__ std::uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
};

template <>
struct Element<__half> {
  __device__ static __forceinline__ void mma(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    ptx::mma_f16(c, a, b0, b1);
  }
  template <bool kTransposed>
  __device__ static __forceinline__ void wgmma(float (&c)[8][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
    ptx::wgmma_f16<kTransposed>(c, a, b, adds);
  }
  __device__ static __forceinline__ std::uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
};

template <class T_, int kHeadDim_, int kRows_, Features kFeatures_>
struct Config {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRows = kRows_;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr bool kFull = kFeatures == Features::kFull;
  static constexpr bool kHasRules = kFull || kFeatures == Features::kRules;
  static constexpr int kTokens = stage_tokens(kHeadDim);  // of a stage
  static constexpr int kChunkTiles = chunk_tiles(kHeadDim);

  // Four warps as one warpgroup (warpgroup.cuh): each is a group of its own, with 16 rows and all dims.
  static constexpr bool kWarpgroup = is_warpgroup({kHeadDim, kRows, kFeatures});
  static constexpr int kGroups = kWarpgroup ? 4 : kRows > 16 ? 2 : 1;  // 16 rows leave four warps time to wait for each other, more do not
  static constexpr int kGroupWarps = kWarpgroup ? 1 : 4;
  static constexpr int kGroupThreads = kGroupWarps * kWarp;
  static constexpr int kGroupRows = kRows / kGroups;
  static constexpr int kRowTiles = kGroupRows > 16 ? 2 : 1;  // of 16 rows, as the matrix units take them
  static constexpr int kHalves = kGroupRows == 8 ? 1 : 2;    // of 8 rows of a row tile that are in use
  static constexpr int kPaddedRows = kRowTiles * 16;         // of a group, the unused half of 8 rows included
  static constexpr int kConsumerWarps = kGroups * kGroupWarps;
  static constexpr int kConsumers = kConsumerWarps * kWarp;
  static constexpr int kThreads = kConsumers + kProducerThreads;

  static constexpr int kParts = kTokens / 64;               // a warp's slice in Q·K is 16 tokens of every 64
  static constexpr int kWarpDims = kHeadDim / kGroupWarps;  // dims of a warp in P·V
  static constexpr int kDimSteps = kWarpDims / 8;
  static constexpr bool kQInRegisters = kRowTiles == 1 && kHeadDim <= 128;

  static constexpr int kLaneRows = kRowTiles * kHalves;                              // rows of which a lane holds values
  static constexpr int kRowValues = kDimSteps * 2;                                   // of Õ that it holds of each
  static constexpr int kRowVectors = (kRowValues + 3) / 4;                           // the same as float4, padded
  static constexpr int kVectors = kConsumerWarps * kLaneRows * kRowVectors * kWarp;  // float4 of a block's partial

  static constexpr int kNodeBytes = kVectors * 16 + kConsumerWarps * kGroupRows * 8;  // of a block's partial, with its (m, ℓ)

  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kRowChunks = kRowBytes / 16;
  static constexpr int kStageBytes = kTokens * kRowBytes;  // of K; V as much
  // A token's chunks in K and V: side by side, or in columns of 128 bytes, each of all tokens, as wgmma takes them.
  static constexpr int kColumnChunks = kWarpgroup ? 8 : kRowChunks;
  static constexpr int kColumnBytes = kColumnChunks * 16;
  static constexpr int kQRows = kGroups * kPaddedRows;
  static constexpr int kQBytes = kQRows * kRowBytes;

  static_assert(kHeadDim % (kGroupWarps * 8) == 0, "each warp of a group takes whole steps of 8 dims");
  // The producers take whole rows: kPassTokens of them at once, eight passes or more a tile.
  static constexpr int kPassTokens = kRowChunks == 12 ? 8 : kProducerThreads / kRowChunks;
  static constexpr int kPasses = kTokens / kPassTokens;
  static constexpr int kPassPlaces = kPassTokens % 8 == 0 ? 1 : 8 / kPassTokens;  // after so many passes the swizzle repeats

  // Rows that a warp has a share of in a pass, at most.
  static constexpr int kWarpRows = kRowChunks == 12 ? 4 : kWarp / kRowChunks;
  static_assert(kPasses * kWarpRows <= kWarp, "a lane finds the page of one token");
  static_assert(kPassTokens * kRowChunks % kWarp == 0 && (kRowChunks == 12 || kWarp % kRowChunks == 0), "whole warps copy: they shuffle");

  static_assert(kPassTokens * kRowChunks <= kProducerThreads && kTokens % kPassTokens == 0, "a pass is whole rows, a stage whole passes");
  static_assert(kConsumerWarps <= kMaxConsumerWarps, "counters have room for every consumer warp");
};

// Features of a call. Without code for them they are off at compile time.
template <class C>
__device__ __forceinline__ bool has_rules(const Params& p) {
  return C::kHasRules && p.rules;
}
template <class C>
__device__ __forceinline__ bool has_sinks(const Params& p) {
  return C::kHasRules && p.sinks != nullptr;
}
template <class C>
__device__ __forceinline__ bool has_chunks(const Params& p) {
  return C::kFeatures == Features::kInvariant || (C::kFull && p.line.chunk_tiles > 0);
}
template <class C>
__device__ __forceinline__ bool is_padded(const Params& p) {
  return C::kFull && p.padded;
}
template <class C>
__device__ __forceinline__ bool is_general(const Params& p) {
  return C::kFull && p.general;
}
template <class C>
__device__ __forceinline__ bool is_checked(const Params& p) {
  return C::kFeatures == Features::kChecked || (C::kFull && p.checks);
}
template <class C>
__device__ __forceinline__ int head_dim(const Params& p) {
  return !C::kFull ? C::kHeadDim : p.head_dim;
}
template <class C>
__device__ __forceinline__ int head_dim_v(const Params& p) {
  return !C::kFull ? C::kHeadDim : p.head_dim_v;
}

// Of this block, in a grid of any shape.
__device__ __forceinline__ int block_index() { return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z); }

// Element of (seq, token 0, q_head 0) in Q or O.
template <class C>
__device__ __forceinline__ std::int64_t first_row_of(const RowView& view, const Line& line, int seq) {
  return C::kFull && line.cu_seqlens_q ? line.cu_seqlens_q[seq] * view.token_stride : seq * view.seq_stride;
}

// The seq's first query token, counted over all seqs.
template <class C>
__device__ __forceinline__ std::int64_t first_query(const Line& line, int seq) {
  return C::kFull && line.cu_seqlens_q ? line.cu_seqlens_q[seq] : static_cast<std::int64_t>(seq) * line.q_len;
}

// Rows of 16-byte chunks in shared memory: the chunk's place in its row turns with the row, so that eight rows of one column, which a
// matrix load takes at once, lie in different banks.
template <int kRowChunks>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  static_assert(kRowChunks % 4 == 0, "the swizzle moves a chunk within 8 or 4 places");
  return row * kRowChunks + (kRowChunks % 8 == 0 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3));
}

// Byte offset of a token's chunk in K or V of a stage.
template <class C>
__device__ __forceinline__ std::uint32_t kv_place(int token, int chunk) {
  if constexpr (!C::kWarpgroup) return swizzled<C::kRowChunks>(token, chunk) * 16;
  return chunk / C::kColumnChunks * (C::kTokens * C::kColumnBytes) + swizzled<C::kColumnChunks>(token, chunk % C::kColumnChunks) * 16;
}

// What a stage holds: neighbouring tokens of one segment.
struct alignas(16) Stage {
  enum Flag {
    kFirst = 1,      // of its segment
    kLast = 2,       // of its segment
    kMasked = 4,     // it is not full, or causality hides some of it from some row
    kDone = 8,       // nothing: the stretch has ended
    kChunkEnd = 16,  // of its chunk (SegmentChunks), which without chunks is its segment
    kFault = 32,     // a page id or an offset of it is out of range: not all of it was read
    kRuled = 64,     // a rule of rules.cuh has a say in it
  };
  int tokens;       // 0: an empty seq
  int token_begin;  // of the seq
  int flags;
  int unused;
};

// Batch-invariant: the chunks of a segment, counted from the output's first one, and what finds the other segments of the output.
struct SegmentChunks {
  int all;    // of the output; 0: cuts fall on any tile
  int begin;  // of the segment
  int end;    // one past the last
  int slot;   // of the workspace, where the segment's nodes of the merge tree lie

  // Where an output is cut across stretches that share the line with others:
  int tiles;              // of the output
  int first_of_line;      // its first stretch, on the line of its KV head
  long long output_unit;  // its first unit there
};

// What consumers know of a segment; written with its first tile.
struct SegmentInfo {
  int seq;
  int q_head;     // first of the KV head
  int first_row;  // of the row block, packed
  int rows;       // packed rows of the seq in this block
  int kv_len;
  int q_len;
  int parts;          // segments of the output; 1: whole. Of a cut one with chunks, its stretches, some of which may hold none
  int part;           // of those, this one
  int first_stretch;  // that holds part 0, counted over the lines of all KV heads
  bool of_cluster;    // a part is what a cluster merges; first_stretch is the output's first block, then
  SegmentChunks chunks;
};

// What rules.cuh needs to know of a row; written where Params::rules says so.
struct RowRule {
  int position;      // of the query token in the seq
  float slope_log2;  // of ALiBi, log2 units a token
};

// Dynamic shared memory, in this order: K and V stages, Q of each stage's segment, then this.
template <class C>
struct Shared {
  // First: racecheck takes a barrier's offset in here for its address when it is set up, and would find stages there.
  std::uint64_t full[kMaxStages];   // producers → consumers: kProducerThreads copies landed, 1 stage record written
  std::uint64_t empty[kMaxStages];  // consumer warps → producers
  std::uint64_t received;           // cluster → consumers: the parts of this block's slice are here (cluster.cuh)
  alignas(128) std::uint16_t weights[C::kGroups][C::kWarpgroup ? 8 : C::kPaddedRows * C::kTokens];  // P of a stage, swizzled
  float warp_max[C::kGroups][C::kGroupWarps][C::kGroupRows];   // largest logit of each warp's tokens in a stage
  float warp_sums[C::kGroups][C::kGroupWarps][C::kGroupRows];  // ℓ of each warp's tokens, at a segment's end
  float2 earlier[C::kGroups][C::kGroupWarps][C::kGroupRows];   // (m, ℓ) of tokens before, as keep_sums says
  Stage stages[kMaxStages];
  SegmentInfo segments[kMaxStages];
  SegmentInfo pending[C::kConsumerWarps][2];  // tree.cuh
  RowRule row_rules[C::kGroups][C::kGroupWarps][C::kGroupRows];
  long long scan_units[kProducerThreads / kWarp];
  long long scan_longest[kProducerThreads / kWarp];
  Cursor cursor;
  Cut cut;

  static constexpr int bytes(int stages) { return stages * (2 * C::kStageBytes + C::kQBytes) + static_cast<int>(sizeof(Shared)); }
};

}  // namespace leanattn::cuda
