// SPDX-License-Identifier: Apache-2.0
#include "tools/record.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "backend.h"
#include "tools/build_info.h"

namespace leanattn::tools {
namespace {

nlohmann::ordered_json number_or_null(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
}

double rounded(double value, double digits) { return std::round(value * digits) / digits; }

}  // namespace

nlohmann::ordered_json case_record(const Case& c, const Options& options) {
  nlohmann::ordered_json record;
  record["case"] = to_string(c);
  record["backend"] = backend_name(options.backend);
  record["dtype"] = dtype_name(c.dtype);
  record["policy"] = policy_name(c.policy, c.splits);
  record["workers"] = worker_count(options);
  if (options.backend == Backend::kCuda) {
    record["cuda_path"] = cuda_path_name(options);
    record["programmatic_launch"] = options.programmatic_launch;
  } else {
    record["threads"] = thread_count(options);
    record["isa"] = isa_name(options);
  }
  return record;
}

void add_accuracy(nlohmann::ordered_json& record, const Accuracy& accuracy) {
  const bool compared = accuracy.refused.empty();
  record["error"] = number_or_null(compared ? accuracy.error : NAN);
  record["tolerance"] = number_or_null(compared ? accuracy.tolerance : NAN);
  record["error_over_tolerance"] = number_or_null(compared ? accuracy.ratio : NAN);
  record["relative_error"] = number_or_null(compared ? accuracy.relative_error : NAN);
  record["rows"] = accuracy.rows;
  record["all_rows"] = accuracy.all_rows;
  record["ok"] = accuracy.ok;
  if (accuracy.skipped) record["skipped"] = true;
  if (!compared) {
    record["message"] = (accuracy.skipped ? "skipped: " : "refused: ") + accuracy.refused;
  } else if (!accuracy.ok) {
    record["message"] = accuracy.fault.empty() ? accuracy.where : accuracy.fault;
  }
}

void add_timing(nlohmann::ordered_json& record, const Timing& timing, std::int64_t kv_bytes) {
  record["kv_bytes"] = kv_bytes;
  record["us"] = rounded(timing.us, 100.0);
  record["p10_us"] = rounded(timing.p10_us, 100.0);
  record["p90_us"] = rounded(timing.p90_us, 100.0);
  record["floor_us"] = rounded(timing.floor_us, 100.0);
  record["floor_p10_us"] = rounded(percentile(timing.floor_times_us, 0.1), 100.0);
  record["floor_p90_us"] = rounded(percentile(timing.floor_times_us, 0.9), 100.0);
  record["ratio"] = rounded(timing.ratio, 1e4);
  record["ratio_of_medians"] = rounded(timing.ratio_of_medians, 1e4);
  record["gb_per_s"] = rounded(gb_per_s(kv_bytes, timing.us), 1e3);
  record["pairs"] = timing.pairs;
}

void add_origin(nlohmann::ordered_json& record, const Options& options) {
  record["device"] = options.backend == Backend::kCuda ? cuda::device_name() : cpu_model();
  record["commit"] = commit();
  record["date"] = date_utc();
}

void add_table_words(nlohmann::ordered_json& record, const Case& c, const Timing& timing, const Accuracy& accuracy, std::int64_t kv_bytes) {
  const auto [shortest, longest] = std::minmax_element(c.kv_lens.begin(), c.kv_lens.end());
  const std::string heads = fmt::format("{}/{} d{}", c.q_heads, c.kv_heads, c.head_dim);
  if (c.kv_lens.empty() || *shortest == *longest) {
    record["name"] = fmt::format("{}x{} {}", c.batch(), c.kv_lens.empty() ? 0 : *longest, heads);
  } else {
    record["name"] = fmt::format("ragged n{} sum{} max{} {}", c.batch(), c.total_kv(), *longest, heads);
  }
  record["MB"] = rounded(static_cast<double>(kv_bytes) * 1e-6, 10.0);
  record["leanattn"] = rounded(timing.us, 100.0);
  record["leanattn_error"] = number_or_null(rounded(accuracy.relative_error, 1e5));
}

double gb_per_s(std::int64_t bytes, double us) { return us > 0.0 ? static_cast<double>(bytes) / us * 1e-3 : 0.0; }

}  // namespace leanattn::tools
