// SPDX-License-Identifier: Apache-2.0
// A case made into tensors: a Problem and Options that can be decoded, with everything around them poisoned.
//
//   values   a counter hash of (seed, tensor, logical index): the same for every layout, page order and thread count
//   poison   all of K and V that no row may look at is NaN: past the lengths, before a left window, unused pages, the gaps of strided
//            views. Pages are shuffled. Unused slots of the block table hold −1, INT_MAX and the id of a NaN page
//   outputs  O and LSE are NaN before the call; the gaps of O and guard bands round O, LSE and the workspace hold a canary
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "leanattn/attention.h"
#include "tools/case.h"

namespace leanattn::tools {

// Pages of anonymous memory. Throws OutOfMemory, naming the bytes wanted and those available.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t bytes, bool huge_pages = false);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

class OutOfMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct CaseDataOptions {
  int copies = 1;           // of K and V, at different addresses with the same values: a cold cache for the bench
  bool huge_pages = false;  // ask for transparent huge pages
  int threads = 0;          // that fill; 0: all. The values do not depend on it
};

class CaseData {
 public:
  explicit CaseData(const Case& c, const CaseDataOptions& options = {});
  CaseData(const CaseData&) = delete;
  CaseData& operator=(const CaseData&) = delete;

  const Case& spec() const { return case_; }
  int copies() const { return static_cast<int>(copies_.size()); }
  // Valid as long as this object lives. Change a copy of it freely.
  Problem problem(int copy = 0) const;
  Options options() const;

  // Bytes of K and V that lie in some row's reach: what one call must read.
  std::int64_t kv_bytes() const { return kv_bytes_; }
  // [first, end) of the tokens of a seq that some row may see: the whole seq without a left window.
  std::int64_t first_token(std::int32_t seq) const;

  // O as [total_q, q_heads, head_dim_v] and LSE as [total_q, q_heads].
  std::vector<double> o() const;
  std::vector<double> lse() const;
  float o_at(std::int64_t row, std::int32_t column) const;  // row = query token·q_heads + q_head
  // NaN into O, LSE and the workspace, canaries round them.
  void reset_outputs();
  // NaN-filled and guarded on both sides; the memory stays for later calls that want no more.
  std::span<std::byte> workspace(std::size_t bytes);
  // Empty when every canary is whole; else a sentence that says which is not.
  std::string canary_fault() const;

 private:
  struct KvPlace;
  struct KvCopy {
    Buffer k;
    Buffer v;  // empty when interleaved: V lies in k
  };
  void lay_out_q();
  void lay_out_kv();
  void lay_out_pages();
  void fill_q(int threads);
  void fill_kv(const KvView& view, std::byte* base, bool is_v, int threads) const;
  void make_logit_rules();
  void make_tree();
  bool is_o_element(std::int64_t element) const;

  Case case_;
  Problem problem_;
  std::vector<std::int32_t> kv_lens_;
  std::vector<std::int32_t> cu_seqlens_kv_;
  std::vector<std::int32_t> cu_seqlens_q_;
  std::vector<std::int32_t> block_table_;
  std::vector<std::uint64_t> tree_mask_;
  std::vector<float> alibi_slopes_;
  std::vector<float> sinks_;
  std::int64_t kv_bytes_ = 0;
  std::int64_t k_elements_ = 0;  // of the buffer of K (and of V when interleaved)
  std::int64_t v_elements_ = 0;
  std::int64_t k_first_ = 0;  // element of the buffer that the view starts at
  std::int64_t v_first_ = 0;
  std::int64_t q_first_ = 0;
  std::int64_t o_elements_ = 0;
  std::vector<KvCopy> copies_;
  Buffer q_;
  Buffer o_;
  Buffer lse_;
  Buffer workspace_;
  std::size_t workspace_bytes_ = 0;
};

}  // namespace leanattn::tools
