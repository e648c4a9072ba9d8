// SPDX-License-Identifier: Apache-2.0
// Conversions, over every bit pattern, against the definition of each format; test inputs against values worked out in Python.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "inputs.h"
#include "numeric.h"

namespace leanattn {
namespace {

struct Format {
  const char* name;
  int fraction_bits;
  int exponent_bits;
  float (*to_float)(std::uint16_t);
  std::uint16_t (*from_float)(float);
};

const Format kFormats[] = {{"float16", 10, 5, float_from_float16, float16_from_float},
                           {"bfloat16", 7, 8, float_from_bfloat16, bfloat16_from_float}};

// The value of a pattern of IEEE 754 layout, in float64; infinity and NaN as they come.
double value_of(const Format& format, int bits) {
  const int fraction = bits & ((1 << format.fraction_bits) - 1);
  const int exponent = bits >> format.fraction_bits & ((1 << format.exponent_bits) - 1);
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  double magnitude;
  if (exponent == (1 << format.exponent_bits) - 1) {
    magnitude = fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(fraction, 1 - bias - format.fraction_bits);
  } else {
    magnitude = std::ldexp(fraction + (1 << format.fraction_bits), exponent - bias - format.fraction_bits);
  }
  return bits >> 15 ? -magnitude : magnitude;
}

TEST(Conversions, EveryPatternToFloatAndBack) {
  for (const Format& format : kFormats) {
    for (int bits = 0; bits < 65536; ++bits) {
      const float value = format.to_float(static_cast<std::uint16_t>(bits));
      const double right = value_of(format, bits);
      if (std::isnan(right)) {
        ASSERT_TRUE(std::isnan(value)) << format.name << " " << bits;
        ASSERT_TRUE(std::isnan(format.to_float(format.from_float(value)))) << format.name << " " << bits;
        continue;
      }
      ASSERT_EQ(value, right) << format.name << " " << bits;
      ASSERT_EQ(std::signbit(value), bits >> 15 != 0) << format.name << " " << bits;
      ASSERT_EQ(format.from_float(value), bits) << format.name << " " << bits;
    }
  }
}

// Between two neighbours everything below the middle goes down, everything above goes up, and the middle goes to the even pattern. That
// is all there is to rounding to nearest even, for every pair of neighbours of both signs; the last pair is (largest, infinity).
TEST(Conversions, RoundToNearestEven) {
  for (const Format& format : kFormats) {
    const int infinity = ((1 << format.exponent_bits) - 1) << format.fraction_bits;
    for (int low = 0; low < infinity; ++low) {
      const double below = value_of(format, low);
      const double step = low + 1 < infinity ? value_of(format, low + 1) - below : below - value_of(format, low - 1);
      const float middle = static_cast<float>(below + step / 2);  // exact: float32 has more bits
      ASSERT_EQ(middle, below + step / 2);
      for (int sign : {0, 0x8000}) {
        const float s = sign ? -1.0f : 1.0f;
        ASSERT_EQ(format.from_float(s * middle), sign | (low % 2 == 0 ? low : low + 1)) << format.name << " " << low;
        ASSERT_EQ(format.from_float(s * std::nextafter(middle, 0.0f)), sign | low) << format.name << " " << low;
        ASSERT_EQ(format.from_float(s * std::nextafter(middle, HUGE_VALF)), sign | (low + 1)) << format.name << " " << low;
      }
    }
    EXPECT_EQ(format.from_float(std::numeric_limits<float>::infinity()), infinity);
    EXPECT_EQ(format.from_float(-std::numeric_limits<float>::infinity()), infinity | 0x8000);
    EXPECT_EQ(format.from_float(std::numeric_limits<float>::denorm_min()), 0);
  }
  EXPECT_EQ(float16_from_float(std::numeric_limits<float>::max()), 0x7c00);
  EXPECT_EQ(bfloat16_from_float(std::numeric_limits<float>::max()), 0x7f80);
}

// NaN stays NaN even where only the lowest bits of its payload are set.
TEST(Conversions, NanKeepsItsSign) {
  for (const Format& format : kFormats) {
    for (std::uint32_t payload : {0x1u, 0x7fffffu, 0x400000u, 0x1000u}) {
      for (std::uint32_t sign : {0u, 0x80000000u}) {
        const std::uint16_t bits = format.from_float(std::bit_cast<float>(sign | 0x7f800000u | payload));
        EXPECT_TRUE(std::isnan(format.to_float(bits))) << format.name;
        EXPECT_EQ(bits >> 15, sign >> 31) << format.name;
      }
    }
  }
}

TEST(Conversions, LoadAndStore) {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    std::vector<unsigned char> bytes(3 * dtype_bytes(dtype) + 1, 0xab);
    store_from_float(bytes.data(), dtype, 2, -1.5f);
    EXPECT_EQ(load_as_float(bytes.data(), dtype, 2), -1.5f);
    EXPECT_EQ(bytes[2 * dtype_bytes(dtype) - 1], 0xab);
    EXPECT_EQ(bytes.back(), 0xab);
  }
  EXPECT_EQ(dtype_bytes(DType::kFloat32), 4u);
  EXPECT_EQ(dtype_bytes(DType::kFloat16), 2u);
  EXPECT_EQ(dtype_bytes(DType::kBFloat16), 2u);
}

// Worked out in Python with unbounded integers and float64 products, from the formula in inputs.h.
TEST(Inputs, KnownValues) {
  const struct {
    std::uint64_t seed;
    Input tensor;
    std::uint64_t index, hash;
    float normal, uniform;
  } known[] = {
      {0u, Input::kQ, 0u, 0x7ab40e090f363a7du, -0x1.05276ep+1f, -0x1.52fc8p-5f},
      {1u, Input::kQ, 2u, 0xf18d6ce93d6cf1eeu, 0x1.eb47acp-1f, 0x1.c635bp-1f},
      {7u, Input::kK, 12345678901u, 0x1ce4d8438f1acb99u, 0x1.14a418p-1f, -0x1.8c6cap-1f},
      {18446744073709551615u, Input::kV, 3u, 0xbce1aae20a8389e0u, -0x1.aa15a2p-6f, 0x1.e70d5p-2f},
      {42u, Input::kTreeMask, 1000u, 0x8e0f29e882e75fd3u, -0x1.5eea8cp-1f, 0x1.c1e52p-4f},
      {3u, Input::kLengths, 9223372036854775809u, 0xa23d4bee61bce69eu, 0x1.79c6cap-2f, 0x1.11ea58p-2f},
  };
  for (const auto& k : known) {
    EXPECT_EQ(input_hash(k.seed, k.tensor, k.index), k.hash);
    EXPECT_EQ(input_normal(k.seed, k.tensor, k.index), k.normal);
    EXPECT_EQ(input_uniform(k.seed, k.tensor, k.index), k.uniform);
  }
}

TEST(Inputs, MomentsAndRange) {
  constexpr int kCount = 1 << 18;
  double sum = 0, squares = 0, neighbours = 0, uniform_sum = 0;
  float before = 0;
  for (int i = 0; i < kCount; ++i) {
    const float x = input_normal(5, Input::kK, i), u = input_uniform(5, Input::kK, i);
    ASSERT_LE(std::abs(x), 3.4642f);
    ASSERT_TRUE(u >= -1.0f && u < 1.0f);
    sum += x, squares += x * x, neighbours += x * before, uniform_sum += u;
    before = x;
  }
  const double sigma = 1 / std::sqrt(double{kCount});
  EXPECT_LT(std::abs(sum / kCount), 4 * sigma);
  EXPECT_LT(std::abs(squares / kCount - 1), 6 * sigma);
  EXPECT_LT(std::abs(neighbours / kCount), 4 * sigma);
  EXPECT_LT(std::abs(uniform_sum / kCount), 4 * sigma);
}

// Any stretch of an array is what the whole array holds there, rounded after the draw.
TEST(Inputs, FillByStretches) {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    std::vector<float> whole(100), parts(100);
    fill_normal(whole.data(), dtype, 0, 100, 9, Input::kV, 0.5f);
    for (int begin : {60, 0, 30}) fill_normal(parts.data(), dtype, begin, begin == 60 ? 100 : begin + 30, 9, Input::kV, 0.5f);
    for (int i = 0; i < 100; ++i) {
      ASSERT_EQ(load_as_float(whole.data(), dtype, i), load_as_float(parts.data(), dtype, i));
      float one;
      store_from_float(&one, dtype, 0, input_normal(9, Input::kV, i) * 0.5f);
      ASSERT_EQ(load_as_float(whole.data(), dtype, i), load_as_float(&one, dtype, 0));
    }
  }
}

}  // namespace
}  // namespace leanattn
