// SPDX-License-Identifier: Apache-2.0
// A problem small enough to work out by hand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "leanattn/problem.h"
#include "reference.h"

namespace leanattn::testing {

// One problem over contiguous float32 tensors, all 0 at first; V of token t is 1 in dim t and 0 elsewhere, so that O[t] is the weight of
// token t.
struct Small {
  explicit Small(std::vector<std::int32_t> lens, int q_len = 1, int q_heads = 1, int kv_heads = 1, int dim = 32)
      : kv_lens(std::move(lens)), capacity(dim) {
    p.batch = static_cast<int>(kv_lens.size());
    p.q_heads = q_heads, p.kv_heads = kv_heads, p.head_dim = dim, p.q_len = q_len;
    p.scale = 1.0f;
    q.resize(std::size_t{1} * p.batch * q_len * q_heads * dim);
    o.resize(q.size());
    lse.resize(std::size_t{1} * p.batch * q_len * q_heads);
    k.resize(std::size_t{1} * p.batch * capacity * kv_heads * dim);
    v.resize(k.size());
    for (int b = 0; b < p.batch; ++b) {
      for (int t = 0; t < capacity; ++t) {
        for (int h = 0; h < kv_heads; ++h) v[((std::size_t{1} * b * capacity + t) * kv_heads + h) * dim + t] = 1.0f;
      }
    }
    const std::int64_t q_row = std::int64_t{q_heads} * dim, kv_row = std::int64_t{kv_heads} * dim;
    p.q = {q.data(), q_row * q_len, q_row, dim};
    p.o = {o.data(), q_row * q_len, q_row, dim};
    p.k = {k.data(), kv_row * capacity, kv_row, dim};
    p.v = {v.data(), kv_row * capacity, kv_row, dim};
    p.lse = lse.data();
    p.kv_lens = kv_lens.data();
    p.kv_capacity = capacity;
  }
  // Rounds the reference to the output, as a perfect kernel would leave it.
  void copy_from(const Reference& r) {
    for (std::size_t i = 0; i < o.size(); ++i) o[i] = static_cast<float>(r.o[i]);
    for (std::size_t i = 0; i < lse.size(); ++i) lse[i] = static_cast<float>(r.lse[i]);
  }
  std::vector<std::int32_t> kv_lens;
  int capacity;
  std::vector<float> q, o, lse, k, v;
  Problem p;
};

}  // namespace leanattn::testing
