// SPDX-License-Identifier: Apache-2.0
// Seeded random problems, all options mixed, against the reference and its tolerance, with poison and canaries. A failure prints the case
// line that `leanattn check` takes, and what that line does not say: executor and instruction set.
#include <algorithm>
#include <map>

#include "decoding.h"
#include "draw.h"
#include "executors.h"

namespace leanattn::testing {
namespace {

// A short length most of the time, one round a border now and then, seldom a long one.
int draw_length(Draw& draw) {
  if (draw.one_in(8)) return 0;
  if (draw.one_in(3)) return std::max(0, draw.of({16, 32, 48, 64, 128, 256}) + draw.below(3) - 1);
  return draw.one_in(12) ? draw.below(1500) : 1 + draw.below(130);
}

void draw_rows(Draw& draw, Case& c) {
  const int queries = draw.below(10);
  c.q_len = queries < 5 ? 1 : queries < 9 ? 1 + draw.below(9) : 1 + draw.below(90);
  if (draw.one_in(4)) {
    c.q_len = 1;
    const int most = draw.one_in(10) ? 80 : 9;
    for (int seq = 0; seq < c.batch(); ++seq) c.q_lens.push_back(draw.below(most));
  }
  if (c.max_q_len() > 0 && draw.one_in(c.max_q_len() > 1 ? 3 : 10)) {
    c.tree_tokens = c.max_q_len();
    if (c.q_lens.empty()) c.q_len = c.tree_tokens;
  }
  c.causal = !draw.one_in(4);
  if (draw.one_in(3)) c.window_left = draw.of({0, 1, 5, 15, 16, 17, 63, 64, 100, 300, 2000});
}

void draw_layout(Draw& draw, Case& c) {
  c.layout = draw.of({CaseLayout::kContiguous, CaseLayout::kHeadMajor, CaseLayout::kRagged, CaseLayout::kPaged, CaseLayout::kPaged});
  if (c.layout == CaseLayout::kPaged) c.page_size = draw.of({1, 2, 3, 8, 16, 16, 17, 64, 128, draw.one_in(4) ? 1000 : 5});
  c.interleaved = draw.one_in(4);
  c.strided = draw.one_in(3);
}

void draw_cut(Draw& draw, Case& c) {
  c.policy = draw.of({Policy::kLean, Policy::kLean, Policy::kFa2, Policy::kFlashDecoding});
  if (c.policy == Policy::kFlashDecoding && !draw.one_in(3)) c.splits = 1 + draw.below(12);
  c.head_order = draw.of({HeadOrder::kAuto, HeadOrder::kAlong, HeadOrder::kBeside});
  c.batch_invariant = draw.one_in(3);
  c.workers = 1 + draw.below(9);
}

Case draw_case(int problem) {
  Draw draw(static_cast<std::uint64_t>(problem) + 1);
  Case c;
  c.seed = static_cast<std::uint64_t>(problem) + 1;
  const int batch = draw.one_in(40) ? 0 : draw.one_in(30) ? 10 + draw.below(30) : 1 + draw.below(4);
  for (int seq = 0; seq < batch; ++seq) c.kv_lens.push_back(draw_length(draw));
  c.kv_heads = draw.one_in(4) ? draw.of({2, 3, 4, 8}) : 1 + draw.below(2);
  c.q_heads = c.kv_heads * draw.of({1, 1, 2, 3, 4, 4, 5, 7, 8, 12, 16, 17});
  c.head_dim = draw.one_in(2) ? draw.of({64, 128}) : 32 + 8 * draw.below(draw.one_in(2) ? 29 : 9);
  c.head_dim_v = draw.one_in(4) ? 32 + 8 * draw.below(29) : c.head_dim;
  c.dtype = draw.of({DType::kBFloat16, DType::kFloat16, DType::kFloat32});
  draw_layout(draw, c);
  if (batch > 0) draw_rows(draw, c);
  if (draw.one_in(8)) c.scale = draw.of({0.5f, 0.03f, 1.0f});
  if (draw.one_in(4)) c.softcap = draw.of({1.0f, 20.0f, 30.0f, 50.0f});
  c.alibi = draw.one_in(4);
  c.sink = draw.of({tools::CaseSink::kNone, tools::CaseSink::kNone, tools::CaseSink::kVaried, tools::CaseSink::kValue});
  if (c.sink == tools::CaseSink::kValue) c.sink_value = draw.of({-INFINITY, 0.0f, -5.0f, 88.0f, 1e4f});
  c.lse = draw.of({tools::CaseLse::kNatural, tools::CaseLse::kNatural, tools::CaseLse::kTwo, tools::CaseLse::kNone});
  if (draw.one_in(8)) c.spread = draw.of({0.1f, 10.0f, 100.0f, 1000.0f});
  draw_cut(draw, c);
  // Bound the work of a problem, so that ten thousand of them take a minute.
  constexpr double kMostWork = 2e5;
  const auto work = [&c] {
    double rows = 0.0;
    for (int seq = 0; seq < c.batch(); ++seq) rows += static_cast<double>(c.kv_lens[static_cast<std::size_t>(seq)]) * c.seq_q_len(seq);
    return rows * c.q_heads * (c.head_dim + c.head_dim_v);
  };
  for (std::size_t seq = 0; work() > kMostWork && seq < c.kv_lens.size(); ++seq) c.kv_lens[seq] = std::min(c.kv_lens[seq], 40);
  if (work() > kMostWork) c.q_heads = c.kv_heads;
  return c;
}

// misses counts the problems that needed their twins.
::testing::AssertionResult is_right_among_twins(CaseData& data, const Options& options, const Reference& reference, int& misses) {
  const auto first = is_right(data, options, reference);
  if (first) return first;
  ++misses;
  const auto second = is_right(data, options, with_twins(reference, data.spec(), {.kv_heads_per_seq = 0, .threads = 1}));
  return second ? second : first;
}

TEST(Random, ProblemsAgainstTheReference) {
  const int problems = test_problems();
  int failures = 0, misses = 0;
  std::map<std::string, int> seen;  // that the draw reaches every option
  for (int problem = 0; problem < problems && failures < 5; ++problem) {
    const Case drawn = draw_case(problem);
    const std::string line = to_string(drawn);
    ASSERT_EQ(parse_case(line), drawn) << line;
    CaseData data(drawn, {.copies = 1, .huge_pages = false, .threads = 1});
    Draw draw(0x100000000u + static_cast<std::uint64_t>(problem));
    const int kind = draw.below(8);
    Options options = with_isa(data.options(), static_cast<std::size_t>(problem));
    const NamedExecutor& executor = executors()[static_cast<std::size_t>(kind) % executors().size()];
    if (kind < static_cast<int>(executors().size())) options.executor = executor.executor;
    const auto right =
        is_right_among_twins(data, options, compute_reference(data.problem(), {.kv_heads_per_seq = 0, .threads = 1}), misses);
    EXPECT_TRUE(right) << "problem " << problem << ", executor " << (options.executor.run ? executor.name : "none");
    failures += !right;
    ++seen["policy " + tools::policy_name(drawn.policy, 0)];
    ++seen[std::string("isa ") + options.cpu_isa];
    ++seen["layout " + std::to_string(static_cast<int>(drawn.layout))];
    seen["tree"] += drawn.tree_tokens > 0;
    seen["tree of more than 64"] += drawn.tree_tokens > 64;
    seen["window"] += drawn.window_left >= 0;
    seen["ragged q_len"] += !drawn.q_lens.empty();
    for (int seq = 0; seq < drawn.batch(); ++seq)
      seen["q_len > kv_len"] += drawn.seq_q_len(seq) > drawn.kv_lens[static_cast<std::size_t>(seq)];
  }
  // Luck is rare: more than one in a thousand would be a kernel that errs more than the naive computation.
  std::printf("%d of %d problems were beyond their own tolerance and within that of their twins\n", misses, problems);
  EXPECT_LE(misses, problems / 1000 + 1);
  if (problems < 300) return;
  for (const auto& [what, count] : seen) EXPECT_GT(count, 0) << what;
}

}  // namespace
}  // namespace leanattn::testing
