// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tools/build_info.h"
#include "tools/commands.h"
#include "tools/options.h"
#include "tools/record.h"

namespace leanattn::tools {
namespace {

struct BenchSettings {
  TimingOptions timing;
  bool small_pages = false;
};

// Everything that differs between two cases but the way they are run.
Case tensors_of(Case c) {
  const Case defaults;
  c.policy = defaults.policy;
  c.splits = defaults.splits;
  c.head_order = defaults.head_order;
  c.batch_invariant = defaults.batch_invariant;
  c.workers = defaults.workers;
  return c;
}

// Tensors, right values and floors of a case, kept while the next case differs only in how it is run.
class Workload {
 public:
  Workload(const Case& c, bool small_pages)
      : spec_(tensors_of(c)),
        data_(spec_, {.copies = copies_for(spec_), .huge_pages = !small_pages}),
        reference_(compute_reference(checked(data_.problem()), affordable_sample(spec_))) {}

  bool serves(const Case& c) const { return spec_ == tensors_of(c); }
  CaseData& data() { return data_; }
  const Reference& reference() const { return reference_; }
  const std::vector<ReadFloor>& floors(int threads, double seconds) {
    if (floors_.empty() || floor_threads_ != threads) floors_ = make_floors(data_, threads, seconds);
    floor_threads_ = threads;
    return floors_;
  }

 private:
  static int copies_for(const Case& c) {
    const double token_bytes = static_cast<double>(c.kv_heads) * (c.head_dim + c.head_dim_v) * (c.dtype == DType::kFloat32 ? 4 : 2);
    return cold_copies(static_cast<std::int64_t>(std::min(1e15, token_bytes * static_cast<double>(c.total_kv()))));
  }
  static Problem checked(const Problem& problem) {
    validate(problem);
    check_data(problem);
    return problem;
  }

  Case spec_;
  CaseData data_;
  Reference reference_;
  std::vector<ReadFloor> floors_;
  int floor_threads_ = 0;
};

void print_header(const BenchSettings& settings) {
  fmt::print("{}, {}{}\n", cpu_model(), commit(), settings.small_pages ? ", small pages" : "");
  fmt::print("{:>9} {:>10} {:>10} {:>10} {:>10} {:>8} {:>7} {:>7}  {}\n", "KV MB", "floor µs", "median µs", "p10", "p90", "÷ floor", "GB/s",
             "err÷tol", "dtype policy threads case");
  std::fflush(stdout);
}

void print_row(const Case& c, const Options& options, const Timing& timing, const Accuracy& accuracy, std::int64_t kv_bytes) {
  fmt::print("{:>9.2f} {:>10.1f} {:>10.1f} {:>10.1f} {:>10.1f} {:>8.3f} {:>7.2f} {:>7.3f}  {} {} {} {}\n",
             static_cast<double>(kv_bytes) * 1e-6, timing.floor_us, timing.us, timing.p10_us, timing.p90_us, timing.ratio,
             gb_per_s(kv_bytes, timing.us), accuracy.ratio, dtype_name(c.dtype), policy_name(c.policy, c.splits), thread_count(options),
             to_string(c));
  if (!accuracy.ok) fmt::print("    FAIL: {}\n", accuracy.fault.empty() ? accuracy.where : accuracy.fault);
  std::fflush(stdout);
}

int run_bench(const CaseChoice& choice, const RunSettings& settings, const BenchSettings& bench) {
  check_settings(settings);
  const std::vector<Case> cases = expand(chosen_cases(choice), settings);
  if (cases.empty()) throw CaseError("bench: expected a case, or --cases FILE such as bench/table.txt");
  if (!settings.json) print_header(bench);
  Progress progress;
  std::unique_ptr<Workload> workload;
  bool all_right = true;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    const std::string label = fmt::format("case {} of {}: {}", i + 1, cases.size(), to_string(c));
    progress.note(label);
    const Options options = run_options(c, settings);
    if (!workload || !workload->serves(c)) {
      workload.reset();  // its memory first
      workload = std::make_unique<Workload>(c, bench.small_pages);
    }
    CaseData& data = workload->data();
    progress.note(label + ", checking");
    const Accuracy accuracy = check_once(data, options, workload->reference());
    all_right = all_right && accuracy.ok;
    progress.note(label + ", finding the fastest reading");
    const std::vector<ReadFloor>& floors = workload->floors(thread_count(options), std::min(1.0, bench.timing.min_seconds));
    progress.note(label + ", measuring");
    const Timing timing = time_pairs(data, options, floors, bench.timing);
    if (!settings.json) {
      print_row(c, options, timing, accuracy, data.kv_bytes());
      continue;
    }
    nlohmann::ordered_json record = case_record(c, options);
    add_timing(record, timing, data.kv_bytes());
    record["floor_reading"] = variant_name(floors.front().variant());
    record["copies"] = data.copies();
    record["huge_pages"] = !bench.small_pages;
    add_accuracy(record, accuracy);
    add_origin(record);
    fmt::print("{}\n", record.dump());
    std::fflush(stdout);
  }
  return all_right ? kExitOk : kExitFailed;
}

}  // namespace

Command add_bench(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "bench",
      "Check each case, then time it in pairs with the read floor: the time to read the same K and V on the same threads, from cold "
      "caches. ÷ floor is the median over the pairs");
  auto choice = std::make_shared<CaseChoice>();
  auto settings = std::make_shared<RunSettings>();
  auto bench = std::make_shared<BenchSettings>();
  add_case_options(*command, *choice);
  add_run_options(*command, *settings);
  command->add_option("--min-seconds", bench->timing.min_seconds, "measure each case for at least this long")
      ->check(CLI::Range(0.0, 3600.0));
  command->add_option("--pairs", bench->timing.min_pairs, "and at least this many pairs of floor and kernel")
      ->check(CLI::Range(1, 1000000));
  command->add_option("--max-seconds", bench->timing.max_seconds, "but stop here, from three pairs on")->check(CLI::Range(0.0, 3600.0));
  command->add_flag("--small-pages", bench->small_pages, "do not ask the system for huge pages");
  return [=] { return run_bench(*choice, *settings, *bench); };
}

}  // namespace leanattn::tools
