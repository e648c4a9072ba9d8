// SPDX-License-Identifier: Apache-2.0
#include "src/cpu/call.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "leanattn/merge_tree.h"
#include "leanattn/splits.h"
#include "numeric.h"
#include "problem_view.h"
#include "src/cpu/threads.h"

namespace leanattn::cpu {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr double kMostBytes = 0x1p62;  // of a workspace

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// A stretch shorter than this costs more in waking its worker than it saves.
constexpr std::int64_t kMinStretchBytes = 64 * 1024;

// Rows of one token's heads lie side by side in most caches: a stretch of tokens then serves all heads and reads memory in order. In a
// head-major cache each head's tokens are the run of memory.
HeadOrder natural_order(const Problem& problem) {
  return problem.k.head_stride < problem.k.token_stride || problem.kv_heads == 1 ? HeadOrder::kBeside : HeadOrder::kAlong;
}

// Bytes of K and V that a token of all heads takes.
std::int64_t token_bytes(const Problem& problem) {
  return static_cast<std::int64_t>(problem.kv_heads) * (problem.head_dim + head_dim_v(problem)) *
         static_cast<std::int64_t>(dtype_bytes(problem.kv_dtype));
}

// The kernel of a seq with one new token. Tiles and chunks follow it, for every seq of the problem: bits must not depend on other seqs.
const TileKernel& leading_kernel(const Problem& problem, const IsaKernels& isa) {
  return *isa.select(problem.kv_dtype, problem.head_dim, head_dim_v(problem), group(problem));
}

// A tile of all heads at most this large waits in L2, and memory is read in its own order (the figures are in docs/cpu.md).
constexpr std::int64_t kWholeTileBytes = 128 * 1024;

// More tokens share a tile's fixed costs, as long as all heads stay in one tile.
int tile_tokens(const Problem& problem, const TileKernel& kernel, int heads) {
  const std::int64_t token_heads_bytes = heads * (token_bytes(problem) / problem.kv_heads);
  return kMaxTileTokens * token_heads_bytes <= kWholeTileBytes ? kMaxTileTokens : kernel.tile_tokens;
}

// KV heads of a tile. Memory is read fastest in its own order, so all of them where a tile is small enough; else few enough to wait in half
// of L1.
int tile_heads(const Problem& problem, int tile_tokens, int heads) {
  constexpr std::int64_t kPartTileBytes = 16 * 1024;
  const std::int64_t head_bytes = tile_tokens * token_bytes(problem) / problem.kv_heads;
  const std::int64_t bytes = heads * head_bytes <= kWholeTileBytes ? kWholeTileBytes : kPartTileBytes;
  return static_cast<int>(std::clamp<std::int64_t>(bytes / head_bytes, 1, std::min(heads, kMaxTileHeads)));
}

std::int64_t max_tiles(const Problem& problem, int tile_tokens) { return (max_kv_len(problem) + tile_tokens - 1) / tile_tokens; }

Line make_line(const Problem& problem, const Options& options, HeadOrder order, const Sizes& sizes) {
  Line line = problem_line(problem);
  line.head_order = order;
  line.tile_tokens = sizes.tile_tokens;
  line.chunk_tiles = options.batch_invariant ? kChunkTokens / sizes.tile_tokens : 0;
  line.fragment_cost_tiles = kFragmentCostTiles;
  line.policy = options.policy;
  line.workers = sizes.workers;
  const std::int64_t tile_bytes = line.tile_tokens * token_bytes(problem) / (order == HeadOrder::kBeside ? 1 : problem.kv_heads);
  line.min_stretch_units = static_cast<int>(std::max<std::int64_t>(1, kMinStretchBytes / tile_bytes));
  return line;
}

// Splits come from the room of a seq, not from lengths: the query knows no lengths. More splits than tiles would be empty.
int flashdecoding_splits_of(const Problem& problem, const Options& options, HeadOrder order, const Sizes& sizes) {
  const std::int64_t tiles = std::max<std::int64_t>(max_tiles(problem, sizes.tile_tokens), 1);
  if (options.splits > 0) return static_cast<int>(std::min<std::int64_t>(options.splits, tiles));
  const std::int64_t outputs = static_cast<std::int64_t>(problem.batch) * (order == HeadOrder::kBeside ? 1 : problem.kv_heads);
  constexpr std::int64_t kMany = std::int64_t{1} << 32;  // more than workers; shapes alone may say 2^62
  return flashdecoding_splits(std::clamp<std::int64_t>(outputs, 1, kMany), sizes.workers, static_cast<int>(tiles));
}

}  // namespace

const TileKernel& Call::kernel(int rows) const { return *isa->select(problem->kv_dtype, problem->head_dim, head_dim_v, rows); }

const IsaKernels& find_isa(const Options& options) {
  const auto known = isa_kernels();
  if (!options.cpu_isa) return known.front();
  for (const IsaKernels& isa : known) {
    if (std::string_view(isa.isa) == options.cpu_isa) return isa;
  }
  std::string names;
  for (const IsaKernels& isa : known) names += (names.empty() ? "" : ", ") + std::string(isa.isa);
  reject_cpu_isa(options.cpu_isa, names.c_str());
}

int padded_rows(const TileKernel& kernel, int rows) {
  static_assert(kMaxBlockRows <= 16, "validation leaves room for blocks of 16 rows, no larger ones");
  const int whole = rows / kernel.max_block_rows * kernel.max_block_rows;
  return rows > whole ? whole + kernel.block_rows(rows - whole) : whole;
}

Sizes call_sizes(const Problem& problem, const Options& options, const IsaKernels& isa) {
  Sizes sizes;
  const int dv = head_dim_v(problem);
  sizes.workers = options.workers > 0 ? options.workers : default_workers();
  // With kAuto a lean call may still choose along, which needs less (make_call).
  const HeadOrder order = options.head_order == HeadOrder::kAuto ? natural_order(problem) : options.head_order;
  sizes.heads = order == HeadOrder::kBeside ? problem.kv_heads : 1;

  sizes.tile_tokens = tile_tokens(problem, leading_kernel(problem, isa), sizes.heads);
  sizes.tile_heads = tile_heads(problem, sizes.tile_tokens, sizes.heads);

  // A kernel is chosen by a seq's own rows: take the most that any of them may need.
  std::size_t row_bytes = 0, q_row_bytes = 0;
  constexpr int kDistinctQLens = 16;  // every kernel's choice is the same for all longer ones
  for (int i = 1; i <= std::min(problem.q_len, kDistinctQLens) + 1; ++i) {
    const int q_len = std::max(i > kDistinctQLens ? problem.q_len : std::min(i, problem.q_len), 1);
    const int rows = q_len * group(problem);
    const TileKernel& kernel = *isa.select(problem.kv_dtype, problem.head_dim, dv, rows);
    sizes.padded_rows = std::max(sizes.padded_rows, padded_rows(kernel, rows));
    row_bytes = std::max(row_bytes, static_cast<std::size_t>(kernel.padded_dims(dv)) * sizeof(float));
    q_row_bytes = std::max(q_row_bytes, static_cast<std::size_t>(kernel.padded_dims(problem.head_dim)) * sizeof(float));
    sizes.extra_bytes = std::max(sizes.extra_bytes, aligned(kernel.extra_bytes(problem.head_dim, dv)));
  }
  const std::size_t rows = static_cast<std::size_t>(sizes.heads) * static_cast<std::size_t>(sizes.padded_rows);
  sizes.node_bytes = aligned(rows * sizeof(RowPartial)) + aligned(rows * row_bytes);
  sizes.q_bytes = aligned(rows * q_row_bytes);

  const std::int64_t chunks = max_kv_len(problem) / kChunkTokens + 2;  // a window may start inside a tile
  sizes.slot_nodes = options.batch_invariant ? max_row_nodes(static_cast<int>(chunks)) : 1;

  if (options.policy == Policy::kLean) {
    sizes.stretches = sizes.workers;
    sizes.slots = 2 * sizes.stretches;
  } else {
    const bool splitting = options.policy == Policy::kFlashDecoding;
    const int splits = splitting ? flashdecoding_splits_of(problem, options, order, sizes) : 1;
    const std::int64_t outputs = static_cast<std::int64_t>(problem.batch) * (order == HeadOrder::kBeside ? 1 : problem.kv_heads);
    const double cut_bytes = static_cast<double>(outputs) * splits * sizeof(CutStart);
    if (cut_bytes > kMostBytes) reject_workspace(cut_bytes);
    sizes.stretches = outputs * splits;
    sizes.slots = splits > 1 ? sizes.stretches : 0;
  }
  return sizes;
}

ScratchLayout scratch_layout(const Problem& problem, const Sizes& sizes) {
  ScratchLayout layout;
  layout.nodes = layout.q + sizes.q_bytes;
  layout.weights = layout.nodes + static_cast<std::size_t>(sizes.slot_nodes) * sizes.node_bytes;
  layout.offsets = layout.weights + static_cast<std::size_t>(sizes.tile_heads) * weights_stride(kMaxBlockRows) * sizeof(float);
  layout.visible = layout.offsets + 4 * kMaxTileTokens * sizeof(std::int64_t);
  layout.extra = layout.visible + aligned(static_cast<std::size_t>(problem.q_len) * sizeof(std::uint64_t));
  layout.bytes = layout.extra + sizes.extra_bytes;
  return layout;
}

Layout workspace_layout(const Problem& problem, const Sizes& sizes) {
  Layout layout;
  const double slot_bytes =
      static_cast<double>(sizes.slots) * static_cast<double>(sizes.slot_nodes) * static_cast<double>(sizes.node_bytes);
  const double cut_bytes = static_cast<double>(sizes.stretches) * sizeof(CutStart);
  const double bytes =
      slot_bytes + cut_bytes + static_cast<double>(sizes.workers) * static_cast<double>(scratch_layout(problem, sizes).bytes);
  if (bytes > kMostBytes) reject_workspace(bytes);
  layout.cut_starts = aligned((static_cast<std::size_t>(problem.batch) + 1) * sizeof(std::int64_t));
  layout.partials = layout.cut_starts + aligned(static_cast<std::size_t>(sizes.stretches) * sizeof(CutStart));
  layout.scratch = layout.partials + static_cast<std::size_t>(sizes.slots * sizes.slot_nodes) * sizes.node_bytes;
  layout.scratch_bytes = scratch_layout(problem, sizes).bytes;
  layout.total_bytes = layout.scratch + static_cast<std::size_t>(sizes.workers) * layout.scratch_bytes + kAlignment - 1;
  return layout;
}

Call make_call(const Problem& problem, const Options& options, std::span<std::byte> workspace) {
  Call call;
  call.problem = &problem;
  call.isa = &find_isa(options);
  call.group = group(problem);
  call.head_dim_v = head_dim_v(problem);
  call.scale = scale(problem);
  call.sizes = call_sizes(problem, options, *call.isa);
  const Layout layout = workspace_layout(problem, call.sizes);
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(workspace.data()) % kAlignment;
  std::byte* base = workspace.data() + (misaligned ? kAlignment - misaligned : 0);

  HeadOrder order = options.head_order == HeadOrder::kAuto ? natural_order(problem) : options.head_order;
  call.line = make_line(problem, options, order, call.sizes);
  if (options.policy == Policy::kLean && options.head_order == HeadOrder::kAuto && order == HeadOrder::kBeside) {
    // Too few tiles to share out: cut the heads too.
    std::int64_t tiles = 0;
    for (int seq = 0; seq < problem.batch; ++seq) tiles += seq_tiles(call.line, seq);
    if (tiles < 2 * call.sizes.workers) order = HeadOrder::kAlong;
    call.line = make_line(problem, options, order, call.sizes);
  }
  if (options.policy == Policy::kFlashDecoding) call.line.splits = flashdecoding_splits_of(problem, options, order, call.sizes);
  auto* seq_units = reinterpret_cast<long long*>(base + layout.seq_units);
  seq_unit_prefix(call.line, seq_units);
  call.line.seq_units = seq_units;
  call.cut = make_cut(call.line);

  call.scratch_layout = scratch_layout(problem, call.sizes);
  call.cut_starts = reinterpret_cast<CutStart*>(base + layout.cut_starts);
  call.partials = base + layout.partials;
  call.scratch = base + layout.scratch;
  call.scratch_bytes = layout.scratch_bytes;
  return call;
}

Node node_at(std::byte* at, const TileKernel& kernel, int head_dim_v, int heads, int padded_rows) {
  const std::size_t rows = static_cast<std::size_t>(heads) * static_cast<std::size_t>(padded_rows);
  Node node;
  node.rows = reinterpret_cast<RowPartial*>(at);
  node.values = reinterpret_cast<float*>(at + aligned(rows * sizeof(RowPartial)));
  node.value_stride = kernel.padded_dims(head_dim_v);
  return node;
}

Place place_of(const Call& call, int seq, int output) {
  Place place;
  place.seq = seq;
  const bool beside = call.line.head_order == HeadOrder::kBeside;
  place.first_head = beside ? 0 : output;
  place.heads = beside ? call.problem->kv_heads : 1;
  place.q_len = seq_q_len(*call.problem, seq);
  place.rows = place.q_len * call.group;
  place.padded_rows = padded_rows(call.kernel(place.rows), place.rows);
  place.kv_len = seq_kv_len(*call.problem, seq);
  return place;
}

}  // namespace leanattn::cpu
