// SPDX-License-Identifier: Apache-2.0
#include "schedule.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

#include "leanattn/splits.h"

namespace leanattn {
namespace {

PlanSegment describe_segment(const Line& line, long long stretch, int worker, const Segment& segment) {
  PlanSegment result;
  result.stretch = stretch;
  result.worker = worker;
  result.segment = segment;
  const bool beside = line.head_order == HeadOrder::kBeside;
  const int row_blocks = seq_row_blocks(line, segment.seq);
  result.kv_head_begin = beside ? 0 : segment.output / row_blocks;
  result.kv_head_end = beside ? line.kv_heads : result.kv_head_begin + 1;
  result.row_block = segment.output % row_blocks;
  result.token_begin = tile_token_begin(line, segment.seq, segment.tile_begin);
  result.token_end = tile_token_end(line, segment.seq, segment.tile_end - 1);
  return result;
}

}  // namespace

Plan make_plan(const Line& line, int workers) {
  Plan plan;
  plan.workers = workers;
  plan.busy_tiles.assign(workers, 0);
  std::vector<long long> prefix(line.num_seqs + 1);
  Line searched = line;
  searched.seq_units = nullptr;
  seq_unit_prefix(searched, prefix.data());
  searched.seq_units = prefix.data();
  plan.cut = make_cut(searched);
  for (int seq = 0; seq < line.num_seqs; ++seq) plan.outputs += seq_outputs(line, seq);

  const bool own_worker = line.policy == Policy::kLean && plan.cut.stretches <= workers;
  using Free = std::pair<long long, int>;  // (time, worker)
  std::priority_queue<Free, std::vector<Free>, std::greater<>> free_workers;
  for (int worker = 0; worker < workers; ++worker) free_workers.push({0, worker});
  for (long long stretch = 0; stretch < plan.cut.stretches; ++stretch) {
    auto [time, worker] = own_worker ? Free{0, static_cast<int>(stretch)} : free_workers.top();
    if (!own_worker) free_workers.pop();
    Cursor cursor = stretch_cursor(searched, plan.cut, stretch);
    Segment segment;
    while (next_segment(searched, cursor, segment)) {
      PlanSegment planned = describe_segment(searched, stretch, worker, segment);
      planned.start_tiles = time;
      time += static_cast<long long>(segment.tile_end) - segment.tile_begin + line.fragment_cost_tiles;
      planned.end_tiles = time;
      plan.busy_tiles[worker] += planned.end_tiles - planned.start_tiles;
      if (is_cut(segment)) {
        if (starts_output(segment)) plan.merges.push_back({segment.seq, segment.output, {}});
        plan.merges.back().segments.push_back(static_cast<int>(plan.segments.size()));
        planned.merge = static_cast<int>(plan.merges.size()) - 1;
      }
      plan.segments.push_back(planned);
    }
    plan.makespan_tiles = std::max(plan.makespan_tiles, time);
    if (!own_worker) free_workers.push({time, worker});
  }
  long long busy = 0;
  for (const long long tiles : plan.busy_tiles) busy += tiles;
  if (plan.makespan_tiles > 0) plan.busy_share = static_cast<double>(busy) / (static_cast<double>(plan.makespan_tiles) * workers);
  return plan;
}

int default_splits(const Line& line, int workers) {
  long long outputs = 0;
  int longest = 1;
  for (int seq = 0; seq < line.num_seqs; ++seq) {
    const int seq_count = seq_outputs(line, seq);
    outputs += seq_count;
    if (seq_count > 0) longest = std::max(longest, seq_tiles(line, seq));
  }
  return outputs == 0 ? 1 : flashdecoding_splits(outputs, workers, longest);
}

}  // namespace leanattn
