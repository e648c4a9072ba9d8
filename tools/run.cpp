// SPDX-License-Identifier: Apache-2.0
#include "tools/run.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "problem_view.h"
#include "tools/build_info.h"
#include "tools/device.h"

namespace leanattn::tools {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return percentile(values, 0.5);
}

std::string place(const Worst& worst, const char* tensor) {
  std::string text = fmt::format("{} of seq {}, token {}, q_head {}", tensor, worst.seq, worst.token, worst.q_head);
  return worst.dim < 0 ? text : text + fmt::format(", dim {}", worst.dim);
}

// ‖O − right‖ ÷ ‖right‖ over the rows that the reference has; 0 where all that is right is 0 and met.
double relative_error(const CaseData& data, const Reference& reference) {
  double off = 0.0, norm = 0.0;
  for (std::int64_t row = 0; row < data.rows(); ++row) {
    if (reference.row[static_cast<std::size_t>(row)] == Reference::kNotComputed) continue;
    for (std::int32_t column = 0; column < data.spec().head_dim_v; ++column) {
      const double right = reference.o[static_cast<std::size_t>(row * data.spec().head_dim_v + column)];
      const double difference = static_cast<double>(data.o_at(row, column)) - right;
      off += difference * difference;
      norm += right * right;
    }
  }
  return off == 0.0 ? 0.0 : std::sqrt(off / norm);
}

}  // namespace

double percentile(const std::vector<double>& values, double share) {
  const double at = share * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  const std::size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

Options run_options(const Case& c, const RunSettings& settings, Backend backend) {
  Options options;
  options.policy = c.policy;
  options.splits = c.splits;
  options.head_order = c.head_order;
  options.batch_invariant = c.batch_invariant;
  options.workers = c.workers;
  options.backend = backend;
  if (backend == Backend::kCuda) {
    if (settings.thread_blocks > 0) options.workers = settings.thread_blocks;
    options.programmatic_launch = settings.programmatic_launch;
    options.check_data = c.check_data;
    options.cuda_path = settings.cuda_path.empty() ? nullptr : settings.cuda_path.c_str();
  } else {
    options.cpu_isa = settings.isa.empty() ? nullptr : settings.isa.c_str();
  }
  return options;
}

Backend chosen_backend(const Problem& problem, const Case& c, const RunSettings& settings) {
  if (settings.backend == "cpu") return Backend::kCpu;
  if (settings.backend == "cuda") return Backend::kCuda;
  if (!settings.isa.empty() || !settings.threads.empty() || !backend_available(Backend::kCuda)) return Backend::kCpu;
  try {
    validate(problem, run_options(c, settings, Backend::kCuda));
  } catch (const Error& error) {
    if (error.status() == Status::kUnsupported) return Backend::kCpu;
    throw;
  }
  return Backend::kCuda;
}

const char* backend_name(Backend backend) { return backend == Backend::kCuda ? "cuda" : "cpu"; }

std::vector<Case> expand(const std::vector<Case>& cases, const RunSettings& settings) {
  std::vector<Case> all;
  for (const Case& c : cases) {
    for (std::size_t d = 0; d < std::max<std::size_t>(1, settings.dtypes.size()); ++d) {
      for (std::size_t t = 0; t < std::max<std::size_t>(1, settings.threads.size()); ++t) {
        for (std::size_t p = 0; p < std::max<std::size_t>(1, settings.policies.size()); ++p) {
          Case one = c;
          if (!settings.dtypes.empty()) one.dtype = parse_dtype(settings.dtypes[d]);
          if (!settings.threads.empty()) one.workers = settings.threads[t];
          if (!settings.policies.empty()) parse_policy(settings.policies[p], one.policy, one.splits);
          all.push_back(one);
        }
      }
    }
  }
  return all;
}

int worker_count(const Options& options) {
  if (options.backend != Backend::kCuda) return options.workers > 0 ? options.workers : default_threads();
  const std::optional<Device> device = current_device();
  const int most = device ? device->multiprocessors : 0;
  return options.workers > 0 ? std::min(options.workers, most) : most;
}

int thread_count(const Options& options) { return std::min(worker_count(options), default_threads()); }

std::string isa_name(const Options& options) {
  if (options.cpu_isa) return options.cpu_isa;
  const std::vector<std::string> isas = cpu_isas();
  return isas.empty() ? "none" : isas.front();
}

std::string cuda_path_name(const Options& options) {
  if (options.cuda_path) return options.cuda_path;
  const std::vector<std::string> paths = cuda_paths();
  return paths.empty() ? "none" : paths.front();
}

Sample affordable_sample(const Case& c, int threads) {
  constexpr double kAffordable = 2e9;  // multiply-adds, before the factor that the reference takes for its naive orders
  double work = 0.0;
  for (std::int32_t seq = 0; seq < c.batch(); ++seq) {
    const double reach = c.window_left < 0 ? 2147483647.0 : static_cast<double>(c.window_left) + c.seq_q_len(seq);
    work += std::min<double>(c.kv_lens[static_cast<std::size_t>(seq)], reach) * c.seq_q_len(seq);
  }
  work *= static_cast<double>(c.q_heads) * (c.head_dim + c.head_dim_v);
  Sample sample;
  sample.threads = threads;
  if (work > kAffordable) {
    sample.kv_heads_per_seq = std::clamp(static_cast<int>(c.kv_heads * kAffordable / work), 1, static_cast<int>(c.kv_heads));
  }
  return sample;
}

Accuracy check_once(CaseData& data, const Options& options, const Reference& reference) {
  const Problem problem = data.problem();
  const std::span<std::byte> workspace = data.workspace(workspace_bytes(problem, options));
  data.reset_outputs();
  decode(problem, options, workspace);
  return judge(data, reference);
}

Accuracy judge(const CaseData& data, const Reference& reference) {
  const Comparison comparison = compare(data.problem(), reference);
  const bool lse_is_worse = comparison.lse.ratio > comparison.o.ratio;
  const Worst& worst = lse_is_worse ? comparison.lse : comparison.o;
  Accuracy accuracy;
  accuracy.error = worst.error;
  accuracy.tolerance = worst.tolerance;
  accuracy.ratio = worst.ratio;
  accuracy.rows = comparison.rows;
  accuracy.all_rows = data.rows();
  if (worst.seq >= 0) accuracy.where = place(worst, lse_is_worse ? "lse" : "o");
  accuracy.fault = data.canary_fault();
  accuracy.relative_error = relative_error(data, reference);
  accuracy.ok = comparison.ok() && accuracy.fault.empty() && (accuracy.rows > 0 || accuracy.all_rows == 0);
  return accuracy;
}

int cold_copies(std::int64_t kv_bytes) {
  std::int64_t wanted = std::int64_t{256} << 20;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  wanted = std::clamp<std::int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE) * 5 / 4, wanted, std::int64_t{1} << 30);
#endif
  if (kv_bytes <= 0 || kv_bytes >= wanted) return 1;
  return static_cast<int>(std::min<std::int64_t>((wanted + kv_bytes - 1) / kv_bytes, 1024)) | 1;
}

std::vector<ReadFloor> make_floors(const CaseData& data, int threads, double seconds) {
  std::vector<ReadFloor> floors;
  for (int copy = 0; copy < data.copies(); ++copy) floors.emplace_back(data.problem(copy), threads);
  fastest_variant(floors, seconds);
  return floors;
}

Timing time_pairs(CaseData& data, const Options& options, const std::vector<ReadFloor>& floors, const TimingOptions& timing) {
  std::vector<Problem> problems;
  for (int copy = 0; copy < data.copies(); ++copy) problems.push_back(data.problem(copy));
  const std::span<std::byte> workspace = data.workspace(workspace_bytes(problems.front(), options));
  std::size_t turn = 0;
  const auto kernel_us = [&] {
    const Problem& problem = problems[turn++ % problems.size()];
    const auto begin = Clock::now();
    decode(problem, options, workspace);
    return seconds_since(begin) * 1e6;
  };
  const auto floor_us = [&] { return floors[turn++ % floors.size()].read_us(); };
  for (int warm = 0; warm < 2; ++warm) {
    floor_us();
    kernel_us();
  }
  std::vector<double> kernel_times, floor_times;
  const auto begin = Clock::now();
  for (;;) {
    floor_times.push_back(floor_us());
    kernel_times.push_back(kernel_us());
    const double seconds = seconds_since(begin);
    const bool enough = seconds >= timing.min_seconds && static_cast<int>(kernel_times.size()) >= timing.min_pairs;
    if (enough || (seconds >= timing.max_seconds && kernel_times.size() >= 3)) break;
  }
  return summarize(std::move(kernel_times), std::move(floor_times));
}

Timing summarize(std::vector<double> kernel_times, std::vector<double> floor_times) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < kernel_times.size(); ++i) ratios.push_back(kernel_times[i] / floor_times[i]);
  Timing result;
  result.pairs = static_cast<int>(ratios.size());
  result.ratio = median(std::move(ratios));
  std::sort(kernel_times.begin(), kernel_times.end());
  result.us = percentile(kernel_times, 0.5);
  result.p10_us = percentile(kernel_times, 0.1);
  result.p90_us = percentile(kernel_times, 0.9);
  std::sort(floor_times.begin(), floor_times.end());
  result.floor_us = percentile(floor_times, 0.5);
  result.floor_times_us = std::move(floor_times);
  result.ratio_of_medians = result.us / result.floor_us;
  return result;
}

std::string busy_sentence(const std::vector<double>& floor_times_us) {
  constexpr double kBusySpread = 0.25;  // (p90 − p10) ÷ median from which the times say little
  const double spread = percentile(floor_times_us, 0.9) - percentile(floor_times_us, 0.1);
  if (spread <= kBusySpread * percentile(floor_times_us, 0.5)) return {};
  return "this machine is busy: times are not comparable";
}

void Progress::note(const std::string& text) {
  if (seconds_since(last_) < 2.0) return;
  fmt::print(stderr, "… {}\n", text);
  std::fflush(stderr);
  last_ = Clock::now();
}

}  // namespace leanattn::tools
