// SPDX-License-Identifier: Apache-2.0
// The schedule and the merge compiled for the device: one kernel that evaluates a line's cut, segments, merge lists, rows and partials, so
// that a test can compare every integer (and every bit of a merge) with what the host finds from the same inputs.
#include "leanattn/schedule.h"
#include "partial.h"

namespace leanattn {

struct DeviceSegment {
  long long stretch;
  long long slot;         // partial_slot, or −1 when the segment is the whole output
  long long merge_first;  // of the output's merge list
  long long merge_last;
  Segment segment;
  Segment again;  // segment_of the same stretch: the same as segment
  int token_begin;
  int token_end;
  TreeNode node;  // first node of the row of the segment's chunks (or tiles without chunks)
  int row_nodes;  // max_row_nodes of them
};

// Stretch s of the line by thread s (grid-stride). counts[s] becomes the number of its segments; the first max_segments of them go to
// segments[s·max_segments …]. line's pointers are device pointers. cut: one value.
__global__ void evaluate_line(Line line, long long max_segments, Cut* cut_out, long long* counts, DeviceSegment* segments) {
  const Cut cut = make_cut(line);
  const long long thread = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  if (thread == 0) *cut_out = cut;
  for (long long stretch = thread; stretch < cut.stretches; stretch += gridDim.x * static_cast<long long>(blockDim.x)) {
    Cursor cursor = stretch_cursor(line, cut, stretch);
    Segment segment;
    long long count = 0;
    while (next_segment(line, cursor, segment)) {
      if (count < max_segments) {
        DeviceSegment& out = segments[stretch * max_segments + count];
        const MergeList list = merge_list(line, cut, segment.seq, segment.output);
        const int grain = max_of(line.chunk_tiles, 1);
        const int chunk_begin = segment.tile_begin / grain, chunk_end = ceil_div(segment.tile_end, grain);
        out.stretch = stretch;
        out.slot = is_cut(segment) ? partial_slot(line, stretch, segment) : -1;
        out.merge_first = list.first;
        out.merge_last = list.last;
        out.segment = segment;
        out.again = segment_of(line, cut, list, segment.seq, segment.output, stretch);
        out.token_begin = tile_token_begin(line, segment.seq, segment.tile_begin);
        out.token_end = tile_token_end(line, segment.seq, segment.tile_end - 1);
        out.node = next_node(chunk_begin, chunk_end);
        out.row_nodes = max_row_nodes(chunk_end - chunk_begin);
      }
      ++count;
    }
    counts[stretch] = count;
  }
}

__global__ void evaluate_prefix(Line line, long long* prefix) {
  if (blockIdx.x == 0 && threadIdx.x == 0) seq_unit_prefix(line, prefix);
}

// Merges x[i] and y[i] with one value each; finish[i] = (O, LSE).
__global__ void evaluate_merges(int n, const RowPartial* x, const RowPartial* y, const float* x_values, const float* y_values,
                                RowMerge* merges, float* values, float2* finish) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const RowMerge merge = merge_rows(x[i], y[i]);
  float value = x_values[i];
  merge_values(merge, &value, &y_values[i], 1);
  merges[i] = merge;
  values[i] = value;
  finish[i] = make_float2(value * finish_factor(merge.row), finish_lse(merge.row));
}

}  // namespace leanattn
