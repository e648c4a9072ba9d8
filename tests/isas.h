// SPDX-License-Identifier: Apache-2.0
// The instruction sets that the tests decode with.
#pragma once

#include <string>
#include <vector>

#include "leanattn/attention.h"

namespace leanattn::testing {

// Fastest first. ThreadSanitizer looks for races, and threads share nothing within a tile: one will do there.
inline const std::vector<std::string>& isas() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all = cpu_isas();
#if defined(__SANITIZE_THREAD__)
    all.resize(1);
#endif
    return all;
  }();
  return names;
}

}  // namespace leanattn::testing
