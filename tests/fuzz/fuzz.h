// SPDX-License-Identifier: Apache-2.0
// What the C ABI promises, whatever it is called with. The same checks run under libFuzzer (tests/fuzz/libfuzzer.cpp) and, over generated
// inputs, as a test of every preset (tests/fuzz_test.cpp).
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "leanattn/leanattn.h"
#include "tests/fuzz/bytes.h"

namespace leanattn::fuzz {

// A promise that was not kept.
class Broken : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

void promise(bool kept, const std::string& what);

// A status of the C ABI, with its sentence: none for OK, else one that begins with a name that leanattn.h knows and holds a number. Returns
// the sentence.
std::string answered(leanattn_status status, const char* call);

// What an input is about: its first byte.
enum class Subject : std::uint8_t { kDescription = 0, kDecode = 1, kMerge = 2, kStructSize = 3 };
constexpr int kSubjects = 4;

// Any description whatsoever, with pointers that nobody may follow: validate, workspace_bytes, decode without a workspace.
void describe(Bytes& bytes);
// A small problem in memory of exactly its size, some with lengths or page ids that are out of range: check_data and decode.
void decode(Bytes& bytes);
// Descriptions of merges, and small merges in memory of exactly their size.
void merge(Bytes& bytes);
// Structs of any struct_size, from older and newer callers.
void struct_sizes(Bytes& bytes);

// Throws Broken.
void hold(std::span<const std::uint8_t> input);

// The index-th input that fuzzing starts from, of a few hundred bytes. Subjects take turns.
std::vector<std::uint8_t> seed_input(std::uint64_t index);

}  // namespace leanattn::fuzz
