// SPDX-License-Identifier: Apache-2.0
// The tile kernel's interface: one tile of the context (up to kMaxTileTokens tokens of some KV heads) against one block of packed rows of
// each head.
//
// A tile is three steps, the same in every kernel: scores (Q·K), weights (mask, online softmax), values (P·V added to Õ). Each step takes
// all heads of the tile before the next begins: K and V are then read in the order of memory, and the weights of one head do not wait for
// those of another. A token's K row lies at k + k_offsets[t]: contiguous, ragged and paged caches differ in how the offsets were filled.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "leanattn/problem.h"
#include "partial.h"

namespace leanattn::cpu {

constexpr int kMaxTileTokens = 32;  // at most the bits of a `visible` word
constexpr int kMinTileTokens = 16;
constexpr int kMaxTileHeads = 16;
constexpr int kMaxBlockRows = 16;  // packed rows of the largest row block

// Cache lines on their way to L2, half a tile ahead of their use. One is fetched where a line is read, since a burst would fill the fill
// buffers and stall; in the order of memory, which is the fastest. A list of runs; behind the last stands one that stays where it is and
// does not end.
struct LineRun {
  const std::byte* at = nullptr;
  std::int32_t lines = 0;
  std::int32_t step = 64;  // bytes
};

struct LineStream {
  LineRun now;
  const LineRun* later = nullptr;

  // Always inlined: compiled for each instruction set that includes it. A call here would cost the accumulators their registers.
  [[gnu::always_inline]] inline void fetch() {
    __builtin_prefetch(now.at, 0, 2);
    now.at += now.step;
    if (--now.lines == 0) now = *later++;
  }
};

// Everything that differs from head to head lies at a fixed distance.
struct Tile {
  int heads = 1;       // KV heads, 1 … kMaxTileHeads
  int tokens = 0;      // 1 … kMaxTileTokens
  int block_rows = 0;  // as TileKernel::block_rows gave it
  int head_dim = 0;
  int head_dim_v = 0;

  // K and V.
  const std::byte* k = nullptr;
  const std::byte* v = nullptr;
  const std::int64_t* k_offsets = nullptr;  // [tokens] bytes
  const std::int64_t* v_offsets = nullptr;  // [tokens] bytes
  std::int64_t k_head_bytes = 0;
  std::int64_t v_head_bytes = 0;

  // Lines to fetch meanwhile, in and out: this tile's V while the scores are computed, then the K that the worker reads next.
  LineStream* lines_v = nullptr;
  LineStream* next_k = nullptr;

  // Logits.
  float scale = 1.0f;                      // still to be multiplied in; 1 where packed Q holds it
  float softcap = 0.0f;                    // 0: off
  const float* slopes = nullptr;           // [heads, block_rows] ALiBi; null: none
  const float* distances = nullptr;        // [block_rows] position of the row minus the tile's first token
  const std::uint64_t* visible = nullptr;  // [block_rows] bit t: the row sees token t; null: every row sees all

  // The row block of each head.
  const std::byte* q = nullptr;  // packed by TileKernel::pack_q
  std::int64_t q_head_bytes = 0;
  RowPartial* rows = nullptr;  // [block_rows], in and out
  float* values = nullptr;     // Õ [block_rows, value_stride] in the kernel's order of dims, in and out
  int value_stride = 0;        // floats
  int head_rows = 0;           // from one head's rows to the next's

  // Scratch of the worker.
  float* weights = nullptr;    // [heads, weights_stride(block_rows)], 64-byte aligned
  std::byte* extra = nullptr;  // TileKernel::extra_bytes, 64-byte aligned
};

// Floats of one head's weights [kMaxTileTokens, block_rows].
constexpr int weights_stride(int block_rows) { return kMaxTileTokens * std::max(block_rows, 4); }

// The rows of one block, to be packed: row r is q + row_offsets[r] elements.
struct QBlock {
  const void* q = nullptr;
  const std::int64_t* row_offsets = nullptr;  // [rows]
  int rows = 0;
  int block_rows = 0;
  int head_dim = 0;
  float scale = 1.0f;
};

// One implementation of the three steps for one KV type.
struct TileKernel {
  int tile_tokens = 0;  // kMinTileTokens or kMaxTileTokens: what suits it best; it takes any number up to the latter
  int max_block_rows = 0;
  bool q_is_scaled = false;          // packed Q holds Problem::scale; else the weights step multiplies it in
  int (*block_rows)(int rows);       // rows of the block that takes `rows` (≤ max_block_rows) rows; more are padding
  int (*padded_dims)(int head_dim);  // slots of a packed row of Q or Õ
  std::size_t (*extra_bytes)(int head_dim, int head_dim_v);
  void (*pack_q)(const QBlock& block, void* packed);  // packed: block_rows·padded_dims floats, 64-byte aligned
  void (*run)(const Tile& tile);
  void (*store)(const float* values, float factor, int head_dim_v, void* o);  // one row: o = values·factor in the type of Q
};

// The second step of a tile by itself, for a kernel that brings its own first and third (block_rows 8 or 16).
// factors[heads, kMaxBlockRows]: what Õ must be multiplied with before the tile's values are added.
using WeightsStep = void (*)(const Tile& tile, float* factors);

// What one instruction set offers.
struct IsaKernels {
  const char* isa = nullptr;
  const TileKernel* (*select)(DType kv_dtype, int head_dim, int head_dim_v, int rows);
};

// Kernels that this machine can run, fastest first.
std::span<const IsaKernels> isa_kernels();

// tile.cpp: the Highway kernels, fastest first; the weights step of the widest one for tile_amx.cpp.
std::span<const IsaKernels> highway_kernels();
// tile_amx.cpp: null where the processor, the system or the compiler has no tile registers.
const IsaKernels* amx_kernels();
WeightsStep avx3_weights_step();

}  // namespace leanattn::cpu
