// SPDX-License-Identifier: Apache-2.0
// The one place that draws random problems for the GPU: shapes, values, strides, masks, rules, and how the call is made. Everything follows
// from the problem's number and the device's multiprocessors. Needs no GPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>

#include "cuda/variants.h"
#include "decoding.h"
#include "draw.h"
#include "respaced.h"

namespace leanattn::testing {

// What the draw may ask for.
struct DeviceAbilities {
  int multiprocessors = 1;
  bool batch_invariant = false;
};

// A problem and the call that decodes it.
struct DeviceDraw {
  int problem = 0;
  Case drawn;             // with the policy, splits, head order, workers and batch_invariant of the call
  bool respaced = false;  // other strides than the case has
  Gaps q, k, v, o;        // with respaced
  int path = 0;           // of device_paths(), modulo their number
  bool programmatic_launch = false;
  int cpu_workers = 0;  // 0: not compared with the CPU backend
};

inline int draw_device_length(Draw& draw) {
  if (draw.one_in(8)) return 0;
  if (draw.one_in(3)) return std::max(0, draw.of({1, 16, 32, 64, 128, 256, 512, 1024}) + draw.below(3) - 1);
  return draw.one_in(5) ? draw.below(3001) : 1 + draw.below(300);
}

inline void draw_layout(Draw& draw, Case& c) {
  c.layout = draw.of({CaseLayout::kContiguous, CaseLayout::kHeadMajor, CaseLayout::kRagged, CaseLayout::kPaged, CaseLayout::kPaged});
  if (c.layout == CaseLayout::kPaged) {
    c.page_size = draw.one_in(4) ? 1 + draw.below(1000) : draw.of({1, 2, 3, 8, 16, 16, 17, 32, 64, 128, 256, 1000});
  }
  c.interleaved = draw.one_in(4);
  c.strided = draw.one_in(3);
}

inline void draw_cut(Draw& draw, Case& c, int multiprocessors) {
  c.policy = draw.of({Policy::kLean, Policy::kLean, Policy::kLean, Policy::kFa2, Policy::kFlashDecoding, Policy::kFlashDecoding});
  if (c.policy == Policy::kFlashDecoding && !draw.one_in(3)) c.splits = draw.one_in(8) ? 1 + draw.below(200) : 1 + draw.below(12);
  c.head_order = draw.of({HeadOrder::kAuto, HeadOrder::kAuto, HeadOrder::kAlong, HeadOrder::kBeside});
  if (draw.one_in(2)) c.workers = 1 + draw.below(draw.one_in(2) ? 9 : multiprocessors);
}

// A long sequence, and less of everything else.
inline void draw_long(Draw& draw, Case& c) {
  c.kv_lens.resize(static_cast<std::size_t>(1 + draw.below(3)), 70);
  c.kv_lens[static_cast<std::size_t>(draw.below(c.batch()))] = draw.of({20000, 20480, 16385, 9999});
  c.kv_heads = 1 + draw.below(2);
  c.q_heads = c.kv_heads * (1 + draw.below(3));
  c.q_lens.clear();
  c.q_len = 1;
  c.tree_tokens = std::min(c.tree_tokens, 1);
}

inline double work_of(const Case& c) {
  double rows = 0.0;
  for (int seq = 0; seq < c.batch(); ++seq) rows += static_cast<double>(c.kv_lens[static_cast<std::size_t>(seq)]) * c.seq_q_len(seq);
  return rows * c.q_heads * (c.head_dim + c.head_dim_v);
}

// One problem in two has none of them.
inline void draw_rules(Draw& draw, Case& c) {
  if (c.max_q_len() > 0 && draw.one_in(c.max_q_len() > 1 ? 3 : 10)) {
    c.tree_tokens = c.max_q_len();
    if (c.q_lens.empty()) c.q_len = c.tree_tokens;
  }
  if (draw.one_in(3)) c.window_left = draw.of({0, 1, 5, 15, 16, 63, 64, 65, 100, 127, 128, 300, 2000});
  if (draw.one_in(4)) c.softcap = draw.of({1.0f, 20.0f, 30.0f, 50.0f});
  c.alibi = draw.one_in(4);
  c.sink = draw.of({tools::CaseSink::kNone, tools::CaseSink::kNone, tools::CaseSink::kVaried, tools::CaseSink::kValue});
  if (c.sink == tools::CaseSink::kValue) c.sink_value = draw.of({-INFINITY, 0.0f, -5.0f, 88.0f, 1e4f});
}

inline Case draw_device_case(int problem, const DeviceAbilities& abilities) {
  Draw draw(0x200000000u + static_cast<std::uint64_t>(problem));
  Case c;
  c.seed = static_cast<std::uint64_t>(problem) + 1;
  const int batch = draw.one_in(60) ? 0 : draw.one_in(12) ? 10 + draw.below(31) : 1 + draw.below(5);
  for (int seq = 0; seq < batch; ++seq) c.kv_lens.push_back(draw_device_length(draw));
  c.kv_heads = draw.one_in(3) ? draw.of({2, 3, 4, 8}) : 1 + draw.below(2);
  c.q_heads = c.kv_heads * (draw.one_in(3) ? 1 + draw.below(64) : draw.of({1, 1, 2, 3, 4, 4, 5, 7, 8, 8, 12, 16}));
  c.head_dim = draw.one_in(3) ? 32 + 8 * draw.below(29) : cuda::kHeadDims[draw.below(static_cast<int>(std::size(cuda::kHeadDims)))];
  c.head_dim_v = draw.one_in(5) ? 32 + 8 * draw.below(29) : c.head_dim;
  c.dtype = draw.of({DType::kBFloat16, DType::kFloat16});
  draw_layout(draw, c);
  c.q_len = draw.one_in(2) ? 1 : 1 + draw.below(batch <= 5 && draw.one_in(12) ? 90 : 16);
  if (batch > 0 && draw.one_in(4)) {
    c.q_len = 1;
    for (int seq = 0; seq < batch; ++seq) c.q_lens.push_back(draw.one_in(4) ? 0 : draw.below(17));
  }
  c.causal = !draw.one_in(4);
  if (batch > 0 && draw.one_in(2)) draw_rules(draw, c);
  if (draw.one_in(8)) c.scale = draw.of({0.5f, 0.03f, 1.0f});
  c.lse = draw.of({tools::CaseLse::kNatural, tools::CaseLse::kNatural, tools::CaseLse::kTwo, tools::CaseLse::kNone});
  if (draw.one_in(8)) c.spread = draw.of({0.1f, 10.0f, 100.0f, 1000.0f});
  draw_cut(draw, c, abilities.multiprocessors);
  // Bound the work of the reference; one problem in ten may be larger.
  const bool is_long = batch > 0 && draw.one_in(30);
  if (is_long) draw_long(draw, c);
  const double most = is_long ? 1e8 : draw.one_in(10) ? 1.5e7 : 1.5e6;
  if (work_of(c) > most && !draw.one_in(3)) c.q_heads = c.kv_heads * std::min(c.q_heads / c.kv_heads, 4);
  for (std::size_t seq = 0; work_of(c) > most && seq < c.kv_lens.size(); ++seq) c.kv_lens[seq] = std::min(c.kv_lens[seq], 100);
  if (work_of(c) > most) c.q_heads = c.kv_heads;
  return c;
}

inline Gaps draw_gaps(Draw& draw) { return {draw.of({0, 0, 1, 3, 4, 8}), draw.of({0, 1, 2, 8}), draw.of({0, 1, 5, 16}), draw.below(9)}; }

inline DeviceDraw draw_device_problem(int problem, const DeviceAbilities& abilities) {
  DeviceDraw all;
  all.problem = problem;
  all.drawn = draw_device_case(problem, abilities);
  Draw strides(0x300000000u + static_cast<std::uint64_t>(problem));
  all.respaced = strides.one_in(3);
  if (all.respaced) all.q = draw_gaps(strides), all.k = draw_gaps(strides), all.v = draw_gaps(strides), all.o = draw_gaps(strides);
  if (strides.one_in(4)) all.cpu_workers = 1 + strides.below(5);
  Draw call(0x400000000u + static_cast<std::uint64_t>(problem));
  all.path = call.below(64);
  all.programmatic_launch = call.one_in(4);
  all.drawn.batch_invariant = abilities.batch_invariant && call.one_in(3);
  all.drawn.check_data = call.one_in(4);
  return all;
}

}  // namespace leanattn::testing
