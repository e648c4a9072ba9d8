// SPDX-License-Identifier: Apache-2.0
// The tile kernel on AMX tile registers, for bfloat16. Same three steps as tile-inl.h, whose weights step it shares.
//
//   scores   S[16 tokens, R rows] = K·Qᵀ: K is tile operand A as it lies in memory (16 rows of 32 dims), Q is packed once a segment as
//            operand B (pairs of dims side by side).
//   weights  as everywhere, R = 8 or 16 rows a token.
//   values   Õ[R rows, 16 dims] += P·V over 32 tokens: P is transposed to rows of tokens and split into two bfloat16 terms (16 bits of the
//            weight: the product is as good as float32's); V's tokens are interleaved in pairs, as operand B wants them.
// For more than four rows this is faster than the vector units (docs/cpu.md). Subnormal inputs count as zero. head_dim must be a multiple
// of 32 (operand A's row), head_dim_v too (one load of V).
#include "src/cpu/tile.h"

#if defined(__x86_64__) && defined(__linux__)

// g++ 12 takes the undefined values inside its own AVX-512 intrinsics for ours (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

namespace leanattn::cpu {
namespace {

#define LEANATTN_AMX __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16")))

constexpr int kTokens = kMaxTileTokens;  // of one tile
static_assert(kTokens == 32, "a product of P and V takes 32 tokens");
constexpr int kTileBytes = 1024;  // of a tile register: 16 rows of 64 bytes
using Element = std::uint16_t;

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

// 0, 1 scores of two blocks of 16 tokens · 2 Q · 3, 4 K of both blocks.
TileConfig scores_config(int block_rows) {
  TileConfig config;
  for (int tile : {0, 1, 2}) config.shape(tile, 16, block_rows * 4);
  for (int tile : {3, 4}) config.shape(tile, 16, 64);
  return config;
}

// 0, 1 two blocks of 16 dims of Õ · 2, 3 V of both blocks · 6, 7 the terms of P.
TileConfig values_config(int block_rows) {
  TileConfig config;
  for (int tile : {0, 1, 6, 7}) config.shape(tile, block_rows, 64);
  for (int tile : {2, 3}) config.shape(tile, 16, 64);
  return config;
}

constexpr std::size_t row_copy_bytes(int head_dim) { return static_cast<std::size_t>(head_dim) * 16 * sizeof(Element); }

// Scratch.
struct Scratch {
  std::byte* weights;  // [heads, 2 terms] of P: [16 rows, 32 tokens] bfloat16
  std::byte* pairs;    // V of one head: [head_dim_v / 16, 16 pairs of tokens, 16 dims, 2] bfloat16
  std::byte* rows[2];  // [16, head_dim] K rows of one head that do not lie at one distance, or are too few

  explicit Scratch(const Tile& tile) {
    weights = tile.extra;
    pairs = weights + kMaxTileHeads * 2 * kTileBytes;
    rows[0] = pairs + tile.head_dim_v / 16 * kTileBytes;
    rows[1] = rows[0] + row_copy_bytes(tile.head_dim);
  }
};

std::size_t extra_bytes(int head_dim, int head_dim_v) {
  return (kMaxTileHeads * 2 + static_cast<std::size_t>(head_dim_v) / 16) * kTileBytes + 2 * row_copy_bytes(head_dim);
}

// Fetches some lines. One by one on purpose: a run of prefetches without anything between fills the fill buffers and stalls.
LEANATTN_AMX inline void fetch(LineStream& lines, int count) {
  for (int i = 0; i < count; ++i) lines.fetch();
}

// --- Step 1: scores ---

// 16 rows of K at one distance: where they begin and how far they are apart.
struct KRows {
  const std::byte* at;
  std::int64_t stride;
};

// Rows first … first + 15 of one head, as they lie or, where they are fewer or scattered, copied together.
LEANATTN_AMX KRows k_rows(const Tile& tile, const std::byte* k, int first, std::byte* copy) {
  const std::int64_t* offsets = tile.k_offsets + first;
  const int count = std::min(16, tile.tokens - first);
  const std::int64_t stride = count > 1 ? offsets[1] - offsets[0] : 0;
  bool even = count == 16;
  for (int i = 1; i < count; ++i) even &= offsets[i] - offsets[i - 1] == stride;
  if (even) return {k + offsets[0], stride};
  const std::size_t bytes = static_cast<std::size_t>(tile.head_dim) * sizeof(Element);
  for (int i = 0; i < 16; ++i) {
    std::byte* to = copy + static_cast<std::size_t>(i) * bytes;
    i < count ? std::memcpy(to, k + offsets[i], bytes) : std::memset(to, 0, bytes);
  }
  return {copy, static_cast<std::int64_t>(bytes)};
}

// Both blocks of 16 tokens at once: a product waits 52 cycles for the one before it in the same register.
LEANATTN_AMX void head_scores(const Tile& tile, int head, const Scratch& scratch, LineStream& lines_v) {
  const int block_rows = tile.block_rows;
  const std::byte* k = tile.k + head * tile.k_head_bytes;
  const std::byte* q = tile.q + head * tile.q_head_bytes;
  float* weights = tile.weights + head * weights_stride(block_rows);
  const int q_bytes = 16 * block_rows * 4;  // of one Q tile
  const bool two = tile.tokens > 16;
  const KRows rows0 = k_rows(tile, k, 0, scratch.rows[0]);
  const KRows rows1 = two ? k_rows(tile, k, 16, scratch.rows[1]) : rows0;
  _tile_zero(0);
  _tile_zero(1);
  for (int dim = 0; dim < tile.head_dim; dim += 32) {
    _tile_loadd(2, q + dim / 32 * q_bytes, block_rows * 4);
    fetch(lines_v, 6);
    _tile_loadd(3, rows0.at + static_cast<std::size_t>(dim) * sizeof(Element), rows0.stride);
    fetch(lines_v, 6);
    _tile_dpbf16ps(0, 3, 2);
    if (!two) continue;
    fetch(lines_v, 6);
    _tile_loadd(4, rows1.at + static_cast<std::size_t>(dim) * sizeof(Element), rows1.stride);
    fetch(lines_v, 6);
    _tile_dpbf16ps(1, 4, 2);
  }
  _tile_stored(0, weights, block_rows * 4);
  if (two) _tile_stored(1, weights + 16 * block_rows, block_rows * 4);
}

// --- Step 3: values ---

// out[i] lane j = in[j] lane i.
LEANATTN_AMX void transpose(const __m512i* in, __m512i* out) {
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
LEANATTN_AMX void split_weights(const Tile& tile, const float* weights, std::byte* to, LineStream& lines_v) {
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

// Interleaves each two tokens of one head's V; zero past the last token.
LEANATTN_AMX void pair_values(const Tile& tile, const std::byte* v, const Scratch& scratch, LineStream& next_k) {
  alignas(64) static constexpr std::uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int pair = 0; pair < kTokens / 2; ++pair) {
    // Past the end: masked loads, which read nothing.
    const int even_token = std::min(2 * pair, tile.tokens - 1), odd_token = std::min(2 * pair + 1, tile.tokens - 1);
    const __mmask32 has_even = 2 * pair < tile.tokens ? ~0u : 0u, has_odd = 2 * pair + 1 < tile.tokens ? ~0u : 0u;
    const std::byte* even = v + tile.v_offsets[even_token];
    const std::byte* odd = v + tile.v_offsets[odd_token];
    std::byte* to = scratch.pairs + pair * 64;
    for (int dim = 0; dim < tile.head_dim_v; dim += 32, to += 2 * kTileBytes) {
      const __m512i x = _mm512_maskz_loadu_epi16(has_even, even + dim * 2);
      const __m512i y = _mm512_maskz_loadu_epi16(has_odd, odd + dim * 2);
      next_k.fetch();
      _mm512_store_si512(to, _mm512_permutex2var_epi16(x, low, y));
      _mm512_store_si512(to + kTileBytes, _mm512_permutex2var_epi16(x, high, y));
    }
  }
}

LEANATTN_AMX void scale_values(const Tile& tile, float* values, const float* factors) {
  for (int r = 0; r < tile.block_rows; ++r) {
    if (factors[r] == 1.0f) continue;
    const __m512 factor = _mm512_set1_ps(factors[r]);
    for (int dim = 0; dim < tile.head_dim_v; dim += 16) {
      float* at = values + r * tile.value_stride + dim;
      _mm512_store_ps(at, _mm512_mul_ps(factor, _mm512_load_ps(at)));
    }
  }
}

LEANATTN_AMX void head_values(const Tile& tile, int head, const float* factors, const Scratch& scratch, LineStream& next_k) {
  float* values = tile.values + static_cast<std::int64_t>(head) * tile.head_rows * tile.value_stride;
  const std::byte* weights = scratch.weights + head * 2 * kTileBytes;
  pair_values(tile, tile.v + head * tile.v_head_bytes, scratch, next_k);
  scale_values(tile, values, factors);
  const std::int64_t row_bytes = tile.value_stride * static_cast<std::int64_t>(sizeof(float));
  _tile_loadd(6, weights, 64);
  _tile_loadd(7, weights + kTileBytes, 64);
  for (int dim = 0; dim < tile.head_dim_v; dim += 32) {
    const std::byte* v = scratch.pairs + dim / 16 * kTileBytes;
    _tile_loadd(0, values + dim, row_bytes);
    _tile_loadd(1, values + dim + 16, row_bytes);
    fetch(next_k, 4);
    _tile_loadd(2, v, 64);
    fetch(next_k, 4);
    _tile_loadd(3, v + kTileBytes, 64);
    fetch(next_k, 4);
    _tile_dpbf16ps(0, 6, 2);
    _tile_dpbf16ps(1, 6, 3);
    fetch(next_k, 4);
    _tile_dpbf16ps(0, 7, 2);
    _tile_dpbf16ps(1, 7, 3);
    _tile_stored(0, values + dim, row_bytes);
    _tile_stored(1, values + dim + 16, row_bytes);
  }
}

// --- The tile ---

LEANATTN_AMX void run_tile(const Tile& tile) {
  const Scratch scratch(tile);
  const TileConfig configs[2] = {scores_config(tile.block_rows), values_config(tile.block_rows)};
  float factors[kMaxTileHeads * kMaxBlockRows];
  _tile_loadconfig(&configs[0]);
  LineStream lines_v = *tile.lines_v;
  for (int head = 0; head < tile.heads; ++head) head_scores(tile, head, scratch, lines_v);
  *tile.lines_v = lines_v;
  avx3_weights_step()(tile, factors);
  lines_v = *tile.lines_v;
  for (int head = 0; head < tile.heads; ++head) {
    split_weights(tile, tile.weights + head * weights_stride(tile.block_rows), scratch.weights + head * 2 * kTileBytes, lines_v);
  }
  *tile.lines_v = lines_v;
  _tile_loadconfig(&configs[1]);
  LineStream next_k = *tile.next_k;
  for (int head = 0; head < tile.heads; ++head) head_values(tile, head, factors + head * kMaxBlockRows, scratch, next_k);
  *tile.next_k = next_k;
  _tile_release();
}

int block_rows(int rows) { return rows <= 8 ? 8 : 16; }

// [head_dim / 32, 16 pairs of dims, block_rows, 2] bfloat16, zero in padding rows.
void pack_q(const QBlock& block, void* packed) {
  Element* out = static_cast<Element*>(packed);
  for (int pair = 0; pair < block.head_dim / 2; ++pair) {
    for (int r = 0; r < block.block_rows; ++r) {
      for (int i = 0; i < 2; ++i) {
        *out++ = r < block.rows ? static_cast<const Element*>(block.q)[block.row_offsets[r] + 2 * pair + i] : Element{0};
      }
    }
  }
}

// bfloat16_from_float of numeric.h, 16 at a time: the processor's own conversion would flush subnormal numbers.
LEANATTN_AMX void store_row(const float* values, float factor, int head_dim_v, void* o) {
  const __m512 scale = _mm512_set1_ps(factor);
  for (int dim = 0; dim < head_dim_v; dim += 16) {
    const __m512 value = _mm512_mul_ps(scale, _mm512_load_ps(values + dim));
    const __m512i raw = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(raw, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(raw, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i bits = _mm512_mask_or_epi32(rounded, is_nan, raw, _mm512_set1_epi32(0x400000));
    const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<Element*>(o) + dim), halves);
  }
}

constexpr TileKernel kKernel = {kTokens, 16, false, block_rows, [](int dims) { return dims; }, extra_bytes, pack_q, run_tile, store_row};

const TileKernel* select(DType kv_dtype, int head_dim, int head_dim_v, int rows) {
  // Up to four rows the vector units keep up with memory, and lose nothing to padding.
  constexpr int kFewRows = 4;
  if (kv_dtype == DType::kBFloat16 && head_dim % 32 == 0 && head_dim_v % 32 == 0 && rows > kFewRows) return &kKernel;
  return highway_kernels().front().select(kv_dtype, head_dim, head_dim_v, rows);
}

// The processor has AMX for bfloat16, and the system lets this process use it: Linux asks for a request (arch_prctl) before the first use.
bool amx_usable() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((edx & (kAmxBf16 | kAmxTile)) != (kAmxBf16 | kAmxTile)) return false;
  if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kAvx512Bf16 = 1u << 5;
  if (!(eax & kAvx512Bf16)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

const IsaKernels* amx_kernels() {
  static const IsaKernels kernels = {"AVX3+AMX", select};
  static const bool usable = avx3_weights_step() && amx_usable();
  return usable ? &kernels : nullptr;
}

}  // namespace leanattn::cpu

#else

namespace leanattn::cpu {
const IsaKernels* amx_kernels() { return nullptr; }
}  // namespace leanattn::cpu

#endif
