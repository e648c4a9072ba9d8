// SPDX-License-Identifier: Apache-2.0
// The CPU tile kernel, one source for every instruction set (Google Highway). Read bottom up: run_tile is the story.
//
// What one call does: up to 64 tokens of one KV head against a block of R packed rows (R = 1, 2, 4, 8).
//   scores   N = lanes of a float vector. N running dot products live in registers: R rows × N/R tokens. A K row is loaded and widened to
//            float32 once for all R rows. The N vectors are then summed by transposition (15 adds for N = 16), which leaves one vector of
//            scores; weights[t·R + r] is the layout that falls out of it.
//   weights  the online softmax over that layout, lanes full for every R; mask, soft-cap and ALiBi are uniform branches.
//   values   R rows × a strip of dims of Õ live in registers while all tokens of the tile pass; a V row is widened once for all R rows.
// For each line of K or V that is read, one of the next tile is fetched to L2 (LineStream).
// What bounds it: reading K and V up to group 8 or so; float32 multiply-adds beyond.
//
// A unit is two vectors, 2·N dims, and a load of K or V. bfloat16 is widened by shift (even dims) and mask (odd dims), so a unit of Q and Õ
// holds the even dims first. Rows that are not whole units end in a unit that overlaps the one before; overlapped slots hold no dimension.
#if defined(LEANATTN_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LEANATTN_TILE_INL_H_
#undef LEANATTN_TILE_INL_H_
#else
#define LEANATTN_TILE_INL_H_
#endif

#include <algorithm>
#include <type_traits>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "numeric.h"
#include "src/cpu/tile.h"

HWY_BEFORE_NAMESPACE();
namespace leanattn::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::CappedTag<float, 16>;
using Vec = hn::Vec<Floats>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(Floats()));
constexpr int kUnit = 2 * kLanes;
// Eight rows need 16 accumulators of Õ and as many of scores: more registers than AVX2 has.
constexpr int kMaxRows = kLanes >= 16 ? 8 : std::min(kLanes, 4);
static_assert(32 % kUnit == 0 || kUnit <= 32, "a row of 32 dims holds at least one unit");

// --- Loading one unit of K or V as two float vectors ---

struct Float32 {
  using Element = float;
  static HWY_INLINE void load(const float* p, Vec& a, Vec& b) {
    a = hn::LoadU(Floats(), p);
    b = hn::LoadU(Floats(), p + kLanes);
  }
  static HWY_INLINE void store(Vec a, Vec b, float* p) {
    hn::StoreU(a, Floats(), p);
    hn::StoreU(b, Floats(), p + kLanes);
  }
};

struct Float16 {
  using Element = hwy::float16_t;
  static HWY_INLINE void load(const hwy::float16_t* p, Vec& a, Vec& b) {
    const hn::Rebind<hwy::float16_t, Floats> half;
    a = hn::PromoteTo(Floats(), hn::LoadU(half, p));
    b = hn::PromoteTo(Floats(), hn::LoadU(half, p + kLanes));
  }
  // Scalar: Highway's conversion is rounded to nearest even only where the processor has one.
  static HWY_INLINE void store(Vec a, Vec b, hwy::float16_t* p) {
    HWY_ALIGN float lanes[kUnit];
    hn::Store(a, Floats(), lanes);
    hn::Store(b, Floats(), lanes + kLanes);
    for (int i = 0; i < kUnit; ++i) store_from_float(p, DType::kFloat16, i, lanes[i]);
  }
};

struct BFloat16 {
  using Element = std::uint16_t;
#if HWY_TARGET == HWY_SCALAR
  static HWY_INLINE void load(const std::uint16_t* p, Vec& a, Vec& b) {
    a = hn::Set(Floats(), float_from_bfloat16(p[0]));
    b = hn::Set(Floats(), float_from_bfloat16(p[1]));
  }
  static HWY_INLINE void store(Vec a, Vec b, std::uint16_t* p) {
    p[0] = bfloat16_from_float(hn::GetLane(a));
    p[1] = bfloat16_from_float(hn::GetLane(b));
  }
#else
  static HWY_INLINE void load(const std::uint16_t* p, Vec& a, Vec& b) {
    const hn::RebindToUnsigned<Floats> bits;
    const auto pairs = hn::BitCast(bits, hn::LoadU(hn::Repartition<std::uint16_t, Floats>(), p));
    a = hn::BitCast(Floats(), hn::ShiftLeft<16>(pairs));
    b = hn::BitCast(Floats(), hn::And(pairs, hn::Set(bits, 0xffff0000u)));
  }
  // bfloat16_from_float of numeric.h, lane by lane; the result stands in the upper half.
  static HWY_INLINE auto round(Vec value) {
    const hn::RebindToUnsigned<Floats> bits;
    const auto raw = hn::BitCast(bits, value);
    const auto odd = hn::And(hn::ShiftRight<16>(raw), hn::Set(bits, 1u));
    const auto rounded = hn::Add(hn::Add(raw, hn::Set(bits, 0x7fffu)), odd);
    const auto quiet = hn::Or(raw, hn::Set(bits, 0x400000u));
    return hn::IfThenElse(hn::RebindMask(bits, hn::IsNaN(value)), quiet, rounded);
  }
  static HWY_INLINE void store(Vec a, Vec b, std::uint16_t* p) {
    const hn::RebindToUnsigned<Floats> bits;
    const auto pairs = hn::Or(hn::ShiftRight<16>(round(a)), hn::And(round(b), hn::Set(bits, 0xffff0000u)));
    hn::StoreU(hn::BitCast(hn::Repartition<std::uint16_t, Floats>(), pairs), hn::Repartition<std::uint16_t, Floats>(), p);
  }
#endif
};

constexpr int units_of(int dims) { return (dims + kUnit - 1) / kUnit; }
// First dimension of a unit.
constexpr int unit_start(int dims, int unit) { return std::min(unit * kUnit, dims - kUnit); }

inline int padded_dims(int dims) { return units_of(dims) * kUnit; }

// Zeroes the slots of a last unit that the unit before holds already: a K of Inf there must not meet Q's zero.
template <class Kv>
struct Overlap {
  int a_lanes = 0, b_lanes = 0;
  explicit Overlap(int dims) {
    const int overlap = units_of(dims) * kUnit - dims;
    if (std::is_same_v<Kv, BFloat16>) {
      a_lanes = (overlap + 1) / 2;
      b_lanes = overlap / 2;
    } else {
      a_lanes = std::min(overlap, kLanes);
      b_lanes = overlap - a_lanes;
    }
  }
  HWY_INLINE void clear(Vec& a, Vec& b) const {
    a = hn::IfThenZeroElse(hn::FirstN(Floats(), static_cast<std::size_t>(a_lanes)), a);
    b = hn::IfThenZeroElse(hn::FirstN(Floats(), static_cast<std::size_t>(b_lanes)), b);
  }
};

// Fetches as much of the next tile as one load at `start` (elements) reads.
template <class Kv>
HWY_INLINE void fetch_unit(LineStream& next, int start) {
  constexpr int kBytes = kUnit * static_cast<int>(sizeof(typename Kv::Element));
  if constexpr (kBytes >= 64) {
    for (int i = 0; i < kBytes; i += 64) next.fetch();
  } else {
    if (start * static_cast<int>(sizeof(typename Kv::Element)) % 64 == 0) next.fetch();
  }
}

// --- Step 1: scores ---

#if HWY_TARGET != HWY_SCALAR
// Lane-wise within 128-bit blocks: [Σa, Σb, Σc, Σd] of four vectors.
HWY_INLINE Vec sum_four(Vec a, Vec b, Vec c, Vec d) {
  const Floats f;
  const hn::Repartition<double, Floats> pairs;
  const Vec ab = hn::Add(hn::InterleaveLower(f, a, b), hn::InterleaveUpper(f, a, b));
  const Vec cd = hn::Add(hn::InterleaveLower(f, c, d), hn::InterleaveUpper(f, c, d));
  const auto ab2 = hn::BitCast(pairs, ab);
  const auto cd2 = hn::BitCast(pairs, cd);
  return hn::Add(hn::BitCast(f, hn::InterleaveLower(pairs, ab2, cd2)), hn::BitCast(f, hn::InterleaveUpper(pairs, ab2, cd2)));
}
#endif

// Lane i of the result is the sum of the lanes of acc[i], for N vectors of N lanes.
HWY_INLINE Vec sum_by_transposition(const Vec* HWY_RESTRICT acc) {
#if HWY_TARGET == HWY_SCALAR
  return acc[0];
#else
  const Floats f;
  if constexpr (kLanes == 4) {
    return sum_four(acc[0], acc[1], acc[2], acc[3]);
  } else if constexpr (kLanes == 8) {
    const Vec low = sum_four(acc[0], acc[1], acc[2], acc[3]);
    const Vec high = sum_four(acc[4], acc[5], acc[6], acc[7]);
    return hn::Add(hn::ConcatLowerLower(f, high, low), hn::ConcatUpperUpper(f, high, low));
  } else {
    const Vec g0 = sum_four(acc[0], acc[1], acc[2], acc[3]);
    const Vec g1 = sum_four(acc[4], acc[5], acc[6], acc[7]);
    const Vec g2 = sum_four(acc[8], acc[9], acc[10], acc[11]);
    const Vec g3 = sum_four(acc[12], acc[13], acc[14], acc[15]);
    const Vec even = hn::Add(hn::ConcatLowerLower(f, g2, g0), hn::ConcatUpperUpper(f, g2, g0));  // blocks g0 g0 g2 g2
    const Vec odd = hn::Add(hn::ConcatLowerLower(f, g3, g1), hn::ConcatUpperUpper(f, g3, g1));   // blocks g1 g1 g3 g3
    return hn::OddEvenBlocks(hn::Add(odd, hn::SwapAdjacentBlocks(odd)), hn::Add(even, hn::SwapAdjacentBlocks(even)));
  }
#endif
}

// Adds one unit of N/R tokens' dot products: acc[i·R + r] += K row i · Q row r.
template <class Kv, int R>
HWY_INLINE void score_unit(const typename Kv::Element* const* HWY_RESTRICT rows, int start, const float* HWY_RESTRICT q, Vec* HWY_RESTRICT acc,
                           const Overlap<Kv>* overlap, LineStream& next) {
  const Floats f;
  constexpr int kTokens = kLanes / R;
  Vec a[kTokens], b[kTokens];
#pragma GCC unroll 16
  for (int i = 0; i < kTokens; ++i) {
    Kv::load(rows[i] + start, a[i], b[i]);
    fetch_unit<Kv>(next, start);
    if (overlap) overlap->clear(a[i], b[i]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Vec qa = hn::Load(f, q + r * kUnit);
    const Vec qb = hn::Load(f, q + r * kUnit + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kTokens; ++i) acc[i * R + r] = hn::MulAdd(b[i], qb, hn::MulAdd(a[i], qa, acc[i * R + r]));
  }
}

// tile.weights[t·R + r] = q_r · k_t for all tokens, rounded up to whole vectors with the last token.
template <class Kv, int R>
HWY_INLINE void tile_scores(const Tile& tile) {
  using Element = typename Kv::Element;
  const Floats f;
  constexpr int kTokens = kLanes / R;
  const float* q = static_cast<const float*>(tile.q);
  const int whole_units = tile.head_dim / kUnit;
  const bool ragged_end = whole_units * kUnit != tile.head_dim;
  const Overlap<Kv> overlap(tile.head_dim);
  LineStream next = *tile.next_k;
  for (int t = 0; t < tile.tokens; t += kTokens) {
    const Element* rows[kTokens];
    for (int i = 0; i < kTokens; ++i) {
      rows[i] = reinterpret_cast<const Element*>(tile.k + tile.k_offsets[std::min(t + i, tile.tokens - 1)]);
    }
    Vec acc[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) acc[i] = hn::Zero(f);
    for (int unit = 0; unit < whole_units; ++unit) score_unit<Kv, R>(rows, unit * kUnit, q + unit * R * kUnit, acc, nullptr, next);
    if (ragged_end) score_unit<Kv, R>(rows, tile.head_dim - kUnit, q + whole_units * R * kUnit, acc, &overlap, next);
    hn::Store(sum_by_transposition(acc), f, tile.weights + t * R);
  }
  *tile.next_k = next;
}

// --- Step 2: weights ---

// Lane l of a vector of weights belongs to row l % R and to the vector's token l / R. A block of 16 rows on fewer lanes would need several
// vectors a token: kernels with 16 rows use 16 lanes.
template <int R, class Combine>
HWY_INLINE void fold_lanes(Vec v, float* per_row, Combine combine) {
  HWY_ALIGN float lanes[kLanes];
  hn::Store(v, Floats(), lanes);
  for (int r = 0; r < R; ++r) {
    float value = lanes[r];
    for (int l = r + R; l < kLanes; l += R) value = combine(value, lanes[l]);
    per_row[r] = value;
  }
}

// per_row[l % R] in lane l.
template <int R>
HWY_INLINE Vec spread_rows(const float* per_row) {
  HWY_ALIGN float lanes[kLanes];
  for (int l = 0; l < kLanes; ++l) lanes[l] = per_row[l % R];
  return hn::Load(Floats(), lanes);
}

template <int R>
HWY_NOINLINE void hide_masked(const Tile& tile) {
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < tile.tokens; ++t) {
      if (!(tile.visible[r] >> t & 1)) tile.weights[t * R + r] = kMinusInfinity;
    }
  }
}

// softcap·tanh(s / softcap), then −slope·|position − t|.
template <int R>
HWY_NOINLINE void bend_scores(const Tile& tile, int vectors) {
  const Floats f;
  constexpr int kTokens = kLanes / R;
  const Vec scale = hn::Set(f, tile.scale);
  if (tile.softcap > 0.0f) {
    const Vec cap = hn::Set(f, tile.softcap);
    const Vec inverse = hn::Set(f, tile.scale / tile.softcap);
    for (int i = 0; i < vectors; ++i) {
      float* p = tile.weights + i * kLanes;
      hn::Store(hn::Mul(cap, hn::Tanh(f, hn::Mul(hn::Load(f, p), inverse))), f, p);
    }
  } else if (tile.scale != 1.0f) {
    for (int i = 0; i < vectors; ++i) {
      float* p = tile.weights + i * kLanes;
      hn::Store(hn::Mul(hn::Load(f, p), scale), f, p);
    }
  }
  if (tile.slopes) {
    const Vec slope = spread_rows<R>(tile.slopes);
    HWY_ALIGN float token_of_lane[kLanes];
    for (int l = 0; l < kLanes; ++l) token_of_lane[l] = static_cast<float>(l / R);
    Vec distance = hn::Sub(spread_rows<R>(tile.distances), hn::Load(f, token_of_lane));
    const Vec step = hn::Set(f, static_cast<float>(kTokens));
    for (int i = 0; i < vectors; ++i) {
      float* p = tile.weights + i * kLanes;
      hn::Store(hn::NegMulAdd(slope, hn::Abs(distance), hn::Load(f, p)), f, p);
      distance = hn::Sub(distance, step);
    }
  }
}

// Scores become e^(s − m); (m, ℓ) of each row move on; factors[r] = e^(m_old − m_new).
template <int R>
HWY_INLINE void tile_weights(const Tile& tile, float* HWY_RESTRICT factors) {
  const Floats f;
  constexpr int kTokens = kLanes / R;
  const int vectors = (tile.tokens + kTokens - 1) / kTokens;
  float* weights = tile.weights;
  if (tile.softcap > 0.0f || tile.slopes || tile.scale != 1.0f) bend_scores<R>(tile, vectors);
  if (tile.visible) hide_masked<R>(tile);
  for (int i = tile.tokens * R; i < vectors * kLanes; ++i) weights[i] = kMinusInfinity;

  Vec largest = hn::Load(f, weights);
  for (int i = 1; i < vectors; ++i) largest = hn::Max(largest, hn::Load(f, weights + i * kLanes));
  float max[R], base[R], change[kMaxBlockRows] = {};
  fold_lanes<R>(largest, max, [](float a, float b) { return a > b ? a : b; });
  for (int r = 0; r < R; ++r) {
    max[r] = std::max(max[r], tile.rows[r].max);
    base[r] = max[r] == kMinusInfinity ? 0.0f : max[r];  // no key yet: every weight is e^−inf = 0
    change[r] = std::max(tile.rows[r].max - base[r], -110.0f);
  }
  // Exp gives 0 below −104, and is never handed −inf.
  const Vec floor = hn::Set(f, -110.0f);
  const Vec bases = spread_rows<R>(base);
  Vec sums = hn::Zero(f);
  for (int i = 0; i < vectors; ++i) {
    const Vec weight = hn::Exp(f, hn::Max(hn::Sub(hn::Load(f, weights + i * kLanes), bases), floor));
    hn::Store(weight, f, weights + i * kLanes);
    sums = hn::Add(sums, weight);
  }
  float sum[R];
  fold_lanes<R>(sums, sum, [](float a, float b) { return a + b; });
  HWY_ALIGN float exps[std::max(kMaxBlockRows, kLanes)];
  for (int l = 0; l < R; l += kLanes) hn::Store(hn::Exp(f, hn::LoadU(f, change + l)), f, exps + l);
  for (int r = 0; r < R; ++r) {
    factors[r] = exps[r];
    tile.rows[r].sum = tile.rows[r].sum * factors[r] + sum[r];
    tile.rows[r].max = max[r];
  }
}

// --- Step 3: values ---

// A strip of Units units of Õ: value = value·factor + Σ weight·v over the tile's tokens.
template <class Kv, int R, int Units>
HWY_INLINE void value_strip(const Tile& tile, int unit, const float* HWY_RESTRICT factors, LineStream& next) {
  using Element = typename Kv::Element;
  const Floats f;
  float* HWY_RESTRICT values = tile.values + unit * kUnit;
  const float* HWY_RESTRICT weights = tile.weights;
  int start[Units];
  for (int u = 0; u < Units; ++u) start[u] = unit_start(tile.head_dim_v, unit + u);
  Vec acc[R * Units * 2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Vec factor = hn::Set(f, factors[r]);
#pragma GCC unroll 16
    for (int j = 0; j < Units * 2; ++j) acc[r * Units * 2 + j] = hn::Mul(factor, hn::Load(f, values + r * tile.value_stride + j * kLanes));
  }
  for (int t = 0; t < tile.tokens; ++t) {
    const Element* row = reinterpret_cast<const Element*>(tile.v + tile.v_offsets[t]);
    Vec part[Units * 2];
#pragma GCC unroll 16
    for (int u = 0; u < Units; ++u) {
      Kv::load(row + start[u], part[2 * u], part[2 * u + 1]);
      fetch_unit<Kv>(next, start[u]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec weight = hn::Set(f, weights[t * R + r]);
#pragma GCC unroll 16
      for (int j = 0; j < Units * 2; ++j) acc[r * Units * 2 + j] = hn::MulAdd(weight, part[j], acc[r * Units * 2 + j]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < Units * 2; ++j) hn::Store(acc[r * Units * 2 + j], f, values + r * tile.value_stride + j * kLanes);
  }
}

template <class Kv, int R>
HWY_INLINE void tile_values(const Tile& tile, const float* factors) {
  // Sixteen accumulators on 32 registers, eight on 16.
  constexpr int kStrip = kLanes >= 16 ? (R == 8 ? 1 : R == 4 ? 2 : 4) : (R == 4 ? 1 : R == 2 ? 2 : 4);
  const int units = units_of(tile.head_dim_v);
  LineStream next = *tile.next_v;
  int unit = 0;
  for (; unit + kStrip <= units; unit += kStrip) value_strip<Kv, R, kStrip>(tile, unit, factors, next);
  for (; unit < units; ++unit) value_strip<Kv, R, 1>(tile, unit, factors, next);
  *tile.next_v = next;
}

// --- The tile ---

template <class Kv, int R>
HWY_NOINLINE void run_block(const Tile& tile) {
  float factors[R];
  tile_scores<Kv, R>(tile);
  tile_weights<R>(tile, factors);
  tile_values<Kv, R>(tile, factors);
}

template <class Kv>
void run_tile(const Tile& tile) {
  if constexpr (kMaxRows >= 8) {
    if (tile.block_rows == 8) return run_block<Kv, 8>(tile);
  }
  if constexpr (kMaxRows >= 4) {
    if (tile.block_rows == 4) return run_block<Kv, 4>(tile);
  }
  if constexpr (kMaxRows >= 2) {
    if (tile.block_rows == 2) return run_block<Kv, 2>(tile);
  }
  run_block<Kv, 1>(tile);
}

// The smallest of 1, 2, 4, 8 that holds the rows.
inline int block_rows(int rows) {
  int block = 1;
  while (block < rows && block < kMaxRows) block *= 2;
  return block;
}

// Packed Q: [units, block_rows, unit] floats, scaled, zero in overlapped slots and padding rows.
template <class Kv>
void pack_q(const QBlock& block, void* packed) {
  const Floats f;
  const Vec scale = hn::Set(f, block.scale);
  const Overlap<Kv> overlap(block.head_dim);
  const int units = units_of(block.head_dim);
  float* out = static_cast<float*>(packed);
  for (int unit = 0; unit < units; ++unit) {
    for (int r = 0; r < block.block_rows; ++r, out += kUnit) {
      Vec a = hn::Zero(f), b = hn::Zero(f);
      if (r < block.rows) {
        Kv::load(static_cast<const typename Kv::Element*>(block.q) + block.row_offsets[r] + unit_start(block.head_dim, unit), a, b);
        if (unit == units - 1) overlap.clear(a, b);
      }
      hn::Store(hn::Mul(a, scale), f, out);
      hn::Store(hn::Mul(b, scale), f, out + kLanes);
    }
  }
}

// One row of O. A last unit that overlaps the one before writes the same numbers again.
template <class Kv>
void store_row(const float* values, float factor, int head_dim_v, void* o) {
  const Floats f;
  const Vec scale = hn::Set(f, factor);
  for (int unit = 0; unit < units_of(head_dim_v); ++unit) {
    const Vec a = hn::Mul(hn::Load(f, values + unit * kUnit), scale);
    const Vec b = hn::Mul(hn::Load(f, values + unit * kUnit + kLanes), scale);
    Kv::store(a, b, static_cast<typename Kv::Element*>(o) + unit_start(head_dim_v, unit));
  }
}

template <class Kv>
const TileKernel* tile_kernel() {
  static constexpr TileKernel kernel = {kMaxRows,    true,          block_rows,   padded_dims,  [](int, int) { return std::size_t{0}; },
                                        pack_q<Kv>, run_tile<Kv>, store_row<Kv>};
  return &kernel;
}

inline const TileKernel* select_kernel(DType kv_dtype, int, int, int) {
  switch (kv_dtype) {
    case DType::kFloat32: return tile_kernel<Float32>();
    case DType::kFloat16: return tile_kernel<Float16>();
    case DType::kBFloat16: return tile_kernel<BFloat16>();
  }
  return nullptr;
}

inline IsaKernels kernels() { return {hwy::TargetName(HWY_TARGET), select_kernel}; }

// Blocks of 8 or 16 rows for tile_amx.cpp.
inline void weights_step(const Tile& tile, float* factors) {
  if constexpr (kLanes == 16) {
    tile.block_rows == 16 ? tile_weights<16>(tile, factors) : tile_weights<8>(tile, factors);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace leanattn::cpu
HWY_AFTER_NAMESPACE();

#endif  // LEANATTN_TILE_INL_H_
