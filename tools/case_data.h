// SPDX-License-Identifier: Apache-2.0
// A case made into tensors: a Problem and Options that can be decoded, with everything around them poisoned.
//
//   values   a counter hash of (seed, tensor, logical index): the same for every layout, page order and thread count
//   poison   all of K and V that no row may look at is NaN: past the lengths, before a left window, unused pages, the gaps of strided
//            views. Pages are shuffled. Unused slots of the block table hold −1, INT_MAX and the id of a NaN page
//   views    strided=1: Q, K and V out of one row of a fused QKV buffer, or of the second layer inside each page; rows of O apart; rooms of
//            ragged sequences longer than the sequences (kv_lens given; without strided=1 ragged has cu_seqlens_kv alone)
//   outputs  O and LSE are NaN before the call; the gaps of O and guard bands round O, LSE and the workspace hold a canary
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "leanattn/attention.h"
#include "tools/buffer.h"
#include "tools/case.h"

namespace leanattn::tools {

struct CaseDataOptions {
  int copies = 1;           // of K and V, at different addresses with the same values: a cold cache for the bench
  bool huge_pages = false;  // ask for transparent huge pages
  int threads = 0;          // that fill; 0: all. The values do not depend on it
};

class CaseData {
 public:
  // Throws CaseError for a case that no tensor can hold, OutOfMemory.
  explicit CaseData(const Case& c, const CaseDataOptions& options = {});
  CaseData(const CaseData&) = delete;
  CaseData& operator=(const CaseData&) = delete;

  const Case& spec() const { return case_; }
  int copies() const { return static_cast<int>(copies_.size()); }
  // Valid as long as this object lives; the caller may change it.
  Problem problem(int copy = 0) const;
  Options options() const;

  // Bytes of K and V in some row's reach: what one call must read.
  std::int64_t kv_bytes() const { return kv_bytes_; }
  // Bytes of a copy of K and V, poison and gaps included.
  std::int64_t copy_bytes() const { return copy_bytes_; }

  // All memory of a copy, poison and gaps included; V's is empty when interleaved, it lies in K's.
  std::span<const std::byte> k_memory(int copy = 0) const { return memory(copies_.at(static_cast<std::size_t>(copy)).k); }
  std::span<const std::byte> v_memory(int copy = 0) const { return memory(copies_.at(static_cast<std::size_t>(copy)).v); }

  // All memory of the other tensors and of the workspace, what stands round them included: for a copy of the case in other memory.
  std::span<const std::byte> q_memory() const { return memory(q_.buffer); }
  std::span<std::byte> o_memory() { return {o_.buffer.data(), o_.buffer.bytes()}; }
  std::span<std::byte> lse_memory() { return {lse_.data(), lse_.bytes()}; }  // empty with lse=none
  std::span<std::byte> workspace_memory() { return {workspace_.data(), workspace_.bytes()}; }

  // O as [total_q, q_heads, head_dim_v] and LSE as [total_q, q_heads]; row = query token·q_heads + q_head.
  std::int64_t rows() const { return case_.total_q() * case_.q_heads; }
  float o_at(std::int64_t row, std::int32_t column) const;
  float lse_at(std::int64_t row) const;
  std::vector<double> o() const;
  std::vector<double> lse() const;  // empty with lse=none

  // NaN into O, LSE and the workspace, canaries round them.
  void reset_outputs();
  // Full of NaN, at an odd address, guarded on both sides. A later call may give another span.
  std::span<std::byte> workspace(std::size_t bytes);
  // Empty when every canary is whole; else a sentence that says which is not.
  std::string canary_fault() const;

 private:
  static constexpr std::int64_t kGuardBytes = 256;  // canaries on each side
  struct Tensor {
    Buffer buffer;
    std::int64_t elements = 0;
    std::int64_t first = 0;  // element at which the view starts
  };
  struct Copy {
    Buffer k;
    Buffer v;  // empty when interleaved: V lies in k
  };

  static std::span<const std::byte> memory(const Buffer& buffer) { return {buffer.data(), buffer.bytes()}; }
  void check_size(int copies) const;
  void lay_out_lengths();
  void lay_out_q();
  void lay_out_kv();
  void lay_out_pages();
  void make_logit_rules();
  void make_tree();
  void fill_q(int threads);
  void fill_kv(Copy& copy, int threads) const;
  std::int64_t o_element(std::int64_t row) const;
  bool sees_no_token(std::int32_t seq) const { return case_.seq_q_len(seq) == 0; }

  Case case_;
  Problem problem_;  // K and V without their base
  std::vector<std::int32_t> cu_seqlens_kv_;
  std::vector<std::int32_t> cu_seqlens_q_;
  std::vector<std::int32_t> block_table_;
  std::vector<std::uint64_t> tree_mask_;
  std::vector<float> alibi_slopes_;
  std::vector<float> sinks_;
  std::int64_t kv_bytes_ = 0;
  std::int64_t copy_bytes_ = 0;
  std::int64_t k_elements_ = 0;  // of K's buffer, V included when interleaved
  std::int64_t v_elements_ = 0;
  std::int64_t k_first_ = 0;  // element at which the view starts
  std::int64_t v_first_ = 0;
  std::vector<Copy> copies_;
  Tensor q_;
  Tensor o_;
  Buffer lse_;
  Buffer workspace_;
  std::size_t workspace_bytes_ = 0;
};

}  // namespace leanattn::tools
