// SPDX-License-Identifier: Apache-2.0
// The line as data: which worker does which segment, and when. For the plan command, its pictures and tests; kernels use the functions of
// leanattn/schedule.h directly.
//
// Time is counted in tiles of the line: a segment takes its tiles plus fragment_cost_tiles.
#pragma once

#include <vector>

#include "leanattn/schedule.h"

namespace leanattn {

struct PlanSegment {
  long long stretch = 0;
  int worker = 0;
  Segment segment;
  int kv_head_begin = 0;  // KV heads that it reads, one past the last
  int kv_head_end = 0;
  int row_block = 0;
  int token_begin = 0;  // context tokens that it reads, one past the last; equal for an empty seq
  int token_end = 0;
  long long start_tiles = 0;  // when its worker starts and ends it
  long long end_tiles = 0;
  int merge = -1;  // index into Plan::merges; −1: the whole output, nothing to merge
};

// The segments of a cut output, in tile order: at least two.
struct PlanMerge {
  int seq = 0;
  int output = 0;
  std::vector<int> segments;  // indices into Plan::segments
};

struct Plan {
  Cut cut;
  int workers = 0;
  long long outputs = 0;
  std::vector<PlanSegment> segments;  // in stretch order, then tile order
  std::vector<PlanMerge> merges;      // in line order
  std::vector<long long> busy_tiles;  // [workers]
  long long makespan_tiles = 0;       // when the last worker ends
  double busy_share = 0.0;            // Σ busy_tiles / (workers·makespan_tiles); 0 when there is nothing to do
};

// The plan of a line on workers ≥ 1 that start together. Lean stretch w goes to worker w where there are enough workers. Else stretches
// are taken in order, each by the worker that is free first (the lowest index among equals): what a grid of CTAs and a pool of threads do.
Plan make_plan(const Line& line, int workers);

// splits of the flashdecoding policy when none are given: flashdecoding_splits of the line's outputs and its longest one.
int default_splits(const Line& line, int workers);

}  // namespace leanattn
