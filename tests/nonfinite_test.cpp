// SPDX-License-Identifier: Apache-2.0
// NaN is not lost: a model that went wrong must not look like an empty context.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "isas.h"
#include "leanattn/attention.h"
#include "numeric.h"

namespace leanattn {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kAllOnes = std::bit_cast<float>(0xffffffffu);  // the NaN of memory filled with 0xff
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kTokens = 700, kDim = 64;

// One KV head with `group` rows; every number small and finite until a test spoils one.
struct Spoiled {
  int group;
  DType dtype;
  std::vector<float> q, k, v, o, lse;
  std::vector<float> sinks, slopes;

  Spoiled(int rows, DType type) : group(rows), dtype(type) {
    q.assign(static_cast<std::size_t>(group * kDim), 0.125f);
    k.assign(kTokens * kDim, 0.0625f);
    v.assign(kTokens * kDim, 1.0f);
  }

  std::vector<std::uint16_t> stored(const std::vector<float>& values) const {
    std::vector<std::uint16_t> bits(values.size());
    for (std::size_t i = 0; i < values.size() && dtype != DType::kFloat32; ++i) {
      store_from_float(bits.data(), dtype, static_cast<std::int64_t>(i), values[i]);
    }
    return bits;
  }

  void decode_with(const std::string& isa, int workers) {
    const std::vector<std::uint16_t> q16 = stored(q), k16 = stored(k), v16 = stored(v);
    std::vector<std::uint16_t> o16(q.size());
    o.assign(q.size(), 0.0f);
    lse.assign(static_cast<std::size_t>(group), 0.0f);
    const bool wide = dtype == DType::kFloat32;
    const std::int32_t kv_len = kTokens;
    Problem p;
    p.batch = p.kv_heads = 1;
    p.q_heads = group;
    p.head_dim = kDim;
    p.q_dtype = p.kv_dtype = dtype;
    p.q = {wide ? static_cast<const void*>(q.data()) : q16.data(), group * kDim, group * kDim, kDim};
    p.o = {wide ? static_cast<void*>(o.data()) : o16.data(), group * kDim, group * kDim, kDim};
    p.k = {wide ? static_cast<const void*>(k.data()) : k16.data(), kTokens * kDim, kDim, kDim};
    p.v = {wide ? static_cast<const void*>(v.data()) : v16.data(), kTokens * kDim, kDim, kDim};
    p.lse = lse.data();
    p.kv_lens = &kv_len;
    p.kv_capacity = kTokens;
    p.sinks = sinks.empty() ? nullptr : sinks.data();
    p.alibi_slopes = slopes.empty() ? nullptr : slopes.data();
    Options options;
    options.cpu_isa = isa.c_str();
    options.workers = workers;
    options.policy = Policy::kFlashDecoding;
    options.splits = workers;
    std::vector<std::byte> workspace(workspace_bytes(p, options));
    decode(p, options, workspace);
    if (!wide) {
      for (std::size_t i = 0; i < o.size(); ++i) o[i] = load_as_float(o16.data(), dtype, static_cast<std::int64_t>(i));
    }
  }

  // Rows [0, spoiled) are NaN throughout, the others are not.
  void expect_nan_rows(int spoiled, const std::string& what) const {
    for (int r = 0; r < group; ++r) {
      EXPECT_EQ(std::isnan(lse[static_cast<std::size_t>(r)]), r < spoiled) << what << ", row " << r;
      for (int i = 0; i < kDim; ++i) EXPECT_EQ(std::isnan(o[static_cast<std::size_t>(r * kDim + i)]), r < spoiled) << what << ", row " << r;
    }
  }
};

TEST(NonFinite, NanMakesItsRowsNan) {
  for (const std::string& isa : testing::isas()) {
    for (const int group : {1, 3, 8, 16}) {
      for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        for (const int workers : {1, 3}) {
          const std::string where = isa + " group " + std::to_string(group) + " workers " + std::to_string(workers);
          Spoiled clean(group, dtype);
          clean.decode_with(isa, workers);
          clean.expect_nan_rows(0, where);
          Spoiled q(group, dtype);
          q.q[5] = kNaN;
          q.decode_with(isa, workers);
          q.expect_nan_rows(1, where + " q");
          for (const float nan : {kNaN, kAllOnes}) {
            for (const int token : {0, 7, 333, kTokens - 1}) {
              Spoiled key(group, dtype);
              key.k[static_cast<std::size_t>(token * kDim + 3)] = nan;
              key.decode_with(isa, workers);
              key.expect_nan_rows(group, where + " key " + std::to_string(token));
            }
          }
          Spoiled infinite(group, dtype);
          infinite.k[7 * kDim + 3] = kInfinity;  // its logit is infinite: so are e^s and the sum
          infinite.decode_with(isa, workers);
          infinite.expect_nan_rows(group, where + " infinite key");
          Spoiled sink(group, dtype);
          sink.sinks.assign(static_cast<std::size_t>(group), 0.0f);
          sink.sinks[0] = kNaN;
          sink.decode_with(isa, workers);
          sink.expect_nan_rows(1, where + " sink");
          Spoiled slope(group, dtype);
          slope.slopes.assign(static_cast<std::size_t>(group), 0.0f);
          slope.slopes[0] = kNaN;
          slope.decode_with(isa, workers);
          slope.expect_nan_rows(1, where + " slope");
        }
      }
    }
  }
}

TEST(NonFinite, MergeKeepsNanInAnyOrder) {
  for (const std::vector<float>& lses : {std::vector<float>{kNaN, 0.0f}, {0.0f, kNaN}, {kNaN, 90.0f, -90.0f}, {90.0f, kNaN, -kInfinity}}) {
    const std::vector<float> values(lses.size(), 5.0f);
    float o = 0.0f, lse = 0.0f;
    MergeProblem problem;
    problem.shards = static_cast<std::int32_t>(lses.size());
    problem.rows = problem.head_dim_v = 1;
    problem.shard_o = values.data();
    problem.shard_lse = lses.data();
    problem.o = &o;
    problem.lse = &lse;
    merge(problem);
    EXPECT_TRUE(std::isnan(o) && std::isnan(lse)) << o << " " << lse;
  }
}

}  // namespace
}  // namespace leanattn
