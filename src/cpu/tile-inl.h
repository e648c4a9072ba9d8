// SPDX-License-Identifier: Apache-2.0
// The CPU tile kernel, one source for every instruction set (Google Highway). Read bottom up: run_tile is the story.
//
// What one call does: up to 32 tokens of some KV heads against a block of R packed rows each (R = 1, 2, 4, 8, 16, at most N).
//   scores   N = lanes of a float vector. N running dot products live in registers: R rows × N/R tokens. A K row is loaded and widened to
//            float32 once for all R rows. The N vectors are then summed by transposition (15 adds for N = 16), which leaves one vector of
//            scores; weights[t·R + r] is the layout that falls out of it. With R = N a lane is a row and there is nothing to sum.
//   weights  the online softmax over that layout, lanes full for every R; mask, soft-cap and ALiBi are uniform branches.
//   values   R rows × a strip of dims of Õ live in registers while all tokens of the tile pass; a V row is widened once for all R rows.
// For each line of K that is read, one of this tile's V is fetched to L2; for each of V, one of the next K (LineStream).
// What bounds it: reading K and V up to group 8 or so; float32 multiply-adds beyond.
#if defined(LEANATTN_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LEANATTN_TILE_INL_H_
#undef LEANATTN_TILE_INL_H_
#else
#define LEANATTN_TILE_INL_H_
#endif

#include <algorithm>

#include "hwy/highway.h"
#include "src/cpu/tile.h"
#include "src/cpu/units-inl.h"
#include "src/cpu/weights-inl.h"

HWY_BEFORE_NAMESPACE();
namespace leanattn::cpu {
namespace HWY_NAMESPACE {

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
HWY_INLINE void score_unit(const typename Kv::Element* const* HWY_RESTRICT rows, int start, const float* HWY_RESTRICT q,
                           Vec* HWY_RESTRICT acc, const Overlap<Kv>* overlap, LineStream& next) {
  const Floats f;
  constexpr int kTokens = kLanes / R;
  const auto load_k = [&](int i) HWY_ATTR {
    const Unit k = Kv::load(rows[i] + start);
    fetch_unit<Kv>(next, start);
    return overlap ? overlap->clear(k) : k;
  };
  const auto load_q = [&](int r) HWY_ATTR { return Unit{hn::Load(f, q + r * kUnit), hn::Load(f, q + r * kUnit + kLanes)}; };
  const auto add = [&](int i, int r, const Unit& k, const Unit& row)
                       HWY_ATTR { acc[i * R + r] = hn::MulAdd(k.b, row.b, hn::MulAdd(k.a, row.a, acc[i * R + r])); };
  // The smaller side stays in registers while the other passes by.
  if constexpr (kTokens > R) {
    Unit held[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) held[r] = load_q(r);
#pragma GCC unroll 16
    for (int i = 0; i < kTokens; ++i) {
      const Unit k = load_k(i);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) add(i, r, k, held[r]);
    }
  } else {
    Unit held[kTokens];
#pragma GCC unroll 16
    for (int i = 0; i < kTokens; ++i) held[i] = load_k(i);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Unit row = load_q(r);
#pragma GCC unroll 16
      for (int i = 0; i < kTokens; ++i) add(i, r, held[i], row);
    }
  }
}

// Floats from one widened K row to the next: constant, so that it costs no registers; no multiple of a page.
constexpr int kWideStride = 256 + 16;

// As many rows as lanes: a lane is a row, no sum is needed. K is widened once, then each of its numbers meets all rows at a time.
template <class Kv, int R>
HWY_INLINE void head_scores_by_lane(const Tile& tile, int head, LineStream& lines) {
  const Floats f;
  constexpr int kTokens = std::min(kLanes, kMinTileTokens);  // accumulators
  const float* q = reinterpret_cast<const float*>(tile.q + head * tile.q_head_bytes);
  const std::byte* k = tile.k + head * tile.k_head_bytes;
  float* weights = tile.weights + head * weights_stride(R);
  float* HWY_RESTRICT wide = reinterpret_cast<float*>(tile.extra);  // [kTokens, kWideStride]
  const int units = units_of(tile.head_dim), slots = units * kUnit;
  const Overlap<Kv> overlap(tile.head_dim);
  for (int t = 0; t < tile.tokens; t += kTokens) {
    for (int i = 0; i < kTokens; ++i) {
      const auto* row = reinterpret_cast<const typename Kv::Element*>(k + tile.k_offsets[std::min(t + i, tile.tokens - 1)]);
      for (int u = 0; u < units; ++u) {
        const int start = unit_start(tile.head_dim, u);
        Unit unit = Kv::load(row + start);
        fetch_unit<Kv>(lines, start);
        if (u == units - 1) unit = overlap.clear(unit);
        hn::Store(unit.a, f, wide + i * kWideStride + u * kUnit);
        hn::Store(unit.b, f, wide + i * kWideStride + u * kUnit + kLanes);
      }
    }
    Vec acc[kTokens];
#pragma GCC unroll 16
    for (int i = 0; i < kTokens; ++i) acc[i] = hn::Zero(f);
    for (int slot = 0; slot < slots; ++slot) {
      const Vec rows = hn::Load(f, q + slot * R);
#pragma GCC unroll 16
      for (int i = 0; i < kTokens; ++i) acc[i] = hn::MulAdd(hn::Set(f, wide[i * kWideStride + slot]), rows, acc[i]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kTokens; ++i) hn::Store(acc[i], f, weights + (t + i) * R);
  }
}

// weights[t·R + r] = q_r · k_t of one head for all tokens, rounded up to whole vectors with the last token.
template <class Kv, int R>
HWY_INLINE void head_scores(const Tile& tile, int head, LineStream& next) {
  using Element = typename Kv::Element;
  const Floats f;
  constexpr int kTokens = kLanes / R;
  const float* q = reinterpret_cast<const float*>(tile.q + head * tile.q_head_bytes);
  const std::byte* k = tile.k + head * tile.k_head_bytes;
  float* weights = tile.weights + head * weights_stride(R);
  const int whole_units = tile.head_dim / kUnit;
  const bool ragged_end = whole_units * kUnit != tile.head_dim;
  const Overlap<Kv> overlap(tile.head_dim);
  for (int t = 0; t < tile.tokens; t += kTokens) {
    const Element* rows[kTokens];
    for (int i = 0; i < kTokens; ++i) {
      rows[i] = reinterpret_cast<const Element*>(k + tile.k_offsets[std::min(t + i, tile.tokens - 1)]);
    }
    Vec acc[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) acc[i] = hn::Zero(f);
    for (int unit = 0; unit < whole_units; ++unit) score_unit<Kv, R>(rows, unit * kUnit, q + unit * R * kUnit, acc, nullptr, next);
    if (ragged_end) score_unit<Kv, R>(rows, tile.head_dim - kUnit, q + whole_units * R * kUnit, acc, &overlap, next);
    hn::Store(sum_by_transposition(acc), f, weights + t * R);
  }
}

// --- Step 3: values ---

// A strip of Units units of Õ: value = value·factor + Σ weight·v over the tile's tokens.
template <class Kv, int R, int Units>
HWY_INLINE void value_strip(const Tile& tile, int head, int unit, const float* HWY_RESTRICT factors, LineStream& next) {
  using Element = typename Kv::Element;
  const Floats f;
  const std::byte* v = tile.v + head * tile.v_head_bytes;
  float* HWY_RESTRICT values = tile.values + static_cast<std::int64_t>(head) * tile.head_rows * tile.value_stride + unit * kUnit;
  const float* HWY_RESTRICT weights = tile.weights + head * weights_stride(R);
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
    const Element* row = reinterpret_cast<const Element*>(v + tile.v_offsets[t]);
    Unit part[Units] = {};
#pragma GCC unroll 16
    for (int u = 0; u < Units; ++u) {
      part[u] = Kv::load(row + start[u]);
      fetch_unit<Kv>(next, start[u]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec weight = hn::Set(f, weights[t * R + r]);
#pragma GCC unroll 16
      for (int u = 0; u < Units; ++u) {
        Vec* to = acc + (r * Units + u) * 2;
        to[0] = hn::MulAdd(weight, part[u].a, to[0]);
        to[1] = hn::MulAdd(weight, part[u].b, to[1]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < Units * 2; ++j) hn::Store(acc[r * Units * 2 + j], f, values + r * tile.value_stride + j * kLanes);
  }
}

// One vector (Half 0 or 1) of a unit for as many rows as there are accumulators.
template <class Kv, int R, int Half>
HWY_INLINE void value_half(const Tile& tile, int head, int unit, const float* HWY_RESTRICT factors, LineStream& lines) {
  const Floats f;
  const std::byte* v = tile.v + head * tile.v_head_bytes;
  float* HWY_RESTRICT values =
      tile.values + static_cast<std::int64_t>(head) * tile.head_rows * tile.value_stride + unit * kUnit + Half * kLanes;
  const float* HWY_RESTRICT weights = tile.weights + head * weights_stride(R);
  const int start = unit_start(tile.head_dim_v, unit);
  Vec acc[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = hn::Mul(hn::Set(f, factors[r]), hn::Load(f, values + r * tile.value_stride));
  for (int t = 0; t < tile.tokens; ++t) {
    const Unit row = Kv::load(reinterpret_cast<const typename Kv::Element*>(v + tile.v_offsets[t]) + start);
    if constexpr (Half == 0) fetch_unit<Kv>(lines, start);
    const Vec part = Half == 0 ? row.a : row.b;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = hn::MulAdd(hn::Set(f, weights[t * R + r]), part, acc[r]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) hn::Store(acc[r], f, values + r * tile.value_stride);
}

template <class Kv, int R>
HWY_INLINE void head_values(const Tile& tile, int head, const float* factors, LineStream& next) {
  // Sixteen accumulators on 32 registers, eight on 16.
  constexpr int kAccumulators = kLanes >= 16 ? 16 : 8;
  constexpr int kStrip = std::clamp(kAccumulators / (2 * R), 1, 4);  // units
  const int units = units_of(tile.head_dim_v);
  if constexpr (R >= kAccumulators) {
    for (int unit = 0; unit < units; ++unit) {
      value_half<Kv, R, 0>(tile, head, unit, factors, next);
      value_half<Kv, R, 1>(tile, head, unit, factors, next);
    }
    return;
  }
  int unit = 0;
  for (; unit + kStrip <= units; unit += kStrip) value_strip<Kv, R, kStrip>(tile, head, unit, factors, next);
  for (; unit < units; ++unit) value_strip<Kv, R, 1>(tile, head, unit, factors, next);
}

// --- The tile ---

template <class Kv, int R>
HWY_NOINLINE void run_block(const Tile& tile) {
  float factors[kMaxTileHeads][R];
  LineStream lines_v = *tile.lines_v, next = *tile.next_k;
  for (int head = 0; head < tile.heads; ++head) {
    if constexpr (R == kLanes && R >= 8) {
      head_scores_by_lane<Kv, R>(tile, head, lines_v);
    } else {
      head_scores<Kv, R>(tile, head, lines_v);
    }
  }
  for (int head = 0; head < tile.heads; ++head) head_weights<R>(tile, head, factors[head], next);
  for (int head = 0; head < tile.heads; ++head) head_values<Kv, R>(tile, head, factors[head], next);
  *tile.lines_v = lines_v;
  *tile.next_k = next;
}

template <class Kv>
void run_tile(const Tile& tile) {
  if constexpr (kMaxRows >= 16) {
    if (tile.block_rows == 16) return run_block<Kv, 16>(tile);
  }
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

// The smallest power of two that holds the rows.
inline int block_rows(int rows) {
  int block = 1;
  while (block < rows && block < kMaxRows) block *= 2;
  return block;
}

// Packed Q: [units, block_rows, unit] floats or, where a lane is a row, [slots, block_rows]; scaled, zero in overlapped slots and in
// padding rows.
template <class Kv>
void pack_q(const QBlock& block, void* packed) {
  const Floats f;
  const Vec scale = hn::Set(f, block.scale);
  const Overlap<Kv> overlap(block.head_dim);
  const int units = units_of(block.head_dim);
  const bool by_lane = block.block_rows == kLanes && kLanes >= 8;
  float* packed_q = static_cast<float*>(packed);
  for (int unit = 0; unit < units; ++unit) {
    for (int r = 0; r < block.block_rows; ++r) {
      Unit row{hn::Zero(f), hn::Zero(f)};
      if (r < block.rows) {
        row = Kv::load(static_cast<const typename Kv::Element*>(block.q) + block.row_offsets[r] + unit_start(block.head_dim, unit));
        if (unit == units - 1) row = overlap.clear(row);
      }
      HWY_ALIGN float slots[kUnit];
      hn::Store(hn::Mul(row.a, scale), f, slots);
      hn::Store(hn::Mul(row.b, scale), f, slots + kLanes);
      if (by_lane) {
        for (int slot = 0; slot < kUnit; ++slot) packed_q[(unit * kUnit + slot) * block.block_rows + r] = slots[slot];
      } else {
        std::copy(slots, slots + kUnit, packed_q + (unit * block.block_rows + r) * kUnit);
      }
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
    Kv::store(Unit{a, b}, static_cast<typename Kv::Element*>(o) + unit_start(head_dim_v, unit));
  }
}

inline std::size_t extra_bytes(int, int) { return static_cast<std::size_t>(kLanes * kWideStride) * sizeof(float); }

template <class Kv>
const TileKernel* tile_kernel() {
  static constexpr TileKernel kernel = {kMinTileTokens, kMaxRows,   true,         block_rows,   padded_dims,
                                        extra_bytes,    pack_q<Kv>, run_tile<Kv>, store_row<Kv>};
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

}  // namespace HWY_NAMESPACE
}  // namespace leanattn::cpu
HWY_AFTER_NAMESPACE();

#endif  // LEANATTN_TILE_INL_H_
