// SPDX-License-Identifier: Apache-2.0
// A host problem over tensors with other strides: rows at any element, with NaN in every gap.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numeric.h"
#include "problem_view.h"

namespace leanattn::testing {

// Elements added behind each row, token and sequence (or page), and in front of the first row.
struct Gaps {
  int head = 0;
  int token = 0;
  int outer = 0;
  int first = 0;
};

// The rows that can be addressed are copied; whatever else `from` held is NaN here. from's lengths and tables must outlive it.
class Respaced {
 public:
  Respaced(const Problem& from, const Gaps& q, const Gaps& k, const Gaps& v, const Gaps& o) : problem(from) {
    element_ = static_cast<std::int64_t>(dtype_bytes(from.q_dtype));
    space_rows(problem.q, from.head_dim, q, q_);
    space_rows(problem.o, head_dim_v(from), o, o_);
    space_tokens(from.k, problem.k, from.head_dim, k, k_);
    space_tokens(from.v, problem.v, head_dim_v(from), v, v_);
    problem.q.data = q_.data() + q.first * element_;
    problem.o.data = o_.data() + o.first * element_;
    problem.k.data = k_.data() + k.first * element_;
    problem.v.data = v_.data() + v.first * element_;
    if (from.lse) {
      lse_.resize(static_cast<std::size_t>(total_q(from) * from.q_heads));
      problem.lse = lse_.data();
    }
    copy_rows(from);
    copy_tokens(from, from.k, problem.k, from.head_dim);
    copy_tokens(from, from.v, problem.v, head_dim_v(from));
  }
  Respaced(const Respaced&) = delete;

  Problem problem;

 private:
  static constexpr std::byte kNan{0xff};

  template <class View>
  void space_rows(View& view, int dim, const Gaps& gaps, std::vector<std::byte>& memory) const {
    view.head_stride = dim + gaps.head;
    view.token_stride = problem.q_heads * view.head_stride + gaps.token;
    view.seq_stride = problem.q_len * view.token_stride + gaps.outer;
    const std::int64_t all = problem.cu_seqlens_q ? total_q(problem) * view.token_stride : problem.batch * view.seq_stride;
    memory.assign(static_cast<std::size_t>((gaps.first + all) * element_), kNan);
  }

  void space_tokens(const KvView& from, KvView& view, int dim, const Gaps& gaps, std::vector<std::byte>& memory) const {
    std::int64_t blocks = problem.batch, tokens = problem.kv_capacity;
    if (problem.kv_layout == KvLayout::kRagged) blocks = 1, tokens = problem.batch > 0 ? problem.cu_seqlens_kv[problem.batch] : 0;
    if (problem.kv_layout == KvLayout::kPaged) blocks = problem.num_pages, tokens = problem.page_size;
    if (from.head_stride > from.token_stride) {
      view.token_stride = dim + gaps.token;
      view.head_stride = tokens * view.token_stride + gaps.head;
      view.outer_stride = problem.kv_heads * view.head_stride + gaps.outer;
    } else {
      view.head_stride = dim + gaps.head;
      view.token_stride = problem.kv_heads * view.head_stride + gaps.token;
      view.outer_stride = tokens * view.token_stride + gaps.outer;
    }
    memory.assign(static_cast<std::size_t>((gaps.first + blocks * view.outer_stride) * element_), kNan);
  }

  void copy_rows(const Problem& from) {
    for (int seq = 0; seq < from.batch; ++seq) {
      for (int token = 0; token < seq_q_len(from, seq); ++token) {
        for (int head = 0; head < from.q_heads; ++head) {
          copy(problem.q.data, q_row_offset(problem, problem.q, seq, token, head), from.q.data,
               q_row_offset(from, from.q, seq, token, head), from.head_dim);
        }
      }
    }
  }

  void copy_tokens(const Problem& from, const KvView& source, const KvView& target, int dim) {
    for (int seq = 0; seq < from.batch; ++seq) {
      for (int token = seq_first_token(from, seq); token < seq_kv_len(from, seq); ++token) {  // a table may hold no page before the window
        for (int head = 0; head < from.kv_heads; ++head) {
          copy(target.data, kv_row_offset(problem, target, seq, token, head), source.data, kv_row_offset(from, source, seq, token, head),
               dim);
        }
      }
    }
  }

  void copy(const void* to, std::int64_t to_element, const void* from, std::int64_t from_element, int dim) const {
    auto* target = static_cast<std::byte*>(const_cast<void*>(to)) + to_element * element_;
    std::memcpy(target, static_cast<const std::byte*>(from) + from_element * element_, static_cast<std::size_t>(dim * element_));
  }

  std::int64_t element_ = 2;
  std::vector<std::byte> q_, o_, k_, v_;
  std::vector<float> lse_;
};

}  // namespace leanattn::testing
