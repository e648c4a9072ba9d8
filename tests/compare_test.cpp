// SPDX-License-Identifier: Apache-2.0
// The comparison with the reference, on outputs that are right or wrong.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "inputs.h"
#include "reference.h"
#include "small_problem.h"

namespace leanattn {
namespace {

using testing::Small;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

void fill(Small& s) {
  fill_normal(s.q.data(), DType::kFloat32, 0, s.q.size(), 6, Input::kQ);
  fill_normal(s.k.data(), DType::kFloat32, 0, s.k.size(), 6, Input::kK);
  fill_normal(s.v.data(), DType::kFloat32, 0, s.v.size(), 6, Input::kV);
}

class Compared : public ::testing::Test {
 protected:
  Compared() : s({9, 0, 20}, 2, 4, 2) {
    fill(s);
    s.p.scale = 0.2f;
    right = compute_reference(s.p);
    s.copy_from(right);
  }
  Small s;
  Reference right;
};

TEST_F(Compared, AcceptsTheRoundedReference) {
  const Comparison c = compare(s.p, right);
  EXPECT_TRUE(c.ok());
  EXPECT_EQ(c.rows, 24);
  EXPECT_GT(c.o.error, 0.0);
  EXPECT_LT(c.o.error, 1e-6);
  EXPECT_LE(c.o.ratio, 0.5);  // half an ulp of rounding, and the ulp is not all of the tolerance
  EXPECT_GT(c.o.tolerance, 0.0);
}

TEST_F(Compared, NamesTheWorstElement) {
  const int row = (2 * 2 + 1) * 4 + 3;  // seq 2, token 1, head 3
  s.o[row * 32 + 17] += 1e-3f;
  const Comparison c = compare(s.p, right);
  EXPECT_FALSE(c.ok());
  EXPECT_NEAR(c.o.error, 1e-3, 1e-6);
  EXPECT_LT(c.o.tolerance, 1e-5);
  EXPECT_NEAR(c.o.ratio, c.o.error / c.o.tolerance, 1e-9);
  EXPECT_EQ(c.o.seq, 2);
  EXPECT_EQ(c.o.token, 1);
  EXPECT_EQ(c.o.q_head, 3);
  EXPECT_EQ(c.o.dim, 17);
  EXPECT_LE(c.lse.ratio, 1.0);
}

TEST_F(Compared, ToleranceIsTwiceTheNaiveErrorAndAnUlp) {
  const double right_value = right.o[5];
  const double ulp = std::ldexp(1.0, std::ilogb(right_value) - 23);
  s.o[5] = static_cast<float>(right_value + 2 * right.naive_o_error[0] + 0.4 * ulp);
  EXPECT_TRUE(compare(s.p, right).ok());
  s.o[5] = static_cast<float>(right_value + 2 * right.naive_o_error[0] + 1.6 * ulp);
  EXPECT_FALSE(compare(s.p, right).ok());
}

TEST_F(Compared, LseHasItsOwn) {
  s.lse[2] += 1e-4f;
  const Comparison c = compare(s.p, right);
  EXPECT_FALSE(c.ok());
  EXPECT_LE(c.o.ratio, 1.0);
  EXPECT_EQ(c.lse.dim, -1);
  EXPECT_EQ(c.lse.q_head, 2);
  s.p.lse = nullptr;
  EXPECT_TRUE(compare(s.p, right).ok());
}

TEST_F(Compared, EmptyRowsAreExact) {
  const int row = 1 * 2 * 4;  // the first of seq 1
  s.o[row * 32] = -0.0f;
  EXPECT_TRUE(compare(s.p, right).ok());
  s.o[row * 32] = std::numeric_limits<float>::denorm_min();
  EXPECT_FALSE(compare(s.p, right).ok());
  s.o[row * 32] = 0.0f;
  for (float wrong : {-1e38f, 0.0f, HUGE_VALF, kNan}) {
    s.lse[row] = wrong;
    EXPECT_FALSE(compare(s.p, right).ok()) << wrong;
  }
}

TEST_F(Compared, NanAndInfinityAreWrong) {
  for (float wrong : {kNan, HUGE_VALF, -HUGE_VALF}) {
    s.copy_from(right);
    s.o[40] = wrong;
    const Comparison c = compare(s.p, right);
    EXPECT_FALSE(c.ok());
    EXPECT_EQ(c.o.ratio, kInfinity);
    s.copy_from(right);
    s.lse[1] = wrong;
    EXPECT_FALSE(compare(s.p, right).ok());
  }
}

TEST_F(Compared, AMissingTokenIsSeen) {
  s.kv_lens[2] = 19;
  s.copy_from(compute_reference(s.p));
  s.kv_lens[2] = 20;
  const Comparison c = compare(s.p, right);
  EXPECT_GT(c.o.ratio, 100.0);
  EXPECT_GT(c.lse.ratio, 100.0);
}

TEST_F(Compared, SampleTakesHeadsOfEverySeq) {
  const Reference part = compute_reference(s.p, {.kv_heads_per_seq = 1, .threads = 1});
  EXPECT_EQ(part.rows, 12);
  int with_head[2] = {};
  for (int seq = 0; seq < 3; ++seq) {
    for (int row = seq * 8; row < seq * 8 + 8; ++row) {
      const int kv_head = row % 4 / 2;
      if (part.row[row] == Reference::kNotComputed) continue;
      ++with_head[kv_head];
      EXPECT_EQ(kv_head, seq % 2);
      for (int d = 0; d < 32; ++d) EXPECT_EQ(part.o[row * 32 + d], right.o[row * 32 + d]);
    }
  }
  EXPECT_EQ(with_head[0], 8);
  EXPECT_EQ(with_head[1], 4);
  const Comparison c = compare(s.p, part);
  EXPECT_TRUE(c.ok());
  EXPECT_EQ(c.rows, 12);
}

TEST_F(Compared, ThreadsDoNotChangeABit) {
  Small many({32, 0, 31, 20}, 16, 4, 2);  // so much that a second thread is worth its start
  fill(many);
  const Reference one = compute_reference(many.p, {.kv_heads_per_seq = 0, .threads = 1});
  for (int threads : {2, 5}) {
    const Reference r = compute_reference(many.p, {.kv_heads_per_seq = 0, .threads = threads});
    EXPECT_EQ(r.o, one.o);
    EXPECT_EQ(r.lse, one.lse);
    EXPECT_EQ(r.naive_o_error, one.naive_o_error);
    EXPECT_EQ(r.naive_lse_error, one.naive_lse_error);
  }
}

}  // namespace
}  // namespace leanattn
