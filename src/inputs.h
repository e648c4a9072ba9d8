// SPDX-License-Identifier: Apache-2.0
// Test inputs from a counter hash: a value depends on (seed, tensor, index) alone, so that C++, CUDA and Python make the same bits in any
// order. Integer arithmetic modulo 2^64 and one float32 product; nothing from the mathematics library.
//
//   mix(x):  x ^= x >> 30;  x *= 0xbf58476d1ce4e5b9;  x ^= x >> 27;  x *= 0x94d049bb133111eb;  x ^= x >> 31     (SplitMix64's finaliser)
//   hash    = mix(mix(seed·G + tensor + 1) + index·G),  G = 0x9e3779b97f4a7c15
//   uniform = ((hash >> 40) − 2^23)·2^−23                                                       in [−1, 1), exact
//   normal  = (sum of the four 16-bit fields of hash − 131070)·0x1.bb67aep-16                    mean 0, variance 1, within ±3.47
//
// The integer of `normal` has 18 bits and the factor (√3/65536 in float32) 24: a float64 product is exact, so rounding that to float32
// gives the same bits as a float32 product. Rounding to float16 or bfloat16 comes after, to nearest even (numeric.h).
#pragma once

#include <cstdint>

#include "numeric.h"

#if defined(__CUDACC__)
#define LEANATTN_INPUTS_HOST_DEVICE __host__ __device__
#else
#define LEANATTN_INPUTS_HOST_DEVICE
#endif

namespace leanattn {

// Tensor ids.
enum class Input : std::uint64_t { kQ = 0, kK = 1, kV = 2, kAlibiSlopes = 3, kSinks = 4, kTreeMask = 5, kBlockTable = 6, kLengths = 7 };

LEANATTN_INPUTS_HOST_DEVICE constexpr std::uint64_t mix_bits(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

LEANATTN_INPUTS_HOST_DEVICE constexpr std::uint64_t input_hash(std::uint64_t seed, Input tensor, std::uint64_t index) {
  constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;
  return mix_bits(mix_bits(seed * kGolden + static_cast<std::uint64_t>(tensor) + 1) + index * kGolden);
}

LEANATTN_INPUTS_HOST_DEVICE constexpr float input_uniform(std::uint64_t seed, Input tensor, std::uint64_t index) {
  return static_cast<float>(static_cast<std::int32_t>(input_hash(seed, tensor, index) >> 40) - (1 << 23)) * 0x1p-23f;
}

LEANATTN_INPUTS_HOST_DEVICE constexpr float input_normal(std::uint64_t seed, Input tensor, std::uint64_t index) {
  const std::uint64_t hash = input_hash(seed, tensor, index);
  const std::int32_t sum = static_cast<std::int32_t>((hash & 0xffff) + (hash >> 16 & 0xffff) + (hash >> 32 & 0xffff) + (hash >> 48));
  return static_cast<float>(sum - 131070) * 0x1.bb67aep-16f;
}

// Elements [begin, end) of an array, each from its own index; a factor of 1 leaves the bits as they are.
inline void fill_normal(void* data, DType dtype, std::int64_t begin, std::int64_t end, std::uint64_t seed, Input tensor,
                        float factor = 1.0f) {
  for (std::int64_t i = begin; i < end; ++i) {
    store_from_float(data, dtype, i, input_normal(seed, tensor, static_cast<std::uint64_t>(i)) * factor);
  }
}

}  // namespace leanattn
