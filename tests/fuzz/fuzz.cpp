// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/fuzz.h"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <string_view>

#include "inputs.h"

namespace leanattn::fuzz {
namespace {

// Every name that a sentence may begin with.
constexpr std::string_view kNames[] = {"alibi_slopes",
                                       "backend",
                                       "batch",
                                       "batch_invariant",
                                       "block_table",
                                       "block_table_stride",
                                       "bytes",
                                       "check_data",
                                       "cpu_isa",
                                       "cuda_path",
                                       "cu_seqlens_kv",
                                       "cu_seqlens_q",
                                       "dtype",
                                       "head_dim",
                                       "head_dim_v",
                                       "head_order",
                                       "k",
                                       "kv_capacity",
                                       "kv_dtype",
                                       "kv_heads",
                                       "kv_layout",
                                       "kv_lens",
                                       "lse",
                                       "lse_base",
                                       "max_pages",
                                       "num_pages",
                                       "o",
                                       "options",
                                       "page_size",
                                       "policy",
                                       "problem",
                                       "q",
                                       "q_dtype",
                                       "q_heads",
                                       "q_len",
                                       "rows",
                                       "scale",
                                       "seq",
                                       "shard_lse",
                                       "shard_o",
                                       "shards",
                                       "sinks",
                                       "softcap",
                                       "splits",
                                       "status",
                                       "tree_mask",
                                       "v",
                                       "window_left",
                                       "workers",
                                       "workspace"};

// These say what there is instead; a null argument has no number either.
bool needs_no_number(std::string_view sentence) {
  for (const std::string_view start : {"backend cuda", "cpu_isa", "cuda_path"}) {
    if (sentence.starts_with(start)) return true;
  }
  return sentence.ends_with(" is null");
}

}  // namespace

void promise(bool kept, const std::string& what) {
  if (!kept) throw Broken(what);
}

std::string answered(leanattn_status status, const char* call) {
  const std::string sentence = leanattn_last_error();
  const std::string said = std::string(call) + " answers " + std::to_string(status) + " \"" + sentence + "\"";
  promise(status >= LEANATTN_OK && status <= LEANATTN_WORKSPACE_TOO_SMALL, said + ": no fault of the caller");
  promise((status == LEANATTN_OK) == sentence.empty(), said + ": a sentence for refusals, and for them alone");
  if (sentence.empty()) return sentence;
  const auto end =
      std::find_if(sentence.begin(), sentence.end(), [](char c) { return !std::isalnum(static_cast<unsigned char>(c)) && c != '_'; });
  const std::string_view name(sentence.data(), static_cast<std::size_t>(end - sentence.begin()));
  promise(std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames), said + ": begins with no name");
  const bool has_number = std::any_of(sentence.begin(), sentence.end(), [](char c) { return c >= '0' && c <= '9'; }) ||
                          sentence.find("nan") != std::string::npos || sentence.find("inf") != std::string::npos;
  promise(has_number || needs_no_number(sentence), said + ": has no number");
  return sentence;
}

void hold(std::span<const std::uint8_t> input) {
  Bytes bytes(input);
  switch (static_cast<Subject>(bytes.below(kSubjects))) {
    case Subject::kDescription: return describe(bytes);
    case Subject::kDecode: return decode(bytes);
    case Subject::kMerge: return merge(bytes);
    case Subject::kStructSize: return struct_sizes(bytes);
  }
}

std::vector<std::uint8_t> seed_input(std::uint64_t index) {
  constexpr std::uint64_t kSeed = 0x500000000u;
  std::vector<std::uint8_t> input(32 + input_hash(kSeed + index, Input::kLengths, 0) % 160);
  for (std::size_t i = 0; i < input.size(); ++i) {
    input[i] = static_cast<std::uint8_t>(input_hash(kSeed + index, Input::kLengths, i + 1));
  }
  input[0] = static_cast<std::uint8_t>(index % kSubjects);
  return input;
}

}  // namespace leanattn::fuzz
