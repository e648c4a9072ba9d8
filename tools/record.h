// SPDX-License-Identifier: Apache-2.0
// The JSON lines of check, bench and demo: one vocabulary.
#pragma once

#include <nlohmann/json.hpp>

#include "tools/run.h"

namespace leanattn::tools {

// case, backend, dtype, policy, workers (what the line is cut for). CPU: threads (that run them), isa. GPU: cuda_path, programmatic_launch.
nlohmann::ordered_json case_record(const Case& c, const Options& options);
// error, tolerance, error_over_tolerance, relative_error, rows, all_rows, ok and, where not ok, message. Numbers that JSON lacks become
// null, and so do those of a case that the library refused. skipped: true where that is no fault.
void add_accuracy(nlohmann::ordered_json& record, const Accuracy& accuracy);
// kv_bytes, us, p10_us, p90_us, floor_us, floor_p10_us, floor_p90_us, ratio, ratio_of_medians, gb_per_s, pairs.
void add_timing(nlohmann::ordered_json& record, const Timing& timing, std::int64_t kv_bytes);
// device, commit, date.
void add_origin(nlohmann::ordered_json& record, const Options& options);
// The words of bench/gpu.sh's table: name ("16x4096 32/8 d128", "ragged n2 sum5 max4 …"), MB, leanattn (µs), leanattn_error.
void add_table_words(nlohmann::ordered_json& record, const Case& c, const Timing& timing, const Accuracy& accuracy, std::int64_t kv_bytes);

double gb_per_s(std::int64_t bytes, double us);

}  // namespace leanattn::tools
