// SPDX-License-Identifier: Apache-2.0
// Running a case: once against the reference, and many times against the clock and the read floor.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "reference.h"
#include "tools/case_data.h"
#include "tools/floor.h"

namespace leanattn::tools {

// What the command line says over the cases.
struct RunSettings {
  std::vector<std::string> policies;  // empty: each case's own
  std::vector<std::string> dtypes;    // empty: each case's own
  std::vector<int> threads;           // empty: each case's own
  std::string backend = "auto";
  std::string isa;  // empty: the fastest
  // Of a GPU.
  std::string cuda_path;  // empty: the fastest
  int thread_blocks = 0;  // 0: each case's own workers
  bool programmatic_launch = false;
  bool json = false;
};

// One combination of the above. isa and cuda_path must outlive the options. backend is kCpu or kCuda.
Options run_options(const Case& c, const RunSettings& settings, Backend backend = Backend::kCpu);
// kCpu or kCuda, as the settings say; auto: the GPU where there is one and the library takes the problem there, else the CPU.
Backend chosen_backend(const Problem& problem, const Case& c, const RunSettings& settings);
const char* backend_name(Backend backend);
// The cases times policies × dtypes × threads.
std::vector<Case> expand(const std::vector<Case>& cases, const RunSettings& settings);
// Stretches of the CPU's cut, thread blocks of the GPU's.
int worker_count(const Options& options);
// Threads that run the workers: no more than the machine offers.
int thread_count(const Options& options);
// values is sorted and not empty; between neighbours by proportion.
double percentile(const std::vector<double>& values, double share);
std::string isa_name(const Options& options);
std::string cuda_path_name(const Options& options);

struct Accuracy {
  bool ok = false;
  std::string refused;          // what the library said instead of an answer
  bool skipped = false;         // refused by the GPU's backend, which does not have that feature
  double relative_error = 0.0;  // ‖O − right‖ ÷ ‖right‖ over the rows compared
  double error = 0.0;           // of the element nearest to its tolerance, or furthest beyond it
  double tolerance = 0.0;
  double ratio = 0.0;
  std::string where;          // "o of seq 1, token 0, q_head 3, dim 17"; empty where all is exact
  std::string fault;          // a canary that was overwritten
  std::int64_t rows = 0;      // compared
  std::int64_t all_rows = 0;  // of the case
};

// All rows where that takes a few seconds at most, else all rows of as many KV heads of each sequence as do.
Sample affordable_sample(const Case& c, int threads = 0);
// What stands in the case's outputs, compared, and its canaries.
Accuracy judge(const CaseData& data, const Reference& reference);
// One call on the CPU on poisoned outputs and workspace, judged. Throws leanattn::Error.
Accuracy check_once(CaseData& data, const Options& options, const Reference& reference);

struct TimingOptions {
  double min_seconds = 1.0;
  int min_pairs = 15;
  double max_seconds = 60.0;  // stops short of min_pairs
};

struct Timing {
  int pairs = 0;
  double us = 0.0;  // medians and percentiles of the kernel
  double p10_us = 0.0;
  double p90_us = 0.0;
  double floor_us = 0.0;               // median
  std::vector<double> floor_times_us;  // all, sorted
  double ratio = 0.0;                  // median over the pairs of time ÷ floor
  double ratio_of_medians = 0.0;       // us ÷ floor_us
};

// A sentence where the read floor's times, sorted, lie so far apart that other programs must be using the machine; else empty.
std::string busy_sentence(const std::vector<double>& floor_times_us);

// Times of pairs, in order of time of day.
Timing summarize(std::vector<double> kernel_times_us, std::vector<double> floor_times_us);

// Copies of K and V that make a cold cache: enough to push each other out of the last-level cache, an odd number, so that floor and
// kernel take turns on each.
int cold_copies(std::int64_t kv_bytes);
// The floors of every copy of the case, with the fastest variant.
std::vector<ReadFloor> make_floors(const CaseData& data, int threads, double seconds);
// Pairs of floor and kernel over the copies in turn.
Timing time_pairs(CaseData& data, const Options& options, const std::vector<ReadFloor>& floors, const TimingOptions& timing);

// Lines on stderr, none in the first two seconds and at most one every two seconds.
class Progress {
 public:
  void note(const std::string& text);

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace leanattn::tools
