// SPDX-License-Identifier: Apache-2.0
// The float64 reference against cases small enough to work out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "inputs.h"
#include "reference.h"
#include "small_problem.h"

namespace leanattn {
namespace {

using testing::Small;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The tokens with weight; with keys of 0 all have the same.
std::vector<int> seen(const Reference& r, int row, int dim = 32) {
  std::vector<int> tokens;
  for (int t = 0; t < dim; ++t) {
    if (r.o[std::size_t{1} * row * dim + t] > 0) tokens.push_back(t);
  }
  for (int t : tokens) EXPECT_NEAR(r.o[std::size_t{1} * row * dim + t], 1.0 / tokens.size(), 1e-15);
  EXPECT_NEAR(r.lse[row], std::log(static_cast<double>(tokens.size())), 1e-15);
  return tokens;
}

using Tokens = std::vector<int>;

// By hand: q = (1, 0 …), k_0 = 0, k_1 = (ln 3, 0 …): e^0 = 1 and e^(ln 3) = 3, so the weights are 1/4 and 3/4 and LSE is ln 4.
TEST(Reference, TwoTokensByHand) {
  Small s({2});
  s.q[0] = 1.0f;
  s.k[32] = std::log(3.0f);
  s.v[2] = 8.0f, s.v[32 + 2] = 4.0f;  // 8/4 + 4·3/4 = 5
  const Reference r = compute_reference(s.p);
  EXPECT_NEAR(r.o[0], 0.25, 2e-8);  // ln 3 is rounded to float32
  EXPECT_NEAR(r.o[1], 0.75, 2e-8);
  EXPECT_NEAR(r.o[2], 5.0, 2e-7);
  EXPECT_NEAR(r.lse[0], std::log(4.0), 1e-7);
  const double w = 1 / (1 + std::exp(-double{s.k[32]}));  // and to the last digits from the stored value
  EXPECT_NEAR(r.o[1], w, 1e-15);
  EXPECT_EQ(r.rows, 1);
}

TEST(Reference, EqualKeysGiveTheMeanOfV) {
  Small s({7, 30}, 1, 4, 2);
  fill_normal(s.q.data(), DType::kFloat32, 0, s.q.size(), 1, Input::kQ);
  for (float& x : s.k) x = 0.5f;
  fill_normal(s.v.data(), DType::kFloat32, 0, s.v.size(), 1, Input::kV);
  const Reference r = compute_reference(s.p);
  for (int b = 0; b < 2; ++b) {
    for (int h = 0; h < 4; ++h) {
      double qk = 0;
      for (int i = 0; i < 32; ++i) qk += 0.5 * s.q[(b * 4 + h) * 32 + i];
      EXPECT_NEAR(r.lse[b * 4 + h], qk + std::log(s.kv_lens[b]), 1e-13);
      for (int i = 0; i < 32; ++i) {
        double mean = 0;
        for (int t = 0; t < s.kv_lens[b]; ++t) mean += s.v[((b * 32 + t) * 2 + h / 2) * 32 + i] / double(s.kv_lens[b]);
        EXPECT_NEAR(r.o[(b * 4 + h) * 32 + i], mean, 1e-14);
      }
    }
  }
}

TEST(Reference, OneKeyDominates) {
  Small s({30});
  s.q[3] = 100.0f;
  s.k[29 * 32 + 3] = 100.0f;  // logit 1e4, the others 0
  const Reference r = compute_reference(s.p);
  EXPECT_EQ(r.o[29], 1.0);
  EXPECT_EQ(r.o[0], 0.0);
  EXPECT_EQ(r.lse[0], 1e4);
}

TEST(Reference, DefaultScaleIsOneOverRootHeadDim) {
  Small s({2}, 1, 1, 1, 64);
  s.p.scale = 0.0f;
  s.q[0] = 8.0f;
  s.k[64] = 1.0f;  // logit 8/√64 = 1
  const Reference r = compute_reference(s.p);
  EXPECT_NEAR(r.o[1], std::exp(1.0) / (1 + std::exp(1.0)), 1e-15);
}

TEST(Reference, CausalIsBottomRight) {
  Small s({5}, 3);
  Reference r = compute_reference(s.p);
  EXPECT_EQ(seen(r, 0), (Tokens{0, 1, 2}));
  EXPECT_EQ(seen(r, 1), (Tokens{0, 1, 2, 3}));
  EXPECT_EQ(seen(r, 2), (Tokens{0, 1, 2, 3, 4}));
  s.p.causal = false;
  r = compute_reference(s.p);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(seen(r, i), (Tokens{0, 1, 2, 3, 4}));
}

TEST(Reference, LeftWindow) {
  Small s({6}, 2);
  s.p.window_left = 2;
  Reference r = compute_reference(s.p);  // positions 4 and 5
  EXPECT_EQ(seen(r, 0), (Tokens{2, 3, 4}));
  EXPECT_EQ(seen(r, 1), (Tokens{3, 4, 5}));
  s.p.window_left = 0;
  r = compute_reference(s.p);
  EXPECT_EQ(seen(r, 0), (Tokens{4}));
  EXPECT_EQ(seen(r, 1), (Tokens{5}));
  s.p.window_left = 1, s.p.causal = false;
  r = compute_reference(s.p);
  EXPECT_EQ(seen(r, 0), (Tokens{3, 4, 5}));
  EXPECT_EQ(seen(r, 1), (Tokens{4, 5}));
}

TEST(Reference, TreeMask) {
  // After 3 tokens a tree of 4: 0 with children 1 and 2, 3 below 1.
  Small s({7}, 4);
  std::vector<std::uint64_t> tree{0b0001, 0b0011, 0b0101, 0b1011};
  s.p.tree_mask = tree.data();
  Reference r = compute_reference(s.p);
  EXPECT_EQ(seen(r, 0), (Tokens{0, 1, 2, 3}));
  EXPECT_EQ(seen(r, 1), (Tokens{0, 1, 2, 3, 4}));
  EXPECT_EQ(seen(r, 2), (Tokens{0, 1, 2, 3, 5}));
  EXPECT_EQ(seen(r, 3), (Tokens{0, 1, 2, 3, 4, 6}));
  s.p.window_left = 2;  // positions 3 to 6
  r = compute_reference(s.p);
  EXPECT_EQ(seen(r, 2), (Tokens{3, 5}));
  EXPECT_EQ(seen(r, 3), (Tokens{4, 6}));
  s.p.window_left = -1;
  tree[0] = 0b1001;  // above the diagonal
  EXPECT_EQ(seen(compute_reference(s.p), 0), (Tokens{0, 1, 2, 3}));
  s.p.causal = false;
  EXPECT_EQ(seen(compute_reference(s.p), 0), (Tokens{0, 1, 2, 3, 6}));
}

// Rows of a tree mask have ⌈q_len / 64⌉ words of the longest seq; bits count in each seq's own last tokens.
TEST(Reference, TreeMaskOfPackedQueries) {
  Small s({4, 5}, 70);
  const std::vector<std::int32_t> cu{0, 1, 3};
  s.p.cu_seqlens_q = cu.data();
  const std::vector<std::uint64_t> tree{1, ~0ull, 1, ~0ull, 2, ~0ull};
  s.p.tree_mask = tree.data();
  const Reference r = compute_reference(s.p);
  EXPECT_EQ(r.lse.size(), 3u);
  EXPECT_EQ(seen(r, 0), (Tokens{0, 1, 2, 3}));
  EXPECT_EQ(seen(r, 1), (Tokens{0, 1, 2, 3}));
  EXPECT_EQ(seen(r, 2), (Tokens{0, 1, 2, 4}));
}

TEST(Reference, TreeMaskOfTwoWords) {
  Small s({72}, 70, 1, 1, 128);
  std::vector<std::uint64_t> tree(70 * 2, ~0ull);
  tree[138] = 1ull << 63 | 1, tree[139] = 1ull << 5;  // tokens 0, 63 and 69 of the last 70
  s.p.tree_mask = tree.data();
  EXPECT_EQ(seen(compute_reference(s.p), 69, 128), (Tokens{0, 1, 2, 65, 71}));
}

TEST(Reference, FewerKeysThanQueries) {
  Small s({2}, 4);  // positions −2 to 1
  s.copy_from(compute_reference(s.p));
  const Reference r = compute_reference(s.p);
  for (int i : {0, 1}) {
    EXPECT_EQ(r.row[i], Reference::kWithoutKeys);
    EXPECT_EQ(r.lse[i], -kInfinity);
    for (int d = 0; d < 32; ++d) EXPECT_EQ(r.o[i * 32 + d], 0.0);
  }
  EXPECT_EQ(seen(r, 2), (Tokens{0}));
  EXPECT_EQ(seen(r, 3), (Tokens{0, 1}));
}

TEST(Reference, Softcap) {
  Small s({2});
  s.p.softcap = 2.0f, s.p.scale = 0.5f;
  s.q[0] = 1.0f;
  s.k[32] = 6.0f;  // 2·tanh(3/2) against 0
  const Reference r = compute_reference(s.p);
  const double w = std::exp(2 * std::tanh(1.5));
  EXPECT_NEAR(r.o[1], w / (1 + w), 1e-15);
  EXPECT_NEAR(r.lse[0], std::log(1 + w), 1e-15);
}

// Slope ln 2: a token each step away weighs half of the one before, to both sides.
TEST(Reference, Alibi) {
  Small s({3}, 2, 2);
  const std::vector<float> slopes{static_cast<float>(std::log(2.0)), 0.0f};
  s.p.alibi_slopes = slopes.data();
  s.p.causal = false;
  const Reference r = compute_reference(s.p);
  const double half = std::exp(-double{slopes[0]});
  const double sum = 1 + half + half;  // query token 0 at position 1: distances 1, 0, 1
  EXPECT_NEAR(r.o[0], half / sum, 1e-15);
  EXPECT_NEAR(r.o[1], 1 / sum, 1e-15);
  EXPECT_NEAR(r.o[2], half / sum, 1e-15);
  EXPECT_EQ(seen(r, 1), (Tokens{0, 1, 2}));                                 // head 1
  EXPECT_NEAR(r.o[2 * 32], half * half / (1 + half + half * half), 1e-15);  // query token 1: distances 2, 1, 0
}

TEST(Reference, Sinks) {
  Small s({3, 0}, 1, 3);
  const std::vector<float> sinks{0.0f, -HUGE_VALF, 1e4f};
  s.p.sinks = sinks.data();
  const Reference r = compute_reference(s.p);
  EXPECT_NEAR(r.o[0], 0.25, 1e-15);  // three keys and the sink, all of logit 0
  EXPECT_NEAR(r.lse[0], std::log(4.0), 1e-15);
  EXPECT_EQ(seen(r, 1), (Tokens{0, 1, 2}));
  EXPECT_EQ(r.o[2 * 32], 0.0);  // e^−1e4
  EXPECT_EQ(r.lse[2], 1e4);
  EXPECT_EQ(r.lse[3], 0.0);  // no keys: LSE is the sink
  EXPECT_EQ(r.lse[4], -kInfinity);
  EXPECT_EQ(r.lse[5], 1e4);
  for (int i = 3 * 32; i < 6 * 32; ++i) EXPECT_EQ(r.o[i], 0.0);
}

TEST(Reference, LseOfBaseTwo) {
  Small s({4, 0});
  s.p.lse_base = LseBase::kTwo;
  const Reference r = compute_reference(s.p);
  EXPECT_NEAR(r.lse[0], 2.0, 1e-15);
  EXPECT_EQ(r.lse[1], -kInfinity);
}

// V of 16 bits, its dim apart from that of K, two KV heads: values as stored, in their own type.
TEST(Reference, SixteenBitTypes) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    Small s({4}, 1, 2, 2, 64);
    s.p.q_dtype = s.p.kv_dtype = dtype;
    s.p.head_dim_v = 32;
    std::vector<std::uint16_t> v(4 * 2 * 32);
    fill_normal(v.data(), dtype, 0, v.size(), 3, Input::kV);
    v[0] = 1;  // the smallest subnormal
    s.p.v = {v.data(), 0, 64, 32};
    const Reference r = compute_reference(s.p);
    for (int h = 0; h < 2; ++h) {
      for (int d = 0; d < 32; ++d) {
        double mean = 0;
        for (int t = 0; t < 4; ++t) {
          const int bits = v[t * 64 + h * 32 + d], wide = dtype == DType::kFloat16 ? 10 : 7, bias = dtype == DType::kFloat16 ? 15 : 127;
          const int exponent = (bits & 0x7fff) >> wide, fraction = bits & ((1 << wide) - 1);
          const double x = std::ldexp(exponent ? fraction + (1 << wide) : fraction, std::max(exponent, 1) - bias - wide);
          mean += (bits & 0x8000 ? -x : x) / 4;
        }
        EXPECT_NEAR(r.o[h * 32 + d], mean, 1e-15);
      }
    }
  }
}

// The same tokens in every layout, with NaN wherever no row looks: equal to the last bit.
TEST(Reference, LayoutsAgreeAndReadNothingElse) {
  const std::vector<std::int32_t> lens{5, 0, 9};
  Small s(lens, 2, 4, 2);
  fill_normal(s.q.data(), DType::kFloat32, 0, s.q.size(), 1, Input::kQ);
  fill_normal(s.k.data(), DType::kFloat32, 0, s.k.size(), 1, Input::kK);
  fill_normal(s.v.data(), DType::kFloat32, 0, s.v.size(), 1, Input::kV);
  s.p.window_left = 4;
  const Reference right = compute_reference(s.p);
  const auto first_seen = [](int len) { return std::max(len - 2 - 4, 0); };
  const auto agrees = [&](const Problem& p, const char* name) {
    const Reference r = compute_reference(p);
    EXPECT_EQ(r.o, right.o) << name;
    EXPECT_EQ(r.lse, right.lse) << name;
  };
  // Puts every seen row of K and V at offset(b, t, h), NaN elsewhere.
  const auto laid_out = [&](std::size_t size, const std::function<std::size_t(int, int, int)>& offset, std::vector<float>& k,
                            std::vector<float>& v) {
    k.assign(size, kNan), v.assign(size, kNan);
    for (int b = 0; b < 3; ++b) {
      for (int t = first_seen(lens[b]); t < lens[b]; ++t) {
        for (int i = 0; i < 64; ++i) {
          k[offset(b, t, i / 32) + i % 32] = s.k[(b * 32 + t) * 64 + i];
          v[offset(b, t, i / 32) + i % 32] = s.v[(b * 32 + t) * 64 + i];
        }
      }
    }
  };
  std::vector<float> k, v;
  Problem p = s.p;
  const auto point = [&](std::int64_t outer, std::int64_t token, std::int64_t head) {
    p.k = {k.data(), outer, token, head}, p.v = {v.data(), outer, token, head};
  };
  laid_out(
      s.k.size(), [](int b, int t, int h) { return (b * 32 + t) * 64 + h * 32; }, k, v);
  point(2048, 64, 32);
  agrees(p, "batched");
  laid_out(
      s.k.size(), [](int b, int t, int h) { return ((b * 2 + h) * 32 + t) * 32; }, k, v);
  point(2048, 32, 1024);
  agrees(p, "head-major");
  const std::vector<std::int32_t> cu_kv{0, 5, 5, 14};
  laid_out(
      14 * 64, [&](int b, int t, int h) { return (cu_kv[b] + t) * 64 + h * 32; }, k, v);
  point(0, 64, 32);
  p.kv_layout = KvLayout::kRagged, p.cu_seqlens_kv = cu_kv.data(), p.kv_lens = nullptr;
  agrees(p, "ragged");
  p.kv_lens = lens.data();
  agrees(p, "ragged with kv_lens");
  // Pages of 2 tokens. Seq 2 sees tokens 3 to 8, in slots 1 to 4.
  const std::vector<std::int32_t> slots{6, 1, 4, -9, 99, -1, -1, -1, -1, -1, -1, 0, 7, 2, 5};
  laid_out(
      8 * 128, [&](int b, int t, int h) { return slots[b * 5 + t / 2] * 128 + t % 2 * 64 + h * 32; }, k, v);
  point(128, 64, 32);
  p.kv_layout = KvLayout::kPaged, p.cu_seqlens_kv = nullptr;
  p.page_size = 2, p.num_pages = 8, p.max_pages = 5, p.block_table = slots.data();
  agrees(p, "paged");
  // Q and O packed.
  const std::vector<std::int32_t> cu_q{0, 2, 4, 6};
  p.cu_seqlens_q = cu_q.data();
  agrees(p, "packed");
}

// NaN in V of a token that one row sees and another does not stays with the row that sees it.
TEST(Reference, MaskedNanDoesNotSpread) {
  Small s({4}, 2);
  s.v[3 * 32] = kNan;  // token 3, seen by query token 1 only
  const Reference r = compute_reference(s.p);
  EXPECT_EQ(seen(r, 0), (Tokens{0, 1, 2}));
  EXPECT_TRUE(std::isnan(r.o[32]));
}

TEST(Reference, LongerThanOneTileAndManyRows) {
  Small s({200, 129}, 1, 6, 2, 256);
  fill_normal(s.q.data(), DType::kFloat32, 0, s.q.size(), 4, Input::kQ);
  fill_normal(s.k.data(), DType::kFloat32, 0, s.k.size(), 4, Input::kK);
  s.p.scale = 0.05f;
  const Reference r = compute_reference(s.p);
  for (int b = 0; b < 2; ++b) {
    for (int h = 0; h < 6; ++h) {
      std::vector<long double> e(s.kv_lens[b]);
      long double sum = 0;
      for (int t = 0; t < s.kv_lens[b]; ++t) {
        long double dot = 0;
        for (int i = 0; i < 256; ++i) {
          dot += static_cast<long double>(s.q[(b * 6 + h) * 256 + i]) * s.k[((b * 256 + t) * 2 + h / 3) * 256 + i];
        }
        sum += e[t] = std::exp(dot * 0.05f);
      }
      EXPECT_NEAR(r.lse[b * 6 + h], std::log(sum), 1e-14);
      for (int t = 0; t < s.kv_lens[b]; ++t) EXPECT_NEAR(r.o[(b * 6 + h) * 256 + t], e[t] / sum, 1e-16);
    }
  }
  EXPECT_GT(r.naive_o_error[0], 1e-10);  // weights of about 1/200 and float32's 6e-8
  EXPECT_LT(r.naive_o_error[0], 1e-7);
  EXPECT_LT(r.naive_lse_error[0], 1e-5);
  EXPECT_GT(r.naive_lse_error[0], 1e-8);
}

TEST(Reference, NaiveErrorFollowsTheType) {
  double error[3];
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    Small s({30}, 1, 4, 2);
    s.p.q_dtype = s.p.kv_dtype = dtype;
    fill_normal(s.q.data(), dtype, 0, s.q.size(), 4, Input::kQ);
    fill_normal(s.k.data(), dtype, 0, s.k.size(), 4, Input::kK);
    fill_normal(s.v.data(), dtype, 0, s.v.size(), 4, Input::kV);
    s.p.scale = 0.2f;
    error[static_cast<int>(dtype)] = compute_reference(s.p).naive_o_error[0];
  }
  EXPECT_GT(error[0], 1e-9);
  EXPECT_LT(error[0], 1e-6);
  EXPECT_GT(error[1], 20 * error[0]);  // P of 11 bits
  EXPECT_GT(error[2], 4 * error[1]);   // of 8
  EXPECT_LT(error[2], 4e-3);           // 2^−8
}

}  // namespace
}  // namespace leanattn
