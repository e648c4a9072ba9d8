// SPDX-License-Identifier: Apache-2.0
// The case language: one line of text that says which decode-attention problem to run. Used by the CLI, the tests and the bench.
//
//   batch q_heads kv_heads head_dim length            a batch of equal lengths:  16 32 8 128 4k
//   - q_heads kv_heads head_dim len,len,…             a batch of these lengths:  - 32 8 128 128k,2kx15   (AxN: N times A)
//
// Lengths take k (1,024) and m (1,048,576). Then any of, in any order:
//
//   dtype=bf16|f16|f32            layout=contiguous|head_major|ragged|paged (ragged is the default of a list)     page=N (implies paged)
//   interleaved=1 (K and V in one buffer, such as [pages, 2, page, kv_heads, d])           strided=1 (views out of a wider buffer)
//   head_dim_v=N   q_len=N or q_len=len,len,… (gives cu_seqlens_q)   causal=0|1   window=N   tree=N (a random tree over q_len = N tokens)
//   scale=X   softcap=X   alibi=1   sink=X, or sink=1 for one that varies by head (sink=1.0 is the number)   lse=e|2|none
//   policy=lean|fa2|flashdecoding[:splits]   order=auto|along|beside   invariant=0|1   checked=0|1   workers=N
//   seed=N   spread=X (standard deviation of the logits with the default scale)
#pragma once

#include <cstdint>
#include <iosfwd>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "leanattn/problem.h"

namespace leanattn::tools {

enum class CaseLayout { kContiguous, kHeadMajor, kRagged, kPaged };
enum class CaseSink { kNone, kValue, kVaried };
enum class CaseLse { kNone, kNatural, kTwo };

struct Case {
  std::vector<std::int32_t> kv_lens;  // one a sequence
  std::int32_t q_heads = 1;
  std::int32_t kv_heads = 1;
  std::int32_t head_dim = 128;
  std::int32_t head_dim_v = 128;
  DType dtype = DType::kBFloat16;

  CaseLayout layout = CaseLayout::kContiguous;
  std::int32_t page_size = 0;  // ≥ 1 when paged, else 0
  bool interleaved = false;
  bool strided = false;

  std::int32_t q_len = 1;            // of every sequence, unless q_lens
  std::vector<std::int32_t> q_lens;  // one a sequence: cu_seqlens_q; empty: q_len each
  bool causal = true;
  std::int32_t window_left = -1;
  std::int32_t tree_tokens = 0;  // 0: no tree mask; else the longest q_len

  float scale = 0.0f;    // 0: 1/sqrt(head_dim)
  float softcap = 0.0f;  // 0: off
  bool alibi = false;
  CaseSink sink = CaseSink::kNone;
  float sink_value = 0.0f;
  CaseLse lse = CaseLse::kNatural;

  Policy policy = Policy::kLean;
  std::int32_t splits = 0;
  HeadOrder head_order = HeadOrder::kAuto;
  bool batch_invariant = false;
  bool check_data = false;
  std::int32_t workers = 0;

  std::uint64_t seed = 1;
  float spread = 1.0f;

  std::int32_t batch() const { return static_cast<std::int32_t>(kv_lens.size()); }
  std::int32_t seq_q_len(std::int32_t seq) const { return q_lens.empty() ? q_len : q_lens[static_cast<std::size_t>(seq)]; }
  std::int32_t max_q_len() const;
  std::int64_t total_q() const;
  std::int64_t total_kv() const;
  bool operator==(const Case&) const = default;
};

// what() is a sentence that names the token and what is allowed in its place.
class CaseError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws CaseError.
Case parse_case(std::string_view text);
// The shortest text that parse_case turns into the same case.
std::string to_string(const Case& c);
// A table for people: a line a key with its values and its default, behind a header.
std::string case_keys_text();

// One case a line; blank lines and what follows a # are skipped. Errors begin with "source:line: ".
std::vector<Case> read_cases(std::istream& in, const std::string& source);
std::vector<Case> read_case_file(const std::string& path);

// The words of the language, also used by the options of the CLI. Throw CaseError, naming the token.
std::int64_t parse_count(std::string_view token, std::string_view what, std::int64_t low, std::int64_t high);  // with k and m
std::vector<std::int32_t> parse_lengths(std::string_view token, std::string_view what);
DType parse_dtype(std::string_view token);
void parse_policy(std::string_view token, Policy& policy, std::int32_t& splits);

const char* dtype_name(DType dtype);
std::string policy_name(Policy policy, std::int32_t splits);
// 4096 → 4k.
std::string length_text(std::int64_t length);
std::string lengths_text(const std::vector<std::int32_t>& lengths);

}  // namespace leanattn::tools
