// SPDX-License-Identifier: Apache-2.0
// A small problem in memory of exactly its size, drawn from bytes: what is read or written outside is the sanitizer's to find.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "leanattn/problem.h"
#include "tests/fuzz/fuzz.h"

namespace leanattn::fuzz {

// Memory of exactly these bytes, all of one value.
class Exact {
 public:
  Exact() = default;
  Exact(std::size_t bytes, unsigned char value) : bytes_(bytes), memory_(static_cast<std::byte*>(std::malloc(bytes))) {
    if (bytes > 0) std::memset(memory_.get(), value, bytes);
  }
  std::byte* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }
  template <class Element>
  Element* as() const {
    return reinterpret_cast<Element*>(memory_.get());
  }
  template <class Element>
  static Exact of(const std::vector<Element>& values) {
    Exact copy(values.size() * sizeof(Element), 0);
    if (!values.empty()) std::memcpy(copy.data(), values.data(), copy.bytes());
    return copy;
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::size_t bytes_ = 0;
  std::unique_ptr<std::byte, Free> memory_;
};

constexpr unsigned char kNanByte = 0xff;     // a NaN in every dtype: whatever no row may look at
constexpr unsigned char kCanaryByte = 0xa5;  // O and LSE before a call

struct Owned {
  explicit Owned(Bytes& bytes);
  Owned(const Owned&) = delete;

  // The problem as a caller of the C ABI hands it in.
  leanattn_problem c() const;
  // Canaries into O and LSE.
  void reset_outputs();

  std::vector<std::int32_t> kv_lens, q_lens;  // one a seq
  Exact q, o, k, v, lse, lens, cu_seqlens_q, cu_seqlens_kv, block_table, tree_mask, alibi_slopes, sinks;
  Problem problem;
  float largest_v = 0.0f;  // |V| of any token

 private:
  void draw_shapes(Bytes& bytes);
  void bound_work();
  void draw_rules(Bytes& bytes);
  void lay_out_rows(Bytes& bytes);
  void lay_out_tokens(Bytes& bytes);
  void lay_out_pages(Bytes& bytes);
  void fill();
};

leanattn_options draw_options(Bytes& bytes);

}  // namespace leanattn::fuzz
