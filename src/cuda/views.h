// SPDX-License-Identifier: Apache-2.0
// Where the rows of a problem lie, as the kernel's parameters say it, and how wide they may be read. For the host.
#pragma once

#include <vector_types.h>  // of CUDA: params.h holds some

#include <algorithm>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "cuda/params.h"
#include "cuda/variants.h"
#include "problem_view.h"

namespace leanattn::cuda {

// The stride of an axis with `count` indices: where there is one at most, nothing is ever a stride away, whatever was given.
inline std::int64_t used_stride(std::int64_t count, std::int64_t stride) { return count > 1 ? stride : 0; }

// The widest access that the pointer and all the strides (elements of 2 bytes) are multiples of, at most 16.
inline int access_bytes(const void* data, std::initializer_list<std::int64_t> strides) {
  std::uint64_t all = reinterpret_cast<std::uintptr_t>(data) | 16;
  for (const std::int64_t stride : strides) all |= static_cast<std::uint64_t>(stride) * 2;
  return static_cast<int>(all & (~all + 1));
}

template <class View>
RowView row_view(const Problem& problem, const View& view) {
  const bool packed = problem.cu_seqlens_q != nullptr;
  RowView rows;
  rows.data = static_cast<std::uint16_t*>(const_cast<void*>(static_cast<const void*>(view.data)));
  rows.seq_stride = packed ? 0 : used_stride(problem.batch, view.seq_stride);
  rows.token_stride = used_stride(packed ? std::int64_t{problem.batch} * problem.q_len : problem.q_len, view.token_stride);
  rows.head_stride = used_stride(problem.q_heads, view.head_stride);
  rows.access_bytes = access_bytes(view.data, {rows.seq_stride, rows.token_stride, rows.head_stride});
  return rows;
}

inline KvRows kv_rows(const Problem& problem, const KvView& view) {
  std::int64_t blocks = problem.batch, tokens = problem.kv_capacity;
  if (problem.kv_layout == KvLayout::kRagged) blocks = 1, tokens = std::numeric_limits<std::int32_t>::max();
  if (problem.kv_layout == KvLayout::kPaged) blocks = problem.num_pages, tokens = problem.page_size;
  KvRows rows;
  rows.data = static_cast<const std::uint16_t*>(view.data);
  rows.outer_stride = used_stride(blocks, view.outer_stride);
  rows.token_stride = used_stride(tokens, view.token_stride);
  rows.head_stride = used_stride(problem.kv_heads, view.head_stride);
  rows.access_bytes = access_bytes(view.data, {rows.outer_stride, rows.token_stride, rows.head_stride});
  return rows;
}

// Params::page_unit, and the strides of pages and their tokens in it. Whether 32 bits reach every row.
inline bool set_page_units(Params& p, const Problem& problem) {
  std::uint64_t all = 1 << 20;  // any power of two does where no stride says less
  for (const KvRows* rows : {&p.k, &p.v}) all |= static_cast<std::uint64_t>(rows->outer_stride | rows->token_stride) * 2;
  const int log2 = std::countr_zero(all);
  p.page_unit = 1u << log2;
  for (KvRows* rows : {&p.k, &p.v}) {
    const std::uint64_t page = static_cast<std::uint64_t>(rows->outer_stride) * 2 >> log2;
    const std::uint64_t token = static_cast<std::uint64_t>(rows->token_stride) * 2 >> log2;
    const auto last = [](std::uint64_t count) { return count > 0 ? count - 1 : 0; };
    if (last(problem.num_pages) * page + last(problem.page_size) * token > std::numeric_limits<std::uint32_t>::max()) return false;
    rows->page_units = static_cast<std::uint32_t>(page);
    rows->token_units = static_cast<std::uint32_t>(token);
  }
  return true;
}

// Params::q, o, k, v and general, and what is said of pages.
inline void set_views(Params& p, const Problem& problem) {
  p.q = row_view(problem, problem.q);
  p.o = row_view(problem, problem.o);
  p.k = kv_rows(problem, problem.k);
  p.v = kv_rows(problem, problem.v);
  p.general = std::min({p.q.access_bytes, p.k.access_bytes, p.v.access_bytes}) < 16;
  if (problem.kv_layout == KvLayout::kPaged && !set_page_units(p, problem)) p.general = true;
}

// Whether rules.cuh has a say in the call.
inline bool has_rules(const Problem& problem) {
  return problem.window_left >= 0 || problem.tree_mask != nullptr || problem.softcap > 0.0f || problem.alibi_slopes != nullptr;
}

// Which variants have code for all that a call asks for (variants.h), where they have its head_dim. Without any feature a call has the
// lean policy, q_len new tokens of every seq, causal or not, rows aligned to 16 bytes, and no rule but the scale.
inline Features needed_features(const Problem& problem, const Options& options) {
  Params p;
  set_views(p, problem);
  if (head_dim_v(problem) != problem.head_dim || p.general || p.o.access_bytes < 4 || options.policy != Policy::kLean ||
      problem.cu_seqlens_q != nullptr) {
    return Features::kFull;
  }
  const bool rules = has_rules(problem) || problem.sinks != nullptr;
  if (int{rules} + int{options.batch_invariant} + int{options.check_data} > 1) return Features::kFull;
  return rules                     ? Features::kRules
         : options.batch_invariant ? Features::kInvariant
         : options.check_data      ? Features::kChecked
                                   : Features::kPlain;
}

}  // namespace leanattn::cuda
