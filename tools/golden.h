// SPDX-License-Identifier: Apache-2.0
// The golden cases: one table of named problems, small to medium, that together touch every option of the contract. `leanattn check`, the
// tests and the bindings run the same table.
#pragma once

#include <span>

namespace leanattn::tools {

struct GoldenCase {
  const char* name;
  const char* text;  // parse_case
};

std::span<const GoldenCase> golden_cases();

}  // namespace leanattn::tools
