// SPDX-License-Identifier: Apache-2.0
// One call of the CPU backend: what is fixed for its whole duration. Made by the calling thread, read by every worker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "leanattn/problem.h"
#include "leanattn/schedule.h"
#include "src/cpu/tile.h"

namespace leanattn::cpu {

// Batch-invariant chunks. Short enough that two workers share 1K tokens, long enough that its partial costs little.
constexpr int kChunkTokens = 256;
// Packing Q, starting and finishing an output take about as long as a tile.
constexpr int kFragmentCostTiles = 1;

// How large things are, for the longest seq of a problem; from shapes alone, so that the workspace query needs no lengths.
struct Sizes {
  int workers = 0;
  int heads = 0;  // KV heads that a segment serves: kv_heads side by side, 1 along the line
  int tile_tokens = 0;
  int tile_heads = 1;           // KV heads of a tile (Tile::heads)
  int padded_rows = 0;          // packed rows of a KV head, padding included
  std::size_t node_bytes = 0;   // one partial of a segment: (m, ℓ) and Õ of heads·padded_rows rows
  std::size_t q_bytes = 0;      // packed Q of a segment
  std::size_t extra_bytes = 0;  // TileKernel::extra_bytes
  std::int64_t slot_nodes = 0;  // partials that a cut segment may leave: 1, or a row of the merge tree
  std::int64_t stretches = 0;   // at most
  std::int64_t slots = 0;       // at most
};

// Byte offsets into the workspace, each a multiple of 64.
struct Layout {
  std::size_t seq_units = 0;   // [batch + 1] int64
  std::size_t cut_starts = 0;  // [stretches] CutStart
  std::size_t partials = 0;    // [slots, slot_nodes] nodes
  std::size_t scratch = 0;     // [workers] of scratch_bytes
  std::size_t scratch_bytes = 0;
  std::size_t total_bytes = 0;  // with room to align the start
};

// Inside a worker's scratch.
struct ScratchLayout {
  std::size_t q = 0;
  std::size_t nodes = 0;    // [slot_nodes] nodes of an output that is not cut
  std::size_t weights = 0;  // [tile_heads, weights_stride(kMaxBlockRows)] floats
  std::size_t offsets = 0;  // two tiles of K and of V offsets
  std::size_t visible = 0;  // [q_len] words
  std::size_t extra = 0;
  std::size_t bytes = 0;
};

// The output that a stretch starts and the next goes on with; seq −1: none.
struct CutStart {
  std::int32_t seq = -1;
  std::int32_t output = 0;
};

struct Call {
  const Problem* problem = nullptr;
  const IsaKernels* isa = nullptr;
  int group = 0;
  int head_dim_v = 0;
  float scale = 0.0f;
  Line line;
  Cut cut;
  Sizes sizes;
  ScratchLayout scratch_layout;
  std::byte* scratch = nullptr;
  std::size_t scratch_bytes = 0;
  CutStart* cut_starts = nullptr;
  std::byte* partials = nullptr;

  const TileKernel& kernel(int rows) const;
};

// The kernels of options.cpu_isa, or the fastest. Throws kUnsupported for a name that is not known here.
const IsaKernels& find_isa(const Options& options);

// Rows of a KV head after padding each of its blocks.
int padded_rows(const TileKernel& kernel, int rows);

Sizes call_sizes(const Problem& problem, const Options& options, const IsaKernels& isa);
ScratchLayout scratch_layout(const Problem& problem, const Sizes& sizes);
Layout workspace_layout(const Problem& problem, const Sizes& sizes);

// Needs checked data. workspace holds layout.total_bytes.
Call make_call(const Problem& problem, const Options& options, std::span<std::byte> workspace);

// A partial of a segment: heads·rows (m, ℓ) pairs, then as many rows of Õ. Row h·rows + r is packed row r of the segment's head h.
struct Node {
  RowPartial* rows = nullptr;
  float* values = nullptr;
  int value_stride = 0;  // floats

  float* row_values(std::int64_t row) const { return values + row * value_stride; }
};

// The node at `at` for a segment whose heads have padded_rows rows each.
Node node_at(std::byte* at, const TileKernel& kernel, int head_dim_v, int heads, int padded_rows);

// Where segment s of the line stands in the tensors.
struct Place {
  int seq = 0;
  int first_head = 0;  // KV head
  int heads = 0;
  int q_len = 0;
  int rows = 0;  // q_len·group
  int padded_rows = 0;
  int kv_len = 0;
};
Place place_of(const Call& call, int seq, int output);

}  // namespace leanattn::cpu
