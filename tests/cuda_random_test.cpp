// SPDX-License-Identifier: Apache-2.0
// Seeded random problems on the GPU, all options that its kernels take mixed, against float64 and against the CPU backend. A failure prints
// the case line, and what that line does not say: strides, kernel path, launch.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <thread>

#include "cuda_decoding.h"
#include "draw.h"
#include "executors.h"
#include "respaced.h"

namespace leanattn::testing {
namespace {

constexpr int kDeviceProblems = 5000;

// LEANATTN_TEST_PROBLEMS as on the CPU, with a default of its own.
int device_problems() { return std::getenv("LEANATTN_TEST_PROBLEMS") ? test_problems() : kDeviceProblems; }

int draw_length(Draw& draw) {
  if (draw.one_in(8)) return 0;
  if (draw.one_in(3)) return std::max(0, draw.of({1, 16, 32, 64, 128, 256, 512, 1024}) + draw.below(3) - 1);
  return draw.one_in(5) ? draw.below(3001) : 1 + draw.below(300);
}

void draw_layout(Draw& draw, Case& c) {
  c.layout = draw.of({CaseLayout::kContiguous, CaseLayout::kHeadMajor, CaseLayout::kRagged, CaseLayout::kPaged, CaseLayout::kPaged});
  if (c.layout == CaseLayout::kPaged) {
    c.page_size = draw.one_in(4) ? 1 + draw.below(1000) : draw.of({1, 2, 3, 8, 16, 16, 17, 32, 64, 128, 256, 1000});
  }
  c.interleaved = draw.one_in(4);
  c.strided = draw.one_in(3);
}

void draw_cut(Draw& draw, Case& c) {
  c.policy = draw.of({Policy::kLean, Policy::kLean, Policy::kLean, Policy::kFa2, Policy::kFlashDecoding, Policy::kFlashDecoding});
  if (c.policy == Policy::kFlashDecoding && !draw.one_in(3)) c.splits = draw.one_in(8) ? 1 + draw.below(200) : 1 + draw.below(12);
  c.head_order = draw.of({HeadOrder::kAuto, HeadOrder::kAuto, HeadOrder::kAlong, HeadOrder::kBeside});
  if (draw.one_in(2)) c.workers = 1 + draw.below(draw.one_in(2) ? 9 : multiprocessors());
}

// One problem in thirty has a long sequence, and less of everything else.
void draw_long(Draw& draw, Case& c) {
  c.kv_lens.resize(static_cast<std::size_t>(1 + draw.below(3)), 70);
  c.kv_lens[static_cast<std::size_t>(draw.below(c.batch()))] = draw.of({20000, 20480, 16385, 9999});
  c.kv_heads = 1 + draw.below(2);
  c.q_heads = c.kv_heads * (1 + draw.below(3));
  c.q_lens.clear();
  c.q_len = 1;
  c.tree_tokens = std::min(c.tree_tokens, 1);
}

double work_of(const Case& c) {
  double rows = 0.0;
  for (int seq = 0; seq < c.batch(); ++seq) rows += static_cast<double>(c.kv_lens[static_cast<std::size_t>(seq)]) * c.seq_q_len(seq);
  return rows * c.q_heads * (c.head_dim + c.head_dim_v);
}

// One problem in two has none of them.
void draw_rules(Draw& draw, Case& c) {
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

Case draw_device_case(int problem) {
  Draw draw(0x200000000u + static_cast<std::uint64_t>(problem));
  Case c;
  c.seed = static_cast<std::uint64_t>(problem) + 1;
  const int batch = draw.one_in(60) ? 0 : draw.one_in(12) ? 10 + draw.below(31) : 1 + draw.below(5);
  for (int seq = 0; seq < batch; ++seq) c.kv_lens.push_back(draw_length(draw));
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
  draw_cut(draw, c);
  // Bound the work of the reference; one problem in ten may be larger.
  const bool is_long = batch > 0 && draw.one_in(30);
  if (is_long) draw_long(draw, c);
  const double most = is_long ? 1e8 : draw.one_in(10) ? 1.5e7 : 1.5e6;
  if (work_of(c) > most && !draw.one_in(3)) c.q_heads = c.kv_heads * std::min(c.q_heads / c.kv_heads, 4);
  for (std::size_t seq = 0; work_of(c) > most && seq < c.kv_lens.size(); ++seq) c.kv_lens[seq] = std::min(c.kv_lens[seq], 100);
  if (work_of(c) > most) c.q_heads = c.kv_heads;
  return c;
}

Gaps draw_gaps(Draw& draw) { return {draw.of({0, 0, 1, 3, 4, 8}), draw.of({0, 1, 2, 8}), draw.of({0, 1, 5, 16}), draw.below(9)}; }

struct Prepared {
  Case drawn;
  std::unique_ptr<CaseData> data;
  std::unique_ptr<Respaced> respaced;  // one problem in three
  Problem host;
  Reference reference;
  Bits cpu;  // one problem in four: the CPU backend's O and LSE
};

Prepared prepare(int problem) {
  Prepared one;
  one.drawn = draw_device_case(problem);
  one.data = std::make_unique<CaseData>(one.drawn, tools::CaseDataOptions{.copies = 1, .huge_pages = false, .threads = 1});
  one.host = one.data->problem();
  Draw draw(0x300000000u + static_cast<std::uint64_t>(problem));
  if (draw.one_in(3)) {
    one.respaced = std::make_unique<Respaced>(one.host, draw_gaps(draw), draw_gaps(draw), draw_gaps(draw), draw_gaps(draw));
    one.host = one.respaced->problem;
  }
  one.reference = compute_reference(one.host, {.kv_heads_per_seq = 0, .threads = 1});
  if (draw.one_in(4)) {
    Options options;
    options.policy = one.drawn.policy;
    options.splits = one.drawn.splits;
    options.workers = 1 + draw.below(5);
    options.executor = executors()[0].executor;
    decode_alone(one.host, options);
    one.cpu = output_bits(one.host);
  }
  return one;
}

Options options_of_problem(int problem, const Case& drawn) {
  Draw draw(0x400000000u + static_cast<std::uint64_t>(problem));
  Options options = device_options({drawn.policy, drawn.splits, drawn.workers}, static_cast<std::size_t>(draw.below(64)));
  options.head_order = drawn.head_order;
  options.programmatic_launch = draw.one_in(4);
  return options;
}

// Two backends, each within its tolerance of the right value, differ by no more than the sum.
std::string disagreement(const Problem& p, const Reference& reference, const Bits& cpu, const Bits& gpu) {
  const int fraction_bits = p.q_dtype == DType::kFloat16 ? 10 : 7, least = p.q_dtype == DType::kFloat16 ? -14 : -126;
  const auto ulp = [](double x, int least_exponent, int bits) {
    return std::ldexp(1.0, std::max(x == 0.0 ? least_exponent : std::ilogb(x), least_exponent) - bits);
  };
  const int dims = head_dim_v(p);
  std::size_t at = 0;
  for (int seq = 0; seq < p.batch; ++seq) {
    const auto s = static_cast<std::size_t>(seq);
    for (std::int64_t row = seq_q_begin(p, seq) * p.q_heads; row < (seq_q_begin(p, seq) + seq_q_len(p, seq)) * p.q_heads; ++row) {
      const bool keys = reference.row[static_cast<std::size_t>(row)] == Reference::kWithKeys;
      for (int i = 0; i < dims + (p.lse ? 1 : 0); ++i, ++at) {
        const bool is_lse = i == dims;
        if (!keys) {
          if (cpu[at] != gpu[at]) return "an empty row, seq " + std::to_string(seq);
          continue;
        }
        const double right = is_lse ? reference.lse[static_cast<std::size_t>(row)] : reference.o[static_cast<std::size_t>(row * dims + i)];
        const double naive = is_lse ? reference.naive_lse_error[s] : reference.naive_o_error[s];
        const double tolerance = 2.0 * (2.0 * naive + (is_lse ? ulp(right, -126, 23) : ulp(right, least, fraction_bits)));
        const double difference = std::abs(static_cast<double>(std::bit_cast<float>(cpu[at])) - std::bit_cast<float>(gpu[at]));
        if (!(difference <= tolerance)) {
          return std::string(is_lse ? "lse" : "o") + " of seq " + std::to_string(seq) + ", row " + std::to_string(row) + ", dim " +
                 std::to_string(i) + ": differ by " + std::to_string(difference) + ", tolerance " + std::to_string(tolerance);
        }
      }
    }
  }
  return {};
}

class CudaRandom : public CudaTest {};

TEST_F(CudaRandom, ProblemsAgainstTheReferenceAndTheCpuLong) {
  const int problems = device_problems();
  constexpr int kAhead = 256;  // problems made on all processors while none is decoded
  const int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  int failures = 0, misses = 0, compared_with_cpu = 0;
  std::map<std::string, int> seen;  // that the draw reaches every option
  for (int first = 0; first < problems && failures < 5; first += kAhead) {
    std::vector<Prepared> prepared(static_cast<std::size_t>(std::min(kAhead, problems - first)));
    tools::parallel_pieces(prepared.size(), 1, threads, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) prepared[i] = prepare(first + static_cast<int>(i));
    });
    for (std::size_t i = 0; i < prepared.size() && failures < 5; ++i) {
      Prepared& one = prepared[i];
      const int problem = first + static_cast<int>(i);
      const Options options = options_of_problem(problem, one.drawn);
      DeviceProblem device(one.host);
      auto right = is_right(one.host, device, options, one.reference);
      if (!right) {
        const auto again =
            is_right(one.host, device, options, with_twins(one.reference, one.drawn, {.kv_heads_per_seq = 0, .threads = threads}));
        misses += again;
        if (again) right = again;
      }
      if (right && !one.cpu.empty()) {
        ++compared_with_cpu;
        const std::string differ = disagreement(one.host, one.reference, one.cpu, output_bits(one.host));
        EXPECT_EQ(differ, "") << "problem " << problem << " against the CPU\n  case: " << to_string(one.drawn) << "\n  with "
                              << device_text_of(options);
        failures += !differ.empty();
      }
      EXPECT_TRUE(right) << "problem " << problem << (one.respaced ? ", with other strides" : "") << "\n  case: " << to_string(one.drawn);
      failures += !right;
      ++seen["policy " + tools::policy_name(one.drawn.policy, 0)];
      ++seen[std::string("path ") + options.cuda_path];
      ++seen["layout " + std::to_string(static_cast<int>(one.drawn.layout))];
      ++seen["variant " + std::to_string(cuda::padded_head_dim(one.drawn.head_dim, one.drawn.head_dim_v))];
      seen["padded head_dim"] += one.drawn.head_dim % 64 != 0;
      seen["head_dim_v"] += one.drawn.head_dim_v != one.drawn.head_dim;
      seen["other strides"] += one.respaced != nullptr;
      seen["ragged q_len"] += !one.drawn.q_lens.empty();
      seen["tree"] += one.drawn.tree_tokens > 0;
      seen["tree of more than 64"] += one.drawn.tree_tokens > 64;
      seen["window"] += one.drawn.window_left >= 0;
      seen["soft-cap"] += one.drawn.softcap > 0.0f;
      seen["ALiBi"] += one.drawn.alibi;
      seen["sink"] += one.drawn.sink != tools::CaseSink::kNone;
      seen["window, tree, soft-cap, ALiBi and sink"] += one.drawn.tree_tokens > 0 && one.drawn.window_left >= 0 &&
                                                        one.drawn.softcap > 0.0f && one.drawn.alibi &&
                                                        one.drawn.sink != tools::CaseSink::kNone;
      seen["programmatic launch"] += options.programmatic_launch;
      seen["batch of ten or more"] += one.drawn.batch() >= 10;
      seen["20K"] += std::any_of(one.drawn.kv_lens.begin(), one.drawn.kv_lens.end(), [](int len) { return len >= 16384; });
    }
  }
  std::printf("%d problems, %d of them against the CPU; %d were beyond their own tolerance and within that of their twins\n", problems,
              compared_with_cpu, misses);
  EXPECT_LE(misses, problems / 1000 + 1);
  if (problems < 300) return;
  for (const auto& [what, count] : seen) EXPECT_GT(count, 0) << what;
}

}  // namespace
}  // namespace leanattn::testing
