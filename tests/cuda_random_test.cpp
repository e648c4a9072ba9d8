// SPDX-License-Identifier: Apache-2.0
// Seeded random problems on the GPU, all options that its kernels take mixed (cuda_draw.h): every one against float64, one in four against
// the CPU backend as well. Host threads share the problems; each makes its own, decodes it and judges it. A failure prints the case line,
// what that line does not say, and how to run the problem alone.
//
//   LEANATTN_TEST_PROBLEMS=N       how many, 5,000 by default
//   LEANATTN_TEST_FIRST_PROBLEM=N  the number of the first, 0 by default
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "cuda_decoding.h"
#include "cuda_draw.h"
#include "executors.h"

namespace leanattn::testing {
namespace {

constexpr int kDeviceProblems = 5000;
constexpr int kMostFailures = 5;  // a fault fails many problems: a few say enough

// LEANATTN_TEST_PROBLEMS as on the CPU, with a default of its own.
int device_problems() { return std::getenv("LEANATTN_TEST_PROBLEMS") ? test_problems() : kDeviceProblems; }

int first_problem() {
  const char* text = std::getenv("LEANATTN_TEST_FIRST_PROBLEM");
  return text ? std::max(0, std::atoi(text)) : 0;
}

DeviceAbilities device_abilities() {
  const CaseData data(parse_case("1 1 1 64 1"));
  Options invariant = device_options({}, 0);
  invariant.batch_invariant = true;
  return {multiprocessors(), device_refusal(data.problem(), invariant).empty()};
}

Options options_of(const DeviceDraw& draw) {
  Options options = device_options({draw.drawn.policy, draw.drawn.splits, draw.drawn.workers}, static_cast<std::size_t>(draw.path));
  options.head_order = draw.drawn.head_order;
  options.batch_invariant = draw.drawn.batch_invariant;
  options.programmatic_launch = draw.programmatic_launch;
  options.check_data = draw.drawn.check_data;
  return options;
}

Bits cpu_bits(const DeviceDraw& draw, const Problem& host) {
  Options options;
  options.policy = draw.drawn.policy;
  options.splits = draw.drawn.splits;
  options.batch_invariant = draw.drawn.batch_invariant;
  options.workers = draw.cpu_workers;
  options.executor = executors()[0].executor;
  decode_alone(host, options);
  return output_bits(host);
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

struct Verdict {
  std::string fault;    // empty: right
  bool missed = false;  // beyond its own tolerance and within that of its twins
};

Verdict judge(const DeviceDraw& draw) {
  const tools::CaseDataOptions alone{.copies = 1, .huge_pages = false, .threads = 1};
  const Sample on_this_thread{.kv_heads_per_seq = 0, .threads = 1};
  const CaseData data(draw.drawn, alone);
  Problem host = data.problem();
  std::unique_ptr<Respaced> respaced;
  if (draw.respaced) {
    respaced = std::make_unique<Respaced>(host, draw.q, draw.k, draw.v, draw.o);
    host = respaced->problem;
  }
  const Reference reference = compute_reference(host, on_this_thread);
  const Bits cpu = draw.cpu_workers > 0 ? cpu_bits(draw, host) : Bits{};
  const Options options = options_of(draw);
  DeviceProblem device(host);
  Verdict verdict;
  const auto right = is_right(host, device, options, reference);
  if (!right) {
    verdict.missed = is_right(host, device, options, with_twins(reference, draw.drawn, on_this_thread));
    if (!verdict.missed) verdict.fault = right.message();
  }
  if (verdict.fault.empty() && !cpu.empty()) {
    verdict.fault = disagreement(host, reference, cpu, output_bits(host));
    if (!verdict.fault.empty()) verdict.fault = "against the CPU: " + verdict.fault + "\n  with " + device_text_of(options);
  }
  return verdict;
}

// That the draw reaches every option.
void count(const DeviceDraw& draw, const Options& options, std::map<std::string, int>& seen) {
  const Case& c = draw.drawn;
  ++seen["policy " + tools::policy_name(c.policy, 0)];
  ++seen[std::string("path ") + options.cuda_path];
  ++seen["layout " + std::to_string(static_cast<int>(c.layout))];
  ++seen["head order " + std::to_string(static_cast<int>(c.head_order))];
  ++seen["LSE " + std::to_string(static_cast<int>(c.lse))];
  ++seen["columns " + std::to_string(*std::find_if(std::begin(cuda::kHeadDims), std::end(cuda::kHeadDims),
                                                   [&](int columns) { return columns >= std::max(c.head_dim, c.head_dim_v); }))];
  ++seen["head_dim " + std::to_string(c.head_dim)];
  seen["head_dim_v"] += c.head_dim_v != c.head_dim;
  seen["interleaved"] += c.interleaved;
  seen["strided"] += c.strided;
  seen["other strides"] += draw.respaced;
  seen["workers"] += c.workers > 0;
  seen["splits"] += c.splits > 0;
  seen["not causal"] += !c.causal;
  seen["ragged q_len"] += !c.q_lens.empty();
  seen["empty batch"] += c.batch() == 0;
  seen["empty sequence"] += std::count(c.kv_lens.begin(), c.kv_lens.end(), 0) > 0;
  seen["tree"] += c.tree_tokens > 0;
  seen["tree of more than 64"] += c.tree_tokens > 64;
  seen["window"] += c.window_left >= 0;
  seen["soft-cap"] += c.softcap > 0.0f;
  seen["ALiBi"] += c.alibi;
  seen["sink"] += c.sink != tools::CaseSink::kNone;
  seen["window, tree, soft-cap, ALiBi and sink"] +=
      c.tree_tokens > 0 && c.window_left >= 0 && c.softcap > 0.0f && c.alibi && c.sink != tools::CaseSink::kNone;
  seen["programmatic launch"] += draw.programmatic_launch;
  seen["batch of ten or more"] += c.batch() >= 10;
  seen["20K"] += std::any_of(c.kv_lens.begin(), c.kv_lens.end(), [](int len) { return len >= 16384; });
}

class CudaRandom : public CudaTest {};

TEST_F(CudaRandom, ProblemsAgainstTheReferenceAndTheCpuLong) {
  const int problems = device_problems(), first = first_problem();
  const int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const DeviceAbilities abilities = device_abilities();
  std::atomic<int> next{0}, failures{0}, misses{0}, compared_with_cpu{0};
  std::map<std::string, int> seen;
  std::vector<std::string> missed_cases;
  std::mutex mutex;
  const auto begin = std::chrono::steady_clock::now();
  const auto run = [&] {
    const DevicePool pool;
    for (int i = next++; i < problems && failures < kMostFailures; i = next++) {
      const DeviceDraw draw = draw_device_problem(first + i, abilities);
      Verdict verdict;
      try {
        verdict = judge(draw);
      } catch (const std::exception& error) {
        verdict.fault = error.what();
      }
      misses += verdict.missed;
      compared_with_cpu += draw.cpu_workers > 0;
      failures += !verdict.fault.empty();
      const std::lock_guard lock(mutex);
      if (verdict.missed && missed_cases.size() < 10) missed_cases.push_back(std::to_string(draw.problem) + ": " + to_string(draw.drawn));
      count(draw, options_of(draw), seen);
      if (abilities.batch_invariant) seen["batch_invariant"] += draw.drawn.batch_invariant;
      seen["check_data"] += draw.drawn.check_data;
      EXPECT_EQ(verdict.fault, "") << "problem " << draw.problem << (draw.respaced ? ", with other strides" : "")
                                   << "\n  case: " << to_string(draw.drawn) << "\n  alone: LEANATTN_TEST_FIRST_PROBLEM=" << draw.problem
                                   << " LEANATTN_TEST_PROBLEMS=1 leanattn_cuda_tests --gtest_filter=CudaRandom.*";
    }
  };
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) helpers.emplace_back(run);
  run();
  for (std::thread& helper : helpers) helper.join();
  std::printf(
      "%d problems from %d on, %d of them against the CPU, in %.0f s on %d threads; %d were beyond their own tolerance and within that "
      "of their twins\n",
      problems, first, compared_with_cpu.load(), std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), threads,
      misses.load());
  EXPECT_LE(misses, problems / 1000 + 1);
  for (const std::string& line : missed_cases) std::printf("  beyond its own tolerance: problem %s\n", line.c_str());
  if (problems < 2000) return;
  EXPECT_EQ(std::count_if(seen.begin(), seen.end(), [](const auto& one) { return one.first.starts_with("head_dim "); }), 29);
  for (const auto& [what, times] : seen) EXPECT_GT(times, 0) << what;
}

}  // namespace
}  // namespace leanattn::testing
