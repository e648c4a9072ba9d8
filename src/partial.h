// SPDX-License-Identifier: Apache-2.0
// The partial: what attention over a piece of the context leaves for one row, and the only merge of two of them.
//
//   m = max s,  ℓ = Σ e^(s − m),  Õ = Σ e^(s − m)·v          (LeanAttention, MLSys 2025, §4.1; Milakov & Gimelshein, 2018)
//
// The side with the larger m is the base and keeps its bits; only the other side is scaled. So the merge is bitwise commutative, an empty
// partial (m = −inf, ℓ = 0, Õ = 0) is its identity bit for bit, two empties give an empty, and it takes one exp.
// Compiles with g++, clang, nvcc and NVRTC; includes nothing.
#pragma once

#if defined(__CUDACC__)
#define LEANATTN_PARTIAL_HOST_DEVICE __host__ __device__
#else
#define LEANATTN_PARTIAL_HOST_DEVICE
#endif

namespace leanattn {

constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xff800000u);  // NVRTC has no builtin infinity
constexpr float kNotANumber = __builtin_bit_cast(float, 0x7fc00000);

// (m, ℓ) of one row. m in natural-log units, or in log2 units for the functions with kLog2: then s·log2(e) stands for s and 2^x for e^x.
enum class LogUnit { kNatural, kLog2 };
struct RowPartial {
  float max = kMinusInfinity;
  float sum = 0.0f;
};

// How two rows merge: value = base + factor·other, where base is y when swapped and x otherwise.
struct RowMerge {
  RowPartial row;
  float factor = 0.0f;  // e^(m_other − m_base); 0 leaves the base as it is
  bool swapped = false;
};

LEANATTN_PARTIAL_HOST_DEVICE inline float exp_natural(float x) {
#if defined(__CUDA_ARCH__)
  return expf(x);
#else
  return __builtin_expf(x);
#endif
}

LEANATTN_PARTIAL_HOST_DEVICE inline float log_natural(float x) {
#if defined(__CUDA_ARCH__)
  return logf(x);
#else
  return __builtin_logf(x);
#endif
}

LEANATTN_PARTIAL_HOST_DEVICE inline float exp_two(float x) {
#if defined(__CUDA_ARCH__)
  return exp2f(x);  // exact for whole x
#else
  return __builtin_exp2f(x);
#endif
}

LEANATTN_PARTIAL_HOST_DEVICE inline float log_two(float x) {
#if defined(__CUDA_ARCH__)
  return log2f(x);
#else
  return __builtin_log2f(x);
#endif
}

LEANATTN_PARTIAL_HOST_DEVICE inline float merge_value(float factor, float base, float other) {
  return factor == 0.0f ? base : base + factor * other;
}

// What a partial with maximum `max` counts on the base `base`, which is no smaller: e^(max − base), or 2^…; 0 for an empty one. Any
// number of partials merge on their largest maximum as Σ weight·ℓ and Σ weight·Õ.
template <LogUnit kUnit = LogUnit::kNatural>
LEANATTN_PARTIAL_HOST_DEVICE inline float merge_weight(float max, float base) {
  if (max == kMinusInfinity) return 0.0f;
  return kUnit == LogUnit::kLog2 ? exp_two(max - base) : exp_natural(max - base);
}

template <LogUnit kUnit = LogUnit::kNatural>
LEANATTN_PARTIAL_HOST_DEVICE inline RowMerge merge_rows(const RowPartial& x, const RowPartial& y) {
  RowMerge merge;
  merge.swapped = y.max > x.max;
  // Member by member: a reference to either would put both in memory on a GPU.
  const RowPartial base{merge.swapped ? y.max : x.max, merge.swapped ? y.sum : x.sum};
  const RowPartial other{merge.swapped ? x.max : y.max, merge.swapped ? x.sum : y.sum};
  merge.factor = merge_weight<kUnit>(other.max, base.max);
  merge.row.max = other.max == 0.0f && base.max == 0.0f ? base.max + other.max : base.max;  // 0 and −0 tie: 0, whichever is the base
  merge.row.sum = merge_value(merge.factor, base.sum, other.sum);
  // A NaN must not be lost to a comparison that it fails or to a factor of 0.
  if (x.max != x.max || y.max != y.max || x.sum != x.sum || y.sum != y.sum) {
    merge.row.max = merge.row.sum = merge.factor = kNotANumber;
  }
  return merge;
}

// x[i] of a row of n values becomes the merged value of x[i] and y[i].
LEANATTN_PARTIAL_HOST_DEVICE inline void merge_values(const RowMerge& merge, float* x, const float* y, int n) {
  if (merge.swapped) {
    for (int i = 0; i < n; ++i) x[i] = merge_value(merge.factor, y[i], x[i]);
  } else {
    for (int i = 0; i < n; ++i) x[i] = merge_value(merge.factor, x[i], y[i]);
  }
}

// A sink logit, in the unit of m, is a partial with no value: it joins the denominator only. −inf: an empty one.
LEANATTN_PARTIAL_HOST_DEVICE inline RowPartial sink_partial(float sink) {
  RowPartial row;
  row.max = sink;
  row.sum = sink == kMinusInfinity ? 0.0f : 1.0f;
  return row;
}

// A finished shard (O, LSE) as a partial whose Õ is O.
LEANATTN_PARTIAL_HOST_DEVICE inline RowPartial shard_partial(float natural_lse) { return sink_partial(natural_lse); }

// O = Õ·finish_factor; an empty row gives 0.
LEANATTN_PARTIAL_HOST_DEVICE inline float finish_factor(const RowPartial& row) { return row.sum == 0.0f ? 0.0f : 1.0f / row.sum; }

// In the unit of m; −inf for an empty row.
template <LogUnit kUnit = LogUnit::kNatural>
LEANATTN_PARTIAL_HOST_DEVICE inline float finish_lse(const RowPartial& row) {
  if (row.sum == 0.0f) return kMinusInfinity;
  return row.max + (kUnit == LogUnit::kLog2 ? log_two(row.sum) : log_natural(row.sum));
}

}  // namespace leanattn
