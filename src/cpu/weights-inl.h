// SPDX-License-Identifier: Apache-2.0
// The second step of a tile: scores become weights. Mask, soft-cap and ALiBi are uniform branches over one layout, weights[t·R + r], with
// all lanes in use for every number of rows R; then the online softmax (Milakov & Gimelshein, 2018).
#if defined(LEANATTN_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LEANATTN_WEIGHTS_INL_H_
#undef LEANATTN_WEIGHTS_INL_H_
#else
#define LEANATTN_WEIGHTS_INL_H_
#endif

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "src/cpu/tile.h"
#include "src/cpu/units-inl.h"

HWY_BEFORE_NAMESPACE();
namespace leanattn::cpu {
namespace HWY_NAMESPACE {

// Lane l of a vector of weights belongs to row l % R and to the vector's token l / R.

// v[l ^ Distance] in lane l.
template <int Distance>
HWY_INLINE Vec swap_lanes(Vec v) {
#if HWY_TARGET == HWY_SCALAR
  return v;
#else
  if constexpr (Distance == 1) return hn::Shuffle2301(v);
  if constexpr (Distance == 2) return hn::Shuffle1032(v);
  if constexpr (Distance == 4) return hn::SwapAdjacentBlocks(v);
  if constexpr (Distance == 8) return hn::ConcatLowerUpper(Floats(), v, v);
  return v;
#endif
}

// Every lane gets the combination of all lanes of its row.
template <int R, int Distance = kLanes / 2, class Combine>
HWY_INLINE Vec fold_lanes(Vec v, Combine combine) {
  if constexpr (Distance >= R) {
    return fold_lanes<R, Distance / 2>(combine(v, swap_lanes<Distance>(v)), combine);
  } else {
    return v;
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
HWY_NOINLINE void hide_masked(const Tile& tile, float* weights) {
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < tile.tokens; ++t) {
      if (!(tile.visible[r] >> t & 1)) weights[t * R + r] = kMinusInfinity;
    }
  }
}

// softcap·tanh(s / softcap), then −slope·|position − t|.
template <int R>
HWY_NOINLINE void bend_scores(const Tile& tile, int head, float* weights, int vectors) {
  const Floats f;
  constexpr int kTokens = kLanes / R;
  if (tile.softcap > 0.0f) {
    const Vec cap = hn::Set(f, tile.softcap);
    const Vec inverse = hn::Set(f, tile.scale / tile.softcap);
    for (int i = 0; i < vectors; ++i) {
      float* p = weights + i * kLanes;
      const Vec x = hn::Mul(hn::Load(f, p), inverse);
      // Tanh rounds to an integer, which for a NaN is undefined where a lane is a plain float. The NaN goes past it.
      const auto is_number = hn::Eq(x, x);
      const Vec bent = hn::Mul(cap, hn::Tanh(f, hn::IfThenElseZero(is_number, x)));
      hn::Store(hn::IfThenElse(is_number, bent, x), f, p);
    }
  } else if (tile.scale != 1.0f) {
    const Vec scale = hn::Set(f, tile.scale);
    for (int i = 0; i < vectors; ++i) {
      float* p = weights + i * kLanes;
      hn::Store(hn::Mul(hn::Load(f, p), scale), f, p);
    }
  }
  if (tile.slopes) {
    const Vec slope = spread_rows<R>(tile.slopes + head * R);
    HWY_ALIGN float token_of_lane[kLanes];
    for (int l = 0; l < kLanes; ++l) token_of_lane[l] = static_cast<float>(l / R);
    Vec distance = hn::Sub(spread_rows<R>(tile.distances), hn::Load(f, token_of_lane));
    const Vec step = hn::Set(f, static_cast<float>(kTokens));
    for (int i = 0; i < vectors; ++i) {
      float* p = weights + i * kLanes;
      hn::Store(hn::NegMulAdd(slope, hn::Abs(distance), hn::Load(f, p)), f, p);
      distance = hn::Sub(distance, step);
    }
  }
}

// e^x for x ≤ 0, to a relative error of 2·10⁻⁷·(1 + |x|/2); 0 below −87, where results cease to be normal; NaN for NaN. Half the work of
// Highway's, which takes any x.
HWY_INLINE Vec exp_of_negative(Vec x) {
  const Floats f;
  const hn::RebindToSigned<Floats> ints;
  const auto vanishes = hn::Lt(x, hn::Set(f, -87.0f));
  // x·log₂e = whole + rest. In this sum the last bit is 1: it is rounded to whole, which stands in the lowest bits.
  const Vec to_whole = hn::Set(f, 12582912.0f);  // 1.5·2^23
  const Vec log2e = hn::Set(f, 1.44269504f);
  const Vec rounded = hn::MulAdd(x, log2e, to_whole);
  const Vec rest = hn::MulSub(x, log2e, hn::Sub(rounded, to_whole));
  Vec power = hn::Set(f, 1.54035304e-4f);
  power = hn::MulAdd(power, rest, hn::Set(f, 1.33335581e-3f));
  power = hn::MulAdd(power, rest, hn::Set(f, 9.61812911e-3f));
  power = hn::MulAdd(power, rest, hn::Set(f, 5.55041087e-2f));
  power = hn::MulAdd(power, rest, hn::Set(f, 2.40226507e-1f));
  power = hn::MulAdd(power, rest, hn::Set(f, 6.93147181e-1f));
  power = hn::MulAdd(power, rest, hn::Set(f, 1.0f));
  // A product, because adding to its exponent could make a number of a NaN.
  const auto exponent = hn::Add(hn::ShiftLeft<23>(hn::BitCast(ints, rounded)), hn::Set(ints, 127 << 23));
  return hn::IfThenZeroElse(vanishes, hn::Mul(power, hn::BitCast(f, exponent)));
}

// Scores become e^(s − m); (m, ℓ) of each row move on; factors[r] = e^(m_old − m_new).
template <int R>
HWY_INLINE void head_weights(const Tile& tile, int head, float* HWY_RESTRICT factors, LineStream& next) {
  const Floats f;
  constexpr int kTokens = kLanes / R;
  const int vectors = (tile.tokens + kTokens - 1) / kTokens;
  float* weights = tile.weights + head * weights_stride(R);
  RowPartial* rows = tile.rows + static_cast<std::int64_t>(head) * tile.head_rows;
  if (tile.softcap > 0.0f || tile.slopes || tile.scale != 1.0f) bend_scores<R>(tile, head, weights, vectors);
  if (tile.visible) hide_masked<R>(tile, weights);
  for (int i = tile.tokens * R; i < vectors * kLanes; ++i) weights[i] = kMinusInfinity;

  HWY_ALIGN float lanes[3][kLanes];
  for (int l = 0; l < kLanes; ++l) lanes[0][l] = rows[l % R].max;
  const Vec old_max = hn::Load(f, lanes[0]);
  Vec largest = hn::Load(f, weights);
  for (int i = 1; i < vectors; ++i) largest = hn::Max(largest, hn::Load(f, weights + i * kLanes));
  const Vec max = hn::Max(old_max, fold_lanes<R>(largest, [](Vec a, Vec b) { return hn::Max(a, b); }));
  // No key yet: against 0 every weight is e^−inf = 0.
  const Vec base = hn::IfThenZeroElse(hn::Eq(max, hn::Set(f, kMinusInfinity)), max);
  Vec sums = hn::Zero(f);
  for (int i = 0; i < vectors; ++i) {
    const Vec weight = exp_of_negative(hn::Sub(hn::Load(f, weights + i * kLanes), base));
    hn::Store(weight, f, weights + i * kLanes);
    sums = hn::Add(sums, weight);
    next.fetch();
  }
  hn::Store(max, f, lanes[0]);
  hn::Store(exp_of_negative(hn::Sub(old_max, base)), f, lanes[1]);
  hn::Store(fold_lanes<R>(sums, [](Vec a, Vec b) { return hn::Add(a, b); }), f, lanes[2]);
  for (int r = 0; r < R; ++r) {
    factors[r] = lanes[1][r];
    rows[r].sum = rows[r].sum * factors[r] + lanes[2][r];
    rows[r].max = lanes[0][r];
  }
}

// Blocks of 8 or 16 rows for tile_amx.cpp.
inline void weights_step(const Tile& tile, float* factors) {
  if constexpr (kLanes == 16) {
    LineStream lines_v = *tile.lines_v;
    for (int head = 0; head < tile.heads; ++head) {
      float* to = factors + head * kMaxBlockRows;
      tile.block_rows == 16 ? head_weights<16>(tile, head, to, lines_v) : head_weights<8>(tile, head, to, lines_v);
    }
    *tile.lines_v = lines_v;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace leanattn::cpu
HWY_AFTER_NAMESPACE();

#endif  // LEANATTN_WEIGHTS_INL_H_
