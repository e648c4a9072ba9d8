// SPDX-License-Identifier: Apache-2.0
// Where a figure comes from: source, machine and day.
#pragma once

#include <string>

namespace leanattn::tools {

std::string commit();     // git description of the built source, or "unknown"
std::string cpu_model();  // of the first processor, or "unknown CPU"
std::string date_utc();   // 2025-01-31T12:00:00Z
int default_threads();    // that a call with workers = 0 runs on

}  // namespace leanattn::tools
