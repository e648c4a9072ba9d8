// SPDX-License-Identifier: Apache-2.0
#include "src/cpu/segment.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "numeric.h"
#include "partial.h"
#include "problem_view.h"

namespace leanattn::cpu {
namespace {

// The tokens of one tile and where their rows lie, heads left out.
struct TileRows {
  std::int64_t* k_offsets = nullptr;  // [kMaxTileTokens] bytes
  std::int64_t* v_offsets = nullptr;
  int first_token = 0;
  int tokens = 0;
};

struct SegmentRun {
  const Call& call;
  const Problem& problem;
  const Place place;
  const TileKernel& kernel;
  std::byte* scratch;
};

// Tile `tile` of the seq: its token range and the offsets of head 0.
void locate_tile(const SegmentRun& run, int tile, TileRows& rows) {
  const Problem& p = run.problem;
  const int seq = run.place.seq;
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(p.kv_dtype));
  rows.first_token = tile_token_begin(run.call.line, seq, tile);
  rows.tokens = std::max(0, tile_token_end(run.call.line, seq, tile) - rows.first_token);
  if (p.kv_layout != KvLayout::kPaged) {
    const std::int64_t k = kv_row_offset(p, p.k, seq, rows.first_token, 0);
    const std::int64_t v = kv_row_offset(p, p.v, seq, rows.first_token, 0);
    for (int t = 0; t < rows.tokens; ++t) {
      rows.k_offsets[t] = (k + t * p.k.token_stride) * element_bytes;
      rows.v_offsets[t] = (v + t * p.v.token_stride) * element_bytes;
    }
    return;
  }
  const std::int32_t* table = p.block_table + seq * block_table_stride(p);
  int slot = rows.first_token / p.page_size;
  int in_page = rows.first_token % p.page_size;
  for (int t = 0; t < rows.tokens; ++slot, in_page = 0) {
    const std::int64_t page = table[slot];
    for (; in_page < p.page_size && t < rows.tokens; ++in_page, ++t) {
      rows.k_offsets[t] = (page * p.k.outer_stride + in_page * p.k.token_stride) * element_bytes;
      rows.v_offsets[t] = (page * p.v.outer_stride + in_page * p.v.token_stride) * element_bytes;
    }
  }
}

const std::byte* head_base(const SegmentRun& run, const KvView& view, int head) {
  return static_cast<const std::byte*>(view.data) + static_cast<std::int64_t>(run.place.first_head + head) * view.head_stride *
                                                        static_cast<std::int64_t>(dtype_bytes(run.problem.kv_dtype));
}

// Where the heads of a token lie close together, a row of memory is all of them.
bool heads_together(const KvView& view, int dims) { return view.head_stride <= 2 * dims; }

// The lines of K or V of a tile's heads [head, head_end): rows of several heads where they lie close together, else of the first only.
// runs: [kMaxTileTokens + 1].
LineStream lines_of(const SegmentRun& run, const KvView& view, int dims, const std::int64_t* offsets, int tokens, int head, int head_end,
                    LineRun* runs) {
  const std::byte* base = head_base(run, view, head);
  const std::int64_t last_head = heads_together(view, dims) ? (head_end - 1 - head) * view.head_stride : 0;
  const std::int64_t row_bytes = (last_head + dims) * static_cast<std::int64_t>(dtype_bytes(run.problem.kv_dtype));
  int count = 0;
  for (int t = 0; t < tokens;) {
    // Rows that follow each other in memory are one run.
    const std::int64_t begin = offsets[t];
    std::int64_t end = begin + row_bytes;
    for (++t; t < tokens && offsets[t] >= begin && offsets[t] < end + 64; ++t) end = offsets[t] + row_bytes;
    runs[count++] = LineRun{base + begin, static_cast<std::int32_t>((end - begin + 63) / 64), 64};
  }
  runs[count] = LineRun{base, std::numeric_limits<std::int32_t>::max(), 0};
  return LineStream{runs[0], runs + 1};
}

std::uint64_t low_bits(std::int64_t count) {
  if (count <= 0) return 0;
  return count >= 64 ? ~0ull : (1ull << count) - 1;
}

// visible[i] bit t: query token i sees the tile's token t. False when every query token sees the whole tile, and then visible is not set.
bool mask_tile(const SegmentRun& run, const TileRows& rows, std::uint64_t* visible) {
  const Problem& p = run.problem;
  const std::int64_t first_position = static_cast<std::int64_t>(run.place.kv_len) - run.place.q_len;
  const std::int64_t last_position = run.place.kv_len - 1;
  const std::int64_t begin = rows.first_token, end = begin + rows.tokens;
  const bool window_cuts = p.window_left >= 0 && begin < last_position - p.window_left;
  const bool causal_cuts = p.causal && end - 1 > first_position;
  const bool tree_cuts = p.tree_mask && end > first_position;
  if (!window_cuts && !causal_cuts && !tree_cuts) return false;
  const std::int64_t words = tree_mask_words(p);
  const std::uint64_t* tree = tree_cuts ? p.tree_mask + seq_q_begin(p, run.place.seq) * words : nullptr;
  for (int i = 0; i < run.place.q_len; ++i) {
    const std::int64_t position = first_position + i;
    std::uint64_t bits = low_bits(rows.tokens);
    if (p.causal) bits &= low_bits(position + 1 - begin);
    if (p.window_left >= 0) bits &= ~low_bits(position - p.window_left - begin);
    if (tree) {
      for (std::int64_t t = std::max(begin, first_position); t < end; ++t) {
        const std::int64_t j = t - first_position;
        if (!(tree[i * words + j / 64] >> (j % 64) & 1)) bits &= ~(1ull << (t - begin));
      }
    }
    visible[i] = bits;
  }
  return true;
}

// Packed row r of a KV head is query token r / group, q_head head·group + r % group.
template <class Body>
void for_each_block(const SegmentRun& run, Body body) {
  for (int row = 0; row < run.place.rows;) {
    const int rows = std::min(run.place.rows - row, run.kernel.max_block_rows);
    body(row, rows, run.kernel.block_rows(rows));
    row += rows;
  }
}

std::byte* packed_q(const SegmentRun& run, int head, int row) {
  const std::size_t floats =
      static_cast<std::size_t>(head * run.place.padded_rows + row) * static_cast<std::size_t>(run.kernel.padded_dims(run.problem.head_dim));
  return run.scratch + run.call.scratch_layout.q + floats * sizeof(float);
}

void pack_queries(const SegmentRun& run) {
  const Problem& p = run.problem;
  for (int head = 0; head < run.place.heads; ++head) {
    for_each_block(run, [&](int first, int rows, int block_rows) {
      std::int64_t row_offsets[kMaxBlockRows];
      for (int r = 0; r < rows; ++r) {
        const int q_head = (run.place.first_head + head) * run.call.group + (first + r) % run.call.group;
        row_offsets[r] = q_row_offset(p, p.q, run.place.seq, (first + r) / run.call.group, q_head);
      }
      QBlock block;
      block.q = p.q.data;
      block.row_offsets = row_offsets;
      block.rows = rows;
      block.block_rows = block_rows;
      block.head_dim = p.head_dim;
      block.scale = run.call.scale;
      run.kernel.pack_q(block, packed_q(run, head, first));
    });
  }
}

// One tile of every head and row block.
void run_tile(const SegmentRun& run, const TileRows& rows, const TileRows& next, const Node& node) {
  const Problem& p = run.problem;
  std::byte* scratch = run.scratch;
  auto* visible = reinterpret_cast<std::uint64_t*>(scratch + run.call.scratch_layout.visible);
  const bool masked = mask_tile(run, rows, visible);
  const std::int64_t first_position = static_cast<std::int64_t>(run.place.kv_len) - run.place.q_len;
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(p.kv_dtype));

  Tile tile;
  tile.tokens = rows.tokens;
  tile.head_dim = p.head_dim;
  tile.head_dim_v = run.call.head_dim_v;
  tile.k_offsets = rows.k_offsets;
  tile.v_offsets = rows.v_offsets;
  tile.k_head_bytes = p.k.head_stride * element_bytes;
  tile.v_head_bytes = p.v.head_stride * element_bytes;
  tile.scale = run.kernel.q_is_scaled ? 1.0f : run.call.scale;
  tile.softcap = p.softcap;
  tile.q_head_bytes = packed_q(run, 1, 0) - packed_q(run, 0, 0);
  tile.value_stride = node.value_stride;
  tile.head_rows = run.place.padded_rows;
  tile.weights = reinterpret_cast<float*>(scratch + run.call.scratch_layout.weights);
  tile.extra = scratch + run.call.scratch_layout.extra;

  float slopes[kMaxTileHeads * kMaxBlockRows], distances[kMaxBlockRows];
  std::uint64_t row_visible[kMaxBlockRows];
  LineRun v_runs[kMaxTileTokens + 1], k_runs[kMaxTileTokens + 1];
  LineStream nothing{LineRun{static_cast<const std::byte*>(p.k.data), std::numeric_limits<std::int32_t>::max(), 0}, nullptr};
  for (int head = 0; head < run.place.heads; head += run.call.sizes.tile_heads) {
    const int head_end = std::min(head + run.call.sizes.tile_heads, run.place.heads);
    tile.heads = head_end - head;
    tile.k = head_base(run, p.k, head);
    tile.v = head_base(run, p.v, head);
    // The K that this worker reads next: of the tile's other heads, or of the first ones of the next tile.
    const bool here = head_end < run.place.heads;
    const TileRows& from = here ? rows : next;
    const int begin = here ? head_end : 0;
    const int end = std::min(begin + run.call.sizes.tile_heads, run.place.heads);
    LineStream lines_v = lines_of(run, p.v, tile.head_dim_v, rows.v_offsets, rows.tokens, head, head_end, v_runs);
    LineStream next_k = lines_of(run, p.k, tile.head_dim, from.k_offsets, from.tokens, begin, end, k_runs);
    for_each_block(run, [&](int first, int, int block_rows) {
      for (int r = 0; r < block_rows && (masked || p.alibi_slopes); ++r) {
        const int packed = std::min(first + r, run.place.rows - 1);
        const int token = packed / run.call.group;
        row_visible[r] = masked ? visible[token] : 0;
        distances[r] = static_cast<float>(first_position + token - rows.first_token);
        for (int h = 0; p.alibi_slopes && h < tile.heads; ++h) {
          slopes[h * block_rows + r] = p.alibi_slopes[(run.place.first_head + head + h) * run.call.group + packed % run.call.group];
        }
      }
      tile.visible = masked ? row_visible : nullptr;
      tile.slopes = p.alibi_slopes ? slopes : nullptr;
      tile.distances = distances;
      tile.lines_v = first == 0 ? &lines_v : &nothing;
      tile.next_k = first == 0 ? &next_k : &nothing;
      tile.block_rows = block_rows;
      tile.q = packed_q(run, head, first);
      const std::int64_t row = static_cast<std::int64_t>(head) * run.place.padded_rows + first;
      tile.rows = node.rows + row;
      tile.values = node.row_values(row);
      run.kernel.run(tile);
    });
  }
}

// Node x becomes the merge of x and y, x first in tile order, for rows [begin, end).
void merge_nodes(const Node& x, const Node& y, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const RowMerge merge = merge_rows(x.rows[row], y.rows[row]);
    x.rows[row] = merge.row;
    merge_values(merge, x.row_values(row), y.row_values(row), x.value_stride);
  }
}

}  // namespace

NodeStack::NodeStack(const Call& call, const Place& place, std::int64_t row_begin, std::int64_t row_end)
    : call_(call), place_(place), kernel_(call.kernel(place.rows)), row_begin_(row_begin), row_end_(row_end) {}

void NodeStack::merge_top() {
  --size_;
  merge_nodes(nodes_[size_ - 1], nodes_[size_], row_begin_, row_end_);
}

void NodeStack::push(TreeNode node, std::byte* memory) {
  tree_[size_] = node;
  nodes_[size_++] = node_at(memory, kernel_, call_.head_dim_v, place_.heads, place_.padded_rows);
  while (size_ > 1 && are_siblings(tree_[size_ - 2], tree_[size_ - 1])) {
    merge_top();
    tree_[size_ - 1] = TreeNode{tree_[size_ - 1].level + 1, tree_[size_ - 1].index / 2};
  }
}

const Node& NodeStack::collapse() {
  while (size_ > 1) merge_top();
  return nodes_[0];
}

NodeStack run_segment(const Call& call, const Segment& segment, std::byte* scratch, std::byte* memory) {
  const Place place = place_of(call, segment.seq, segment.output);
  const SegmentRun run{call, *call.problem, place, call.kernel(place.rows), scratch};
  pack_queries(run);

  auto* offsets = reinterpret_cast<std::int64_t*>(scratch + call.scratch_layout.offsets);
  TileRows rows{offsets, offsets + kMaxTileTokens};
  TileRows next{offsets + 2 * kMaxTileTokens, offsets + 3 * kMaxTileTokens};
  locate_tile(run, segment.tile_begin, rows);
  const std::int64_t all_rows = static_cast<std::int64_t>(place.heads) * place.padded_rows;
  const int chunk_tiles = call.line.chunk_tiles > 0 ? call.line.chunk_tiles : segment.tiles;
  NodeStack stack(call, place, 0, all_rows);
  for (int tile = segment.tile_begin; tile < segment.tile_end;) {
    std::byte* at = memory + static_cast<std::size_t>(stack.size()) * call.sizes.node_bytes;
    const Node node = node_at(at, run.kernel, call.head_dim_v, place.heads, place.padded_rows);
    std::fill(node.rows, node.rows + all_rows, RowPartial{});
    std::fill(node.values, node.row_values(all_rows), 0.0f);
    const int chunk = tile / chunk_tiles;
    const int chunk_end = std::min(segment.tile_end, (chunk + 1) * chunk_tiles);
    for (; tile < chunk_end; ++tile) {
      next.tokens = 0;
      if (tile + 1 < segment.tile_end) locate_tile(run, tile + 1, next);
      if (rows.tokens > 0) run_tile(run, rows, next, node);
      std::swap(rows, next);
    }
    stack.push(TreeNode{0, chunk}, at);
  }
  return stack;
}

void push_segment(const Call& call, NodeStack& stack, const Segment& segment, int ordinal, std::byte* memory) {
  if (call.line.chunk_tiles == 0) {
    stack.push(TreeNode{0, ordinal}, memory);
    return;
  }
  int chunk = segment.tile_begin / call.line.chunk_tiles;
  const int end = ceil_div(segment.tile_end, call.line.chunk_tiles);
  for (int i = 0; chunk < end; ++i) {
    const TreeNode node = next_node(chunk, end);
    stack.push(node, memory + static_cast<std::size_t>(i) * call.sizes.node_bytes);
    chunk = (node.index + 1) << node.level;
  }
}

void finish_rows(const Call& call, const Place& place, const Node& node, std::int64_t row_begin, std::int64_t row_end) {
  const Problem& p = *call.problem;
  const TileKernel& kernel = call.kernel(place.rows);
  const std::int64_t q_begin = seq_q_begin(p, place.seq);
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const int r = static_cast<int>(row % place.padded_rows);
    if (r >= place.rows) continue;
    const int q_head = (place.first_head + static_cast<int>(row / place.padded_rows)) * call.group + r % call.group;
    const int token = r / call.group;
    RowPartial partial = node.rows[row];
    float* values = node.row_values(row);
    // A row without a key is 0 whatever V holds.
    if (partial.sum == 0.0f) std::fill(values, values + node.value_stride, 0.0f);
    float value_factor = 1.0f;
    if (p.sinks) {
      const RowMerge merge = merge_rows(partial, sink_partial(p.sinks[q_head]));
      if (merge.swapped) value_factor = merge.factor;
      partial = merge.row;
    }
    const std::int64_t o = q_row_offset(p, p.o, place.seq, token, q_head);
    std::byte* out = static_cast<std::byte*>(p.o.data) + o * static_cast<std::int64_t>(dtype_bytes(p.q_dtype));
    kernel.store(values, value_factor * finish_factor(partial), call.head_dim_v, out);
    if (p.lse) {
      const float lse = finish_lse(partial);
      p.lse[(q_begin + token) * p.q_heads + q_head] = p.lse_base == LseBase::kTwo ? lse * kLog2E : lse;
    }
  }
}

}  // namespace leanattn::cpu
