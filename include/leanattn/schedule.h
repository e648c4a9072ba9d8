// SPDX-License-Identifier: Apache-2.0
// The schedule: how a batch becomes one line of tiles, and how the line is cut into stretches, one per worker.
//
// LeanAttention (Sanovar et al., MLSys 2025, §4) lays all tiles of all outputs behind each other and gives every worker an equal
// stretch, across output borders; FlashAttention-2 (one worker an output) and FlashDecoding (a fixed number of splits an output) are
// other cuts of the same line. All of them are the functions below: pure, on integers, from the lengths alone, so that a CPU thread, a
// CTA, a test and a picture find the same stretch each by itself. Compiles with g++, clang, nvcc and NVRTC.
//
//   unit      what the line is measured in. lean: one tile, plus fragment_cost_tiles at the head of each output for the fixed cost of
//             starting and finishing it; where outputs have stretches of their own, one of those. fa2: one output. flashdecoding: one split
//   stretch   a run of units that one worker does in one go
//   segment   the part of a stretch that lies inside one output
//   cut       the number of units and of stretches of a line
//   chunk     batch-invariant only: neighbouring tiles of an output, as many as the output alone decides (chunks.h); cuts fall on borders
#pragma once

#include "leanattn/chunks.h"

namespace leanattn {

enum class Policy : int {
  kLean = 0,           // equal stretches of the whole line
  kFa2 = 1,            // a stretch is an output
  kFlashDecoding = 2,  // a stretch is one of `splits` parts of an output
};

enum class HeadOrder : int {
  kAuto = 0,    // the backend chooses (never seen by the functions below)
  kAlong = 1,   // an output is (seq, kv_head, row block): the line of the paper
  kBeside = 2,  // an output is (seq, row block) with all KV heads side by side: a stretch of tokens serves every head
};

// Everything that the cut depends on. All pointers may be host or device pointers, of the side that calls. Counts of one seq (tokens,
// packed rows, outputs) fit an int; counts of the line are long long.
struct Line {
  int num_seqs = 0;
  const int* kv_lens = nullptr;        // [num_seqs] tokens; null: differences of cu_seqlens_kv
  const int* cu_seqlens_kv = nullptr;  // [num_seqs + 1], used when kv_lens is null
  const int* cu_seqlens_q = nullptr;   // [num_seqs + 1]; null: q_len of every seq
  int q_len = 1;                       // new tokens of a seq when cu_seqlens_q is null
  int most_kv_len = 0x7fffffff;        // a length outside 0 … this counts as 0
  int most_q_len = 0x7fffffff;         // likewise, of cu_seqlens_q
  int kv_heads = 1;
  int group = 1;           // q_heads / kv_heads
  int rows_per_block = 0;  // packed rows (q_len·group of a KV head) a row block holds; 0: all of them
  HeadOrder head_order = HeadOrder::kAlong;
  int window_left = -1;         // left window in tokens; −1: none
  int tile_tokens = 1;          // context tokens a tile
  int chunk_tiles = 0;          // tiles a chunk; 0: cuts may fall on any tile
  bool chunks_grow = false;     // chunks are longer in longer outputs: chunk_tiles is their grain (Chunks)
  int fragment_cost_tiles = 0;  // lean: cost of an output beyond its tiles
  Policy policy = Policy::kLean;
  int splits = 1;                        // flashdecoding: ≥ 1
  int workers = 1;                       // lean, and the others with runs: the most stretches
  bool runs = false;                     // fa2, flashdecoding: a stretch is an equal run of units, as with lean, not one unit
  int min_stretch_units = 1;             // lean: fewer workers rather than shorter stretches
  int max_output_stretches = 0;          // lean: a stretch is at least this part of the longest output, which then meets at most one
                                         // stretch more than this; 0: no limit
  int output_stretches = 0;              // lean: ≥ 1: every output is cut into stretches of its own, at most so many and equal within a
                                         // tile (own_stretches); workers, the cost and the two limits are not used then. 0: not so
  int cluster_stretches = 1;             // of output_stretches, a multiple of it: so many have the means to merge with each other
  int join_cost_tiles = 0;               // tiles a stretch that an output gives up before it joins more than one cluster
  const long long* seq_units = nullptr;  // [num_seqs + 1] first unit of each seq (seq_unit_prefix); null: the functions scan instead
};

struct Cut {
  long long units = 0;
  long long stretches = 0;
  long long whole = 0;  // units of a stretch, one more in the first `longer` of them
  long long longer = 0;
};

// Lengths of a seq, read once.
struct SeqLens {
  int kv_len = 0;
  int q_len = 0;
};

struct Segment {
  int seq = 0;
  SeqLens lens{};      // of the seq
  int output = 0;      // of the seq's outputs: kv_head·row_blocks + row_block along, row_block beside
  int tiles = 0;       // of the whole output
  int tile_begin = 0;  // counted from the output's first tile
  int tile_end = 0;
};

// Where a worker is on its stretch.
struct Cursor {
  long long unit = 0;      // next unit to cover
  long long end_unit = 0;  // end of the stretch
  long long seq_unit = 0;  // first unit of seq
  int seq = 0;
  SeqLens lens{};  // of seq
};

LEANATTN_HOST_DEVICE constexpr int ceil_div(int a, int b) { return a / b + (a % b != 0); }
LEANATTN_HOST_DEVICE constexpr int min_of(int a, int b) { return a < b ? a : b; }
LEANATTN_HOST_DEVICE constexpr int max_of(int a, int b) { return a > b ? a : b; }

// --- Sequences ---

LEANATTN_HOST_DEVICE inline int seq_kv_len(const Line& line, int seq) {
  const int len = line.kv_lens ? line.kv_lens[seq] : line.cu_seqlens_kv[seq + 1] - line.cu_seqlens_kv[seq];
  return len < 0 || len > line.most_kv_len ? 0 : len;
}

LEANATTN_HOST_DEVICE inline int seq_q_len(const Line& line, int seq) {
  const int len = line.cu_seqlens_q ? line.cu_seqlens_q[seq + 1] - line.cu_seqlens_q[seq] : line.q_len;
  return len < 0 || len > line.most_q_len ? 0 : len;
}

LEANATTN_HOST_DEVICE inline SeqLens seq_lens(const Line& line, int seq) { return {seq_kv_len(line, seq), seq_q_len(line, seq)}; }

// First token that any row sees: the left end of the window of query token 0.
LEANATTN_HOST_DEVICE inline int seq_first_token(const Line& line, const SeqLens& lens) {
  const int old = lens.kv_len - lens.q_len;  // tokens before the new ones
  return line.window_left >= 0 && old > line.window_left ? old - line.window_left : 0;
}
LEANATTN_HOST_DEVICE inline int seq_first_token(const Line& line, int seq) { return seq_first_token(line, seq_lens(line, seq)); }

// Tiles of each output of the seq, at least one: an empty seq has one tile without tokens, so every output is on the line.
LEANATTN_HOST_DEVICE inline int seq_tiles(const Line& line, const SeqLens& lens) {
  const int first_tile = seq_first_token(line, lens) / line.tile_tokens;
  return max_of(ceil_div(lens.kv_len, line.tile_tokens) - first_tile, 1);
}
LEANATTN_HOST_DEVICE inline int seq_tiles(const Line& line, int seq) { return seq_tiles(line, seq_lens(line, seq)); }

LEANATTN_HOST_DEVICE inline int seq_row_blocks(const Line& line, const SeqLens& lens) {
  const int rows = lens.q_len * line.group;
  if (rows <= 0) return 0;
  return line.rows_per_block > 0 ? ceil_div(rows, line.rows_per_block) : 1;
}
LEANATTN_HOST_DEVICE inline int seq_row_blocks(const Line& line, int seq) { return seq_row_blocks(line, seq_lens(line, seq)); }

// Outputs of the seq; none for q_len 0.
LEANATTN_HOST_DEVICE inline int seq_outputs(const Line& line, const SeqLens& lens) {
  return seq_row_blocks(line, lens) * (line.head_order == HeadOrder::kBeside ? 1 : line.kv_heads);
}
LEANATTN_HOST_DEVICE inline int seq_outputs(const Line& line, int seq) { return seq_outputs(line, seq_lens(line, seq)); }

// First token of a tile of the output, and one past its last (equal for an empty seq). Tiles sit on multiples of tile_tokens, whatever
// the window.
LEANATTN_HOST_DEVICE inline int tile_token_begin(const Line& line, int seq, int tile) {
  const int first = seq_first_token(line, seq);
  return max_of(first, (first / line.tile_tokens + tile) * line.tile_tokens);
}

LEANATTN_HOST_DEVICE inline int tile_token_end(const Line& line, int seq, int tile) {
  const long long end = (seq_first_token(line, seq) / line.tile_tokens + tile + 1LL) * line.tile_tokens;
  const int len = seq_kv_len(line, seq);
  return end < len ? static_cast<int>(end) : len;
}

// --- Units ---

LEANATTN_HOST_DEVICE inline bool has_own_stretches(const Line& line) { return line.policy == Policy::kLean && line.output_stretches > 0; }

// Of an output of `tiles` tiles; grain 0: cuts may fall on any tile.
LEANATTN_HOST_DEVICE inline Chunks output_chunks(const Line& line, int tiles) {
  return line.chunk_tiles > 0 ? make_chunks(tiles, line.chunk_tiles, line.chunks_grow) : Chunks{};
}

// Where an output has stretches of its own and chunks, a stretch has 2^own_level of them, the fewest that leave at most `stretches`: it is
// one node of the merge tree (merge_tree.h).
LEANATTN_HOST_DEVICE inline int own_level(int chunks, int stretches) {
  int level = 0;
  while (((chunks - 1) >> level) >= stretches) ++level;
  return level;
}

// Stretches of an output's own: one cluster's where that is long enough, else whole clusters for as many as have a tile or a node.
LEANATTN_HOST_DEVICE inline int own_stretches(const Line& line, int tiles) {
  const int cluster = line.cluster_stretches, most = line.output_stretches;
  if (most <= cluster || tiles <= static_cast<long long>(cluster) * line.join_cost_tiles) return min_of(cluster, most);
  int used = tiles;
  if (line.chunk_tiles > 0) {
    const int chunks = output_chunks(line, tiles).count;
    used = ((chunks - 1) >> own_level(chunks, most)) + 1;
  }
  if (used < most) [[unlikely]]
    return (used + cluster - 1) / cluster * cluster;
  return most;
}

// A stretch may have many segments; else it has one at most.
LEANATTN_HOST_DEVICE inline bool has_long_stretches(const Line& line) {
  return line.policy == Policy::kLean ? line.output_stretches == 0 : line.runs;
}

// Units of an output of `tiles` tiles.
LEANATTN_HOST_DEVICE inline long long output_units(const Line& line, int tiles) {
  switch (line.policy) {
    case Policy::kLean:
      if (has_own_stretches(line)) return own_stretches(line, tiles);
      return static_cast<long long>(line.fragment_cost_tiles) + tiles;
    case Policy::kFa2: return 1;
    case Policy::kFlashDecoding: return line.splits;
  }
  return 1;
}

// The tile at which stretch `part` of an output begins that has `stretches` of its own, at most `tiles`. Without chunks the first few have
// one tile more than `whole` = tiles ÷ stretches, from the caller, who may have a faster way than to divide.
LEANATTN_HOST_DEVICE inline int own_tile(const Line& line, int tiles, int stretches, int whole, int part) {
  if (line.chunk_tiles == 0) return part * whole + min_of(part, tiles - whole * stretches);
  const Chunks chunks = output_chunks(line, tiles);
  return chunks.begin(1LL * part << own_level(chunks.count, stretches));
}

// The tile at which a cut `unit` units into an output of `tiles` tiles falls: 0 at unit 0, `tiles` at output_units, monotone between,
// on a chunk border where there are chunks.
LEANATTN_HOST_DEVICE inline int tile_at(const Line& line, int tiles, long long unit) {
  const long long all = output_units(line, tiles);
  if (unit <= 0) return 0;
  if (unit >= all) return tiles;
  if (has_own_stretches(line)) {
    const int stretches = own_stretches(line, tiles);
    return own_tile(line, tiles, stretches, tiles / stretches, static_cast<int>(unit));
  }
  const Chunks chunks = line.chunk_tiles > 0 ? output_chunks(line, tiles) : make_chunks(tiles, 1, false);
  if (line.policy == Policy::kFlashDecoding) return chunks.begin(unit * ceil_div(chunks.count, line.splits));
  const long long tile = unit - line.fragment_cost_tiles;
  return tile <= 0 ? 0 : chunks.begin(chunks.of(static_cast<int>(tile)));
}

LEANATTN_HOST_DEVICE inline long long seq_unit_count(const Line& line, const SeqLens& lens) {
  return seq_outputs(line, lens) * output_units(line, seq_tiles(line, lens));
}
LEANATTN_HOST_DEVICE inline long long seq_unit_count(const Line& line, int seq) { return seq_unit_count(line, seq_lens(line, seq)); }

// Fills prefix[num_seqs + 1] with the first unit of each seq and the total behind the last: set line.seq_units to it and every search
// below takes O(log num_seqs) instead of O(num_seqs).
LEANATTN_HOST_DEVICE inline void seq_unit_prefix(const Line& line, long long* prefix) {
  long long unit = 0;
  for (int seq = 0; seq < line.num_seqs; ++seq) {
    prefix[seq] = unit;
    unit += seq_unit_count(line, seq);
  }
  prefix[line.num_seqs] = unit;
}

// --- Cuts ---

// The cut of a line. lean: as many equal stretches as there are workers, fewer where min_stretch_units or max_output_stretches ask for it;
// other policies, and outputs with stretches of their own: a stretch a unit, with runs as many equal stretches as there are workers. A line
// without outputs has no stretch; the functions below then have nothing to be asked.
//
// How equal lean stretches are: two stretches differ by at most one unit. In tiles, with c = max(chunk_tiles, 1), by at most 2c − 1 beyond
// what their shares of the cost units differ by: a cut inside a chunk moves back by up to c − 1 tiles, at either end of a stretch. (Where
// chunks grow, c is the longest chunk of any output.)
//
// cut_of_units is make_cut for whoever has the sums already: the units of the line, and of its longest output (at least 1).
LEANATTN_HOST_DEVICE inline Cut cut_of_units(const Line& line, long long units, long long longest) {
  Cut cut;
  cut.units = units;
  if (units == 0) return cut;
  long long most = units;  // stretches
  if (line.policy == Policy::kLean && !has_own_stretches(line)) {
    long long shortest = max_of(line.min_stretch_units, 1);
    if (line.max_output_stretches > 0) {
      const long long limit = (longest + line.max_output_stretches - 1) / line.max_output_stretches;
      if (limit > shortest) shortest = limit;
    }
    if (shortest > 1) most = units / shortest > 1 ? units / shortest : 1;
  }
  cut.stretches = has_long_stretches(line) && line.workers < most ? line.workers : most;
  cut.whole = units / cut.stretches;
  cut.longer = units - cut.whole * cut.stretches;
  return cut;
}

LEANATTN_HOST_DEVICE inline Cut make_cut(const Line& line) {
  long long all = 0, longest = 1;
  for (int seq = 0; seq < line.num_seqs; ++seq) {
    const long long units = output_units(line, seq_tiles(line, seq));
    const int outputs = seq_outputs(line, seq);
    all += outputs * units;
    if (outputs > 0 && units > longest) longest = units;
  }
  return cut_of_units(line, all, longest);
}

// First unit of a stretch; stretch = cut.stretches gives the end of the line. Lengths differ by at most one unit.
LEANATTN_HOST_DEVICE inline long long stretch_begin(const Cut& cut, long long stretch) {
  return stretch * cut.whole + (stretch < cut.longer ? stretch : cut.longer);
}

// The stretch that holds a unit, 0 ≤ unit < cut.units: the inverse of stretch_begin.
LEANATTN_HOST_DEVICE inline long long stretch_of(const Cut& cut, long long unit) {
  const long long in_longer = cut.longer * (cut.whole + 1);
  const bool longer = unit < in_longer;
  return (longer ? 0 : cut.longer) + (longer ? unit : unit - in_longer) / (cut.whole + (longer ? 1 : 0));
}

// First unit of a seq.
LEANATTN_HOST_DEVICE inline long long seq_first_unit(const Line& line, int seq) {
  if (line.seq_units) return line.seq_units[seq];
  long long unit = 0;
  for (int s = 0; s < seq; ++s) unit += seq_unit_count(line, s);
  return unit;
}

// The cursor at the start of a stretch.
LEANATTN_HOST_DEVICE inline Cursor stretch_cursor(const Line& line, const Cut& cut, long long stretch) {
  Cursor cursor;
  cursor.unit = stretch_begin(cut, stretch);
  cursor.end_unit = stretch_begin(cut, stretch + 1);
  if (line.seq_units) {
    int low = 0, high = line.num_seqs;  // the last seq with seq_units ≤ unit
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      (line.seq_units[middle] <= cursor.unit ? low : high) = middle;
    }
    cursor.seq = low;
    cursor.seq_unit = line.seq_units[low];
  }
  cursor.lens = seq_lens(line, cursor.seq);
  return cursor;
}

// Takes the next segment of the stretch, in tile order; false behind the last.
LEANATTN_HOST_DEVICE inline bool next_segment(const Line& line, Cursor& cursor, Segment& segment) {
  while (cursor.unit < cursor.end_unit) {
    segment.seq = cursor.seq;
    segment.lens = cursor.lens;
    segment.tiles = seq_tiles(line, cursor.lens);
    const long long units = output_units(line, segment.tiles);
    const int outputs = seq_outputs(line, cursor.lens);
    const long long seq_end = cursor.seq_unit + outputs * units;
    if (cursor.unit >= seq_end) {
      cursor.seq_unit = seq_end;
      ++cursor.seq;
      cursor.lens = seq_lens(line, cursor.seq);  // there is one: the stretch has not ended
      continue;
    }
    segment.output = outputs == 1 ? 0 : static_cast<int>((cursor.unit - cursor.seq_unit) / units);
    const long long first = cursor.seq_unit + segment.output * units;
    const long long end = first + units < cursor.end_unit ? first + units : cursor.end_unit;
    segment.tile_begin = tile_at(line, segment.tiles, cursor.unit - first);
    segment.tile_end = tile_at(line, segment.tiles, end - first);
    cursor.unit = end;
    if (segment.tile_begin < segment.tile_end) return true;
  }
  return false;
}

// --- Outputs with stretches of their own ---

// The part of an output of `tiles` tiles in stretch `part` of its `stretches`: empty where there are fewer tiles than stretches.
// whole = tiles ÷ stretches.
LEANATTN_HOST_DEVICE inline Segment own_segment(const Line& line, int seq, const SeqLens& lens, int output, int tiles, int stretches,
                                                int whole, int part) {
  Segment segment;
  segment.seq = seq;
  segment.lens = lens;
  segment.output = output;
  segment.tiles = tiles;
  segment.tile_begin = own_tile(line, tiles, stretches, whole, part);
  segment.tile_end = own_tile(line, tiles, stretches, whole, part + 1);
  return segment;
}

// Whether stretches of their own load the workers about as well as stretches across outputs: of `tiles` tiles of `outputs` outputs, the
// longest one has at most a quarter more than the mean.
LEANATTN_HOST_DEVICE inline bool outputs_are_even(long long tiles, long long longest, long long outputs) {
  return longest * outputs * 4 <= tiles * 5;
}

// --- Merging ---

LEANATTN_HOST_DEVICE inline bool starts_output(const Segment& segment) { return segment.tile_begin == 0; }
LEANATTN_HOST_DEVICE inline bool ends_output(const Segment& segment) { return segment.tile_end == segment.tiles; }
// A cut output has segments in more than one stretch; their partials meet in tile order.
LEANATTN_HOST_DEVICE inline bool is_cut(const Segment& segment) { return !(starts_output(segment) && ends_output(segment)); }

// Where a cut segment's partial lies. A long stretch has at most two cut segments: one that goes on from the stretch before (even slot),
// one that starts an output which the next stretch goes on with (odd slot).
LEANATTN_HOST_DEVICE inline long long partial_slot(const Line& line, long long stretch, const Segment& segment) {
  return has_long_stretches(line) ? 2 * stretch + (starts_output(segment) ? 1 : 0) : stretch;
}

LEANATTN_HOST_DEVICE inline long long partial_slots(const Line& line, const Cut& cut) {
  return has_long_stretches(line) ? 2 * cut.stretches : cut.stretches;
}

// The merge list of an output: the stretches from first to last hold its segments in tile order; some may hold none (segment_of).
struct MergeList {
  long long output_unit = 0;  // first unit of the output
  long long first = 0;
  long long last = 0;  // inclusive
};

LEANATTN_HOST_DEVICE inline MergeList merge_list(const Line& line, const Cut& cut, int seq, int output) {
  const long long units = output_units(line, seq_tiles(line, seq));
  MergeList list;
  list.output_unit = seq_first_unit(line, seq) + output * units;
  list.first = stretch_of(cut, list.output_unit);
  list.last = stretch_of(cut, list.output_unit + units - 1);
  return list;
}

// The merge list of an output of `tiles` tiles without the stretches at either end that hold no tile of it: those between hold some.
// Not for chunks.
LEANATTN_HOST_DEVICE inline MergeList part_list(const Line& line, const Cut& cut, long long output_unit, int tiles) {
  MergeList list;
  list.output_unit = output_unit;
  long long first_tile_unit = 0, last_tile_unit = 0;
  if (has_own_stretches(line)) {
    last_tile_unit = min_of(tiles, own_stretches(line, tiles)) - 1;
  } else if (line.policy == Policy::kLean) {
    first_tile_unit = line.fragment_cost_tiles;
    last_tile_unit = first_tile_unit + tiles - 1;
  } else if (line.policy == Policy::kFlashDecoding) {
    last_tile_unit = (tiles - 1) / ceil_div(tiles, line.splits);
  }
  list.first = stretch_of(cut, list.output_unit + first_tile_unit);
  list.last = stretch_of(cut, list.output_unit + last_tile_unit);
  return list;
}

// The segment of an output in one stretch of its merge list; empty (tile_begin == tile_end) when the stretch holds no tile of it.
LEANATTN_HOST_DEVICE inline Segment segment_of(const Line& line, const Cut& cut, const MergeList& list, int seq, int output,
                                               long long stretch) {
  Segment segment;
  segment.seq = seq;
  segment.lens = seq_lens(line, seq);
  segment.output = output;
  segment.tiles = seq_tiles(line, seq);
  segment.tile_begin = tile_at(line, segment.tiles, stretch_begin(cut, stretch) - list.output_unit);
  segment.tile_end = tile_at(line, segment.tiles, stretch_begin(cut, stretch + 1) - list.output_unit);
  return segment;
}

}  // namespace leanattn
