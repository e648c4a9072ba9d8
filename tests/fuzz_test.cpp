// SPDX-License-Identifier: Apache-2.0
// What libFuzzer starts from, and more of the kind, in every build: `./dev fuzz` goes on from there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "decoding.h"
#include "fuzz/fuzz.h"

namespace leanattn::fuzz {
namespace {

TEST(Fuzz, SeedInputsHold) {
  const int inputs = 2 * std::min(testing::test_problems(), 10000);
  int failures = 0;
  for (int index = 0; index < inputs && failures < 5; ++index) {
    try {
      hold(seed_input(static_cast<std::uint64_t>(index)));
    } catch (const std::exception& broken) {
      ++failures;
      ADD_FAILURE() << "seed input " << index << ": " << broken.what();
    }
  }
}

}  // namespace
}  // namespace leanattn::fuzz
