// SPDX-License-Identifier: Apache-2.0
#include "tools/record.h"

#include <cmath>

#include "tools/build_info.h"

namespace leanattn::tools {
namespace {

nlohmann::ordered_json number(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
}

double rounded(double value, double digits) { return std::round(value * digits) / digits; }

}  // namespace

nlohmann::ordered_json case_record(const Case& c, const Options& options) {
  nlohmann::ordered_json record;
  record["case"] = to_string(c);
  record["dtype"] = dtype_name(c.dtype);
  record["policy"] = policy_name(c.policy, c.splits);
  record["workers"] = worker_count(options);
  record["threads"] = thread_count(options);
  record["isa"] = isa_name(options);
  return record;
}

void add_accuracy(nlohmann::ordered_json& record, const Accuracy& accuracy) {
  const bool compared = accuracy.refused.empty();
  record["error"] = number(compared ? accuracy.error : NAN);
  record["tolerance"] = number(compared ? accuracy.tolerance : NAN);
  record["error_over_tolerance"] = number(compared ? accuracy.ratio : NAN);
  record["rows"] = accuracy.rows;
  record["all_rows"] = accuracy.all_rows;
  record["ok"] = accuracy.ok;
  if (!compared) {
    record["message"] = "refused: " + accuracy.refused;
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

void add_origin(nlohmann::ordered_json& record) {
  record["device"] = cpu_model();
  record["commit"] = commit();
  record["date"] = date_utc();
}

double gb_per_s(std::int64_t bytes, double us) { return us > 0.0 ? static_cast<double>(bytes) / us * 1e-3 : 0.0; }

}  // namespace leanattn::tools
