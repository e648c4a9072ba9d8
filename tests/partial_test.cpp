// SPDX-License-Identifier: Apache-2.0
// The laws of the merge: identity and commutativity bit for bit, associativity and any bracketing within a proved bound.
//
// The bound. u = 2^−24. Piece i enters the result as e^−D_i·v_i, D_i = M − m_i, through at most k merges. In each its weight is
// multiplied by e^d, where d is the difference of two floats rounded once: an error of |d|·u in the exponent, so |d|·u relative; the |d|
// of all merges sum to D_i, for the maximum only grows along the way. expf adds at most 2u (1 ulp), the product u, the sum u (of a
// partial sum that is at most the sum of the magnitudes). So to first order
//     |computed − exact| ≤ u·Σ e^−D_i·(D_i + 4k)·|v_i|,   and the 1 + 2^−10 below covers higher orders.
// Where e^d or a product is subnormal the relative bounds give way to absolute ones of at most 2^−149 a rounding: 2^−147·(Σ|v_i| + k)
// covers them. Two bracketings differ by at most twice that. ℓ is bounded the same way with v_i = ℓ_i.
#include "partial.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "schedule_model.h"

namespace leanattn {
namespace {

using schedule_test::Random;

// One row with one value, to be merged whole.
struct Piece {
  RowPartial row;
  float value = 0.0f;
};

Piece merged(const Piece& x, const Piece& y) {
  const RowMerge merge = merge_rows(x.row, y.row);
  Piece result{merge.row, x.value};
  merge_values(merge, &result.value, &y.value, 1);
  return result;
}

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

bool same_bits(const Piece& x, const Piece& y) {
  return bits(x.row.max) == bits(y.row.max) && bits(x.row.sum) == bits(y.row.sum) && bits(x.value) == bits(y.value);
}

float unit_float(Random& random) { return static_cast<float>(random.next() >> 40) * 0x1p-24f; }

// Maxima near each other, far apart, equal, huge or −inf; sums ≥ 1 as a maximum that is attained gives; values of both signs and zeros.
Piece random_piece(Random& random) {
  static constexpr float kScales[] = {0.0f, 1e-6f, 1.0f, 1.0f, 10.0f, 10.0f, 100.0f, 1e4f};
  if (random.one_in(16)) return {};
  Piece piece;
  piece.row.max = kScales[random.between(0, 7)] * (2.0f * unit_float(random) - 1.0f);
  piece.row.sum = 1.0f + unit_float(random) * (random.one_in(2) ? 1.0f : 1000.0f);
  piece.value = (2.0f * unit_float(random) - 1.0f) * piece.row.sum * 4.0f;
  if (random.one_in(16)) piece.value = random.one_in(2) ? 0.0f : -0.0f;
  return piece;
}

struct Exact {
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0.0, value = 0.0;
  double sum_bound = 0.0, value_bound = 0.0;  // for one bracketing
};

Exact exact_merge(const std::vector<Piece>& pieces, int merges_on_a_path) {
  Exact exact;
  for (const Piece& piece : pieces) exact.max = std::max(exact.max, static_cast<double>(piece.row.max));
  for (const Piece& piece : pieces) {
    if (piece.row.sum == 0.0f) continue;
    const double depth = exact.max - piece.row.max, weight = std::exp(-depth);
    const double relative = 0x1p-24 * (1 + 0x1p-10) * (depth + 4.0 * merges_on_a_path);
    exact.sum += weight * piece.row.sum;
    exact.value += weight * piece.value;
    exact.sum_bound += weight * piece.row.sum * relative + 0x1p-147 * piece.row.sum;
    exact.value_bound += weight * std::fabs(piece.value) * relative + 0x1p-147 * std::fabs(piece.value);
  }
  exact.sum_bound += 0x1p-147 * merges_on_a_path;
  exact.value_bound += 0x1p-147 * merges_on_a_path;
  return exact;
}

void expect_within(const Piece& piece, const Exact& exact) {
  ASSERT_EQ(static_cast<double>(piece.row.max), exact.max);
  ASSERT_LE(std::fabs(piece.row.sum - exact.sum), exact.sum_bound);
  ASSERT_LE(std::fabs(piece.value - exact.value), exact.value_bound);
}

TEST(Partial, EmptyIsTheIdentityBitForBit) {
  Random random(1);
  std::vector<Piece> pieces{{}, {{0.0f, 1.0f}, -0.0f}, {{-0.0f, 1.0f}, 0.0f}, {{-1e30f, 1.0f}, 1e-45f}, {{1e30f, 3e38f}, -3e38f}};
  for (int i = 0; i < 100000; ++i) pieces.push_back(random_piece(random));
  const Piece empty, poisoned{{}, std::numeric_limits<float>::quiet_NaN()};
  for (const Piece& piece : pieces) {
    ASSERT_TRUE(same_bits(merged(piece, empty), piece)) << piece.row.max << " " << piece.value;
    ASSERT_TRUE(same_bits(merged(empty, piece), piece)) << piece.row.max << " " << piece.value;
    if (piece.row.sum == 0.0f) continue;
    ASSERT_TRUE(same_bits(merged(piece, poisoned), piece));  // the values of an empty partial are not looked at
    ASSERT_TRUE(same_bits(merged(poisoned, piece), piece));
  }
}

TEST(Partial, TwoEmptiesAreEmpty) {
  const Piece empty, result = merged(empty, empty);
  EXPECT_TRUE(same_bits(result, empty));
  EXPECT_EQ(bits(finish_factor(result.row)), bits(0.0f));
  EXPECT_EQ(finish_lse(result.row), -std::numeric_limits<float>::infinity());
}

TEST(Partial, CommutesBitForBit) {
  Random random(2);
  for (int i = 0; i < 5'000'000; ++i) {
    const Piece x = random_piece(random);
    Piece y = random_piece(random);
    if (i % 8 == 0) y.row.max = x.row.max;                             // a tie
    if (i % 8 == 1) y.row.max = std::nextafterf(x.row.max, INFINITY);  // as near as floats get
    if (y.row.max == -INFINITY) y = {};
    if (y.row.max != -INFINITY && y.row.sum == 0.0f) y.row.sum = 1.0f;
    const Piece xy = merged(x, y), yx = merged(y, x);
    ASSERT_TRUE(same_bits(xy, yx)) << "(" << x.row.max << ", " << x.row.sum << ", " << x.value << ") with (" << y.row.max << ", "
                                   << y.row.sum << ", " << y.value << ")";
    ASSERT_FALSE(std::isnan(xy.row.sum) || std::isnan(xy.value));
  }
}

TEST(Partial, IsAssociativeWithinTheBound) {
  Random random(3);
  for (int i = 0; i < 500'000; ++i) {
    const Piece x = random_piece(random), y = random_piece(random), z = random_piece(random);
    const Piece left = merged(merged(x, y), z), right = merged(x, merged(y, z));
    const Exact exact = exact_merge({x, y, z}, 2);
    expect_within(left, exact);
    expect_within(right, exact);
    if (HasFatalFailure()) return;
    ASSERT_LE(std::fabs(left.row.sum - right.row.sum), 2 * exact.sum_bound);
    ASSERT_LE(std::fabs(left.value - right.value), 2 * exact.value_bound);
  }
}

// Merges two neighbours at random until one piece is left: every bracketing can come up.
TEST(Partial, AnyBracketingOfManyPiecesIsWithinTheBound) {
  Random random(4);
  for (int round = 0; round < 5000; ++round) {
    const int n = random.between(1, 64);
    std::vector<Piece> pieces;
    for (int i = 0; i < n; ++i) pieces.push_back(random_piece(random));
    const Exact exact = exact_merge(pieces, n - 1);
    while (pieces.size() > 1) {
      const int i = random.between(0, static_cast<int>(pieces.size()) - 2);
      pieces[i] = merged(pieces[i], pieces[i + 1]);
      pieces.erase(pieces.begin() + i + 1);
    }
    expect_within(pieces.front(), exact);
    if (HasFatalFailure()) return;
  }
}

TEST(Partial, ValuesOfARowMergeAlike) {
  const RowPartial x{1.0f, 2.0f}, y{3.0f, 4.0f};
  const float factor = std::exp(-2.0f);
  for (const bool swap : {false, true}) {
    const RowMerge merge = swap ? merge_rows(y, x) : merge_rows(x, y);
    EXPECT_EQ(merge.swapped, !swap);
    EXPECT_EQ(merge.row.max, 3.0f);
    EXPECT_FLOAT_EQ(merge.row.sum, 4.0f + factor * 2.0f);
    float of_x[] = {1.0f, -2.0f, 0.0f}, of_y[] = {10.0f, 20.0f, -0.0f};
    float* const mine = swap ? of_y : of_x;
    merge_values(merge, mine, swap ? of_x : of_y, 3);
    EXPECT_FLOAT_EQ(mine[0], 10.0f + factor);
    EXPECT_FLOAT_EQ(mine[1], 20.0f - 2.0f * factor);
    EXPECT_EQ(mine[2], 0.0f);
    merge_values(merge, nullptr, nullptr, 0);
  }
}

TEST(Partial, SinksJoinTheDenominatorOnly) {
  Random random(5);
  for (const float sink : {-std::numeric_limits<float>::infinity(), -1e4f, -1.0f, 0.0f, 1.0f, 1e4f}) {
    for (int i = 0; i < 1000; ++i) {
      Piece piece = random_piece(random);
      if (piece.row.sum == 0.0f) continue;
      piece.row.max = 20.0f * unit_float(random) - 10.0f;
      const Piece with_sink = merged(piece, {sink_partial(sink), 0.0f});
      const double top = std::max<double>(piece.row.max, sink);
      const double sum = std::exp(piece.row.max - top) * piece.row.sum + std::exp(sink - top);
      const double o = std::exp(piece.row.max - top) * piece.value / sum, lse = top + std::log(sum);
      ASSERT_NEAR(with_sink.value * finish_factor(with_sink.row), o, 1e-6 * (1.0 + std::fabs(o)));
      ASSERT_NEAR(finish_lse(with_sink.row), lse, 1e-6 * (1.0 + std::fabs(lse)));
      ASSERT_TRUE(sink != -std::numeric_limits<float>::infinity() || same_bits(with_sink, piece));
    }
    const Piece alone = merged({}, {sink_partial(sink), 0.0f});  // every key masked
    EXPECT_EQ(bits(alone.value * finish_factor(alone.row)), bits(0.0f));
    EXPECT_EQ(finish_lse(alone.row), sink);
  }
}

TEST(Partial, FinishedShardsMergeToTheWhole) {
  Random random(6);
  for (int i = 0; i < 20000; ++i) {
    const Piece x = random_piece(random), y = random_piece(random);
    const Piece shard_x{shard_partial(finish_lse(x.row)), x.value * finish_factor(x.row)};
    const Piece shard_y{shard_partial(finish_lse(y.row)), y.value * finish_factor(y.row)};
    const Piece whole = merged(x, y), shards = merged(shard_x, shard_y);
    const float lse = finish_lse(whole.row);
    if (lse == -INFINITY) {
      ASSERT_EQ(finish_lse(shards.row), lse);
      continue;
    }
    // An LSE is rounded to a float: 2^−24·|LSE| of each shard's weight, and a few roundings.
    const double tolerance = 0x1p-22 * (4.0 + std::fabs(finish_lse(x.row) == -INFINITY ? 0.0f : finish_lse(x.row)) +
                                        std::fabs(finish_lse(y.row) == -INFINITY ? 0.0f : finish_lse(y.row)));
    ASSERT_NEAR(finish_lse(shards.row), lse, tolerance);
    ASSERT_NEAR(shards.value * finish_factor(shards.row), whole.value * finish_factor(whole.row), 8.0 * tolerance);
  }
}

TEST(Partial, ExtremeMaxima) {
  const Piece high{{1e30f, 2.0f}, -3.0f}, low{{-1e30f, 5.0f}, 7.0f}, middle{{0.0f, 1.0f}, 1.0f};
  for (const Piece& other : {low, middle}) {  // the difference underflows: the base keeps its bits
    EXPECT_TRUE(same_bits(merged(high, other), high));
    EXPECT_TRUE(same_bits(merged(other, high), high));
  }
  EXPECT_TRUE(same_bits(merged(middle, low), middle));
  const Piece twice = merged(high, high);
  EXPECT_EQ(twice.row.max, 1e30f);
  EXPECT_EQ(twice.row.sum, 4.0f);
  EXPECT_EQ(twice.value, -6.0f);
  const float largest = std::numeric_limits<float>::max();
  const Piece top{{largest, 1.0f}, 1.0f}, bottom{{-largest, 1.0f}, -0.0f};  // the difference overflows to −inf
  EXPECT_TRUE(same_bits(merged(top, bottom), top));
  EXPECT_TRUE(same_bits(merged(bottom, top), top));
  const Piece just_below{{-104.0f, 1.0f}, 1.0f};  // e^−104 rounds to zero
  EXPECT_TRUE(same_bits(merged(middle, just_below), middle));
  EXPECT_EQ(finish_lse({-1e30f, 5.0f}), -1e30f);
}

}  // namespace
}  // namespace leanattn
