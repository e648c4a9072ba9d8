// SPDX-License-Identifier: Apache-2.0
// The JSON lines of check, bench and demo: one vocabulary.
#pragma once

#include <nlohmann/json.hpp>

#include "tools/run.h"

namespace leanattn::tools {

// case, dtype, policy, workers (what the line is cut for), threads (that run them), isa.
nlohmann::ordered_json case_record(const Case& c, const Options& options);
// error, tolerance, error_over_tolerance, rows, all_rows, ok and, where not ok, message. Numbers that JSON lacks become null, and so do
// those of a case that the library refused.
void add_accuracy(nlohmann::ordered_json& record, const Accuracy& accuracy);
// kv_bytes, us, p10_us, p90_us, floor_us, floor_p10_us, floor_p90_us, ratio, ratio_of_medians, gb_per_s, pairs.
void add_timing(nlohmann::ordered_json& record, const Timing& timing, std::int64_t kv_bytes);
// device, commit, date.
void add_origin(nlohmann::ordered_json& record);

double gb_per_s(std::int64_t bytes, double us);

}  // namespace leanattn::tools
