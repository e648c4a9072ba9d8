// SPDX-License-Identifier: Apache-2.0
// float16 on AMX tile registers. A float16 is the sum of two bfloat16 exactly: 8 bits of it and 3. So K, Q and V are two terms each, and a
// product is four; P·V three: the product of both low terms is below the 16 bits of P. An infinite K or V may count as NaN.
#include "src/cpu/tile_amx.h"

#if defined(__x86_64__) && defined(__linux__)

#include <algorithm>
#include <bit>

#include "numeric.h"

namespace leanattn::cpu {
namespace {

// Two turns of tiles of K or V, [2 terms, 2] each: one is read while the next is written.
constexpr int kTurnBytes = 4 * kTileBytes;

std::byte* terms_of(const Tile& tile, int dim) { return tile.extra + kWeightTermsBytes + dim / 32 % 2 * kTurnBytes; }

// Scores from Q's low term, as Tile::weights.
float* low_scores_of(const Tile& tile) { return reinterpret_cast<float*>(tile.extra + kWeightTermsBytes + 2 * kTurnBytes); }

std::size_t extra_bytes(int, int) { return kWeightTermsBytes + 2 * kTurnBytes + weights_stride(kMaxBlockRows) * sizeof(float); }

// Float16 a and b as bfloat16 pairs (a, b) in one lane: their upper 8 bits, and what is left.
struct Terms {
  __m512i high, low;
};

LEANATTN_AMX inline Terms split_halves(const std::byte* a, const std::byte* b) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const __m512 x = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)));
  const __m512 y = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
  const __m512i x_high = _mm512_and_si512(_mm512_castps_si512(x), upper), y_high = _mm512_and_si512(_mm512_castps_si512(y), upper);
  const __m512i x_low = _mm512_castps_si512(_mm512_sub_ps(x, _mm512_castsi512_ps(x_high)));
  const __m512i y_low = _mm512_castps_si512(_mm512_sub_ps(y, _mm512_castsi512_ps(y_high)));
  return {_mm512_or_si512(_mm512_srli_epi32(x_high, 16), y_high), _mm512_or_si512(_mm512_srli_epi32(x_low, 16), y_low)};
}

// Dims i and i + 16 of 32 stand side by side, here as in packed Q.
LEANATTN_AMX void head_scores(const Tile& tile, int head, LineStream& lines_v) {
  const int block_rows = tile.block_rows;
  const std::byte* k = tile.k + head * tile.k_head_bytes;
  const std::byte* q = tile.q + head * tile.q_head_bytes;
  float* weights = tile.weights + head * weights_stride(block_rows);
  float* low_scores = low_scores_of(tile);
  const int q_bytes = 16 * block_rows * 4;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const std::byte* rows[kAmxTokens];  // past the end they repeat the last; the weights step ignores them
  for (int t = 0; t < kAmxTokens; ++t) rows[t] = k + tile.k_offsets[std::min(t, tile.tokens - 1)];
  // A quarter of the conversion of 32 dims stands between the products of the 32 before, so that both units are busy.
  const auto convert = [&](int dim, int quarter) LEANATTN_AMX {
    if (dim == tile.head_dim) return;
    std::byte* to = terms_of(tile, dim) + quarter * 8 * 64;
#pragma GCC unroll 8
    for (int t = 0; t < 8; ++t) {
      const std::byte* row = rows[quarter * 8 + t] + dim * 2;
      const Terms terms = split_halves(row, row + 32);
      if (t % 4 != 3) lines_v.fetch();
      _mm512_store_si512(to + t * 64, terms.high);
      _mm512_store_si512(to + 2 * kTileBytes + t * 64, terms.low);
    }
  };
  for (int quarter = 0; quarter < 4; ++quarter) convert(0, quarter);
  for (int dim = 0; dim < tile.head_dim; dim += 32, q += 2 * q_bytes) {
    const std::byte* from = terms_of(tile, dim);
    _tile_loadd(4, q, block_rows * 4);
    _tile_loadd(7, q + q_bytes, block_rows * 4);
    _tile_loadd(5, from, 64);
    _tile_dpbf16ps(0, 5, 4);
    _tile_dpbf16ps(2, 5, 7);
    convert(dim + 32, 0);
    _tile_loadd(6, from + kTileBytes, 64);
    _tile_dpbf16ps(1, 6, 4);
    _tile_dpbf16ps(3, 6, 7);
    convert(dim + 32, 1);
    _tile_loadd(5, from + 2 * kTileBytes, 64);
    _tile_dpbf16ps(0, 5, 4);
    _tile_dpbf16ps(2, 5, 7);
    convert(dim + 32, 2);
    _tile_loadd(6, from + 3 * kTileBytes, 64);
    _tile_dpbf16ps(1, 6, 4);
    _tile_dpbf16ps(3, 6, 7);
    convert(dim + 32, 3);
  }
  _tile_stored(0, weights, block_rows * 4);
  _tile_stored(2, low_scores, block_rows * 4);
  _tile_stored(1, weights + 16 * block_rows, block_rows * 4);
  _tile_stored(3, low_scores + 16 * block_rows, block_rows * 4);
  for (int i = 0; i < kAmxTokens * block_rows; i += 16) {
    _mm512_store_ps(weights + i, _mm512_add_ps(_mm512_load_ps(weights + i), _mm512_load_ps(low_scores + i)));
  }
}

LEANATTN_AMX void head_values(const Tile& tile, int head, const float* factors, LineStream& next_k) {
  float* values = tile.values + static_cast<std::int64_t>(head) * tile.head_rows * tile.value_stride;
  const std::byte* weights = weight_terms(tile, head);
  const std::byte* v = tile.v + head * tile.v_head_bytes;
  alignas(64) static constexpr std::byte kZeros[256 * sizeof(Element)] = {};
  scale_values(tile, values, factors);
  const std::int64_t row_bytes = tile.value_stride * static_cast<std::int64_t>(sizeof(float));
  _tile_loadd(4, weights, 64);
  _tile_loadd(5, weights + kTileBytes, 64);
  const std::byte* rows[kAmxTokens];
  for (int t = 0; t < kAmxTokens; ++t) rows[t] = t < tile.tokens ? v + tile.v_offsets[t] : kZeros;
  const auto convert = [&](int dim, int quarter) LEANATTN_AMX {
    if (dim == tile.head_dim_v) return;
    std::byte* to = terms_of(tile, dim) + quarter * 4 * 64;
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair) {
      const std::byte* even = rows[quarter * 8 + 2 * pair] + dim * 2;
      const std::byte* odd = rows[quarter * 8 + 2 * pair + 1] + dim * 2;
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const Terms terms = split_halves(even + half * 32, odd + half * 32);
        next_k.fetch();
        _mm512_store_si512(to + half * kTileBytes + pair * 64, terms.high);
        _mm512_store_si512(to + (2 + half) * kTileBytes + pair * 64, terms.low);
      }
    }
  };
  for (int quarter = 0; quarter < 4; ++quarter) convert(0, quarter);
  for (int dim = 0; dim < tile.head_dim_v; dim += 32) {
    const std::byte* from = terms_of(tile, dim);
    _tile_loadd(0, values + dim, row_bytes);
    _tile_loadd(1, values + dim + 16, row_bytes);
    _tile_loadd(6, from, 64);
    _tile_loadd(7, from + kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    convert(dim + 32, 0);
    _tile_dpbf16ps(0, 5, 6);
    _tile_dpbf16ps(1, 5, 7);
    convert(dim + 32, 1);
    _tile_loadd(6, from + 2 * kTileBytes, 64);
    _tile_loadd(7, from + 3 * kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    convert(dim + 32, 2);
    _tile_stored(0, values + dim, row_bytes);
    _tile_stored(1, values + dim + 16, row_bytes);
    convert(dim + 32, 3);
  }
}

// [head_dim / 32, 2 terms, 16 pairs of dims, block_rows, 2] bfloat16, zero in padding rows.
void pack_q(const QBlock& block, void* packed) {
  Element* out = static_cast<Element*>(packed);
  for (int dim = 0; dim < block.head_dim; dim += 32) {
    for (int term = 0; term < 2; ++term) {
      for (int pair = 0; pair < 16; ++pair) {
        for (int r = 0; r < block.block_rows; ++r) {
          for (int i = 0; i < 2; ++i) {
            const float q = r < block.rows ? load_as_float(block.q, DType::kFloat16, block.row_offsets[r] + dim + pair + 16 * i) : 0.0f;
            const float high = float_from_bfloat16(static_cast<Element>(std::bit_cast<std::uint32_t>(q) >> 16));
            *out++ = static_cast<Element>(std::bit_cast<std::uint32_t>(term == 0 ? high : q - high) >> 16);
          }
        }
      }
    }
  }
}

LEANATTN_AMX void store_row(const float* values, float factor, int head_dim_v, void* o) {
  const __m512 scale = _mm512_set1_ps(factor);
  for (int dim = 0; dim < head_dim_v; dim += 16) {
    const __m512 value = _mm512_mul_ps(scale, _mm512_load_ps(values + dim));
    const __m256i halves = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<Element*>(o) + dim), halves);
  }
}

}  // namespace

const TileKernel kAmxFloat16 = {
    kAmxTokens, 16, false, amx_block_rows, amx_padded_dims, extra_bytes, pack_q, run_amx_tile<head_scores, head_values>, store_row};

}  // namespace leanattn::cpu

#endif
