// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "backend.h"
#include "tools/build_info.h"
#include "tools/commands.h"
#include "tools/device.h"
#include "tools/options.h"
#include "tools/record.h"

namespace leanattn::tools {
namespace {

struct BenchSettings {
  TimingOptions timing;
  DeviceTimingOptions device_timing;
  bool small_pages = false;
};

// Everything that differs between two cases but the way they are run.
Case tensors_of(Case c) {
  const Case defaults;
  c.policy = defaults.policy;
  c.splits = defaults.splits;
  c.head_order = defaults.head_order;
  c.batch_invariant = defaults.batch_invariant;
  c.check_data = defaults.check_data;
  c.workers = defaults.workers;
  return c;
}

// Tensors, right values and floors of a case on its backend, kept while the next case differs only in how it is run.
class Workload {
 public:
  Workload(const Case& c, const RunSettings& settings, bool small_pages) : spec_(tensors_of(c)) {
    const bool gpu = settings.backend != "cpu" && backend_available(Backend::kCuda);
    const auto make_data = [&](int copies) { data_.emplace(spec_, CaseDataOptions{.copies = copies, .huge_pages = !small_pages}); };
    make_data(gpu ? 1 : copies_for(spec_));
    backend_ = chosen_backend(data_->problem(), c, settings);
    if (gpu && backend_ == Backend::kCpu) make_data(copies_for(spec_));
    validate(data_->problem(), run_options(c, settings, backend_));
    check_data(data_->problem());
    reference_ = compute_reference(data_->problem(), affordable_sample(spec_));
    if (backend_ == Backend::kCuda) device_.emplace(*data_, device_copies(data_->kv_bytes()));
  }

  bool serves(const Case& c, const RunSettings& settings) const {
    return spec_ == tensors_of(c) && backend_ == chosen_backend(data_->problem(), c, settings);
  }
  Backend backend() const { return backend_; }
  CaseData& data() { return *data_; }
  DeviceWorkload& device() { return *device_; }
  const Reference& reference() const { return reference_; }
  const std::vector<ReadFloor>& floors(int threads, double seconds) {
    if (floors_.empty() || floor_threads_ != threads) floors_ = make_floors(*data_, threads, seconds);
    floor_threads_ = threads;
    return floors_;
  }

 private:
  static int copies_for(const Case& c) {
    const double token_bytes = static_cast<double>(c.kv_heads) * (c.head_dim + c.head_dim_v) * (c.dtype == DType::kFloat32 ? 4 : 2);
    return cold_copies(static_cast<std::int64_t>(std::min(1e15, token_bytes * static_cast<double>(c.total_kv()))));
  }

  Case spec_;
  Backend backend_ = Backend::kCpu;
  std::optional<CaseData> data_;
  Reference reference_;
  std::optional<DeviceWorkload> device_;
  std::vector<ReadFloor> floors_;
  int floor_threads_ = 0;
};

// Checked first, then timed. `record` gets what its backend alone has to say.
struct Result {
  Accuracy accuracy;
  Timing timing;
};

Result run_on_cpu(Workload& workload, const Options& options, const BenchSettings& bench, Progress& progress, const std::string& label,
                  nlohmann::ordered_json& record) {
  Result result;
  progress.note(label + ", checking");
  result.accuracy = check_once(workload.data(), options, workload.reference());
  progress.note(label + ", finding the fastest reading");
  const std::vector<ReadFloor>& floors = workload.floors(thread_count(options), std::min(1.0, bench.timing.min_seconds));
  progress.note(label + ", measuring");
  result.timing = time_pairs(workload.data(), options, floors, bench.timing);
  record["floor_reading"] = variant_name(floors.front().variant());
  record["copies"] = workload.data().copies();
  record["huge_pages"] = !bench.small_pages;
  return result;
}

Result run_on_gpu(Workload& workload, const Options& options, const BenchSettings& bench, nlohmann::ordered_json& record) {
  Result result;
  result.accuracy = workload.device().check(options, workload.reference());
  const DeviceTiming timing = workload.device().time(options, bench.device_timing);
  result.timing = timing.timing;
  if (!timing.fault.empty()) {
    result.accuracy.ok = false;
    result.accuracy.fault = timing.fault;
  }
  record["floor_reading"] = timing.floor;
  record["copies"] = timing.copies;
  record["calls"] = timing.calls;
  return result;
}

void print_header(Backend backend, const BenchSettings& settings) {
  const bool gpu = backend == Backend::kCuda;
  fmt::print("{}, {}{}\n", gpu ? cuda::device_name() : cpu_model(), commit(), !gpu && settings.small_pages ? ", small pages" : "");
  fmt::print("{:>9} {:>10} {:>10} {:>10} {:>10} {:>8} {:>7} {:>7}  {}\n", "KV MB", "floor µs", "median µs", "p10", "p90", "÷ floor", "GB/s",
             "err÷tol", gpu ? "dtype policy path blocks case" : "dtype policy threads case");
  std::fflush(stdout);
}

void print_row(const Case& c, const Options& options, const Result& result, std::int64_t kv_bytes) {
  const Timing& timing = result.timing;
  const Accuracy& accuracy = result.accuracy;
  const int digits = options.backend == Backend::kCuda ? 2 : 1;
  const std::string workers =
      options.backend == Backend::kCuda
          ? fmt::format("{}{} {}", cuda_path_name(options), options.programmatic_launch ? "+pdl" : "", worker_count(options))
          : fmt::format("{}", thread_count(options));
  fmt::print("{:>9.2f} {:>10.{}f} {:>10.{}f} {:>10.{}f} {:>10.{}f} {:>8.3f} {:>7.2f} {:>7.3f}  {} {} {} {}\n",
             static_cast<double>(kv_bytes) * 1e-6, timing.floor_us, digits, timing.us, digits, timing.p10_us, digits, timing.p90_us, digits,
             timing.ratio, gb_per_s(kv_bytes, timing.us), accuracy.ratio, dtype_name(c.dtype), policy_name(c.policy, c.splits), workers,
             to_string(c));
  if (!accuracy.ok) fmt::print("    FAIL: {}\n", accuracy.fault.empty() ? accuracy.where : accuracy.fault);
  if (const std::string busy = busy_sentence(timing.floor_times_us); !busy.empty()) fmt::print("    {}\n", busy);
  std::fflush(stdout);
}

int run_bench(const CaseChoice& choice, RunSettings settings, const BenchSettings& bench) {
  check_settings(settings);
  const std::vector<Case> cases = expand(chosen_cases(choice), settings);
  if (cases.empty()) throw CaseError("bench: expected a case, or --cases FILE such as bench/table.txt");
  Progress progress;
  std::unique_ptr<Workload> workload;
  std::optional<Backend> header;
  bool all_right = true;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    const std::string label = fmt::format("case {} of {}: {}", i + 1, cases.size(), to_string(c));
    progress.note(label);
    if (!workload || !workload->serves(c, settings)) {
      workload.reset();  // its memory first
      workload = std::make_unique<Workload>(c, settings, bench.small_pages);
    }
    const Options options = run_options(c, settings, workload->backend());
    const std::int64_t kv_bytes = workload->data().kv_bytes();
    nlohmann::ordered_json details;
    const Result result = options.backend == Backend::kCuda ? run_on_gpu(*workload, options, bench, details)
                                                            : run_on_cpu(*workload, options, bench, progress, label, details);
    all_right = all_right && result.accuracy.ok;
    if (!settings.json) {
      if (header != options.backend) print_header(options.backend, bench);
      header = options.backend;
      print_row(c, options, result, kv_bytes);
      continue;
    }
    nlohmann::ordered_json record = case_record(c, options);
    if (options.backend == Backend::kCuda) add_table_words(record, c, result.timing, result.accuracy, kv_bytes);
    add_timing(record, result.timing, kv_bytes);
    record.update(details);
    add_accuracy(record, result.accuracy);
    add_origin(record, options);
    fmt::print("{}\n", record.dump());
    std::fflush(stdout);
  }
  return all_right ? kExitOk : kExitFailed;
}

}  // namespace

Command add_bench(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "bench",
      "Check each case, then time it in pairs with the read floor: the time to read as many bytes on the same threads or the same GPU, "
      "from cold caches. ÷ floor is the median over the pairs. On a GPU: graphs of at least four calls over 256 MB of rotating K and V");
  auto choice = std::make_shared<CaseChoice>();
  auto settings = std::make_shared<RunSettings>();
  auto bench = std::make_shared<BenchSettings>();
  add_case_options(*command, *choice);
  add_run_options(*command, *settings);
  command->add_option("--min-seconds", bench->timing.min_seconds, "CPU: measure each case for at least this long")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 3600.0));
  command->add_option("--pairs", bench->timing.min_pairs, "CPU: and at least this many pairs of floor and kernel")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000000));
  command->add_option("--max-seconds", bench->timing.max_seconds, "CPU: but stop here, from three pairs on")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 3600.0));
  command->add_flag("--small-pages", bench->small_pages, "CPU: do not ask the system for huge pages");
  command->add_option("--replays", bench->device_timing.replays, "GPU: replays of the graphs of floor and kernel, in turn")
      ->capture_default_str()
      ->check(CLI::Range(3, 1000000));
  return [=] { return run_bench(*choice, *settings, *bench); };
}

}  // namespace leanattn::tools
