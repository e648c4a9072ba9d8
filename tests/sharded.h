// SPDX-License-Identifier: Apache-2.0
// Shards of one long context, each decoded into its own O and LSE, merged and held against a single pass.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "decoding.h"

namespace leanattn::testing {

// decode_shard(problem, shard) is called for each shard.
template <class DecodeShard>
void expect_sharded_is_whole(int shards, LseBase base, DType dtype, DecodeShard decode_shard) {
  CaseData data(parse_case(std::string("2 8 2 64 4k dtype=") + tools::dtype_name(dtype) + (base == LseBase::kTwo ? " lse=2" : "")));
  const Problem whole = data.problem();
  const Reference reference = compute_reference(whole);
  const int rows = whole.batch * whole.q_heads, dims = whole.head_dim;
  const std::int64_t bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  std::vector<std::byte> shard_o(static_cast<std::size_t>(shards * rows * dims * bytes));
  std::vector<float> shard_lse(static_cast<std::size_t>(shards * rows));
  for (int shard = 0; shard < shards; ++shard) {
    const int begin = static_cast<int>(4096LL * shard / shards), end = static_cast<int>(4096LL * (shard + 1) / shards);
    const std::vector<std::int32_t> lens(2, end - begin);
    Problem p = whole;
    p.kv_lens = lens.data();
    p.kv_capacity = end - begin;
    p.k.data = static_cast<const std::byte*>(whole.k.data) + begin * whole.k.token_stride * bytes;
    p.v.data = static_cast<const std::byte*>(whole.v.data) + begin * whole.v.token_stride * bytes;
    p.o = {shard_o.data() + std::int64_t{shard} * rows * dims * bytes, whole.q_heads * dims, whole.q_heads * dims, dims};
    p.lse = shard_lse.data() + std::int64_t{shard} * rows;
    decode_shard(p, shard);
  }
  MergeProblem merging;
  merging.shards = shards;
  merging.rows = rows;
  merging.head_dim_v = dims;
  merging.dtype = dtype;
  merging.lse_base = base;
  merging.shard_o = shard_o.data();
  merging.shard_lse = shard_lse.data();
  merging.o = whole.o.data;
  merging.lse = whole.lse;
  merge(merging);
  if (dtype == DType::kFloat32) {
    EXPECT_TRUE(is_right(whole, reference)) << shards << " shards";
    return;
  }
  // Each shard's O was rounded: beyond the tolerance of one pass, the merged row errs by at most half an ulp of its largest shard.
  EXPECT_LE(compare(whole, reference).lse.ratio, 1.0);
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < dims; ++i) {
      double largest = 0.0;
      for (int shard = 0; shard < shards; ++shard) {
        const double o = load_as_float(shard_o.data(), dtype, (std::int64_t{shard} * rows + row) * dims + i);
        largest = std::max(largest, std::abs(o));
      }
      const double right = reference.o[static_cast<std::size_t>(row * dims + i)];
      const double rounding = std::ldexp(largest, dtype == DType::kFloat16 ? -11 : -8);
      const double naive = 2.0 * reference.naive_o_error[static_cast<std::size_t>(row / whole.q_heads)];
      EXPECT_NEAR(data.o_at(row, i), right, naive + rounding + 2.0 * std::ldexp(std::abs(right), dtype == DType::kFloat16 ? -10 : -7));
    }
  }
}

}  // namespace leanattn::testing
