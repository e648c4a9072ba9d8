// SPDX-License-Identifier: Apache-2.0
// Random choices of the random tests, from the number of the problem alone.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "inputs.h"

namespace leanattn::testing {

class Draw {
 public:
  explicit Draw(std::uint64_t problem) : problem_(problem) {}
  // 0 … count − 1
  int below(int count) { return static_cast<int>(input_hash(problem_, Input::kLengths, counter_++) % static_cast<std::uint64_t>(count)); }
  bool one_in(int count) { return below(count) == 0; }
  template <typename Value>
  Value of(std::initializer_list<Value> values) {
    return values.begin()[below(static_cast<int>(values.size()))];
  }

 private:
  std::uint64_t problem_;
  std::uint64_t counter_ = 0;
};

}  // namespace leanattn::testing
