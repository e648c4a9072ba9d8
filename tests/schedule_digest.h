// SPDX-License-Identifier: Apache-2.0
// Every integer that the schedule finds for a line, folded into one number a stretch: computed by a GPU and by the host, equal when each of
// them is. Compiles with g++, clang and nvcc.
#pragma once

#include "leanattn/merge_tree.h"
#include "leanattn/schedule.h"
#include "leanattn/splits.h"

namespace leanattn::schedule_test {

struct Digest {
  unsigned long long value = 0x9e3779b97f4a7c15u;
  LEANATTN_HOST_DEVICE void add(long long number) {
    value ^= static_cast<unsigned long long>(number);
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    value ^= value >> 31;
  }
  LEANATTN_HOST_DEVICE void add(const Segment& segment) {
    add(segment.seq);
    add(segment.lens.kv_len);
    add(segment.lens.q_len);
    add(segment.output);
    add(segment.tiles);
    add(segment.tile_begin);
    add(segment.tile_end);
  }
};

// The cut, and what depends on no stretch.
LEANATTN_HOST_DEVICE inline unsigned long long digest_of_line(const Line& line, const Cut& cut) {
  Digest digest;
  digest.add(cut.units);
  digest.add(cut.stretches);
  digest.add(partial_slots(line, cut));
  if (line.num_seqs > 0) {
    const int seq = line.num_seqs / 2;
    digest.add(seq_first_unit(line, seq));
    digest.add(seq_unit_count(line, seq));
    digest.add(flashdecoding_splits(max_of(seq_outputs(line, seq), 1), line.workers, seq_tiles(line, seq)));
  }
  return digest.value;
}

// One stretch: its borders, segments and their tokens, slots, merge lists and chunk rows.
LEANATTN_HOST_DEVICE inline unsigned long long digest_of_stretch(const Line& line, const Cut& cut, long long stretch) {
  constexpr int kMostSegments = 64;  // of a stretch that are looked at
  Digest digest;
  digest.add(stretch);
  digest.add(stretch_begin(cut, stretch));
  digest.add(stretch_of(cut, stretch_begin(cut, stretch)));
  Cursor cursor = stretch_cursor(line, cut, stretch);
  Segment segment;
  for (int count = 0; count < kMostSegments && next_segment(line, cursor, segment); ++count) {
    const MergeList list = merge_list(line, cut, segment.seq, segment.output);
    const Chunks chunks = make_chunks(segment.tiles, max_of(line.chunk_tiles, 1), line.chunks_grow);
    const int chunk_begin = chunks.of(segment.tile_begin), chunk_end = chunks.of(segment.tile_end - 1) + 1;
    const TreeNode node = next_node(chunk_begin, chunk_end);
    digest.add(segment);
    digest.add(segment_of(line, cut, list, segment.seq, segment.output, stretch));
    digest.add(is_cut(segment) ? partial_slot(line, stretch, segment) : -1);
    digest.add(list.output_unit);
    digest.add(list.first);
    digest.add(list.last);
    if (line.chunk_tiles == 0) {
      const MergeList parts = part_list(line, cut, list.output_unit, segment.tiles);
      digest.add(parts.output_unit);
      digest.add(parts.first);
      digest.add(parts.last);
    }
    digest.add(tile_token_begin(line, segment.seq, segment.tile_begin));
    digest.add(tile_token_end(line, segment.seq, segment.tile_end - 1));
    digest.add(node.level);
    digest.add(node.index);
    digest.add(max_row_nodes(chunk_end - chunk_begin));
  }
  return digest.value;
}

// The stretches that are looked at: all, or this many spread over the line.
LEANATTN_HOST_DEVICE inline long long digested_stretches(const Cut& cut) { return cut.stretches < 2048 ? cut.stretches : 2048; }
LEANATTN_HOST_DEVICE inline long long digested_stretch(const Cut& cut, long long i) {
  return cut.stretches < 2048 ? i : i * (cut.stretches / 2048);
}

}  // namespace leanattn::schedule_test
