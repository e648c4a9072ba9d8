// SPDX-License-Identifier: Apache-2.0
// The CPU backend. A call is two rounds of workers: each runs its stretches of the line through the tile kernel and finishes the outputs
// that it holds whole; then, if any output was cut, all share the rows of the cut ones, merge their partials in tile order and finish them.
#include "backend.h"

#include <algorithm>
#include <atomic>

#include "problem_view.h"
#include "src/cpu/call.h"
#include "src/cpu/segment.h"
#include "src/cpu/threads.h"

namespace leanattn::cpu {
namespace {

struct Round {
  const Call& call;
  std::atomic<std::int64_t> next_stretch{0};
  std::atomic<bool> any_cut{false};
};

std::byte* slot_memory(const Call& call, std::int64_t slot) {
  return call.partials + static_cast<std::size_t>(slot * call.sizes.slot_nodes) * call.sizes.node_bytes;
}

void run_stretch(Round& round, std::int64_t stretch, std::byte* scratch) {
  const Call& call = round.call;
  CutStart& cut_start = call.cut_starts[stretch];
  cut_start = CutStart{};
  Cursor cursor = stretch_cursor(call.line, call.cut, stretch);
  Segment segment;
  while (next_segment(call.line, cursor, segment)) {
    if (is_cut(segment)) {
      run_segment(call, segment, scratch, slot_memory(call, partial_slot(call.line, stretch, segment)));
      if (starts_output(segment)) {
        cut_start = CutStart{segment.seq, segment.output};
        round.any_cut.store(true, std::memory_order_relaxed);
      }
      continue;
    }
    const Place place = place_of(call, segment.seq, segment.output);
    NodeStack stack = run_segment(call, segment, scratch, scratch + call.scratch_layout.nodes);
    finish_rows(call, place, stack.collapse(), 0, static_cast<std::int64_t>(place.heads) * place.padded_rows);
  }
}

// Stretches are taken in order by whichever worker is free; what a stretch computes does not depend on who takes it.
void tile_round(void* argument, std::int32_t worker) {
  Round& round = *static_cast<Round*>(argument);
  std::byte* scratch = round.call.scratch + static_cast<std::size_t>(worker) * round.call.scratch_bytes;
  for (;;) {
    const std::int64_t stretch = round.next_stretch.fetch_add(1, std::memory_order_relaxed);
    if (stretch >= round.call.cut.stretches) return;
    run_stretch(round, stretch, scratch);
  }
}

// Merges worker's share of the rows of every cut output.
void merge_round(void* argument, std::int32_t worker) {
  const Call& call = static_cast<Round*>(argument)->call;
  for (std::int64_t stretch = 0; stretch < call.cut.stretches; ++stretch) {
    const CutStart& start = call.cut_starts[stretch];
    if (start.seq < 0) continue;
    const Place place = place_of(call, start.seq, start.output);
    const std::int64_t rows = static_cast<std::int64_t>(place.heads) * place.padded_rows;
    const std::int64_t begin = rows * worker / call.sizes.workers, end = rows * (worker + 1) / call.sizes.workers;
    if (begin == end) continue;
    NodeStack stack(call, place, begin, end);
    const MergeList list = merge_list(call.line, call.cut, start.seq, start.output);
    int ordinal = 0;
    for (long long piece = list.first; piece <= list.last; ++piece) {
      const Segment segment = segment_of(call.line, call.cut, list, start.seq, start.output, piece);
      if (segment.tile_begin == segment.tile_end) continue;
      push_segment(call, stack, segment, ordinal++, slot_memory(call, partial_slot(call.line, piece, segment)));
    }
    finish_rows(call, place, stack.collapse(), begin, end);
  }
}

}  // namespace

std::size_t workspace_bytes(const Problem& problem, const Options& options) {
  if (problem.batch == 0 || problem.q_len == 0) return 0;
  return workspace_layout(problem, call_sizes(problem, options, find_isa(options))).total_bytes;
}

void decode(const Problem& problem, const Options& options, std::span<std::byte> workspace) {
  check_data(problem);
  if (problem.batch == 0 || problem.q_len == 0) return;
  const Call call = make_call(problem, options, workspace);
  if (call.cut.stretches == 0) return;
  Round round{call};
  const int tasks = static_cast<int>(std::min<std::int64_t>(call.sizes.workers, call.cut.stretches));
  run_tasks(options.executor, tasks, tile_round, &round);
  if (round.any_cut.load(std::memory_order_relaxed)) run_tasks(options.executor, call.sizes.workers, merge_round, &round);
}

Tiling tiling(const Problem& problem, const Options& options) {
  return {call_sizes(problem, options, find_isa(options)).tile_tokens, kFragmentCostTiles};
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const IsaKernels& isa : isa_kernels()) names.emplace_back(isa.isa);
  return names;
}

}  // namespace leanattn::cpu
