// SPDX-License-Identifier: Apache-2.0
// An input of the fuzzer as a row of choices. Behind its last byte every choice is the first, so that short inputs are plain problems.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

namespace leanattn::fuzz {

class Bytes {
 public:
  explicit Bytes(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  // 0 … count − 1; one byte for up to 256, else four.
  int below(int count) { return static_cast<int>(raw(count <= 256 ? 1 : 4) % static_cast<std::uint64_t>(count)); }
  // True for the last of count values: what is rare is not what the end of the input says.
  bool one_in(int count) { return below(count) == count - 1; }
  template <class Value>
  Value of(std::initializer_list<Value> values) {
    return values.begin()[below(static_cast<int>(values.size()))];
  }
  // Low byte first.
  std::uint64_t raw(int bytes) {
    std::uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) {
      if (at_ < bytes_.size()) value |= std::uint64_t{bytes_[at_++]} << (8 * i);
    }
    return value;
  }

 private:
  std::span<const std::uint8_t> bytes_;
  std::size_t at_ = 0;
};

}  // namespace leanattn::fuzz
