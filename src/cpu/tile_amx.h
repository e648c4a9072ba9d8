// SPDX-License-Identifier: Apache-2.0
// The tile kernel on AMX tile registers: what its dtypes share. Same three steps as tile-inl.h, whose weights step it takes.
//
//   scores   S[16 tokens, R rows] = K·Qᵀ: K is tile operand A (16 rows of 32 dims), Q is packed once a segment as operand B (pairs of dims
//            side by side).
//   weights  as everywhere, R = 8 or 16 rows a token.
//   values   Õ[R rows, 16 dims] += P·V over 32 tokens: P is transposed to rows of tokens and split into two bfloat16 terms (16 bits of the
//            weight: the product is as good as float32's); V's tokens are interleaved in pairs, as operand B wants them.
// head_dim must be a multiple of 32 (operand A's row), head_dim_v too (one load of V).
#pragma once

#include "src/cpu/tile.h"

#if defined(__x86_64__) && defined(__linux__)

// g++ 12 takes the undefined values inside its own AVX-512 intrinsics for ours (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

namespace leanattn::cpu {

#define LEANATTN_AMX __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16")))

constexpr int kAmxTokens = kMaxTileTokens;  // of one tile
static_assert(kAmxTokens == 32, "a product of P and V takes 32 tokens");
constexpr int kTileBytes = 1024;  // of a tile register: 16 rows of 64 bytes
using Element = std::uint16_t;    // a bfloat16 or float16

// What _tile_loadconfig reads: Intel SDM, "TILECFG".
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  void shape(int tile, int tile_rows, int bytes) {
    rows[tile] = static_cast<std::uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<std::uint16_t>(bytes);
  }
};

// 0 … 3 scores of two blocks of 16 tokens, by the terms of Q · 4, 7 the terms of Q · 5, 6 K of both blocks.
inline TileConfig scores_config(int block_rows) {
  TileConfig config;
  for (int tile : {0, 1, 2, 3, 4, 7}) config.shape(tile, 16, block_rows * 4);
  for (int tile : {5, 6}) config.shape(tile, 16, 64);
  return config;
}

// 0, 1 two blocks of 16 dims of Õ · 4, 5 the terms of P · 6, 7 V of both blocks. The same as scores_config for 16 rows.
inline TileConfig values_config(int block_rows) {
  TileConfig config;
  for (int tile : {0, 1, 2, 3, 4, 5}) config.shape(tile, block_rows, 64);
  for (int tile : {6, 7}) config.shape(tile, 16, 64);
  return config;
}

// Scratch of every dtype: the terms of P, [heads, 2 terms] of [16 rows, 32 tokens] bfloat16. A dtype's own stands behind it.
constexpr std::size_t kWeightTermsBytes = std::size_t{kMaxTileHeads} * 2 * kTileBytes;
inline std::byte* weight_terms(const Tile& tile, int head) { return tile.extra + head * 2 * kTileBytes; }

// Fetches some lines. One by one on purpose: a run of prefetches without anything between fills the fill buffers and stalls.
LEANATTN_AMX inline void fetch(LineStream& lines, int count) {
  for (int i = 0; i < count; ++i) lines.fetch();
}

// out[i] lane j = in[j] lane i.
LEANATTN_AMX inline void transpose(const __m512i* in, __m512i* out) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  // b[4g + c] holds column 4·block + c of rows 4g … 4g + 3 in each 128-bit block.
  for (int c = 0; c < 4; ++c) {
    const __m512i low01 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x44), high01 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xee);
    const __m512i low23 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x44), high23 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xee);
    out[c] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    out[4 + c] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    out[8 + c] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    out[12 + c] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
}

// Two tokens' bfloat16 in one lane a row: upper halves of `even`, `odd`.
LEANATTN_AMX inline __m512i pair_up(__m512i even, __m512i odd) {
  return _mm512_or_si512(_mm512_srli_epi32(even, 16), _mm512_and_si512(odd, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

// The weights [tokens, block_rows] as two bfloat16 terms in rows of tokens; zero past the last token.
LEANATTN_AMX inline void split_weights(const Tile& tile, const float* weights, std::byte* to, LineStream& lines_v) {
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  __m512i pairs[2][16];
  for (int pair = 0; pair < 16; ++pair) {
    __m512 token[2];
    for (int i = 0; i < 2; ++i) {
      const int t = 2 * pair + i;
      const __mmask16 rows = t < tile.tokens ? static_cast<__mmask16>((1u << tile.block_rows) - 1) : __mmask16{0};
      token[i] = _mm512_maskz_loadu_ps(rows, weights + t * tile.block_rows);
    }
    __m512i term[2][2];
    for (int i = 0; i < 2; ++i) {
      term[0][i] = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(token[i]), half), upper);
      const __m512 rest = _mm512_sub_ps(token[i], _mm512_castsi512_ps(term[0][i]));
      term[1][i] = _mm512_add_epi32(_mm512_castps_si512(rest), half);
    }
    lines_v.fetch();
    pairs[0][pair] = pair_up(term[0][0], term[0][1]);
    pairs[1][pair] = pair_up(term[1][0], term[1][1]);
  }
  for (int i = 0; i < 2; ++i) {
    __m512i rows[16];
    transpose(pairs[i], rows);
    for (int r = 0; r < tile.block_rows; ++r) _mm512_store_si512(to + i * kTileBytes + r * 64, rows[r]);
  }
}

LEANATTN_AMX inline void scale_values(const Tile& tile, float* values, const float* factors) {
  for (int r = 0; r < tile.block_rows; ++r) {
    if (factors[r] == 1.0f) continue;
    const __m512 factor = _mm512_set1_ps(factors[r]);
    for (int dim = 0; dim < tile.head_dim_v; dim += 16) {
      float* at = values + r * tile.value_stride + dim;
      _mm512_store_ps(at, _mm512_mul_ps(factor, _mm512_load_ps(at)));
    }
  }
}

// kScores, kValues: the first and the third step of one head of a dtype.
template <void (*kScores)(const Tile&, int head, LineStream& lines_v),
          void (*kValues)(const Tile&, int head, const float* factors, LineStream& next_k)>
LEANATTN_AMX void run_amx_tile(const Tile& tile) {
  const TileConfig configs[2] = {scores_config(tile.block_rows), values_config(tile.block_rows)};
  float factors[kMaxTileHeads * kMaxBlockRows];
  _tile_loadconfig(&configs[0]);
  LineStream lines_v = *tile.lines_v;
  for (int head = 0; head < tile.heads; ++head) kScores(tile, head, lines_v);
  *tile.lines_v = lines_v;
  avx3_weights_step()(tile, factors);
  lines_v = *tile.lines_v;
  for (int head = 0; head < tile.heads; ++head) {
    split_weights(tile, tile.weights + head * weights_stride(tile.block_rows), weight_terms(tile, head), lines_v);
  }
  *tile.lines_v = lines_v;
  if (tile.block_rows < 16) _tile_loadconfig(&configs[1]);
  LineStream next_k = *tile.next_k;
  for (int head = 0; head < tile.heads; ++head) kValues(tile, head, factors + head * kMaxBlockRows, next_k);
  *tile.next_k = next_k;
  _tile_release();
}

// Rows of the block that takes so many.
inline int amx_block_rows(int rows) { return rows <= 8 ? 8 : 16; }

inline int amx_padded_dims(int dims) { return dims; }

// tile_amx_f16.cpp.
extern const TileKernel kAmxFloat16;

}  // namespace leanattn::cpu

#endif
